"""BatchNorm is the one layer that depends on how a batch is shared. All that is done about it is
here.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm

from flyte_ddp.config import TrainingConfig
from flyte_ddp.world import World

# The class of all these layers. Without its private name, only torch's own layers count.
BatchNorm: Any = getattr(
    batchnorm,
    "_BatchNorm",
    (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
)


def adapt(model: nn.Module, config: TrainingConfig, world: World) -> nn.Module:
    """Return `model` with BatchNorm over the samples of all ranks, if configured, that accepts a
    batch with one value per channel.

    A batch of one sample, such as an epoch's last batch, has no variance, and torch refuses it. The
    run would end after nearly a whole epoch. Here the running statistics normalize the batch. A
    module without running statistics returns its bias, because the value less its own mean is zero.
    SyncBatchNorm includes the samples of the other ranks in training.
    """
    if config.sync_batch_norm and world.world_size > 1:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for module in model.modules():
        if isinstance(module, BatchNorm):
            # A bound method, so that a deep copy of the module gets its own.
            module.forward = types.MethodType(_forward, module)
    return model


def _forward(module: Any, inputs: Tensor) -> Any:
    has_statistics = module.running_mean is not None
    is_refused = not has_statistics
    if module.training:
        is_refused = not isinstance(module, nn.SyncBatchNorm)
    if is_refused and inputs.numel() == inputs.size(1):
        # `functional.batch_norm` is this function behind the check that refuses.
        return torch.batch_norm(
            inputs,
            module.weight,
            module.bias,
            module.running_mean,
            module.running_var,
            not has_statistics,  # training
            0.0,  # momentum
            module.eps,
            torch.backends.cudnn.enabled,
        )
    return type(module).forward(module, inputs)


def keep_frozen_statistics(model: nn.Module) -> None:
    """Put each BatchNorm of `model` with frozen parameters in evaluation mode.

    If its statistics changed, the frozen layers would no longer compute the same function.
    """
    for module in model.modules():
        if isinstance(module, BatchNorm):
            parameters = list(module.parameters())
            if parameters and not any(parameter.requires_grad for parameter in parameters):
                module.eval()
