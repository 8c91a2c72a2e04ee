"""A keyed permutation of whole numbers. Each number is moved by itself, without a list of all.

The permutation is a Feistel network over pairs (row, column). Its range is barely larger than the
range of the numbers. The few numbers that leave their range are moved again. Checkpoints depend on
the result, so a change of the result needs a new `VERSION`. Does no I/O and imports no torch.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

VERSION = 1
ROUNDS = 8  # rounds of the network; four are enough to look like a random permutation
STEP = np.uint64(0x9E3779B97F4A7C15)  # constant of SplitMix64, like the numbers in `_scramble`
MASK = (1 << 64) - 1

Numbers: TypeAlias = "NDArray[np.integer]"  # arrays that broadcast with each other


def derive_key(*numbers: int | Numbers) -> NDArray[np.uint64]:
    """Return a key, or an array of keys, that depends on every one of `numbers` and on their
    order.
    """
    key = np.zeros(1, np.uint64)
    for number in numbers:
        if isinstance(number, int):
            number = np.array([number & MASK])
        added = np.array(number).astype(np.uint64)
        key = _scramble(key * np.uint64(3) + added + STEP)
    return key


def permute(places: Numbers, size: int | Numbers, key: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the results of the permutation of [0, size) with this key at `places`. Arrays
    broadcast.
    """
    moved, sizes, keys = (
        np.array(each)
        for each in np.broadcast_arrays(
            np.asarray(places, np.uint64), np.asarray(size, np.uint64), key
        )
    )
    rows = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    columns = (sizes + rows - np.uint64(1)) // np.maximum(rows, np.uint64(1))
    left = np.arange(len(moved))
    while len(left):
        moved[left] = _move(moved[left], rows[left], columns[left], keys[left])
        left = left[moved[left] >= sizes[left]]
    return moved.astype(np.int64)


def _move(
    places: NDArray[np.uint64],
    rows: NDArray[np.uint64],
    columns: NDArray[np.uint64],
    keys: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    row, column = np.divmod(places, columns)
    for number in range(ROUNDS):
        keys = keys + STEP
        if number % 2:
            column = (column + _scramble(keys ^ row) % columns) % columns
        else:
            row = (row + _scramble(keys ^ column) % rows) % rows
    return row * columns + column


def _scramble(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a hash of each number: the last steps of SplitMix64 (Steele et al., 2014)."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    scrambled: NDArray[np.uint64] = numbers ^ (numbers >> np.uint64(31))
    return scrambled
