"""The rivals' training script, as their own guides have it: DDP, a DistributedSampler, a checkpoint
every N steps.

Careful users' code: a checkpoint is written to a temporary name and renamed, and a run resumes in
the middle of an epoch. The batch of a rank is its share of a global batch, so that fewer ranks
train with the same batches.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.counting import BATCH_SIZE, LEARNING_RATE
from benchmarks.recovery.workload import CHECKPOINT_INTERVAL, COLLECTIVE_TIMEOUT, LoggedCounting

CHECKPOINT = "checkpoint.pt"
MODEL_STATE = "model_state.pt"

State = dict[str, Any]


def train(
    data: Path,
    epochs: int,
    load: Callable[[], State | None],
    save: Callable[[State, int], None],
    is_told: Callable[[], bool] = lambda: False,
) -> State:
    """Train in a process group that is there already; return the weights.

    Args:
        load: returns the state to resume from; None at the beginning.
        save: keeps a state as the checkpoint of a step; called by every rank.
        is_told: returns whether a node has just been told to go; called by every rank after each
            step.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    recipe = LoggedCounting()
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    step = 0
    if state := load():
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    dataset: TensorDataset = TensorDataset(*recipe.datasets(data)[0].tensors)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // dist.get_world_size(), sampler=sampler)
    replica = DistributedDataParallel(model)
    for epoch in range(step // len(loader), epochs):
        sampler.set_epoch(epoch)
        done = step - epoch * len(loader)  # steps of this epoch
        for inputs, targets in list(loader)[done:]:
            optimizer.zero_grad()
            recipe.losses(replica(inputs), targets).mean().backward()
            optimizer.step()
            step += 1
            if is_told() or step % CHECKPOINT_INTERVAL == 0:
                save(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    },
                    step,
                )
    return model.state_dict()


def run_with_torchrun(data: Path, directory: Path, epochs: int) -> None:
    """Train under torchrun, with checkpoints in `directory`."""
    import torch
    import torch.distributed as dist

    # Not the default of 30 minutes, so that a rank that hangs is noticed.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT))

    def load() -> State | None:
        file = directory / CHECKPOINT
        return torch.load(file, weights_only=True) if file.exists() else None

    def save(state: State, step: int) -> None:
        if dist.get_rank() == 0:
            torch.save(state, directory / "half.tmp")
            os.replace(directory / "half.tmp", directory / CHECKPOINT)

    weights = train(data, epochs, load, save)
    if dist.get_rank() == 0:
        torch.save(weights, directory / MODEL_STATE)
    dist.destroy_process_group()


def run_with_ray(config: dict[str, Any]) -> None:
    """Train as a function of Ray Train, with its checkpoints; `config` has the arguments of
    `run_with_torchrun`.
    """
    import ray.train
    import torch

    def load() -> State | None:
        checkpoint = ray.train.get_checkpoint()
        if checkpoint is None:
            return None
        with checkpoint.as_directory() as directory:
            return torch.load(Path(directory) / CHECKPOINT, weights_only=True)

    is_first = ray.train.get_context().get_world_rank() == 0

    def save(state: State, step: int) -> None:
        with tempfile.TemporaryDirectory() if is_first else contextlib.nullcontext() as directory:
            checkpoint = None
            if directory:
                torch.save(state, Path(directory) / CHECKPOINT)
                checkpoint = ray.train.Checkpoint.from_directory(directory)
            ray.train.report({"step": step}, checkpoint=checkpoint)

    was_told = False

    def is_told() -> bool:  # once, as Ray's documentation advises
        nonlocal was_told
        before, was_told = was_told, ray.train.get_preemption_info() is not None
        return was_told and not before

    weights = train(Path(config["data"]), config["epochs"], load, save, is_told)
    if is_first:
        torch.save(weights, Path(config["directory"]) / MODEL_STATE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    run_with_torchrun(**vars(parser.parse_args()))
