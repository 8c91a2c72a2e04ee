"""Figures of a sweep: the held-out loss of its models over epochs and over time, in facets by experiment.

A facet has the models that share all hyperparameters but one, and that one is told by colour. A random search has no
two such models: there all of them share one facet, in which the best have colours and the others are faint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyte_ddp.observers.plots import FAINT, MOST_LINES, PALETTE, Panel, log_scale, save_panels, style, thinned
from flyte_ddp.sweep.results import FAILED, STOPPED_EARLY, ModelRun, best_of, runs_of
from flyte_ddp.sweep.search import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_FACETS = 6
NUM_COLOURED = 5  # of the best models, where all share one facet
MOST_FAINT = 100  # models beside them; more are one grey area
MOST_POINTS = 60  # of one line, where there are many lines
MOST_NAMED = 4  # colours beside which the legend has room for what they mean
SEED = "seed"  # models that differ in this alone are one experiment, and have one colour


@dataclass(frozen=True)
class Facet:
    """The models of one small picture."""

    title: str
    lines: Sequence[tuple[ModelRun, str, str]]  # each with its colour and its label in the legend; "" for none


def sweep_panels(runs: Sequence[ModelRun]) -> tuple[str, list[Panel], list[Panel]]:
    """What the colours mean, the panels of the loss over epochs, and those of the loss over time; none without epochs.

    All panels of a kind have the same axes.
    """
    drawn = [run for run in runs if run.epochs]
    meaning, facets = _facets(drawn)
    losses = [epoch.test_loss for run in drawn for epoch in run.epochs if math.isfinite(epoch.test_loss)]
    if not losses:
        return meaning, [], []
    best = best_of(runs)
    slowest = max(run.elapsed[-1] for run in drawn)
    unit, seconds = ("h", 3600) if slowest > 2 * 3600 else ("min", 60) if slowest > 120 else ("s", 1)
    over_epochs: list[Panel] = []
    over_time: list[Panel] = []
    for index, facet in enumerate(facets):
        ends = [f"{run.model} {run.epochs[-1].test_loss:.4g}" for run, _, _ in facet.lines[:MOST_LINES]]
        told = f"{facet.title}: the last are {', '.join(ends)}"
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
                    f"Test loss over {name}, {told}",
                    # As defaults: a loop's variables change before anything is drawn.
                    lambda axes, facet=facet, xs=xs, label=label: _draw(axes, facet, xs, label, losses, best),  # type: ignore[misc]
                )
            )
    return meaning, over_epochs, over_time


def _facets(runs: Sequence[ModelRun]) -> tuple[str, list[Facet]]:
    """What the colours mean, and the facets."""
    values: dict[str, dict[str, None]] = {}  # the different ones of each hyperparameter, in their order
    for run in runs:
        for name, value in run.model.values.items():
            values.setdefault(name, {})[json.dumps(value)] = None
    names = [name for name, different in values.items() if len(different) > 1 and name != SEED]
    for colour_name in reversed(names):
        others = [name for name in names if name != colour_name]
        by_facet: dict[str, list[ModelRun]] = {}
        for run in runs:
            title = ", ".join(f"{name} {shown(run.model.values[name])}" for name in others)
            by_facet.setdefault(title, []).append(run)
        colours = {value: PALETTE[index % len(PALETTE)] for index, value in enumerate(values[colour_name])}
        if len(colours) <= MOST_LINES and len(by_facet) <= MOST_FACETS:
            facets = [
                Facet(title or f"By {colour_name}", _coloured(members, colour_name, colours))
                for title, members in by_facet.items()
            ]
            return f"coloured by {colour_name}", facets
    ranked = sorted(runs, key=lambda run: (run.last_loss, run.model.number))
    lines = [
        (run, PALETTE[place] if place < NUM_COLOURED else "", f"{run.model.number}" if place < NUM_COLOURED else "")
        for place, run in enumerate(ranked[: NUM_COLOURED + MOST_FAINT])
    ]
    title = "All models" if len(lines) == len(runs) else f"The best {len(lines)} of {len(runs)} models so far"
    return "with the numbers of those that are best so far", [Facet(title, lines)]


def _coloured(runs: Sequence[ModelRun], name: str, colours: Mapping[str, str]) -> list[tuple[ModelRun, str, str]]:
    """The lines with their colours. The first label says which hyperparameter it is, where there is room for that."""
    lines: list[tuple[ModelRun, str, str]] = []
    labelled: set[str] = set()
    for run in runs:
        value = json.dumps(run.model.values[name])
        label = "" if value in labelled else shown(run.model.values[name])[:14]
        if not labelled and len(colours) <= MOST_NAMED:
            label = f"{name} {label}"
        lines.append((run, colours[value], label))
        labelled.add(value)
    return lines


def _draw(
    axes: Axes,
    facet: Facet,
    xs: Mapping[int, Sequence[float]],
    label: str,
    losses: Sequence[float],
    best: ModelRun | None,
) -> None:
    from matplotlib.ticker import MaxNLocator

    ink = axes.title.get_color()
    for run, colour, name in facet.lines:
        points = [(x, epoch.test_loss) for x, epoch in zip(xs[id(run)], run.epochs, strict=True)]
        points = thinned(points, MOST_POINTS)
        if not points:
            continue
        axes.plot(
            *zip(*points, strict=True),
            color=colour or ink,
            alpha=1 if colour else FAINT / 3,
            zorder=3 if colour else 2,
            linewidth=2.6 if run is best else 1.6 if colour else 0.8,
            marker="o" if len(points) <= 15 else "",
            markersize=3.5 if colour else 2,
            label=name or None,
        )
        if colour and run.status in (FAILED, STOPPED_EARLY):
            axes.plot(*points[-1], "x", color=colour, markersize=8, markeredgewidth=2)
        if run is best:
            axes.plot(*points[-1], "*", color=colour, zorder=4, markersize=13, markeredgecolor=ink, markeredgewidth=0.6)
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
    """Draw the results of a sweep: `python -m flyte_ddp.sweep.plots results.csv picture.svg` (or .png, .pdf)."""
    import sys

    import pandas  # type: ignore[import-untyped]

    results, picture = sys.argv[1:]
    _, over_epochs, over_time = sweep_panels(runs_of(pandas.read_csv(results)))
    save_panels([*over_epochs, *over_time], picture, columns=len(over_epochs))


if __name__ == "__main__":
    main()
