"""Measure held-out loss over time on pet names: `python -m benchmarks.time_to_quality ours|tutorial`.

Both sides train the same model on the same names, and measure nats per letter on the same held-out names. The
tutorial's side has one window per letter, encoded sample by sample, a DataLoader and a plain loop in one process with
all cores. Ours has the recipe's defaults with fewer epochs, and one rank per core. Time starts with the command; the
tutorial's evaluations are not counted.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.variants import peak_memory_bytes, report

# The smaller of the tutorial's batch sizes (4096, 16384) and the larger of its rates (0.001, 0.01), which get furthest
# in the same time, and two of its eight epochs: on two cores and the Seattle register one takes over a minute.
BATCH_SIZE, LEARNING_RATE, NUM_EPOCHS = 4096, 0.01, 2
OUR_CONFIG = {"epochs": 5, "global_batch_size": 128, "learning_rate": 0.006}


def ours(names: str, num_epochs: int, started: float) -> None:
    from flyte_ddp.config import resolve
    from flyte_ddp.events import EpochFinished, Event
    from flyte_ddp.launch import driver
    from flyte_ddp.launch.devices import num_cores
    from flyte_ddp.launch.local import LocalPlace
    from flyte_ddp.launch.process.programs import Job, recipe_program
    from flyte_ddp.recipes import get_recipe
    from flyte_ddp.recipes.prepare import prepare_data

    curve: list[tuple[float, float]] = []

    class Clock:
        def handle(self, event: Event) -> None:
            if isinstance(event, EpochFinished):
                curve.append((time.time() - started, event.test_loss))

        def close(self, error: BaseException | None) -> None:
            pass

    recipe = get_recipe("pet_names")
    with tempfile.TemporaryDirectory() as directory:
        data = Path(directory, "data")
        data.mkdir()

        def prepared() -> str:
            prepare_data(recipe, names, data)
            return str(data)

        config = resolve(recipe.defaults, {**OUR_CONFIG, "epochs": num_epochs or OUR_CONFIG["epochs"]})
        job = Job(recipe_program("pet_names", config), f"{directory}/checkpoints", time.time())
        result = driver.run(job, LocalPlace(num_cores()), prepared, [Clock()])
    finished, last = result.finished, result.epochs[-1]
    report(
        job.launched_at + finished.first_step_seconds, last.samples_per_second, finished.peak_memory_bytes, curve=curve
    )


def tutorial(names: str, num_epochs: int, started: float) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    from flyte_ddp.recipes.pet_names import ALPHABET, BLANK, END
    from flyte_ddp.recipes.pet_names.model import NameModel
    from flyte_ddp.recipes.pet_names.recipe import WINDOW

    class Windows(Dataset[Any]):
        """One sample per letter of each name and per end of a name, encoded when it is read."""

        def __init__(self, names: Sequence[str]) -> None:
            self.rows = [
                ([BLANK] * WINDOW + [ALPHABET.index(letter) for letter in name] + [END])[place : place + WINDOW + 1]
                for name in names
                for place in range(len(name) + 1)
            ]

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> tuple[Any, Any]:
            row = torch.tensor(self.rows[index])
            return nn.functional.one_hot(row[:-1], len(ALPHABET)).float(), row[1:]

    class TutorialModel(NameModel):
        """Take one-hot letters, as the tutorial's data set returns them."""

        def forward(self, letters: Any) -> Any:
            return self.logits(self.lstm(letters)[0])

    training_names, held_out_names = _split(names)
    training, held_out = Windows(training_names), Windows(held_out_names)
    torch.manual_seed(0)
    model = TutorialModel(window=WINDOW)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    criterion = nn.CrossEntropyLoss()

    def held_out_loss() -> float:
        """Return nats per letter. Of each window only the last letter counts; the others are in other windows."""
        model.eval()
        total = 0.0
        with torch.no_grad():
            for inputs, targets in DataLoader(held_out, batch_size=BATCH_SIZE):
                total += nn.functional.cross_entropy(model(inputs)[:, -1], targets[:, -1], reduction="sum").item()
        model.train()
        return total / len(held_out)

    curve: list[tuple[float, float]] = []
    first_step_at = not_counted = 0.0
    for _ in range(num_epochs or NUM_EPOCHS):
        epoch_started = time.time()
        for inputs, targets in DataLoader(training, batch_size=BATCH_SIZE, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            first_step_at = first_step_at or time.time()
        epoch_ended = time.time()
        curve.append((epoch_ended - started - not_counted, held_out_loss()))
        not_counted += time.time() - epoch_ended
    report(first_step_at, len(training) / (epoch_ended - epoch_started), peak_memory_bytes(), curve=curve)


def _split(names: str) -> tuple[list[str], list[str]]:
    """Return the training names of recipe `pet_names`, with repeats, and its held-out names."""
    import numpy as np

    from flyte_ddp.recipes import get_recipe
    from flyte_ddp.recipes.pet_names import ALPHABET, BLANK
    from flyte_ddp.recipes.prepare import prepare_data

    def spelled(file: Path) -> list[str]:
        with np.load(file) as arrays:
            rows = arrays["inputs"][:, 1:].tolist()
        return [
            "".join(ALPHABET[letter] for letter in itertools.takewhile(lambda it: it != BLANK, row)) for row in rows
        ]

    with tempfile.TemporaryDirectory() as directory:
        prepare_data(get_recipe("pet_names"), names, Path(directory))
        return spelled(Path(directory, "train.npz")), spelled(Path(directory, "test.npz"))


if __name__ == "__main__":
    command_started = time.time()
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=("ours", "tutorial"))
    parser.add_argument("--names", default="", help="a file or URL as of recipe pet_names; its own list by default")
    parser.add_argument("--epochs", type=int, default=0, help="instead of the side's own number")
    arguments = parser.parse_args()
    {"ours": ours, "tutorial": tutorial}[arguments.variant](arguments.names, arguments.epochs, command_started)
