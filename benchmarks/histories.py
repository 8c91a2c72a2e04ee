"""Measure how often `flyte-ddp compare` calls the newest of ten nights worse by chance, where less
than 1 % is promised, and how often it finds a shift of three deviations after ten nights, in the
first, second and third night: `python -m benchmarks.histories`.

The histories are simulated. A night has its own deviation, and each evaluation of its curve has one
more, the jitter. Both have the same tail. A deviation is that of both. `--limits` simulates the
limits in flyte_ddp/events/nights.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from flyte_ddp.events.nights import find_end, judge_newest

Draw = Callable[[np.random.Generator, tuple[int, ...]], "np.ndarray"]
NUM_HISTORIES = 4000
NUM_NIGHTS = 10
NUM_EVALUATIONS = 15  # evaluations of each night; the last 5 count
SHIFT = 3.0  # deviations
# share of histories beyond the limits of one, two and three nights
CHANCES = (0.0015, 0.0025, 0.0055)
LEVEL = 20.0  # deviations from zero to the mean of the figure
NUM_SIMULATED = 200_000  # histories for a limit


def contaminate(share: float, factor: float) -> Draw:
    """Return normal noise of which a `share` is `factor` times as wide."""
    deviation = (1 - share + share * factor**2) ** 0.5

    def draw(generator: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
        widths = np.where(generator.random(size) < share, factor, 1.0)
        return widths * generator.normal(size=size) / deviation

    return draw


def draw_lognormal(generator: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Return noise with a long tail of bad nights, with mean 0 and deviation 1."""
    variance = 0.25
    mean = np.exp(variance / 2)
    drawn = generator.lognormal(sigma=variance**0.5, size=size)
    return (drawn - mean) / (mean * (np.exp(variance) - 1) ** 0.5)


PROMISED: Mapping[str, Draw] = {
    "normal": lambda generator, size: generator.normal(size=size),
    "Student's t, 3 degrees": lambda generator, size: generator.standard_t(3, size=size) / 3**0.5,
    "5 % of nights 5 times as wide": contaminate(0.05, 5),
    "10 % of nights 3 times as wide": contaminate(0.1, 3),
}
TAILS: Mapping[str, Draw] = {
    **PROMISED,
    "log-normal, sigma 0.5": draw_lognormal,
    "10 % of nights 10 times as wide": contaminate(0.1, 10),
}


def draw_histories(
    tail: str, count: int, jitter: float = 0.0, num_shifted: int = 0
) -> list[list[list[float]]]:
    """Return curves of histories: history, night, evaluation. The seed follows from the arguments.

    Args:
        jitter: share of the variance that each evaluation has for itself.
        num_shifted: nights after the first ten, which are worse by `SHIFT`.
    """
    draw = TAILS[tail]
    generator = np.random.default_rng([list(TAILS).index(tail), int(10 * jitter), num_shifted])
    num_nights, num_evaluations = NUM_NIGHTS + num_shifted, NUM_EVALUATIONS if jitter else 1
    curves = LEVEL + (1 - jitter) ** 0.5 * draw(generator, (count, num_nights, 1))
    curves = curves + jitter**0.5 * draw(generator, (count, num_nights, num_evaluations))
    curves[:, NUM_NIGHTS:] += SHIFT
    return curves.tolist()  # type: ignore[no-any-return]


def is_worse(curves: Sequence[Sequence[float]]) -> bool:
    """Return whether the newest of some nights is called worse."""
    verdict = judge_newest([find_end(curve) for curve in curves])
    return verdict is not None and verdict.is_worse


def share_worse(histories: Sequence[Sequence[Sequence[float]]]) -> float:
    """Return the share of histories that are called worse in one of the nights after the first ten,
    or of histories without more nights in the tenth.
    """
    found = []
    for curves in histories:
        first = min(NUM_NIGHTS + 1, len(curves))
        found.append(any(is_worse(curves[:night]) for night in range(first, len(curves) + 1)))
    return sum(found) / len(found)


def find_limits(num_nights: int) -> tuple[float, ...]:
    """Return the limits of one, two and three newest nights, by simulation."""
    generator = np.random.default_rng(num_nights)
    limits = np.zeros(len(CHANCES))
    for draw in PROMISED.values():
        values = draw(generator, (NUM_SIMULATED, num_nights))
        for index, chance in enumerate(CHANCES):
            count = index + 1
            before, newest = values[:, :-count], values[:, -count:]
            squares = sum(each.var(axis=1) * each.shape[1] for each in (before, newest))
            error = np.sqrt(squares / (num_nights - 2) * (1 / count + 1 / (num_nights - count)))
            distances = (newest.mean(axis=1) - before.mean(axis=1)) / error
            limits[index] = max(limits[index], np.quantile(distances, 1 - chance))
    return tuple(limits.round(2).tolist())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.histories", description=__doc__)
    parser.add_argument("--limits", action="store_true", help="simulate the limits, a minute")
    if parser.parse_args().limits:
        for num_nights in (*range(6, 17), 20, 25, 30):
            print(f"    {num_nights}: {find_limits(num_nights)},")
        return 0
    print("| noise | jitter | worse by chance | found in 1 night | in 2 | in 3 |")
    print("|---|---|---|---|---|---|")
    highest = 0.0
    for tail in TAILS:
        for jitter in (0.0, 0.1):
            shares = [
                share_worse(draw_histories(tail, NUM_HISTORIES, jitter, num_shifted))
                for num_shifted in range(4)
            ]
            if tail in PROMISED:
                highest = max(highest, shares[0])
            cells = [tail, f"{jitter:.0%}", *(f"{each:.1%}" for each in shares)]
            print(f"| {' | '.join(cells)} |")
    return 1 if highest > 0.01 else 0


if __name__ == "__main__":
    raise SystemExit(main())
