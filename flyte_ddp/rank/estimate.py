"""`flyte-ddp estimate`: the memory of a recipe's ranks before any rank starts, by a step on fake tensors.

A fake tensor has a shape and no contents, so a step of any size takes a moment and needs no GPU. They are on the device
"cpu": torch's backward pass asks for a device of CUDA also for fake tensors. What a GPU adds is not in the figures: its
context, the workspaces of its libraries and what the allocator cannot use, for which `GPU_RESERVE` is kept free.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import multiprocessing
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import read_object
from flyte_ddp.errors import ConfigError, DataError, StorageDenied, StorageUnavailable
from flyte_ddp.launch.process.programs import recipe_program
from flyte_ddp.rank.contract import open_datasets
from flyte_ddp.rank.data import Batch, open_samples, take_sample
from flyte_ddp.rank.initial_state import freeze_layers
from flyte_ddp.rank.main import send_process_bytes
from flyte_ddp.rank.nested import map_tensors
from flyte_ddp.rank.optim import build_optimizer
from flyte_ddp.rank.parallel import replicate
from flyte_ddp.rank.passes import autocast, model_inputs
from flyte_ddp.rank.sharding import FP32_BYTES, count_parameters, large_blocks
from flyte_ddp.recipes import Recipe, config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.world import ALONE

GPU_RESERVE = 0.1  # of a GPU's memory, for what the estimate does not see
BF16_BYTES = 2
SIZES = (4, 16)  # samples of the two batches by which a larger one is estimated
KINDS = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class Activations:
    """Bytes besides weights, gradients and optimizer state, at the peak of a step: a line in the samples of a batch."""

    fixed: float
    per_sample: float

    def of(self, batch_size: int) -> float:
        """Return the bytes of a batch."""
        return max(0.0, self.fixed + self.per_sample * batch_size)


@dataclass(frozen=True)
class Memory:
    """Bytes of a rank on its device, by kind; the checkpoint's copy is in the memory of its machine."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    checkpoint_copy: float

    @property
    def device(self) -> float:
        """All that has to fit into the device's memory."""
        return self.weights + self.gradients + self.optimizer + self.activations


class Estimate:
    """The memory of the ranks of a recipe.

    Args:
        read_batch: returns as many real samples, of which the shapes count.
    """

    def __init__(self, recipe: Recipe, config: TrainingConfig, read_batch: Callable[[int], Batch]) -> None:
        self.config = config
        self.problem = ""  # what the estimate cannot know; "" for nothing
        with _fake_mode():
            model = recipe.model()
            freeze_layers(model, config.frozen_layers)
            self.num_parameters = count_parameters(model)
            self.num_trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
            buffers = sum(each.nbytes for each in model.buffers())
            self.weight_bytes = sum(each.nbytes for each in model.parameters()) + buffers
            blocks = [count_parameters(each) for each in list(recipe.blocks(model)) or large_blocks(model)]
        self.largest_block = max(blocks, default=0)
        self.rest = self.num_parameters - sum(blocks)  # gathered as a whole, for all of a step
        self.gradient_bytes = FP32_BYTES * self.num_trained
        self.optimizer_bytes = 0.0
        measure = functools.partial(self._measure, recipe, read_batch)
        try:
            self.training, self.evaluation = (_fit(measure, is_fake=True, trains=trains) for trains in (True, False))
        except Exception as error:  # whatever a recipe makes of a tensor without contents
            what = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:80]}"
            from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

            is_about_shapes = isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
            shapes = "the shapes depend on the data" if is_about_shapes else "it needs real tensors"
            activations = f"activations are those of a step on {SIZES[1]} samples"
            self.problem = f"{shapes} ({what}): {activations}; other samples may take more"
            self.training, self.evaluation = (_fit(measure, is_fake=False, trains=trains) for trains in (True, False))

    def memory(self, parallel: str, num_ranks: int, batch_size: int) -> Memory:
        """Return the memory of a rank with `batch_size` samples in a forward pass."""
        activations = max(self.training.of(batch_size), self.evaluation.of(self.config.evaluation_batch_size))
        shards = num_ranks if parallel == "fsdp" else 1
        if shards > 1:
            # The block at work and the next one, whole, and the gradient of one; the rest of the model all the time.
            width = BF16_BYTES if self.config.precision == "bf16" else FP32_BYTES
            activations += width * (2 * self.largest_block + self.rest) + FP32_BYTES * (self.largest_block + self.rest)
        return Memory(
            self.weight_bytes / shards,
            self.gradient_bytes / shards,
            self.optimizer_bytes / shards,
            activations,
            (self.weight_bytes + self.optimizer_bytes) / shards,
        )

    def allowed(self, device_bytes: float) -> float:
        """Return what may be taken of a device's memory."""
        return (1 - GPU_RESERVE) * device_bytes

    def largest_batch(self, parallel: str, num_ranks: int, device_bytes: float) -> int:
        """Return the samples of the largest forward pass that fits; 0 if none does."""
        low, high = 0, 1
        while high < 1 << 30 and self.memory(parallel, num_ranks, high).device <= self.allowed(device_bytes):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.memory(parallel, num_ranks, middle).device <= self.allowed(device_bytes)
            low, high = (middle, high) if fits else (low, middle)
        return low

    def _measure(
        self, recipe: Recipe, read_batch: Callable[[int], Batch], size: int, is_fake: bool, trains: bool
    ) -> float:
        """Return the bytes at the peak of an optimizer step besides those of weights, gradients and optimizer state.

        Args:
            is_fake: without contents, and without work.
            trains: else a forward pass of an evaluation.
        """
        batch = read_batch(size)
        with _fake_mode() if is_fake else nullcontext():
            model = recipe.model()
            freeze_layers(model, self.config.frozen_layers)
            _, replica = replicate(
                model, dataclasses.replace(self.config, compile=False, parallel="ddp"), ALONE, recipe
            )
            optimizer = build_optimizer(model, self.config, recipe.optimizer_groups(model))
            inputs, targets = (map_tensors(_fake, part) for part in batch) if is_fake else batch
            replica.train(trains)
            with _PeakBytes(model) as bytes_used, nullcontext() if trains else torch.no_grad():
                bytes_used.add([inputs, targets])
                for _ in range(2):  # in the second one the optimizer has its state
                    with autocast(self.config, ALONE.device):
                        outputs = replica(model_inputs(recipe, self.config, inputs))
                    losses = recipe.losses(outputs, targets)
                    if trains:
                        losses.sum().backward()
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=False)  # as DDP's buckets stay
                    del outputs, losses
            if not trains:
                return float(bytes_used.peak)
            states = [each for state in optimizer.state.values() for each in state.values()]
            self.optimizer_bytes = float(sum(each.nbytes for each in states if isinstance(each, torch.Tensor)))
        return float(max(0.0, bytes_used.peak - self.gradient_bytes - self.optimizer_bytes))


