"""Which rank gets which samples in which batch: one rule for recipes, shards and own loops.

The order of an epoch is drawn once for all ranks, cut into global batches, and only then shared. So
it does not depend on the number of ranks, every sample is in exactly one part, and a run can resume
in the middle of an epoch. Knows no data set but by its length or its own order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from flyte_ddp.config import TrainingConfig
from flyte_ddp.data.ahead import fetch_ahead
from flyte_ddp.world import World

if TYPE_CHECKING:
    from flyte_ddp.data.mixture import Stream


@dataclass(frozen=True)
class Share:
    """A rank's share of each global batch. The first ranks get one sample more of a batch that does
    not divide.
    """

    index: int
    num_shares: int

    def count(self, num_samples: int) -> int:
        """Return how many of a batch's samples are in this share."""
        least, rest = divmod(num_samples, self.num_shares)
        return least + (self.index < rest)

    def weigh(self, num_samples: int) -> float:
        """Return the weight of this share's mean in the mean over a batch, times the number of
        shares.
        """
        return self.count(num_samples) * self.num_shares / num_samples

    def cut(self, batch: Any) -> Any:
        """Return this share of a batch, a list or a tensor (B, ...).

        A share without samples gets the batch's first one, which has weight 0: its forward and
        backward passes may be collectives.
        """
        least, rest = divmod(len(batch), self.num_shares)
        start = self.index * least + min(self.index, rest)
        own = batch[start : start + self.count(len(batch))]
        if len(own):
            return own
        return batch[:1]


