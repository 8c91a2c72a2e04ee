"""The report of a run of a recipe, a function or a script, folded from its events. A part is there
if its data are.
"""

from __future__ import annotations

import base64
import dataclasses
import datetime
import functools
import itertools
import math
import statistics
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import Event, Prediction, RunFinished, RunStarted, RunState, TimeSpent
from flyte_ddp.observers.formats import (
    duration,
    format_count,
    format_figure,
    format_rounded,
    format_value,
    percent,
)
from flyte_ddp.observers.reports.page import (
    Card,
    Page,
    Row,
    Section,
    Table,
    Tile,
    cell,
    shorten,
)
from flyte_ddp.observers.reports.plots import run_panels

# These keep the page below 3 MB for any run. The rest of it is 250 kB at most.
MAX_PREDICTION_BYTES = 1_400_000  # of HTML with images
MAX_PICTURE_BYTES = 900_000  # of PNGs, before base64
MAX_EPOCHS = 200  # rows of the table
MAX_ROWS = 100  # of layers
MAX_NOTICES = 20

MAX_TEXTS, MAX_TEXT = 20, 5_000  # generated after the last epochs; characters of each

OPEN_PREDICTIONS = 40  # shown before "more" is clicked
MAX_LINES, MAX_LINE = 60, 400  # of the log; characters of each
PICTURE = Markup(
    '<h2>{0} <small>step {1:,}</small></h2><img alt="{0}" src="data:image/png;base64,{2}">'
)
MAX_TILES = 6  # of reported values


