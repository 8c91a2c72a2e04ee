"""Figures of a run, from its events. Knows neither torch nor Flyte.

A `Panel` says what to draw; `to_svg` makes of it a picture for a page of any colour and width, `save_panels` a file of
several. Other modules draw panels of their own with `style` and `PALETTE`, and get the same look. Imports matplotlib,
which takes 1.4 s, when the first panel is drawn.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from flyte_ddp.events import EpochFinished, Event, RunStarted, StepFinished

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Each has a contrast of at least 3:1 on white and on a near-black page (WCAG 2.1, 1.4.11), and neighbours differ in
# brightness or in the blue-yellow direction, which nearly everybody sees.
PALETTE = ("#3b82f6", "#ea580c", "#0d9488", "#a855f7", "#db2777", "#65810d", "#0e8fb8", "#b7791f")

MOST_POINTS = 500  # of one line; more cannot be told apart at the width of a page
MOST_LINES = 8  # of ranks, one colour each; beyond that their range is drawn

INK = "#010203"  # stands for the page's own text colour until the SVG is written
WIDTH, HEIGHT = 4.2, 2.6  # inches of a panel, whose text has 10 points: on a phone that is as much in pixels
FAINT = 0.55  # opacity of what is there for completeness, such as every single step's loss

_SVG = "http://www.w3.org/2000/svg"
_XLINK = "http://www.w3.org/1999/xlink"
_LIGHT = {"ink": "#1f2328", "page": "#ffffff"}
_DARK = {"ink": "#e6edf3", "page": "#0d1117"}
_drawing = threading.Lock()  # matplotlib's settings belong to the whole process


@dataclass
class History:
    """What the events so far say about training, without what a restart from a checkpoint has undone."""

    started: RunStarted | None = None
    steps: list[StepFinished] = field(default_factory=list)
    epochs: list[EpochFinished] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> History:
        """The history that `events` tell, in their order."""
        history = cls()
        for event in events:
            history.add(event)
        return history

    def add(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.started = event
            self.steps = [step for step in self.steps if step.step <= event.resumed_step]
            self.epochs = list(event.previous_epochs)
        elif isinstance(event, StepFinished):
            self.steps.append(event)
        elif isinstance(event, EpochFinished):
            self.epochs.append(event)

    def position(self, step: int) -> float:
        """Where optimizer step `step` lies, in epochs."""
        if self.started is None:
            return 0.0
        return step * int(self.started.config["epochs"]) / max(1, self.started.num_steps)

    @property
    def best(self) -> EpochFinished | None:
        """The first of the finished epochs that has the best accuracy."""
        return max(self.epochs, key=lambda finished: finished.accuracy, default=None)


@dataclass(frozen=True)
class Panel:
    """One small picture with a title of its own."""

    name: str  # of letters and hyphens, unique on a page
    title: str
    summary: str  # what it shows, for those who cannot see it
    draw: Callable[[Axes], None]


def training_panels(history: History) -> list[Panel]:
    """What there is to draw of a run so far: no panel without anything in it.

    In this order, where there is data: loss, accuracy, throughput, learning-rate, gradient-norm, ranks.
    """
    panels = []
    epochs, steps = history.epochs, history.steps
    if epochs or steps:
        told = (
            f"training loss {epochs[-1].train_loss:.4g}, test loss {epochs[-1].test_loss:.4g}" if epochs else "so far"
        )
        panels.append(Panel("loss", "Loss", f"Loss over epochs: {told}", lambda axes: _draw_loss(axes, history)))
    if best := history.best:
        told = f"best {percent(best.accuracy)} in epoch {best.epoch}"
        panels.append(
            Panel(
                "accuracy", "Test accuracy", f"Test accuracy over epochs: {told}", lambda a: _draw_accuracy(a, history)
            )
        )
    if epochs or steps:
        rate = (epochs or steps)[-1].samples_per_second
        panels.append(
            Panel(
                "throughput",
                "Throughput (samples/s)",
                f"Training samples per second over epochs: lately {rate:,.0f}",
                lambda axes: _draw_throughput(axes, history),
            )
        )
        panels.append(
            Panel(
                "learning-rate",
                "Learning rate",
                f"Learning rate over epochs: lately {(epochs or steps)[-1].learning_rate:.3g}",
                lambda axes: _draw_learning_rate(axes, history),
            )
        )
    if steps:
        panels.append(
            Panel(
                "gradient-norm",
                "Gradient norm",
                f"Gradient norm over epochs: lately {steps[-1].gradient_norm:.3g}",
                lambda axes: _draw_gradient_norm(axes, history),
            )
        )
    if any(len(epoch.rank_step_seconds) > 1 for epoch in epochs):
        times = epochs[-1].rank_step_seconds
        told = f"in the last epoch from {min(times) * 1e3:.3g} to {max(times) * 1e3:.3g} ms" if times else "so far"
        panels.append(
            Panel(
                "ranks",
                "Each rank's own time per step (ms)",
                f"Each rank's own time per step over epochs: {told}",
                lambda axes: _draw_ranks(axes, history),
            )
        )
    return panels


def to_svg(panel: Panel) -> str:
    """`panel` as an `<svg>` element to put into an HTML page.

    Text and axes take the page's text colour, the background is the page's, the width is its container's, and no id in
    it occurs in another panel's.
    """
    from matplotlib.figure import Figure

    with _settings(INK, salt=panel.name):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        panel.draw(figure.add_subplot())
        root = _tree(figure)
    root.set("class", "panel")
    root.set("role", "img")
    root.set("aria-label", panel.summary)
    return _serialized(root)


def save_panels(panels: Sequence[Panel], path: str | Path, columns: int = 2) -> None:
    """Put `panels` side by side into one file: SVG, PNG or PDF, by the ending of `path`.

    An SVG follows the reader's choice of light or dark; the other kinds are light.

    Raises:
        ValueError: there are no panels.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    if not panels:
        raise ValueError("panels: there are none; accepted is at least one")
    path = Path(path)
    rows = math.ceil(len(panels) / columns)
    is_svg = path.suffix == ".svg"
    with _settings(INK if is_svg else _LIGHT["ink"], salt=path.stem):
        spacing = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)  # inches
        figure = Figure(figsize=(WIDTH * min(columns, len(panels)), HEIGHT * rows), layout=spacing)
        for index, panel in enumerate(panels):
            panel.draw(figure.add_subplot(rows, min(columns, len(panels)), index + 1))
        if not is_svg:
            figure.savefig(path, dpi=160, facecolor=_LIGHT["page"])
            return
        root = _tree(figure)
    _, _, width, height = root.get("viewBox", "").split()
    sheet = (
        f"svg {{ color: {_LIGHT['ink']}; background: {_LIGHT['page']} }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ color: {_DARK['ink']}; background: {_DARK['page']} }} }}"
    )
    root.set("width", width)
    root.set("height", height)
    ElementTree.SubElement(root, f"{{{_SVG}}}style").text = sheet
    path.write_text(_serialized(root))


