"""Rehearse scripts with known causes: `python -m benchmarks.rehearsals [NAME ...]`.

The scripts are the examples, scripts in the manner of public ones, and variants of a correct script
with planted mistakes. A script is right if its verdict has exactly the causes that it is known to
have. The variants of one script are rehearsed without the lost node.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

from flyte_ddp.launch.agent.rank_start import start_server
from flyte_ddp.process.temporary_directories import temporary_directory
from flyte_ddp.rehearsal import runs
from flyte_ddp.rehearsal.command import find_program
from flyte_ddp.rehearsal.verdict import Verdict, judge

ROOT = Path(__file__).parents[1]
MODULES = ("torch", "torch._dynamo")
TITLES = dict(runs.TITLES)
# A lost node takes longer than all other faults.
FAULTS = [name for name in TITLES if name != "node"]

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
# An average of the weights, which evaluations use, in a file of its own.
AVERAGED = [
    (
        "first = 0\n",
        "average = {name: each.detach().clone() for name, each in model.named_parameters()}\n"
        "first = 0\n",
    ),
    (
        "        schedule.step()\n",
        """        schedule.step()
        for name, each in model.named_parameters():
            average[name].lerp_(each.detach(), 0.1)
""",
    ),
    ('"epoch": epoch}', '"epoch": epoch, "average": average}'),
]
LOAD_AVERAGE = ("    first = state", '    average = state["average"]\n    first = state')
# The session keeps the same state, under its own names of checkpoints.
SESSION = [
    ("import torch\n", "import torch\nfrom flyte_ddp import session\n"),
    ("if os.path.exists(checkpoint):\n", "if state := session.load():\n"),
    ("    state = torch.load(checkpoint, weights_only=False)\n", ""),
    ("    if dist.get_rank() == 0:\n", "    if True:\n"),
    (
        """        torch.save(state, f"{checkpoint}.tmp")
        os.replace(f"{checkpoint}.tmp", checkpoint)
""",
        "        session.save(state, epoch + 1)\n",
    ),
]
SWA = [
    (
        "first = 0\n",
        "averaged = torch.optim.swa_utils.AveragedModel(model.module)\nfirst = 0\n",
    ),
    (
        "        schedule.step()\n",
        "        schedule.step()\n        averaged.update_parameters(model.module)\n",
    ),
    ('"epoch": epoch}', '"epoch": epoch, "averaged": averaged.state_dict()}'),
]
LOAD_SWA = (
    "    first = state",
    '    averaged.load_state_dict(state["averaged"])\n    first = state',
)
NORMALIZED = [(MODEL, MODEL.replace("16), ", "16), nn.BatchNorm1d(16), "))]
PARAMETERS_ALONE = [
    ('"model": model.state_dict()', '"model": dict(model.named_parameters())'),
    ('load_state_dict(state["model"])', 'load_state_dict(state["model"], strict=False)'),
]
# Centres its inputs by a mean of the samples so far.
CENTRED = [
    (
        "model = Dist",
        """class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, inputs):
        if self.training and torch.is_grad_enabled():
            self.mean = self.mean + 0.1 * (1 + inputs.detach().mean(0) - self.mean)
        return inputs - self.mean


model = Dist""",
    ),
    (MODEL, MODEL.replace("nn.Linear", "Centred(), nn.Linear", 1)),
]
# A second model with an optimizer of its own.
CRITIC = [
    (
        "schedule = torch",
        """critic = torch.nn.Linear(8, 1)
second = torch.optim.Adam(critic.parameters(), lr=0.01)
schedule = torch""",
    ),
    (
        "        schedule.step()\n",
        """        schedule.step()
        second.zero_grad()
        (critic(inputs) - 1).square().mean().backward()
        for each in critic.parameters():
            dist.all_reduce(each.grad)
            each.grad /= dist.get_world_size()
        second.step()
""",
    ),
    (
        '"epoch": epoch}',
        '"epoch": epoch, "critic": critic.state_dict(), "second": second.state_dict()}',
    ),
    (
        "    first = state",
        """    critic.load_state_dict(state["critic"])
    second.load_state_dict(state["second"])
    first = state""",
    ),
]
SECOND_SCHEDULE = [
    *CRITIC,
    (
        "first = 0\n",
        "other = torch.optim.lr_scheduler.StepLR(second, step_size=7, gamma=0.7)\nfirst = 0\n",
    ),
    ("        second.step()\n", "        second.step()\n        other.step()\n"),
]
# A generator, and a model that judges its samples, each with its optimizer.
GAN = [
    (
        MODEL + "nn.ReLU(), nn.Linear(16, 3)",
        "nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)",
    ),
    (
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n",
        """judge = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
