"""A recipe's model and new data in one process: predict a part of the samples. This module knows no
other processes.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from flyte_ddp.config.extras import require
from flyte_ddp.errors import ConfigError, DataError, StorageUnavailable
from flyte_ddp.prediction import schema
from flyte_ddp.prediction.job import DATA, MANIFEST, PredictionJob, part_name
from flyte_ddp.rank.agreement import compare, summarize
from flyte_ddp.rank.data import LoadedSamples, isolate_draws, seed_generators
from flyte_ddp.rank.nested import map_tensors
from flyte_ddp.rank.plan import derived_seed
from flyte_ddp.recipes import get_recipe, list_class_names, locate
from flyte_ddp.recipes.base import Mapped
from flyte_ddp.storage import Storage
from flyte_ddp.training.evaluation import open_trained_model
from flyte_ddp.training.initial_state import find_class_names, read_state
from flyte_ddp.training.inspection import on_cpu
from flyte_ddp.training.parallel import MEMORY_SHARE, Parallelism
from flyte_ddp.training.passes import evaluating, forward
from flyte_ddp.world import ALONE, World

NUM_COMPARED = 256  # number of samples, evenly spread, that are compared in place of all


class Predictor:
    """A model with its weights on a device, and the samples that it predicts.

    Args:
        directory: the directory of the prepared data.
        world: a world of this process alone, with its device.

    Raises:
        ConfigError: the state does not fit the recipe's model, has other classes than the data, or
            is too large for any device.
        DataError: there are no samples.
    """

    dataset: Any  # the return value of `Recipe.predict_dataset`

    def __init__(self, job: PredictionJob, directory: str, world: World = ALONE) -> None:
        require("predictions", "pyarrow")
        config = job.config
        self.job, self.device = job, world.device
        state = read_state(job.model_state, "model_state: expected a state dict")
        self.storage = Storage(job.output, "output")
        self.recipe = recipe = get_recipe(job.recipe, config.recipe_options)
        if not list_class_names(recipe):
            # The recipe may be a frozen dataclass, which refuses an assignment.
            object.__setattr__(recipe, "class_names", find_class_names(state))
        with isolate_draws([]):  # `open_datasets` does the same, so both split the data alike.
            seed_generators(derived_seed(config.seed, *b"datasets"))
            self.dataset = recipe.predict_dataset(Path(directory))
        if hasattr(self.dataset, "list_samples"):
            raise ConfigError(
                f"{locate(recipe, 'predict_dataset')}: expected each sample once, got a Mixture, "
                "which repeats samples or leaves some out: predict its sources"
            )
        if not len(self.dataset):
            raise DataError("data: expected at least one sample to predict, got none")
        self.parallelism = OneDevice(recipe, config, world)
        self.model = open_trained_model(state, self.parallelism, "model_state")
        pairs: Any = Mapped(self.dataset, pair_with_index)
        self._loaded = LoadedSamples(pairs, recipe, config, world)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def num_parts(self) -> int:
        return -(-len(self) // self.job.part_size)

    def describe(self) -> dict[str, Any]:
        """Return the number of samples and the schema of their predictions, for the manifest."""
        ((keys, columns),) = self._predict(0, min(self.job.batch_size, len(self)))
        found = schema.find_schema(self.recipe, keys, columns)
        return {
            "num_samples": len(self),
            DATA: json.dumps(self.describe_data()),
            "schema": {each.name: str(each.type) for each in found},
            "arrow_schema": schema.to_text(found),
        }

    @functools.cached_property
    def _schema(self) -> Any:
        """The schema of all files, from the manifest of the output."""
        return schema.from_text(self._read_manifest()["arrow_schema"])

    def _read_manifest(self) -> dict[str, Any]:
        return dict(json.loads(self.storage.read(MANIFEST)))

    def describe_data(self) -> dict[str, Any]:
        """Return the number of samples, and plain values that identify them. For shards these are
        all checksums, for other data a summary of `NUM_COMPARED` samples.
        """
        facts: dict[str, Any] = {"num_samples": len(self)}
        if hasattr(self.dataset, "describe_shards"):
            return {**facts, **self.dataset.describe_shards()}
        count = min(len(self), NUM_COMPARED)
        chosen = torch.linspace(0, len(self) - 1, count, dtype=torch.float64).round().long()
        facts["samples"] = []
        for index, batch in zip(chosen.tolist(), self._read(chosen.split(1)), strict=True):
            facts["samples"] += summarize((self._key(index), batch))
        return facts

    def check_data(self) -> None:
        """Check that the existing predictions were made from the same data. Raises ConfigError if
        not.

        The check matters most for a recipe that reads the data from their URL.
        """
        expected, found = json.loads(self._read_manifest()[DATA]), self.describe_data()
        where = f", as of the predictions in {self.job.output!r}"
        remedy = "; others need another output"
        compare("data: ", expected, found, where, remedy=remedy, read=self.describe_data)

    def write_part(self, number: int, on_batch: Callable[[], None] = lambda: None) -> None:
        """Predict the samples of a part, and write its file to the output.

        Args:
            on_batch: called after each batch.
        """
        import pyarrow
        from pyarrow import parquet

        first = number * self.job.part_size
        end = min(first + self.job.part_size, len(self))
        tables = []
        for keys, columns in self._predict(first, end):
            tables.append(schema.make_table(self.recipe, keys, columns, self._schema))
            on_batch()
        file = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.concat_tables(tables), file)
        self.storage.write(part_name(number), file.getvalue().to_pybytes())

    def _predict(self, first: int, end: int) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        """Yield the keys and the columns of each batch of these samples."""
        indices = torch.arange(first, end).split(self.job.batch_size)
        batches = self._read(indices)
        with evaluating(self.model):
            for index in indices:
                numbers = index.tolist()
                try:
                    batch = next(batches)
                    keys = schema.to_plain([self._key(number) for number in numbers])
                except (ConfigError, StorageUnavailable, MemoryError, torch.OutOfMemoryError):
                    raise
                except Exception as error:  # any error is possible: the data set is the user's
                    raise self._locate_error(numbers, error) from error
                outputs = map_tensors(on_cpu, forward(self.model, self.parallelism, batch))
                yield keys, schema.list_columns(self.recipe, outputs, len(numbers))

    def _key(self, number: int) -> Any:
        """Return the key of a sample: its number if the data set has no keys."""
        return getattr(self.dataset, "key", int)(number)

    def _locate_error(self, numbers: Sequence[int], error: Exception) -> DataError:
        """Return an error that names recipe, part and sample, after a batch could not be read."""
        place = f"samples {numbers[0]} to {numbers[-1]}"
        for number in numbers:
            try:
                self._key(number)
                self.dataset[number]
            except Exception as found:
                error = found
                place = f"sample {number}"
                with contextlib.suppress(Exception):
                    name = self._key(number)
                    place += f" ({name})" * (name != number)
                break
        part = part_name(numbers[0] // self.job.part_size)
        reason = " ".join(str(error).rpartition("Traceback")[2].split())
        return DataError(
            f"{locate(self.recipe, 'predict_dataset')}: {place} of {part} cannot be read: "
            f"{type(error).__name__}: {reason}"
        )

    def _read(self, indices: Sequence[Tensor]) -> Iterator[Any]:
        if not isinstance(self.dataset, TensorDataset):
            yield from self._load(indices)
            return
        for index in indices:
            batch = [
                tensor.index_select(0, index).to(self.device) for tensor in self.dataset.tensors
            ]
            if len(batch) == 1:
                yield batch[0]
            else:
                yield tuple(batch)

    def _load(self, indices: Sequence[Tensor]) -> Iterator[Any]:
        batches = self._loaded.batches(indices, epoch=0)
        stand_in: list[float]
        for index, (inputs, targets, *stand_in) in zip(indices, batches, strict=True):
            num_kept = len(index)
            if self._loaded.has_own_sizes:
                num_kept = self.recipe.num_samples(inputs, targets)
            if stand_in or num_kept != len(index):
                raise ConfigError(
                    f"{locate(self.recipe, 'collate')}: expected all of {len(index)} samples, "
                    "because each is predicted, got a batch without some: keep those whose target "
                    "is their index"
                )
            yield inputs


def pair_with_index(sample: Any, index: int) -> tuple[Any, int]:
    """Return the (input, target) pair of an input for `LoadedSamples`: its target is its index."""
    return sample, index


class OneDevice(Parallelism):
    """Parallelism of a process that holds the whole model and trains nothing."""

    def check_memory(self, model: nn.Module) -> None:
        """Raise ConfigError if the weights need more than one GPU."""
        if self.world.device.type != "cuda":
            return
        available = torch.cuda.get_device_properties(self.world.device).total_memory
        needed = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        if needed > MEMORY_SHARE * available:
            raise ConfigError(
                "model_state: expected a model that one GPU holds, because each process predicts "
                f"with all of it, got {needed / 2**30:.1f} GiB of weights for a GPU with "
                f"{available / 2**30:.1f} GiB"
            )
