"""The same small training as a recipe and as a function. Its ranks meet the faults that a test
orders.

A fault is a file in a directory that all ranks see, named by the rank, the kind and a number of
steps, such as `1-kill-5`: it comes when that rank has taken so many in its process, once, or with
`-always` after each restart again. While any is there, steps take a moment, so that checkpoints are
written meanwhile.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flyte_ddp.data import Shards
from flyte_ddp.errors import StorageDenied, StorageUnavailable
from tests.support.recipes import Tiny

NUM_STEPS = 27  # steps of `Steady` in three epochs
PACE = 0.05  # seconds of a step while a fault is to come


class TheirOwnError(Exception):
    """An exception that nobody knows."""


def _raise(error):
    raise error


FAULTS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "bug": lambda: _raise(TypeError("a bug that repeats")),
    "error": lambda: _raise(TheirOwnError("nobody knows why")),
    "hang": lambda: time.sleep(600),
    "away": lambda: _raise(StorageUnavailable("the store is away")),
    "denied": lambda: _raise(StorageDenied("checkpoints: expected keys, got none")),
}


def meet_fault(directory: str, rank: int, num_steps: int) -> None:
    """Do what the test has ordered of this rank, which takes its step `num_steps` in this
    process.
    """
    orders = [order for order in Path(directory).iterdir() if order.is_file()]
    if orders:
        time.sleep(PACE)
    for order in orders:
        who, kind, when, *always = order.name.split("-")
        if int(who) == rank and num_steps >= int(when):
            if not always:
                order.unlink()
            if kind == "kill" and num_steps > 2:
                _wait_for_checkpoint(Path(directory, "../checkpoints"))
            FAULTS[kind]()


def _wait_for_checkpoint(checkpoints: Path) -> None:
    """Wait until a state is in the store: one is written beside the steps, on a busy machine for
    longer than they take.
    """
    for _ in range(300):
        if any(checkpoints.glob("step-*.json")):
            return
        time.sleep(PACE)


@dataclass
class Steady(Tiny):
    """The recipe."""

    faults: str = ""  # directory

    def losses(self, outputs, targets):
        import torch.distributed as dist

        if outputs.requires_grad and self.faults:
            meet_fault(self.faults, dist.get_rank(), self._num_steps + 1)
        elif self.faults and any(Path(self.faults).iterdir()):
            time.sleep(10 * PACE)  # an evaluation is long enough to be met in the middle
        return super().losses(outputs, targets)


class Sharded(Steady):
    """The recipe with its training data in shards of ten samples."""

    def prepare(self, source, directory):
        super().prepare(source, directory)
        with np.load(directory / "train.npz") as arrays:
            rows = zip(arrays["images"].tolist(), arrays["labels"].tolist(), strict=True)
            lines = [json.dumps({"input": image, "target": label}) + "\n" for image, label in rows]
        for first in range(0, len(lines), 10):
            (directory / f"{first:04d}.jsonl").write_text("".join(lines[first : first + 10]))
        return Shards(str(directory)).prepare()

    def datasets(self, directory):
        shards = Shards(str(directory), transform=to_sample, lanes=3, window=8)
        return shards, shards


class Sparse(Sharded):
    """The recipe trained on odd samples alone. Some batches have even samples only."""

    def datasets(self, directory):
        shards = Shards(str(directory), transform=to_odd_sample, unreadable="ignore")
        return shards, shards


def to_odd_sample(fields):
    if fields["target"][1] % 2:
        raise ValueError("an odd one")
    return to_sample(fields)


def to_sample(fields):
    import torch

    return torch.tensor(fields["input"]), torch.tensor(fields["target"])


def count(faults: str) -> float:
    """The function: the sum of all gradients, which every rank has the same part of."""
    import torch
    import torch.distributed as dist

    from flyte_ddp import session

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = session.load() or {"step": 0, "weight": torch.zeros(1, dtype=torch.float64)}
    weight = state["weight"]
    for step in range(state["step"] + 1, NUM_STEPS + 1):
        if faults:
            meet_fault(faults, rank, step - state["step"])
        gradient = torch.tensor([step * (1.0 + rank)], dtype=torch.float64)
        dist.all_reduce(gradient)
        weight = weight + gradient / step**0.5
        session.report(step=step, loss=float(gradient))
        stops = session.stop_requested
        if stops or step % 2 == 0:
            session.save({"step": step, "weight": weight}, step)
        if stops:
            return float("nan")
    return float(weight) if rank == 0 else threading.Lock()  # Nobody can pickle a lock.


def wait_for_order(faults: str) -> int:
    """The function: steps until the directory is empty on rank 0."""
    import torch
    import torch.distributed as dist

    from flyte_ddp import session

    dist.init_process_group("gloo")
    step = (session.load() or {"step": 0})["step"]
    is_ordered = torch.ones(1)
    while is_ordered:
        step += 1
        time.sleep(PACE)
        is_ordered = torch.tensor([float(any(Path(faults).iterdir()))])
        dist.broadcast(is_ordered, 0)
        session.report(step=step)
        stops = session.stop_requested
        if stops or step % 5 == 0:
            session.save({"step": step}, step)
        if stops:
            break
    return step
