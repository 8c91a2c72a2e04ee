"""The optimizer and its learning rate. Knows nothing of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import suggest
from flyte_ddp.errors import ConfigError


def build_optimizer(
    model: nn.Module,
    config: TrainingConfig,
    groups: Sequence[Mapping[str, Any]] | None = None,
    has_fused_sgd: bool = True,
) -> Optimizer:
    """Return the configured optimizer of the trained parameters of `model`, fused into one kernel
    per step.

    Args:
        groups: what `Recipe.optimizer_groups` returns; None for all parameters in one group.
        has_fused_sgd: torch has such a kernel for these parameters.

    Raises:
        ConfigError: a trained parameter is in no group, or a group has a setting that is none.
    """
    given = [{"params": list(model.parameters())}] if groups is None else groups
    for group in given:
        _check_group(group)
    trained = [
        {**group, "params": [each for each in group["params"] if each.requires_grad]}
        for group in given
    ]
    grouped = {id(parameter) for group in trained for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in grouped:
            raise ConfigError(
                "optimizer_groups: expected every trained parameter of the model, "
                f"got none with {name}"
            )
    rate, decay = config.learning_rate, config.weight_decay
    if config.optimizer == "sgd":
        return torch.optim.SGD(
            trained, lr=rate, momentum=config.momentum, weight_decay=decay, fused=has_fused_sgd
        )
    optimizer = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return optimizer(trained, lr=rate, weight_decay=decay, fused=True)


def _check_group(group: Any) -> None:
    if (
        not isinstance(group, Mapping)
        or "params" not in group
        or isinstance(group["params"], torch.Tensor)
    ):
        raise ConfigError(
            "optimizer_groups: expected dicts with a list of parameters as params, "
            f"got {group!r:.80}"
        )
    settings = {
        *signature(torch.optim.SGD).parameters,
        *signature(torch.optim.AdamW).parameters,
        "name",
    }
    for name in group:
        if name not in settings:  # torch would keep it, and go by the default
            raise ConfigError(
                "optimizer_groups: expected settings of torch.optim in a group, got "
                f"{name!r}{suggest(name, settings)}"
            )
    rate = group.get("lr", 0.0)
    if not isinstance(rate, (int, float)) or not 0 <= rate < math.inf:
        raise ConfigError(
            f"optimizer_groups: lr: expected a finite number of at least 0, got {rate!r}"
        )


def learning_rate_factor(config: TrainingConfig, step: int, num_steps: int) -> float:
    """Return the factor, in [0, 1], of each group's own rate at optimizer step `step` (from 0) of
    `num_steps`.

    A function of the step alone, so that a schedule has nothing to restore and fits any change of
    the run's length. one_cycle takes its shape from Smith, "Super-Convergence" (2018), with torch's
    defaults: from 1/25 up over the first 30 %, then down to 1/250,000, both along a cosine.
    """
    if config.schedule == "one_cycle":
        rise = max(1.0, 0.3 * num_steps)
        if step < rise:
            return _cosine(1 / 25, 1.0, step / rise)
        return _cosine(1.0, 1 / 250_000, (step - rise) / max(1.0, num_steps - rise))
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    return _cosine(1.0, 0.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, fraction))) / 2
