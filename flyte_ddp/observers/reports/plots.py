"""The panels of a run, drawn from its state. Knows neither torch nor Flyte.

From the command line: `flyte-ddp plot history.jsonl picture.svg` (or .png, .pdf). Names of panels
may follow, such as `ranks`; by default all are drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.config.extras import require
from flyte_ddp.config.fields import suggest
from flyte_ddp.config.options import make_parser
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import RunState, read_history
from flyte_ddp.observers.formats import format_figure, format_rounded, title_of
from flyte_ddp.observers.reports.drawing import (
    FAINT,
    INK,
    PALETTE,
    Line,
    Panel,
    Points,
    save_panels,
)
from flyte_ddp.observers.reports.predictions import prediction_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# reported values with a panel of their own
KNOWN = ("loss", "samples_per_second", "learning_rate", "gradient_norm")
MAX_REPORTED = 12  # other values that are drawn
MAX_METRICS = 4  # metrics of the held-out data with a panel
MEASURED = {  # measurements of a node, with the titles of their panels
    "gpu": "GPU utilization (%)",
    "gpu_memory": "GPU memory in use (%)",
    "cpu": "CPU utilization (%)",
    "memory": "Memory in use (%)",
}
PICTURES = (".pdf", ".png", ".svg")
MAX_LINES = len(PALETTE)  # lines of ranks or nodes with a color each; more lines are faint

Curve = list[tuple[float, float]]  # x, y


def run_panels(state: RunState) -> list[Panel]:
    """Return the panels for which there are data so far, in the order of `PANELS`.

    `find_axis` chooses their x axis.
    """
    curves = _Curves(state, *find_axis(state))
    return [panel for make_panels in PANELS for panel in make_panels(curves)]


@dataclass(frozen=True)
class _Curves:
    """The curves of a run over one x axis."""

    state: RunState
    axis: str
    reported: Mapping[str, Curve]  # curves under their names

    def set_x(self, axes: Axes) -> None:
        """Mark where the run was resumed from a checkpoint."""
        state = self.state
        step = state.resumed_step
        resumed = {"epoch": state.position(step), "step": step}.get(self.axis)
        if resumed:
            axes.axvline(resumed, color=INK, linewidth=1, linestyle=(0, (3, 3)), label="resumed")
        ends = [epoch.position for epoch in state.epochs]
        ends += [line[-1][0] for line in self.reported.values()]
        axes.set_xlim(0, max([1.0, *ends]) * 1.02)

    def panel(
        self,
        name: str,
        title: str,
        value: str,
        figures: Mapping[str, str],
        color: int = 0,
        note: str = "",
        **options: Any,
    ) -> Iterator[Panel]:
        """Return the panel of a reported value, and of `figures` of each epoch by their labels;
        none without either.
        """
        lines = []
        steps = self.reported.get(value)
        if steps:
            is_alone = not self.state.epochs or not figures
            width, opacity = (1.4, 1.0) if is_alone else (0.9, FAINT)
            lines.append(Line(steps, "by step", PALETTE[color], width, opacity, max_markers=1))
        if self.state.epochs:
            for index, (label, figure) in enumerate(figures.items(), start=color):
                lines.append(Line(self._over_epochs(figure), label or None, PALETTE[index]))
        summary = f"{title} over {self.axis}s"
        if note:
            summary += f": {note}"
        if lines:
            yield Panel(
                name, title, summary, lines, self.axis, note, True, draw=self.set_x, **options
            )

    def _over_epochs(self, figure: str) -> Points:
        return [
            (each.position, (vars(each) | each.metrics).get(figure, math.nan))
            for each in self.state.epochs
        ]


def _metric_panels(curves: _Curves) -> Iterator[Panel]:
    newest = curves.state.epochs[-1].metrics if curves.state.epochs else {}
    for index, (name, now) in enumerate(list(newest.items())[:MAX_METRICS]):
        title, note = f"Test {name.replace('_', ' ')}", f"now {format_figure(name, now)}"
        figures = {"": name}
        yield from curves.panel(f"metric-{index}", title, "", figures, 2, note, figure=name)


def _learning_rate_panel(curves: _Curves) -> Iterator[Panel]:
    name, started = "learning_rate", curves.state.started
    schedule = started.config.get("schedule") if started else None
    note = f"schedule {schedule}" if schedule else ""
    at_end_of_epoch = {} if name in curves.reported else {"": name}
    return curves.panel(
        "learning-rate", "Learning rate", name, at_end_of_epoch, 3, note, from_zero=True
    )


def _rank_panel(curves: _Curves) -> Iterator[Panel]:
    if any(len(epoch.rank_step_seconds) > 1 for epoch in curves.state.epochs):
        title = "Compute time per step of each rank (ms)"
        lines, axis = color_lines(_rank_lines(curves.state)), curves.axis
        summary = f"{title} over epochs"
        yield Panel("ranks", title, summary, lines, axis, "", True, True, draw=curves.set_x)


def _prediction_panels(curves: _Curves) -> list[Panel]:
    made = curves.state.predictions
    return prediction_panels(made.predictions) if made else []


def _other_panels(curves: _Curves) -> Iterator[Panel]:
    others = [name for name in curves.reported if name not in KNOWN]
    for index, name in enumerate(others[:MAX_REPORTED]):
        yield from curves.panel(f"reported-{index}", title_of(name), name, {}, figure=name)


def _node_panels(curves: _Curves) -> Iterator[Panel]:
    for name, title in MEASURED.items():
        lines = color_lines(_node_lines(curves.state, name))
        summary = f"{title} of each node over time"
        if lines:
            yield Panel(name.replace("_", "-"), title, summary, lines, "minute", from_zero=True)


LOSSES = {"training": "train_loss", "test": "test_loss"}
SPEED = "samples_per_second"
WHOLE_NORM = "L2, whole gradient, before clipping"
PANELS: tuple[Callable[[_Curves], Iterable[Panel]], ...] = (
    lambda curves: curves.panel("loss", "Loss", "loss", LOSSES, log_ratio=20),
    _metric_panels,
    lambda curves: curves.panel(
        "throughput",
        "Throughput (samples/s)",
        SPEED,
        {"epoch mean": SPEED},
        6,
        from_zero=True,
        tick=format_rounded,
    ),
    _learning_rate_panel,
    lambda curves: curves.panel(
        "gradient-norm",
        "Gradient norm",
        "gradient_norm",
        {},
        4,
        WHOLE_NORM,
        from_zero=True,
        log_ratio=100,
    ),
    _rank_panel,
    _prediction_panels,
    _other_panels,
    _node_panels,
)


def find_axis(state: RunState) -> tuple[str, dict[str, Curve]]:
    """Return the x axis, "epoch", "step" or "report", and the reported values over it, by name.

    A recipe has epochs. A function's axis is the first that rises from each report of a value to
    the next: a whole number of epochs may stand for many steps, and steps may begin anew with each
    epoch. The number of the report always rises.
    """
    reports = state.reports
    by_epoch = _reported_lines(state, [each.epoch for each in reports])
    if state.epochs:
        return "epoch", by_epoch
    if all(each.epoch is not None for each in reports) and _rise(by_epoch):
        return "epoch", by_epoch
    by_step = _reported_lines(state, [each.step for each in reports])
    if _rise(by_step):
        return "step", by_step
    return "report", _reported_lines(state, range(1, len(reports) + 1))


def _reported_lines(state: RunState, positions: Iterable[float | None]) -> dict[str, Curve]:
    lines: dict[str, Curve] = {}
    for x, report in zip(positions, state.reports, strict=True):
        if x is not None:
            for name, value in report.values.items():
                lines.setdefault(name, []).append((x, value))
    return lines


def _rise(lines: Mapping[str, Curve]) -> bool:
    """Return whether each point of a line lies to the right of the one before."""
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, lines.values()))
    return all(one[0] < other[0] for one, other in pairs)


def _rank_lines(state: RunState) -> dict[str, Curve]:
    """Return the milliseconds of each rank over the epochs."""
    slow = state.stragglers[-1].stragglers if state.stragglers else []
    notes = {each.rank: f", slow in {each.phase}" for each in slow}
    lines: dict[int, Curve] = {}
    for epoch in state.epochs:
        for rank, seconds in enumerate(epoch.rank_step_seconds):
            lines.setdefault(rank, []).append((epoch.position, 1e3 * seconds))
    return {f"rank {rank}{notes.get(rank, '')}": line for rank, line in lines.items()}


def _node_lines(state: RunState, name: str) -> dict[str, Curve]:
    """Return the percentages of each node over the minutes of the run."""
    lines: dict[str, Curve] = {}
    for each in state.measured:
        value = getattr(each, name)
        if value is not None:
            point = (each.at - state.measured[0].at) / 60, 100 * value
            lines.setdefault(f"node {each.node}", []).append(point)
    return lines


def color_lines(lines: Mapping[str, Points]) -> list[Line]:
    """Return a line per label, each in a color; many are faint, and have no labels."""
    if len(lines) > MAX_LINES:
        return [Line(points, None, PALETTE[6], 1, FAINT / 2, None) for points in lines.values()]
    return [
        Line(points, label, color)
        for (label, points), color in zip(lines.items(), PALETTE, strict=False)
    ]


def main(arguments: Sequence[str]) -> str:
    """Draw the panels of a history, and return a line for people."""
    parser = make_parser(
        "plot",
        "draw the curves of a history",
        (
            ("history", "history.jsonl of a run", None),
            ("picture", "file to write, such as curves.svg", None),
        ),
    )
    parser.add_argument(
        "names", metavar="NAME", nargs="*", default=[], help="of a panel (default: all)"
    )
    options = parser.parse_args(arguments)
    require("plot", "matplotlib")
    picture = Path(options.picture)
    if picture.suffix not in PICTURES:
        raise ConfigError(
            f"picture: expected a name that ends in {', '.join(PICTURES)}, got {options.picture!r}"
        )
    panels = {each.name: each for each in run_panels(read_state(options.history))}
    if not panels:
        raise ConfigError(
            f"history: expected a history with something to draw, got {options.history!r}"
        )
    for name in options.names:
        if name not in panels:
            raise ConfigError(
                f"name: expected some of {', '.join(panels)}, got {name!r}{suggest(name, panels)}"
            )
    try:
        save_panels([panels[name] for name in options.names or panels], picture)
    except OSError as error:
        raise ConfigError(
            f"picture: expected a file that can be written, got {options.picture!r}: "
            f"{error.strerror}"
        ) from error
    return f"picture: {options.picture}"


def read_state(history: str) -> RunState:
    """Return the state of a run by its history. Raises ConfigError where there is none."""
    try:
        return RunState.of(read_history(history))
    except OSError as error:
        raise ConfigError(
            f"history: expected the history.jsonl of a run, got {history!r}: {error.strerror}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"history: {error}") from error
