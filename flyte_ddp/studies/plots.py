"""Figures of a study.

Of every study: the figure that its trials are compared by, such as the held-out loss, over epochs
and by each hyperparameter. The best trials have colors, the others are faint. Of a scaling study
also: speed-up, efficiency, throughput, time to a target loss, communication.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyte_ddp.events import Reported
from flyte_ddp.observers.formats import format_count, format_figure, format_rounded, format_value
from flyte_ddp.observers.reports.drawing import (
    FAINT,
    INK,
    PALETTE,
    Line,
    Panel,
    log_scale,
    printable,
)
from flyte_ddp.studies.results import TrialRun, figures_of, rank_of
from flyte_ddp.studies.scaling import Study, by_world_size, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINES = 100  # of trials; more would become one grey area
# range of a hyperparameter from which its axis is logarithmic; just below 10, for rounded choices
DECADE = 9.99
MAX_CHOICE = 14  # characters of a value below an axis


def metric_panels(runs: Sequence[TrialRun]) -> tuple[str, str, list[Panel]]:
    """Return a heading, a description of the colors, and the panels of the monitored figure.

    They show it over epochs, of recipes also over time, and by each hyperparameter that differs.
    Without a finished epoch there are none.
    """
    ranked = sorted((run for run in runs if math.isfinite(run.score(run.kept))), key=rank_of)[
        :MAX_LINES
    ]
    if not ranked:
        return "", "", []
    metric, best = ranked[0].metric, ranked[: len(PALETTE)]
    results = [each for run in ranked for each in run.results]
    axis = "step" if any(each.epoch is None for each in results) else "epoch"
    colors = [*PALETTE, *[INK] * len(ranked)][: len(ranked)]
    figures = [figures_of(run.kept)[metric] if run.kept else math.nan for run in ranked]

    curves, timed = [], []
    for index, (run, color) in enumerate(zip(ranked, colors, strict=True)):
        is_best = index < len(best)
        look = (
            f"{run.trial.number}" if is_best else None,
            color,
            1.6 if is_best else 0.8,
            1.0 if is_best else FAINT / 3,
            f"{run.trial}",
        )
        order = 3 - index / len(ranked)
        places = [getattr(result.figures(), axis) for result in run.results]
        curves.append(Line(_points(run, metric, places), *look, order=order))
        if run.elapsed:
            timed.append(Line(_points(run, metric, run.elapsed), *look, order=order))
    heading = name_metric(ranked[0])
    ends = [
        f"{run.trial} {format_figure(metric, figure)}"
        for run, figure in zip(best, figures, strict=False)
    ]
    summary = f"{heading} over {axis}s: {', '.join(ends)}"
    panels = [
        Panel("metric-over-epochs", heading, summary, curves, axis, has_whole_x=True, log_ratio=20)
    ]
    if timed:
        title = f"{heading} over time"
        seconds = "seconds of training and evaluation"
        panels.append(Panel("metric-over-time", title, title, timed, seconds, log_ratio=20))
    for index, name in enumerate(ranked[0].trial.values):
        values = [run.trial.values[name] for run in ranked]
        if len({repr(value) for value in values}) == 1:
            continue
        values = [run.trial.shown[name] for run in ranked]
        numbers = values if all(type(value) in (int, float) for value in values) else ()
        places = numbers or [printable(format_value(value))[:MAX_CHOICE] for value in values]
        lines = [
            Line([place], None, color, 1.0, 0.8, f"{run.trial}", "", marker_size=6)
            for run, color, place in zip(
                ranked, colors, zip(places, figures, strict=True), strict=True
            )
        ]
        panels.append(
            Panel(
                f"metric-by-{index}",
                f"By {name}",
                f"By {name}: the best, {ends[0]}",
                lines,
                name,
                log_ratio=20,
                draw=functools.partial(log_scale, values=numbers, ratio=DECADE, axis="x"),
            )
        )
    trials = "; ".join(str(run.trial) for run in best)
    return heading, f"colored: the best so far, {trials}", panels


def _points(run: TrialRun, metric: str, places: Sequence[Any]) -> list[tuple[Any, float]]:
    """Return the figure called `metric` of each result that has it, with the result's place."""
    points = []
    for place, result in zip(places, run.results, strict=True):
        values = result.figures().values
        if metric in values:
            points.append((place, values[metric]))
    return points


def name_metric(run: TrialRun) -> str:
    """Return the heading of the figure that trials are compared by, such as "Test loss" of a recipe
    and "Loss" of a function.
    """
    name = run.metric.replace("_", " ")
    if run.trial.counted is Reported:
        return name[:1].upper() + name[1:]
    return f"Test {name.removeprefix('test ')}"


# --- Scaling
# --------------------------------------------------------------------------------------------------


def scaling_panels(study: Study) -> tuple[str, list[Panel]]:
    """Return a description of the lines' labels, and the panels for which there is data.

    There are none before the first trial has finished.
    """
    numbers = {values: f"{number}" for number, values in enumerate(study.series, start=1)}
    meaning = "; ".join(
        f"{number}: {study.describe(values)}" for values, number in numbers.items() if study.names
    )
    ideal = {
        row.world_size: row.world_size / rows[0].world_size
        for rows in study.series.values()
        for row in rows
    }

    def by_size(name: str, title: str, ideals: Mapping[int, float]) -> Panel:
        """Return a panel with a line per series over world sizes, and the interval of repeats."""
        lines = {
            number if study.names else "measured": [
                (size, estimate(known))
                for size, repeats in by_world_size(study.series[values]).items()
                if (
                    known := [
                        getattr(row, name) for row in repeats if getattr(row, name) is not None
                    ]
                )
            ]
            for values, number in numbers.items()
        }

        def draw(axes: Axes) -> None:
            from matplotlib.ticker import NullLocator

            for known, color in zip(lines.values(), itertools.cycle(PALETTE), strict=False):
                for size, y in known:  # a single measurement has no bar
                    if y.half_width:
                        axes.errorbar(size, y.mean, y.half_width, color=color, capsize=4)
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(ideal), [str(size) for size in ideal])
            axes.xaxis.set_minor_locator(NullLocator())
            # with two equal axes the ideal is a straight line, and small sizes stay visible
            if name == "speed_up":
                axes.set_yscale("log", base=2)
                axes.yaxis.set_major_formatter(format_rounded)

        points = ", ".join(
            f"{format_count(size, 'rank')} {y:,.4g}" for line in lines.values() for size, y in line
        )
        drawn = [
            Line([(size, y.mean) for size, y in known], label, color, marker_size=6)
            for (label, known), color in zip(lines.items(), itertools.cycle(PALETTE), strict=False)
        ]
        dotted = Line(sorted(ideals.items()), "ideal", width=1, style=(0, (1, 2)), max_markers=0)
        return Panel(
            name.replace("_", "-"),
            title,
            f"{title} by world size: {points}",
            [*drawn, dotted],
            "ranks",
            from_zero=True,
            tick=format_rounded,
            draw=draw,
        )

    panels = [
        by_size("speed_up", "Speed-up", ideal),
        by_size("efficiency", "Efficiency", dict.fromkeys(ideal, 1.0)),
        by_size("samples_per_second", "Samples per second", {}),
        by_size("seconds_to_target", f"Seconds to test loss {study.target_loss:.4g}", {}),
        by_size("wait_share", "Share of a step waiting for gradients", {}),
    ]
    return meaning, panels if study.rows else []
