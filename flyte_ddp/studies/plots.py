"""Figures of a study.

Of every study: the figure that its trials are compared by, such as the held-out loss, over epochs
and by each hyperparameter, as Optuna draws them, in the look of all figures. The best trials have
colors, the others are faint. Of a scaling study also: speed-up, efficiency, throughput, time to a
target loss, communication.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyte_ddp.observers.reports.drawing import (
    FAINT,
    INK,
    PALETTE,
    Panel,
    format_count,
    format_figure,
    format_tick,
    label_x,
    log_scale,
    plot,
    printable,
    thin,
)
from flyte_ddp.studies.results import TrialRun, rank_of
from flyte_ddp.studies.scaling import Study, by_world_size, estimate
from flyte_ddp.studies.search import format_value, load_optuna

if TYPE_CHECKING:
    import optuna
    from matplotlib.axes import Axes

MAX_LINES = 100  # of trials; more would become one grey area
MAX_POINTS = 60  # of one line, because there are many lines
MAX_CHOICE = 14  # characters of a value below an axis
LOG_RATIO = 20.0  # of the largest to the smallest value, from which on an axis is logarithmic


class _Choice(str):
    """A value that is no number, as an axis shows it."""

    __repr__ = str.__str__


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
    study_of, colors = functools.cache(lambda: _study_of(ranked)), [*PALETTE, *[INK] * len(ranked)]

    def draw_epochs(_: Axes) -> Any:
        from optuna.visualization.matplotlib import plot_intermediate_values

        axes: Any = plot_intermediate_values(study_of())
        for index, line in enumerate(axes.lines):
            is_best = index < len(best)
            line.set(
                color=colors[index],
                linewidth=1.6 if is_best else 0.8,
                markersize=4 if is_best else 2,
            )
            # the best on top
            line.set(alpha=1 if is_best else FAINT / 3, zorder=2 + 1 / (1 + index))
            line.set_label(f"{ranked[index].trial.number}" if is_best else "_")
        axes.xaxis.get_major_locator().set_params(integer=True)
        return _take(axes, "epoch", [value for line in axes.lines for value in line.get_ydata()])

    def draw_slice(name: str) -> Callable[[Axes], Any]:
        def draw(_: Axes) -> Any:
            from optuna.visualization.matplotlib import plot_slice

            axes: Any = plot_slice(study_of(), [name])
            axes.figure.axes[1].remove()  # the bar of the colors that we replace
            numbers = axes.collections[0].get_array()
            axes.collections[0].set(
                array=None, color=[colors[int(number)] for number in numbers], alpha=0.8
            )
            if axes.get_xscale() == "log":
                # its plain numbers
                log_scale(axes, [run.trial.values[name] for run in ranked], LOG_RATIO, "x")
            return _take(axes, name, [_figure(run) for run in ranked])

        return draw

    heading, ends = (
        name_metric(metric),
        [f"{run.trial} {format_figure(metric, _figure(run))}" for run in best],
    )
    over_epochs = Panel(
        "metric-over-epochs", heading, f"{heading} over epochs: {', '.join(ends)}", draw_epochs
    )
    swept = [
        name
        for name in ranked[0].trial.values
        if len({json.dumps(run.trial.values[name]) for run in ranked}) > 1
    ]
    by_name = [
        Panel(
            f"metric-by-{index}",
            f"By {name}",
            f"{heading} by {name}: the best, {ends[0]}",
            draw_slice(name),
        )
        for index, name in enumerate(swept)
    ]
    return (
        heading,
        f"colored: the best so far, {'; '.join(str(run.trial) for run in best)}",
        [over_epochs, *by_name],
    )


def name_metric(metric: str) -> str:
    """Return the heading of a figure of the held-out data, such as "Test loss" and "Test mae"."""
    return f"Test {metric.removeprefix('test_').replace('_', ' ')}"


def _figure(run: TrialRun) -> float:
    return run.kept.figures().values[run.metric] if run.kept else math.nan


def _study_of(runs: Sequence[TrialRun]) -> optuna.Study:
    """Return the trials as Optuna's, in their order."""
    import matplotlib

    # which Optuna draws by; a window may be opened by the main thread alone
    if "matplotlib.pyplot" not in sys.modules:
        matplotlib.use("agg")
    study: optuna.Study = load_optuna().create_study()
    from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
    from optuna.trial import create_trial

    columns: dict[str, list[Any]] = {}
    distributions: dict[str, BaseDistribution] = {}
    for name in runs[0].trial.values:
        columns[name] = [run.trial.values[name] for run in runs]
        if all(type(value) in (int, float) for value in columns[name]):
            low, high = min(columns[name]), max(columns[name])
            distributions[name] = FloatDistribution(low, high, log=0 < LOG_RATIO * low <= high)
        else:
            columns[name] = [
                _Choice(printable(format_value(value))[:MAX_CHOICE]) for value in columns[name]
            ]
            distributions[name] = CategoricalDistribution(sorted(set(columns[name])))
    for index, run in enumerate(runs):
        params = {name: column[index] for name, column in columns.items()}
        points = [
            (each.epoch, each.figures().values.get(run.metric, math.nan)) for each in run.epochs
        ]
        drawn: dict[Any, float] = dict(thin(points, MAX_POINTS))
        study.add_trial(
            create_trial(
                value=_figure(run),
                params=params,
                distributions=distributions,
                intermediate_values=drawn,
            )
        )
    return study


def _take(axes: Any, label: str, values: Sequence[float]) -> Any:
    """Take a figure from pyplot, with a label for its x axis and the scale of the `values` on its y
    axis.
    """
    from matplotlib import pyplot

    pyplot.close(axes.figure)
    axes.figure.set_layout_engine("constrained")
    axes.set_ylabel("")
    label_x(axes, label)
    log_scale(axes, values)
    return axes


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
                plot(
                    axes,
                    [(size, y.mean) for size, y in points],
                    color=color,
                    marker="o",
                    markersize=6,
                    label=label,
                )
                for size, y in points:
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
            axes.yaxis.set_major_formatter(format_tick)

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