@dataclass(eq=False)
class Report(Page):
    """The report of one run. A listener: give it each event in order."""

    progress_label = "optimizer steps done"

    name: str = ""  # its title; by default that of the program
    outputs: dict[str, str] = field(default_factory=dict)  # their URLs; to be set at the end
    _state: RunState = field(default_factory=RunState, init=False)
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LINES), init=False)
    # of the state as it is; drawing takes half a second
    _panels: list[Markup] | None = field(default=None, init=False)

    @classmethod
    def of(cls, state: RunState) -> Report:
        """Return the report of a run that has finished with this state."""
        report = cls()
        report._state = state
        report.closed_at = state.finished.at if state.finished else 0.0
        return report

    def add_line(self, line: str) -> None:
        """Add a line of the log. Any thread may call this."""
        self._lines.append(shorten(line, MAX_LINE))

    def handle(self, event: Event) -> None:
        self._state.handle(event)
        self._panels = None

    def close(self, error: BaseException | None) -> None:
        """Record the end of the run. The page of an earlier run stays where this one was refused
        before it began.
        """
        started = self._state.started
        has_begun = started is not None and (self._state.loaded is not None or not started.config)
        if error is not None and not has_begun and self.file and self.file.is_file():
            is_empty = self.file.stat().st_size == 0  # made for this run
            self.file = self.file if is_empty else None
        super().close(error)

    @property
    def status(self) -> str:
        return "finished" if self._state.finished and self.error is None else super().status

    @property
    def title(self) -> str:
        started = self._state.started
        return self.name or (f"Training {started.name}" if started else "Training")

    def content(self) -> dict[str, Any]:
        if self._panels is None:
            self._panels = self.draw(run_panels(self._state))
        if not (started := self._state.started):
            lead = "Waiting for the ranks to start."
            return {"lead": lead, "percent_done": 0, "cards": self._cards()}
        ranks = format_count(started.world_size, "rank")
        nodes = format_count(started.num_nodes, "node")
        lead = f"{ranks} on {nodes}" + (f": {started.data}" if started.data else "")
        return {
            "lead": lead,
            "percent_done": self._percent_done(started),
            "notices": self._notices(),
            "tiles": self._tiles(started),
            "charts": [("", "", self._panels), *self._pictures()],
            "table": self._epochs_table() if self._state.epochs else {},
            "predictions": self._prediction_section(),
            "cards": self._cards(),
            "sections": self._sections(started),
        }

    def _pictures(self) -> list[tuple[str, str, list[Markup]]]:
        """Return the chart of the pictures that the program has shown, the last ones for which the
        page has room.
        """
        pictures = list(reversed(self._state.pictures.values()))
        sizes = itertools.accumulate(len(each.png) for each in pictures)
        shown = [
            PICTURE.format(each.name, each.step, base64.b64encode(each.png).decode())
            for each, size in zip(pictures, sizes, strict=True)
            if size <= MAX_PICTURE_BYTES
        ]
        left_out = len(pictures) - len(shown)
        note = f"the newest of each name; {left_out} older ones are left out" if left_out else ""
        return [("Pictures", note, shown)] if shown else []

    def _time_spent(self) -> TimeSpent:
        return self._state.time_spent(until=self.closed_at or time.time())

    def _percent_done(self, started: RunStarted) -> int:
        if self._state.finished or not started.num_steps:
            return 100 * bool(self._state.finished)
        return min(100, 100 * self._state.last_step // started.num_steps)

    def _notices(self) -> list[str]:
        state, loaded = self._state, self._state.loaded
        notices = [str(each) for found in state.stragglers[-1:] for each in found.stragglers]
        notices += map(str, state.bad_steps[-MAX_NOTICES:])
        notices += loaded.skipped[-MAX_NOTICES:] if loaded else []
        if loaded and loaded.url:
            notices.append(f"Resumed at step {loaded.step:,} from {loaded.url}")
        if 0 < state.grace_seconds < state.writing_seconds:
            notices.append(
                f"The store took {state.writing_seconds:.0f} s for the newest checkpoint, and a "
                "node that is told to "
                f"go has {state.grace_seconds:.0f} s: an announced loss would cost steps. A "
                "longer termination grace "
                "of the pods avoids that"
            )
        return notices

    def _tiles(self, started: RunStarted) -> list[Tile]:
        state, spent = self._state, self._time_spent()
        latest = {name: value for report in state.reports for name, value in report.values.items()}
        for name in itertools.chain(*state.rank_values.values()):  # some may be theirs alone
            latest.setdefault(name, statistics.fmean(self._values_of_others(name)))
        best, metric, epochs = state.best, state.monitor.metric, started.config.get("epochs")
        speed = "samples_per_second"
        rate = state.epochs[-1].samples_per_second if state.epochs else latest.get(speed, 0.0)
        # A replayed history is reported within a second, so the duration in its own last event
        # counts.
        seconds = spent.wall or max(
            self.seconds(), state.finished.seconds if state.finished else 0.0
        )
        epoch = state.reports[-1].epoch if state.reports else None
        on_gpu = started.device != "cpu"
        devices = started.world_size * (1 if on_gpu else started.num_threads)
        each = (
            started.device if on_gpu else f"CPU, {format_count(started.num_threads, 'thread')} each"
        )
        value = format_figure(metric, best.figures().values.get(metric, math.nan)) if best else ""
        tiles = [
            Tile(
                f"Best {metric}".replace("_", " "),
                value,
                f"in epoch {best.position if best else 0:.3g}",
            ),
            Tile(
                "Epochs",
                f"{state.num_epochs} / {epochs}" if epochs else "",
                f"{self._percent_done(started)} % of {started.num_steps:,} steps",
            ),
            Tile(
                "Step",
                f"{state.last_step:,}" if state.reports and not epochs else "",
                "" if epoch is None else f"epoch {epoch:g}",
            ),
            Tile(
                "Samples/s",
                format_rounded(rate) if rate else "",
                "in the last epoch" if state.epochs else "now",
            ),
            Tile(
                "Wall time",
                duration(seconds),
                "since the launch" + (", this attempt" if state.resumed_step else ""),
            ),
            Tile("Time left", *self._describe_time_left()),
            Tile(
                "Goodput",
                percent(spent.goodput)
                if spent.wall and (started.num_steps or spent.goodput)
                else "",
                "of the wall time: stepping and evaluating",
            ),
            Tile("Ranks", f"{started.world_size}" if started.device else "", each),
            Tile(
                "GPU-hours" if on_gpu else "Core-hours",
                f"{devices * seconds / 3600:,.3g}" if started.device else "",
                f"{devices} x wall time",
            ),
            *(
                Tile(name.replace("_", " "), f"{value:.4g}", self._describe_others(name))
                for name, value in list(latest.items())[:MAX_TILES]
                if not state.epochs and name != speed
            ),
        ]
        return [each for each in tiles if each.value]

    def _describe_time_left(self) -> tuple[str, str]:
        """Return the time to the last step and when that will be; empty where it is not known."""
        now = time.time()
        left = None if self.closed_at else self._state.seconds_left(now)
        if left is None:
            return "", ""
        end = datetime.datetime.fromtimestamp(now + left, datetime.timezone.utc)
        return duration(left), f"until about {end:%H:%M} UTC"

    def _values_of_others(self, name: str) -> list[float]:
        """Return what the other ranks have reported last under this name."""
        reported = self._state.rank_values.values()
        return [values[name] for values in reported if name in values]

    def _describe_others(self, name: str) -> str:
        if not (found := self._values_of_others(name)):
            return "last reported"
        spread = f", {min(found):.4g} to {max(found):.4g}" if len(found) > 1 else ""
        return f"other ranks: {statistics.fmean(found):.4g}{spread}"

    def _epochs_table(self) -> Table:
        best, epochs = self._state.best, self._state.epochs
        metrics = dict.fromkeys(name for epoch in epochs for name in epoch.metrics)
        shown = [
            epoch
            for index, epoch in enumerate(epochs)
            if index >= len(epochs) - MAX_EPOCHS or epoch is best
        ]
        rows = [
            (
                epoch is best,
                {
                    "epoch": cell(epoch.position, "{:.3g}".format),
                    "train loss": cell(epoch.train_loss, "{:.4g}".format),
                    "test loss": cell(epoch.test_loss, "{:.4g}".format),
                    **{
                        name.replace("_", " "): cell(
                            epoch.metrics.get(name), functools.partial(format_figure, name)
                        )
                        for name in metrics
                    },
                    "learning rate": cell(epoch.learning_rate, "{:.3g}".format),
                    "train": cell(epoch.seconds, duration),
                    "test": cell(epoch.evaluation_seconds, duration),
                    "samples/s": cell(epoch.samples_per_second, format_rounded),
                },
            )
            for epoch in shown
        ]
        left_out = len(epochs) - len(shown)
        note = f"The best epoch and the last {MAX_EPOCHS}; {left_out:,} are left out."
        return Table("Epochs", note if left_out else "", rows)

    def _cards(self) -> list[Card]:
        """Return what the model generated after the last epochs, the newest open, and the last
        lines of the log.
        """
        written = [epoch for epoch in reversed(self._state.epochs) if epoch.sample][:MAX_TEXTS]
        texts = [
            (f"after epoch {epoch.position:.3g}", shorten(epoch.sample, MAX_TEXT))
            for epoch in written
        ]
        log = "\n".join(self._lines)
        return [
            *([Card("Generated text", *texts[0], texts[1:])] if texts else []),
            *([Card("Log", "the last lines", log)] if log else []),
        ]

    def _prediction_section(self) -> dict[str, Any] | None:
        """Return as many predictions as the page has room for, the worst first; a scatter plot has
        those of numbers.
        """
        made = self._state.predictions.predictions if self._state.predictions else []
        every = [each for each in made if not each.numbers or each.image or each.text]
        if not every:
            return None
        samples = [_sample(each) for each in sorted(every, key=_error, reverse=True)]
        sizes = itertools.accumulate(
            250 + 6 * len("".join(each.values())) - 5 * len(each["image"]) for each in samples
        )
        shown = samples[: sum(size <= MAX_PREDICTION_BYTES for size in sizes)]
        num_right = sum(sample["kind"] == "right" for sample in samples)
        note = f"{num_right} of {len(every)} held-out samples right"
        if any(each.error is not None for each in every):
            note = f"{len(every)} held-out samples, the largest error first"
        if len(shown) < len(every):
            note += (
                f"; {len(every) - len(shown)} left out, because they would make this page too large"
            )
        return {"note": note, "first": shown[:OPEN_PREDICTIONS], "rest": shown[OPEN_PREDICTIONS:]}

    def _sections(self, started: RunStarted) -> list[Section]:
        state, spent = self._state, self._time_spent()
        finished = state.finished or RunFinished(step=0, seconds=0.0)
        first_step = finished.first_step_seconds
        peaks = finished.rank_peak_memory_bytes or [finished.peak_memory_bytes]
        environment = [
            Row("Ranks", f"{started.world_size}"),
            Row("Nodes", f"{started.num_nodes}"),
            Row("Device of each", started.device),
            Row("Backend", started.backend),
            Row("CPU threads per rank", f"{started.num_threads or ''}"),
            Row("Commit", started.commit),
            Row("Recipe's version", started.recipe_version[:12], "of its code and the library's"),
            *(Row(name, version) for name, version in started.versions.items()),
            Row(
                "Peak memory per rank",
                ", ".join(f"{each / 2**20:,.0f} MiB" for each in peaks if each),
            ),
            Row(
                "Parameters per rank",
                ", ".join(f"{each:,}" for each in finished.rank_num_parameters),
            ),
            Row("Launch to first step", duration(first_step) if first_step else ""),
            Row(
                "Steps between states in memory",
                f"{finished.memory_interval or ''}",
                "a lost rank costs no more",
            ),
            Row(
                "Restarts of the gang",
                f"{state.num_starts - 1 - state.num_announced_losses or ''}",
                "in this attempt",
            ),
            Row(
                "Announced losses",
                f"{state.num_announced_losses or ''}",
                f"in this attempt; {state.departure}",
            ),
        ]
        data = [
            Row("Data", started.data),
            Row("Training samples", f"{started.num_train_samples:,}"),
            Row("Held-out samples", f"{started.num_test_samples:,}"),
        ]
        left_out = len(started.layers) - MAX_ROWS
        layers = [
            Row(
                layer.name or layer.kind,
                f"{layer.kind} → {_shape(layer.output_shape)}",
                f"{layer.num_parameters:,} parameters" if layer.num_parameters else "",
            )
            for layer in started.layers[:MAX_ROWS]
        ]
        time_rows = [
            Row(
                # whatever a function or a script has done and not reported
                "The program" if name == "program" else name.replace("_", " ").capitalize(),
                duration(seconds),
                percent(seconds / spent.wall),
            )
            for name, seconds in spent.parts().items()
            if seconds
        ]
        saved = state.checkpoint
        outputs = [
            *(Row(name, url) for name, url in self.outputs.items()),
            Row("Model state", finished.model_state_url, f"of epoch {finished.model_state_epoch}"),
            Row("Newest checkpoint", saved.url if saved else ""),
        ]
        stragglers = [
            Row(
                f"Step {found.step:,}",
                "; ".join(map(str, found.stragglers))
                or "no rank is slower than the others any more",
            )
            for found in reversed(state.stragglers[-MAX_NOTICES:])
        ]
        size = f"{started.num_parameters:,} parameters" + (
            f"; {left_out} layers more" if left_out > 0 else ""
        )
        sections = [
            Section(
                "Outputs",
                [each for each in outputs if each.value],
                has_long_values=True,
            ),
            Section("Time", time_rows, "their sum is the wall time"),
            Section("Slow ranks", stragglers, "when they changed", has_long_values=True),
            Section(
                "Configuration", _configuration(started.config), "bold: not the package's default"
            ),
            Section("Environment", [each for each in environment if each.value]),
            Section("Data", data if started.data else [], has_long_values=True),
            Section("Model", layers, size, has_long_values=True),
        ]
        return [each for each in sections if each.rows]


def _error(prediction: Prediction) -> float:
    return (
        float(prediction.truth != prediction.guess)
        if prediction.error is None
        else prediction.error
    )


def _sample(prediction: Prediction) -> dict[str, Any]:
    """Return the texts of a prediction for the template, and its image in base64."""
    scores = sorted(prediction.scores.items(), key=lambda item: -item[1])[:3]
    words = f"guess {shorten(prediction.guess)}, truth {shorten(prediction.truth)}"
    likely = ", ".join(f"{shorten(name)} {100 * score:.0f} %" for name, score in scores)
    return {
        "kind": "" if prediction.error is not None else "wrong" if _error(prediction) else "right",
        "truth": shorten(prediction.truth),
        "guess": shorten(prediction.guess),
        "words": words,
        "scores": f"{words} ({likely})" if likely else words,
        "text": shorten(prediction.text),
        "image": base64.b64encode(prediction.image).decode(),
    }


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
    return "no tensor" if not output_shape else " x ".join(map(str, output_shape[1:])) or "scalar"
