"""Recipes that split and number their data themselves: right ones, and ones on which the ranks
cannot agree.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np

from flyte_ddp.recipes import Recipe

SIZE, NUM_HELD_OUT = 64, 16


def by_random(numbers):
    random.shuffle(numbers)
    return numbers


def by_numpy(numbers):
    return np.random.permutation(numbers).tolist()


def by_torch(numbers):
    import torch

    return [
        numbers[index] for index in torch.utils.data.random_split(numbers, [SIZE, 0])[0].indices
    ]


def by_own_generator(numbers):  # which nobody can seed
    return np.random.default_rng().permutation(numbers).tolist()


def by_rank(numbers):
    return numbers[int(os.environ.get("RANK", 0)) :]


class Split(Recipe):
    """Numbers, of which some are held out. RECORD=directory: each process notes there which."""

    draw = staticmethod(by_torch)
    defaults = {"epochs": 2, "global_batch_size": 8, "optimizer": "sgd"}

    def prepare(self, source, directory):
        return f"{SIZE} numbers"

    def datasets(self, directory):
        numbers = self.draw(list(range(SIZE)))
        if "RECORD" in os.environ:
            with Path(os.environ["RECORD"], f"{os.getpid()}.jsonl").open("a") as file:
                file.write(json.dumps(sorted(numbers[:NUM_HELD_OUT])) + "\n")
        return self.of(numbers[NUM_HELD_OUT:]), self.of(numbers[:NUM_HELD_OUT])

    def of(self, numbers):
        import torch
        from torch.utils.data import TensorDataset

        inputs = torch.tensor(numbers, dtype=torch.float32).view(-1, 1)
        return TensorDataset(inputs, inputs[:, 0].long() % 4)

    def model(self):
        from torch import nn

        return nn.Linear(1, 4)


class SplitByRandom(Split):
    draw = staticmethod(by_random)


class SplitByNumPy(Split):
    draw = staticmethod(by_numpy)


class SplitByNobody(Split):
    draw = staticmethod(by_own_generator)


class SplitByRank(Split):
    draw = staticmethod(by_rank)


class NumberedBySet(Split):
    """Numbers its classes in the order of a set of names, which each process has of its own."""

    draw = staticmethod(sorted)

    def of(self, numbers):
        import torch
        from torch.utils.data import TensorDataset

        classes = {
            name: number for number, name in enumerate({f"class {number}" for number in range(40)})
        }
        inputs = torch.tensor(numbers, dtype=torch.float32).view(-1, 1)
        return TensorDataset(
            inputs, torch.tensor([classes[f"class {number % 40}"] for number in numbers])
        )

    def model(self):
        from torch import nn

        return nn.Linear(1, 40)


class NamedBySet(Split):
    @property
    def class_names(self):
        return list({f"class {number}" for number in range(40)})


class Noisy(Split):
    """Inputs in nested samples that are drawn from every generator, one of which nobody can
    seed.
    """

    draw = staticmethod(sorted)

    def of(self, numbers):
        return _NoisyList(numbers)


class _NoisyList:
    def __init__(self, numbers):
        self.numbers = numbers
        self.generator = np.random.default_rng()

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        import torch

        noise = [random.random(), np.random.rand(), torch.rand(()).item()]
        return {
            "noise": torch.tensor(noise),
            "own": torch.tensor(self.generator.random()),
        }, self.numbers[index] % 4
