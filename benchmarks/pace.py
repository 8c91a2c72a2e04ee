"""Measure what it costs to time each rank's phases: `python -m benchmarks.pace --rounds 5`.

Two ranks train MNIST's model on noise, in turn with and without the timing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from torch.utils.data import Dataset

from benchmarks.measure import machine
from benchmarks.mnist_like import MnistLike
from flyte_ddp.launch import driver
from flyte_ddp.launch.devices import num_cores
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.launch.process.programs import Job, recipe_program
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data

NUM_RANKS = 2
NUM_SAMPLES = 24_000
NUM_EPOCHS = 3  # the fastest one counts: others met another process of the machine


class Untimed(MnistLike):
    """Trains without the timing."""

    def datasets(self, directory: Path) -> tuple[Dataset, Dataset]:
        from flyte_ddp.rank.pace import Pace

        for name in ("begin", "end", "end_step", "watch"):
            setattr(Pace, name, lambda *arguments: None)
        return super().datasets(directory)


def throughput(recipe: type[MnistLike]) -> float:
    """Return the samples per second of a run."""
    name = f"{recipe.__module__}.{recipe.__name__}".replace("__main__", "benchmarks.pace")
    config = config_of(name, {"epochs": NUM_EPOCHS})
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "data")
        data.mkdir()
        prepare_data(get_recipe(name, config.recipe_options), str(NUM_SAMPLES), data)
        job = Job(recipe_program(name, config), f"{directory}/checkpoints", time.time())
        state = driver.run(job, LocalPlace(NUM_RANKS), lambda: str(data))
    return max(epoch.samples_per_second for epoch in state.epochs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    ratios = []
    for number in range(rounds):
        kinds = (MnistLike, Untimed) if number % 2 else (Untimed, MnistLike)
        found = {kind: throughput(kind) for kind in kinds}
        ratios.append(found[MnistLike] / found[Untimed])
        print(f"timed {found[MnistLike]:,.0f}, untimed {found[Untimed]:,.0f} samples/s: {ratios[-1]:.3f}", flush=True)
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"timed / untimed: median {statistics.median(ratios):.3f} ({spread}); {machine(num_cores())}")


if __name__ == "__main__":
    main()
