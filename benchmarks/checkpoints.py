"""The cost of checkpoints: `python -m benchmarks.checkpoints stall`; or copy, often DATA, never DATA.

The model has 100 million parameters, and AdamW two more numbers for each: 1.2 GB. `stall` is the time for which a save
keeps the training, and `copy` a plain copy of the same bytes into memory that was written to before. `often` and
`never` train, with a checkpoint every 50 steps and without any.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.mnist_like import MnistLike

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

SIZES = (784, 6000, 6000, 6000, 4000, 10)  # of the layers: 100.8 million parameters
BATCH_SIZE = 128  # global
INTERVAL = 50  # steps between two checkpoints
NUM_SAVES = 5


class Wide(MnistLike):
    """A model that is large for its speed."""

    def model(self) -> nn.Module:
        from torch import nn

        layers = [nn.Flatten()]
        for size, next_size in itertools.pairwise(SIZES):
            layers += [nn.Linear(size, next_size), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def stall() -> float:
    """Return the median time that `save` takes, each when the one before is written; without the first."""
    from flyte_ddp.rank.checkpoint import CheckpointStore

    model, optimizer = trained()
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(directory, num_kept=1)
        for step in range(1 + NUM_SAVES):
            started = time.perf_counter()
            store.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step + 1, best=False)
            seconds.append(time.perf_counter() - started)
            store.wait()
    return statistics.median(seconds[1:])


def copy() -> float:
    """Return the median time to copy the same tensors."""
    import torch

    model, optimizer = trained()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*(parameter.detach() for parameter in model.parameters()), *states]
    buffers = [torch.empty_like(tensor) for tensor in tensors]
    seconds = []
    for _ in range(1 + NUM_SAVES):
        started = time.perf_counter()
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[1:])


def train(data: str, checkpoint_interval: int) -> float:
    """Return the samples per second of an epoch."""
    from flyte_ddp.config import resolve
    from flyte_ddp.launch import spawn
    from flyte_ddp.rank.job import Job
    from flyte_ddp.rank.programs import RecipeProgram

    config = {"epochs": 1, "global_batch_size": BATCH_SIZE, "checkpoint_interval": checkpoint_interval}
    program = RecipeProgram("benchmarks.checkpoints.Wide", resolve(Wide.defaults, config))
    with tempfile.TemporaryDirectory() as directory:
        result = spawn.train(Job(program, directory, time.time()), lambda: str(Path(data)), num_processes=1)
    return result.epochs[0].samples_per_second


def trained() -> tuple[nn.Module, Optimizer]:
    """Return the model and its optimizer after a step."""
    import torch

    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.rank.fast_start import keep_freed_memory
    from flyte_ddp.rank.optim import build_optimizer

    keep_freed_memory()
    model = Wide().model()
    optimizer = build_optimizer(model, TrainingConfig(optimizer="adamw"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def main(name: str, *data: str) -> None:
    outcome: dict[str, Any] = {"first_step_at": time.time()}
    if name in ("stall", "copy"):
        outcome["stall_seconds"] = {"stall": stall, "copy": copy}[name]()
    else:
        outcome["samples_per_second"] = train(*data, checkpoint_interval={"often": INTERVAL, "never": 0}[name])
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
