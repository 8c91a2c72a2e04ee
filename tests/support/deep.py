"""A recipe whose weights take most of the memory, in many blocks, as those of a Transformer do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import nn

from flyte_ddp.recipes.mnist import Mnist


@dataclass(frozen=True)
class Deep(Mnist):
    """Noise in MNIST's shapes, in a model of as many layers as one wants."""

    layers: int = 1
    width: int = 64

    def prepare(self, source, directory):
        draw = np.random.default_rng(0)
        for split, size in (("train", 256), ("test", 64)):
            images = draw.integers(0, 256, size=(size, 28, 28), dtype=np.uint8)
            np.savez(
                directory / f"{split}.npz", images=images, labels=draw.integers(0, 10, size=size)
            )
        return "noise"

    def model(self):
        hidden = [
            nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.layers)
        ]
        return nn.Sequential(
            nn.Flatten(), nn.Linear(28 * 28, self.width), *hidden, nn.Linear(self.width, 10)
        )
