"""From data sets to batches on the device: which rank sees which sample, and when.

The order of an epoch is drawn once for all ranks, cut into global batches, and only then shared out. So it does not
depend on the number of ranks, every sample is in exactly one share, and a run can go on in the middle of an epoch.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import DataError
from flyte_ddp.rank.world import World
from flyte_ddp.recipes import Recipe

MAX_GPU_MEMORY_FRACTION = 0.4  # a data set that takes more of what is free stays in the host's memory

Batch = tuple[Tensor, Tensor]  # inputs as the data set holds them, and targets; first dimensions equal


@dataclass(frozen=True)
class BatchShard:
    """One rank's part of one global batch."""

    micro_batches: Sequence[Tensor]  # indices, one tensor per forward pass; never empty
    weight: float  # 0 where the batch had fewer samples than there are ranks and this rank repeats one, else 1
    own_targets: float | Tensor  # of this share
    num_targets: float | Tensor  # of the whole global batch: what the loss is a mean over
    num_samples: int  # of the whole global batch


class Samples(Protocol):
    """A data set that can be asked for batches by index."""

    def __len__(self) -> int: ...

    def num_targets(self, indices: Tensor) -> float | Tensor:
        """How many targets the samples at `indices` have together."""

    def batches(self, indices: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        """A batch on the device for each tensor in `indices`, in order."""

    @property
    def num_replaced(self) -> int:
        """Samples read so far, by this rank, for which another stood in because they could not be read."""


def open_samples(dataset: Dataset[Any], recipe: Recipe, config: TrainingConfig, world: World) -> Samples:
    """The way to read `dataset` that suits it: on the device by index where it is in memory and fits, else by loader.

    Raises:
        DataError: the data set is empty.
    """
    if len(dataset) == 0:  # type: ignore[arg-type]
        raise DataError("data: the data set is empty; accepted is one with at least one sample")
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return TensorSamples(dataset, recipe, world)
    return LoadedSamples(dataset, config, world)


class TensorSamples:
    """Samples that lie in memory whole, in bytes if the recipe has them in bytes: a batch is a gather by index."""

    num_replaced = 0

    def __init__(self, dataset: TensorDataset, recipe: Recipe, world: World) -> None:
        self.device = world.device
        inputs, targets = dataset.tensors
        counts = recipe.num_targets(targets)
        if world.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(world.device)
            if inputs.nbytes + targets.nbytes <= MAX_GPU_MEMORY_FRACTION * free:
                inputs, targets = inputs.to(world.device), targets.to(world.device)
        self.inputs, self.targets = inputs, targets
        self.counts = None if counts is None else counts.to(inputs.device, torch.float64)  # whose sums stay exact

    def __len__(self) -> int:
        return len(self.inputs)

    def num_targets(self, indices: Tensor) -> float | Tensor:
        if self.counts is None:
            return float(len(indices))
        return self.counts[indices.to(self.counts.device)].sum().to(self.device)

    def batches(self, indices: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        for index in indices:
            # A data set too large for the GPU is gathered on the host; non_blocking lets the copy overlap the step.
            here = index.to(self.inputs.device)
            # Ten times as fast as indexing on a CPU, where it copies rows.
            inputs, targets = self.inputs.index_select(0, here), self.targets.index_select(0, here)
            if inputs.device != self.device:
                inputs = inputs.pin_memory().to(self.device, non_blocking=True)
                targets = targets.pin_memory().to(self.device, non_blocking=True)
            yield inputs, targets


class LoadedSamples:
    """Samples that are read one by one, by `data_workers` processes ahead of the step that needs them."""

    def __init__(self, dataset: Dataset[Any], config: TrainingConfig, world: World) -> None:
        self.device = world.device
        self.size = len(dataset)  # type: ignore[arg-type]
        # What the next pass over the loader reads. One loader serves all passes, so that its processes, each of which
        # imports torch for seconds, start once.
        self._plan: list[list[tuple[int, int]]] = []
        workers = config.data_workers
        self._dataset = dataset
        self._loader: DataLoader[Any] = DataLoader(
            _SeededDataset(dataset, config.seed),
            batch_sampler=self._plan,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self.device.type == "cuda",
            # Not fork: this process has threads (gloo's, CUDA's), and a fork copies their locks in any state.
            multiprocessing_context="spawn" if workers else None,
        )

    def __len__(self) -> int:
        return self.size

    def num_targets(self, indices: Tensor) -> float:
        return float(len(indices))

    @property
    def num_replaced(self) -> int:
        return getattr(self._dataset, "num_replaced", 0)

    def batches(self, indices: Sequence[Tensor], epoch: int) -> Iterator[Batch]:
        self._plan[:] = [[(epoch, sample) for sample in index.tolist()] for index in indices]
        try:
            for inputs, targets in self._loader:
                yield inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)
        except DataError as error:
            # From a loader process it comes with a traceback for its message, whose last line is its own.
            message = str(error)
            raise DataError(
                message.splitlines()[-1].partition(": ")[2] if message.startswith("Caught ") else message
            ) from error


class _SeededDataset(Dataset[Any]):
    """Draws a sample's augmentation from the run's seed, the epoch and the sample, not from who loads it or when.

    So the same samples come out for every number of ranks and workers, and after a restart in the middle of an epoch.
    """

    def __init__(self, dataset: Dataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> list[Any]:
        """A batch: what a DataLoader calls where there is such a method."""
        if hasattr(self.dataset, "prefetch"):
            self.dataset.prefetch([index for _, index in places])
        return [self[place] for place in places]

    def __getitem__(self, place: tuple[int, int]) -> Any:
        epoch, index = place
        seed = derived_seed(self.seed, epoch, index)
        random.seed(seed)
        numpy.random.seed(seed & 0xFFFF_FFFF)  # it takes 32 bits
        torch.default_generator.manual_seed(seed)
        return self.dataset[index]


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The order in which epoch `epoch` visits the samples, (N,): the same on every rank and for every world size."""
    generator = torch.Generator().manual_seed(derived_seed(seed, epoch))
    return torch.randperm(num_samples, generator=generator)


def epoch_shards(
    samples: Samples, config: TrainingConfig, world: World, epoch: int, first_batch: int = 0
) -> list[BatchShard]:
    """The shares of this rank in the epoch's global batches from `first_batch` on, the last and smaller batch included.

    A batch that does not divide evenly gives the first ranks one sample more.
    """
    order = epoch_order(len(samples), config.seed, epoch).to(world.device)
    size = config.batch_size_per_rank(world.world_size)
    shards = []
    for batch in order.split(config.global_batch_size)[first_batch:]:
        mine = batch.tensor_split(world.world_size)[world.rank]
        shards.append(
            BatchShard(
                micro_batches=(mine if len(mine) else batch[:1]).split(size),
                weight=1.0 if len(mine) else 0.0,
                own_targets=samples.num_targets(mine),
                num_targets=samples.num_targets(batch),
                num_samples=len(batch),
            )
        )
    return shards


def num_batches(samples: Samples, config: TrainingConfig) -> int:
    """Global batches, and so optimizer steps, in one epoch."""
    return -(-len(samples) // config.global_batch_size)


def evaluation_shard(samples: Samples, config: TrainingConfig, world: World) -> Sequence[Tensor]:
    """The held-out samples of this rank, cut into evaluation batches; without repeats, so possibly empty."""
    mine = torch.arange(len(samples), device=world.device)[world.rank :: world.world_size]
    return mine.split(config.evaluation_batch_size) if len(mine) else []


def derived_seed(*numbers: int) -> int:
    """A seed made from several numbers, none of which shows through. The same in every process and Python."""
    return hash(numbers) & 0x7FFF_FFFF_FFFF_FFFF  # of ints, which unlike strings have no per-process salt
