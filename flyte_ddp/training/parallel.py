"""A recipe's model on its device, and its replicas or shards on all ranks. The model itself never
sees a rank.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flyte_ddp.config import TrainingConfig
from flyte_ddp.rank.fast_start import ddp_exchange_seconds, set_ddp_timing_interval
from flyte_ddp.rank.sharding import check_memory, fill_model, large_blocks, shard_model
from flyte_ddp.recipes import Recipe
from flyte_ddp.training.batch_norm import accept_single_values, synchronize
from flyte_ddp.training.contract import check_model
from flyte_ddp.training.initial_state import freeze_layers
from flyte_ddp.world import World

logger = logging.getLogger(__name__)

# steps between two exchanges of gradients that DDP's timers measure on CPUs, after the first ten
TIMED_INTERVAL = 10


def build_model(recipe: Recipe, config: TrainingConfig, world: World) -> nn.Module:
    """Return the recipe's model as `place_model` does; without contents if it is split and can be
    filled afterwards.
    """
    splits = config.parallel == "fsdp" and world.world_size > 1
    fills_by_tensor = type(recipe).initial_value is not Recipe.initial_value
    is_filled = fills_by_tensor or (recipe.copies_from_first and not world.is_first)
    with torch.device("meta") if splits and is_filled else nullcontext():
        model = check_model(recipe, recipe.model())
    freeze_layers(model, config.frozen_layers)
    return place_model(model, config, world)


def place_model(model: nn.Module, config: TrainingConfig, world: World) -> nn.Module:
    """Return `model` on the rank's device, in the configured memory format and with the configured
    BatchNorm.

    One that is to be split stays on the CPU: the device need not hold all of it.

    Raises:
        ConfigError: the model cannot fit into the device's memory.
    """
    splits = config.parallel == "fsdp" and world.world_size > 1
    if world.device.type == "cuda":
        memory = torch.cuda.get_device_properties(world.device).total_memory
        check_memory(model, config, world.world_size if splits else 1, memory)
    model = synchronize(model if splits else model.to(world.device), config, world)
    accept_single_values(model)
    # FSDP takes only tensors whose memory is in the order of their dimensions
    if config.channels_last and not splits:
        # Not by model.to(memory_format=...), which fails at the 5-D weights of 3-D convolutions.
        # Not by `contiguous`, which leaves the strides of a weight with one input channel, and so
        # the slower kernels.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.dim() == 4:
                tensor.data = tensor.data.to(memory_format=torch.channels_last)
    return model


def replicate(
    model: nn.Module, config: TrainingConfig, world: World, recipe: Recipe | None = None
) -> tuple[Any, Any]:
    """Return `model` as it evaluates and as it trains: compiled if configured, the latter under DDP
    on several ranks.

    A forward pass of the replica that trains is a collective; one of the model that evaluates is
    not, unless the model is split (`parallel: fsdp`): then both are the model itself.

    Args:
        recipe: of the model; names its blocks, and fills one that `build_model` has left without
            contents.
    """
    blocks: Sequence[nn.Module] = recipe.blocks(model) if recipe else ()
    replica: Any = model
    if config.parallel == "fsdp" and world.world_size == 1:
        logger.warning("parallel: one rank holds the whole model; fsdp splits it over several")
    if config.parallel == "fsdp" or config.activation_checkpointing:
        blocks = list(blocks) or large_blocks(model)
    if config.activation_checkpointing:
        for block in blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if config.parallel == "fsdp" and world.world_size > 1:
        if config.compile:
            for block in blocks:
                block.compile()
        shard_model(model, blocks, config, world, bool(recipe and recipe.copies_from_first))
        if recipe and any(parameter.is_meta for parameter in model.parameters()):
            fill_model(model, recipe.initial_value, world.device)
        return model, model
    if world.world_size > 1:
        on_gpu = world.device.type == "cuda"
        replica = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if on_gpu else None,
            gradient_as_bucket_view=True,  # saves a copy of every gradient
        )
        if not on_gpu:  # where each timed step would wait for the device, DDP's own interval stays
            set_ddp_timing_interval(replica, TIMED_INTERVAL)
            if world.world_size > 2:  # the sum of two is the same in either order
                _arrange_buckets(model, replica)
    if config.compile:
        return torch.compile(model), torch.compile(replica)
    return model, replica


class _Zero(nn.Module):
    """Zero, with a gradient of zeros for each weight of a model, from the last one to the first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        weights = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        return torch.stack([0 * weight.sum() for weight in weights]).sum()


def _arrange_buckets(model: nn.Module, replica: nn.Module) -> None:
    """Let DDP arrange the gradients in buckets as it does after its first backward pass, by one
    that changes nothing.

    Where a gradient lies in its bucket decides in which order the ranks' are added up. Else the
    first step of every attempt would have another order than the same step of an undisturbed run,
    whose weights it could not repeat.
    """
    replica.module = _Zero(model)  # not the model itself, which may have hooks
    replica().backward()
    replica.module = model
    model.zero_grad()


def exchange_seconds(replica: Any, world: World) -> dict[str, Any]:
    """Return each rank's mean seconds per step of the exchange of gradients, as fields of
    `EpochFinished`.
    """
    seconds = ddp_exchange_seconds(replica) if world.world_size > 1 else None
    if seconds is None:
        return {}
    exchange, overlap = seconds
    return {
        "rank_wait_seconds": world.all_gather(max(0.0, exchange - overlap)),
        "rank_overlap_seconds": world.all_gather(overlap),
    }
