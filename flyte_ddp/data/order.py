"""The order of the samples of an epoch, drawn for shards: it knows neither ranks nor processes.

The shards are permuted and laid end to end. This line is cut into equal lanes, and each lane is
shuffled in windows. Sample t of the epoch is at place t // lanes of lane t % lanes. So a global
batch takes the same samples from all lanes at any number of ranks, and a rank that takes some
lanes' samples needs few shards at a time. No I/O, no torch.
"""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.data.permutation import VERSION, derive_key, permute

MIN_LANES, MAX_LANES = 8, 64
SHARDS_PER_LANE = 16  # so that a lane's ends, in shards that it shares, are few of its bytes
MAX_OPEN_SAMPLES = 1 << 18  # in the open windows of all lanes
MAX_OPEN_BYTES = 8 << 30
ORDER = "version of the order"  # the name of this fact of a position
NUM_NEXT = 8  # keys whose checksum a position has

Indices = NDArray[np.int64]


def choose_lanes(global_batch_size: int, num_shards: int) -> int:
    """Return the largest divisor of `global_batch_size` that leaves each lane its shards; else
    `MIN_LANES`.
    """
    most = min(MAX_LANES, num_shards // SHARDS_PER_LANE)
    divisors = (lanes for lanes in range(most, 0, -1) if global_batch_size % lanes == 0)
    return max(MIN_LANES, next(divisors, 0))


def choose_window(lanes: int, num_samples: int, num_bytes: int) -> int:
    """Return the samples of a lane that are shuffled with each other."""
    fit = MAX_OPEN_BYTES * num_samples // max(1, num_bytes)
    return max(1, min(MAX_OPEN_SAMPLES, fit) // lanes)


class Order(ABC):
    """The samples of an epoch by their times, which are whole numbers in [0, num_samples)."""

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
        """Return a checksum of the next samples from time `first` on: an order that has changed has
        another.
        """
        times = np.arange(first, min(first + NUM_NEXT, self.num_samples))
        return zlib.crc32(self.samples(times).astype("<i8").tobytes())


class EpochOrder(Order):
    """The order of one epoch of shards. It follows from these arguments alone.

    Args:
        sizes: (S,) samples of each shard.
        window: samples of a lane that are shuffled with each other; its first window has fewer.
    """

    def __init__(self, sizes: Indices, seed: int, epoch: int, lanes: int, window: int) -> None:
        self.sizes, self.seed, self.epoch = sizes, seed, epoch
        self.lanes, self.window = lanes, window
        self.num_samples = int(sizes.sum())

    def samples(self, times: Indices) -> Indices:
        lane, place = times % self.lanes, times // self.lanes
        short, num_longer = divmod(self.num_samples, self.lanes)
        length = short + (lane < num_longer)
        # As long as this the lanes' windows would all be refilled at once.
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
        """Return where each of the shards starts that lie end to end, and how much further the
        numbers of its samples are.
        """
        count = len(self.sizes)
        key = derive_key(VERSION, self.seed, self.epoch, 0)
        order = permute(np.arange(count), count, key)
        starts = np.cumsum(self.sizes[order]) - self.sizes[order]
        return starts, (np.cumsum(self.sizes) - self.sizes)[order] - starts
