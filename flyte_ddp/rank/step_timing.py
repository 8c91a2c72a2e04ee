"""What a step's computation costs without its exchange, and the exchange without a step: measured, not derived.

Runs in every rank after a training that was asked for it, with the model, the data, the threads and the neighbours
that the training had. Knows nothing of what the numbers are for. Imports torch.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from flyte_ddp.events import CostsTimed, Event
from flyte_ddp.rank.data import num_batches
from flyte_ddp.rank.trainer import Progress, Supervisor, Trainer
from flyte_ddp.rank.world import World

WARM_UP = 5  # steps, and all-reduces, that are not timed
TIMED_SECONDS = 1.0  # of steps at each batch size, within the limits that follow
FEWEST_STEPS, MOST_STEPS = 10, 200
NUM_ALL_REDUCES = 15
BUCKET = 25 << 20  # bytes that DDP exchanges at once by default
TINY = 1e-30  # a learning rate at which the steps change nothing


def time_costs(trainer: Trainer, batch_sizes: Sequence[int]) -> CostsTimed:
    """Time the parts of a step. Every rank calls it, after `trainer` has trained; the results are the same on all.

    Args:
        batch_sizes: samples per rank and optimizer step at which to compute.
    """
    gradient = sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad)
    return CostsTimed(
        batch_sizes=list(batch_sizes),
        compute_seconds=[_step_seconds(trainer, batch_size) for batch_size in batch_sizes],
        gradient_bytes=4 * gradient,  # fp32, in whatever precision the step computes
        all_reduce_seconds=_all_reduce_seconds(trainer, gradient),
        latency_seconds=_all_reduce_seconds(trainer, 1),
    )


class _Alone:
    """The supervisor of a rank that trains for the clock's sake: nobody is told, and nobody ends it early."""

    stop_requested = False

    def __init__(self, supervisor: Supervisor, step: int) -> None:
        self._supervisor = supervisor
        self._step = step

    def beat(self, step: int) -> None:
        self._supervisor.beat(self._step)

    def emit(self, event: Event) -> None:
        pass


def _step_seconds(trainer: Trainer, batch_size: int) -> float:
    """The slowest rank's mean over an epoch's last steps, by the loop itself, all ranks at once and none with another.

    At once, because the ranks of a node share its memory and its cores' caches also when they train together.
    """
    config = dataclasses.replace(
        trainer.config, global_batch_size=batch_size, learning_rate=TINY, weight_decay=0.0, checkpoint_interval=0
    )
    alone = Trainer(
        trainer.recipe,
        config,
        World(0, 0, 1, trainer.world.device),
        trainer.model,
        trainer.train,
        trainer.test,
        trainer.store,
        _Alone(trainer.supervisor, trainer.progress.step),
    )
    whole_epoch = num_batches(trainer.train, config)

    def mean_of(num_steps: int) -> float:
        alone.progress = Progress(batch=max(0, whole_epoch - num_steps))  # as if an earlier attempt had done the rest
        tally, _ = alone.train_epoch()
        return tally.seconds / tally.num_steps

    # One number of steps for all: layers that talk to each other, such as SyncBatchNorm's, would wait for the last.
    pace = max(trainer.world.gather(mean_of(WARM_UP)))
    num_steps = min(MOST_STEPS, max(FEWEST_STEPS, round(TIMED_SECONDS / pace)))
    return max(trainer.world.gather(mean_of(num_steps)))


def _all_reduce_seconds(trainer: Trainer, num_elements: int) -> float:
    """The ranks' mean of their medians for summing `num_elements` floats over all of them, in DDP's portions."""
    world = trainer.world
    if world.world_size == 1:
        return 0.0
    buckets = torch.zeros(num_elements, device=world.device).split(BUCKET // 4)
    seconds = []
    for _ in range(WARM_UP + NUM_ALL_REDUCES):
        world.sum(0.0)  # so that nobody's wait for the others is counted
        started = time.perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        trainer.supervisor.beat(trainer.progress.step)
    return sum(world.gather(statistics.median(seconds[WARM_UP:]))) / world.world_size
