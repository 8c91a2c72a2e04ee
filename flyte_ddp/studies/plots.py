"""Figures of a study.

Of every study: the figure that its trials are compared by, such as the held-out loss, over epochs and over time,
grouped in facets. A facet contains the trials that differ in one hyperparameter only, of a scaling study in the world
size; the color shows its value. In a random search no two trials are like that: there all share one facet, in which the
best have colors and the others are faint. Of a scaling study also: speed-up, efficiency, throughput, time to a target
loss, communication.

From the command line: `python -m flyte_ddp.studies.plots results.csv picture.svg` (or .png, .pdf) for a sweep,
`python -m flyte_ddp.studies.plots history.jsonl picture.svg` for a scaling study.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import RunFinished, RunState, read_history
from flyte_ddp.observers.reports.drawing import (
    FAINT,
    MAX_TITLE,
    PALETTE,
    Panel,
    fits_in_line,
    format_count,
    format_figure,
    format_tick,
    label_x,
    log_scale,
    plot,
    save_panels,
)
from flyte_ddp.studies.results import FAILED, FINISHED, STOPPED_EARLY, TrialRun, find_best, rank_of, read_table
from flyte_ddp.studies.scaling import Row, Study, by_world_size, estimate
from flyte_ddp.studies.search import BATCH_SIZE_PER_RANK, SEED, WORLD_SIZE, Trial, format_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_FACETS = 6
NUM_COLORED = 5  # of the best models, if all models share one facet
MAX_FAINT = 100  # models beside those; more lines would become one grey area
CHARACTER = 0.03  # width of a tick's character, as a share of an axis
MAX_POINTS = 60  # of one line, because there are many lines


# Of one panel: each model with its color and its label in the legend, "" for none.
Lines = list[tuple[TrialRun, str, str]]


def metric_panels(runs: Sequence[TrialRun]) -> tuple[str, list[Panel], list[Panel]]:
    """Return a description of the colors, the panels of the monitored figure over epochs, and those over time.

    All panels of a kind have the same axes. Without a finished epoch there are no panels.
    """
    drawn = [run for run in runs if run.epochs]
    meaning, facets = _facets(drawn)
    values = [value for run in drawn for value in _values(run) if math.isfinite(value)]
    if not values:
        return meaning, [], []
    best, metric = find_best(runs), drawn[0].metric
    slowest = max(run.elapsed[-1] for run in drawn)
    unit, seconds = ("h", 3600) if slowest > 2 * 3600 else ("min", 60) if slowest > 120 else ("s", 1)
    by_epoch = {id(run): [float(epoch.epoch) for epoch in run.epochs] for run in drawn}
    by_time = {id(run): [elapsed / seconds for elapsed in run.elapsed] for run in drawn}

    def panels(name: str, xs: Mapping[int, Sequence[float]], label: str) -> list[Panel]:
        def panel(index: int, title: str, lines: Lines) -> Panel:
            ends = [f"{run.trial} {format_figure(metric, _values(run)[-1])}" for run, _, _ in lines[: len(PALETTE)]]
            summary = f"{name_metric(metric)} over {name}, {title}: the last values are {', '.join(ends)}"
            return Panel(
                f"metric-over-{name}-{index}", title, summary, lambda axes: _draw(axes, lines, xs, label, values, best)
            )

        return [panel(index, title, lines) for index, (title, lines) in enumerate(facets.items())]

    return meaning, panels("epochs", by_epoch, "epoch"), panels("time", by_time, f"time ({unit})")


def name_metric(metric: str) -> str:
    """Return the heading of a figure of the held-out data, such as "Test loss" and "Test mae"."""
    return f"Test {metric.removeprefix('test_').replace('_', ' ')}"


def _values(run: TrialRun) -> list[float]:
    """Return the monitored figure after each epoch; NaN where it is missing."""
    return [epoch.figures().values.get(run.metric, math.nan) for epoch in run.epochs]


def _facets(runs: Sequence[TrialRun]) -> tuple[str, dict[str, Lines]]:
    """Return a description of the colors, and the lines of each facet by its title."""
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
        is_compared = len(by_facet) < len(runs)  # not in a list of models that differ in several hyperparameters
        if is_compared and len(colors) <= len(PALETTE) and len(by_facet) <= MAX_FACETS:
            return f"colored by {swept_name}", {
                title or f"By {swept_name}": _color(members, swept_name, colors) for title, members in by_facet.items()
            }
    lines = _rank(runs)
    title = "All models" if len(lines) == len(runs) else f"The best {len(lines)} of {len(runs)} models so far"
    return f"colored: the best so far, {'; '.join(str(run.trial) for run, color, _ in lines if color)}", {title: lines}


def _rank(runs: Sequence[TrialRun]) -> Lines:
    """Return the models from the best on; the first have colors, and are labelled by their numbers."""
    ranked = sorted(runs, key=rank_of)
    colored = zip(ranked, PALETTE[:NUM_COLORED], strict=False)
    faint = ranked[NUM_COLORED : NUM_COLORED + MAX_FAINT]
    return [*((run, color, f"{run.trial.number}") for run, color in colored), *((run, "", "") for run in faint)]


def parameter_panels(runs: Sequence[TrialRun]) -> list[Panel]:
    """Return a panel for each hyperparameter that differs: the monitored figure of each trial against its value.

    The trials have the colors of `metric_panels`.
    """
    _, facets = _facets([run for run in runs if run.epochs])
    lines: Lines = []
    labelled: set[str] = set()  # every facet has a legend, the panel one
    every = [line for each in facets.values() for line in each]
    for run, color, label in sorted(every, key=lambda line: rank_of(line[0])):
        if math.isfinite(run.score(run.kept)):
            lines.append((run, color, "" if label in labelled else label))
            labelled.add(label)
    names = dict.fromkeys(name for run, _, _ in lines for name in run.trial.values)
    swept = [name for name in names if len({json.dumps(run.trial.values[name]) for run, _, _ in lines}) > 1]
    return [_parameter_panel(name, lines) for name in swept]


def _parameter_panel(name: str, lines: Lines) -> Panel:
    values = [run.trial.values[name] for run, _, _ in lines]
    metric = lines[0][0].metric
    figures = [run.kept.figures().values[metric] for run, _, _ in lines if run.kept]
    are_numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    choices = list(dict.fromkeys(sorted(map(format_value, values))))
    xs = values if are_numbers else [choices.index(format_value(value)) for value in values]

    def draw(axes: Axes) -> None:
        ink = axes.title.get_color()
        for (_, color, label), x, figure in zip(lines, xs, figures, strict=True):
            look: dict[str, Any] = {
                "color": color or ink,
                "alpha": 1 if color else FAINT,
                "markersize": 6 if color else 3.5,
            }
            axes.plot([x], [figure], "o", label=label or None, zorder=3 if color else 2, **look)
        if not are_numbers:
            axes.set_xticks(range(len(choices)), [choice[:14] for choice in choices])
            axes.set_xlim(-0.5, len(choices) - 0.5)
        else:
            log_scale(axes, xs, axis="x")
            ticks = sorted(set(xs))
            labels = [format_value(x) for x in ticks]
            places = [math.log(x) if axes.get_xscale() == "log" else x for x in ticks]
            gap = min((after - before for before, after in itertools.pairwise(places)), default=0)
            # Of sampled values two may be next to each other; those of a grid seldom.
            if gap > CHARACTER * (1 + max(map(len, labels))) * (places[-1] - places[0]):
                axes.set_xticks(ticks, labels)
        label_x(axes, name)
        axes.set_ylabel(name_metric(metric).lower(), loc="top", alpha=0.7, fontsize=9.5, labelpad=2)
        log_scale(axes, figures)

    best = format_figure(metric, figures[0])
    summary = f"{name_metric(metric)} by {name}: the best, {best}, at {format_value(values[0])}"
    slug = "".join(letter if letter.isalpha() else "-" for letter in name)
    return Panel(f"metric-by-{slug}", f"By {name}", summary, draw)


def _color(runs: Sequence[TrialRun], name: str, colors: Mapping[str, str]) -> Lines:
    """Return the lines with their colors. The first label names the hyperparameter if there is room."""
    values = [json.dumps(run.trial.values[name]) for run in runs]
    labels = {
        value: format_value(run.trial.values[name])[:14] for value, run in reversed([*zip(values, runs, strict=True)])
    }
    if fits_in_line([f"{name} ", *labels.values()]):
        labels[values[0]] = f"{name} {labels[values[0]]}"
    return [(run, colors[value], labels.pop(value, "")) for value, run in zip(values, runs, strict=True)]


def _draw(
    axes: Axes,
    lines: Lines,
    xs: Mapping[int, Sequence[float]],
    label: str,
    values: Sequence[float],
    best: TrialRun | None,
) -> None:
    from matplotlib.ticker import MaxNLocator

    ink = axes.title.get_color()
    for index, (run, color, name) in enumerate(lines):
        points = plot(
            axes,
            list(zip(xs[id(run)], _values(run), strict=True)),
            MAX_POINTS,
            color=color or ink,
            alpha=1 if color else FAINT / 3,
            zorder=3 if color else 2,
            # Equal lines, such as of several world sizes: the earlier ones are thicker, so that they stay visible.
            linewidth=max(1.4, 2.6 - 0.4 * index) if color else 0.8,
            marker="o" if len(run.epochs) <= 15 else "",
            markersize=3.5 if color else 2,
            label=name or None,
        )
        if points and color and run.status in (FAILED, STOPPED_EARLY):
            axes.plot(*points[-1], "x", color=color, markersize=8, markeredgewidth=2)
        if points and run is best:
            axes.plot(*points[-1], "*", color=color, zorder=4, markersize=13, markeredgecolor=ink, markeredgewidth=0.6)
    axes.set_xlim(0, 1.04 * max(max(each) for each in xs.values()))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=label == "epoch"))
    label_x(axes, label)
    axes.set_ylabel(name_metric(lines[0][0].metric).lower(), loc="top", alpha=0.7, fontsize=9.5, labelpad=2)
    log_scale(axes, values)
    low, high = min(values), max(values)
    if axes.get_yscale() == "log":
        axes.set_ylim(low / 1.25, high * 1.25)
    else:
        axes.set_ylim(low - 0.06 * (high - low or 1), high + 0.06 * (high - low or 1))


# --- Scaling ------------------------------------------------------------------------------------------------------


def scaling_panels(study: Study) -> tuple[str, list[Panel]]:
    """Return a description of the lines' labels, and the panels for which there is data.

    There are none before the first trial has finished.
    """
    if not study.rows:
        return "", []
    meaning, labels = _label_series(study)
    sizes = sorted({row.world_size for row in study.rows})
    ideal = {row.world_size: row.world_size / rows[0].world_size for rows in study.series.values() for row in rows}

    def by_size(
        name: str, title: str, value: Callable[[Row], float | None], ideals: Mapping[int, float], note: str = ""
    ) -> Panel:
        """Return a panel with a line per series over world sizes, and the interval of repeats."""

        def known(repeats: Sequence[Row]) -> list[float]:
            return [y for row in repeats if (y := value(row)) is not None]

        lines = [
            [
                (size, estimate(measured))
                for size, repeats in by_world_size(rows).items()
                if (measured := known(repeats))
            ]
            for rows in study.series.values()
        ]
        values = ", ".join(f"{format_count(size, 'rank')} {y:,.4g}" for points in lines for size, y in points)

        def draw(axes: Axes) -> None:
            from matplotlib.ticker import NullLocator

            for index, (points, label) in enumerate(zip(lines, labels, strict=True)):
                color = PALETTE[index % len(PALETTE)]
                plot(axes, [(size, y.mean) for size, y in points], color=color, marker="o", markersize=6, label=label)
                for size, y in points:
                    if y.half_width:
                        axes.errorbar(size, y.mean, y.half_width, color=color, capsize=4)
            dots = {"color": axes.title.get_color(), "alpha": FAINT, "linewidth": 1, "linestyle": (0, (1, 2))}
            plot(axes, sorted(ideals.items()), **dots, label="ideal")
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [str(size) for size in sizes])
            axes.xaxis.set_minor_locator(NullLocator())
            label_x(axes, "ranks")
            if name == "speed-up":  # with two equal axes the ideal is a straight line, and small sizes stay visible
                axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(format_tick)

        return Panel(name, title, f"{title} by world size: {values}", draw, note, from_zero=True)

    panels = [
        by_size("speed-up", "Speed-up", lambda row: row.speed_up, ideal),
        by_size("efficiency", "Efficiency (%)", lambda row: 100 * row.efficiency, dict.fromkeys(ideal, 100.0)),
        by_size("throughput", "Samples per second", lambda row: row.samples_per_second, {}),
    ]
    if any(row.seconds_to_target is not None for row in study.rows):
        title = f"Seconds to test loss {study.target_loss:.4g}"
        panels.append(
            by_size("target", title, lambda row: row.seconds_to_target, {}, "of training, without evaluation")
        )
    first = [repeats[0] for repeats in by_world_size(next(iter(study.series.values()))).values()]  # all do it alike
    if any(row.wait_share for row in first):
        panels.append(_communication_panel(first))
    return meaning, panels


def _label_series(study: Study) -> tuple[str, list[str]]:
    """Return a description of the labels if they need one, and a label for each series, short enough for a legend."""
    labels = [" / ".join(map(str, values)) for values in study.series]
    if len(study.names) == 1:
        labels[0] = f"{study.names[0]} {labels[0]}"
    meaning = f"labelled by {' / '.join(study.names)}" if len(study.names) > 1 else ""
    if sum(len(label) + 4 for label in labels) > MAX_TITLE:
        labels = [str(number) for number in range(1, len(labels) + 1)]
        meaning = "; ".join(
            f"{number}: {study.describe(values)}" for number, values in zip(labels, study.series, strict=True)
        )
    return meaning, labels if study.names else ["measured"]


def _communication_panel(rows: Sequence[Row]) -> Panel:
    """Return a panel with a bar per world size: the waiting time, and on top of it what the backward pass hides."""
    places, wait = range(len(rows)), [100 * row.wait_share for row in rows]
    hidden = [100 * row.overlap_share for row in rows]

    def draw(axes: Axes) -> None:
        axes.bar(places, wait, 0.6, color=PALETTE[1], label="waiting")
        axes.bar(places, hidden, 0.6, wait, color=PALETTE[0], alpha=FAINT, linewidth=0, label="hidden by backward")
        axes.set_xticks(places, [str(row.world_size) for row in rows])
        label_x(axes, "ranks")

    shares = ", ".join(f"{format_count(row.world_size, 'rank')} {100 * row.wait_share:.0f} %" for row in rows)
    summary = f"Share of a step spent waiting for gradients: {shares}"
    return Panel("communication", "Communication (% of a step)", summary, draw, from_zero=True)


# --- The command line ---------------------------------------------------------------------------------------------


def read_study(history_file: str) -> list[TrialRun]:
    """Return the finished trials in the history of a scaling study."""
    states = [RunState(keep_reports=False)]
    for event in read_history(history_file):
        states[-1].handle(event)
        if isinstance(event, RunFinished):
            states.append(RunState(keep_reports=False))
    states = [state for state in states if state.finished]
    starts = [state.started for state in states if state.started]
    has_one_batch_size = len({started.config["global_batch_size"] for started in starts}) == 1
    runs = []
    for number, (state, started) in enumerate(zip(states, starts, strict=True), start=1):
        batch = {BATCH_SIZE_PER_RANK: started.config["global_batch_size"] // started.world_size}
        values = {
            "learning_rate": started.config["learning_rate"],
            "sample_size": started.num_train_samples,
            **({} if has_one_batch_size else batch),  # else the global batch grows with the world size
            WORLD_SIZE: started.world_size,
        }
        config = TrainingConfig(monitor=state.monitor, model_state=started.config["model_state"])
        runs.append(TrialRun(Trial(number, values, {}, config), "", FINISHED, state))
    return runs


def main() -> None:
    import sys

    import pandas  # type: ignore[import-untyped]

    results, picture = sys.argv[1:]
    is_scaling = Path(results).suffix == ".jsonl"
    runs = read_study(results) if is_scaling else read_table(pandas.read_csv(results))
    _, over_epochs, over_time = metric_panels(runs)
    meaning, others = scaling_panels(Study(runs if is_scaling else []))
    if meaning:
        sys.stdout.write(f"{meaning}\n")
    save_panels([*over_epochs, *over_time, *others], picture, columns=2 if is_scaling else len(over_epochs))


if __name__ == "__main__":
    main()
