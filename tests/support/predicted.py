"""Recipes whose trained models predict, in processes that import them by their names."""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from flyte_ddp import session
from flyte_ddp.data import Mixture, Shards
from flyte_ddp.recipes.base import Mapped
from flyte_ddp.recipes.digits import Digits

POISON = 133  # a sample in the third part of 60, and none of the samples for the schema


@dataclass(frozen=True)
class Logged(Digits):
    """Adds a line to the file `log` for each batch, and does at one of them what `end` says,
    or from it on, if that is to fail.
    """

    log: str = ""
    end: str = ""
    ends_at: int = 0  # number of a line
    seconds: float = 0.0  # time that a batch takes
    changeable_options = ("log", "end", "ends_at", "seconds")

    def prediction_columns(self, outputs):
        time.sleep(self.seconds)
        with open(self.log, "a+") as log:
            print(os.environ["WORLD_SIZE"], file=log, flush=True)
            log.seek(0)
            number = len(log.readlines())
        if number == self.ends_at or (self.end in ERRORS and number > self.ends_at):
            ENDS[self.end]()
        return super().prediction_columns(outputs)


def fail():
    raise FileNotFoundError(2, "No such file or directory", "weights.bin")


def run_out_of_memory():
    raise torch.OutOfMemoryError("CUDA out of memory.")


def wait_until_asked_to_end():
    while not session.current().process.link.stop_requested:
        time.sleep(0.1)


def notice_the_stop_late():
    """Let the thread that receives the request to stop hang right after it has received it."""
    session.current().process.link.on_stop = lambda: time.sleep(1000)
    wait_until_asked_to_end()


ERRORS = {"fail": fail, "run out of memory": run_out_of_memory}
ENDS = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(1000),
    "wait": wait_until_asked_to_end,
    "notice late": notice_the_stop_late,
    **ERRORS,
}


class Poisoned(Digits):
    """A sample kills the process that reads it."""

    def predict_dataset(self, directory):
        return Mapped(super().predict_dataset(directory), kill_at_poison)


def kill_at_poison(sample, index):
    if index == POISON:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample[0]


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
    in_mixture: bool = False
    changeable_options = ("place",)

    def prepare_new_data(self, source, directory):
        return "numbers"

    def predict_dataset(self, directory):
        if Path(self.place).is_dir():
            shards = Shards(self.place)
            if self.in_mixture:
                shards = Mixture({"a": shards}, {"a": 1})
            return Mapped(shards, take_number)
        numbers = [float(line) for line in Path(self.place).read_text().split()]
        return Mapped(numbers, to_image)


def take_number(fields, index):
    return to_image(fields["number"], index)


def to_image(number, index):
    return torch.full((1, 8, 8), float(number))
