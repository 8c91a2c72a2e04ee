"""The watch over the loss of every step: which step is bad, and the samples behind it.

The sum of the ranks' losses is all-reduced while the last backward pass of a step runs, so that all
ranks judge the same value. On CPUs, where that takes some percent of a small model's step, each
rank judges its own loss if the run only has to end at one that is not finite. Knows neither the
model nor what is done about a bad step.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import BadSample, StepFoundBad
from flyte_ddp.events.kinds import MAX_NAMED
from flyte_ddp.rank.data import BatchShard, Samples, isolate_draws
from flyte_ddp.rank.nested import tensors_in
from flyte_ddp.training.progress import Progress
from flyte_ddp.world import World

WINDOW = 128  # finite losses whose median a loss is compared with


@dataclass(eq=False)
class WatchedStep:
    """A step whose loss is computed, and maybe not read yet."""

    shard: BatchShard
    is_shared: bool  # all ranks judge the sum of their losses
    losses: list[Tensor] = field(default_factory=list)  # of each micro-batch, from the recipe
    total: Tensor | None = None  # of the losses of all ranks, or of this one
    work: Any = None  # the all-reduce of `total`
    step: int = 0  # its number, from 1
    epoch: int = 0
    is_ready: Any = None  # on a GPU the event after which `total` can be read

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
        self.key = getattr(samples.dataset, "key", lambda _: "")  # of a sample, by its index
        self._waiting: deque[WatchedStep] = deque()
        self.last: WatchedStep | None = None

    def end(self, watched: WatchedStep, num_targets: float | Tensor, progress: Progress) -> None:
        """Take a step whose gradient is computed, and which is to be taken."""
        assert watched.total is not None  # of the last micro-batch
        if watched.work:
            watched.work.wait()  # on a GPU its stream waits, and not this process
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

    def find_bad(self, progress: Progress, may_wait: bool = True) -> StepFoundBad | None:
        """Return the first bad one of the steps that are not judged yet; None without one.

        Args:
            may_wait: judge the last step as well, for which a GPU would be waited for.
        """
        while len(self._waiting) > (not may_wait and self.world.device.type == "cuda"):
            watched = self._waiting.popleft()
            if watched.is_ready:
                watched.is_ready.synchronize()
            loss = float(watched.total)  # type: ignore[arg-type]
            if reason := self._judge(loss, progress.losses):
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
        if not (factor := self.config.spike_factor):
            return ""
        middle = median(recent) if recent else 0.0
        recent.append(loss)
        del recent[:-WINDOW]
        if 0 < factor * middle < loss:
            return f"the loss is {loss:.4g}, {loss / middle:.3g} x the median of those before"
        return ""

    def rank_samples(self, watched: WatchedStep) -> list[tuple[list[float], BadSample]]:
        """Return this rank's samples of a step, the worst first, each with what it is sorted by:
        its loss, NaN above all others, and its largest value.
        """
        found: dict[int, tuple[list[float], BadSample]] = {}
        for index, losses in zip(watched.shard.micro_batches, watched.losses, strict=True):
            for sample, loss in zip(index.tolist(), split_losses(losses, len(index)), strict=True):
                order = [1.0, 0.0] if math.isnan(loss) else [0.0, loss]
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
        """Return the largest absolute value in a sample, infinite if it has one that is not finite.

        Where a layer mixes the samples of a batch, such as BatchNorm, all their losses are NaN.
        """
        largest = 0.0
        with contextlib.suppress(Exception), isolate_draws([]):  # it is only for the order
            for tensor in tensors_in(self.samples.read(epoch, sample)):
                value = float(tensor.double().abs().max())
                largest = max(largest, value if math.isfinite(value) else math.inf)
        return largest


def split_losses(losses: Tensor, num_samples: int) -> Sequence[float]:
    """Return the loss of each sample, NaN where a recipe's losses are not those of samples."""
    if losses.numel() % num_samples or (losses.dim() > 1 and len(losses) != num_samples):
        return [math.nan] * num_samples
    return list(losses.double().reshape(num_samples, -1).sum(1).tolist())
