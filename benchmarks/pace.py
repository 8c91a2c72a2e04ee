"""Measure what it costs to time each rank's phases: `python -m benchmarks.pace --rounds 5`.

Two ranks train MNIST's model on noise, in turn with and without the timing. With `--minutes 25` they train once, for so
long, and the slow ranks that were named are counted: beside whatever else the machine does, there should be none.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from benchmarks.measure import machine
from benchmarks.mnist_like import MnistLike
from flyte_ddp.errors import TrainingStopped
from flyte_ddp.events import Event, Listener, RunState, StragglersFound
from flyte_ddp.launch import driver
from flyte_ddp.launch.devices import num_cores
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.launch.process.programs import Job, recipe_program
from flyte_ddp.launch.signals import TimeLimit
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data

NUM_RANKS = 2
NUM_SAMPLES = 24_000
NUM_EPOCHS = 3  # the fastest one counts: others met another process of the machine


class Untimed(MnistLike):
    """Trains without the timing."""

    def datasets(self, directory: Path) -> tuple[Dataset, Dataset]:
        from flyte_ddp.rank.step_timer import StepTimer

        for name in ("begin", "end", "end_step", "watch"):
            setattr(StepTimer, name, lambda *arguments: None)
        return super().datasets(directory)


class Alarms:
    """A listener that counts the slow ranks that are named."""

    num_named = 0

    def handle(self, event: Event) -> None:
        self.num_named += len(event.stragglers) if isinstance(event, StragglersFound) else 0

    def close(self, error: BaseException | None) -> None:
        pass


def count_alarms(minutes: float) -> int:
    """Return how many slow ranks were named in a run of so many minutes."""
    alarms, limit = Alarms(), TimeLimit(minutes / 60, time.time())
    with contextlib.suppress(TrainingStopped):
        _train(MnistLike, [alarms], epochs=100_000)
    limit.cancel()
    return alarms.num_named


def throughput(recipe: type[MnistLike]) -> float:
    """Return the samples per second of a run."""
    return max(epoch.samples_per_second for epoch in _train(recipe, epochs=NUM_EPOCHS).epochs)


def _train(recipe: type[MnistLike], listeners: Sequence[Listener] = (), **overrides: Any) -> RunState:
    name = f"{recipe.__module__}.{recipe.__name__}".replace("__main__", "benchmarks.pace")
    config = config_of(name, overrides)
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "data")
        data.mkdir()
        prepare_data(get_recipe(name, config.recipe_options), str(NUM_SAMPLES), data)
        job = Job(recipe_program(name, config), f"{directory}/checkpoints", time.time())
        return driver.run(job, LocalPlace(NUM_RANKS), lambda: str(data), listeners)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=0.0)
    options = parser.parse_args()
    rounds, ratios = options.rounds, []
    if options.minutes:
        before = os.getloadavg()[0]
        num_named = count_alarms(options.minutes)
        load = f"load {before:.0f} before, {os.getloadavg()[2]:.0f} on average in the last 15 minutes"
        print(f"slow ranks named in {options.minutes:g} minutes: {num_named}; {load}; {machine(num_cores())}")
        return
    for number in range(rounds):
        kinds = (MnistLike, Untimed) if number % 2 else (Untimed, MnistLike)
        found = {kind: throughput(kind) for kind in kinds}
        ratios.append(found[MnistLike] / found[Untimed])
        print(f"timed {found[MnistLike]:,.0f}, untimed {found[Untimed]:,.0f} samples/s: {ratios[-1]:.3f}", flush=True)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"timed / untimed: median {statistics.median(ratios):.3f} ({spread}); {machine(num_cores())}")


if __name__ == "__main__":
    main()
