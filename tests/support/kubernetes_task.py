"""A user's own task for two nodes, and the task that reads its output. Copied into a checkout that
is registered.
"""

from __future__ import annotations

import os
import time

import flytekit
import torch
import torch.distributed as dist
from flytekit import Deck, task, workflow
from flytekit.types.file import FlyteFile

from flyte_ddp import session
from flyte_ddp.flytekit_plugin import Distributed

PODS = {
    "worker_cpus": 0.2,
    "worker_memory": "1500Mi",
    "shared_memory": "64Mi",
    "scheduler_cpus": 0.25,
}


@task(
    task_config=Distributed(
        nnodes=2,
        max_restarts=2,
        cluster={"start_timeout": 300.0, "kubernetes": PODS},
    ),
    retries=3,
    environment={"OWN_VARIABLE": "own"},
    enable_deck=True,
    deck_fields=(),
)
def train(text: FlyteFile, steps: int) -> tuple[FlyteFile, int]:
    """Add up the ranks' numbers, step by step; the second output is the step that was resumed
    at.
    """
    dist.init_process_group("gloo")
    state = session.load() or {"step": 0, "total": torch.zeros(1)}
    resumed, total = state["step"], state["total"]
    for step in range(resumed + 1, steps + 1):
        addend = torch.ones(1)
        dist.all_reduce(addend)
        total = total + addend
        session.save({"step": step, "total": total}, step)
        session.report(step=step, total=total.item())
        time.sleep(0.2)
    Deck("own", f"<p>the Deck of rank {dist.get_rank()}</p>")
    file = os.path.join(flytekit.current_context().working_directory, "total.txt")
    with open(text) as words, open(file, "w") as output:
        output.write(f"{words.read()} {total.item():g} {os.environ['OWN_VARIABLE']}")
    return FlyteFile(file), resumed


@task
def read(file: FlyteFile) -> str:
    """Return the contents of a file, in the pod of the next task."""
    with open(file) as text:
        return text.read()


@workflow
def train_and_read(text: FlyteFile, steps: int) -> tuple[str, int]:
    """Train on two nodes, and read the file that came out."""
    file, resumed = train(text=text, steps=steps)
    return read(file=file), resumed
