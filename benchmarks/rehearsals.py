"""Rehearse scripts whose truth is known: `python -m benchmarks.rehearsals [NAME ...]`.

The scripts of examples/, scripts in the manner of public ones, and mistakes that are planted into
one that has none. A script is right if its verdict has exactly the causes that it is known to have.
The variants of one script are rehearsed without the lost node, which takes longer than all other
faults.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

# In the manner of PyTorch's ImageNet example: a checkpoint with all state after each epoch.
CAREFUL = """
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

checkpoint = f"{sys.argv[1]}/checkpoint.pt"
dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(480, 8), torch.randint(3, (480,)))
held_out = TensorDataset(torch.randn(48, 8), torch.randint(3, (48,)))
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.7)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=48 // dist.get_world_size(), sampler=sampler, num_workers=0)
first = 0
if os.path.exists(checkpoint):
    state = torch.load(checkpoint, weights_only=False)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    torch.set_rng_state(state["random"])
    first = state["epoch"] + 1
for epoch in range(first, 3):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        for inputs, targets in DataLoader(held_out, batch_size=16):
            model(inputs)
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        state |= {"schedule": schedule.state_dict(), "random": torch.get_rng_state()}
        torch.save(state, f"{checkpoint}.tmp")
        os.replace(f"{checkpoint}.tmp", checkpoint)
    dist.barrier()
dist.destroy_process_group()
"""
# In the manner of nanoGPT: no loader, random crops, a checkpoint every ten steps.
CROPS = """
import os
import sys

import torch
from torch import nn

checkpoint = f"{sys.argv[1]}/checkpoint.pt"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.distributed.init_process_group("gloo")
torch.manual_seed(rank)
tokens = torch.arange(4000).remainder(97).pow(2).remainder(10)
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 10))
torch.manual_seed(1 + rank)
step = 0
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if os.path.exists(checkpoint):
    state = torch.load(checkpoint)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
wrapped = nn.parallel.DistributedDataParallel(model)
while step < 45:
    starts = torch.randint(3900, (8,))
    batch = torch.stack([tokens[start : start + 33] for start in starts])
    loss = nn.functional.cross_entropy(wrapped(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    step += 1
    if rank == 0 and step % 10 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, checkpoint + ".new")
        os.replace(checkpoint + ".new", checkpoint)
torch.distributed.destroy_process_group()
"""
COMMAND = """
import sys
from flyte_ddp.__main__ import main
from flyte_ddp.rehearsal import runs
if sys.argv[1] != "--nodes":
    del runs.TITLES["node"]
sys.exit(main(["rehearse", "--json", *sys.argv[2:]]))
"""
LOOP = "    for inputs, targets in loader:\n"
REPLACED = (
    'torch.save(state, f"{checkpoint}.tmp")\n        os.replace(f"{checkpoint}.tmp", checkpoint)'
)
LOAD = "if os.path.exists(checkpoint):\n"
MODEL = "nn.Sequential(nn.Linear(8, 16), "
SHUFFLED = [
    (
        "sampler = DistributedSampler(data)\n",
        "share = range(dist.get_rank(), 480, dist.get_world_size())\n",
    ),
    ("DataLoader(data, ", "DataLoader(torch.utils.data.Subset(data, share), "),
    ("sampler=sampler", "shuffle=True"),
    ("    sampler.set_epoch(epoch)\n", ""),
]
MID_EPOCH = [
    (
        "        schedule.step()\n",
        """        schedule.step()
        done += 1
        if done % 4 == 0 and dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"epoch": epoch - 1, "schedule": schedule.state_dict(), "done": done}
            state["random"] = torch.get_rng_state()
            torch.save(state, f"{checkpoint}.tmp")
            os.replace(f"{checkpoint}.tmp", checkpoint)
