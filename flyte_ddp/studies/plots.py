"""Figures of a study.

Of every study: the figure that its trials are compared by, such as the held-out loss, over epochs
and by each hyperparameter. The best trials have colors, the others are faint. Of a scaling study
also: speed-up, efficiency, throughput, time to a target loss, communication.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyte_ddp.events import Reported
from flyte_ddp.observers.formats import (
    format_count,
    format_figure,
    format_rounded,
    format_value,
    title_of,
)
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
from flyte_ddp.studies.scaling import Estimate, Row, Study, by_world_size, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINES = 100  # lines of trials; more would become one grey area
# range of a hyperparameter from which its axis is logarithmic; just below 10, for rounded choices
DECADE = 9.99
MAX_CHOICE = 14  # characters of a value below an axis


def metric_panels(runs: Sequence[TrialRun]) -> tuple[str, str, list[Panel]]:
    """Return a heading, a description of the colors, and the panels of the monitored figure.

    They show it over epochs, of recipes also over time, and by each hyperparameter that differs.
    Without a finished epoch there are none.
    """
    ranked = sorted((run for run in runs if math.isfinite(run.score(run.kept))), key=rank_of)
    ranked = ranked[:MAX_LINES]
    if not ranked:
        return "", "", []
    metric, best = ranked[0].metric, ranked[: len(PALETTE)]
    figures = [figures_of(run.kept)[metric] if run.kept else math.nan for run in ranked]
    ends = [
        f"{run.trial} {format_figure(metric, figure)}"
        for run, figure in zip(best, figures, strict=False)
    ]
    heading = name_metric(ranked[0])
    panels = [_over_epochs(heading, ranked, ends), *_over_time(heading, ranked)]
    for index, name in enumerate(ranked[0].trial.values):
        if len({repr(run.trial.values[name]) for run in ranked}) > 1:
            panels.append(_by_value(f"metric-by-{index}", name, ranked, figures, ends[0]))
    trials = "; ".join(str(run.trial) for run in best)
    return heading, f"in color, from the best on: {trials}", panels


def _over_epochs(heading: str, ranked: Sequence[TrialRun], ends: Sequence[str]) -> Panel:
    has_epochs = all(each.epoch is not None for run in ranked for each in run.results)
    axis = "epoch" if has_epochs else "step"
    lines = []
    for index, run in enumerate(ranked):
        places = [getattr(result.figures(), axis) for result in run.results]
        lines.append(_draw_line(index, ranked, places))
    summary = f"{heading} over {axis}s: {', '.join(ends)}"
    name = "metric-over-epochs"
    figure = ranked[0].metric
    return Panel(name, heading, summary, lines, axis, "", True, log_ratio=20, figure=figure)


def _over_time(heading: str, ranked: Sequence[TrialRun]) -> Iterator[Panel]:
    lines = [
        _draw_line(index, ranked, run.elapsed) for index, run in enumerate(ranked) if run.elapsed
    ]
    title = f"{heading} over time"
    x_label = "seconds of training and evaluation"
    if lines:
        figure = ranked[0].metric
        yield Panel("metric-over-time", title, title, lines, x_label, log_ratio=20, figure=figure)


def _draw_line(index: int, ranked: Sequence[TrialRun], places: Sequence[Any]) -> Line:
    """Return the line of a trial; of the best ones in a color and with a label."""
    run, order = ranked[index], 3 - index / len(ranked)
    points = _points(run, run.metric, places)
    if index < len(PALETTE):
        label, color = f"{run.trial.number}", PALETTE[index]
        return Line(points, label, color, 1.6, 1.0, f"{run.trial}", order=order)
    return Line(points, None, INK, 0.8, FAINT / 3, f"{run.trial}", order=order)


def _by_value(
    panel: str, name: str, ranked: Sequence[TrialRun], figures: Sequence[float], best: str
) -> Panel:
    """Return the panel of the figures by the hyperparameter `name`."""
    values = [run.trial.shown[name] for run in ranked]
    numbers = values if all(type(value) in (int, float) for value in values) else ()
    places = numbers or [printable(format_value(value))[:MAX_CHOICE] for value in values]
    colors = [*PALETTE, *[INK] * len(ranked)]
    lines = [
        Line([point], None, color, 1.0, 0.8, f"{run.trial}", "", marker_size=6)
        for run, color, point in zip(
            ranked, colors, zip(places, figures, strict=True), strict=False
        )
    ]
    draw = functools.partial(log_scale, values=numbers, ratio=DECADE, axis="x")
    title = f"By {name}"
    summary, figure = f"{title}: the best, {best}", ranked[0].metric
    return Panel(panel, title, summary, lines, name, log_ratio=20, draw=draw, figure=figure)


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
    if run.trial.counted is Reported:
        return title_of(run.metric)
    return f"Test {run.metric.replace('_', ' ').removeprefix('test ')}"


# --- Scaling
# --------------------------------------------------------------------------------------------------


def scaling_panels(study: Study) -> tuple[str, list[Panel]]:
    """Return a description of the lines' labels, and the panels for which there is data.

    There are none before the first trial has finished.
    """
    if not study.rows:
        return "", []
    series = enumerate(study.series, start=1)
    meaning = [f"{number}: {study.describe(values)}" for number, values in series if study.names]
    rows = itertools.chain(*study.series.values())
    smallest = next(iter(study.series.values()))[0].world_size
    ideal = {row.world_size: row.world_size / smallest for row in rows}
    panels = [
        ("speed_up", "Speed-up", ideal),
        ("efficiency", "Efficiency", dict.fromkeys(ideal, 1.0)),
        ("samples_per_second", "Samples per second", {}),
        ("seconds_to_target", f"Seconds to test loss {study.target_loss:.4g}", {}),
        ("wait_share", "Share of a step waiting for gradients", {}),
    ]
    return "; ".join(meaning), [_by_size(study, list(ideal), *each) for each in panels]


def _by_size(
    study: Study, sizes: list[int], name: str, title: str, ideals: Mapping[int, float]
) -> Panel:
    """Return a panel with a line per series over world sizes, and the interval of repeats."""
    lines = {}
    for number, series in enumerate(study.series.values(), start=1):
        lines[f"{number}" if study.names else "measured"] = _estimates(series, name)
    colored = list(zip(lines.items(), itertools.cycle(PALETTE), strict=False))

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import NullLocator

        for (_, points), color in colored:
            for size, y in points:
                if y.half_width:  # a single measurement has no bar
                    axes.errorbar(size, y.mean, y.half_width, color=color, capsize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.xaxis.set_minor_locator(NullLocator())
        # with two equal axes the ideal is a straight line, and small sizes stay visible
        if name == "speed_up":
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(format_rounded)

    known = itertools.chain(*lines.values())
    points = ", ".join(f"{format_count(size, 'rank')} {y:,.4g}" for size, y in known)
    drawn = []
    for (label, line_points), color in colored:
        means = [(size, y.mean) for size, y in line_points]
        drawn.append(Line(means, label, color, marker_size=6))
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


def _estimates(series: Sequence[Row], name: str) -> list[tuple[int, Estimate]]:
    """Return the figure `name` at each world size that has measured it."""
    found = []
    for size, repeats in by_world_size(series).items():
        values = [getattr(row, name) for row in repeats]
        known = [value for value in values if value is not None]
        if known:
            found.append((size, estimate(known)))
    return found
