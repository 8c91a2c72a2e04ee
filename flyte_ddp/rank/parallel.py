"""A recipe's model on its device, and its replicas on all ranks. The model itself never sees a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.config import TrainingConfig
from flyte_ddp.rank.batch_norm import accept_single_values, synchronize
from flyte_ddp.rank.fast_start import ddp_exchange_seconds, set_ddp_timing_interval
from flyte_ddp.rank.world import World

TIMED_INTERVAL = 10  # steps between two exchanges of gradients that DDP's timers measure on CPUs, after the first ten


def place_model(model: nn.Module, config: TrainingConfig, world: World) -> nn.Module:
    """Return `model` on the rank's device, in the configured memory format and with the configured BatchNorm."""
    model = synchronize(model.to(world.device), config, world)
    accept_single_values(model)
    if config.channels_last:
        # Not by model.to(memory_format=...), which fails at the 5-D weights of 3-D convolutions. Not by `contiguous`,
        # which leaves the strides of a weight with one input channel, and so the slower kernels.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() == 4:
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return model


def replicate(model: nn.Module, config: TrainingConfig, world: World) -> tuple[Any, Any]:
    """Return `model` as it evaluates and as it trains: compiled if configured, the latter under DDP on several ranks.

    A forward pass of the replica that trains is a collective; one of the model that evaluates is not.
    """
    replica: Any = model
    if world.world_size > 1:
        on_gpu = world.device.type == "cuda"
        replica = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if on_gpu else None,
            gradient_as_bucket_view=True,  # saves a copy of every gradient
        )
        if not on_gpu:  # where each timed step would wait for the device, DDP's own interval stays
            set_ddp_timing_interval(replica, TIMED_INTERVAL)
    if config.compile:
        return torch.compile(model), torch.compile(replica)
    return model, replica


def exchange_seconds(replica: Any, world: World) -> dict[str, Any]:
    """Return each rank's mean seconds per step of the exchange of gradients, as fields of `EpochFinished`."""
    seconds = ddp_exchange_seconds(replica) if world.world_size > 1 else None
    if seconds is None:
        return {}
    exchange, overlap = seconds
    return {
        "rank_wait_seconds": world.gather(max(0.0, exchange - overlap)),
        "rank_overlap_seconds": world.gather(overlap),
    }
