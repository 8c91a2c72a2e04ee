"""Recipes that split and number their data themselves: right ones, and ones on which the ranks
cannot agree.
"""

from __future__ import annotations

import os
import random

import numpy as np

from flyte_ddp.recipes import Recipe

SIZE, NUM_HELD_OUT = 64, 16


def by_random(numbers):
    random.shuffle(numbers)
    return numbers


def by_torch(numbers):
    import torch

    return [
        numbers[index] for index in torch.utils.data.random_split(numbers, [SIZE, 0])[0].indices
    ]


class Split(Recipe):
    """Numbers with a held-out part."""

    draw = staticmethod(by_torch)
    defaults = {"epochs": 2, "global_batch_size": 8, "optimizer": "sgd"}

    def prepare(self, source, directory):
        return f"{SIZE} numbers"

    def datasets(self, directory):
        numbers = self.draw(list(range(SIZE)))
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
    draw = staticmethod(lambda numbers: np.random.permutation(numbers).tolist())


class SplitByNobody(Split):  # Nobody can seed this generator.
    draw = staticmethod(lambda numbers: np.random.default_rng().permutation(numbers).tolist())


class SplitByRank(Split):
    draw = staticmethod(lambda numbers: numbers[int(os.environ.get("RANK", 0)) :])


class NumberedBySet(Split):
    """Numbers its classes in the order of a set of names, which each process has of its own."""

    draw = staticmethod(sorted)

    def of(self, numbers):
        classes = list({f"class {number}" for number in range(40)})
        data = super().of(numbers)
        targets = [classes.index(f"class {number % 40}") for number in numbers]
        data.tensors = data.tensors[0], data.tensors[1].new_tensor(targets)
        return data

    def model(self):
        from torch import nn

        return nn.Linear(1, 40)


class NamedBySet(Split):
    @property
    def class_names(self):
        return list({f"class {number}" for number in range(40)})


class Noisy(Split):
    """Inputs in nested samples that every generator draws. One generator cannot be seeded."""

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