def style(axes: Axes, title: str, subtitle: str = "", from_zero: bool = False) -> None:
    """Give `axes`, with its lines drawn, the common look: no frame, faint horizontal rules.

    Below the title stand the legend, where more than one line has a label, and otherwise `subtitle`.
    """
    axes.set_title(title, loc="left", fontsize=11.5, fontweight="bold", pad=24)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_alpha(0.4)
    axes.tick_params(which="both", length=0, pad=5)
    axes.grid(axis="y", alpha=0.16, linewidth=0.8)
    axes.set_axisbelow(True)
    if from_zero:
        top = axes.dataLim.y1  # minus infinity where nothing is drawn
        axes.set_ylim(0, 1.08 * top if top > 0 else 1)
    num_labels = len(axes.get_legend_handles_labels()[1])
    if num_labels > 1:
        axes.legend(
            loc="lower left",
            bbox_to_anchor=(-0.01, 1.01),
            ncols=num_labels,
            frameon=False,
            fontsize=9.5,
            handlelength=1.1,
            handletextpad=0.5,
            columnspacing=1.2,
            borderaxespad=0.1,
            borderpad=0.2,
        )
    else:
        axes.annotate(
            subtitle,
            (0, 1),
            xycoords="axes fraction",
            xytext=(0, 8),
            textcoords="offset points",
            fontsize=9.5,
            alpha=0.7,
        )


