"""The panels of a run, drawn from its state. Knows neither torch nor Flyte.

From the command line: `python -m flyte_ddp.observers.reports.plots history.jsonl picture.svg` (or .png, .pdf).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyte_ddp.events import RunState, read_history
from flyte_ddp.observers.reports.drawing import (
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

KNOWN = ("loss", "samples_per_second", "learning_rate", "gradient_norm")  # reported values with a panel of their own
MAX_REPORTED = 12  # other values that are drawn
MAX_LINES = len(PALETTE)  # of ranks, one color each; for more ranks their range is drawn

Points = list[tuple[float, float]]


def run_panels(state: RunState) -> list[Panel]:
    """Return the panels for which there are data so far.

    In this order: loss, accuracy, throughput, learning-rate, gradient-norm, ranks, and each other reported value.
    """
    return _Curves.of(state).panels()


@dataclass(frozen=True)
class _Curves:
    """A run's curves. Their x axis counts epochs if the program does, and steps otherwise."""

    state: RunState
    axis: str  # "epoch" or "step"
    reported: dict[str, Points]  # by name

    @classmethod
    def of(cls, state: RunState) -> _Curves:
        by_epoch = bool(state.epochs) or all(report.epoch is not None for report in state.reports)
        reported: dict[str, Points] = {}
        for report in state.reports:
            x = report.epoch if by_epoch else report.step
            if x is not None:
                for name, value in report.values.items():
                    reported.setdefault(name, []).append((x, value))
        return cls(state, "epoch" if by_epoch else "step", reported)

    def panels(self) -> list[Panel]:
        epochs, panels = self.state.epochs, []
        if epochs:
            last = epochs[-1]
            losses = f"training {number(last.train_loss, '.4g')}, test {number(last.test_loss, '.4g')}"
            panels.append(Panel("loss", "Loss", self._summary("Loss", losses), self._draw_loss))
        elif "loss" in self.reported:
            panels.append(Panel("loss", "Loss", self._now("Loss", "loss", ".4g"), self._draw_loss))
        if best := self.state.best:
            accuracy = self._summary("Test accuracy", f"best {percent(best.accuracy)} in epoch {best.epoch}")
            panels.append(Panel("accuracy", "Test accuracy", accuracy, self._draw_accuracy))
        if epochs or "samples_per_second" in self.reported:
            rate = self._now("Training samples per second", "samples_per_second", ",.0f")
            panels.append(Panel("throughput", "Throughput (samples/s)", rate, self._draw_throughput))
        if epochs or "learning_rate" in self.reported:
            rate = self._now("Learning rate", "learning_rate", ".3g")
            panels.append(Panel("learning-rate", "Learning rate", rate, self._draw_learning_rate))
        if "gradient_norm" in self.reported:
            norm = self._now("Gradient norm", "gradient_norm", ".3g")
            panels.append(Panel("gradient-norm", "Gradient norm", norm, self._draw_gradient_norm))
        if any(len(epoch.rank_step_seconds) > 1 for epoch in epochs):
            title, times = "Compute time per step of each rank", finite(epochs[-1].rank_step_seconds)
            spread = f"in the last epoch from {min(times) * 1e3:.3g} to {max(times) * 1e3:.3g} ms" if times else ""
            panels.append(Panel("ranks", f"{title} (ms)", self._summary(title, spread), self._draw_ranks))
        others = [name for name in self.reported if name not in KNOWN][:MAX_REPORTED]
        return panels + [self._other_panel(name, f"reported-{index}") for index, name in enumerate(others)]

    def _summary(self, title: str, value: str) -> str:
        return f"{title} over {self.axis}s" + (f": {value}" if value else "")

    def _now(self, title: str, name: str, form: str) -> str:
        """Return the summary with the newest value, as it was reported, or else of the last epoch."""
        now = self.reported[name][-1][1] if name in self.reported else getattr(self.state.epochs[-1], name)
        return self._summary(title, f"now {number(now, form)}")

    def _other_panel(self, name: str, panel_name: str) -> Panel:
        title = "".join(each if each.isprintable() else " " for each in name.replace("_", " "))  # XML has no others
        points = self.reported[name]

        def draw(axes: Axes) -> None:
            shown = thinned(points)
            if shown:
                axes.plot(*zip(*shown, strict=True), color=PALETTE[0], marker="o" if len(shown) == 1 else "")
            self._set_x(axes)
            style(axes, title.replace("$", r"\$"))  # no formula

        return Panel(panel_name, title, self._summary(title, f"now {number(points[-1][1], '.4g')}"), draw)

    def _set_x(self, axes: Axes) -> None:
        """Label the x axis, and mark where the run was resumed from a checkpoint."""
        from matplotlib.ticker import MaxNLocator

        state = self.state
        reached = max(
            [0.0, *(epoch.epoch for epoch in state.epochs), *(line[-1][0] for line in self.reported.values())]
        )
        axes.set_xlabel(self.axis, loc="right", alpha=0.7, fontsize=9.5, labelpad=1)
        axes.set_xlim(0, max(1.0, reached) * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        x = state.position(state.resumed_step) if self.axis == "epoch" else state.resumed_step
        if not x:
            return
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

    def _plot_steps(self, axes: Axes, name: str, color: str) -> Points:
        """Draw a faint line through the reported values, and return its points."""
        points = thinned(self.reported.get(name, []))
        if points:
            axes.plot(*zip(*points, strict=True), color=color, linewidth=0.9, alpha=FAINT, label="by step")
        return points

    def _draw_loss(self, axes: Axes) -> None:
        steps = self._plot_steps(axes, "loss", PALETTE[0])
        epochs = thinned([(epoch.epoch, epoch.train_loss) for epoch in self.state.epochs])
        tests = thinned([(epoch.epoch, epoch.test_loss) for epoch in self.state.epochs])
        _plot_epochs(axes, epochs, PALETTE[0], "training")
        _plot_epochs(axes, tests, PALETTE[1], "test")
        self._set_x(axes)
        log_scale(axes, [value for _, value in steps + epochs + tests])
        if epochs and axes.get_yscale() == "log":
            # A few very low batch losses must not compress the rest of the curve.
            lowest = [value for _, value in epochs + tests]
            if len(steps) > 1:
                lowest.append(statistics.quantiles([value for _, value in steps], n=20, method="inclusive")[0])
            axes.set_ylim(bottom=min(lowest) / 1.5)
        style(axes, "Loss")

    def _draw_accuracy(self, axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter, MaxNLocator

        best = self.state.best
        assert best is not None  # the panel exists only with a finished epoch
        _plot_epochs(axes, [(epoch.epoch, 100 * epoch.accuracy) for epoch in self.state.epochs], PALETTE[2], "")
        axes.plot([best.epoch], [100 * best.accuracy], "o", color=PALETTE[2], markersize=8, markerfacecolor="none")
        self._set_x(axes)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} %" if value <= 100 else ""))
        axes.margins(y=0.1)
        style(axes, "Test accuracy", f"best {percent(best.accuracy)} in epoch {best.epoch}")

    def _draw_throughput(self, axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter

        self._plot_steps(axes, "samples_per_second", PALETTE[6])
        _plot_epochs(axes, [(e.epoch, e.samples_per_second) for e in self.state.epochs], PALETTE[6], "epoch mean")
        self._set_x(axes)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}"))
        style(axes, "Throughput (samples/s)", from_zero=True)

    def _draw_learning_rate(self, axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter

        rates = {float(epoch.epoch): epoch.learning_rate for epoch in self.state.epochs}
        line = thinned(sorted({**rates, **dict(self.reported.get("learning_rate", []))}.items()))
        schedule = self.state.started.config.get("schedule") if self.state.started else ""
        if line:
            axes.plot(*zip(*line, strict=True), color=PALETTE[3], linewidth=2)
        self._set_x(axes)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
        style(axes, "Learning rate", f"schedule {schedule}" if schedule else "", from_zero=True)

    def _draw_gradient_norm(self, axes: Axes) -> None:
        line = thinned(self.reported["gradient_norm"])
        if line:
            axes.plot(*zip(*line, strict=True), color=PALETTE[4], linewidth=1)
        self._set_x(axes)
        log_scale(axes, [value for _, value in line], ratio=100)
        style(axes, "Gradient norm", "L2, whole gradient, before clipping", from_zero=axes.get_yscale() == "linear")

    def _draw_ranks(self, axes: Axes) -> None:
        """Draw a line per rank; for many ranks their range, their median and the last epoch's slowest rank."""
        times = {epoch.epoch: [1e3 * seconds for seconds in epoch.rank_step_seconds] for epoch in self.state.epochs}
        times = {epoch: ranks for epoch, ranks in times.items() if ranks}
        num_ranks = max(len(ranks) for ranks in times.values())

        def line_of(rank: int) -> Points:
            return [(epoch, ranks[rank]) for epoch, ranks in times.items() if rank < len(ranks)]

        if num_ranks <= MAX_LINES:
            for rank in range(num_ranks):
                _plot_epochs(axes, line_of(rank), PALETTE[rank], f"rank {rank}" if num_ranks <= 4 else f"{rank}")
        else:
            last = list(times.values())[-1]
            slowest = last.index(max(last))
            low, high = ([extreme(ranks) for ranks in times.values()] for extreme in (min, max))
            axes.fill_between(list(times), low, high, color=PALETTE[6], alpha=0.25, linewidth=0, label="all ranks")
            medians = [(epoch, statistics.median(ranks)) for epoch, ranks in times.items()]
            _plot_epochs(axes, medians, PALETTE[6], "median")
            _plot_epochs(axes, line_of(slowest), PALETTE[1], f"rank {slowest}, now the slowest")
        self._set_x(axes)
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
    """Draw the panels of a history file; see the module's docstring."""
    import sys

    history_file, picture = sys.argv[1:]
    save_panels(run_panels(RunState.of(read_history(history_file))), picture)


if __name__ == "__main__":
    main()
