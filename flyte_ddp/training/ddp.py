"""`parallel: ddp`: each rank holds the whole model, and backward passes average gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import Store
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.errors import ConfigError, abbreviate
from flyte_ddp.rank.fast_start import (
    ddp_exchange_seconds,
    has_all_gradients,
    set_ddp_timing_interval,
)
from flyte_ddp.rank.step_timer import FORWARD, StepTimer
from flyte_ddp.recipes import locate
from flyte_ddp.training.buffer_shapes import KEY, BufferShapes, has_own_buffers
from flyte_ddp.training.parallel import Parallelism, is_expanded
from flyte_ddp.world import RankNotes

# torch 2.15 means to replace it by an option that makes the buffers equal at the start
warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")

# steps between two exchanges of gradients that DDP's timers measure on CPUs, after the first ten
TIMED_INTERVAL = 10


MAX_NAMES = 3  # names of parameters in an error


class DdpParallelism(Parallelism):
    """A replica of the model on each rank."""

    def replicate(self, model: nn.Module) -> Any:
        self._check_tensors(model)
        on_gpu = self.world.device.type == "cuda"
        own: dict[str, Any] = {}
        if not self.config.broadcast_buffers:  # torch warns if the option is given
            own["broadcast_buffers"] = False
        device_ids = None
        if on_gpu:
            device_ids = [self.world.device.index]
        replica = DistributedDataParallel(
            model,
            device_ids=device_ids,
            gradient_as_bucket_view=True,  # saves a copy of every gradient
            find_unused_parameters=self.config.find_unused_parameters,
            **own,
        )
        if not on_gpu:  # on a GPU each timed step waits for the device: DDP's own interval stays
            set_ddp_timing_interval(replica, TIMED_INTERVAL)
            # A sum of two is the same in either order. If parameters may be unused, DDP keeps its
            # first arrangement.
            if self.world.world_size > 2 and not self.config.find_unused_parameters:
                _arrange_buckets(model, replica)
        return replica

    def _check_tensors(self, model: nn.Module) -> None:
        """Check that the ranks can send each other all parameters and buffers.

        Raises:
            ConfigError: one has a type that cannot be sent, or elements that share their memory.
        """
        problems: dict[torch.dtype, str] = {}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            dtype = tensor.dtype
            if dtype not in problems:
                problems[dtype] = ""
                try:
                    dist.broadcast(torch.zeros(1, device=tensor.device).to(dtype), src=0)
                except RuntimeError:
                    problems[dtype] = f"of {dtype}: give it another type"
            problem = problems[dtype]
            if is_expanded(tensor):
                problem = "an expanded one: add .clone()"
            if problem:
                raise ConfigError(
                    f"{locate(self.recipe, 'model')}: expected with ddp parameters and buffers "
                    f"that the ranks can send each other, got {name}, {problem}"
                )

    def watch_passes(self, replica: Any, model: nn.Module, open_store: Callable[[], Store]) -> None:
        if self.config.broadcast_buffers and has_own_buffers(model):
            place = locate(self.recipe, "model")
            notes = RankNotes(open_store().clone(), KEY, self.world)
            shapes = BufferShapes(model, notes, place)
            replica.register_forward_pre_hook(shapes.compare)
            replica.register_forward_hook(shapes.note)

    def check_gradients(self, replica: Any, step: int) -> None:
        if self.config.find_unused_parameters or has_all_gradients(replica):
            return
        trained = (each for each in replica.module.named_parameters() if each[1].requires_grad)
        names = [name for name, parameter in trained if parameter.grad is None]
        named = abbreviate(names, MAX_NAMES) or "some of them in its last micro-batch"
        raise ConfigError(
            f"{locate(self.recipe, 'model')}: expected a gradient for every parameter in every "
            f"step, got none for {named} on rank {self.world.rank} in step {step + 1}: use all in "
            "each forward pass, or give the config find_unused_parameters: true"
        )

    def sync(self, replica: Any, is_last: bool) -> AbstractContextManager[object]:
        if is_last:
            return nullcontext()
        return replica.no_sync()  # type: ignore[no-any-return]

    def watch(self, timer: StepTimer, model: nn.Module) -> None:
        super().watch(timer, model)
        if self.config.broadcast_buffers and any(True for _ in model.buffers()):
            timer.waiting = [FORWARD, *timer.waiting]

    def exchange_seconds(self, replica: Any) -> dict[str, Any]:
        seconds = ddp_exchange_seconds(replica)
        if seconds is None:
            return {}
        exchange, overlap = seconds
        return {
            "rank_wait_seconds": self.world.all_gather(max(0.0, exchange - overlap)),
            "rank_overlap_seconds": self.world.all_gather(overlap),
        }


class _Zero(nn.Module):
    """Zero, with a gradient of zeros for each weight of a model, from the last one to the first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> torch.Tensor:
        weights = (parameter for parameter in self.model.parameters() if parameter.requires_grad)
        return torch.stack([0 * weight.sum() for weight in weights]).sum()


def _arrange_buckets(model: nn.Module, replica: nn.Module) -> None:
    """Let DDP arrange the gradients in buckets as after its first backward pass. This makes a
    backward pass that changes nothing.

    The place of a gradient in its bucket decides in which order the ranks' gradients are summed.
    Without this call the first step of every attempt would sum in another order than the same step
    of an undisturbed run. The weights would differ.
    """
    replica.module = _Zero(model)  # the model itself may have hooks
    replica().backward()
    replica.module = model
    model.zero_grad()