""",
    ),
    ('"epoch": epoch}', '"epoch": epoch, "done": 0}'),
    ("    first = state", "    skipped = state['done']\n    first = state"),
    ("first = 0\n", "first = skipped = 0\n"),
    (LOOP, "    done = skipped\n    for inputs, targets in list(loader)[skipped:]:\n"),
    ("    with torch.no_grad", "    skipped = 0\n    with torch.no_grad"),
]
# Name: changes of `CAREFUL`, and the causes.
VARIANTS: dict[str, tuple[list[tuple[str, str]], set[str]]] = {
    "epochs": ([], set()),
    "in mid-epoch": (MID_EPOCH, set()),
    "loader processes": ([("num_workers=0", "num_workers=1")], set()),
    "adam": (
        [("SGD(model.parameters(), lr=0.1, momentum=0.9)", "Adam(model.parameters())")],
        set(),
    ),
    "scaled inputs": ([("model(inputs), targets).b", "model(inputs / 2), targets).b")], set()),
    "batches of a rank": ([("48 // dist.get_world_size()", "24")], {"batch size"}),
    "no checkpoint": ([(LOAD, "if False:\n"), (REPLACED, "pass")], {"no checkpoint"}),
    "no set_epoch": ([("    sampler.set_epoch(epoch)\n", "")], {"set_epoch"}),
    "set_epoch(0)": ([("set_epoch(epoch)", "set_epoch(0)")], {"set_epoch"}),
    "dropout": (
        [(MODEL, MODEL + "nn.Dropout(), "), ('torch.set_rng_state(state["random"])', "pass")],
        {"random state"},
    ),
    "shuffle": ([*SHUFFLED, ('torch.set_rng_state(state["random"])', "pass")], {"random state"}),
    "in place": ([(REPLACED, "torch.save(state, checkpoint)")], {"checkpoint in place"}),
    "in place, opened": (
        [(REPLACED, 'with open(checkpoint, "wb") as file:\n            torch.save(state, file)')],
        {"checkpoint in place"},
    ),
    "rank 0 loads": ([(LOAD, LOAD[:-2] + " and dist.get_rank() == 0:\n")], {"rank 0 alone loads"}),
    "rank 0 loads weights": (
        [(LOAD, LOAD[:-2] + " and dist.get_rank() == 0:\n"), ("range(first, 3)", "range(3)")],
        {"rank 0 alone loads"},
    ),
    "schedule": ([("    schedule.load_state_dict(state[", "    str(state[")], {"learning rate"}),
    "warm-up": (
        [
            (
                "StepLR(optimizer, step_size=7, gamma=0.7)",
                "LinearLR(optimizer, 0.01, total_iters=25)",
            ),
            ("    schedule.load_state_dict(state[", "    str(state["),
        ],
        {"learning rate"},
    ),
    "loader from the start": (
        [*MID_EPOCH, ("list(loader)[skipped:]", "loader")],
        {"loader"},
    ),
    "epochs from the start": (
        [('first = state["epoch"] + 1', "pass")],
        {"loader", "trained again"},
    ),
}


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="rehearsals-") as name:
        cases: dict[str, tuple[list[str], set[str]]] = {}
        for title, (changes, causes) in VARIANTS.items():
            text = CAREFUL
            for old, new in changes:
                assert old in text, old
                text = text.replace(old, new)
            file = Path(name, f"{title.replace(' ', '_')}.py")
            file.write_text(text)
            cases[title] = (["--no-nodes", str(file), "{outputs}"], causes)
        Path(name, "crops.py").write_text(CROPS)
        cases["random crops"] = (["--nodes", f"{name}/crops.py", "{outputs}"], {"random state"})
        # what the second one draws in its steps is not in its checkpoints
        for script, causes in (
            ("ddp.py", set()),
            ("adversarial.py", {"random state"}),
            ("hugging_face_session.py", set()),
        ):
            cases[script] = (["--nodes", f"{ROOT}/examples/scripts/{script}"], causes)
        results = []
        print("| script | causes | seconds | |\n|---|---|---|---|")
        for title in sys.argv[1:] or cases:
            command, causes = cases[title]
            begun = time.monotonic()
            ended = subprocess.run(
                [sys.executable, "-c", COMMAND, *command],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                cwd=name,
                capture_output=True,
                text=True,
            )
            verdict = json.loads(ended.stdout or "{}")
            found = {each["name"] for each in verdict.get("causes", ())}
            problems = [f"{each['fault']}: {each['problems']}" for each in verdict.get("rows", ())]
            results.append(
                (found, ended.returncode) != (causes, causes - {"no checkpoint"} != set())
            )
            more = f"**wrong** {problems} {ended.stderr[-300:]}" if results[-1] else "right"
            print(
                f"| {title} | {sorted(found)} | {time.monotonic() - begun:.0f} | {more} |",
                flush=True,
            )
    return int(any(results))


if __name__ == "__main__":
    sys.exit(main())