def over_epochs(axes: Axes, history: History) -> None:
    """Make the x axis count epochs, and mark where the run went on from a checkpoint."""
    from matplotlib.ticker import MaxNLocator

    reached = max([epoch.epoch for epoch in history.epochs] + [history.position(step.step) for step in history.steps])
    axes.set_xlim(0, max(1.0, reached) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.set_xlabel("epoch", loc="right", alpha=0.7, fontsize=9.5, labelpad=1)
    if history.started and history.started.resumed_step:
        x = history.position(history.started.resumed_step)
        axes.axvline(x, color=axes.title.get_color(), alpha=0.35, linewidth=1, linestyle=(0, (3, 3)))
        axes.annotate(
            "resumed",
            (x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3 if x < 0.8 * reached else -3, -1),
            textcoords="offset points",
            ha="left" if x < 0.8 * reached else "right",
            va="top",
            fontsize=8.5,
            alpha=0.7,
        )


def log_scale(axes: Axes, values: Sequence[float], ratio: float = 20.0) -> None:
    """A logarithmic y axis with plain numbers, where `values` are positive and spread over more than `ratio`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    if not values or min(values) <= 0 or max(values) / min(values) < ratio:
        return
    axes.set_yscale("log")
    decades = math.log10(max(values) / min(values))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 1.6 else (1, 3) if decades < 3 else (1,)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def thinned(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` of the finite `points`, ordered by x, that look the same: each stretch's extremes stay."""
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) <= most:
        return points
    stretches = most // 2
    kept = []
    for index in range(stretches):
        stretch = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        extremes = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept


def percent(share: float) -> str:
    """A share in [0, 1] in words: with as many decimals as it takes to tell 99.95 % from 100 %."""
    return f"{100 * share:.2f} %"


def _draw_loss(axes: Axes, history: History) -> None:
    steps = thinned([(history.position(step.step), step.loss) for step in history.steps])
    if steps:
        axes.plot(*zip(*steps, strict=True), color=PALETTE[0], linewidth=0.9, alpha=FAINT, label="by step")
    epochs = thinned([(epoch.epoch, epoch.train_loss) for epoch in history.epochs])
    tests = thinned([(epoch.epoch, epoch.test_loss) for epoch in history.epochs])
    _plot_epochs(axes, epochs, PALETTE[0], "training")
    _plot_epochs(axes, tests, PALETTE[1], "test")
    over_epochs(axes, history)
    log_scale(axes, [value for _, value in steps + epochs + tests])
    if epochs and axes.get_yscale() == "log":
        # A few lucky batches are no reason to squeeze all the rest together.
        lowest = [value for _, value in epochs + tests]
        if len(steps) > 1:
            lowest.append(statistics.quantiles([value for _, value in steps], n=20)[0])
        axes.set_ylim(bottom=min(lowest) / 1.5)
    style(axes, "Loss")


def _draw_accuracy(axes: Axes, history: History) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    best = history.best
    assert best is not None  # the panel exists only with a finished epoch
    _plot_epochs(axes, [(epoch.epoch, 100 * epoch.accuracy) for epoch in history.epochs], PALETTE[2], "")
    axes.plot([best.epoch], [100 * best.accuracy], "o", color=PALETTE[2], markersize=8, markerfacecolor="none")
    over_epochs(axes, history)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %" if value <= 100 else ""))
    axes.margins(y=0.1)
    style(axes, "Test accuracy", f"best {percent(best.accuracy)} in epoch {best.epoch}")


def _draw_throughput(axes: Axes, history: History) -> None:
    from matplotlib.ticker import FuncFormatter

    steps = thinned([(history.position(step.step), step.samples_per_second) for step in history.steps])
    if steps:
        axes.plot(*zip(*steps, strict=True), color=PALETTE[6], linewidth=0.9, alpha=FAINT, label="by step")
    _plot_epochs(axes, [(e.epoch, e.samples_per_second) for e in history.epochs], PALETTE[6], "epoch's mean")
    over_epochs(axes, history)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    style(axes, "Throughput (samples/s)", from_zero=True)


def _draw_learning_rate(axes: Axes, history: History) -> None:
    from matplotlib.ticker import FuncFormatter

    rates = {epoch.step: epoch.learning_rate for epoch in history.epochs}
    rates.update({step.step: step.learning_rate for step in history.steps})
    line = thinned([(history.position(step), rate) for step, rate in sorted(rates.items())])
    schedule = history.started.config.get("schedule") if history.started else ""
    axes.plot(*zip(*line, strict=True), color=PALETTE[3], linewidth=2)
    over_epochs(axes, history)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    style(axes, "Learning rate", f"schedule {schedule}" if schedule else "", from_zero=True)


