"""Measures of a model: its results on held-out samples, and the share of the devices' speed that
its training uses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, NonFiniteLoss
from flyte_ddp.rank.data import Samples, open_samples
from flyte_ddp.rank.plan import evaluation_shard
from flyte_ddp.rank.sharding import reshard
from flyte_ddp.recipes import Recipe, list_class_names
from flyte_ddp.training.contract import open_datasets, open_model
from flyte_ddp.training.initial_state import find_state, mismatch
from flyte_ddp.training.metrics import HeldOutMetrics
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.passes import count_targets, evaluating, forward
from flyte_ddp.world import World, single_process_world

# 10^12 dense operations per second of a GPU in bf16 and in fp32, by a part of its name, from
# NVIDIA's data sheets. The first part that is in the name counts.
TERAFLOPS = {
    "MIG ": (0.0, 0.0),  # a slice of any size
    "B200": (2250.0, 75.0),
    "H200 NVL": (835.0, 60.0),
    "H200": (989.0, 67.0),
    "H100 NVL": (835.0, 60.0),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "A10G": (70.0, 31.2),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
}


@dataclass(frozen=True)
class Evaluation:
    """A model's results on the held-out data."""

    loss: float  # mean per target
    metrics: dict[str, float]  # the recipe's, by name
    seconds: float  # wall-clock


def evaluate(
    model: nn.Module,
    samples: Samples,
    parallelism: Parallelism,
    on_batch: Callable[[], None] = lambda: None,
    on_outputs: Callable[[Any, Any], None] = lambda outputs, targets: None,
) -> Evaluation:
    """Measure `model` on `samples`, each counted once. Every rank calls it, and gets the same
    result.

    The ranks' buffers must be the same: see `share_buffers`.

    Every rank sums over its share, then the sums are all-reduced. `model` must not be wrapped: a
    forward pass of DDP is a collective, and the ranks' shares may differ in length.

    Args:
        on_batch: called after each batch, equally often on all ranks, so that it may be a
            collective.
        on_outputs: called with the outputs and the targets of each batch of this rank.
    """
    started = time.perf_counter()
    recipe, config, world = parallelism.recipe, parallelism.config, parallelism.world
    loss_sum = torch.zeros((), dtype=torch.float64, device=world.device)
    metrics = HeldOutMetrics(recipe, world.device)
    num_targets: float | Tensor = 0.0
    shard = evaluation_shard(samples, config, world)
    # some ranks may have one more
    num_common = -(-(len(samples) // world.world_size) // config.evaluation_batch_size)
    # Buffers are shared before the first pass: another rank would mistake the pass for this.
    num_passes = len(shard)
    if parallelism.is_collective:  # the others may need this rank's part of the weights
        num_passes = int(max(world.all_gather(num_passes)))
    first = torch.zeros(1, dtype=torch.int64, device=samples.index_device)
    indices = [*shard, *(num_passes - len(shard)) * [first]]
    stand_in: list[float]
    with evaluating(model):
        for number, (inputs, targets, *stand_in) in enumerate(samples.batches(indices, epoch=0)):
            outputs = forward(model, parallelism, inputs)
            if number < len(shard) and not stand_in:
                loss_sum += recipe.losses(outputs, targets).sum()
                metrics.update(outputs, targets)
                on_outputs(outputs, targets)
                num_targets += _count(samples, indices[number], recipe, inputs, targets)
            if number < num_common:
                on_batch()
    reshard(model)
    total_loss, total = world.all_reduce(loss_sum, num_targets)
    values = metrics.compute(world, len(samples), total)
    return Evaluation(total_loss / total, values, time.perf_counter() - started)


def _count(
    samples: Samples, index: Tensor, recipe: Recipe, inputs: Any, targets: Any
) -> float | Tensor:
    """Return the number of targets in a batch of the samples at `index`."""
    counted = None
    if not hasattr(samples.dataset, "UNREADABLE"):  # otherwise samples may be left out
        counted = samples.num_targets(index)
    if counted is None:
        counted = count_targets(recipe, inputs, targets).to(samples.device)
    return counted


def evaluate_state(
    recipe: Recipe,
    config: TrainingConfig,
    state: Mapping[str, Any],
    directory: Path,
    on_outputs: Callable[[Any, Any], None],
) -> Evaluation:
    """Measure `state` on the held-out data of `recipe` in `directory`, in this process, on its GPU
    if it has one.

    This calls `evaluate`, so the figures can be compared with the figures of a run's epochs.

    Args:
        on_outputs: see `evaluate`.

    Raises:
        ConfigError: the state does not fit the recipe's model; names the keys or the classes that
            do not fit.
        NonFiniteLoss: the loss is NaN or infinite.
    """
    world = single_process_world()
    _, test = open_datasets(recipe, directory, config)
    (samples,) = open_samples([test], recipe, config, world)
    parallelism = Parallelism(recipe, config, world)
    model = open_trained_model(state, parallelism, "state")
    result = evaluate(model, samples, parallelism, on_outputs=on_outputs)
    if not math.isfinite(result.loss):
        raise NonFiniteLoss(f"the loss on the held-out data is {result.loss}")
    return result


def open_trained_model(state: Mapping[str, Any], parallelism: Parallelism, field: str) -> nn.Module:
    """Return the recipe's model as `open_model` does, with the weights of `state`.

    Raises:
        ConfigError: the weights do not fit, or the data have other classes; begins with `field`.
    """
    model = open_model(parallelism)
    state = find_state(state, model.state_dict().keys(), field)
    problem = mismatch(model.state_dict(), state, list_class_names(parallelism.recipe))
    if problem:
        raise ConfigError(
            f"{field}: expected one of the recipe's model, got one that does not fit: {problem}"
        )
    model.load_state_dict(state)
    return model


def share_buffers(model: nn.Module, world: World) -> None:
    """Give every rank the buffers of rank 0, such as BatchNorm's running statistics, because rank
    0 saves them. A buffer with another shape on rank 0 stays as it is.
    """
    if world.world_size == 1:
        return
    own = dict(model.named_buffers())
    sizes = {name: [list(each.shape), each.nbytes] for name, each in own.items()}
    for name, (shape, num_bytes) in world.broadcast_object(sizes).items():
        buffer = own.get(name)
        if buffer is None or [list(buffer.shape), buffer.nbytes] != [shape, num_bytes]:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        world.broadcast(buffer)


def sample_utilization(model: nn.Module, parallelism: Parallelism) -> float:
    """Return the share of all GPUs' operations per second that a sample per second takes; 0 if it
    is unknown. Every rank calls it.

    The share is known if the recipe defines `flops_per_sample` and every rank has a GPU of the
    table.
    """
    config, world = parallelism.config, parallelism.world
    flops = parallelism.recipe.flops_per_sample(model)
    if not flops:
        return 0.0
    peaks = world.all_gather(peak_flops(config, world))
    if not all(peaks):
        return 0.0
    return flops / sum(peaks)


def peak_flops(config: TrainingConfig, world: World) -> float:
    """Return the operations per second of this rank's GPU in the configured precision; 0 for an
    unknown device.
    """
    if world.device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(world.device)
    half, fp32 = next((rates for part, rates in TERAFLOPS.items() if part in name), (0.0, 0.0))
    if config.precision == "fp32":
        return 1e12 * fp32
    return 1e12 * half