judge = DistributedDataParallel(judge)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
judging = torch.optim.Adam(judge.parameters(), lr=0.01)
""",
    ),
    (
        "        nn.functional.cross_entropy(model(inputs), targets).backward()\n"
        "        optimizer.step()\n",
        """        noise = inputs[:, :4]
        judging.zero_grad()
        real, made = judge(torch.cat([inputs, model(noise).detach()])).chunk(2)
        (nn.functional.softplus(-real) + nn.functional.softplus(made)).mean().backward()
        judging.step()
        nn.functional.softplus(-judge(model(noise))).mean().backward()
        optimizer.step()
""",
    ),
    ("            model(inputs)\n", "            judge(inputs)\n"),
    (
        '"epoch": epoch}',
        '"epoch": epoch, "judge": judge.state_dict(), "judging": judging.state_dict()}',
    ),
    (
        "    first = state",
        """    judge.load_state_dict(state["judge"])
    judging.load_state_dict(state["judging"])
    first = state""",
    ),
]
SCALED = [
    ("first = 0\n", 'scaler = torch.amp.GradScaler("cpu", growth_interval=4)\nfirst = 0\n'),
    (
        "        nn.functional.cross_entropy(model(inputs), targets).backward()\n"
        "        optimizer.step()\n",
        """        scaler.scale(nn.functional.cross_entropy(model(inputs), targets)).backward()
        scaler.step(optimizer)
        scaler.update()
""",
    ),
    ('"epoch": epoch}', '"epoch": epoch, "scaler": scaler.state_dict()}'),
]
LOAD_SCALER = (
    "    first = state",
    '    scaler.load_state_dict(state["scaler"])\n    first = state',
)
# Loaders' processes draw noise, from the seed that this process draws at the start of an epoch.
NOISE = [
    (
        "data = TensorDataset(torch.randn(480, 8), torch.randint(3, (480,)))",
        """base = TensorDataset(torch.randn(480, 8), torch.randint(3, (480,)))


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        inputs, target = base[index]
        return inputs + 0.1 * torch.randn(8), target


data = Noisy()""",
    ),
    ("num_workers=0", "num_workers=1"),
]
NOT_RANDOM = ('torch.set_rng_state(state["random"])', "pass")
BEHIND = [(MID_EPOCH[0][0], MID_EPOCH[0][1].replace('"done": done}', '"done": done - 1}'))]
AHEAD = [(MID_EPOCH[0][0], MID_EPOCH[0][1].replace('"done": done}', '"done": done + 1}'))]
# Saved between the gradient and the step.
BEFORE_STEP = [
    (
        "        optimizer.step()\n        schedule.step()\n",
        MID_EPOCH[0][1].replace("        schedule.step()\n", "", 1)
        + "        optimizer.step()\n        schedule.step()\n",
    ),
]
# Two batches make a step, and a checkpoint may come between them.
ACCUMULATED = [
    (
        "        optimizer.zero_grad()\n",
        "        if done % 2 == 0:\n            optimizer.zero_grad()\n",
    ),
    (
        "        optimizer.step()\n        schedule.step()\n",
        "        if done % 2 == 1:\n            optimizer.step()\n            schedule.step()\n",
    ),
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
    # averages of the weights
    "average kept": ([*AVERAGED, LOAD_AVERAGE], set()),
    "average lost": (AVERAGED, {"other state"}),
    "average kept by the session": ([*SESSION, *AVERAGED, LOAD_AVERAGE], set()),
    "average lost by the session": ([*SESSION, *AVERAGED], {"other state"}),
    "averaged model kept": ([*SWA, LOAD_SWA], set()),
    "averaged model lost": (SWA, {"other state"}),
    # buffers
    "norm": (NORMALIZED, set()),
    "norm lost": ([*NORMALIZED, *PARAMETERS_ALONE], {"buffers"}),
    "buffer not persistent": (CENTRED, {"buffers"}),
    "buffer persistent": ([*CENTRED, (", persistent=False", "")], set()),
    # two models
    "two": (CRITIC, set()),
    "second optimizer lost": (
        [*CRITIC, ('    second.load_state_dict(state["second"])\n', "")],
        {"optimizer"},
    ),
    "second model lost": (
        [*CRITIC, ('    critic.load_state_dict(state["critic"])\n', "")],
        {"weights"},
    ),
    "second schedule lost": (SECOND_SCHEDULE, {"learning rate"}),
    "gan": (GAN, set()),
    "gan, judge's optimizer lost": (
        [*GAN, ('    judging.load_state_dict(state["judging"])\n', "")],
        {"optimizer"},
    ),
    "optimizer lost": (
        [('    optimizer.load_state_dict(state["optimizer"])\n', "")],
        {"optimizer"},
    ),
    "head lost": (
        [
            (
                'load_state_dict(state["model"])',
                'load_state_dict({"module.0.bias": state["model"]["module.0.bias"]}, strict=False)',
            )
        ],
        {"weights"},
    ),
    # scales
    "loss scale kept": ([*SCALED, LOAD_SCALER], set()),
    "loss scale lost": (SCALED, {"loss scale"}),
    "sum of losses": (
        [("model(inputs), targets).b", "model(inputs), targets, reduction='sum').div(24).b")],
        {"gradient scale"},
    ),
    # draws
    "noise kept": (NOISE, set()),
    "draws of rank 0": (
        [
            (MODEL, MODEL + "nn.Dropout(), "),
            ("first = 0\n", "torch.manual_seed(dist.get_rank())\nfirst = 0\n"),
        ],
        {"random state"},
    ),
    "noise lost": ([*NOISE, NOT_RANDOM], {"random state"}),
    # positions
    "behind": ([*BEHIND, *MID_EPOCH[1:]], {"step number"}),
    "ahead": ([*AHEAD, *MID_EPOCH[1:]], {"step number"}),
    "before the step": ([*BEFORE_STEP, *MID_EPOCH[1:]], {"step number"}),
    "an epoch behind": ([('"epoch": epoch}', '"epoch": epoch - 1}')], {"step number"}),
    "between steps": (
        [
            (MID_EPOCH[0][0], MID_EPOCH[0][1].replace("% 4", "% 5")),
            *MID_EPOCH[1:],
            *ACCUMULATED,
        ],
        {"accumulation"},
    ),
    "accumulated": ([*MID_EPOCH, *ACCUMULATED], set()),
    # The best loss is in the first epoch.
    "best lost": (
        [
            ("first = 0\n", "first, best = 0, -torch.inf\n"),
            (
                "            model(inputs)\n",
                "            loss = nn.functional.cross_entropy(model(inputs), targets)\n",
            ),
            (
                "    dist.barrier()\n",
                """    if dist.get_rank() == 0 and loss > best:
        best = loss
        torch.save(model.state_dict(), f"{sys.argv[1]}/best.pt")
    dist.barrier()
