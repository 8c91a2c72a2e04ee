"""Recipes whose batches do not begin with their samples, or lack some of them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from examples.recipes.graphs import Graphs
from flyte_ddp.recipes import Recipe


class Sparse(Graphs):
    """Half of the graphs cannot be used, also of the held-out ones."""

    defaults = {
        "epochs": 2,
        "global_batch_size": 4,
        "optimizer": "sgd",
        "momentum": 0.0,
        "learning_rate": 0.05,
        "schedule": "constant",
        "weight_decay": 0.0,
    }

    def datasets(self, directory):
        train, held_out = super().datasets(directory)
        return train[:42], held_out[:11]

    @staticmethod
    def is_bad(graph):
        return float(graph["nodes"][0, 0]) < 0.5 or not graph["edges"].numel()

    def collate(self, samples, training):
        return super().collate([each for each in samples if not self.is_bad(each[0])], True)


class Says(Graphs):
    """A batch is said to have another number of samples."""

    count = 0

    def num_samples(self, inputs, targets):
        return self.count


class Sequences(Recipe):
    """Sequences of 2 to 5 vectors. The target depends on the sum of their first values."""

    defaults = {"epochs": 2, "global_batch_size": 6, "learning_rate": 0.05}

    def prepare(self, source, directory):
        return "drawn sequences"

    def datasets(self, directory):
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(2 + number % 4, 3, generator=generator) for number in range(40)]
        pairs = [(each, int(each[:, 0].sum() > 0)) for each in drawn]
        return pairs[:28], pairs[28:]

    def num_samples(self, inputs, targets):
        return len(targets)


class TimeFirst(Sequences):
    """Batches of shape (T, B, F), in which padding adds nothing."""

    def model(self):
        return nn.Sequential(Sum(), nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

    def collate(self, samples, training):
        values, labels = zip(*samples, strict=True)
        return pad_sequence(values), torch.tensor(labels)


class Sum(nn.Module):
    def forward(self, values):
        return values.sum(0)


class Packed(Sequences):
    """One row of all vectors, (1, T, F), and where each sequence ends; targets of shape (1, B)."""

    def model(self):
        return Rows()

    def collate(self, samples, training):
        values, labels = zip(*samples, strict=True)
        ends = torch.tensor([len(each) for each in values]).cumsum(0)
        return (torch.cat(values)[None], ends), torch.tensor([labels])

    def losses(self, outputs, targets):
        return super().losses(outputs, targets[0])

    def num_correct(self, outputs, targets):
        return super().num_correct(outputs, targets[0])

    def num_samples(self, inputs, targets):
        return targets.shape[1]


class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.Linear(3, 8), nn.Linear(8, 2)

    def forward(self, inputs):
        values, ends = inputs
        sums = torch.relu(self.layer(values[0])).cumsum(0)[ends - 1]
        return self.head(sums - torch.cat([torch.zeros_like(sums[:1]), sums[:-1]]))
