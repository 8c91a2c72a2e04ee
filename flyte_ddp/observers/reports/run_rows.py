"""The tiles and the sections of the report of a run, as tables: `TILES` and `SECTIONS`.

A section without rows is not shown, and a row without a value is not shown.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import RunFinished, RunStarted, RunState, TimeSpent
from flyte_ddp.observers.formats import (
    duration,
    format_count,
    format_figure,
    format_rounded,
    format_value,
    percent,
    title_of,
)
from flyte_ddp.observers.reports.page import Row, Section, Tile
from flyte_ddp.storage.recorded_config import flatten

MAX_ROWS = 100  # layers in the table
MAX_CHANGES = 20  # changes of the slow ranks in the table
MAX_TILES = 6  # reported values with a tile
SPEED = "samples_per_second"


@dataclass(frozen=True)
class RunView:
    """A run at the moment at which its page is made."""

    state: RunState
    started: RunStarted
    spent: TimeSpent
    cost: Mapping[str, float]  # see `RunState.cost`
    seconds: float  # since the launch
    seconds_left: float | None  # until the last step; None where it is not known
    outputs: Mapping[str, str]  # URLs by their names

    @property
    def percent_done(self) -> int:
        if self.state.finished or not self.started.num_steps:
            return 100 * bool(self.state.finished)
        return min(100, 100 * self.state.last_step // self.started.num_steps)

    @property
    def num_epochs(self) -> Any:
        """The epochs of the whole run; None where the program has none."""
        return self.started.config.get("epochs")

    @property
    def finished(self) -> RunFinished:
        """The end of the run; without figures before it is there."""
        return self.state.finished or RunFinished(step=0, seconds=0.0)

    @property
    def model_size(self) -> str:
        size = f"{self.started.num_parameters:,} parameters"
        num_left_out = len(self.started.layers) - MAX_ROWS
        if num_left_out > 0:
            size += f"; {num_left_out} layers more"
        return size

    @functools.cached_property
    def latest(self) -> dict[str, float]:
        """The newest value of each name that a rank has reported."""
        latest: dict[str, float] = {}
        for report in self.state.reports:
            latest |= report.values
        for name in itertools.chain(*self.state.rank_values.values()):  # some may be theirs alone
            latest.setdefault(name, statistics.fmean(self.values_of_others(name)))
        return latest

    def values_of_others(self, name: str) -> list[float]:
        """Return what the other ranks have reported last under this name."""
        return [values[name] for values in self.state.rank_values.values() if name in values]

    @property
    def speed(self) -> tuple[float, str]:
        """The samples per second, 0 where they are not known, and the time of the measurement."""
        if self.state.epochs:
            return self.state.epochs[-1].samples_per_second, "in the last epoch"
        return self.latest.get(SPEED, 0.0), "now"

    @property
    def num_tokens(self) -> float:
        """The tokens seen up to the last evaluation; 0 where they are not known."""
        if not self.state.epochs:
            return 0.0
        return self.state.epochs[-1].metrics.get("tokens_seen", 0.0)


def make_tiles(run: RunView) -> list[Tile]:
    """Return the figures at the top of the page."""
    tiles = [make(run) for is_shown, make in TILES.values() if is_shown(run)]
    if not run.state.epochs:
        tiles += _reported_tiles(run)
    return tiles


def make_sections(run: RunView) -> list[Section]:
    """Return the sections that have rows."""
    sections = []
    for title, (make_rows, note, has_long_values) in SECTIONS.items():
        rows = make_rows(run)
        if rows:
            sections.append(Section(title, rows, note.format(run=run), has_long_values))
    return sections


def _best_tile(run: RunView) -> Tile:
    best, metric = run.state.best, run.state.monitor.metric
    assert best is not None
    value = format_figure(metric, best.figures().values.get(metric, math.nan))
    return Tile(f"Best {metric}".replace("_", " "), value, f"in epoch {best.position:.3g}")


def _step_tile(run: RunView) -> Tile:
    epoch, note = run.state.reports[-1].epoch, ""
    if epoch is not None:
        note = f"epoch {epoch:g}"
    return Tile("Step", f"{run.state.last_step:,}", note)


def _wall_time_tile(run: RunView) -> Tile:
    note = "since the launch"
    if run.state.resumed_step:
        note += ", this attempt"
    return Tile("Wall time", duration(run.seconds), note)


def _time_left_tile(run: RunView) -> Tile:
    left = run.seconds_left or 0.0
    end = datetime.datetime.fromtimestamp(time.time() + left, datetime.timezone.utc)
    return Tile("Time left", duration(left), f"until about {end:%H:%M} UTC")


def _ranks_tile(run: RunView) -> Tile:
    device = run.started.device
    if device == "cpu":
        device = f"CPU, {format_count(run.started.num_threads, 'thread')} each"
    return Tile("Ranks", f"{run.started.world_size}", device)


def _device_hours_tile(run: RunView) -> Tile:
    name, num_devices = "GPU-hours", run.started.world_size
    if run.started.device == "cpu":
        name = "Core-hours"
        num_devices *= run.started.num_threads
    hours = num_devices * run.seconds / 3600
    return Tile(name, f"{hours:,.3g}", f"{num_devices} x wall time")


# The tiles by name: the condition, and the function that makes the tile.
TILES: dict[str, tuple[Callable[[RunView], object], Callable[[RunView], Tile]]] = {
    "best": (lambda run: run.state.best, _best_tile),
    "epochs": (
        lambda run: run.num_epochs,
        lambda run: Tile(
            "Epochs",
            f"{run.state.num_epochs} / {run.num_epochs}",
            f"{run.percent_done} % of {run.started.num_steps:,} steps",
        ),
    ),
    "step": (lambda run: run.state.reports and not run.num_epochs, _step_tile),
    "speed": (
        lambda run: run.speed[0],
        lambda run: Tile("Samples/s", format_rounded(run.speed[0]), run.speed[1]),
    ),
    "tokens": (
        lambda run: run.num_tokens,
        lambda run: Tile("Tokens seen", format_rounded(run.num_tokens), "padding included"),
    ),
    "wall time": (lambda run: True, _wall_time_tile),
    "time left": (lambda run: run.seconds_left is not None, _time_left_tile),
    "goodput": (
        lambda run: run.spent.wall and (run.started.num_steps or run.spent.goodput),
        lambda run: Tile(
            "Goodput", percent(run.spent.goodput), "of the wall time: stepping and evaluating"
        ),
    ),
    "ranks": (lambda run: run.started.device, _ranks_tile),
    "device hours": (lambda run: run.started.device, _device_hours_tile),
}


def _reported_tiles(run: RunView) -> list[Tile]:
    tiles = []
    for name, value in list(run.latest.items())[:MAX_TILES]:
        others, note = run.values_of_others(name), "last reported"
        if others:
            note = f"other ranks: {format_figure(name, statistics.fmean(others))}"
        if len(others) > 1:
            note += f", {format_figure(name, min(others))} to {format_figure(name, max(others))}"
        if name != SPEED:
            tiles.append(Tile(title_of(name), format_figure(name, value), note))
    return tiles


def _output_rows(run: RunView) -> list[Row]:
    finished, written = run.finished, run.state.checkpoint
    rows = [
        *itertools.starmap(Row, run.outputs.items()),
        Row("Model state", finished.model_state_url, f"of epoch {finished.model_state_epoch}"),
        Row("Newest checkpoint", written and written.url),
    ]
    return [row for row in rows if row.value]


def _environment_rows(run: RunView) -> list[Row]:
    state, started, finished = run.state, run.started, run.finished
    peaks = finished.rank_peak_memory_bytes or [finished.peak_memory_bytes]
    peak_memory = ", ".join(f"{each / 2**20:,.0f} MiB" for each in peaks if each)
    sizes = ", ".join(f"{each:,}" for each in finished.rank_num_parameters)
    first_step, version = finished.first_step_seconds, started.recipe_version[:12]
    num_restarts = state.num_starts - 1 - state.num_announced_losses
    rows = [
        Row("Ranks", started.world_size),
        Row("Nodes", started.num_nodes),
        Row("Device of each", started.device),
        Row("Backend", started.backend),
        Row("CPU threads per rank", started.num_threads),
        Row("Commit", started.commit),
        Row("Image", started.image),
        Row("Arguments", started.arguments),
        Row("Version of the code", version, "the program's and the library's"),
        *itertools.starmap(Row, started.versions.items()),
        Row("Peak memory per rank", peak_memory),
        Row("Parameters per rank", sizes),
        Row("Launch to first step", first_step and duration(first_step)),
        Row(
            "Steps between states in memory", finished.memory_interval, "a lost rank costs no more"
        ),
        Row("Restarts of the gang", num_restarts, "in this attempt"),
        Row("Announced losses", state.num_announced_losses, f"in this attempt; {state.departure}"),
    ]
    return [row for row in rows if row.value]


def _data_rows(run: RunView) -> list[Row]:
    started = run.started
    if not started.data:
        return []
    return [
        Row("Data", started.data),
        Row("Training samples", f"{started.num_train_samples:,}"),
        Row("Held-out samples", f"{started.num_test_samples:,}"),
    ]


def _time_rows(run: RunView) -> list[Row]:
    rows = []
    for name, seconds in run.spent.parts().items():
        title = name.replace("_", " ").capitalize()
        if name == "program":  # whatever a function or a script has done and not reported
            title = "The program"
        if seconds:
            rows.append(Row(title, duration(seconds), percent(seconds / run.spent.wall)))
    return rows


def _cost_rows(run: RunView) -> list[Row]:
    return [
        Row(title_of(name), f"{cost:,.2f}", percent(cost / run.cost["total"]))
        for name, cost in run.cost.items()
    ]


def _straggler_rows(run: RunView) -> list[Row]:
    none = "no rank is slower than the others any more"
    return [
        Row(f"Step {found.step:,}", "; ".join(map(str, found.stragglers)) or none)
        for found in reversed(run.state.stragglers[-MAX_CHANGES:])
    ]


def _layer_rows(run: RunView) -> list[Row]:
    rows = []
    for layer in run.started.layers[:MAX_ROWS]:
        note = f"{layer.num_parameters:,} parameters" * bool(layer.num_parameters)
        shape = _shape(layer.output_shape)
        rows.append(Row(layer.name or layer.kind, f"{layer.kind} → {shape}", note))
    return rows


def _configuration_rows(run: RunView) -> list[Row]:
    defaults = dataclasses.asdict(TrainingConfig())
    rows = []
    for name, value in flatten(run.started.config).items():
        default = defaults.get(name, value)
        note = f"default {format_value(default)}" * (value != default)
        rows.append(Row(name, format_value(value), note, marked=bool(note)))
    return rows


def _argument_rows(run: RunView) -> list[Row]:
    named = run.started.named_arguments
    return [Row(name, format_value(value)) for name, value in named.items()]


def _shape(output_shape: list[int] | None) -> str:
    """Format a layer's output shape for one sample."""
    if not output_shape:
        return "no tensor"
    return " x ".join(map(str, output_shape[1:])) or "scalar"


# The sections by title: the function that makes the rows, a note, and whether values are long.
SECTIONS: dict[str, tuple[Callable[[RunView], list[Row]], str, bool]] = {
    "Outputs": (_output_rows, "", True),
    "Time": (_time_rows, "their sum is the wall time", False),
    "Cost": (_cost_rows, "of the nodes, by the prices in settings.toml", False),
    "Slow ranks": (_straggler_rows, "when they changed", True),
    "Configuration": (_configuration_rows, "bold: not the package's default", False),
    "Arguments": (_argument_rows, "of the function", False),
    "Environment": (_environment_rows, "", False),
    "Data": (_data_rows, "", True),
    "Model": (_layer_rows, "{run.model_size}", True),
}
