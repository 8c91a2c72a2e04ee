"""The random order of an epoch's samples, made for shards. Knows neither ranks nor processes.

The shards are permuted and laid end to end. This line is cut into equal lanes, and each lane is
shuffled in windows. Sample t of the epoch is at place t // lanes of lane t % lanes. So a global
batch takes the same samples from all lanes at any number of ranks, and a rank that takes some
lanes' samples needs few shards at a time. Does no I/O and imports no torch.
"""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.data.permutation import VERSION, derive_key, permute

MIN_LANES, MAX_LANES = 8, 64
SHARDS_PER_LANE = 16  # minimum; with fewer shards, lanes would share too many
MAX_OPEN_SAMPLES = 1 << 18  # samples in the open windows of all lanes
MAX_OPEN_BYTES = 8 << 30
ORDER = "version of the order"  # the version's name in the description of an order
NUM_NEXT = 8  # samples in the checksum of an order

Indices = NDArray[np.int64]


def choose_lanes(global_batch_size: int, num_shards: int) -> int:
    """Return the largest divisor of `global_batch_size` that leaves each lane `SHARDS_PER_LANE`
    shards, but at least `MIN_LANES`.
    """
    most = min(MAX_LANES, num_shards // SHARDS_PER_LANE)
    divisors = (lanes for lanes in range(most, 0, -1) if global_batch_size % lanes == 0)
    return max(MIN_LANES, next(divisors, 0))


def choose_window(lanes: int, num_samples: int, num_bytes: int) -> int:
    """Return the number of samples of a lane that are shuffled with each other."""
    fit = MAX_OPEN_BYTES * num_samples // max(1, num_bytes)
    return max(1, min(MAX_OPEN_SAMPLES, fit) // lanes)


class Order(ABC):
    """The samples of an epoch by their times. Times are whole numbers in [0, num_samples)."""

    lanes: int
    num_samples: int

    @abstractmethod
    def samples(self, times: Indices) -> Indices:
        """Return the number of the sample at each of `times`."""

    def batch(self, first: int, size: int) -> Indices:
        """Return the samples of the global batch at [first, first + size), lane by lane. The
        epoch's end cuts it.
        """
        times = np.arange(first, min(first + size, self.num_samples))
        return self.samples(times[np.argsort(times % self.lanes, kind="stable")])

    def checksum_next(self, first: int) -> int:
        """Return a checksum of the next samples from time `first` on. It shows whether the order
        has changed.
        """
        times = np.arange(first, min(first + NUM_NEXT, self.num_samples))
        return zlib.crc32(self.samples(times).astype("<i8").tobytes())


class EpochOrder(Order):
    """The order of one epoch of shards. It follows from these arguments alone.

    Args:
        sizes: (S,) samples of each shard.
        window: samples of a lane that are shuffled with each other. Its first window has fewer.
    """

    def __init__(self, sizes: Indices, seed: int, epoch: int, lanes: int, window: int) -> None:
        self.sizes, self.seed, self.epoch = sizes, seed, epoch
        self.lanes, self.window = lanes, window
        self.num_samples = int(sizes.sum())

    def samples(self, times: Indices) -> Indices:
        lane, place = times % self.lanes, times // self.lanes
        short, num_longer = divmod(self.num_samples, self.lanes)
        length = short + (lane < num_longer)
        # The lanes' first windows differ in length, so that not all windows are refilled at once.
        first = -(-self.window * (lane + 1) // self.lanes)
        number = np.where(place < first, 0, 1 + (place - first) // self.window)
        begin = np.where(number == 0, 0, first + (number - 1) * self.window)
        size = np.minimum(np.where(number == 0, first, self.window), length - begin)
        key = derive_key(VERSION, self.seed, self.epoch, 1, lane, number)
        lane_start = lane * short + np.minimum(lane, num_longer)
        on_line = lane_start + begin + permute(place - begin, size, key)
        starts, shift = self._line
        slot = np.searchsorted(starts, on_line, side="right") - 1
        return on_line + shift[slot]

    @functools.cached_property
    def _line(self) -> tuple[Indices, Indices]:
        """Return where each shard starts on the line, and how far the numbers of its samples are
        shifted.
        """
        count = len(self.sizes)
        key = derive_key(VERSION, self.seed, self.epoch, 0)
        order = permute(np.arange(count), count, key)
        starts = np.cumsum(self.sizes[order]) - self.sizes[order]
        return starts, (np.cumsum(self.sizes) - self.sizes)[order] - starts


class ShardStream(ABC):
    """A data set whose samples are read from shards, in lanes."""

    lanes: int | None  # None for a number that follows from the batch size and the index

    @property
    @abstractmethod
    def num_shards(self) -> int: ...

    @abstractmethod
    def describe_shards(self) -> dict[str, Any]:
        """Return plain values that distinguish these shards from other shards."""

    @abstractmethod
    def make_order(self, lanes: int, seed: int, epoch: int, share: float = 1.0) -> EpochOrder:
        """Return the order of an epoch in `lanes` lanes.

        Args:
            share: share of these shards in the samples and bytes of open windows.
        """

    def order(
        self, global_batch_size: int, seed: int, epoch: int, num_before: int = 0
    ) -> EpochOrder:
        """Return the order of an epoch. It does not depend on the epochs of the run before it."""
        lanes = self.lanes or choose_lanes(global_batch_size, self.num_shards)
        return self.make_order(lanes, seed, epoch)

    def describe_order(self, global_batch_size: int, seed: int) -> dict[str, Any]:
        """Return plain values that decide, with seed and epoch, the order of an epoch."""
        order = self.order(global_batch_size, seed, 0)
        return {
            **self.describe_shards(),
            "lanes": order.lanes,
            "window": order.window,
            ORDER: VERSION,
            "checksum of the order": order.checksum_next(0),
        }
