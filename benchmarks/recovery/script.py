"""torchrun's training script, as its own guides have it: DDP, a DistributedSampler, a checkpoint
every N steps.

Careful users' code: a checkpoint is written to a temporary name and renamed, and a run resumes in
the middle of an epoch. The batch of a rank is its share of a global batch, so that fewer ranks
train with the same batches.
"""

from __future__ import annotations

import argparse
import datetime
import os
from pathlib import Path
from typing import Any

from benchmarks.counting import BATCH_SIZE, LEARNING_RATE
from benchmarks.recovery.workload import CHECKPOINT_INTERVAL, COLLECTIVE_TIMEOUT, LoggedCounting

MODEL_STATE = "model_state.pt"


def train(data: Path, directory: Path, epochs: int) -> None:
    """Train under torchrun, with a checkpoint and the weights in `directory`."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    # Not the default of 30 minutes, so that a rank that hangs is noticed.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT))
    recipe = LoggedCounting()
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    step, checkpoint = 0, directory / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
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
            if step % CHECKPOINT_INTERVAL == 0 and dist.get_rank() == 0:
                state = {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                }
                torch.save(state, directory / "half.tmp")
                os.replace(directory / "half.tmp", checkpoint)
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), directory / MODEL_STATE)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    train(**vars(parser.parse_args()))
