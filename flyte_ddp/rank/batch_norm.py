"""BatchNorm is the one layer that depends on how a batch is shared. All that is done about it is here."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from flyte_ddp.config import TrainingConfig
from flyte_ddp.rank.world import World


def synchronize(model: nn.Module, config: TrainingConfig, world: World) -> nn.Module:
    """Return `model` with BatchNorm over the samples of all ranks, if configured."""
    if not config.sync_batch_norm or world.world_size == 1:
        return model
    synchronized: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return synchronized


def keep_frozen_statistics(model: nn.Module) -> None:
    """Put each BatchNorm of `model` whose parameters are not trained in evaluation mode.

    If its statistics moved on, the frozen weights after it would no longer be the function that was kept.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            parameters = list(module.parameters())
            if parameters and not any(parameter.requires_grad for parameter in parameters):
                module.eval()
