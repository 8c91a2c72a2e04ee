"""The setting of a forward pass: its inputs, precision, random draws and the model's mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.rank.data import derived_seed
from flyte_ddp.recipes import Recipe
from flyte_ddp.world import World


def model_inputs(recipe: Recipe, config: TrainingConfig, batch: Tensor) -> Tensor:
    """Return what the model takes, made from a batch as the data set holds it."""
    inputs = recipe.inputs(batch)
    if config.channels_last and inputs.dim() == 4:
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    return inputs


def autocast(config: TrainingConfig, device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which the model computes in the configured precision."""
    if config.precision == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def seed_forward(config: TrainingConfig, world: World, step: int, micro_batch: int) -> None:
    """Seed dropout by the step, not by what came before, so that a restart repeats its draws.

    Call it after the batch is loaded, because loading in this process draws from the same generator.
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
