"""A recipe of three equal phases. One phase takes one rank longer: SLOW="phase rank factor"."""

from __future__ import annotations

import os
import time

from tests.support.recipes import Listed, _rank

PHASE_SECONDS = 0.02


def work(phase):
    """Take the time of a phase."""
    name, rank, factor = os.environ.get("SLOW", "none 0 1").split()
    time.sleep(PHASE_SECONDS * (float(factor) if name == phase and int(rank) == _rank() else 1))


class Slow(Listed):
    num_train, num_test = 96, 4
    defaults = {**Listed.defaults, "epochs": 6, "global_batch_size": 4, "data_workers": 0}

    def datasets(self, directory):
        train, test = super().datasets(directory)
        return _Loaded(train), test

    def model(self):
        import torch
        from torch import nn

        class Pause(torch.autograd.Function):
            @staticmethod
            def forward(context, inputs):
                return inputs.clone()

            @staticmethod
            def backward(context, gradient):
                work("backward")
                return gradient

        class Paused(nn.Module):
            def forward(self, inputs):
                return Pause.apply(inputs) if inputs.requires_grad else inputs

        first, *rest = super().model()
        return nn.Sequential(first, Paused(), *rest)

    def losses(self, outputs, targets):
        if outputs.requires_grad:
            work("forward")
        return super().losses(outputs, targets)


class _Loaded:
    """Samples with a slow first one in each batch."""

    def __init__(self, samples):
        self.samples, self.num_taken = samples, 0

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.num_taken += 1
        if self.num_taken % (4 // int(os.environ["WORLD_SIZE"])) == 0:
            work("data")
        return self.samples[index]
