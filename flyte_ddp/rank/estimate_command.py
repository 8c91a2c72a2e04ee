"""`flyte-ddp estimate`: the memory of a recipe's ranks, before any rank starts, on a machine without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import read_object
from flyte_ddp.errors import ConfigError, DataError, StorageDenied, StorageUnavailable
from flyte_ddp.launch.process.programs import recipe_program
from flyte_ddp.rank.contract import check_datasets
from flyte_ddp.rank.data import open_samples, take_sample
from flyte_ddp.rank.estimate import Estimate, parse_memory
from flyte_ddp.rank.main import send_process_bytes
from flyte_ddp.recipes import Recipe, config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.world import ALONE

KINDS = ("weights", "gradients", "optimizer", "activations")


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
    """Return the estimate by the prepared data in `directory`.

    Raises:
        ConfigError: the recipe's own code raises.
    """
    train, test = check_datasets(recipe, recipe.datasets(directory))
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
