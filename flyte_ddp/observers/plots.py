"""Figures of a run, drawn from its state. Knows neither torch nor Flyte.

From the command line: `python -m flyte_ddp.observers.plots state.jsonl picture.svg` (or .png, .pdf).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flyte_ddp.events import RunState, read_history
from flyte_ddp.observers.figures import (
    FAINT,
    PALETTE,
    Panel,
    finite,
    log_scale,
    number,
    percent,
    save_panels,
    style,
    thinned,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_REPORTED = 12  # values of a function's reports that are drawn
MAX_LINES = len(PALETTE)  # of ranks, one color each; for more ranks their range is drawn


def training_panels(state: RunState) -> list[Panel]:
    """Return the panels for which there is data so far.

    In this order: loss, accuracy, throughput, learning-rate, gradient-norm, ranks.
    """
    panels = []
    epochs, steps = state.epochs, state.reports
    if epochs or steps:
        summary = "Loss over epochs"
        if epochs:
            summary += f": training {number(epochs[-1].train_loss, '.4g')}, test {number(epochs[-1].test_loss, '.4g')}"
        panels.append(Panel("loss", "Loss", summary, lambda axes: _draw_loss(axes, state)))
    if best := state.best:
        summary = f"Test accuracy over epochs: best {percent(best.accuracy)} in epoch {best.epoch}"
        panels.append(Panel("accuracy", "Test accuracy", summary, lambda axes: _draw_accuracy(axes, state)))
    if epochs or steps:
        latest = epochs[-1] if epochs else None
        rate = latest.samples_per_second if latest else steps[-1].values["samples_per_second"]
        learning_rate = latest.learning_rate if latest else steps[-1].values["learning_rate"]
        panels.append(
            Panel(
                "throughput",
                "Throughput (samples/s)",
                f"Training samples per second over epochs: now {number(rate, ',.0f')}",
                lambda axes: _draw_throughput(axes, state),
            )
        )
        panels.append(
            Panel(
                "learning-rate",
                "Learning rate",
                f"Learning rate over epochs: now {number(learning_rate, '.3g')}",
                lambda axes: _draw_learning_rate(axes, state),
            )
        )
    if steps:
        panels.append(
            Panel(
                "gradient-norm",
                "Gradient norm",
                f"Gradient norm over epochs: now {number(steps[-1].values['gradient_norm'], '.3g')}",
                lambda axes: _draw_gradient_norm(axes, state),
            )
        )
    if any(len(epoch.rank_step_seconds) > 1 for epoch in epochs):
        times = finite(epochs[-1].rank_step_seconds)
        summary = "Compute time per step of each rank over epochs"
        if times:
            summary += f": in the last epoch from {min(times) * 1e3:.3g} to {max(times) * 1e3:.3g} ms"
        panels.append(
            Panel(
                "ranks",
                "Compute time per step of each rank (ms)",
                summary,
                lambda axes: _draw_ranks(axes, state),
            )
        )
    return panels


def report_panels(state: RunState) -> list[Panel]:
    """Return a panel for each value that a function has reported, over its steps."""
    names = list(dict.fromkeys(name for report in state.reports for name in report.values))[:MAX_REPORTED]
    return [_report_panel(name, f"reported-{index}", state) for index, name in enumerate(names)]


def _report_panel(name: str, panel_name: str, state: RunState) -> Panel:
    points = [(report.step, report.values[name]) for report in state.reports if name in report.values]
    title = "".join(letter if letter.isprintable() else " " for letter in name.replace("_", " "))  # XML has no other

    def draw(axes: Axes) -> None:
        shown = thinned(points)
        axes.plot(*zip(*shown, strict=True), color=PALETTE[0], marker="o" if len(shown) == 1 else "")
        axes.set_xlabel("step", loc="right", alpha=0.7, fontsize=9.5, labelpad=1)
        style(axes, title.replace("$", r"\$"))  # no formula

    return Panel(panel_name, title, f"{title} over steps: now {number(points[-1][1], '.4g')}", draw)


def over_epochs(axes: Axes, state: RunState) -> None:
    """Make the x axis count epochs, and mark where the run was resumed from a checkpoint."""
    from matplotlib.ticker import MaxNLocator

    reached = max([epoch.epoch for epoch in state.epochs] + [step.epoch or 0.0 for step in state.reports])
    axes.set_xlim(0, max(1.0, reached) * 1.02)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.set_xlabel("epoch", loc="right", alpha=0.7, fontsize=9.5, labelpad=1)
    if state.resumed_step:
        x = state.position(state.resumed_step)
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


def _draw_loss(axes: Axes, state: RunState) -> None:
    steps = thinned([(step.epoch or 0.0, step.values["loss"]) for step in state.reports])
    if steps:
        axes.plot(*zip(*steps, strict=True), color=PALETTE[0], linewidth=0.9, alpha=FAINT, label="by step")
    epochs = thinned([(epoch.epoch, epoch.train_loss) for epoch in state.epochs])
    tests = thinned([(epoch.epoch, epoch.test_loss) for epoch in state.epochs])
    _plot_epochs(axes, epochs, PALETTE[0], "training")
    _plot_epochs(axes, tests, PALETTE[1], "test")
    over_epochs(axes, state)
    log_scale(axes, [value for _, value in steps + epochs + tests])
    if epochs and axes.get_yscale() == "log":
        # A few very low batch losses must not compress the rest of the curve.
        lowest = [value for _, value in epochs + tests]
        if len(steps) > 1:
            lowest.append(statistics.quantiles([value for _, value in steps], n=20, method="inclusive")[0])
        axes.set_ylim(bottom=min(lowest) / 1.5)
    style(axes, "Loss")


def _draw_accuracy(axes: Axes, state: RunState) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    best = state.best
    assert best is not None  # the panel exists only with a finished epoch
    _plot_epochs(axes, [(epoch.epoch, 100 * epoch.accuracy) for epoch in state.epochs], PALETTE[2], "")
    axes.plot([best.epoch], [100 * best.accuracy], "o", color=PALETTE[2], markersize=8, markerfacecolor="none")
    over_epochs(axes, state)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %" if value <= 100 else ""))
    axes.margins(y=0.1)
    style(axes, "Test accuracy", f"best {percent(best.accuracy)} in epoch {best.epoch}")


def _draw_throughput(axes: Axes, state: RunState) -> None:
    from matplotlib.ticker import FuncFormatter

    steps = thinned([(step.epoch or 0.0, step.values["samples_per_second"]) for step in state.reports])
    if steps:
        axes.plot(*zip(*steps, strict=True), color=PALETTE[6], linewidth=0.9, alpha=FAINT, label="by step")
    _plot_epochs(axes, [(e.epoch, e.samples_per_second) for e in state.epochs], PALETTE[6], "epoch mean")
    over_epochs(axes, state)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
    style(axes, "Throughput (samples/s)", from_zero=True)


def _draw_learning_rate(axes: Axes, state: RunState) -> None:
    from matplotlib.ticker import FuncFormatter

    rates = {epoch.step: epoch.learning_rate for epoch in state.epochs}
    rates.update({step.step: step.values["learning_rate"] for step in state.reports})
    line = thinned([(state.position(step), rate) for step, rate in sorted(rates.items())])
    schedule = state.started.config.get("schedule") if state.started else ""
    axes.plot(*zip(*line, strict=True), color=PALETTE[3], linewidth=2)
    over_epochs(axes, state)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    style(axes, "Learning rate", f"schedule {schedule}" if schedule else "", from_zero=True)


def _draw_gradient_norm(axes: Axes, state: RunState) -> None:
    line = thinned([(step.epoch or 0.0, step.values["gradient_norm"]) for step in state.reports])
    axes.plot(*zip(*line, strict=True), color=PALETTE[4], linewidth=1)
    over_epochs(axes, state)
    log_scale(axes, [value for _, value in line], ratio=100)
    style(axes, "Gradient norm", "L2, whole gradient, before clipping", from_zero=axes.get_yscale() == "linear")


def _draw_ranks(axes: Axes, state: RunState) -> None:
    """Draw a line per rank; for many ranks their range, their median and the rank that is slowest in the last epoch."""
    times = {epoch.epoch: [1e3 * seconds for seconds in epoch.rank_step_seconds] for epoch in state.epochs}
    times = {epoch: ranks for epoch, ranks in times.items() if ranks}
    num_ranks = max(len(ranks) for ranks in times.values())

    def line_of(rank: int) -> list[tuple[float, float]]:
        return [(epoch, ranks[rank]) for epoch, ranks in times.items() if rank < len(ranks)]

    if num_ranks <= MAX_LINES:
        for rank in range(num_ranks):
            _plot_epochs(axes, line_of(rank), PALETTE[rank], f"rank {rank}" if num_ranks <= 4 else f"{rank}")
    else:
        last = list(times.values())[-1]
        slowest = last.index(max(last))
        low, high = ([extreme(ranks) for ranks in times.values()] for extreme in (min, max))
        axes.fill_between(list(times), low, high, color=PALETTE[6], alpha=0.25, linewidth=0, label="all ranks")
        _plot_epochs(axes, [(epoch, statistics.median(ranks)) for epoch, ranks in times.items()], PALETTE[6], "median")
        _plot_epochs(axes, line_of(slowest), PALETTE[1], f"rank {slowest}, now the slowest")
    over_epochs(axes, state)
    style(axes, "Compute time per step of each rank (ms)", from_zero=True)


def _plot_epochs(axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str) -> None:
    """Draw a line through one value per epoch, with a marker for each value while there are few."""
    if points:
        marker = "o" if len(points) <= 30 else ""
        line = thinned(points)
        axes.plot(
            *zip(*line, strict=True), color=color, linewidth=2, marker=marker, markersize=3.5, label=label or None
        )


def main() -> None:
    """Draw the figures of a history file; see the module's docstring."""
    import sys

    history_file, picture = sys.argv[1:]
    save_panels(training_panels(RunState.of(read_history(history_file))), picture)


if __name__ == "__main__":
    main()
