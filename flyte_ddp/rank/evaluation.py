"""Measures of a model: its results on held-out samples, and the share of the devices' speed that its training uses."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, NonFiniteLoss
from flyte_ddp.events import EpochFinished
from flyte_ddp.rank.contract import open_datasets
from flyte_ddp.rank.data import Samples, evaluation_shard, num_common_batches, open_samples
from flyte_ddp.rank.initial_state import mismatch
from flyte_ddp.rank.metrics import HeldOutMetrics
from flyte_ddp.rank.parallel import place_model
from flyte_ddp.rank.passes import autocast, count_targets, evaluating, model_inputs
from flyte_ddp.rank.sharding import is_sharded
from flyte_ddp.recipes import Recipe, list_class_names
from flyte_ddp.world import World, single_process_world

# Of the products that measure a device's speed:
MATRIX_SIZE, MATRIX_SIZE_ON_GPU = 1024, 4096  # of each side; larger ones are not faster
MEASURED_SECONDS = 0.1


@dataclass(frozen=True)
class Evaluation:
    """A model's results on the held-out data."""

    loss: float  # mean per target
    metrics: dict[str, float]  # the recipe's, by name
    seconds: float  # wall-clock


def evaluate(
    model: nn.Module,
    recipe: Recipe,
    samples: Samples,
    config: TrainingConfig,
    world: World,
    on_batch: Callable[[], None] = lambda: None,
    on_outputs: Callable[[Any, Any], None] = lambda outputs, targets: None,
) -> Evaluation:
    """Measure `model` on `samples`, each counted once. Every rank calls it, and gets the same result.

    The ranks' buffers must be the same: see `share_buffers`.

    Every rank sums over its share, then the sums are all-reduced. `model` must not be wrapped: a forward pass of DDP is
    a collective, and the ranks' shares may differ in length. That of a split model is one too, so all ranks make
    equally many.

    Args:
        on_batch: called after each batch, equally often on all ranks, so that it may be a collective.
        on_outputs: called with the outputs and the targets of each batch of this rank.
    """
    started = time.perf_counter()
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    metrics = HeldOutMetrics(recipe, world.device)
    num_targets: float | Tensor = 0.0
    shard = evaluation_shard(samples, config, world)
    num_common = num_common_batches(samples, config, world)
    splits = is_sharded(model)
    with evaluating(model):
        for number, (index, (inputs, targets)) in enumerate(zip(shard, samples.batches(shard, epoch=0), strict=True)):
            with nullcontext() if splits else autocast(config, world.device):
                outputs = model(model_inputs(recipe, config, inputs))
            loss_sum += recipe.losses(outputs, targets).sum()
            metrics.update(outputs, targets)
            on_outputs(outputs, targets)
            counted = samples.num_targets(index)
            num_targets += count_targets(recipe, targets).to(world.device) if counted is None else counted
            if number < num_common:
                on_batch()
        if splits and len(shard) < max(world.all_gather(len(shard))):  # the others need this rank's part of the weights
            first = torch.zeros(1, dtype=torch.int64, device=samples.index_device)
            for inputs, _ in samples.batches([first], epoch=0):
                model(model_inputs(recipe, config, inputs))
    total_loss, total = world.all_reduce(loss_sum, num_targets)
    values = metrics.compute(world, len(samples), total)
    return Evaluation(total_loss / total, values, time.perf_counter() - started)


def evaluate_state(
    recipe: Recipe,
    config: TrainingConfig,
    state: Mapping[str, Any],
    directory: Path,
    on_outputs: Callable[[Any, Any], None],
) -> Evaluation:
    """Measure `state` on the held-out data of `recipe` in `directory`, in this process, on its GPU if it has one.

    By `evaluate`, to which `on_outputs` belongs, so the figures compare with those of a run's epochs.

    Raises:
        ConfigError: the state is not one of the recipe's model; names the keys, or the classes, that do not fit.
        NonFiniteLoss: the loss is NaN or infinite.
    """
    world = single_process_world()
    config = dataclasses.replace(config, compile=False)  # which takes longer than one pass over the data
    _, test = open_datasets(recipe, directory, config)
    (samples,) = open_samples([test], recipe, config, world)
    model = recipe.model()
    if problem := mismatch(model.state_dict(), state, list_class_names(recipe)):
        raise ConfigError(f"state: expected one of the recipe's model, got one that does not fit: {problem}")
    model.load_state_dict(state)
    result = evaluate(place_model(model, config, world), recipe, samples, config, world, on_outputs=on_outputs)
    if not math.isfinite(result.loss):
        raise NonFiniteLoss(f"the loss on the held-out data is {result.loss}")
    return result


def share_buffers(model: nn.Module, world: World) -> None:
    """Give every rank rank 0's buffers, such as BatchNorm's running statistics: those that are saved."""
    if world.world_size > 1:
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)


class FlopsUtilization:
    """Compares a training's operations per second with those of large matrix products on the same devices.

    Measures nothing, and so delays no start, where the recipe does not define `flops_per_sample`. Every rank makes one
    at the same time, because the ranks of a node share its cores.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, config: TrainingConfig, world: World) -> None:
        self.flops_per_sample = recipe.flops_per_sample(model)
        self.peak_flops = world.all_reduce(measure_peak_flops(config, world))[0] if self.flops_per_sample else 0.0

    def of(self, epoch: EpochFinished) -> dict[str, float]:
        """Return the epoch's utilization as a metric by name; none where it is not known."""
        if not self.peak_flops:
            return {}
        used = self.flops_per_sample * epoch.samples_per_second
        # The peak was measured for a tenth of a second, and is more if the training has done more.
        self.peak_flops = max(self.peak_flops, used)
        return {"model_flops_utilization": used / self.peak_flops}


def measure_peak_flops(config: TrainingConfig, world: World) -> float:
    """Return the operations per second of this rank in products of large matrices, in the configured precision."""
    on_gpu = world.device.type == "cuda"
    size = MATRIX_SIZE_ON_GPU if on_gpu else MATRIX_SIZE
    matrix = torch.ones(size, size, device=world.device, dtype=torch.bfloat16 if config.precision == "bf16" else None)
    world.all_reduce(float((matrix @ matrix)[0, 0]))  # warms up, and waits for the other ranks
    products = 0
    started = time.perf_counter()
    while (seconds := time.perf_counter() - started) < MEASURED_SECONDS:
        product = matrix @ matrix
        for _ in range(9 if on_gpu else 0):  # so that the device does not wait for the host
            product = matrix @ matrix
        products += 10 if on_gpu else 1
        if on_gpu:
            torch.cuda.synchronize(world.device)
    del product, matrix
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(world.device)  # which the report has of the training
    return 2.0 * size**3 * products / seconds
