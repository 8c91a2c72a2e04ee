"""Figures of a sweep: the held-out loss of its models over epochs and over time, grouped in facets.

A facet contains the models that differ in one hyperparameter only; the color shows its value. In a random search no two
models are like that: there all models share one facet, in which the best have colors and the others are faint.

From the command line: `python -m flyte_ddp.studies.sweep_plots results.csv picture.svg` (or .png, .pdf).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyte_ddp.observers.figures import FAINT, PALETTE, Panel, log_scale, save_panels, style, thinned
from flyte_ddp.studies.results import FAILED, STOPPED_EARLY, TrialRun, find_best, read_table
from flyte_ddp.studies.search import format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_FACETS = 6
NUM_COLORED = 5  # of the best models, if all models share one facet
MAX_FAINT = 100  # models beside those; more lines would become one grey area
MAX_POINTS = 60  # of one line, because there are many lines
MAX_NAMED = 4  # colors for which the legend has room for the hyperparameter's name
SEED = "seed"  # models that differ only in this are one experiment, with one color


@dataclass(frozen=True)
class Facet:
    """The models of one panel."""

    title: str
    lines: Sequence[tuple[TrialRun, str, str]]  # run, color, label in the legend; "" for none


def sweep_panels(runs: Sequence[TrialRun]) -> tuple[str, list[Panel], list[Panel]]:
    """Return a description of the colors, the panels of the loss over epochs, and those of the loss over time.

    All panels of a kind have the same axes. Without a finished epoch there are no panels.
    """
    drawn = [run for run in runs if run.epochs]
    meaning, facets = _facets(drawn)
    losses = [epoch.test_loss for run in drawn for epoch in run.epochs if math.isfinite(epoch.test_loss)]
    if not losses:
        return meaning, [], []
    best = find_best(runs)
    slowest = max(run.elapsed[-1] for run in drawn)
    unit, seconds = ("h", 3600) if slowest > 2 * 3600 else ("min", 60) if slowest > 120 else ("s", 1)
    over_epochs: list[Panel] = []
    over_time: list[Panel] = []
    for index, facet in enumerate(facets):
        ends = [f"{run.trial} {run.epochs[-1].test_loss:.4g}" for run, _, _ in facet.lines[: len(PALETTE)]]
        summary = f"{facet.title}: the last values are {', '.join(ends)}"
        by_epoch = {id(run): [float(epoch.epoch) for epoch in run.epochs] for run in drawn}
        by_time = {id(run): [elapsed / seconds for elapsed in run.elapsed] for run in drawn}
        for panels, name, xs, label in (
            (over_epochs, "epochs", by_epoch, "epoch"),
            (over_time, "time", by_time, f"time ({unit})"),
        ):
            panels.append(
                Panel(
                    f"loss-over-{name}-{index}",
                    facet.title,
                    f"Test loss over {name}, {summary}",
                    # Default arguments, because the loop's variables change before anything is drawn.
                    lambda axes, facet=facet, xs=xs, label=label: _draw(axes, facet, xs, label, losses, best),  # type: ignore[misc]
                )
            )
    return meaning, over_epochs, over_time


def _facets(runs: Sequence[TrialRun]) -> tuple[str, list[Facet]]:
    """Return a description of the colors, and the facets."""
    values: dict[str, dict[str, None]] = {}  # the distinct values of each hyperparameter, in order
    for run in runs:
        for name, value in run.trial.values.items():
            values.setdefault(name, {})[json.dumps(value)] = None
    names = [name for name, different in values.items() if len(different) > 1 and name != SEED]
    for swept_name in reversed(names):
        others = [name for name in names if name != swept_name]
        by_facet: dict[str, list[TrialRun]] = {}
        for run in runs:
            title = ", ".join(f"{name} {format_value(run.trial.values[name])}" for name in others)
            by_facet.setdefault(title, []).append(run)
        colors = {value: PALETTE[index % len(PALETTE)] for index, value in enumerate(values[swept_name])}
        if len(colors) <= len(PALETTE) and len(by_facet) <= MAX_FACETS:
            facets = [
                Facet(title or f"By {swept_name}", _colored(members, swept_name, colors))
                for title, members in by_facet.items()
            ]
            return f"colored by {swept_name}", facets
    ranked = sorted(runs, key=lambda run: (run.last_loss, run.trial.number))
    lines = [
        (run, PALETTE[place] if place < NUM_COLORED else "", f"{run.trial.number}" if place < NUM_COLORED else "")
        for place, run in enumerate(ranked[: NUM_COLORED + MAX_FAINT])
    ]
    title = "All models" if len(lines) == len(runs) else f"The best {len(lines)} of {len(runs)} models so far"
    return "the best models so far have colors and numbers", [Facet(title, lines)]


def _colored(runs: Sequence[TrialRun], name: str, colors: Mapping[str, str]) -> list[tuple[TrialRun, str, str]]:
    """Return the lines with their colors. The first label names the hyperparameter if there is room."""
    lines: list[tuple[TrialRun, str, str]] = []
    labelled: set[str] = set()
    for run in runs:
        value = json.dumps(run.trial.values[name])
        label = "" if value in labelled else format_value(run.trial.values[name])[:14]
        if not labelled and len(colors) <= MAX_NAMED:
            label = f"{name} {label}"
        lines.append((run, colors[value], label))
        labelled.add(value)
    return lines


def _draw(
    axes: Axes,
    facet: Facet,
    xs: Mapping[int, Sequence[float]],
    label: str,
    losses: Sequence[float],
    best: TrialRun | None,
) -> None:
    from matplotlib.ticker import MaxNLocator

    ink = axes.title.get_color()
    for run, color, name in facet.lines:
        points = [(x, epoch.test_loss) for x, epoch in zip(xs[id(run)], run.epochs, strict=True)]
        points = thinned(points, MAX_POINTS)
        if not points:
            continue
        axes.plot(
            *zip(*points, strict=True),
            color=color or ink,
            alpha=1 if color else FAINT / 3,
            zorder=3 if color else 2,
            linewidth=2.6 if run is best else 1.6 if color else 0.8,
            marker="o" if len(points) <= 15 else "",
            markersize=3.5 if color else 2,
            label=name or None,
        )
        if color and run.status in (FAILED, STOPPED_EARLY):
            axes.plot(*points[-1], "x", color=color, markersize=8, markeredgewidth=2)
        if run is best:
            axes.plot(*points[-1], "*", color=color, zorder=4, markersize=13, markeredgecolor=ink, markeredgewidth=0.6)
    axes.set_xlim(0, 1.04 * max(max(each) for each in xs.values()))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=label == "epoch"))
    axes.set_xlabel(label, loc="right", alpha=0.7, fontsize=9.5, labelpad=1)
    axes.set_ylabel("test loss", loc="top", alpha=0.7, fontsize=9.5, labelpad=2)
    log_scale(axes, losses)
    low, high = min(losses), max(losses)
    if axes.get_yscale() == "log":
        axes.set_ylim(low / 1.25, high * 1.25)
    else:
        axes.set_ylim(low - 0.06 * (high - low or 1), high + 0.06 * (high - low or 1))
    style(axes, facet.title)


def main() -> None:
    """Draw the figures of a sweep's results; see the module's docstring."""
    import sys

    import pandas  # type: ignore[import-untyped]

    results, picture = sys.argv[1:]
    _, over_epochs, over_time = sweep_panels(read_table(pandas.read_csv(results)))
    save_panels([*over_epochs, *over_time], picture, columns=len(over_epochs))


if __name__ == "__main__":
    main()
