"""Decide whether the newest nights of a schedule are worse than the noise of the nights before.
Knows no models; imports no torch.

A few nights do not show how heavy the tail of their noise is. So the limits hold for the worst of
several tails, among them Student's t with 3 degrees of freedom. Bad nights in a row are rarely
chance even with a heavy tail, so the limits of two and three nights are lower.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MIN_NIGHTS, MAX_NIGHTS = 6, 30
NIGHTS = "nights"  # directory beside a champion with a run card for each of the newest nights
# share of a curve, at its end, whose median is the figure of a night
END_SHARE = 1 / 3
# least deviation, as a share of the figure: equal results differ by rounding
ROUNDING = 1e-5
# By the least number of nights: the limits of the newest night, and of the two and three newest
# nights together, in standard errors. `python -m benchmarks.histories --limits` finds them: with
# the worst of the promised tails chance exceeds them in 0.15, 0.25 and 0.55 % of histories.
LIMITS = {
    6: (11.9, 5.5, 4.5),
    7: (10.5, 4.8, 3.95),
    8: (9.9, 4.45, 3.65),
    9: (9.8, 4.15, 3.5),
    10: (9.4, 4.1, 3.3),
    11: (9.4, 3.9, 3.15),
    13: (9.0, 3.85, 3.1),
    14: (8.9, 3.9, 3.05),
    20: (8.4, 4.2, 3.2),
}


@dataclass(frozen=True)
class Verdict:
    """The comparison of the newest nights with the nights before."""

    num_newest: int  # number of newest nights that are farthest from the others, 1 to 3
    num_before: int
    distance: float  # positive if they are worse, in standard errors of the difference
    limit: float

    @property
    def is_worse(self) -> bool:
        return self.distance > self.limit


def find_end(values: Sequence[float]) -> float:
    """Return the figure of a night: the median at the end of its curve, without the jitter of a
    single evaluation. NaN without values, or if one of these is not finite.
    """
    end = values[-math.ceil(END_SHARE * len(values)) :]
    if not end or not all(map(math.isfinite, end)):
        return math.nan
    return statistics.median(end)


def judge_newest(scores: Sequence[float]) -> Verdict | None:
    """Compare the newest night, and the two and three newest nights, with the nights before.

    Args:
        scores: a figure of each night, the oldest first; less is better. A night whose figure is
            not finite is left out, but as the newest night it is worse.

    Returns:
        None if there are fewer than `MIN_NIGHTS`.

    Example:
        verdict = judge_newest([0.41, 0.40, 0.42, 0.41, 0.43, 0.41, 0.40, 0.58])
        print(verdict.is_worse)
    """
    known = [each for each in scores[-MAX_NIGHTS:] if math.isfinite(each)]
    if len(known) < MIN_NIGHTS:
        return None
    limits = LIMITS[max(count for count in LIMITS if count <= len(known))]
    if not math.isfinite(scores[-1]):
        return Verdict(1, len(known), math.inf, limits[0])
    spread = _spread(known)
    verdicts = [
        Verdict(count, len(known) - count, _find_distance(spread, count), limit)
        for count, limit in enumerate(limits, start=1)
    ]
    return max(verdicts, key=lambda each: each.distance / each.limit)


def _spread(scores: Sequence[float]) -> Sequence[float]:
    """Return the scores on a scale on which their noise is rather symmetric, and relative: the
    logarithm of losses, and of the errors of shares such as accuracies, whose scores are negative.
    """
    if min(scores) > 0:
        return [math.log(each) for each in scores]
    if min(scores) > -1 and max(scores) < 0:
        return [math.log(1 + each) for each in scores]
    largest = max(map(abs, scores)) or 1.0
    return [each / largest for each in scores]


def _find_distance(values: Sequence[float], count: int) -> float:
    """Return Student's t of the newest `count` values and the values before."""
    before, newest = values[:-count], values[-count:]
    difference = statistics.fmean(newest) - statistics.fmean(before)
    squares = _sum_squares(before) + _sum_squares(newest)
    deviation = max(ROUNDING, math.sqrt(squares / (len(values) - 2)))
    return difference / (deviation * math.sqrt(1 / len(newest) + 1 / len(before)))


def _sum_squares(values: Sequence[float]) -> float:
    """Return the sum of the squared distances to the mean."""
    mean = statistics.fmean(values)
    return math.fsum((each - mean) ** 2 for each in values)
