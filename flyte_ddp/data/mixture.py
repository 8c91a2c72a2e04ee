"""`Mixture`: samples of several sources of shards in fixed proportions. The order does not depend
on the number of ranks. Imports no torch.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config.fields import finite_number, whole_number
from flyte_ddp.data.order import (
    MAX_LANES,
    MIN_LANES,
    ORDER,
    SHARDS_PER_LANE,
    EpochOrder,
    Indices,
    Order,
)
from flyte_ddp.data.permutation import derive_key, permute
from flyte_ddp.data.shards import Shards
from flyte_ddp.errors import ConfigError

# Checkpoints depend on the result of `MixedOrder.samples`. A change of the result, or of
# `permutation.VERSION`, needs a new version.
ORDER_VERSION = 2
UNIT = 1 << 32  # sum of the sources' shares
MIN_SHARE = 1e-6  # smallest share; a smaller share would be rounded by more than 0.02 %
GOLDEN = 0x9E3779B9  # UNIT over the golden ratio; its multiples modulo UNIT are spread evenly
PHASES = 1024  # number of phases in which a lane may begin
# Phases between two lanes, about sqrt(2) - 1 of PHASES. With this step the multiples of both
# numbers together are spread evenly too.
PHASE_STEP = 425
MAX_BLOCK = 1024  # places of a lane with exact counts of each source
MAX_BLOCKS = 1 << 30  # blocks of a lane that fit in 64-bit numbers
MIN_BLOCKS = 16  # blocks of a lane; small data have smaller blocks
SLACK = 8  # samples by which the counts of blocks may differ from the shares
MAX_PASSES = 64  # passes over sources with an order in memory


def sum_floors(counts: Indices, starts: Indices) -> Indices:
    """Return the sums of `(GOLDEN * number + start) // UNIT` over the numbers in [0, count).

    Both arrays broadcast. Each step exchanges the axes of the points below the line, as in Euclid's
    algorithm.
    """
    left, start = np.broadcast_arrays(counts, starts)
    slope, unit = GOLDEN, UNIT
    found = np.zeros(left.shape, np.int64)
    while left.any():
        found += left * (left - 1) // 2 * (slope // unit) + left * (start // unit)
        slope, start = slope % unit, start % unit
        top = slope * left + start
        left, start = top // unit, top % unit
        slope, unit = unit, slope
    return found


def count_before(shares: Sequence[int], block: int, numbers: Indices, phases: Indices) -> Indices:
    """Return how many samples of each source come before blocks of lanes, (N, sources).

    A block has the whole part of each source's share. The fractions of the shares take turns.

    Args:
        numbers: (N,) numbers of blocks in their lanes.
        phases: (N,) phases of these lanes, in parts of `UNIT`.
    """
    exact = np.array(shares, np.int64) * block
    ends = np.concatenate([[0], np.cumsum(exact % UNIT)])
    in_turn = -np.diff(sum_floors(numbers[:, None], phases[:, None] - ends), axis=1)
    return numbers[:, None] * (exact // UNIT) + in_turn


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
    """Samples of several `Shards` in fixed proportions.

    A mixture is used like `Shards`. In each lane, every block of 1,024 samples has an exact count
    of each source. Blocks are smaller if a source is small.

    Args:
        sources: sources by name. Each source has its own transform.
        proportions: proportions of samples by the same names. Any numbers above 0 are possible.
        stop: "first_exhausted" ends an epoch before the first source has to begin again.
            "all_exhausted" ends it when every source has been read; the others begin again, in
            another order.
        lanes: number of lanes of each source; by default a power of 2, up to 64. With a divisor of
            the batch size each rank fetches fewer files.

    Raises:
        ConfigError: an argument has a wrong value, or a source has too few samples.

    Example:
        sources = {"code": Shards("code"), "web": Shards("web")}
        data = Mixture(sources, {"code": 0.3, "web": 0.7})
        data.prepare()  # once, before the ranks start
        for batch, weight in session.batches(data, 32, epoch=0):
            ...  # one optimizer step
    """

    sources: Mapping[str, Shards]
    proportions: Mapping[str, float]
    stop: str = "first_exhausted"
    lanes: int | None = None
    UNREADABLE: ClassVar[object] = Shards.UNREADABLE

    def __post_init__(self) -> None:
        if not self.sources or self.sources.keys() != self.proportions.keys():
            raise ConfigError(
                f"proportions: expected one for each of {', '.join(self.sources) or 'no sources'}, "
                f"got {', '.join(map(str, self.proportions))}"
            )
        for name, source in self.sources.items():
            if not isinstance(source, Shards):
                raise ConfigError(
                    f"sources[{name!r}]: expected Shards, got a {type(source).__name__}"
                )
        if self.lanes is not None:
            lanes = whole_number("lanes", self.lanes, minimum=1)
            object.__setattr__(self, "lanes", lanes)
        for name, value in self.proportions.items():
            finite_number(f"proportions[{name!r}]", value, above=0)
        for name, part in zip(self.sources, self._parts.tolist(), strict=True):
            if part < MIN_SHARE:
                raise ConfigError(
                    f"proportions[{name!r}]: expected at least {MIN_SHARE:g} of their sum, got "
                    f"{part:.3g}: leave this source out"
                )
        if self.stop not in ("first_exhausted", "all_exhausted"):
            raise ConfigError(
                f'stop: expected "first_exhausted" or "all_exhausted", got {self.stop!r}'
            )

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

    def _find(self, sample: int) -> tuple[Shards, int]:
        if sample < 0:
            raise IndexError(sample)
        number = sample % int(self._ends[-1])
        source = int(np.searchsorted(self._ends, number, side="right"))
        shards = self._all[source]
        return shards, number - int(self._ends[source]) + len(shards)

    def prefetch(self, samples: Sequence[int]) -> None:
        """Fetch the shards of some samples, several at once."""
        numbers = np.asarray(samples) % self._ends[-1]
        places = np.searchsorted(self._ends, numbers, side="right")
        for source in np.unique(places).tolist():
            shards = self._all[source]
            first = int(self._ends[source]) - len(shards)
            shards.prefetch((numbers[places == source] - first).tolist())

    def list_samples(self) -> Indices:
        """Return the samples of an evaluation, one source after another, in the proportions."""
        return np.sort(self._make_order(0, 0).samples(np.arange(len(self))))

    def describe_order(self, global_batch_size: int, seed: int) -> dict[str, Any]:
        """Return plain values that decide, with seed and epoch, the order of an epoch."""
        found: dict[str, Any] = {}
        for name, each in self.sources.items():
            for what, value in each.describe_shards().items():
                found[f"{name}: {what}"] = value
        order = self._make_order(seed, 0)
        found["shares"] = ", ".join(map(str, self._shares))
        found["stop"] = self.stop
        found["lanes"] = order.lanes
        found[ORDER] = ORDER_VERSION
        found["sources"] = str(list(self.sources))
        for number, name in enumerate(self.sources):
            found[f"{name}: window"] = self._source_order(number, seed, 0).window
        found["checksum of the order"] = order.checksum_next(0)
        return found

    def continue_order(self, described: Mapping[str, Any]) -> Mixture:
        """Return the mixture with the shards, lanes and windows of the `described` order."""
        sources = {}
        for name, each in self.sources.items():
            own = {
                what: described.get(f"{name}: {what}") for what in ("window", "number of shards")
            }
            sources[name] = each.continue_order(own)
        return dataclasses.replace(self, sources=sources, lanes=described.get("lanes"))

    def order(self, global_batch_size: int, seed: int, epoch: int) -> Order:
        """Return the order of an epoch."""
        return self._make_order(seed, epoch)

    def num_ahead(self, order: Order, num_ranks: int, part: float = 1.0) -> float:
        """Return how many samples ahead fit in the caches. Each source has an equal part of a
        cache.
        """
        part /= len(self._all)
        found = []
        for number, (each, share) in enumerate(zip(self._all, self._shares, strict=True)):
            own_order = self._source_order(number, 0, 0)
            found.append(each.num_ahead(own_order, num_ranks, part) * UNIT / share)
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
        share = self._shares[number] / UNIT
        return self._all[number].make_order(self._num_lanes, seed, epoch, share)

    @functools.cached_property
    def _all(self) -> list[Shards]:
        return list(self.sources.values())

    @functools.cached_property
    def _ends(self) -> Indices:
        return np.cumsum([len(each) for each in self._all])

    @functools.cached_property
    def _shares(self) -> list[int]:
        """The proportions in parts of `UNIT`."""
        ends = np.rint(np.cumsum(self._parts) * UNIT).astype(np.int64)
        found: list[int] = np.diff(ends, prepend=0).tolist()
        return found

    @functools.cached_property
    def _parts(self) -> NDArray[np.float64]:
        """The proportions in parts of their sum."""
        wanted = np.array([self.proportions[name] for name in self.sources], np.float64)
        wanted /= wanted.max()  # the sum of very large numbers would be infinite
        parts: NDArray[np.float64] = wanted / wanted.sum()
        return parts

    @functools.cached_property
    def _num_lanes(self) -> int:
        lanes, most = self.lanes or MIN_LANES, min(each.num_shards for each in self._all)
        while not self.lanes and 2 * lanes <= min(MAX_LANES, most // SHARDS_PER_LANE):
            lanes *= 2
        return lanes

    @functools.cached_property
    def _length(self) -> int:
        is_enough = min(map(len, self._all)) >= self._num_lanes
        if is_enough:
            length = self._make_order(0, 0).num_samples
            if length:
                return length
        expected = f"expected more samples for {self._num_lanes} lanes"
        got = ", ".join(f"{len(each)} of {name}" for name, each in self.sources.items())
        raise ConfigError(f"sources: {expected}, got {got}")


Stream: TypeAlias = Shards | Mixture  # data sets with an order of their own