@dataclass(frozen=True)
class EpochPlan:
    """The global batches of an epoch, by their numbers.

    plan = EpochPlan(num_samples=10, global_batch_size=4, seed=0, epoch=1, share=Share(0, 2))
    plan.batch(0)  # four samples, the same on every rank
    plan.share.cut(plan.batch(0))  # two of them
    """

    num_samples: int
    global_batch_size: int  # the epoch's last batch may be smaller
    seed: int
    epoch: int
    share: Share
    first: int = 0  # samples of the epoch before batch 0
    data_order: Tensor | None = None  # (N,): the samples in their order, where none is drawn
    stream: Stream | None = None  # a data set with an order of its own
    num_before: int = 0  # epochs of the run before this one
    weights: Tensor | None = None  # (N,): the samples' weights, for draws with replacement
    device: torch.device | str = "cpu"  # the device of the indices

    def __len__(self) -> int:
        return max(0, -(-(self.num_samples - self.first) // self.global_batch_size))

    @functools.cached_property
    def _order(self) -> Any:
        """The order of the epoch: an index (N,), or a stream's own."""
        if self.stream is not None:
            return self.stream.order(self.global_batch_size, self.seed, self.epoch, self.num_before)
        if self.data_order is not None:
            return self.data_order.to(self.device)
        order = epoch_order(self.num_samples, self.seed, self.epoch, self.weights)
        return order.to(self.device)

    def size(self, number: int) -> int:
        """Return the number of samples of a batch."""
        done = self.first + number * self.global_batch_size
        return min(self.global_batch_size, self.num_samples - done)

    def batch(self, number: int) -> Tensor:
        """Return the samples of a batch, (B,)."""
        begin = self.first + number * self.global_batch_size
        return self.samples(begin, begin + self.size(number))

    def samples(self, begin: int, end: int) -> Tensor:
        """Return the samples at places of the epoch's order, (end - begin,)."""
        if self.stream is None:
            return self._order[begin:end]  # type: ignore[no-any-return]
        return torch.tensor(self._order.batch(begin, end - begin).tolist())

    def batches(self, first: int = 0, end: int | None = None) -> Iterator[Tensor]:
        """Yield the samples of the batches from `first` up to `end`, which is excluded; by default
        up to the last batch. Meanwhile the files of a stream's coming batches are fetched.

        Raises:
            ConfigError: the shards that this machine reads at once do not fit in the cache.
        """
        numbers = range(len(self))
        batches = map(self.batch, numbers[first:end])
        if self.stream is None:
            return batches
        num_ahead = self.stream.num_ahead(self._order, self.share.num_shares)
        distance = 0
        if num_ahead < math.inf:
            distance = int(num_ahead / self.global_batch_size)
        # The files of batches after `end` are fetched, too: another call asks for them.
        coming = map(self._list_own, numbers[first:])
        return fetch_ahead(batches, coming, self.stream.prefetch, distance)

    def _list_own(self, number: int) -> list[int]:
        own: list[int] = self.share.cut(self.batch(number)).tolist()
        return own


class Samples(Protocol):
    """The samples of a data set: rank/data.py has the two kinds."""

    weights: Tensor | None

    @property
    def dataset(self) -> Any: ...

    @property
    def index_device(self) -> torch.device: ...

    def __len__(self) -> int: ...

    def num_targets(self, indices: Tensor) -> float | Tensor | None: ...


@dataclass(frozen=True)
class BatchShard:
    """One rank's part of one global batch. All ranks have the same number of micro-batches, none of
    them empty.
    """

    micro_batches: Sequence[Tensor]  # indices, one tensor per forward pass
    # the weights of the micro-batches' losses: 1, or 0 for a repeated sample in place of none
    weights: Sequence[float]
    # The loss is a mean over the targets. None if only the loaded targets show their number.
    own_targets: float | Tensor | None  # number of targets in this shard
    num_targets: float | Tensor | None  # number of targets in the whole global batch
    num_samples: int  # number of samples in the whole global batch


@dataclass(eq=False)
class EpochShards:
    """One rank's shards of an epoch's global batches, by number, the last and smaller batch
    included.

    All ranks run as many micro-batches, because layers such as SyncBatchNorm's communicate in each.
    """

    samples: Samples
    plan: EpochPlan
    size: int  # samples in a micro-batch

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, number: int) -> BatchShard:
        if self.plan.stream is None:
            return self._all[number]
        return self.make(number, self.plan.batch(number))

    @functools.cached_property
    def _all(self) -> list[BatchShard]:
        return [self.make(number, batch) for number, batch in enumerate(self.plan.batches())]

    def __iter__(self) -> Iterator[BatchShard]:
        return self.read()

    def read(self, first: int = 0, end: int | None = None) -> Iterator[BatchShard]:
        """Yield the shards of the batches from `first` up to `end`, which is excluded; by default
        up to the last batch. Meanwhile the files of a stream's coming batches are fetched.
        """
        if self.plan.stream is None:
            yield from self._all[first:end]
            return
        for number, batch in enumerate(self.plan.batches(first, end), first):
            yield self.make(number, batch)

    def make(self, number: int, batch: Tensor) -> BatchShard:
        """Return this rank's shard of a global batch (B,)."""
        return self.build(batch, self.split(batch))

    def split(self, batch: Tensor) -> Sequence[Tensor]:
        """Return this rank's samples of a global batch by micro-batch, which may be empty."""
        share = self.plan.share
        mine = share.cut(batch)[: share.count(len(batch))]
        most = Share(0, share.num_shares).count(len(batch))
        micro_batches: Sequence[Tensor] = mine.tensor_split(-(-most // self.size))
        return micro_batches

    def build(self, batch: Tensor, micro_batches: Sequence[Tensor]) -> BatchShard:
        """Return the shard with these samples (b,) of a global batch (B,)."""
        parts, weights = [], []
        for part in micro_batches:
            if len(part):
                parts.append(part)
                weights.append(1.0)
            else:  # a repeated sample keeps the number of passes equal on all ranks
                parts.append(batch[:1])
                weights.append(0.0)
        return BatchShard(
            micro_batches=parts,
            weights=weights,
            own_targets=self.samples.num_targets(torch.cat([*micro_batches])),
            num_targets=self.samples.num_targets(batch),
            num_samples=len(batch),
        )


def epoch_shards(samples: Samples, config: TrainingConfig, world: World, epoch: int) -> EpochShards:
    """Return this rank's shards of an epoch."""
    plan = EpochPlan(
        len(samples),
        config.global_batch_size,
        config.seed,
        epoch,
        Share(world.rank, world.world_size),
        stream=as_stream(samples.dataset),
        num_before=epoch - 1,
        weights=samples.weights,
        device=samples.index_device,
    )
    return EpochShards(samples, plan, config.batch.size_per_rank(world.world_size))


def num_batches(samples: Samples, config: TrainingConfig) -> int:
    """Return the number of global batches, and so of optimizer steps, of one epoch."""
    return -(-len(samples) // config.global_batch_size)


def evaluation_shard(samples: Samples, config: TrainingConfig, world: World) -> Sequence[Tensor]:
    """Return this rank's held-out samples, cut into evaluation batches. No sample is repeated, so a
    rank may have none.
    """
    all_of_them = list_samples(samples.dataset, len(samples)).to(samples.index_device)
    mine = all_of_them[world.rank :: world.world_size]
    if as_stream(samples.dataset):  # a rank with a contiguous part reads few shards
        mine = all_of_them.tensor_split(world.world_size)[world.rank]
    if not len(mine):
        return []
    return mine.split(config.evaluation_batch_size)  # type: ignore[no-any-return]


def list_samples(dataset: Any, num_samples: int) -> Tensor:
    """Return the samples in the order of the data, (N,). Those of a mixture have its
    proportions.
    """
    if hasattr(dataset, "list_samples"):
        return torch.from_numpy(dataset.list_samples())
    return torch.arange(num_samples)


def as_stream(dataset: Any) -> Stream | None:
    """Return `dataset` if its samples are read in an order of its own, such as those of shards."""
    return dataset if hasattr(dataset, "describe_order") else None


def as_counted(dataset: Any) -> Any:
    """Return `dataset` if it has stored the numbers of its targets, as `Packed` has; else None."""
    stream = as_stream(dataset)
    return stream if getattr(stream, "count_targets", None) else None


def epoch_order(num_samples: int, seed: int, epoch: int, weights: Tensor | None = None) -> Tensor:
    """Return the order in which epoch `epoch` visits the samples, (N,): the same on every rank of
    every world size.

    Args:
        weights: the samples' weights. With weights, N samples are drawn with replacement.
    """
    generator = torch.Generator().manual_seed(derived_seed(seed, epoch))
    if weights is None:
        return torch.randperm(num_samples, generator=generator)
    # Draws invert the distribution function, because torch.multinomial ends at 2^24 samples.
    sums = weights.cumsum(0)
    ends = sums / sums[-1]
    last = 1 - 2.0**-52  # a draw never reaches 1, the end of the last sample
    draws = torch.rand(num_samples, generator=generator, dtype=torch.float64).clamp_(max=last)
    return torch.searchsorted(ends, draws, right=True)


def derived_seed(*numbers: int) -> int:
    """Return a seed made from several numbers. It is the same in every process and Python."""
    # Hashes of ints, unlike hashes of strings, have no salt that differs between processes.
    return hash(numbers) & 0x7FFF_FFFF_FFFF_FFFF