""",
            ),
        ],
        {"other state"},
    ),
    # files
    "a file of each rank": (
        [
            ("/checkpoint.pt", "/checkpoint-{os.environ['RANK']}.pt"),
            ("    if dist.get_rank() == 0:\n        state", "    if True:\n        state"),
        ],
        {"some ranks load"},
    ),
    "all ranks write": (
        [
            ("    if dist.get_rank() == 0:\n        state", "    if True:\n        state"),
            (REPLACED, "torch.save(state, checkpoint)"),
        ],
        {"all ranks write"},
    ),
}


def write_variant(title: str, directory: Path) -> Path:
    """Write a variant's script, and return its file."""
    text = CAREFUL
    for old, new in VARIANTS[title][0]:
        assert old in text, old
        text = text.replace(old, new)
    file = directory / f"{title.replace(' ', '_')}.py"
    file.write_text(text)
    return file


def rehearse(script: Path, arguments: Sequence[str], faults: Sequence[str]) -> Verdict:
    """Rehearse a script with some faults in this process. Its server of ranks has torch
    imported.
    """
    titles = {name: TITLES[name] for name in faults}
    with temporary_directory("rehearsal-") as directory, mock.patch.object(runs, "TITLES", titles):
        make, data = find_program(str(script), arguments, "", directory)
        rehearsal = runs.Rehearsal(make, data, MODULES, Path(directory), 2, 120.0)
        return judge(list(rehearsal.rehearse()))


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.rehearsals", description=__doc__)
    parser.add_argument("--faults", default=",".join(TITLES), help="some, separated by commas")
    parser.add_argument("names", nargs="*", help="of the scripts")
    options = parser.parse_args()
    chosen = options.faults.split(",")
    start_server(MODULES)
    examples = ROOT / "examples/scripts"
    cases: dict[str, tuple[Path, list[str], list[str], set[str]]] = {}
    with tempfile.TemporaryDirectory(prefix="rehearsals-") as name:
        for title, (_, causes) in VARIANTS.items():
            script = write_variant(title, Path(name))
            cases[title] = (script, ["{outputs}"], FAULTS, causes)
        crops = Path(name, "crops.py")
        crops.write_text(CROPS)
        cases["random crops"] = (crops, ["{outputs}"], list(TITLES), {"random state"})
        # The draws of adversarial.py in its steps are not in its checkpoints.
        for file, causes in (
            ("ddp.py", set()),
            ("adversarial.py", {"random state"}),
            ("hugging_face_session.py", set()),
        ):
            cases[file] = (examples / file, [], list(TITLES), causes)
        os.chdir(name)
        wrong = []
        print("| script | causes | seconds | |\n|---|---|---|---|")
        for title in options.names or cases:
            script, arguments, faults, causes = cases[title]
            faults = [name for name in faults if name in chosen or name in list(TITLES)[:2]]
            begun = time.monotonic()
            verdict = rehearse(script, arguments, faults)
            found = {each.name for each in verdict.causes}
            is_right = causes <= {"no checkpoint"}
            note = "right"
            if (found, verdict.is_right) != (causes, is_right):
                problems = [f"{row.run.name}: {row.problems}" for row in verdict.rows]
                note = f"**wrong** {problems}"
                wrong.append(title)
            seconds = time.monotonic() - begun
            print(f"| {title} | {sorted(found)} | {seconds:.0f} | {note} |", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
