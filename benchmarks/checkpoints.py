"""The cost of checkpoints: `python -m benchmarks.checkpoints stall`; or copy, training.

The model has 100 million parameters, and AdamW two more numbers for each: 1.2 GB. `stall` is the time for which a save
keeps the training, and `copy` a plain copy of the same bytes into memory that was written to before. `training` trains
with a checkpoint every 50 steps. The first ten steps after a save have its whole cost, and the other forty none. The
time of each of the fifty is its median over all saves, because the machine is slower for some seconds now and then.
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
from flyte_ddp.events import Event, Reported

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

SIZES = (784, 6000, 6000, 6000, 4000, 10)  # of the layers: 100.8 million parameters
BATCH_SIZE = 128  # global
SAVE_INTERVAL = 50  # steps
NUM_AFFECTED = 10  # steps after a save, in which it is copied and written: twice as many as that takes
NUM_SAVES = 5
NUM_SAVES_IN_TRAINING = 9


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
    from flyte_ddp.checkpoints.store import CheckpointStore

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


def train() -> dict[str, float]:
    """Return the samples per second with a checkpoint every `SAVE_INTERVAL` steps, and those without any."""
    from flyte_ddp.config import resolve
    from flyte_ddp.launch import driver
    from flyte_ddp.launch.local import LocalPlace
    from flyte_ddp.launch.process.programs import Job, recipe_program
    from flyte_ddp.recipes.prepare import prepare_data

    config = {"global_batch_size": BATCH_SIZE, "epochs": 1, "log_interval": 1, "checkpoint_interval": SAVE_INTERVAL}
    program = recipe_program("benchmarks.checkpoints.Wide", resolve(Wide.defaults, config))
    steps = Steps()
    num_steps = (1 + NUM_SAVES_IN_TRAINING) * SAVE_INTERVAL
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        data.mkdir()
        prepare_data(Wide(), str(num_steps * BATCH_SIZE), data)
        driver.run(Job(program, f"{directory}/run", time.time()), LocalPlace(1), lambda: str(data), [steps])
    # Not the steps before the second save: they are the model's first, and the first save needs new memory.
    seconds = [
        statistics.median(steps.seconds[position::SAVE_INTERVAL])
        for position in range(2 * SAVE_INTERVAL, 3 * SAVE_INTERVAL)
    ]
    return {
        "samples_per_second": BATCH_SIZE / statistics.fmean(seconds),
        "samples_per_second_without": BATCH_SIZE / statistics.fmean(seconds[NUM_AFFECTED:]),
    }


class Steps:
    """A listener that keeps the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def handle(self, event: Event) -> None:
        if isinstance(event, Reported):
            self.seconds.append(BATCH_SIZE / event.values["samples_per_second"])

    def close(self, error: BaseException | None) -> None:
        pass


def trained() -> tuple[nn.Module, Optimizer]:
    """Return the model and its optimizer after a step."""
    import torch

    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.launch.process.malloc import keep_freed_memory
    from flyte_ddp.rank.optim import build_optimizer

    keep_freed_memory()
    model = Wide().model()
    optimizer = build_optimizer(model, TrainingConfig(optimizer="adamw"))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return model, optimizer


def main(name: str) -> None:
    outcome: dict[str, Any] = {"first_step_at": time.time()}
    if name == "training":
        outcome |= train()
    else:
        outcome["stall_seconds"] = {"stall": stall, "copy": copy}[name]()
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
