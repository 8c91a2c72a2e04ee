"""`parallel: ddp`: each rank holds the whole model, and backward passes average gradients."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp.rank.fast_start import ddp_exchange_seconds, set_ddp_timing_interval
from flyte_ddp.rank.step_timer import FORWARD, StepTimer
from flyte_ddp.training.parallel import Parallelism

# torch 2.15 means to replace it by an option that makes the buffers equal at the start
warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")

# steps between two exchanges of gradients that DDP's timers measure on CPUs, after the first ten
TIMED_INTERVAL = 10


class DdpParallelism(Parallelism):
    """A replica of the model on each rank."""

    def replicate(self, model: nn.Module) -> Any:
        on_gpu = self.world.device.type == "cuda"
        # torch warns of the option where it is named
        own: dict[str, Any] = {} if self.config.broadcast_buffers else {"broadcast_buffers": False}
        replica = DistributedDataParallel(
            model,
            device_ids=[self.world.device.index] if on_gpu else None,
            gradient_as_bucket_view=True,  # saves a copy of every gradient
            find_unused_parameters=self.config.find_unused_parameters,
            **own,
        )
        if not on_gpu:  # where each timed step would wait for the device, DDP's own interval stays
            set_ddp_timing_interval(replica, TIMED_INTERVAL)
            # the sum of two is the same in either order, and where any may be unused DDP keeps its
            # first arrangement
            if self.world.world_size > 2 and not self.config.find_unused_parameters:
                _arrange_buckets(model, replica)
        return replica

    def sync(self, replica: Any, is_last: bool) -> AbstractContextManager[object]:
        return nullcontext() if is_last else replica.no_sync()

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
