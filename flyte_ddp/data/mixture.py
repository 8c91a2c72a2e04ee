"""`Mixture`: samples or rows of several sources of shards in proportions. The order does not depend
on the number of ranks. Imports no torch.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np

from flyte_ddp.config.fields import whole_number
from flyte_ddp.data.order import (
    MAX_LANES,
    MIN_LANES,
    ORDER,
    SHARDS_PER_LANE,
    EpochOrder,
    Indices,
    Order,
)
from flyte_ddp.data.packed import Packed
from flyte_ddp.data.permutation import derive_key, permute
from flyte_ddp.data.schedule import VERSION as SCHEDULE_VERSION
from flyte_ddp.data.schedule import BatchCounts, Schedule, ScheduledOrder
from flyte_ddp.data.shards import Shards
from flyte_ddp.data.shares import UNIT, count_before, read_shares
from flyte_ddp.errors import ConfigError

# Checkpoints depend on the result of `MixedOrder.samples`. A change of the result, or of
# `permutation.VERSION`, needs a new version.
ORDER_VERSION = 2
PHASES = 1024  # number of phases in which a lane may begin
# Phases between two lanes, about sqrt(2) - 1 of PHASES. With this step the multiples of both
# numbers together are spread evenly too.
PHASE_STEP = 425
MAX_BLOCK = 1024  # places of a lane with exact counts of each source
MAX_BLOCKS = 1 << 30  # blocks of a lane that fit in 64-bit numbers
MIN_BLOCKS = 16  # blocks of a lane; small data have smaller blocks
SLACK = 8  # samples by which the counts of blocks may differ from the shares
MAX_PASSES = 64  # passes over sources with an order in memory


@functools.lru_cache(maxsize=16)
def choose_blocks(
    lengths: tuple[int, ...], shares: tuple[int, ...], until_all: bool, lanes: int
) -> tuple[int, int]:
    """Return the places of a block, and the blocks of a lane. Raises ConfigError for more than
    `MAX_BLOCKS`.

    A lane has as many blocks as fit at any phase, so that all epochs have the same length.
    """
    sources = list(zip(lengths, shares, strict=True))
    places = [(length // lanes + SLACK) * UNIT // share for length, share in sources]
    block = MAX_BLOCK
    while block > 1 and min(places) < MIN_BLOCKS * block:
        block //= 2
    phases = np.arange(PHASES) * (UNIT // PHASES)

    def is_through(num_blocks: int) -> bool:
        """Return whether so many blocks end the epoch."""
        counts = count_before(shares, block, np.full(PHASES, num_blocks), phases)
        if until_all:
            return bool((counts >= -(-np.array(lengths) // lanes)).all())
        return bool((counts > np.array(lengths) // lanes).any())

    end = min(places)
    if until_all:
        end = max(places)
    limit = end // block + 2
    if limit > MAX_BLOCKS:
        raise ConfigError(
            'stop: expected "first_exhausted", or larger proportions of large sources, got an '
            f"epoch of more than {MAX_BLOCKS * block * lanes:.1g} samples until each is read"
        )
    found = bisect.bisect_left(range(limit), True, key=is_through)
    if not until_all:
        found -= 1
    return block, found


class MixedOrder(Order):
    """The order of one epoch of several sources.

    A block of a lane has a whole number of each source's samples, in an order of its own. Lanes and
    epochs begin in phases of their own, so that all lanes together have each source's share. When a
    lane has read all its samples of a source, they begin again in another order.

    Args:
        make: function that returns the order of a source by its number and a seed.
        lengths: samples of each source, at least one for each lane.
        shares: share of each source; their sum is `UNIT`.
        until_all: True to end the epoch when the last source has been read, False to end it before
            the first source begins again.
    """

    def __init__(
        self,
        make: Callable[[int, int], Order],
        lengths: Sequence[int],
        shares: Sequence[int],
        until_all: bool,
        seed: int,
        epoch: int,
        lanes: int,
    ) -> None:
        self.make = functools.lru_cache(maxsize=MAX_PASSES)(make)
        self.lengths, self.shares, self.seed, self.epoch = lengths, shares, seed, epoch
        self.lanes = lanes
        self.block, num_blocks = choose_blocks(tuple(lengths), tuple(shares), until_all, lanes)
        self.num_samples = num_blocks * self.block * lanes
        key = derive_key(ORDER_VERSION, seed, epoch, 3)
        turns = permute(np.arange(lanes), lanes, key)
        first = int(key[0] % PHASES)
        self.phases = (turns * PHASE_STEP + first) % PHASES * (UNIT // PHASES)

    def samples(self, times: Indices) -> Indices:
        """Map times in the epoch to sample numbers.

        The numbers of the second source follow the numbers of the first. Each pass over a source
        uses a new order, and its numbers are greater by the samples of all sources.
        """
        lane, place = times % self.lanes, times // self.lanes
        number = place // self.block
        key = derive_key(ORDER_VERSION, self.seed, self.epoch, 2, lane, number)
        inside = permute(place % self.block, self.block, key)
        after, ends = self._count(lane, number)
        source = (inside[:, None] >= ends).sum(axis=1)
        rows = np.arange(len(times))
        count = after[rows, source] - ends[rows, source] + inside
        found = np.empty_like(times)
        for each, length in enumerate(self.lengths):
            offset = sum(self.lengths[:each])
            own_length = (length - lane + self.lanes - 1) // self.lanes
            round_number = count // own_length
            for number_of_pass in np.unique(round_number[source == each]).tolist():
                chosen = (source == each) & (round_number == number_of_pass)
                seed = int(derive_key(self.seed, each, number_of_pass)[0])
                own = (count % own_length * self.lanes + lane)[chosen]
                numbers = self.make(each, seed).samples(own)
                found[chosen] = numbers + offset + number_of_pass * sum(self.lengths)
        return found

    def _count(self, lane: Indices, number: Indices) -> tuple[Indices, Indices]:
        """Return how many samples of each source come before the end of blocks, and where the
        sources end in the blocks, both (N, sources).
        """
        blocks, places = np.unique(number * self.lanes + lane, return_inverse=True)
        number, phases = blocks // self.lanes, self.phases[blocks % self.lanes]
        before = count_before(self.shares, self.block, number, phases)
        after = count_before(self.shares, self.block, number + 1, phases)
        return after[places], np.cumsum(after - before, axis=1)[places]


@dataclass(frozen=True, eq=False)
class Mixture:
    """Samples of several `Shards`, or rows of several `Packed`, in proportions.

    A mixture is used like its sources. In each lane, every block of 1,024 samples has an exact
    count of each source. Blocks are smaller if a source is small.

    With a schedule the proportions change at steps of the run. Each global batch has an exact count
    of each source: its share, rounded up or down in turn. A source that is read to its end begins
    again, in the order of its next epoch.

    Args:
        sources: sources by name, all of one kind. Each source has its own transform. The rows of
            `Packed` have one length.
        proportions: proportions of samples by the same names. Any numbers above 0 are possible.
        stop: "first_exhausted" ends an epoch before the first source has to begin again.
            "all_exhausted" ends it when every source has been read; the others begin again, in
            another order.
        lanes: number of lanes of each source; by default a power of 2, up to 64. With a divisor of
            the batch size each rank fetches fewer files.
        schedule: in place of `proportions`, pairs of a step and the weights from this step on. The
            first step is 0. Steps are the batches of whole epochs since epoch 0, of a recipe since
            its start. A weight may be 0. A run that goes on may change what lies ahead of it.
        num_samples: samples of an epoch with a schedule; by default as many as all sources have.
        unit: "samples", or "tokens" for proportions of the tokens that are learned. These need
            `Packed`, and follow from each source's mean number of targets in a row.

    Raises:
        ConfigError: an argument has a wrong value, or a source has too few samples.

    Example:
        sources = {"code": Shards("code"), "web": Shards("web")}
        data = Mixture(sources, {"code": 0.3, "web": 0.7})
        data.prepare()  # once, before the ranks start
        for batch, weight in session.batches(data, 32, epoch=0):
            ...  # one optimizer step
    """

    sources: Mapping[str, Shards | Packed]
    proportions: Mapping[str, float] | None = None
    stop: str = "first_exhausted"
    lanes: int | None = None
    _: KW_ONLY
    schedule: Sequence[tuple[int, Mapping[str, float]]] | None = None
    num_samples: int | None = None
    unit: str = "samples"
    UNREADABLE: ClassVar[object] = Shards.UNREADABLE
    _weights: Schedule = field(init=False, repr=False)  # shares in `unit`

    def __post_init__(self) -> None:
        for name, source in self.sources.items():
            if not isinstance(source, (Shards, Packed)):
                raise ConfigError(
                    f"sources[{name!r}]: expected Shards or Packed, got a {type(source).__name__}"
                )
            if source.lanes is not None:
                raise ConfigError(
                    f"sources[{name!r}]: lanes: expected None, because the mixture has lanes, got "
                    f"{source.lanes}"
                )
        lengths = {getattr(each, "length", None) for each in self.sources.values()}
        if len(lengths) > 1:
            raise ConfigError(
                "sources: expected Shards alone, or Packed with rows of one length, got both kinds "
                f"or several lengths: {', '.join(map(str, lengths))}"
            )
        if self.unit not in ("samples", "tokens"):
            raise ConfigError(f'unit: expected "samples" or "tokens", got {self.unit!r}')
        if self.unit == "tokens" and None in lengths:
            raise ConfigError('unit: expected "samples" for Shards, which count no tokens')
        for name in ("lanes", "num_samples"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole_number(name, value, minimum=1))
        if self.stop not in ("first_exhausted", "all_exhausted"):
            raise ConfigError(
                f'stop: expected "first_exhausted" or "all_exhausted", got {self.stop!r}'
            )
        object.__setattr__(self, "_weights", self._read_schedule())

    def _read_schedule(self) -> Schedule:
        """Return the schedule. It has one part if the proportions never change."""
        if self.schedule is None:
            if self.num_samples is not None:
                raise ConfigError(
                    f"num_samples: expected None without a schedule, got {self.num_samples}"
                )
            shares = read_shares("proportions", self.proportions, self.sources, above=0)
            return Schedule((0,), (shares,))
        for name, default in (("proportions", None), ("stop", "first_exhausted")):
            if getattr(self, name) != default:
                raise ConfigError(
                    f"{name}: expected none beside a schedule, got {getattr(self, name)!r}"
                )
        return Schedule.read(self.schedule, list(self.sources))

    def prepare(self) -> str:
        """Make the indexes that are missing, and return a description; see `Shards.prepare`."""
        return "; ".join(f"{name}: {each.prepare()}" for name, each in self.sources.items())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, sample: int) -> Any:
        shards, number = self._find(sample)
        return shards[number]

    def key(self, sample: int) -> str:
        """Return the URL of a sample's shard, and the sample's row there."""
        shards, number = self._find(sample)
        return shards.key(number)

    def _find(self, sample: int) -> tuple[Shards | Packed, int]:
        if sample < 0:
            raise IndexError(sample)
        number = sample % int(self._ends[-1])
        source = int(np.searchsorted(self._ends, number, side="right"))
        shards = self._all[source]
        return shards, number - int(self._ends[source]) + len(shards)

    def prefetch(self, samples: Sequence[int]) -> None:
        """Fetch the shards of some samples, several at once."""
        for source, numbers in self._split(samples):
            source.prefetch(numbers)

    @property
    def count_targets(self) -> Callable[[Sequence[int]], int] | None:
        """The function that returns how many targets some rows have together; None for `Shards`,
        which store no such numbers.
        """
        if all(isinstance(each, Packed) for each in self._all):
            return self._count_targets
        return None

    def _count_targets(self, rows: Sequence[int]) -> int:
        return sum(source.count_targets(numbers) for source, numbers in self._split(rows))

    def _split(self, samples: Sequence[int]) -> Iterator[tuple[Any, list[int]]]:
        """Yield each source of some samples, and the samples' numbers there."""
        numbers, places = np.asarray(samples) % self._ends[-1], self.find_sources(samples)
        for number in np.unique(places).tolist():
            source = self._all[number]
            first = int(self._ends[number]) - len(source)
            yield source, (numbers[places == number] - first).tolist()

    def find_sources(self, samples: Sequence[int]) -> Indices:
        """Return the numbers of the sources of some samples, (N,)."""
        numbers = np.asarray(samples) % self._ends[-1]
        found: Indices = np.searchsorted(self._ends, numbers, side="right")
        return found

    def list_samples(self) -> Indices:
        """Return the samples of an evaluation, one source after another, in the proportions.

        Raises:
            ConfigError: the proportions change at steps of a run.
        """
        if self.schedule is not None:
            raise ConfigError(
                "schedule: expected proportions for held-out data, and for batches without "
                "shuffling, which have no steps"
            )
        return np.sort(self._make_order(0, 0).samples(np.arange(len(self))))

    def describe_order(self, global_batch_size: int, seed: int) -> dict[str, Any]:
        """Return plain values that decide, with seed and epoch, the order of an epoch."""
        found: dict[str, Any] = {}
        for name, each in self.sources.items():
            for what, value in each.describe_shards().items():
                found[f"{name}: {what}"] = value
        if self.schedule is None:
            version: int | str = ORDER_VERSION
            found["shares"] = ", ".join(map(str, self._shares))
            found["stop"] = self.stop
        else:
            version = f"{SCHEDULE_VERSION} of a schedule"
            found["global batch size"] = global_batch_size
            found["samples of an epoch"] = len(self)
            found |= self._schedule.describe(list(self.sources))
        found["lanes"] = self._num_lanes
        found[ORDER] = version
        found["sources"] = str(list(self.sources))
        for number, name in enumerate(self.sources):
            order = self._source_order(number, seed, 0)
            found[f"{name}: window"] = order.window
            if self.schedule is not None:  # weights that lie ahead change no checksum
                found[f"{name}: checksum of the order"] = order.checksum_next(0)
        if self.schedule is None:
            found["checksum of the order"] = self._make_order(seed, 0).checksum_next(0)
        return found

    def continue_order(self, described: Mapping[str, Any]) -> Mixture:
        """Return the mixture with the shards, lanes and windows of the `described` order. An order
        with a schedule runs through all epochs, so it takes no other shards, lanes or windows.
        """
        if self.schedule is not None:
            return self
        sources = {}
        for name, each in self.sources.items():
            own = {
                what: described.get(f"{name}: {what}") for what in ("window", "number of shards")
            }
            sources[name] = each.continue_order(own)
        return dataclasses.replace(self, sources=sources, lanes=described.get("lanes"))

    def order(self, global_batch_size: int, seed: int, epoch: int, num_before: int = 0) -> Order:
        """Return the order of an epoch.

        Args:
            num_before: epochs of the run before this one.
        """
        if self.schedule is None:
            return self._make_order(seed, epoch)
        return ScheduledOrder(
            lambda number, own_epoch: self._source_order(number, seed, own_epoch),
            [len(each) for each in self._all],
            BatchCounts(self._schedule, global_batch_size, len(self)),
            seed,
            num_before,
            self._num_lanes,
        )

    def num_ahead(self, order: Order, num_ranks: int, part: float = 1.0) -> float:
        """Return how many samples ahead fit in the caches. Each source has an equal part of a
        cache.
        """
        part /= len(self._all)
        found: list[float] = []
        for number, shares in enumerate(zip(*self._schedule.shares, strict=True)):
            if any(shares):
                own_order = self._source_order(number, 0, 0)
                num_ahead = self._all[number].num_ahead(own_order, num_ranks, part)
                found.append(num_ahead * UNIT / max(shares))
        return min(found)

    def _make_order(self, seed: int, epoch: int) -> MixedOrder:
        return MixedOrder(
            lambda number, own_seed: self._source_order(number, own_seed, epoch),
            [len(each) for each in self._all],
            self._shares,
            self.stop == "all_exhausted",
            seed,
            epoch,
            self._num_lanes,
        )

    def _source_order(self, number: int, seed: int, epoch: int) -> EpochOrder:
        share = 1 / len(self._all)  # weights that lie ahead do not change the windows
        if self.schedule is None:
            share = self._shares[number] / UNIT
        return self._all[number].make_order(self._num_lanes, seed, epoch, share)

    @functools.cached_property
    def _schedule(self) -> Schedule:
        """The shares of samples."""
        if self.unit == "samples":
            return self._weights
        sizes = [len(each) / each.num_targets for each in self._all if isinstance(each, Packed)]
        found = []
        for shares in self._weights.shares:
            rows = [share * size for share, size in zip(shares, sizes, strict=True)]
            weights = dict(zip(self.sources, rows, strict=True))
            found.append(read_shares("proportions", weights, self.sources, minimum=0))
        return dataclasses.replace(self._weights, shares=tuple(found))

    @functools.cached_property
    def _all(self) -> list[Shards | Packed]:
        return list(self.sources.values())

    @functools.cached_property
    def _ends(self) -> Indices:
        return np.cumsum([len(each) for each in self._all])

    @property
    def _shares(self) -> tuple[int, ...]:
        """The shares of the sources without a schedule, in parts of `UNIT`."""
        return self._schedule.shares[0]

    @functools.cached_property
    def _num_lanes(self) -> int:
        lanes, most = self.lanes or MIN_LANES, min(each.num_shards for each in self._all)
        while not self.lanes and 2 * lanes <= min(MAX_LANES, most // SHARDS_PER_LANE):
            lanes *= 2
        return lanes

    @functools.cached_property
    def _length(self) -> int:
        if self.schedule is not None and min(map(len, self._all)):
            return self.num_samples or int(self._ends[-1])
        is_enough = min(map(len, self._all)) >= self._num_lanes and self.schedule is None
        if is_enough:
            length = self._make_order(0, 0).num_samples
            if length:
                return length
        expected = f"expected more samples for {self._num_lanes} lanes"
        got = ", ".join(f"{len(each)} of {name}" for name, each in self.sources.items())
        raise ConfigError(f"sources: {expected}, got {got}")


Stream: TypeAlias = Shards | Packed | Mixture  # data sets with an order of their own
