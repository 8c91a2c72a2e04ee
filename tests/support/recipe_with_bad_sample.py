"""A recipe with one bad training sample, which its options plant."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass

from tests.support.recipes import NUM_CLASSES, NUM_FEATURES, Tiny


class Keyed:
    """Samples with keys. One sample is bad."""

    def __init__(self, tensors, bad, kind):
        inputs, targets = (each.clone() for each in tensors)
        targets = targets.double()
        if kind == "pixel":
            inputs[bad, 3] = float("nan")
        elif kind:
            targets[bad, 0] = {"label": float("nan"), "huge": 1e4}[kind]
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]

    def key(self, index):
        return f"file-{index}.png"


@dataclass
class Planted(Tiny):
    """Tiny on data with one bad sample, with a normalized layer if it is asked for."""

    bad: int = 0
    kind: str = ""  # pixel, label or huge
    mixes: bool = False  # the samples of a batch, by BatchNorm
    num_train = 36

    def datasets(self, directory):
        train, test = super().datasets(directory)
        return Keyed(train.tensors, self.bad, self.kind), test

    def model(self):
        from torch import nn

        norm = nn.BatchNorm1d(NUM_FEATURES) if self.mixes else nn.Identity()
        return nn.Sequential(
            norm, nn.Linear(NUM_FEATURES, 16), nn.ReLU(), nn.Linear(16, NUM_CLASSES)
        )

    def plain_losses(self, outputs, targets):
        losses = super().plain_losses(outputs, targets.nan_to_num().clamp(max=2).long())
        # the loss of a number that the output has to reach
        return losses + (targets[:, 0] - 2).clamp(min=0)


@dataclass
class Recorded(Planted):
    """Writes this rank's gradient of each step to a directory."""

    directory: str = ""

    def model(self):
        import torch
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        model, steps = super().model(), itertools.count(1)

        def record(*_):
            file = f"{self.directory}/{os.environ['RANK']}-{next(steps)}.pt"
            torch.save([own_part(each.grad) for each in model.parameters()], file)

        register_optimizer_step_pre_hook(record)
        return model


def own_part(tensor):
    """This rank's part of a tensor, split or not."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
