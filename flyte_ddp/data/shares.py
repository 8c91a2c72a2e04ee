"""Shares of sources: read from the weights that a user gives, and counted out exactly. Does no I/O
and imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from flyte_ddp.config.fields import finite_number
from flyte_ddp.data.order import Indices
from flyte_ddp.errors import ConfigError

UNIT = 1 << 32  # sum of the sources' shares
MIN_SHARE = 1e-6  # smallest share; a smaller share would be rounded by more than 0.02 %
GOLDEN = 0x9E3779B9  # UNIT over the golden ratio; its multiples modulo UNIT are spread evenly


def read_shares(place: str, weights: Any, names: Iterable[str], **limits: float) -> tuple[int, ...]:
    """Return weights by the names of sources in parts of `UNIT`, in the order of `names`.

    Args:
        place: the beginning of an error.
        limits: limits of a weight, see `finite_number`.

    Raises:
        ConfigError: a weight is missing, wrong or too small, or is of no source.
    """
    names = list(names)
    if not names or not isinstance(weights, Mapping) or weights.keys() != set(names):
        given = weights
        if isinstance(weights, Mapping):
            given = ", ".join(map(str, weights))
        raise ConfigError(
            f"{place}: expected one for each of {', '.join(names) or 'no sources'}, got {given}"
        )
    found = [finite_number(f"{place}[{name!r}]", weights[name], **limits) for name in names]
    if not any(found):
        raise ConfigError(f"{place}: expected a number above 0, got 0 for each source")
    parts = np.array(found, np.float64)
    parts /= parts.max()  # the sum of very large numbers would be infinite
    parts /= parts.sum()
    for name, part in zip(names, parts.tolist(), strict=True):
        if weights[name] and part < MIN_SHARE:
            raise ConfigError(
                f"{place}[{name!r}]: expected at least {MIN_SHARE:g} of their sum, got "
                f"{part:.3g}: leave this source out"
            )
    ends = np.rint(np.cumsum(parts) * UNIT).astype(np.int64)
    return tuple(np.diff(ends, prepend=0).tolist())


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
