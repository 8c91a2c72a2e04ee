"""`flyte-ddp estimate`: the seconds of an epoch and the memory of a rank, from one step that this
machine trains.
"""

from __future__ import annotations

import dataclasses
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import finite_number, read_object, whole_number
from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ConfigError, in_one_line
from flyte_ddp.rank.data import open_samples, take_sample
from flyte_ddp.rank.nested import tensors_in
from flyte_ddp.recipes import Recipe, config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.training.contract import open_datasets, open_model
from flyte_ddp.training.optim import open_optimizer
from flyte_ddp.training.parallel import Parallelism, choose_parallelism, count_parameters
from flyte_ddp.training.passes import forward
from flyte_ddp.world import World, single_process_world

# The share of a GPU's memory for its context, for libraries' workspaces, and for fragments.
GPU_RESERVE = 0.1
OPTIONS = (
    ("--recipe", "its name", None),
    ("--config", "fields that differ from its defaults: JSON, or a file", "{}"),
    ("--data", "source of the data, as of a run", ""),
    ("--gpus", "ranks in all (default 1)", 1),
    ("--gpu-memory", "GiB of each GPU (default: not compared)", 0.0),
)


@dataclass(frozen=True)
class Estimate:
    """One rank's share of an epoch."""

    device: str  # the device on which the step was trained
    num_parameters: int
    batch_size: int  # samples of a forward pass
    state_bytes: float  # weights, gradients and optimizer state
    # tensors that the forward pass keeps for the backward pass; with fsdp also gathered blocks
    activation_bytes: float
    epoch_seconds: float  # without the exchange of gradients, and without an evaluation

    def describe(self, gpu_gib: float = 0.0) -> str:
        """Return one line. It ends with whether the rank fits into a GPU of `gpu_gib` GiB, unless
        this is 0.
        """
        state, activations = self.state_bytes / 2**30, self.activation_bytes / 2**30
        end = ""
        if gpu_gib:
            end = f"; does not fit into {gpu_gib:g} GiB"
            if state + activations <= (1 - GPU_RESERVE) * gpu_gib:
                end = f"; fits into {gpu_gib:g} GiB"
        return (
            f"{self.num_parameters:,} parameters, {self.batch_size} samples in a forward pass: "
            f"{state + activations:.3f} GiB a rank (state {state:.3f}, activations "
            f"{activations:.3f}), {self.epoch_seconds:.3g} s an epoch on {self.device}{end}"
        )


def estimate(recipe: Recipe, config: TrainingConfig, directory: Path, num_ranks: int) -> Estimate:
    """Train one step on a rank's first micro-batch of the prepared data in `directory`, and
    multiply.

    The step uses real tensors and so the memory of a whole model, even if `fsdp` will split it.
    """
    world = single_process_world()
    train = take_sample(open_datasets(recipe, directory, config)[0], config)
    alone = Parallelism(recipe, dataclasses.replace(config, compile=False, data_workers=0), world)
    planned = choose_parallelism(recipe, config, World(0, num_ranks, world.device))
    (samples,) = open_samples([train], recipe, alone.config, world)
    size = math.ceil(config.global_batch_size / (num_ranks * config.gradient_accumulation))
    first = torch.arange(size, device=samples.index_device) % len(samples)
    inputs, targets, *_ = next(iter(samples.batches([first], epoch=1)))
    model = open_model(alone).train()
    alone.shard(model)
    optimizer = open_optimizer(recipe, model, config)
    # In the second step the optimizer has its state, and libraries have chosen their kernels.
    for _ in range(2):
        seconds, saved = _take_step(alone, model, optimizer, inputs, targets)
    weights = list(model.parameters())
    gradients, states = [each.grad for each in weights], list(optimizer.state.values())
    held = tensors_in([weights, list(model.buffers()), gradients, states])
    state_bytes = float(sum(each.nbytes for each in held))
    known = {each.untyped_storage().data_ptr() for each in weights}
    activation_bytes = float(sum(size for at, size in saved.items() if at not in known))
    num_batches = math.ceil(len(samples) / config.global_batch_size) * config.gradient_accumulation
    return Estimate(
        world.device.type,
        count_parameters(model),
        size,
        state_bytes / planned.num_shards,
        activation_bytes + planned.gathered_bytes(model),
        seconds * num_batches,
    )


def _take_step(
    parallelism: Parallelism, model: nn.Module, optimizer: Optimizer, inputs: Any, targets: Any
) -> tuple[float, dict[int, int]]:
    """Train one step. Return its seconds, and the bytes of the tensors that the backward pass
    needs, by address.
    """
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    started = time.perf_counter()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        losses = parallelism.recipe.losses(forward(model, parallelism, inputs), targets)
    losses.sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    if parallelism.world.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, saved


def main(arguments: Sequence[str]) -> str:
    """Return the estimate as a line."""
    text = (
        "estimate the seconds of an epoch and the memory of a rank, from one step that this "
        "machine trains"
    )
    options = make_parser("estimate", text, OPTIONS).parse_args(arguments)
    num_ranks = whole_number("--gpus", options.gpus, 1)
    gpu_memory = finite_number("--gpu-memory", options.gpu_memory, minimum=0, unit="GiB")
    config = config_of(options.recipe, read_object("--config", options.config))
    recipe = get_recipe(options.recipe, config.recipe_options)
    with tempfile.TemporaryDirectory() as directory:
        prepare_data(recipe, options.data, Path(directory))
        try:
            made = estimate(recipe, config, Path(directory), num_ranks)
        except Exception as error:
            raise ConfigError(
                f"recipe: expected one whose step runs on this machine, got {in_one_line(error)}"
            ) from error
    return made.describe(gpu_memory)
