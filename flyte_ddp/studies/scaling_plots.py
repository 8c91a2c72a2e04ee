"""Figures of a scaling study.

From the command line: `python -m flyte_ddp.studies.scaling_plots history.jsonl picture.svg`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from flyte_ddp.observers.figures import FAINT, PALETTE, Panel, log_scale, save_panels, style, thinned
from flyte_ddp.studies.scaling import Row, ScalingRun, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_STYLES = ("-", (0, (4, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)))  # of learning rates


def scaling_panels(study: Study) -> list[Panel]:
    """Return the panels for which there is data; none before the first run has finished."""
    if not study.runs:
        return []
    rows = study.rows()
    ends = ", ".join(f"{run.world_size} ranks {run.epochs[-1].test_loss:.4g}" for run in study.runs)
    panels = [
        Panel("loss-epochs", "Test loss over epochs", f"Test loss after the last epoch: {ends}", _loss(study, False)),
        Panel("loss-time", "Test loss over training time", f"Test loss at the end: {ends}", _loss(study, True)),
    ]
    for name, title, value, ideal, note in (
        ("speed-up", "Speed-up", lambda row: row.speed_up, _ideal_speed_up, ""),
        ("efficiency", "Efficiency (%)", lambda row: 100 * row.efficiency, lambda rows, size: 100.0, ""),
        ("throughput", "Samples per second", lambda row: row.samples_per_second, None, ""),
        (
            "target",
            f"Seconds to test loss {study.target_loss:.4g}",
            lambda row: row.seconds_to_target,
            None,
            "of training, without evaluation",
        ),
    ):
        if any(value(row) is not None for row in rows):
            panels.append(_by_size(name, title, rows, value, ideal, note))
    if any(row.wait_share for row in rows):
        shares = ", ".join(f"{row.world_size} ranks {100 * row.wait_share:.0f} %" for row in _one_rate(rows))
        panels.append(
            Panel(
                "communication",
                "Communication (% of a step)",
                f"Share of a step spent waiting for gradients: {shares}",
                lambda axes: _draw_communication(axes, _one_rate(rows)),
            )
        )
    return panels


def _loss(study: Study, over_time: bool) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        from matplotlib.ticker import MaxNLocator

        sizes, rates = _distinct(study.runs)
        values: list[float] = []
        for run in study.runs:
            seconds = itertools.accumulate(epoch.seconds for epoch in run.epochs)
            places = list(seconds) if over_time else [float(epoch.epoch) for epoch in run.epochs]
            line = thinned(list(zip(places, (epoch.test_loss for epoch in run.epochs), strict=True)))
            first_rate = run.learning_rate == rates[0]
            axes.plot(
                *zip(*line, strict=True),
                color=PALETTE[sizes.index(run.world_size) % len(PALETTE)],
                linestyle=LINE_STYLES[rates.index(run.learning_rate) % len(LINE_STYLES)],
                # Equal global batches give almost equal lines: later ones are thinner, so earlier ones stay visible.
                linewidth=4 - 2.4 * sizes.index(run.world_size) / max(1, len(sizes) - 1),
                marker="o" if len(line) <= 30 else "",
                markersize=3.5,
                label=ranks(run.world_size) if first_rate else None,
            )
            values += [value for _, value in line]
        for index, rate in enumerate(rates if len(rates) > 1 else ()):
            line_style = LINE_STYLES[index % len(LINE_STYLES)]
            axes.plot([], [], color=axes.title.get_color(), linestyle=line_style, label=f"rate {rate:g}")
        if not over_time:
            axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
        axes.set_xlabel("seconds" if over_time else "epoch", loc="right", alpha=0.7, fontsize=9.5, labelpad=1)
        log_scale(axes, values)
        style(axes, "Test loss over training time" if over_time else "Test loss over epochs")

    return draw


def _by_size(
    name: str,
    title: str,
    rows: Sequence[Row],
    value: Callable[[Row], float | None],
    ideal: Callable[[Sequence[Row], int], float] | None,
    note: str,
) -> Panel:
    """Return a panel with a line per learning rate over world sizes."""
    values = ", ".join(f"{ranks(row.world_size)} {found:,.4g}" for row in rows if (found := value(row)) is not None)

    def draw(axes: Axes) -> None:
        from matplotlib.ticker import FuncFormatter

        rates = sorted({row.learning_rate for row in rows})
        for index, rate in enumerate(rates):
            points = [
                (row.world_size, found)
                for row in rows
                if row.learning_rate == rate and (found := value(row)) is not None
            ]
            if points:
                axes.plot(
                    *zip(*sorted(points), strict=True),
                    "-o",
                    color=PALETTE[index % len(PALETTE)],
                    linewidth=2,
                    markersize=6,
                    label="measured" if len(rates) == 1 else f"rate {rate:g}",
                )
        sizes = sorted({row.world_size for row in rows})
        if ideal:
            axes.plot(
                sizes,
                [ideal(rows, size) for size in sizes],
                color=axes.title.get_color(),
                alpha=FAINT,
                linewidth=1,
                linestyle=(0, (1, 2)),
                label="ideal",
            )
        _size_axis(axes, sizes)
        if name == "speed-up":  # with two equal axes the ideal is a straight line, and small sizes stay visible
            axes.set_yscale("log", base=2)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda found, _: f"{found:,.0f}" if found >= 10 else f"{found:g}"))
        style(axes, title, note, from_zero=name != "speed-up")

    return Panel(name, title, f"{title} by world size: {values}", draw)


def _draw_communication(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a bar per world size: the waiting time, and on top of it what the backward pass hides."""
    for index, row in enumerate(rows):
        wait, overlap = 100 * row.wait_share, 100 * row.overlap_share
        is_first = index == 0
        axes.bar(index, wait, 0.6, color=PALETTE[1], label="waiting" if is_first else None)
        axes.bar(
            *(index, overlap, 0.6, wait),
            color=PALETTE[0],
            alpha=FAINT,
            linewidth=0,
            label="hidden by backward" if is_first else None,
        )
    axes.set_xticks(range(len(rows)), [str(row.world_size) for row in rows])
    axes.set_xlabel("ranks", loc="right", alpha=0.7, fontsize=9.5, labelpad=1)
    style(axes, "Communication (% of a step)", from_zero=True)


def _size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("ranks", loc="right", alpha=0.7, fontsize=9.5, labelpad=1)


def _ideal_speed_up(rows: Sequence[Row], world_size: int) -> float:
    return world_size / min(row.world_size for row in rows)


def _one_rate(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of one learning rate by world size. Communication does not depend on the learning rate."""
    return sorted((row for row in rows if row.learning_rate == rows[0].learning_rate), key=lambda row: row.world_size)


def _distinct(runs: Sequence[ScalingRun]) -> tuple[list[int], list[float]]:
    return sorted({run.world_size for run in runs}), sorted({run.learning_rate for run in runs})


def ranks(world_size: int) -> str:
    """Format a number of ranks."""
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


def main() -> None:
    """Draw the figures of a study's history; see the module's docstring."""
    import sys

    from flyte_ddp.events import Event, RunStarted, read_history

    history_file, picture = sys.argv[1:]
    runs: list[list[Event]] = []
    for event in read_history(history_file):
        if isinstance(event, RunStarted):
            runs.append([])
        runs[-1].append(event)
    finished = [run for events in runs if (run := ScalingRun.of(events))]
    save_panels(scaling_panels(Study(finished)), picture)


if __name__ == "__main__":
    main()
