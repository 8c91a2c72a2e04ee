"""The cost of checkpoints: `python -m benchmarks.checkpoints stall`; or copy, training, memory.

The model has 100 million parameters, and AdamW two more numbers for each: 1.2 GB. `stall` is the
time for which a save keeps the training, and `copy` a plain copy of the same bytes into memory that
was written to before. `training` trains with a checkpoint every 50 steps. The first ten steps after
a save have its whole cost, and the other forty none. The time of each of the fifty is its median
over all saves, because the machine is slower for some seconds now and then.

`memory` trains with a state in memory every 5 steps for 20 steps, without any for as many, and so
on, while a store of 50 MB/s takes the checkpoints of both. The steps in which the state of the
phase before may still be written are left out, and each of the others is its median over all phases
of its kind.
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
# steps after a save, in which it is copied and written: twice as many as that takes
NUM_AFFECTED = 10
NUM_SAVES = 5
NUM_SAVES_IN_TRAINING = 9
PHASE = 20  # steps with states in memory, and as many without
NUM_ROUNDS = 3  # of both, after the first
MEMORY_INTERVAL = 5  # steps
MEMORY_BATCH_SIZE = 256
STORE_BANDWIDTH = 50e6  # bytes per second


class Wide(MnistLike):
    """A model that is large for its speed."""

    def model(self) -> nn.Module:
        from torch import nn

        layers = [nn.Flatten()]
        for size, next_size in itertools.pairwise(SIZES):
            layers += [nn.Linear(size, next_size), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


class Alternating(Wide):
    """Keeps states in memory in every other phase alone, and writes to its checkpoints' directory
    slowly.
    """

    def model(self) -> nn.Module:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from flyte_ddp.checkpoints import store
        from flyte_ddp.launch.process.memory import MappedFile
        from flyte_ddp.rank.copies import Slots

        steps, is_ready, save = itertools.count(1), Slots.is_ready, store.save_state
        step = 0

        def count(*_: Any) -> None:
            nonlocal step
            step = next(steps)

        def save_slowly(state: Any, file: Any, with_crc32: bool) -> dict[str, Any]:
            started = time.monotonic()
            entry = save(state, file, with_crc32)
            if not isinstance(file, MappedFile):
                time.sleep(max(0.0, started + entry["bytes"] / STORE_BANDWIDTH - time.monotonic()))
            return entry

        register_optimizer_step_post_hook(count)
        Slots.is_ready = property(lambda slots: step // PHASE % 2 == 1 and is_ready.fget(slots))
        store.save_state = save_slowly
        return super().model()


def stall() -> float:
    """Return the median time that `save` takes, each when the one before is written; without the
    first.
    """
    from flyte_ddp.checkpoints.store import CheckpointStore

    model, optimizer = trained()
    seconds = []
    with tempfile.TemporaryDirectory() as directory:
        store = CheckpointStore(directory, num_kept=1)
        for step in range(1 + NUM_SAVES):
            started = time.perf_counter()
            store.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
                step + 1,
                best=False,
            )
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
    """Return the samples per second with a checkpoint every `SAVE_INTERVAL` steps, and those
    without any.
    """
    steps = step_seconds(
        "Wide", BATCH_SIZE, (1 + NUM_SAVES_IN_TRAINING) * SAVE_INTERVAL, SAVE_INTERVAL
    )
    # Not the steps before the second save: they are the model's first, and the first save needs new
    # memory.
    seconds = [
        statistics.median(steps[position::SAVE_INTERVAL])
        for position in range(2 * SAVE_INTERVAL, 3 * SAVE_INTERVAL)
    ]
    return {
        "samples_per_second": BATCH_SIZE / statistics.fmean(seconds),
        "samples_per_second_without": BATCH_SIZE / statistics.fmean(seconds[NUM_AFFECTED:]),
    }


def train_in_memory() -> dict[str, float]:
    """Return the samples per second with a state in memory every `MEMORY_INTERVAL` steps, and those
    without any.
    """
    num_steps, interval = 2 * (1 + NUM_ROUNDS) * PHASE, {"memory_interval": MEMORY_INTERVAL}
    steps = step_seconds("Alternating", MEMORY_BATCH_SIZE, num_steps, PHASE, **interval)

    def mean(first: int) -> float:
        """Of the steps of the phases that begin with this step."""
        affected = range(first + MEMORY_INTERVAL, first + PHASE)
        return statistics.fmean(
            statistics.median(steps[position :: 2 * PHASE]) for position in affected
        )

    return {
        "samples_per_second": MEMORY_BATCH_SIZE / mean(3 * PHASE),
        "samples_per_second_without": MEMORY_BATCH_SIZE / mean(2 * PHASE),
    }


def step_seconds(
    recipe: str, batch_size: int, num_steps: int, interval: int, **overrides: Any
) -> list[float]:
    """Train a recipe of this module with a checkpoint every `interval` steps; return the seconds of
    each step.
    """
    from flyte_ddp.config import resolve
    from flyte_ddp.launch import driver
    from flyte_ddp.launch.local import LocalPlace
    from flyte_ddp.launch.process.programs import Job, recipe_program
    from flyte_ddp.recipes.prepare import prepare_data

    config = {
        "global_batch_size": batch_size,
        "epochs": 1,
        "log_interval": 1,
        "checkpoint_interval": interval,
    }
    program = recipe_program(
        f"benchmarks.checkpoints.{recipe}", resolve(Wide.defaults, {**config, **overrides})
    )
    steps = Steps(batch_size)
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory) / "data"
        data.mkdir()
        prepare_data(Wide(), str(num_steps * batch_size), data)
        driver.run(
            Job(program, f"{directory}/run", time.time()), LocalPlace(1), lambda: str(data), [steps]
        )
    return steps.seconds


class Steps:
    """A listener that keeps the seconds of each step."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.seconds: list[float] = []

    def handle(self, event: Event) -> None:
        if isinstance(event, Reported):
            self.seconds.append(self.batch_size / event.values["samples_per_second"])

    def close(self, error: BaseException | None) -> None:
        pass


def trained() -> tuple[nn.Module, Optimizer]:
    """Return the model and its optimizer after a step."""
    import torch

    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.launch.process.entry import keep_freed_memory
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
    if name in ("training", "memory"):
        outcome |= {"training": train, "memory": train_in_memory}[name]()
    else:
        outcome["stall_seconds"] = {"stall": stall, "copy": copy}[name]()
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
