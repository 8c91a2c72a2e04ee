"""How the ranks hold and train one model: the base of all kinds, and the choice of one.

A kind is a class in a file, such as ddp.py, that `config.PARALLELISMS` names. The loop, the
evaluation and the checkpoints ask the object, and never which kind it is. The model itself never
sees a rank.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Store
from torch.utils.checkpoint import checkpoint

from flyte_ddp.config import PARALLELISMS, TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.fast_start import avoid_importing_dynamo
from flyte_ddp.rank.step_timer import BACKWARD, StepTimer
from flyte_ddp.recipes import Recipe
from flyte_ddp.training import batch_norm
from flyte_ddp.training.optim import count_state_bytes
from flyte_ddp.world import World

MIN_BLOCK_PARAMETERS = 1 << 16  # smaller modules are gathered with the one around them
FP32_BYTES = 4
# The share of a GPU's memory for weights, gradients and optimizer. Activations come on top.
MEMORY_SHARE = 0.9

logger = logging.getLogger(__name__)


def choose_parallelism(recipe: Recipe, config: TrainingConfig, world: World) -> Parallelism:
    """Return the configured kind; the base for a rank without others."""
    if world.world_size > 1:
        module, _, name = PARALLELISMS[config.parallel].partition(":")
        kind: type[Parallelism] = getattr(importlib.import_module(module), name)
        return kind(recipe, config, world)
    if config.parallel != "ddp":
        logger.warning(
            "parallel: one rank holds the whole model; %s splits it over several", config.parallel
        )
    return Parallelism(recipe, config, world)


@dataclass(eq=False)
class Parallelism:
    """One rank that holds and trains the whole model of a recipe. Subclasses for several ranks
    override what differs.

    Every rank has such an object, and all ranks call each method that is a collective.
    """

    is_collective = False  # a pass of the bare model, and a save, need all ranks at once

    recipe: Recipe
    config: TrainingConfig
    world: World

    def __post_init__(self) -> None:
        # scales the losses of fp16, because small gradients would be rounded to zero
        is_fp16 = self.config.precision == "fp16"
        self.scaler = torch.amp.GradScaler(self.world.device.type, enabled=is_fp16)

    @property
    def half(self) -> torch.dtype | None:
        """The type that most of the model computes in; None for single precision."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.config.precision)

    @property
    def saves(self) -> bool:
        """True on a rank that takes part in saves and inspections of the model."""
        return self.world.is_first or self.is_collective

    @property
    def num_shards(self) -> int:
        """The number of ranks that hold one model together."""
        if self.is_collective:
            return self.world.world_size
        return 1

    def prepare_process(self) -> None:
        """Set what a process of this kind needs, before it makes a model."""
        if not self.config.compile:
            avoid_importing_dynamo()

    # From a recipe's model to one that trains

    def building(self) -> AbstractContextManager[object]:
        """Return the context in which `Recipe.model` is called."""
        return nullcontext()

    def place(self, model: nn.Module) -> nn.Module:
        """Return `model` on the rank's device, in the configured memory format and with the
        configured BatchNorm.

        Raises:
            ConfigError: the model cannot fit into the device's memory.
        """
        self.check_memory(model)
        model = batch_norm.adapt(model.to(self.world.device), self.config, self.world)
        if self.config.channels_last:
            # model.to(memory_format=...) fails at the 5-D weights of 3-D convolutions. `contiguous`
            # keeps the strides of a weight with one input channel, and so the slower kernels.
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dim() == 4:
                    tensor.data = tensor.data.to(memory_format=torch.channels_last)
        return model

    def shard(self, model: nn.Module) -> tuple[Any, Any]:
        """Return `model` as it evaluates and as it trains, compiled if configured.

        The gradients of the training model are means over the ranks. Its forward pass may be a
        collective. The other model's forward pass is a collective if `is_collective`.
        """
        self.recompute_activations(model)
        replica = self.replicate(model)
        if self.config.compile:
            return torch.compile(model), torch.compile(replica)
        return model, replica

    def replicate(self, model: nn.Module) -> Any:
        """Return a module that averages the gradients of `model` over the ranks in its backward
        pass.
        """
        return model

    def check_memory(self, model: nn.Module) -> None:
        """Check that weights, gradients and optimizer state fit into the memory of a GPU.

        Raises:
            ConfigError: they do not fit; names a remedy.
        """
        if self.world.device.type != "cuda":
            return
        available = torch.cuda.get_device_properties(self.world.device).total_memory
        others = 2 * bool(self.config.ema_decay)  # the average, and the weights beside it
        weights = (each.numel() * (1 + each.requires_grad + others) for each in model.parameters())
        needed = FP32_BYTES * sum(weights) + count_state_bytes(self.recipe, model, self.config)
        allowed = MEMORY_SHARE * available
        if needed / self.num_shards > allowed:
            remedy = 'with "parallel": "fsdp"'
            if self.is_collective:
                remedy = "on more GPUs or nodes"
            min_ranks = -(-needed // int(allowed))
            needed_gib = needed / self.num_shards / 2**30
            raise ConfigError(
                f"parallel: expected at least {min_ranks} ranks, {remedy}: "
                f"weights, gradients and the optimizer's state take "
                f"{needed_gib:.1f} GiB per rank, got a device with "
                f"{available / 2**30:.1f} GiB"
            )

    def gathered_bytes(self, model: nn.Module) -> int:
        """Return the most that a rank gathers of the others' parts at a time, for an estimate."""
        return 0

    def recompute_activations(self, model: nn.Module) -> None:
        """Let the backward pass compute each block's activations again, if configured."""
        if self.config.activation_checkpointing:
            for block in self.blocks(model):
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the recipe's blocks, or the large modules of `model` if the recipe names none."""
        return list(self.recipe.blocks(model)) or large_blocks(model)

    # Methods for a step

    def sync(self, replica: Any, is_last: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch's passes: gradients are averaged over the ranks after
        the last one of a step.
        """
        return nullcontext()

    def autocast(self) -> AbstractContextManager[object]:
        """Return a context in which the model computes in the configured precision."""
        if not self.half:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self.half)

    def watch(self, timer: StepTimer, model: nn.Module) -> None:
        """Set on `timer` the phases in which waits for other ranks look like work."""
        if self.config.compile:  # hooks of parameters do not see its gradients
            timer.waiting = [BACKWARD]
        else:
            timer.watch(model)

    def watch_passes(self, replica: Any, model: nn.Module, open_store: Callable[[], Store]) -> None:
        """Let each forward pass of `replica` check first that the ranks will exchange the same.

        Args:
            open_store: returns the store where the ranks meet.
        """

    def check_gradients(self, replica: Any, step: int) -> None:
        """Check that the backward pass of optimizer step `step`, from 0, has made all gradients for
        which the other ranks wait. Call it before any other collective.

        Raises:
            ConfigError: names the parameters without a gradient.
        """

    def exchange_seconds(self, replica: Any) -> dict[str, Any]:
        """Return each rank's mean seconds per step of the exchange of gradients, as fields of
        `EpochFinished`.
        """
        return {}


def large_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the large modules in the lists and sequences of `model`."""
    blocks = []
    for child in model.children():
        is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if isinstance(model, (nn.ModuleList, nn.Sequential)) and not is_container:
            if count_parameters(child) >= MIN_BLOCK_PARAMETERS:
                blocks.append(child)
        else:
            blocks += large_blocks(child)
    return blocks


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share their memory, so that none can be written alone."""
    if tensor.layout is not torch.strided:
        return False
    dimensions = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in dimensions)


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of the whole model."""
    return sum(parameter.numel() for parameter in model.parameters())
