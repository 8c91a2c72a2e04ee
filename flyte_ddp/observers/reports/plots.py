"""The panels of a run, drawn from its state. Knows neither torch nor Flyte.

From the command line: `flyte-ddp plot history.jsonl picture.svg` (or .png, .pdf). Names of panels
may follow, such as `ranks`; by default all are drawn.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flyte_ddp.events import NodeMeasured, RunState, read_history
from flyte_ddp.observers.formats import format_figure, format_rounded
from flyte_ddp.observers.reports.drawing import (
    FAINT,
    INK,
    MAX_MARKERS,
    PALETTE,
    Panel,
    Points,
    label_x,
    log_scale,
    plot,
    save_panels,
)
from flyte_ddp.observers.reports.predictions import prediction_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# reported values with a panel of their own
KNOWN = ("loss", "samples_per_second", "learning_rate", "gradient_norm")
MAX_REPORTED = 12  # other values that are drawn
MAX_METRICS = 4  # of the held-out data
MEASURED = {  # of a node, with its title
    "gpu": "GPU utilization (%)",
    "gpu_memory": "GPU memory in use (%)",
    "cpu": "CPU utilization (%)",
    "memory": "Memory in use (%)",
}
MAX_LINES = len(PALETTE)  # of ranks or nodes, one color each; more are faint


def run_panels(state: RunState) -> list[Panel]:
    """Return the panels for which there are data so far.

    In this order: loss, the metrics, throughput, learning-rate, gradient-norm, ranks, predictions,
    each other reported value, and the use of the nodes.
    """
    curves, epochs = _Curves(state), state.epochs
    schedule = state.started.config.get("schedule") if state.started else None
    # at the end of each epoch
    rates = {} if "learning_rate" in curves.reported else {"": "learning_rate"}
    metrics = list(epochs[-1].metrics.items())[:MAX_METRICS] if epochs else []
    speed, norm = "samples_per_second", "L2, whole gradient, before clipping"
    panels = [
        curves.panel(
            "loss", "Loss", "loss", {"training": "train_loss", "test": "test_loss"}, 0, log_ratio=20
        ),
        *(
            curves.panel(
                f"metric-{index}",
                f"Test {name.replace('_', ' ')}",
                "",
                {"": name},
                2,
                f"now {format_figure(name, now)}",
            )
            for index, (name, now) in enumerate(metrics)
        ),
        curves.panel(
            "throughput",
            "Throughput (samples/s)",
            speed,
            {"epoch mean": speed},
            6,
            tick=format_rounded,
            zero=True,
        ),
        curves.panel(
            "learning-rate",
            "Learning rate",
            "learning_rate",
            rates,
            3,
            f"schedule {schedule}" if schedule else "",
            zero=True,
        ),
        curves.panel(
            "gradient-norm", "Gradient norm", "gradient_norm", {}, 4, norm, log_ratio=100, zero=True
        ),
    ]
    if any(len(epoch.rank_step_seconds) > 1 for epoch in epochs):
        title = "Compute time per step of each rank (ms)"
        panels.append(
            Panel("ranks", title, f"{title} over epochs", curves.draw_ranks, from_zero=True)
        )
    panels += prediction_panels(state.predictions.predictions if state.predictions else [])
    others = [name for name in curves.reported if name not in KNOWN][:MAX_REPORTED]
    panels += [
        curves.panel(f"reported-{index}", name.replace("_", " "), name, {}, 0)
        for index, name in enumerate(others)
    ]
    for name, title in MEASURED.items():
        if any(getattr(each, name) is not None for each in state.measured):
            draw = functools.partial(_draw_nodes, measured=state.measured, name=name)
            summary = f"{title} of each node over time"
            panels.append(Panel(name.replace("_", "-"), title, summary, draw, from_zero=True))
    return [panel for panel in panels if panel]


def _draw_nodes(axes: Axes, measured: Sequence[NodeMeasured], name: str) -> None:
    """Draw a line per node over the time of the run."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for each in measured:
        if (share := getattr(each, name)) is not None:
            minute = (each.at - measured[0].at) / 60
            lines.setdefault(f"node {each.node}", []).append((minute, 100 * share))
    _draw_lines(axes, lines)
    label_x(axes, "minute")


def _draw_lines(axes: Axes, lines: Mapping[str, Points]) -> None:
    """Draw a line per label, each in a color; many are faint, and have no labels."""
    for (label, points), color in zip(lines.items(), itertools.cycle(PALETTE), strict=False):
        look: dict[str, Any] = {"color": color, "label": label, "linewidth": 2, **_mark(points)}
        if len(lines) > MAX_LINES:
            look = {"color": PALETTE[6], "alpha": FAINT / 2, "gid": None, "linewidth": 1}
        plot(axes, points, **look)


