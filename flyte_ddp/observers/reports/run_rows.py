"""The tiles and the sections of the report of a run, as tables: one line per line of the page.

A tile stands beside the condition under which it is shown. A row without a value is not shown.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import statistics
import time
from collections.abc import Mapping
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

MAX_ROWS = 100  # rows of layers
MAX_CHANGES = 20  # changes of the slow ranks
MAX_TILES = 6  # tiles of reported values
SPEED = "samples_per_second"


@dataclass(frozen=True)
class RunView:
    """A run at the moment at which its page is made."""

    state: RunState
    started: RunStarted
    spent: TimeSpent
    seconds: float  # since the launch
    seconds_left: float | None  # until the last step; None where it is not known

    @property
    def percent_done(self) -> int:
        if self.state.finished or not self.started.num_steps:
            return 100 * bool(self.state.finished)
        return min(100, 100 * self.state.last_step // self.started.num_steps)


def make_tiles(run: RunView) -> list[Tile]:
    """Return the figures at the top of the page."""
    state, started, spent = run.state, run.started, run.spent
    latest = _latest(state)
    num_epochs, metric = started.config.get("epochs"), state.monitor.metric
    rate, when = latest.get(SPEED, 0.0), "now"
    if state.epochs:
        rate, when = state.epochs[-1].samples_per_second, "in the last epoch"
    best, best_at, best_value = state.best, 0.0, math.nan
    if best:
        best_at, best_value = best.position, best.figures().values.get(metric, math.nan)
    epoch = state.reports[-1].epoch if state.reports else None
    threads = format_count(started.num_threads, "thread")
    unit, num_devices, device = "GPU", started.world_size, started.device
    if started.device == "cpu":
        unit, device = "Core", f"CPU, {threads} each"
        num_devices *= started.num_threads
    this_attempt = ", this attempt" if state.resumed_step else ""
    left = run.seconds_left
    end = datetime.datetime.fromtimestamp(time.time() + (left or 0.0), datetime.timezone.utc)
    rows = [
        (
            best,
            Tile(
                f"Best {metric}".replace("_", " "),
                format_figure(metric, best_value),
                f"in epoch {best_at:.3g}",
            ),
        ),
        (
            num_epochs,
            Tile(
                "Epochs",
                f"{state.num_epochs} / {num_epochs}",
                f"{run.percent_done} % of {started.num_steps:,} steps",
            ),
        ),
        (
            state.reports and not num_epochs,
            Tile("Step", f"{state.last_step:,}", "" if epoch is None else f"epoch {epoch:g}"),
        ),
        (rate, Tile("Samples/s", format_rounded(rate), when)),
        (True, Tile("Wall time", duration(run.seconds), f"since the launch{this_attempt}")),
        (
            left is not None,
            Tile("Time left", duration(left or 0.0), f"until about {end:%H:%M} UTC"),
        ),
        (
            spent.wall and (started.num_steps or spent.goodput),
            Tile("Goodput", percent(spent.goodput), "of the wall time: stepping and evaluating"),
        ),
        (started.device, Tile("Ranks", f"{started.world_size}", device)),
        (
            started.device,
            Tile(
                f"{unit}-hours",
                f"{num_devices * run.seconds / 3600:,.3g}",
                f"{num_devices} x wall time",
            ),
        ),
    ]
    tiles = [tile for is_shown, tile in rows if is_shown]
    if not state.epochs:
        tiles += _reported_tiles(state, latest)
    return tiles


def _latest(state: RunState) -> dict[str, float]:
    """Return the newest value of each name that a rank has reported."""
    latest = {name: value for report in state.reports for name, value in report.values.items()}
    for name in itertools.chain(*state.rank_values.values()):  # some may be theirs alone
        latest.setdefault(name, statistics.fmean(_values_of_others(state, name)))
    return latest


def _reported_tiles(state: RunState, latest: Mapping[str, float]) -> list[Tile]:
    tiles = []
    for name, value in list(latest.items())[:MAX_TILES]:
        others, note = _values_of_others(state, name), "last reported"
        if others:
            note = f"other ranks: {format_figure(name, statistics.fmean(others))}"
        if len(others) > 1:
            note += f", {format_figure(name, min(others))} to {format_figure(name, max(others))}"
        if name != SPEED:
            tiles.append(Tile(title_of(name), format_figure(name, value), note))
    return tiles


def _values_of_others(state: RunState, name: str) -> list[float]:
    """Return what the other ranks have reported last under this name."""
    return [values[name] for values in state.rank_values.values() if name in values]


def make_sections(run: RunView, outputs: Mapping[str, str]) -> list[Section]:
    """Return the sections that have rows. `outputs` are URLs by their names."""
    state, started = run.state, run.started
    finished = state.finished or RunFinished(step=0, seconds=0.0)
    peaks = finished.rank_peak_memory_bytes or [finished.peak_memory_bytes]
    first_step = finished.first_step_seconds
    num_restarts = state.num_starts - 1 - state.num_announced_losses
    size = f"{started.num_parameters:,} parameters"
    if len(started.layers) > MAX_ROWS:
        size += f"; {len(started.layers) - MAX_ROWS} layers more"
    environment = [
        Row("Ranks", started.world_size),
        Row("Nodes", started.num_nodes),
        Row("Device of each", started.device),
        Row("Backend", started.backend),
        Row("CPU threads per rank", started.num_threads),
        Row("Commit", started.commit),
        Row("Recipe's version", started.recipe_version[:12], "of its code and the library's"),
        *itertools.starmap(Row, started.versions.items()),
        Row(
            "Peak memory per rank", ", ".join(f"{each / 2**20:,.0f} MiB" for each in peaks if each)
        ),
        Row("Parameters per rank", ", ".join(f"{each:,}" for each in finished.rank_num_parameters)),
        Row("Launch to first step", first_step and duration(first_step)),
        Row(
            "Steps between states in memory", finished.memory_interval, "a lost rank costs no more"
        ),
        Row("Restarts of the gang", num_restarts, "in this attempt"),
        Row("Announced losses", state.num_announced_losses, f"in this attempt; {state.departure}"),
    ]
    data = [
        Row("Data", started.data),
        Row("Training samples", f"{started.num_train_samples:,}"),
        Row("Held-out samples", f"{started.num_test_samples:,}"),
    ]
    results = [
        *itertools.starmap(Row, outputs.items()),
        Row("Model state", finished.model_state_url, f"of epoch {finished.model_state_epoch}"),
        Row("Newest checkpoint", state.checkpoint and state.checkpoint.url),
    ]
    sections = [
        Section("Outputs", [row for row in results if row.value], has_long_values=True),
        Section("Time", _time_rows(run.spent), "their sum is the wall time"),
        Section("Slow ranks", _straggler_rows(state), "when they changed", has_long_values=True),
        Section("Configuration", _configuration(started.config), "bold: not the package's default"),
        Section("Environment", [row for row in environment if row.value]),
        Section("Data", data if started.data else [], has_long_values=True),
        Section("Model", _layer_rows(started), size, has_long_values=True),
    ]
    return [each for each in sections if each.rows]


def _time_rows(spent: TimeSpent) -> list[Row]:
    rows = []
    for name, seconds in spent.parts().items():
        # whatever a function or a script has done and not reported
        title = "The program" if name == "program" else name.replace("_", " ").capitalize()
        if seconds:
            rows.append(Row(title, duration(seconds), percent(seconds / spent.wall)))
    return rows


def _straggler_rows(state: RunState) -> list[Row]:
    none = "no rank is slower than the others any more"
    return [
        Row(f"Step {found.step:,}", "; ".join(map(str, found.stragglers)) or none)
        for found in reversed(state.stragglers[-MAX_CHANGES:])
    ]


def _layer_rows(started: RunStarted) -> list[Row]:
    return [
        Row(
            layer.name or layer.kind,
            f"{layer.kind} → {_shape(layer.output_shape)}",
            f"{layer.num_parameters:,} parameters" if layer.num_parameters else "",
        )
        for layer in started.layers[:MAX_ROWS]
    ]


def _configuration(config: Mapping[str, Any]) -> list[Row]:
    defaults = dataclasses.asdict(TrainingConfig())
    shown = dict(config)
    options = shown.pop("recipe_options", {})
    shown |= {f"recipe_options.{name}": value for name, value in options.items()}
    changed = {name for name in shown if shown[name] != defaults.get(name, shown[name])}
    return [
        Row(
            name,
            format_value(value),
            f"default {format_value(defaults[name])}" if name in changed else "",
            marked=name in changed,
        )
        for name, value in shown.items()
    ]


def _shape(output_shape: list[int] | None) -> str:
    """Format a layer's output shape for one sample."""
    if not output_shape:
        return "no tensor"
    return " x ".join(map(str, output_shape[1:])) or "scalar"
