"""Weights that are evaluated and returned, while training goes on with its own: an average of them,
or what an optimizer has for an evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from flyte_ddp.checkpoints.state import local_part
from flyte_ddp.rank.sharding import part_like, reshard
from flyte_ddp.training.optim import has_modes


@dataclass(eq=False, repr=False)
class WeightAverage:
    """The exponential moving average of a model's weights and of its buffers without integers. It
    has at least single precision, and is split like the model.

    After optimizer step n, from 0, the average keeps at most (1 + n) / (10 + n) of its old value.
    So the fresh weights are soon forgotten, as in TensorFlow's `ExponentialMovingAverage`.
    """

    model: nn.Module
    decay: float  # 0 averages nothing
    optimizer: Optimizer | None = None  # may switch between modes, see `has_modes`
    values: dict[str, Tensor] = field(default_factory=dict)  # averages by their names in the model
    # the training's weights, while the model has the weights to evaluate
    _trained: dict[str, Tensor] = field(default_factory=dict)
    _buffers: dict[str, Tensor] = field(default_factory=dict)  # copies from the last update

    def __post_init__(self) -> None:
        self.start()

    @property
    def is_needed(self) -> bool:
        """True if the weights to evaluate differ from the training's weights."""
        return bool(self.decay) or has_modes(self.optimizer)

    def start(self) -> None:
        """Begin with the weights that the model has now."""
        if self.decay:
            own = self._own().items()
            self.values = {name: each.detach().to(_wide(each), copy=True) for name, each in own}
            self._buffers = self._copy_buffers()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step `step`, from 0.

        An element that is not finite is copied, now and when it is finite again. An unchanged
        element of a buffer is copied, too: it may belong to a mask, or to a table that a forward
        pass has filled.
        """
        if not self.decay:
            return
        average = get_ema_multi_avg_fn(min(self.decay, (1 + step) / (10 + step)))
        averages = [local_part(each) for each in self.values.values()]
        own = [local_part(each).to(_wide(each)) for each in self._own().values()]
        average(averages, own, step)
        for name, mean, value in zip(self.values, averages, own, strict=True):
            is_mean = mean.isfinite()
            if name in self._buffers:
                is_mean &= value != self._buffers[name]
            torch.where(is_mean, mean, value, out=mean)
        self._buffers = self._copy_buffers()

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the model have the weights to evaluate for the length of the block."""
        if not self.is_needed:
            yield
            return
        reshard(self.model)
        self._trained = {name: each.detach().clone() for name, each in self._own().items()}
        self.keep()
        try:
            yield
        finally:
            self._give_back()
            self._trained = {}

    @contextlib.contextmanager
    def trained(self) -> Iterator[None]:
        """Let the optimizer train for the length of the block, such as a save inside of
        `in_place`.
        """
        if not (self._trained and has_modes(self.optimizer)):
            yield
            return
        self._give_back()
        try:
            yield
        finally:
            self.keep()

    def keep(self) -> None:
        """Give the model the weights to evaluate for good."""
        if has_modes(self.optimizer):
            self.optimizer.eval()  # type: ignore[union-attr]
        self._fill(self.values)

    def _give_back(self) -> None:
        reshard(self.model)
        if has_modes(self.optimizer):
            self.optimizer.train()  # type: ignore[union-attr]
        self._fill(self._trained)  # the copies are exact; a switch of modes alone would round

    def state_dicts(self) -> dict[str, Any]:
        """Return the checkpoint's entries for the model as it trains, and for the averages. This
        also works inside of `in_place`.
        """
        model = self.model.state_dict()
        model.update({name: each for name, each in self._trained.items() if name in model})
        return {"model": model, "average": self.values}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint's averages: whole tensors, or this rank's parts. Load the model
        first.
        """
        self.start()
        for name, own in self.values.items():
            own.copy_(part_like(state[name], own))

    def _own(self) -> dict[str, Tensor]:
        named = (
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        )
        return {name: each for name, each in named if each.is_floating_point() or each.is_complex()}

    def _copy_buffers(self) -> dict[str, Tensor]:
        names = [name for name, _ in self.model.named_buffers(remove_duplicate=False)]
        own = self._own()
        return {name: own[name].to(_wide(own[name]), copy=True) for name in names if name in own}

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        own = self._own()
        for name, value in values.items():
            own[name].copy_(value)


def _wide(tensor: Tensor) -> torch.dtype:
    """Return the type of the average of a tensor."""
    if tensor.is_complex():
        return torch.promote_types(tensor.dtype, torch.complex64)
    if tensor.dtype == torch.float64:
        return torch.float64
    return torch.float32
