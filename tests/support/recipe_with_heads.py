"""A recipe for tests of runs that start from the weights of another: a body under heads of
different sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tests.support.recipes import NUM_FEATURES, Tiny


class Model(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(NUM_FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh())
        self.head = nn.Linear(16, num_classes)

    def forward(self, inputs):
        return self.head(self.body(inputs))


@dataclass
class Headed(Tiny):
    num_classes: int = 3
    note: str = ""

    changeable_options = ("note",)

    def model(self):
        return Model(self.num_classes)