def _draw_gradient_norm(axes: Axes, history: History) -> None:
    line = thinned([(history.position(step.step), step.gradient_norm) for step in history.steps])
    axes.plot(*zip(*line, strict=True), color=PALETTE[4], linewidth=1)
    over_epochs(axes, history)
    log_scale(axes, [value for _, value in line], ratio=100)
    style(axes, "Gradient norm", "L2, whole gradient, before clipping", from_zero=axes.get_yscale() == "linear")


def _draw_ranks(axes: Axes, history: History) -> None:
    """A line per rank; for many ranks the range of all, their median, and the one that was slowest in the end."""
    times = {epoch.epoch: [1e3 * seconds for seconds in epoch.rank_step_seconds] for epoch in history.epochs}
    times = {epoch: ranks for epoch, ranks in times.items() if ranks}
    num_ranks = max(len(ranks) for ranks in times.values())

    def line_of(rank: int) -> list[tuple[float, float]]:
        return [(epoch, ranks[rank]) for epoch, ranks in times.items() if rank < len(ranks)]

    if num_ranks <= MOST_LINES:
        for rank in range(num_ranks):
            _plot_epochs(axes, line_of(rank), PALETTE[rank], f"rank {rank}" if num_ranks <= 4 else f"{rank}")
    else:
        last = list(times.values())[-1]
        slowest = last.index(max(last))
        low, high = ([extreme(ranks) for ranks in times.values()] for extreme in (min, max))
        axes.fill_between(list(times), low, high, color=PALETTE[6], alpha=0.25, linewidth=0, label="all ranks")
        _plot_epochs(axes, [(epoch, statistics.median(ranks)) for epoch, ranks in times.items()], PALETTE[6], "median")
        _plot_epochs(axes, line_of(slowest), PALETTE[1], f"rank {slowest}, slowest at the end")
    over_epochs(axes, history)
    style(axes, "Each rank's own time per step (ms)", from_zero=True)


def _plot_epochs(axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str) -> None:
    """A line through one value per epoch; the values themselves are marked while they are few."""
    if points:
        marker = "o" if len(points) <= 30 else ""
        line = thinned(points)
        axes.plot(
            *zip(*line, strict=True), color=color, linewidth=2, marker=marker, markersize=3.5, label=label or None
        )


@contextmanager
def _settings(ink: str, salt: str) -> Iterator[None]:
    """Make matplotlib draw in our look for the length of the block: text and axes in `ink`, ids made from `salt`."""
    import matplotlib

    settings = {
        "svg.fonttype": "none",  # letters stay letters: small, searchable, in the reader's font
        "svg.hashsalt": salt,
        "font.family": "DejaVu Sans",  # ships with matplotlib; wider than what browsers take, so that all fits
        "font.size": 10,
        "savefig.transparent": True,
        **{f"{what}.color": ink for what in ("text", "xtick", "ytick")},
        **{f"axes.{what}": ink for what in ("edgecolor", "labelcolor", "titlecolor")},
        "grid.color": ink,
    }
    with _drawing, matplotlib.rc_context(settings):
        yield


def _tree(figure: Any) -> ElementTree.Element:
    """`figure` as an SVG tree without what a page has no use for: size, metadata, ids that nothing refers to."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(file.getvalue())
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    # matplotlib's only style rule, moved from "every element of the page" to this picture.
    root.set("style", "stroke-linejoin: round; stroke-linecap: butt")
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
        if parent.tag == f"{{{_SVG}}}g":
            parent.attrib.pop("id", None)
        for name in ("d", "x", "y", "transform"):
            if name in parent.attrib:  # a hundredth of a point is finer than any screen
                parent.set(name, re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", parent.attrib[name]))
    return root


def _serialized(root: ElementTree.Element) -> str:
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    text = ElementTree.tostring(root, encoding="unicode").replace("'DejaVu Sans'", "system-ui, sans-serif")
    return text.replace(INK, "currentColor")


def main() -> None:
    """Draw a history file: `python -m flyte_ddp.observers.plots history.jsonl picture.svg` (or .png, .pdf)."""
    import sys

    from flyte_ddp.observers.tracking import read_history

    history_file, picture = sys.argv[1:]
    save_panels(training_panels(History.of(read_history(history_file))), picture)


if __name__ == "__main__":
    main()
