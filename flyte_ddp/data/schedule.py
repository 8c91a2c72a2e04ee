"""The order of a mixture whose proportions change at steps of the run. Knows neither ranks nor
processes, does no I/O and imports no torch.

The order runs through all epochs. A block is a global batch, so that each change is between two
blocks. Each block takes the next samples of each source. So a source is read as it would be alone:
epoch by epoch, in its own order, with the same lanes, window and seed.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flyte_ddp.config.fields import whole_number
from flyte_ddp.data.order import Indices, Order
from flyte_ddp.data.permutation import derive_key, permute
from flyte_ddp.data.shares import UNIT, count_before, read_shares
from flyte_ddp.errors import ConfigError

# Checkpoints depend on the result of `ScheduledOrder.samples`. A change of the result, or of
# `permutation.VERSION`, needs a new version.
VERSION = 1
MAX_STEP = 1 << 30  # largest step of a change; counts up to it fit in 64-bit numbers
MAX_EPOCHS = 64  # epochs of sources with an order in memory
WEIGHTS = "weights from step "  # the beginning of a fact's name
KEY_BITS = 32  # bits of a lane's number that are reversed


@dataclass(frozen=True)
class Schedule:
    """The shares of sources in the steps of a run."""

    steps: tuple[int, ...]  # the first step of each part, from 0
    shares: tuple[tuple[int, ...], ...]  # the sources' shares in each part

    @classmethod
    def read(cls, given: Any, names: Sequence[str]) -> Schedule:
        """Return the schedule that a user gives. Raises ConfigError if it is none."""
        if not isinstance(given, Sequence) or not given:
            raise ConfigError(
                "schedule: expected pairs of a step and the sources' weights from there on, got "
                f"{given!r}"
            )
        steps: list[int] = []
        shares = []
        for number, entry in enumerate(given):
            place = f"schedule[{number}]"
            if not isinstance(entry, Sequence) or len(entry) != 2:
                raise ConfigError(f"{place}: expected a step and its weights, got {entry!r}")
            step = whole_number(f"{place}: step", entry[0], maximum=MAX_STEP)
            if number == 0 and step:
                raise ConfigError(f"{place}: step: expected 0, got {step}")
            if steps and step <= steps[-1]:
                raise ConfigError(f"{place}: step: expected one after {steps[-1]}, got {step}")
            steps.append(step)
            shares.append(read_shares(f"{place}: weights", entry[1], names, minimum=0))
        return cls(tuple(steps), tuple(shares))

    def describe(self, names: Sequence[str]) -> dict[str, str]:
        """Return the facts of the schedule, one for each part."""
        found = {}
        for step, shares in zip(self.steps, self.shares, strict=True):
            # Ten digits distinguish all shares.
            weights = (
                f"{name} {share / UNIT:.10g}" for name, share in zip(names, shares, strict=True)
            )
            found[f"{WEIGHTS}{step}"] = ", ".join(weights)
        return found


def find_step(fact: str) -> int | None:
    """Return the first step of the weights that a fact with this name describes; None for another
    fact.
    """
    found = re.search(rf"{WEIGHTS}(\d+)$", fact)
    if found is None:
        return None
    return int(found[1])


def drop_ahead(facts: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """Return facts without the weights that none of the first `num_steps` steps has used."""
    found = {}
    for name, value in facts.items():
        step = find_step(name)
        if step is None or step < num_steps:
            found[name] = value
    return found


@dataclass(frozen=True)
class BatchCounts:
    """How many samples of each source the global batches of a run have."""

    schedule: Schedule
    batch_size: int
    num_samples: int  # samples of an epoch, whose last batch may be smaller

    @property
    def num_batches(self) -> int:
        """The number of batches in an epoch."""
        return -(-self.num_samples // self.batch_size)

    def count_before(self, steps: Indices) -> Indices:
        """Return how many samples of each source come before steps of the run, (N, sources)."""
        firsts = np.array(self.schedule.steps, np.int64)
        parts = np.searchsorted(firsts, steps, side="right") - 1
        found = self._starts[parts]
        for part in np.unique(parts).tolist():
            found[parts == part] += self._count_part(part, steps[parts == part])
        return found

    @functools.cached_property
    def _starts(self) -> Indices:
        """How many samples of each source come before each part, (parts, sources)."""
        ends = self.schedule.steps[1:]
        counts = [self._count_part(part, np.array([end])) for part, end in enumerate(ends)]
        return np.cumsum([np.zeros_like(self.schedule.shares[:1]), *counts], axis=0)[:, 0]

    def _count_part(self, part: int, steps: Indices) -> Indices:
        """Return how many samples of each source a part has before steps, (N, sources)."""
        first, shares = self.schedule.steps[part], self.schedule.shares[part]
        rest, no_phase = self.num_samples % self.batch_size, np.zeros_like(steps)
        num_small = no_phase  # the epochs' last batches, where they are smaller
        if rest:
            num_small = steps // self.num_batches - first // self.num_batches
        num_full = steps - first - num_small
        full = count_before(shares, self.batch_size, num_full, no_phase)
        return full + count_before(shares, rest, num_small, no_phase)


class ScheduledOrder(Order):
    """The order of one epoch of several sources with a schedule.

    Args:
        make: function that returns the order of a source by its number and epoch.
        lengths: samples of each source.
        epoch: number of the epoch in the run, from 0.
    """

    def __init__(
        self,
        make: Callable[[int, int], Order],
        lengths: Sequence[int],
        counts: BatchCounts,
        seed: int,
        epoch: int,
        lanes: int,
    ) -> None:
        self.make = functools.lru_cache(maxsize=MAX_EPOCHS)(make)
        self.lengths, self.counts, self.seed = np.array(lengths, np.int64), counts, seed
        self.first_step = epoch * counts.num_batches
        self.lanes, self.num_samples = lanes, counts.num_samples
        # Any samples of a source in a row have nearly equal numbers in each half of the lanes, in
        # each quarter, and so on, if the bits of the lanes' numbers are reversed.
        keys = [int(f"{lane:0{KEY_BITS}b}"[::-1], 2) for lane in range(lanes)]
        self.lane_keys = np.array(keys)

    def samples(self, times: Indices) -> Indices:
        """Map times in the epoch to sample numbers. They are as those of a `MixedOrder`."""
        return self._number(*self._locate(times))

    def batch(self, first: int, size: int) -> Indices:
        """See `Order.batch`. The lanes are those of the sources."""
        source, count = self._locate(np.arange(first, min(first + size, self.num_samples)))
        lane = count % self.lengths[source] % self.lanes
        places = np.argsort(self.lane_keys[lane], kind="stable")
        return self._number(source[places], count[places])

    def _locate(self, times: Indices) -> tuple[Indices, Indices]:
        """Return the source of the sample at each time, and how many samples of this source the run
        has before it.
        """
        size = self.counts.batch_size
        step, place = self.first_step + times // size, times % size
        steps, rows = np.unique(step, return_inverse=True)
        before = self.counts.count_before(steps)
        ends = np.cumsum(self.counts.count_before(steps + 1) - before, axis=1)[rows]
        inside = permute(place, ends[:, -1], derive_key(VERSION, self.seed, 4, step))
        source = (inside[:, None] >= ends).sum(axis=1)
        starts = np.concatenate([np.zeros_like(ends[:, :1]), ends], axis=1)
        each = np.arange(len(times))
        return source, before[rows, source] + inside - starts[each, source]

    def _number(self, source: Indices, count: Indices) -> Indices:
        total, found = int(self.lengths.sum()), np.empty_like(count)
        epoch = count // self.lengths[source]
        for own in np.unique(source).tolist():
            length, offset = int(self.lengths[own]), int(self.lengths[:own].sum())
            for number in np.unique(epoch[source == own]).tolist():
                chosen = (source == own) & (epoch == number)
                numbers = self.make(own, number).samples(count[chosen] % length)
                found[chosen] = numbers + offset + number * total
        return found
