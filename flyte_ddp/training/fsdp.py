"""`parallel: fsdp`: each rank holds a part of every parameter, its gradient and its optimizer state
(FSDP2).

A checkpoint has one file of each rank with its part of every tensor, and any number of ranks reads
it, split or not (checkpoints/assembly.py). The trained weights are one file, the same as without
shards.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import Store

from flyte_ddp.checkpoints.assembly import slices
from flyte_ddp.checkpoints.state import is_split, own_box
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.entry import RETURNED_BYTES, keep_freed_memory
from flyte_ddp.rank.step_timer import BACKWARD, FORWARD, StepTimer
from flyte_ddp.recipes import Recipe, locate
from flyte_ddp.training import batch_norm
from flyte_ddp.training.parallel import (
    FP32_BYTES,
    Parallelism,
    count_parameters,
    is_expanded,
)
from flyte_ddp.training.pass_layers import PassLayers
from flyte_ddp.world import RankNotes, World


class FsdpParallelism(Parallelism):
    """A part of the model on each rank; every pass gathers one block after another."""

    is_collective = True

    def prepare_process(self) -> None:
        keep_freed_memory(RETURNED_BYTES)

    def building(self) -> AbstractContextManager[object]:
        """Leave a model without contents that can be filled after it was split."""
        is_filled = self.recipe.copies_from_first and not self.world.is_first
        if is_filled or self.fills_by_tensor:
            return torch.device("meta")
        return nullcontext()

    def place(self, model: nn.Module) -> nn.Module:
        """Leave `model` on the CPU, because the device need not hold all of it, and in the order of
        its dimensions, as FSDP takes it.
        """
        self.check_memory(model)
        return batch_norm.adapt(model, self.config, self.world)

    @property
    def fills_by_tensor(self) -> bool:
        return type(self.recipe).initial_value is not Recipe.initial_value

    def shard(self, model: nn.Module) -> tuple[Any, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        self._check_tensors(model)
        self.recompute_activations(model)
        mesh = init_device_mesh(self.world.device.type, (self.world.world_size,))
        inner = outer = MixedPrecisionPolicy()
        # Weights and optimizer stay in fp32, and gradients are summed in fp32.
        if self.half:
            inner = MixedPrecisionPolicy(self.half, torch.float32)
            outer = MixedPrecisionPolicy(self.half, torch.float32, torch.float32)
        for unit in (*self.blocks(model), model):
            if self.config.compile and unit is not model:
                unit.compile()
            if self.recipe.copies_from_first and not self.fills_by_tensor:
                _copy_from_first(unit, self.world)
            policy = inner
            if unit is model:
                policy = outer
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        if self.fills_by_tensor:
            _fill(model, self.recipe.initial_value, self.world.device)
        return model, model

    def _check_tensors(self, model: nn.Module) -> None:
        """Check that each parameter can be split, and each module computed in the precision.

        Raises:
            ConfigError: names the parameter or module that cannot.
        """
        place = locate(self.recipe, "model")
        for name, parameter in model.named_parameters():
            if not parameter.dim() or not parameter.numel():
                kind = "a scalar: give it the shape (1,)"
                if parameter.dim():
                    kind = "an empty one"
                raise ConfigError(
                    f'{place}: expected with "parallel": "fsdp" parameters that can be split, got '
                    f"{name}, {kind}"
                )
        for name, buffer in model.named_buffers():
            if is_expanded(buffer):
                raise ConfigError(
                    f"{place}: expected buffers that the ranks can send each other, got {name}, an "
                    "expanded one: add .clone()"
                )
        for name, module in model.named_modules():
            is_mixed = isinstance(module, batch_norm.BatchNorm) and module.affine
            if is_mixed and self.half and self.world.device.type == "cpu":
                raise ConfigError(
                    f'precision: expected "fp32" with "parallel": "fsdp" on CPUs, where a '
                    f"{type(module).__name__} such as {name} needs weights of the type of its "
                    f'statistics, got "{self.config.precision}"'
                )

    def gathered_bytes(self, model: nn.Module) -> int:
        # A rank gathers the rest of the model all the time, and of the blocks the current block,
        # the next block, and the gradient of a block.
        blocks = [count_parameters(each) for each in self.blocks(model)]
        rest = count_parameters(model) - sum(blocks)
        return FP32_BYTES * (2 * rest + 3 * max(blocks, default=0))

    def sync(self, replica: Any, is_last: bool) -> AbstractContextManager[object]:
        """Sum gradients over the ranks, and drop gathered weights, only after the last
        micro-batch.
        """
        replica.set_requires_gradient_sync(is_last)
        replica.set_reshard_after_backward(is_last)
        return nullcontext()

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the shards have the precision already

    def watch(self, timer: StepTimer, model: nn.Module) -> None:
        timer.waiting = []  # on CPUs Python measures the waits
        if self.world.device.type == "cuda":
            timer.waiting = [FORWARD, BACKWARD]

    def watch_passes(self, replica: Any, model: nn.Module, open_store: Callable[[], Store]) -> None:
        if not self.config.compile:  # hooks would break the compiled graph
            place = locate(self.recipe, "model")
            notes = RankNotes(open_store().clone(), "flyte_ddp/layers", self.world)
            PassLayers(model, notes, place).watch()


def _fill(
    model: nn.Module, initial_value: Callable[[str, torch.Size], Tensor], device: torch.device
) -> None:
    """Give a split model its fresh weights by `Recipe.initial_value`, one tensor after another."""
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            value = initial_value(name, tensor.shape)
            if is_split(tensor):
                tensor.to_local().copy_(value[slices(own_box(tensor))])  # type: ignore[attr-defined]
            else:
                tensor.copy_(value)


@torch.no_grad()
def _copy_from_first(module: nn.Module, world: World) -> None:
    """Copy the first rank's weights and buffers to ranks that built a module without contents."""
    copied: dict[Tensor, Tensor] = {}  # tied weights stay one tensor
    for part in module.modules():
        own: dict[str, Any] = {"recurse": False, "remove_duplicate": False}
        for name, tensor in (*part.named_parameters(**own), *part.named_buffers(**own)):
            if is_split(tensor):
                continue
            if tensor not in copied:
                copy = tensor
                if tensor.is_meta:
                    copy = torch.empty_like(tensor, device="cpu")
                if isinstance(tensor, nn.Parameter):
                    copy = nn.Parameter(copy, tensor.requires_grad)
                copied[tensor] = world.broadcast(copy)
            setattr(part, name, copied[tensor])