def _fit(measure: Callable[..., float], **options: bool) -> Activations:
    """Return the line through the bytes of two batches."""
    small, large = (measure(size, **options) for size in SIZES)
    per_sample = (large - small) / (SIZES[1] - SIZES[0])
    return Activations(small - per_sample * SIZES[0], per_sample)


@contextmanager
def _fake_mode() -> Iterator[None]:
    """Make every tensor of the block a fake one.

    Where a module converts its parameters, torch exchanges the contents of fake ones, which those that something refers
    to do not allow. Here each is replaced by another parameter.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    convert: Any = nn.Module._apply
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # by the parameter that it replaces, such as a tied one
    depth = 0

    def apply(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        nonlocal depth
        depth += 1
        for child in module.children() if recurse else ():
            child._apply(function, recurse)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    other = nn.Parameter(function(parameter.detach()), parameter.requires_grad)
                    made[id(parameter)] = parameter, other
                module._parameters[name] = made[id(parameter)][1]
        module._buffers.update({name: function(each) for name, each in module._buffers.items() if each is not None})
        depth -= 1
        if not depth:
            made.clear()
        return module

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


class _PeakBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that operations make while they live, besides those of a model.

    torch's own MemTracker takes neither packed sequences nor a module that is called twice.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = WeakIdKeyDictionary()  # storages
        self.add([*model.parameters(), *model.buffers()])
        self.now = self.peak = 0  # of what comes besides the model

    def add(self, value: Any) -> None:
        """Count what is not known of the tensors in `value`."""
        for tensor in tree_leaves(value):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta:
                continue
            storage = tensor.untyped_storage()
            if storage not in self._known and (size := storage.nbytes()):
                self._known[storage] = size
                self.now += size
                weakref.finalize(storage, self._forget, size)
        self.peak = max(self.peak, self.now)

    def _forget(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = operation(*arguments, **(options or {}))
        self.add(result)
        return result


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of this shape, inside the mode a fake one."""
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def parse_memory(text: str) -> float:
    """Return the bytes of such as 80GiB. Raises ConfigError if there is no number, or no unit."""
    units: Mapping[str, int] = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    for unit, size in units.items():
        if text.endswith(unit):
            try:
                if 0 < (value := float(text.removesuffix(unit))) < math.inf:
                    return value * size
            except ValueError:
                break
    raise ConfigError(f"--gpu-memory: expected a number above 0 with a unit, such as 80GiB, got {text!r}")


