"""Recipes whose trained models predict, in processes that import them by their names."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from flyte_ddp.data import Shards
from flyte_ddp.recipes.base import Mapped
from flyte_ddp.recipes.digits import Digits

num_batches = Counter()  # of this process


@dataclass(frozen=True)
class Mortal(Digits):
    """Kills the process of its second batch, in a part, if there is a file `kills`."""

    kills: str = ""
    changeable_options = ("kills",)

    def prediction_columns(self, outputs):
        num_batches.update(["mortal"])
        if num_batches["mortal"] > 1 and self.kills and Path(self.kills).exists():
            Path(self.kills).unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().prediction_columns(outputs)


@dataclass(frozen=True)
class Sized(Digits):
    """Its model has an option."""

    width: int = 4

    def model(self):
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, self.width))


class Thrifty(Digits):
    """Fails if memory that was freed has gone back to the kernel."""

    def prediction_columns(self, outputs):
        def count_faults():
            return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

        for _ in range(2):  # the first time the heap grows
            before = count_faults()
            for _ in range(20):
                torch.ones(600_000)  # 2.4 MB, above glibc's first threshold
        assert count_faults() - before < 1000
        return super().prediction_columns(outputs)


class Threads(Digits):
    """Predicts with how many threads it predicts."""

    def prediction_columns(self, outputs):
        return {"threads": [float(torch.get_num_threads())] * len(outputs)}


class Processes(Digits):
    """Predicts in which process it predicts; a batch takes a while."""

    def prediction_columns(self, outputs):
        time.sleep(0.3)
        return {"process": [float(os.getpid())] * len(outputs)}


class Slow(Digits):
    """A batch takes a second."""

    def prediction_columns(self, outputs):
        time.sleep(1)
        return super().prediction_columns(outputs)


@dataclass(frozen=True)
class InPlace(Digits):
    """Reads numbers, one a line, or shards with such, where they lie."""

    place: str = ""
    changeable_options = ("place",)

    def prepare_new_data(self, source, directory):
        return "numbers"

    def predict_dataset(self, directory):
        if Path(self.place).is_dir():
            return Mapped(Shards(self.place), take_number)
        numbers = [float(line) for line in Path(self.place).read_text().split()]
        return Mapped(numbers, to_image)


def take_number(fields, index):
    return to_image(fields["number"], index)


def to_image(number, index):
    return torch.full((1, 8, 8), float(number))
