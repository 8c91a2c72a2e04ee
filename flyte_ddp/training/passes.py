"""Forward and backward passes: inputs, random draws, the model's mode, and the gradient of a
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.rank.data import count_samples
from flyte_ddp.rank.nested import map_tensors
from flyte_ddp.rank.plan import derived_seed
from flyte_ddp.rank.sharding import whole
from flyte_ddp.rank.step_timer import BACKWARD, DATA, FORWARD, StepTimer
from flyte_ddp.recipes import Recipe
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.progress import MetricSums
from flyte_ddp.training.sources import SourceLosses
from flyte_ddp.training.watch import WatchedStep
from flyte_ddp.world import World

# The number of targets of a global batch that is left out. With 0, its gradient and its mean loss
# would be NaN. Sums of targets stay exact with this number.
NO_TARGETS = 1e-30


def model_inputs(parallelism: Parallelism, batch: Any) -> Any:
    """Return what the model takes, made from a batch as the data set holds it."""
    inputs = parallelism.recipe.inputs(batch)
    if parallelism.config.channels_last and isinstance(inputs, Tensor) and inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return inputs


def forward(model: Any, parallelism: Parallelism, batch: Any) -> Any:
    """Return the outputs of `model`, computed in the configured precision, for a batch as the data
    set holds it. They are in single precision at least, because losses and metrics are sums.
    """
    with parallelism.autocast():
        outputs = model(model_inputs(parallelism, batch))
    if not parallelism.half:
        return outputs

    def widen(output: Tensor) -> Tensor:
        if output.dtype == parallelism.half:
            return output.float()
        return output

    return map_tensors(widen, outputs)


def count_targets(recipe: Recipe, inputs: Any, targets: Any) -> Tensor:
    """Return the number of targets that the samples of a batch have together."""
    counts = recipe.num_targets(targets)
    if counts is None:
        return torch.tensor(float(count_samples(recipe, inputs, targets)), dtype=torch.float64)
    return counts.sum(dtype=torch.float64)


def seed_forward(config: TrainingConfig, world: World, step: int, micro_batch: int) -> None:
    """Seed dropout by the step, not by what came before, so that a restart repeats its draws.

    Call it after the batch is loaded, because loading in this process draws from the same
    generator.
    """
    seed = derived_seed(config.seed, step, world.rank, micro_batch)
    torch.default_generator.manual_seed(seed)
    if world.device.type == "cuda":
        torch.cuda.manual_seed(seed)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put `model` in evaluation mode, without gradients, for the length of the block."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def compute_gradients(
    replica: Any,
    parallelism: Parallelism,
    batches: Iterator[tuple[Any, ...]],
    step: int,
    timer: StepTimer,
    watched: WatchedStep,
    by_source: SourceLosses | None,
) -> MetricSums:
    """Add the gradient of the global batch's mean loss to the parameters of `replica`, one
    micro-batch after another.

    Args:
        batches: yields the micro-batches of the watched step's shard next.
        step: optimizer steps done so far; seeds the forward passes.
        timer: adds up the time of the phases.
        watched: the step, which takes the losses.
        by_source: sums up the losses of each source; None for one source.

    Returns:
        The sums of the step.
    """
    recipe, world, shard = parallelism.recipe, parallelism.world, watched.shard
    total = torch.zeros((), device=world.device)
    own_targets, num_targets = shard.own_targets, shard.num_targets
    # An unknown number of targets divides the gradients at the end.
    divisor = 1.0 if num_targets is None else num_targets
    counted = torch.zeros((), dtype=torch.float64)
    source_sums: float | Tensor = 0.0
    for micro_batch, weight in enumerate(shard.weights):
        timer.begin(DATA)
        inputs, targets, *stand_in = next(batches)
        if stand_in:
            weight *= stand_in[0]
        timer.begin(FORWARD)
        seed_forward(parallelism.config, world, step, micro_batch)
        is_last = micro_batch == len(shard.weights) - 1
        with parallelism.sync(replica, is_last):
            outputs = forward(replica, parallelism, inputs)
            losses = recipe.losses(outputs, targets)
            loss_sum = losses.sum() * weight
            total += loss_sum.detach()
            watched.add(losses, total, is_last, world)
            if by_source and weight:
                source_sums += by_source.sum(losses.detach(), inputs, targets)
            timer.begin(BACKWARD)
            # The backward pass averages gradients over the ranks. The factor makes it the mean over
            # the targets of the global batch, even if the last batch is shared unevenly.
            mean = loss_sum * (world.world_size / divisor)
            parallelism.scaler.scale(mean).backward()
            timer.end()
        if num_targets is None:
            counted += count_targets(recipe, inputs, targets).cpu() * weight
    parallelism.check_gradients(replica, step)
    if own_targets is None or num_targets is None:
        own_targets, num_targets = float(counted), world.all_reduce(counted)[0] or NO_TARGETS
        _divide_gradients(replica, num_targets)
    counts = own_targets, num_targets, shard.num_samples
    return MetricSums(total, *counts, num_steps=1, by_source=source_sums)


def _divide_gradients(replica: Any, divisor: float) -> None:
    for parameter in replica.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(divisor)


def clip_gradients(model: nn.Module, max_norm: float, needed: bool) -> float:
    """Clip the gradient to an L2 norm, unless it is 0.

    Returns:
        The norm before that if `needed`, else 0: reading it waits for the device.
    """
    if max_norm:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    if not needed:
        return 0.0
    if max_norm:
        return float(whole(norm))
    return gradient_norm(model)


def gradient_norm(model: nn.Module) -> float:
    """Return the L2 norm of the whole gradient. Waits for the device."""
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    return float(whole(nn.utils.get_total_norm(gradients)))