def _mark(points: Points) -> dict[str, Any]:
    """Return the markers of a line, which has them while they are few."""
    return {"marker": "o" if len(points) <= MAX_MARKERS else "", "markersize": 3.5}


class _Curves:
    """A run's curves. Their x axis counts epochs if the program does, and steps otherwise."""

    def __init__(self, state: RunState) -> None:
        by_epoch = bool(state.epochs) or all(report.epoch is not None for report in state.reports)
        self.state = state
        self.axis = "epoch" if by_epoch else "step"
        self.reported: dict[str, list[tuple[float, float]]] = {}  # by name
        for report in state.reports:
            x = report.epoch if by_epoch else report.step
            if x is not None:
                for name, value in report.values.items():
                    self.reported.setdefault(name, []).append((x, value))

    def panel(
        self,
        name: str,
        title: str,
        reported: str,
        figures: Mapping[str, str],
        color: int,
        note: str = "",
        zero: bool = False,
        **look: Any,
    ) -> Panel | None:
        """Return a panel of a reported value, and of `figures` of each epoch by their labels; None
        without either.
        """
        epochs = self.state.epochs
        lines = {
            label: [
                (each.position, (vars(each) | each.metrics).get(figure, math.nan))
                for each in epochs
            ]
            for label, figure in figures.items()
            if epochs
        }
        if not lines and reported not in self.reported:
            return None
        draw = functools.partial(
            self._draw, steps=self.reported.get(reported, []), lines=lines, color=color, **look
        )
        return Panel(
            name,
            title,
            ": ".join(filter(None, [f"{title} over {self.axis}s", note])),
            draw,
            note,
            zero,
        )

    def _draw(
        self,
        axes: Axes,
        steps: Points,
        lines: Mapping[str, Points],
        color: int,
        log_ratio: float = math.inf,
        tick: Callable[[float, object], str] = lambda value, _: f"{value:.4g}",
    ) -> None:
        faint: dict[str, Any] = {"alpha": FAINT, "linewidth": 0.9} if lines else {"linewidth": 1.4}
        drawn = plot(
            axes,
            steps,
            color=PALETTE[color],
            marker="o" * (len(steps) == 1),
            label="by step",
            **faint,
        )
        for index, (label, points) in enumerate(lines.items(), start=color):
            look = {"color": PALETTE[index], "label": label or None, "linewidth": 2}
            drawn += plot(axes, points, **_mark(points), **look)
        log_scale(axes, [value for _, value in drawn], log_ratio)
        if axes.get_yscale() == "linear":
            axes.yaxis.set_major_formatter(tick)
        self._set_x(axes)

    def _set_x(self, axes: Axes) -> None:
        """Label the x axis, and mark where the run was resumed from a checkpoint."""
        from matplotlib.ticker import MaxNLocator

        state = self.state
        ends = [
            0.0,
            *(epoch.position for epoch in state.epochs),
            *(line[-1][0] for line in self.reported.values()),
        ]
        label_x(axes, self.axis)
        if x := state.position(state.resumed_step) if self.axis == "epoch" else state.resumed_step:
            axes.axvline(x, color=INK, linewidth=1, linestyle=(0, (3, 3)), label="resumed")
        axes.set_xlim(0, max(1.0, *ends) * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))

    def draw_ranks(self, axes: Axes) -> None:
        """Draw a line per rank."""
        slow = self.state.stragglers[-1].stragglers if self.state.stragglers else []
        notes = {each.rank: f", slow in {each.phase}" for each in slow}
        lines: dict[str, list[tuple[float, float]]] = {}
        for epoch in self.state.epochs:
            for rank, seconds in enumerate(epoch.rank_step_seconds):
                name = f"rank {rank}{notes.get(rank, '')}"
                lines.setdefault(name, []).append((epoch.position, 1e3 * seconds))
        _draw_lines(axes, lines)
        self._set_x(axes)


def main(arguments: Sequence[str]) -> str:
    """Draw the panels of a history, and return a line for people."""
    parser = argparse.ArgumentParser("flyte-ddp plot", description="draw the curves of a history")
    parser.add_argument("history", metavar="HISTORY", help="history.jsonl of a run")
    parser.add_argument("picture", metavar="PICTURE", help="file to write, such as curves.svg")
    parser.add_argument("names", metavar="NAME", nargs="*", help="of a panel (default: all)")
    options = parser.parse_args(arguments)
    panels = {each.name: each for each in run_panels(RunState.of(read_history(options.history)))}
    save_panels([panels[name] for name in options.names or panels], options.picture)
    return f"picture: {options.picture}"
