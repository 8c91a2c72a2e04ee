"""From data sets to batches on the device. Which rank gets which samples is in plan.py."""

from __future__ import annotations

import contextlib
import functools
import operator
import pickle
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.rank.nested import collate, describe_kind, map_tensors, tensors_in
from flyte_ddp.rank.plan import as_counted, as_stream, derived_seed, epoch_order
from flyte_ddp.recipes import Recipe, locate
from flyte_ddp.world import World

STAND_IN = 0.0  # the weight of the sample that stands in for an unreadable micro-batch
MAX_FOLLOWING = 100  # samples that are tried as stand-ins
# The share of a GPU's free memory for all data sets together. Other data sets stay on the host.
MAX_GPU_MEMORY_FRACTION = 0.4


Batch = tuple[
    Any, Any
]  # inputs as the data set holds them, and targets: tensors, or such nested; first dimensions equal


def open_samples(
    datasets: Iterable[Dataset[Any]], recipe: Recipe, config: TrainingConfig, world: World
) -> list[TensorSamples | LoadedSamples]:
    """Return a reader for each of `datasets`. Data in memory are read by index, on the GPU if they
    fit. A loader reads other data.
    """
    samples: list[TensorSamples | LoadedSamples] = []
    free = 0
    if world.device.type == "cuda":
        free = torch.cuda.mem_get_info(world.device)[0]
    budget = int(MAX_GPU_MEMORY_FRACTION * free)
    has_own = type(recipe).collate is not Recipe.collate
    for dataset in datasets:
        if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2 and not has_own:
            in_memory = TensorSamples(dataset, recipe, world)
            if in_memory.nbytes <= budget:
                in_memory.move_to_device()
                budget -= in_memory.nbytes
            samples.append(in_memory)
        else:
            samples.append(LoadedSamples(dataset, recipe, config, world))
    return samples


def weigh_samples(
    samples: Samples, dataset: Dataset[Any], recipe: Recipe, config: TrainingConfig
) -> None:
    """Let the training samples be drawn by `Recipe.sampling_weights`, if the recipe has them.

    Raises:
        ConfigError: they are not one finite number of at least 0 for each sample, or all are 0.
    """
    if type(recipe).sampling_weights is Recipe.sampling_weights:
        return
    if as_stream(dataset):
        place = locate(recipe, "sampling_weights")
        raise ConfigError(f"{place}: expected none, because the training data are shards")
    with isolate_draws([]):
        seed_generators(derived_seed(config.seed, *b"weights"))
        weights = torch.as_tensor(recipe.sampling_weights(dataset), dtype=torch.float64).cpu()
    place = locate(recipe, "sampling_weights")
    if weights.shape != (len(samples),):
        raise ConfigError(
            f"{place}: expected a number for each of {len(samples)} training samples, got shape "
            f"{tuple(weights.shape)}"
        )
    wrong = (~(weights.isfinite() & (weights >= 0))).nonzero()
    if len(wrong):
        index = int(wrong[0])
        raise ConfigError(
            f"{place}: expected finite numbers of at least 0, got {float(weights[index])} for "
            f"sample {index}"
        )
    if not weights.any():
        raise ConfigError(f"{place}: expected a number above 0, got 0 for every sample")
    samples.weights = weights


def take_sample(train: Dataset[Any], config: TrainingConfig) -> Dataset[Any]:
    """Return the part of the training data that `sample_size` asks for: the same at every world
    size.

    Raises:
        ConfigError: there are fewer samples.
    """
    size = len(train)  # type: ignore[arg-type]
    if config.sample_size > size:
        raise ConfigError(
            f"sample_size: expected at most {size}, the number of training samples, or 0 for all, "
            f"got {config.sample_size}"
        )
    if config.sample_size in (0, size):
        return train
    if as_stream(train):
        raise ConfigError(
            f"sample_size: expected 0, because the training data are shards, got "
            f"{config.sample_size}: name some of the shards in place of all"
        )
    # Training visits epochs from 1 on. Sorted, because neighbors in a file are read faster.
    sample = epoch_order(size, config.seed, epoch=0)[: config.sample_size].sort().values
    if isinstance(train, TensorDataset):
        return TensorDataset(*(tensor[sample] for tensor in train.tensors))
    return _Sample(train, sample.tolist())


