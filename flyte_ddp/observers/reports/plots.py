"""The panels of a run, drawn from its state. Knows neither torch nor Flyte.

From the command line: `python -m flyte_ddp.observers.reports.plots history.jsonl picture.svg` (or .png, .pdf). Names of
panels may follow, such as `ranks`; by default all are drawn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

from flyte_ddp.events import RunState, read_history
from flyte_ddp.observers.reports.drawing import (
    FAINT,
    PALETTE,
    Panel,
    Points,
    format_figure,
    format_tick,
    label_x,
    log_scale,
    plot,
    save_panels,
    thin,
)
from flyte_ddp.observers.reports.predictions import prediction_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KNOWN = ("loss", "samples_per_second", "learning_rate", "gradient_norm")  # reported values with a panel of their own
MAX_REPORTED = 12  # other values that are drawn
MAX_METRICS = 4  # of the held-out data
MAX_LINES = len(PALETTE)  # of ranks, one color each; for more ranks their range is drawn


def run_panels(state: RunState) -> list[Panel]:
    """Return the panels for which there are data so far.

    In this order: loss, the metrics, throughput, learning-rate, gradient-norm, ranks, and each other reported value.
    """
    return _Curves(state).panels()


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

    def panels(self) -> list[Panel]:
        epochs, panels = self.state.epochs, []
        if epochs:
            losses = f"training {epochs[-1].train_loss:.4g}, test {epochs[-1].test_loss:.4g}"
            panels.append(self._panel("loss", "Loss", losses, self._draw_loss))
        elif "loss" in self.reported:
            panels.append(self._panel("loss", "Loss", self._now("loss", ".4g"), self._draw_loss))
        names = list(epochs[-1].metrics)[:MAX_METRICS] if epochs else []
        panels += [self._metric_panel(name, f"metric-{index}") for index, name in enumerate(names)]
        if epochs or "samples_per_second" in self.reported:
            found = self._now("samples_per_second", ",.0f")
            title, spoken = "Throughput (samples/s)", "Training samples per second"
            panels.append(self._panel("throughput", title, found, self._draw_throughput, spoken=spoken, from_zero=True))
        if epochs or "learning_rate" in self.reported:
            found, draw = self._now("learning_rate", ".3g"), self._draw_learning_rate
            schedule = self.state.started.config.get("schedule") if self.state.started else ""
            note = f"schedule {schedule}" if schedule else ""
            panels.append(self._panel("learning-rate", "Learning rate", found, draw, note, from_zero=True))
        if "gradient_norm" in self.reported:
            found, draw = self._now("gradient_norm", ".3g"), self._draw_gradient_norm
            note = "L2, whole gradient, before clipping"
            panels.append(self._panel("gradient-norm", "Gradient norm", found, draw, note, from_zero=True))
        if any(len(epoch.rank_step_seconds) > 1 for epoch in epochs):
            spoken, times = "Compute time per step of each rank", epochs[-1].rank_step_seconds
            known = [1e3 * seconds for seconds in times if math.isfinite(seconds)]
            found = f"in the last epoch from {min(known):.3g} to {max(known):.3g} ms" if known else ""
            title = f"{spoken} (ms)"
            panels.append(self._panel("ranks", title, found, self._draw_ranks, spoken=spoken, from_zero=True))
        panels += prediction_panels(self.state.predictions.predictions if self.state.predictions else [])
        others = [name for name in self.reported if name not in KNOWN][:MAX_REPORTED]
        return panels + [self._other_panel(name, f"reported-{index}") for index, name in enumerate(others)]

    def _panel(
        self,
        name: str,
        title: str,
        found: str,
        draw: Callable[[Axes], object],
        subtitle: str = "",
        spoken: str = "",
        from_zero: bool = False,
    ) -> Panel:
        """Return a panel over epochs or steps, whose summary has `spoken`, or else the title, and what was `found`."""

        def draw_curves(axes: Axes) -> None:
            draw(axes)
            self._set_x(axes)

        summary = f"{spoken or title} over {self.axis}s" + (f": {found}" if found else "")
        return Panel(name, title, summary, draw_curves, subtitle, from_zero)

    def _now(self, name: str, form: str) -> str:
        """Format the newest value, as it was reported, or else of the last epoch."""
        now = self.reported[name][-1][1] if name in self.reported else getattr(self.state.epochs[-1], name)
        return f"now {now:{form}}"

    def _other_panel(self, name: str, panel_name: str) -> Panel:
        title, points = name.replace("_", " "), self.reported[name]
        marker = "o" if len(thin(points)) == 1 else ""
        return self._panel(
            panel_name, title, self._now(name, ".4g"), lambda axes: plot(axes, points, color=PALETTE[0], marker=marker)
        )

    def _set_x(self, axes: Axes) -> None:
        """Label the x axis, and mark where the run was resumed from a checkpoint."""
        from matplotlib.ticker import MaxNLocator

        state = self.state
        reached = max(
            [0.0, *(epoch.epoch for epoch in state.epochs), *(line[-1][0] for line in self.reported.values())]
        )
        label_x(axes, self.axis)
        axes.set_xlim(0, max(1.0, reached) * 1.02)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        x = state.position(state.resumed_step) if self.axis == "epoch" else state.resumed_step
        if not x:
            return
        axes.axvline(x, color=axes.title.get_color(), alpha=0.35, linewidth=1, linestyle=(0, (3, 3)))
        is_left = x < 0.8 * reached
        axes.annotate(
            "resumed",
            (x, 1),
            xycoords=("data", "axes fraction"),
            xytext=(3 if is_left else -3, -1),
            textcoords="offset points",
            ha="left" if is_left else "right",
            va="top",
            fontsize=8.5,
            alpha=0.7,
        )

    def _plot_steps(self, axes: Axes, name: str, color: str) -> Points:
        """Draw a faint line through the reported values, and return its points."""
        return plot(axes, self.reported.get(name, []), color=color, linewidth=0.9, alpha=FAINT, label="by step")

    def _draw_loss(self, axes: Axes) -> None:
        steps = self._plot_steps(axes, "loss", PALETTE[0])
        epochs = _plot_epochs(axes, [(each.epoch, each.train_loss) for each in self.state.epochs], 0, "training")
        tests = _plot_epochs(axes, [(each.epoch, each.test_loss) for each in self.state.epochs], 1, "test")
        if tests and (best := self.state.best) and self.state.monitor.metric == "test_loss":
            _circle(axes, best.epoch, best.test_loss, 1)
        log_scale(axes, [value for _, value in [*steps, *epochs, *tests]])
        if epochs and axes.get_yscale() == "log":
            # A few very low batch losses must not compress the rest of the curve.
            lowest = [value for _, value in [*epochs, *tests]]
            if len(steps) > 1:
                lowest.append(statistics.quantiles([value for _, value in steps], n=20, method="inclusive")[0])
            axes.set_ylim(bottom=min(lowest) / 1.5)

    def _metric_panel(self, name: str, panel_name: str) -> Panel:
        """Return the panel of a metric, with a ring around the best epoch if the metric decides it."""
        points = [(epoch.epoch, epoch.metrics[name]) for epoch in self.state.epochs if name in epoch.metrics]
        best, is_share = self.state.best, name == "accuracy"
        found = f"now {format_figure(name, points[-1][1])}"
        if best is not None and name == self.state.monitor.metric:
            found = f"best {format_figure(name, best.metrics[name])} in epoch {best.epoch}"

        def draw(axes: Axes) -> None:
            from matplotlib.ticker import MaxNLocator  # here: without it a report has no plots, and its tables

            scale = 100 if is_share else 1
            _plot_epochs(axes, [(epoch, scale * value) for epoch, value in points], 2, "")
            if best is not None and name == self.state.monitor.metric:
                _circle(axes, best.epoch, scale * best.metrics[name], 2)
            axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
            if is_share:
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %" if value <= 100 else "")
            axes.margins(y=0.1)

        return self._panel(panel_name, f"Test {name.replace('_', ' ')}", found, draw, found)

    def _draw_throughput(self, axes: Axes) -> None:
        self._plot_steps(axes, "samples_per_second", PALETTE[6])
        _plot_epochs(axes, [(each.epoch, each.samples_per_second) for each in self.state.epochs], 6, "epoch mean")
        axes.yaxis.set_major_formatter(format_tick)

    def _draw_learning_rate(self, axes: Axes) -> None:
        rates = {float(epoch.epoch): epoch.learning_rate for epoch in self.state.epochs}
        rates.update(self.reported.get("learning_rate", []))
        plot(axes, sorted(rates.items()), color=PALETTE[3], linewidth=2)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")

    def _draw_gradient_norm(self, axes: Axes) -> None:
        drawn = plot(axes, self.reported["gradient_norm"], color=PALETTE[4], linewidth=1)
        log_scale(axes, [value for _, value in drawn], ratio=100)

    def _draw_ranks(self, axes: Axes) -> None:
        """Draw a line per rank; for many ranks their range, their median and the last epoch's slowest rank."""
        times = {epoch.epoch: [1e3 * seconds for seconds in epoch.rank_step_seconds] for epoch in self.state.epochs}
        times = {epoch: ranks for epoch, ranks in times.items() if ranks}
        num_ranks = max(len(ranks) for ranks in times.values())
        slow = self.state.stragglers[-1].stragglers if self.state.stragglers else []
        notes = {each.rank: f", slow in {each.phase}" for each in slow}

        def plot_rank(rank: int, color: int, label: str) -> None:
            line = [(epoch, ranks[rank]) for epoch, ranks in times.items() if rank < len(ranks)]
            _plot_epochs(axes, line, color, label)

        if num_ranks <= MAX_LINES:
            for rank in range(num_ranks):
                plot_rank(rank, rank, (f"rank {rank}" if num_ranks <= 4 else f"{rank}") + notes.get(rank, ""))
        else:
            last = list(times.values())[-1]
            slowest = last.index(max(last))
            low, high = ([extreme(ranks) for ranks in times.values()] for extreme in (min, max))
            axes.fill_between(list(times), low, high, color=PALETTE[6], alpha=0.25, linewidth=0, label="all ranks")
            _plot_epochs(axes, [(epoch, statistics.median(ranks)) for epoch, ranks in times.items()], 6, "median")
            plot_rank(slowest, 1, f"rank {slowest}, now the slowest")


def _plot_epochs(axes: Axes, points: Points, color: int, label: str) -> Points:
    """Draw a line in color number `color` through a value per epoch, with markers while few, and return its points."""
    marker = "o" if len(points) <= 30 else ""
    return plot(axes, points, color=PALETTE[color], linewidth=2, marker=marker, markersize=3.5, label=label or None)


def _circle(axes: Axes, epoch: int, value: float, color: int) -> None:
    axes.plot([epoch], [value], "o", color=PALETTE[color], markersize=8, markerfacecolor="none")


def main() -> None:
    import sys

    history_file, picture, *names = sys.argv[1:]
    panels = {each.name: each for each in run_panels(RunState.of(read_history(history_file)))}
    save_panels([panels[name] for name in names or panels], picture)


if __name__ == "__main__":
    main()
