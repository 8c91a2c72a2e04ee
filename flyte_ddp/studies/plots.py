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
    MAX_MARKERS,
    PALETTE,
    Panel,
    label_x,
    log_scale,
    plot,
    printable,
)
from flyte_ddp.studies.results import TrialRun, figures_of, rank_of
from flyte_ddp.studies.scaling import Study, by_world_size, estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_LINES = 100  # of trials; more would become one grey area
MAX_CHOICE = 14  # characters of a value below an axis


def metric_panels(runs: Sequence[TrialRun]) -> tuple[str, str, list[Panel]]:
    """Return a heading, a description of the colors, and the panels of the monitored figure.

    They show it over epochs, and by each hyperparameter that differs. Without a finished epoch
    there are none.
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

    def draw_epochs(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        drawn: list[tuple[float, float]] = []
        for index, run in enumerate(ranked):
            points = [
                (getattr(each, axis), each.values[metric])
                for each in (result.figures() for result in run.results)
                if metric in each.values
            ]
            look: dict[str, Any] = {"linewidth": 0.8, "alpha": FAINT / 3}
            if index < len(best):
                look = {"linewidth": 1.6, "label": f"{run.trial.number}"}
            # the best on top
            look |= {
                "gid": f"{run.trial}",
                "color": colors[index],
                "zorder": 3 - index / len(ranked),
            }
            marker = "o" if len(points) <= MAX_MARKERS else ""
            drawn += plot(axes, points, marker=marker, markersize=3.5, **look)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        label_x(axes, axis)
        log_scale(axes, [value for _, value in drawn])

    def draw_slice(axes: Axes, name: str, values: Sequence[Any]) -> None:
        if all(type(value) in (int, float) for value in values):
            log_scale(axes, values, axis="x")
        else:
            values = [printable(format_value(value))[:MAX_CHOICE] for value in values]
        for run, value, figure, color in zip(ranked, values, figures, colors, strict=True):
            look = {"linestyle": "", "marker": "o", "color": color, "alpha": 0.8, "zorder": 2}
            plot(axes, [(value, figure)], gid=f"{run.trial}", **look)
        label_x(axes, name)
        log_scale(axes, figures)

    heading = name_metric(ranked[0])
    ends = [
        f"{run.trial} {format_figure(metric, figure)}"
        for run, figure in zip(best, figures, strict=False)
    ]
    summary = f"{heading} over {axis}s: {', '.join(ends)}"
    panels = [Panel("metric-over-epochs", heading, summary, draw_epochs)]
    for index, name in enumerate(ranked[0].trial.values):
        values = [run.trial.values[name] for run in ranked]
        if any(value != values[0] for value in values):
            draw = functools.partial(draw_slice, name=name, values=values)
            by = f"By {name}"
            panels.append(Panel(f"metric-by-{index}", by, f"{by}: the best, {ends[0]}", draw))
    trials = "; ".join(str(run.trial) for run in best)
    return heading, f"colored: the best so far, {trials}", panels


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

            for (label, points), color in zip(
                lines.items(), itertools.cycle(PALETTE), strict=False
            ):
                known = [(size, y.mean) for size, y in points]
                plot(axes, known, color=color, marker="o", markersize=6, label=label)
                for size, y in points:  # a single measurement has no bar
                    if y.half_width:
                        axes.errorbar(size, y.mean, y.half_width, color=color, capsize=4)
            plot(
                axes,
                sorted(ideals.items()),
                color=INK,
                linewidth=1,
                linestyle=(0, (1, 2)),
                label="ideal",
            )
            axes.set_xscale("log", base=2)
            axes.set_xticks(list(ideal), [str(size) for size in ideal])
            axes.xaxis.set_minor_locator(NullLocator())
            label_x(axes, "ranks")
            # with two equal axes the ideal is a straight line, and small sizes stay visible
            if name == "speed_up":
                axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(format_rounded)

        points = ", ".join(
            f"{format_count(size, 'rank')} {y:,.4g}" for line in lines.values() for size, y in line
        )
        return Panel(
            name.replace("_", "-"), title, f"{title} by world size: {points}", draw, from_zero=True
        )

    panels = [
        by_size("speed_up", "Speed-up", ideal),
        by_size("efficiency", "Efficiency", dict.fromkeys(ideal, 1.0)),
        by_size("samples_per_second", "Samples per second", {}),
        by_size("seconds_to_target", f"Seconds to test loss {study.target_loss:.4g}", {}),
        by_size("wait_share", "Share of a step waiting for gradients", {}),
    ]
    return meaning, panels if study.rows else []
