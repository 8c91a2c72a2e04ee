"""Measures what a step's computation costs without the exchange of gradients, and the exchange without a step.

Runs in every rank after a training that was asked for it, with the model, the data, the threads and the neighbors
that the training had. Knows nothing of what the numbers are for.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import CostsTimed
from flyte_ddp.rank.batch_norm import keep_frozen_statistics
from flyte_ddp.rank.data import Samples, epoch_shards, num_batches
from flyte_ddp.rank.gradients import clip_gradients, compute_gradients
from flyte_ddp.rank.optim import build_optimizer
from flyte_ddp.rank.parallel import replicate
from flyte_ddp.rank.world import World
from flyte_ddp.recipes import Recipe

WARM_UP = 5  # steps, and all-reduces, that are not timed
TIMED_SECONDS = 1.0  # of steps at each batch size, within the limits that follow
MIN_STEPS, MAX_STEPS = 10, 200
NUM_ALL_REDUCES = 15
BUCKET = 25 << 20  # bytes that DDP exchanges at once by default
TINY = 1e-30  # a learning rate at which the steps change nothing


def time_costs(
    model: nn.Module,
    recipe: Recipe,
    samples: Samples,
    config: TrainingConfig,
    world: World,
    batch_sizes: Sequence[int],
    beat: Callable[[], None],
) -> CostsTimed:
    """Time the parts of a step. Every rank calls it after the training; the results are the same on all.

    Args:
        samples: the training data.
        batch_sizes: samples per rank and optimizer step at which to compute.
        beat: called after each step.
    """
    gradient = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return CostsTimed(
        batch_sizes=list(batch_sizes),
        compute_seconds=[
            _step_seconds(model, recipe, samples, config, world, batch_size, beat) for batch_size in batch_sizes
        ],
        gradient_bytes=4 * gradient,  # fp32, in whatever precision the step computes
        all_reduce_seconds=_all_reduce_seconds(world, gradient, beat),
        latency_seconds=_all_reduce_seconds(world, 1, beat),
    )


def _step_seconds(
    model: nn.Module,
    recipe: Recipe,
    samples: Samples,
    config: TrainingConfig,
    world: World,
    batch_size: int,
    beat: Callable[[], None],
) -> float:
    """Return the slowest rank's mean over an epoch's last steps, with all ranks at once and none with another.

    At once, because the ranks of a node share its memory and its cores' caches also when they train together.
    """
    config = dataclasses.replace(config, global_batch_size=batch_size, learning_rate=TINY, weight_decay=0.0)
    alone = World(0, 0, 1, world.device)
    _, replica = replicate(model, config, alone)
    optimizer = build_optimizer(model, config, recipe.optimizer_groups(model))
    model.train()
    keep_frozen_statistics(model)

    def mean_of(num_steps: int) -> float:
        shards = epoch_shards(samples, config, alone, 1, max(0, num_batches(samples, config) - num_steps))
        batches = samples.batches([index for shard in shards for index in shard.micro_batches], epoch=1)
        started = time.perf_counter()
        for step, shard in enumerate(shards):
            optimizer.zero_grad()
            loss_sum, _ = compute_gradients(replica, recipe, config, alone, shard, batches, step)
            clip_gradients(model, config.gradient_clip_norm, needed=False)
            optimizer.step()
            beat()
        loss_sum.item()  # waits for the device
        return (time.perf_counter() - started) / len(shards)

    # One number of steps for all: layers that communicate, such as SyncBatchNorm's, would wait for the last.
    seconds = max(world.gather(mean_of(WARM_UP)))
    num_steps = min(MAX_STEPS, max(MIN_STEPS, round(TIMED_SECONDS / seconds)))
    return max(world.gather(mean_of(num_steps)))


def _all_reduce_seconds(world: World, num_elements: int, beat: Callable[[], None]) -> float:
    """Return the ranks' mean of their medians for summing `num_elements` floats over all of them, in DDP's buckets."""
    if world.world_size == 1:
        return 0.0
    buckets = torch.zeros(num_elements, device=world.device).split(BUCKET // 4)
    seconds = []
    for _ in range(WARM_UP + NUM_ALL_REDUCES):
        world.sum(0.0)  # so that no wait for the other ranks is counted
        started = time.perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        beat()
    return sum(world.gather(statistics.median(seconds[WARM_UP:]))) / world.world_size
