"""Confidence intervals of means of few numbers. Knows no models; imports no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# With 1, 2, ... degrees of freedom.
STUDENT_QUANTILES = (
    12.706205,
    4.302653,
    3.182446,
    2.776445,
    2.570582,
    2.446912,
    2.364624,
    2.306004,
    2.262157,
    2.228139,
    2.200985,
)
# Below this number, no interval of skewed differences keeps its promise.
MIN_DIFFERENCES = 30
# Times that the skewness counts: a few samples of a long tail show too little of it.
SKEWNESS_FACTOR = 2
# Share of the root of the number of differences. If one difference is far off and decides alone,
# the skewness is that root.
MAX_SKEWNESS_SHARE = 0.3


def student_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t distribution with so many degrees of freedom.

    Beyond the table within 0.1 %, by the first terms of an expansion: Abramowitz and
    Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    if freedom <= len(STUDENT_QUANTILES):
        return STUDENT_QUANTILES[freedom - 1]
    normal = statistics.NormalDist().inv_cdf(0.975)
    first = (normal**3 + normal) / (4 * freedom)
    second = (5 * normal**5 + 16 * normal**3 + 3 * normal) / (96 * freedom**2)
    return float(normal + first + second)


def find_bounds(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % confidence interval of the mean of paired differences: from -inf to inf where
    they are too few, and from -inf where a few low ones decide alone.

    Each end comes from Student's t, farther out where a long tail lies on its side, by the
    transformation of P. Hall, "On the removal of skewness by transformation" (1992). Student's t
    alone finds equal models different in 7 to 22 % of cases with 30 skewed differences, and a
    bootstrap finds no more than its few samples show. `python -m benchmarks.promotions` has the
    figures.
    """
    count = len(differences)
    if count < MIN_DIFFERENCES or not all(map(math.isfinite, differences)):
        return -math.inf, math.inf
    mean = statistics.fmean(differences)
    spread = math.sqrt(statistics.fmean((each - mean) ** 2 for each in differences))
    # Equal differences, but for the rounding of their sums.
    if spread <= 1e-5 * max(map(abs, differences)):
        return mean, mean
    skewness = statistics.fmean(((each - mean) / spread) ** 3 for each in differences)
    error = spread / math.sqrt(count - 1)
    high = mean + error * _count_errors(skewness, count)
    if -skewness > MAX_SKEWNESS_SHARE * math.sqrt(count):
        return -math.inf, high
    return mean - error * _count_errors(-skewness, count), high


def _count_errors(skewness: float, count: int) -> float:
    """Return the distance of the mean to an end of its interval, in standard errors. `skewness` is
    positive where the tail lies on the side of this end.
    """
    quantile = student_quantile(count - 1)
    if skewness <= 0:
        return quantile
    root = math.sqrt(count)
    tail = SKEWNESS_FACTOR * skewness
    base = 1 - tail * (quantile / root + tail / (6 * count))
    cube_root = math.copysign(abs(base) ** (1 / 3), base)
    # A faint tail may come out below the quantile by rounding.
    return max(quantile, 3 * root / tail * (1 - cube_root))
