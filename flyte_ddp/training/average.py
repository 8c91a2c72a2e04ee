"""Averaged weights: those that are evaluated and returned, while training goes on with its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.checkpoints.state import is_split
from flyte_ddp.rank.sharding import part_like, reshard


@dataclass(eq=False, repr=False)
class WeightAverage:
    """The exponential moving average of a model's weights and floating-point buffers, in single
    precision; split as the model is.

    After optimizer step n, from 0, it keeps at most (1 + n) / (10 + n) of what it was, so that the
    fresh weights are soon forgotten, as in TensorFlow's `ExponentialMovingAverage`.
    """

    model: nn.Module
    decay: float  # 0 averages nothing
    values: dict[str, Tensor] = field(default_factory=dict)  # by their names in the model
    # those of the training, while the averages have their place
    _trained: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Begin with the weights that the model has now."""
        own = self._own().items()
        self.values = {name: each.detach().to(torch.float32, copy=True) for name, each in own}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step `step`, from 0."""
        if self.decay:
            share = 1 - min(self.decay, (1 + step) / (10 + step))
            own = [_local(each).float() for each in self._own().values()]
            torch._foreach_lerp_([_local(each) for each in self.values.values()], own, share)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the averages for the length of the block."""
        if not self.decay:
            yield
            return
        reshard(self.model)
        self._trained = {name: each.detach().clone() for name, each in self._own().items()}
        self.keep()
        try:
            yield
        finally:
            reshard(self.model)
            self._fill(self._trained)
            self._trained = {}

    def keep(self) -> None:
        """Give the model the averages for good."""
        self._fill(self.values)

    def state_dicts(self) -> dict[str, Any]:
        """Return what a checkpoint holds of the model as it trains, and of the averages, also
        inside of `in_place`.
        """
        model = self.model.state_dict()
        model.update({name: each for name, each in self._trained.items() if name in model})
        return {"model": model, "average": self.values}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint's averages, of whole tensors or of this rank's parts."""
        for name, own in self.values.items():
            own.copy_(part_like(state[name], own))

    def _own(self) -> dict[str, Tensor]:
        if not self.decay:
            return {}
        named = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        return {name: each for name, each in named if each.is_floating_point()}

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, own in self._own().items():
            own.copy_(values[name])


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if is_split(tensor) else tensor  # type: ignore[attr-defined]
