"""Measure how often chance promotes a model that is as good as the champion, where 2.5 % of times
are promised: `python -m benchmarks.promotions`.

The comparisons are simulated: differences of the held-out samples' losses with a true mean of 0. A
long tail lies on the side where the challenger is worse, because few samples then show too little
of it. The last column is the power: the share of models that are promoted though they are better by
three standard errors. Student's t and the percentile bootstrap are there to compare with.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import numpy as np

from flyte_ddp.events.intervals import find_bounds, student_quantile

Draw = Callable[[np.random.Generator, tuple[int, int]], "np.ndarray"]
NUM_COMPARISONS = 2000
SIZES = (6, 20, 30, 100, 300)
NUM_DRAWS = 1000  # draws of the bootstrap


def draw_accuracies(draw: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Return differences of accuracy: one model in ten samples is right where the other is not."""
    return (draw.random(size) < 0.1) * draw.choice([-1.0, 1.0], size=size)


SHAPES: Mapping[str, Draw] = {
    "normal": lambda draw, size: draw.normal(size=size),
    "skewed": lambda draw, size: 1 - draw.exponential(size=size),
    "accuracy": draw_accuracies,
    "long-tailed": lambda draw, size: np.exp(1.5**2 / 2) - draw.lognormal(sigma=1.5, size=size),
}


def share_promoted(
    shape: str, size: int, shift: float = 0.0, count: int = NUM_COMPARISONS
) -> float:
    """Return the share of comparisons that promote.

    Args:
        shift: advantage of the challenger, in standard errors of its mean.
    """
    samples = draw_samples(shape, size, count)
    samples += shift * samples.std() / size**0.5
    return float(np.mean([find_bounds(row)[0] > 0 for row in samples.tolist()]))


def draw_samples(shape: str, size: int, count: int) -> np.ndarray:
    seed = [list(SHAPES).index(shape), size]
    return SHAPES[shape](np.random.default_rng(seed), (count, size))


def share_by_student(samples: np.ndarray) -> float:
    size = samples.shape[1]
    errors = samples.std(axis=1, ddof=1) / size**0.5
    return float(np.mean(samples.mean(axis=1) > student_quantile(size - 1) * errors))


def share_by_bootstrap(samples: np.ndarray) -> float:
    """Return the share of promotions by a percentile bootstrap, of a fifth of the comparisons."""
    draw, size = np.random.default_rng(0), samples.shape[1]
    chosen = draw.integers(size, size=(NUM_DRAWS, size))
    lows = [np.quantile(row[chosen].mean(axis=1), 0.025) for row in samples[::5]]
    return float(np.mean(np.array(lows) > 0))


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m benchmarks.promotions", description=__doc__
    ).parse_args()
    print("| differences | samples | promoted by chance | Student's t | bootstrap | power |")
    print("|---|---|---|---|---|---|")
    highest = 0.0
    for shape in SHAPES:
        for size in SIZES:
            samples = draw_samples(shape, size, NUM_COMPARISONS)
            shares = [
                share_promoted(shape, size),
                share_by_student(samples),
                share_by_bootstrap(samples),
                share_promoted(shape, size, shift=3),
            ]
            highest = max(highest, shares[0])
            print(f"| {shape} | {size} | " + " | ".join(f"{each:.1%}" for each in shares) + " |")
    return 1 if highest > 0.035 else 0


if __name__ == "__main__":
    raise SystemExit(main())