class _Sample(Subset[Any]):
    """Some of the samples of a data set, with the optional attributes that `Recipe.datasets`
    describes.
    """

    def prefetch(self, indices: Sequence[int]) -> None:
        if hasattr(self.dataset, "prefetch"):
            self.dataset.prefetch([self.indices[index] for index in indices])

    def key(self, index: int) -> str:
        number = self.indices[index]
        if hasattr(self.dataset, "key"):
            return self.dataset.key(number)  # type: ignore[no-any-return]
        return f"sample {number}"

    @property
    def UNREADABLE(self) -> object:
        return self.dataset.UNREADABLE  # type: ignore[attr-defined]


class TensorSamples:
    """Samples that are all in memory, with the types of the recipe's data set. A batch is a gather
    by index.
    """

    weights: Tensor | None = None  # see `weigh_samples`
    has_own_collate = has_own_sizes = False
    num_unreadable = 0
    dataset = None  # reading a tensor's sample changes no data set

    def __init__(self, dataset: TensorDataset, recipe: Recipe, world: World) -> None:
        self.device = world.device
        self.inputs, self.targets = dataset.tensors
        counts = recipe.num_targets(self.targets)
        # Sums in double precision stay exact. The recipe's check reports a list.
        self.counts = counts
        if counts is not None:
            self.counts = torch.as_tensor(counts, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def nbytes(self) -> int:
        return self.inputs.nbytes + self.targets.nbytes

    @property
    def index_device(self) -> torch.device:
        """The device of the indices that `batches` takes. With indices on another device, each
        batch would wait for the GPU.
        """
        return self.inputs.device

    def move_to_device(self) -> None:
        """Move all samples to the rank's device."""
        self.inputs, self.targets = self.inputs.to(self.device), self.targets.to(self.device)
        if self.counts is not None:
            self.counts = self.counts.to(self.device)

    def num_targets(self, indices: Tensor) -> float | Tensor:
        """Return how many targets the samples at `indices` have together."""
        if self.counts is None:
            return float(len(indices))
        return self.counts[indices].sum()

    def read(self, epoch: int, sample: int) -> Any:
        """Return a sample as it is in an epoch."""
        return self.inputs[sample], self.targets[sample]

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        """Yield a batch on the rank's device for each tensor in `indices`, in order."""
        for index in indices:
            # Ten times as fast as indexing on a CPU, where it copies rows.
            batch = [each.index_select(0, index) for each in (self.inputs, self.targets)]
            # Data too large for the GPU: non_blocking copies the batch during the step before.
            if self.inputs.device != self.device:
                batch = [each.pin_memory().to(self.device, non_blocking=True) for each in batch]
            inputs, targets = batch
            yield inputs, targets


class LoadedSamples:
    """Samples that are read one by one, by `data_workers` processes ahead of the step that needs
    them.
    """

    weights: Tensor | None = None  # see `weigh_samples`
    index_device = torch.device("cpu")
    # the samples in the batch that `batches` has yielded last; none if another one stands in
    last_read: Sequence[int] = ()

    def __init__(
        self, dataset: Dataset[Any], recipe: Recipe, config: TrainingConfig, world: World
    ) -> None:
        self.device = world.device
        self.recipe = recipe
        self.has_own_counts = type(recipe).num_targets is not Recipe.num_targets
        self.has_own_collate = type(recipe).collate is not Recipe.collate
        self.has_own_sizes = type(recipe).num_samples is not Recipe.num_samples
        # The samples of the next pass over the loader. One loader serves all passes, so that its
        # processes start once: each imports torch for seconds.
        self._plan = _Plan()
        workers = config.data_workers
        # the counts of all loader processes, in memory that they share
        self._num_unreadable = torch.zeros(1 + workers, dtype=torch.int64).share_memory_()
        self.dataset: Any = dataset
        # torch's warning recommends fork, which does not help. `batches` raises our own error.
        warnings.filterwarnings("ignore", "Got pickle error")
        make: Callable[[Sequence[Any], bool], Any] = collate_plainly
        if self.has_own_collate:
            make = recipe.collate
        self._loader: DataLoader[Any] = DataLoader(
            SeededDataset(dataset, config.seed, make, self._num_unreadable),
            batch_sampler=self._plan,
            collate_fn=keep,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.device.type == "cuda",
            # Not fork: this process has threads (gloo's, CUDA's), and a fork copies their locks in
            # any state.
            multiprocessing_context="spawn" if workers else None,
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def num_targets(self, indices: Tensor) -> float | None:
        """Return how many targets the samples at `indices` have together; None if the loaded
        samples have to be counted.
        """
        if self.has_own_sizes:
            return None
        counted = as_counted(self.dataset)
        if counted is not None:
            return float(counted.count_targets(indices.tolist()))
        if self.has_own_counts:
            return None
        return float(len(indices))

    @property
    def source_names(self) -> list[str]:
        """The names of the sources of a mixture; none of other data."""
        if not hasattr(self.dataset, "find_sources"):
            return []
        return list(self.dataset.sources)

    def find_sources(self) -> Tensor:
        """Return the numbers of the sources of the samples in `last_read`, (N,)."""
        return torch.from_numpy(self.dataset.find_sources(self.last_read))

    @property
    def num_unreadable(self) -> int:
        """The number of this rank's samples so far that could not be read and are left out."""
        return int(self._num_unreadable.sum())

    def read(self, epoch: int, sample: int) -> Any:
        return self._loader.dataset[epoch, sample]

    def batches(self, indices: Iterable[Tensor], epoch: int) -> Iterator[Batch]:
        def locate_samples(index: Tensor) -> list[tuple[int, int]]:
            return [(epoch, sample) for sample in index.tolist()]

        self._plan.batches = map(locate_samples, indices)
        try:
            for batch, numbers in self._loader:
                self._check(batch, len(numbers))
                self.last_read = numbers
                moved = map_tensors(
                    lambda each: each.to(self.device, non_blocking=True), tuple(batch)
                )
                yield moved if numbers else (*moved, STAND_IN)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            if "pickle" not in str(error) or str(error).startswith("Caught "):
                raise
            raise ConfigError(
                f"{locate(self.recipe, 'datasets')}: expected data sets that pickle can send to "
                f"data_workers, got one that it cannot: {error}; use a function at the top of a "
                "module in place of a lambda, make locks and open files in __getitem__, or set "
                "data_workers to 0"
            ) from error
        except DataError as error:
            message = message_of(error)
            if message.startswith("datasets: "):  # an error of this package, not of the recipe
                message = locate(self.recipe, "datasets") + message.removeprefix("datasets")
            raise DataError(message) from error

    def _check(self, batch: Any, num_read: int) -> None:
        """Check the batch that the loader has made of `num_read` samples, and count the samples
        that `collate` left out.
        """
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise DataError(
                f"datasets: expected (input, target) pairs as samples, got {describe_kind(batch)}"
            )
        num_samples = num_read or 1  # another sample stands in
        if self.has_own_sizes:
            place = locate(self.recipe, "num_samples")
            kept = check_count(place, self.recipe.num_samples(*batch), num_samples)
            self._num_unreadable[0] += num_samples - kept
        elif self.has_own_collate:
            if not num_read and not hasattr(self.dataset, "UNREADABLE"):
                raise ConfigError(
                    f"{locate(self.recipe, 'collate')}: expected a batch, or a recipe with "
                    "num_samples, got None"
                )
            self._check_size(batch, num_samples)

    def _check_size(self, batch: Any, num_samples: int) -> None:
        """Raise ConfigError if the recipe's `collate` has not made its batch of all samples."""
        for tensor in tensors_in(batch):
            if tensor.shape[:1] != (num_samples,):
                raise ConfigError(
                    f"{locate(self.recipe, 'collate')}: expected tensors whose first dimension is "
                    f"the batch, {num_samples}, or a recipe with num_samples, got shape "
                    f"{tuple(tensor.shape)}"
                )


class _Plan:
    """The batches of the next pass over a loader."""

    batches: Iterable[list[tuple[int, int]]] = ()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.batches)


def message_of(error: DataError) -> str:
    """Return the message of an error of a data set. A loader process sends a traceback, whose last
    line is the message.
    """
    message = str(error)
    if message.startswith("Caught "):
        message = message.splitlines()[-1].partition(": ")[2]
    return message


Samples = TensorSamples | LoadedSamples  # return batches by index


def collate_by(make: Callable[[Sequence[Any]], Any], samples: Sequence[Any], training: bool) -> Any:
    """Return a batch, made by a function that does not take `training`."""
    return make(samples)


collate_plainly = functools.partial(collate_by, collate)


def count_samples(recipe: Recipe, inputs: Any, targets: Any) -> int:
    """Return the number of samples of a batch."""
    if type(recipe).num_samples is not Recipe.num_samples:
        return recipe.num_samples(inputs, targets)
    return len(next(tensors_in(targets)))


def check_count(place: str, count: Any, most: int) -> int:
    """Return `count`, the number of samples in a batch, as an int.

    Raises:
        ConfigError: `count` is no whole number from 1 to `most`; begins with `place`.
    """
    try:
        number = operator.index(count)
    except TypeError:
        number = 0
    if not 1 <= number <= most:
        raise ConfigError(
            f"{place}: expected 1 to {most} samples of a batch that was made of {most}, got "
            f"{count!r}; collate returns None where it keeps no sample"
        )
    return number


@dataclass(eq=False, repr=False)
class SeededDataset(Dataset[Any]):
    """Draws a sample's augmentation from the run's seed, the epoch and the sample's number.

    So the samples are the same for every number of ranks and workers, and after a restart in the
    middle of an epoch.
    """

    dataset: Any
    seed: int
    # makes a batch of samples, given whether the batch is for training; returns None if it keeps
    # no sample
    collate: Callable[[Sequence[Any], bool], Any] = collate_plainly
    # counts of the samples that this process and its loader processes left out
    num_unreadable: Tensor | None = None

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> tuple[Any, list[int]]:
        """Return a batch, and its samples' numbers; no numbers if another sample stands in for all
        of them. A DataLoader calls this method.
        """
        if hasattr(self.dataset, "prefetch"):
            self.dataset.prefetch([index for _, index in places])
        is_training = places[0][0] > 0
        samples, numbers = self._read(places)
        batch = None
        if samples:
            batch = self.collate(samples, is_training)
        if batch is None:
            numbers = []
        if self.num_unreadable is not None:
            info = get_worker_info()
            slot = 0
            if info:
                slot = info.id + 1
            self.num_unreadable[slot] += len(places) - len(numbers)
        if batch is None:
            batch = self._stand_in(*places[0])
        return batch, numbers

    def _read(self, places: Iterable[tuple[int, int]]) -> tuple[list[Any], list[int]]:
        """Return the samples that can be read, and their numbers."""
        samples, numbers = [], []
        for place in places:
            sample = self[place]
            if sample is not getattr(self.dataset, "UNREADABLE", self):
                samples.append(sample)
                numbers.append(place[1])
        return samples, numbers

    def _stand_in(self, epoch: int, sample: int) -> Any:
        """Return a batch of the first readable sample after `sample`."""
        for following in range(sample + 1, sample + MAX_FOLLOWING):
            samples, _ = self._read([(epoch, following % len(self.dataset))])
            if samples:
                batch = self.collate(samples, epoch > 0)
                if batch is not None:
                    return batch
        raise DataError(
            f"data: expected a sample that can be read, got none of {MAX_FOLLOWING} from sample "
            f"{sample} on (reading failed, or collate returned None)"
        )

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        seed_generators(derived_seed(self.seed, epoch, index))
        return self.dataset[index]


def keep(batch: Any) -> Any:
    """Return the batch that `SeededDataset` has made, unchanged. Its loader collates with this."""
    return batch


def seed_generators(seed: int) -> None:
    """Seed the generators that data sets draw from: Python's, NumPy's and torch's."""
    random.seed(seed)
    numpy.random.seed(seed & 0xFFFF_FFFF)  # NumPy takes 32 bits
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def isolate_draws(draws: list[Any]) -> Iterator[None]:
    """Leave the process's own random draws alone in the block. The block continues the draws of the
    block before it.

    Args:
        draws: the generators' states between two blocks; empty before the first one.
    """
    generators: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (random.getstate, random.setstate),
        (numpy.random.get_state, numpy.random.set_state),
        (torch.get_rng_state, torch.set_rng_state),
    ]
    own = [get() for get, _ in generators]
    for (_, restore), state in zip(generators, draws, strict=False):
        restore(state)
    try:
        yield
    finally:
        draws[:] = [get() for get, _ in generators]
        for (_, restore), state in zip(generators, own, strict=True):
            restore(state)