def main(arguments: Sequence[str]) -> int:
    """Print the estimate and return the exit status."""
    text = "estimate the memory of a recipe's ranks, and the largest batch that fits; needs no GPU"
    parser = argparse.ArgumentParser(prog="flyte-ddp estimate", description=text)
    parser.add_argument("--recipe", required=True, help="name of the recipe")
    parser.add_argument("--config", default="{}", help="fields that differ from its defaults: JSON, or a file")
    parser.add_argument("--data", default="", help="source of the data, as of a run")
    parser.add_argument("--gpus", type=int, default=1, help="ranks in all (default 1)")
    parser.add_argument("--gpu-memory", default="", help="of each GPU, such as 80GiB (default: not compared)")
    options = parser.parse_args(arguments)
    try:
        device_bytes = parse_memory(options.gpu_memory) if options.gpu_memory else 0.0
        if options.gpus < 1:
            raise ConfigError(f"--gpus: expected a whole number of at least 1, got {options.gpus}")
        config = config_of(options.recipe, read_object("--config", options.config))
        made, process_bytes = estimate_recipe(options.recipe, config, options.data)
        lines = describe(made, process_bytes, config, options.gpus, device_bytes)
    except (ConfigError, DataError, StorageDenied, StorageUnavailable) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def estimate_recipe(name: str, config: TrainingConfig, source: str = "") -> tuple[Estimate, int]:
    """Return the estimate, and the bytes of `measure_process`."""
    recipe = get_recipe(name, config.recipe_options)
    with tempfile.TemporaryDirectory() as directory:
        prepare_data(recipe, source, Path(directory))
        made = estimate_prepared(recipe, config, Path(directory))
        return made, measure_process(name, config, Path(directory))


def measure_process(name: str, config: TrainingConfig, directory: Path) -> int:
    """Return the bytes that the process of a rank on a CPU takes besides its model: Python, torch and the data.

    It is forked as a rank is, from a server that has imported torch, because what it does not touch of the libraries
    is not in its memory: 130 MiB of what a process takes that has imported them itself.

    Raises:
        ConfigError: such a process ends with an error, which it has printed.
    """
    context: Any = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
    context.set_forkserver_preload(list(recipe_program(name, config).slow_imports))
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=send_process_bytes, args=(name, config, directory, writer))
    process.start()
    writer.close()
    try:
        return int(reader.recv())
    except EOFError:
        raise ConfigError("recipe: expected one that the process of a rank can open, got the error above") from None


def estimate_prepared(recipe: Recipe, config: TrainingConfig, directory: Path) -> Estimate:
    """Return the estimate by the prepared data in `directory`. Raises ConfigError if the recipe's own code raises."""
    train, test = open_datasets(recipe, directory, config)
    config = dataclasses.replace(config, data_workers=0)
    samples = open_samples([take_sample(train, config), test], recipe, config, ALONE)[0]

    def read_batch(size: int) -> Any:
        indices = torch.arange(size) % len(samples)
        return next(iter(samples.batches([indices], 1)))

    try:
        read_batch(1)
        return Estimate(recipe, config, read_batch)
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(f"recipe: expected one whose step runs on a CPU, got {what}") from error


def find_excess(made: Estimate, config: TrainingConfig, num_ranks: int, device_bytes: float) -> str:
    """Return how a rank takes more than its GPU has, with what would fit; "" if it does not."""
    batch_size = math.ceil(config.global_batch_size / (num_ranks * config.gradient_accumulation))
    memory = made.memory(config.parallel, num_ranks, batch_size)
    if memory.device <= made.allowed(device_bytes):
        return ""
    largest = made.largest_batch(config.parallel, num_ranks, device_bytes)
    return (
        f"a rank is estimated to take {_gib(memory.device)}, with {batch_size} samples in a forward pass, of a GPU "
        f"with {_gib(device_bytes)}, of which {_gib(made.allowed(device_bytes))} count: at most {largest:,} fit with "
        f"{config.parallel}. See flyte-ddp estimate"
    )


def describe(
    made: Estimate, process_bytes: int, config: TrainingConfig, num_ranks: int, device_bytes: float
) -> list[str]:
    """Return the lines of the estimate: a table with a row for each way to train."""
    parts = sorted({1, max(2, config.gradient_accumulation)})
    heads = ["parallel", "accumulation", "batch", *KINDS, "in all", "checkpoint copy"]
    rows = [heads + (["largest batch"] if device_bytes else [])]
    for parallel in ("ddp", "fsdp"):
        for num_parts in parts:
            batch_size = math.ceil(config.global_batch_size / (num_ranks * num_parts))
            memory = made.memory(parallel, num_ranks, batch_size)
            bytes_of = [*(getattr(memory, kind) for kind in KINDS), memory.device, memory.checkpoint_copy]
            row = [parallel, str(num_parts), str(batch_size), *map(_gib, bytes_of)]
            if device_bytes:
                fits = "" if memory.device <= made.allowed(device_bytes) else ", too small for this one"
                row.append(f"{made.largest_batch(parallel, num_ranks, device_bytes):,}{fits}")
            rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [
        f"{made.num_parameters:,} parameters, {made.num_trained:,} of them trained; {num_ranks} ranks; per rank:",
        *lines,
        "batch: samples per rank and forward pass",
        "checkpoint copy: in the memory of the machine, of rank 0, with fsdp of each rank",
        f"on CPUs: with the process of a rank, Python, torch and the data, {_gib(process_bytes)} more",
        *([made.problem] if made.problem else []),
    ]


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
