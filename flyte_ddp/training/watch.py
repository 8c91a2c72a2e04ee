"""The watch over the loss of every step: which step is bad, and the samples behind it.

The sum of the ranks' losses is all-reduced while the last backward pass of a step runs, so that all
ranks judge the same value. On CPUs the all-reduce takes some percent of a small model's step. There
each rank judges its own loss, if the run only has to end at a loss that is not finite. This module
knows neither the model nor what is done about a bad step.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import BadSample, StepFoundBad
from flyte_ddp.events.kinds import MAX_NAMED
from flyte_ddp.rank.data import Samples, isolate_draws
from flyte_ddp.rank.nested import tensors_in
from flyte_ddp.rank.plan import BatchShard
from flyte_ddp.training.progress import Progress
from flyte_ddp.world import World

WINDOW = 128  # number of finite losses in the median for the comparison


@dataclass(eq=False)
class WatchedStep:
    """A step whose loss is computed, and maybe not read yet."""

    shard: BatchShard
    is_shared: bool  # all ranks judge the sum of their losses
    losses: list[Tensor] = field(default_factory=list)  # the recipe's losses of each micro-batch
    total: Tensor | None = None  # the sum of the losses of all ranks, or of this rank
    work: Any = None  # the all-reduce of `total`
    step: int = 0  # the step's number, from 1
    epoch: int = 0
    is_ready: Any = None  # the event on a GPU after which `total` can be read

    def add(self, losses: Tensor, total: Tensor, is_last: bool, world: World) -> None:
        """Note the losses of a micro-batch, and this rank's sum so far; call it before the backward
        pass.
        """
        self.losses.append(losses.detach())
        if is_last:
            self.total = total.to(torch.float64, copy=True)
            if self.is_shared:
                self.work = dist.all_reduce(self.total, group=world.group, async_op=True)


class LossWatch:
    """Judges the steps in their order. Every rank calls each method."""

    def __init__(self, config: TrainingConfig, world: World, samples: Samples) -> None:
        self.config, self.world, self.samples = config, world, samples
        only_ends = not config.spike_factor and config.on_bad_step == "stop"
        self.is_shared = world.world_size > 1 and not (only_ends and world.device.type == "cpu")
        # returns the key of a sample, given its index
        self.key = getattr(samples.dataset, "key", lambda _: "")
        self._waiting: deque[WatchedStep] = deque()
        self.last: WatchedStep | None = None

    def end(self, watched: WatchedStep, num_targets: float | Tensor, progress: Progress) -> None:
        """Queue a step for judgement after its gradient is computed, before its update."""
        assert watched.total is not None  # the last micro-batch has set it
        if watched.work:
            watched.work.wait()  # on a GPU the stream waits, and not this process
        watched.step, watched.epoch = progress.step + 1, progress.epoch
        mean = watched.total / num_targets
        if self.world.device.type == "cuda":
            watched.total = torch.empty((), dtype=mean.dtype, pin_memory=True)
            watched.total.copy_(mean, non_blocking=True)
            watched.is_ready = torch.cuda.Event()
            watched.is_ready.record()
        else:
            watched.total = mean
        self.last = watched
        self._waiting.append(watched)

    def find_bad(self, progress: Progress, may_wait: bool) -> StepFoundBad | None:
        """Return the first bad step among the steps that are not judged yet; None if all are good.

        Args:
            may_wait: judge the last step, too, and wait for the GPU if necessary.
        """
        while len(self._waiting) > (not may_wait and self.world.device.type == "cuda"):
            watched = self._waiting.popleft()
            if watched.is_ready:
                watched.is_ready.synchronize()
            loss = float(watched.total)  # type: ignore[arg-type]
            reason = self._judge(loss, progress.losses)
            if reason:
                self._waiting.clear()
                return self.blame(watched, loss, reason)
        return None

    def blame(self, watched: WatchedStep, loss: float, reason: str) -> StepFoundBad:
        """Return a step as a bad one, with its samples."""
        samples = self._name_samples(watched)
        return StepFoundBad(watched.step, watched.epoch, loss, reason, samples)

    def _judge(self, loss: float, recent: list[float]) -> str:
        """Return why a loss is bad, "" if it is not, and add it to the recent ones."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        factor = self.config.spike_factor
        if not factor:
            return ""
        middle = 0.0
        if recent:
            middle = median(recent)
        recent.append(loss)
        del recent[:-WINDOW]
        if 0 < factor * middle < loss:
            return f"the loss is {loss:.4g}, {loss / middle:.3g} x the median of those before"
        return ""

    def rank_samples(self, watched: WatchedStep) -> list[tuple[list[float], BadSample]]:
        """Return this rank's samples of a step with their sort keys, the worst sample first. A sort
        key contains the loss, where NaN comes first, and the sample's largest value.
        """
        found: dict[int, tuple[list[float], BadSample]] = {}
        for index, losses in zip(watched.shard.micro_batches, watched.losses, strict=True):
            values = sum_by_sample(losses, len(index)).tolist()
            for sample, loss in zip(index.tolist(), values, strict=True):
                order = [0.0, loss]
                if math.isnan(loss):
                    order = [1.0, 0.0]
                order.append(self._measure(sample, watched.epoch))
                found[sample] = order, BadSample(sample, self.key(sample), loss)
        return sorted(found.values(), key=lambda each: each[0], reverse=True)

    def _name_samples(self, watched: WatchedStep) -> list[BadSample]:
        """Return the samples of a step with the largest losses, of all ranks that judge it."""
        own = self.rank_samples(watched)[:MAX_NAMED]
        if not self.is_shared:
            return [each for _, each in own]
        packed = [[ranks, each.index, each.key, each.loss] for ranks, each in own]
        every = {
            each[1]: each
            for rank in range(self.world.world_size)
            for each in self.world.broadcast_object(packed, rank)
        }
        chosen = sorted(every.values(), key=lambda each: each[0], reverse=True)[:MAX_NAMED]
        return [BadSample(*each) for _, *each in chosen]

    def _measure(self, sample: int, epoch: int) -> float:
        """Return the largest absolute value in a sample; infinity if a value is not finite.

        If a layer such as BatchNorm mixes the samples of a batch, all their losses are NaN.
        """
        largest = 0.0
        with contextlib.suppress(Exception), isolate_draws([]):  # the value only sorts the samples
            for tensor in tensors_in(self.samples.read(epoch, sample)):
                value = float(tensor.double().abs().max())
                if not math.isfinite(value):
                    value = math.inf
                largest = max(largest, value)
        return largest


def sum_by_sample(losses: Tensor, num_samples: int) -> Tensor:
    """Return the loss of each sample, (N,); NaN if a recipe's losses do not belong to single
    samples.
    """
    if losses.numel() % num_samples or (losses.dim() > 1 and len(losses) != num_samples):
        return torch.full((num_samples,), math.nan, dtype=torch.float64, device=losses.device)
    return losses.double().reshape(num_samples, -1).sum(1)
