"""A recipe whose gradient has a flipped bit on one rank, or on each rank of a node."""

from __future__ import annotations

import os

import torch

from tests.support.recipes import Tiny

BIT = 26  # a bit of the exponent: a larger one would make all weights infinite
_places = iter(range(10**9))


def flip(gradient):
    """Flip a bit of another value of the gradient in each pass, before the ranks exchange it."""
    if os.environ.get("WRONG", "") not in ("node", os.environ["RANK"]):
        return gradient
    flipped = gradient.clone().contiguous()
    values = flipped.view(-1).view(torch.int32)
    values[next(_places) % len(values)] ^= 1 << BIT
    return flipped


class Wrong(Tiny):
    """`Tiny`, with wrong gradients where the environment variable WRONG says so."""

    def model(self):
        model = super().model()
        next(model.parameters()).register_hook(flip)
        return model
