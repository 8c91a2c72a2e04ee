"""The report of a run: one HTML document without anything outside it, as a file and, while the run goes on, as a Deck.

`Report` listens to the run's events and can be rendered at any time. `DeckPublisher` listens beside it and shows it in
Flyte's console. Everything that comes from outside (names, data descriptions, errors) is escaped.
"""

from __future__ import annotations

import base64
import contextvars
import dataclasses
import datetime
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from flytekit import Deck
from flytekit.core.context_manager import FlyteContextManager
from flytekit.loggers import logger as flytekit_logger
from jinja2 import Environment, Template
from markupsafe import Markup

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import TrainingStopped
from flyte_ddp.events import (
    CheckpointSaved,
    EpochFinished,
    Event,
    Prediction,
    PredictionsMade,
    RunFinished,
    RunStarted,
    RunState,
    StepFinished,
)
from flyte_ddp.observers import figures, plots
from tasks.report_template import FRAGMENT, PAGE, STYLE

DECK_NAME = "Training"

# What keeps the page below 2 MB, whatever the run: the rest of it is 150 kB at most.
MOST_PREDICTION_BYTES = 1_400_000  # of markup with images
MOST_EPOCHS = 200  # rows of the table
MOST_ERROR = 60_000  # characters
MOST_ROWS = 100  # of layers
MOST_CHECKPOINTS = 20

OPEN_PREDICTIONS = 40  # shown before "more" is clicked
NOTHING_YET = "-"


class Report:
    """Listens to a run and renders what it has heard so far.

    Attributes:
        links: pages elsewhere that belong to the run, by name, such as its W&B page; to be added at any time.
    """

    def __init__(self, title: str = "", links: Mapping[str, str] | None = None) -> None:
        self.title = title
        self.links = dict(links or {})
        self._history = RunState()
        self._panels: list[Markup] | None = None  # drawn from the history as it is; it takes half a second
        self._checkpoints: list[CheckpointSaved] = []  # those that are still there
        self._num_checkpoints = 0
        self._num_starts = 0
        self._predictions: PredictionsMade | None = None
        self._finished: RunFinished | None = None
        self._closed = False
        self._error: BaseException | None = None
        self._opened_at = time.time()
        self._closed_at = 0.0

    def handle(self, event: Event) -> None:
        self._history.handle(event)
        if isinstance(event, (RunStarted, StepFinished, EpochFinished)):
            self._panels = None
        if isinstance(event, RunStarted):
            self._num_starts += 1
        elif isinstance(event, CheckpointSaved):
            self._add_checkpoint(event)
        elif isinstance(event, PredictionsMade):
            self._predictions = event
        elif isinstance(event, RunFinished):
            self._finished = event

    def _add_checkpoint(self, saved: CheckpointSaved) -> None:
        self._num_checkpoints += 1
        every = [*self._checkpoints, saved]
        started = self._history.started
        newest = every[-min(MOST_CHECKPOINTS, started.config["checkpoints_to_keep"] if started else 1) :]
        best = [checkpoint for checkpoint in every if checkpoint.best][-1:]
        self._checkpoints = [*(checkpoint for checkpoint in best if checkpoint not in newest), *newest]

    def close(self, error: BaseException | None) -> None:
        self._closed, self._error, self._closed_at = True, error, time.time()

    @property
    def status(self) -> str:
        """One of running, finished, failed and interrupted."""
        if isinstance(self._error, (TrainingStopped, KeyboardInterrupt, SystemExit)):
            return "interrupted"
        if self._error is not None:
            return "failed"
        if self._finished is not None:
            return "finished"
        return "interrupted" if self._closed else "running"

    def render(self) -> str:
        """The report as a whole document, below 2 MB, that needs nothing from elsewhere."""
        return _template(PAGE).render(title=self._title(), fragment=Markup(self.render_fragment()))

    def render_fragment(self) -> str:
        """The report as a piece of HTML with its own style, to put into somebody else's page."""
        return _template(FRAGMENT).render(
            style=Markup(STYLE),
            title=self._title(),
            status=self.status,
            lead=self._history.started.data if self._history.started else "Waiting for the ranks to start.",
            links=[
                {"name": name, "url": url, "is_safe": url.startswith(("https://", "http://"))}
                for name, url in self.links.items()
            ],
            percent_done=self._percent_done(),
            error=self._error_section(),
            notices=self._notices(),
            tiles=self._tiles(),
            panels=self._drawn_panels(),
            epochs=self._epochs_table(),
            predictions=self._prediction_section(),
            sections=self._sections(),
            footer=self._footer(),
        )

    def _drawn_panels(self) -> list[Markup]:
        if self._panels is None:
            self._panels = [Markup(figures.to_svg(panel)) for panel in plots.training_panels(self._history)]
        return self._panels

    def _title(self) -> str:
        started = self._history.started
        return self.title or (f"Training {started.recipe}" if started else "Training")

    def _percent_done(self) -> int:
        started, history = self._history.started, self._history
        if started is None:
            return 0
        reached = max([started.resumed_step, *(event.step for event in (history.steps[-1:] + history.epochs[-1:]))])
        return min(100, 100 * reached // max(1, started.num_steps))

    def _error_section(self) -> dict[str, str] | None:
        if self._error is None:
            return None
        text = str(self._error)
        if len(text) > MOST_ERROR:
            left_out = len(text) - MOST_ERROR
            text = f"{text[: MOST_ERROR // 2]}\n[... {left_out:,} characters left out ...]\n{text[-MOST_ERROR // 2 :]}"
        return {"title": type(self._error).__name__, "text": text}

    def _notices(self) -> list[str]:
        started = self._history.started
        if started is None:
            return []
        notices = list(started.skipped_checkpoints[-MOST_CHECKPOINTS:])
        if started.resumed_from:
            notices.append(f"Resumed at step {started.resumed_step:,} from {started.resumed_from}")
        return notices

    def _tiles(self) -> list[dict[str, str]]:
        started, history = self._history.started, self._history
        if started is None:
            return []
        tiles = []
        best = history.best
        note = f"in epoch {best.epoch}" if best else "no epoch finished yet"
        tiles.append(_tile("Best test accuracy", figures.percent(best.accuracy) if best else NOTHING_YET, note))
        note = f"{self._percent_done()} % of {started.num_steps:,} steps"
        tiles.append(_tile("Epochs", f"{len(history.epochs)} / {started.config['epochs']}", note))
        if history.epochs:
            num_samples = started.num_train_samples * len(history.epochs)
            rate = _rounded(num_samples / sum(epoch.seconds for epoch in history.epochs))
            tiles.append(_tile("Samples/s", rate, "in training, all epochs"))
        else:
            rate = _rounded(history.steps[-1].samples_per_second) if history.steps else NOTHING_YET
            tiles.append(_tile("Samples/s", rate, "in training, lately"))
        seconds = self._seconds()
        note = "since the launch" if self.status == "running" else "launch to end"
        tiles.append(_tile("Wall time", _duration(seconds), note + (", this attempt" if started.resumed_from else "")))
        on_gpu = started.device != "cpu"
        each = started.device if on_gpu else f"CPU, {_counted(started.num_threads, 'thread')} each"
        tiles.append(_tile("Ranks", f"{started.world_size}", each))
        devices = started.world_size * (1 if on_gpu else started.num_threads)
        note = f"{devices} x wall time"
        hours = devices * seconds / 3600
        tiles.append(_tile("GPU-hours" if on_gpu else "Core-hours", f"{hours:,.{3 if hours < 1 else 1}f}", note))
        return tiles

    def _seconds(self) -> float:
        """Wall-clock seconds of this attempt. A replayed history has only the run's own word for it."""
        heard = (self._closed_at or time.time()) - self._opened_at
        return max(heard, self._finished.seconds if self._finished else 0.0)

    def _epochs_table(self) -> dict[str, Any]:
        best, epochs = self._history.best, self._history.epochs
        first_shown = len(epochs) - MOST_EPOCHS
        rows = [
            {
                "best": epoch is best,
                "cells": [
                    str(epoch.epoch),
                    f"{epoch.train_loss:.4g}",
                    f"{epoch.test_loss:.4g}",
                    figures.percent(epoch.accuracy),
                    f"{epoch.learning_rate:.3g}",
                    _duration(epoch.seconds),
                    _duration(epoch.evaluation_seconds),
                    _rounded(epoch.samples_per_second),
                ],
            }
            for index, epoch in enumerate(epochs)
            if index >= first_shown or epoch is best
        ]
        left_out = len(epochs) - len(rows)
        return {
            "names": ["epoch", "train loss", "test loss", "accuracy", "learning rate", "train", "test", "samples/s"],
            "rows": rows,
            "note": f"The best epoch and the last {MOST_EPOCHS}; {left_out:,} are left out." if left_out else "",
        }

    def _prediction_section(self) -> dict[str, Any] | None:
        """The wrong ones first, as many as the page has room for."""
        if self._predictions is None or not self._predictions.predictions:
            return None
        every = self._predictions.predictions
        wrong = [prediction for prediction in every if prediction.truth != prediction.guess]
        right = [prediction for prediction in every if prediction.truth == prediction.guess]
        shown, size = [], 0
        for prediction in wrong + right:
            sample = _sample(prediction)
            size += sum(6 * len(value) for name, value in sample.items() if name not in ("image", "right"))  # escaped
            size += len(sample["image"]) + 250
            if size > MOST_PREDICTION_BYTES:
                break
            shown.append(sample)
        note = f"{len(right)} of {len(every)} right, {len(wrong)} wrong"
        if len(shown) < len(every):
            note += f"; {len(every) - len(shown)} left out, because they would make this page too large"
        return {"note": note, "first": shown[:OPEN_PREDICTIONS], "rest": shown[OPEN_PREDICTIONS:]}

    def _sections(self) -> list[dict[str, Any]]:
        started, finished = self._history.started, self._finished
        if started is None:
            return []
        data = [
            _row("Data", started.data),
            _row("Training samples", f"{started.num_train_samples:,}"),
            _row("Held-out samples", f"{started.num_test_samples:,}"),
        ]
        environment = [
            _row("Ranks", f"{started.world_size}"),
            _row("Device of each", started.device),
            _row("Backend", started.backend),
            _row("CPU threads per rank", f"{started.num_threads}"),
            *(_row(name, version) for name, version in started.versions.items()),
        ]
        if finished:
            environment.append(_row("Peak memory, rank 0", f"{finished.peak_memory_bytes / 2**20:,.0f} MiB"))
            environment.append(_row("Launch to first step", _duration(finished.first_step_seconds)))
        if self._num_starts > 1:
            environment.append(_row("Restarts of the gang", f"{self._num_starts - 1}"))
        layers = [
            _row(
                layer.name or layer.kind,
                f"{layer.kind} → {' x '.join(map(str, layer.output_shape[1:])) or 'scalar'}",
                f"{layer.num_parameters:,} parameters" if layer.num_parameters else "",
            )
            for layer in started.layers[:MOST_ROWS]
        ]
        if len(started.layers) > MOST_ROWS:
            layers.append(_row("…", f"{len(started.layers) - MOST_ROWS} more"))
        size = f"{started.num_parameters:,} parameters"
        kept = f"{self._num_checkpoints:,} written, the newest and the best are kept"
        sections = [
            _section("Configuration", _configuration(started.config), "bold: not the package's default"),
            _section("Environment", environment),
            _section("Data", data, has_long_values=True),
            _section("Model", layers, size, has_long_values=True),
            _section("Checkpoints", self._checkpoint_rows(), kept, has_long_values=True),
        ]
        return [section for section in sections if section["rows"]]

    def _checkpoint_rows(self) -> list[dict[str, Any]]:
        """The model state and the checkpoints that have not been removed for newer ones."""
        rows = [_row("Model state", self._finished.model_state_url)] if self._finished else []
        return rows + [
            _row(f"Step {saved.step:,}", saved.url, "best so far" if saved.best else "")
            for saved in reversed(self._checkpoints)
        ]

    def _footer(self) -> str:
        at = datetime.datetime.fromtimestamp(self._closed_at or time.time(), datetime.timezone.utc)
        return f"{'As of' if self.status == 'running' else 'Ended'} {at:%Y-%m-%d %H:%M:%S} UTC"


class DeckPublisher:
    """Shows `report`, which must hear of each event before this does, as the Deck "Training" of the current Flyte task.

    Published when the run starts, then at most every `interval` seconds, and at its end, whatever that is. Outside a
    task with Decks nothing is published. A failure to publish is logged once and never raised.

    Args:
        interval: seconds; it grows to `SHARE_OF_TIME` of the run's duration, because flytekit leaves a copy of every
            version on the pod's disk.
        clock: seconds from any start.
    """

    SHARE_OF_TIME = 0.05

    def __init__(self, report: Report, interval: float = 15.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._started_at = clock()
        self._due_at = self._started_at
        self._has_failed = False
        # Found here, in the task's thread; events may arrive in another one.
        self._context = contextvars.copy_context()
        parameters = FlyteContextManager.current_context().user_space_params
        self._is_shown = parameters is not None and parameters.enable_deck
        if self._is_shown:
            _ReportDeck(report)

    def handle(self, event: Event) -> None:
        gets_on = isinstance(event, (StepFinished, EpochFinished))
        if isinstance(event, RunStarted) or (gets_on and self._clock() >= self._due_at):
            self._publish()

    def close(self, error: BaseException | None) -> None:
        self._publish()

    def _publish(self) -> None:
        if self._is_shown:
            flytekit_logger.addFilter(self._is_news)  # flytekit catches what goes wrong and logs it, but every time
            try:
                self._context.run(Deck.publish)
            except OSError as error:  # no place for its local copy is the one thing that it does not catch
                flytekit_logger.error("The report could not be published: %s", error)
            finally:
                flytekit_logger.removeFilter(self._is_news)
        now = self._clock()
        self._due_at = now + max(self._interval, self.SHARE_OF_TIME * (now - self._started_at))

    def _is_news(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        has_failed, self._has_failed = self._has_failed, True
        return not has_failed


class _ReportDeck(Deck):
    """A Deck that is always as the report is: flytekit asks for its HTML whenever it writes the Deck."""

    def __init__(self, report: Report) -> None:
        super().__init__(DECK_NAME)
        self._report = report

    @property
    def html(self) -> str:
        return self._report.render_fragment()


@functools.cache
def _template(text: str) -> Template:
    return Environment(autoescape=True).from_string(text)


def _sample(prediction: Prediction) -> dict[str, Any]:
    """A prediction as the template shows it, in plain text but for the image."""
    scores = sorted(prediction.scores.items(), key=lambda item: -item[1])[:3]
    words = f"guess {_shortened(prediction.guess)}, truth {_shortened(prediction.truth)}"
    likely = ", ".join(f"{_shortened(name)} {100 * score:.0f} %" for name, score in scores)
    return {
        "right": prediction.truth == prediction.guess,
        "truth": _shortened(prediction.truth),
        "guess": _shortened(prediction.guess),
        "words": words,
        "scores": f"{words} ({likely})" if likely else words,
        "text": _shortened(prediction.text),
        "image": base64.b64encode(prediction.image).decode(),
    }


def _configuration(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    defaults = dataclasses.asdict(TrainingConfig())
    rows = []
    for name, value in config.items():
        if isinstance(value, dict):  # the recipe's options
            rows += [_row(f"{name}.{option}", _plain(chosen)) for option, chosen in value.items()]
            continue
        changed = name in defaults and value != defaults[name]
        rows.append(_row(name, _plain(value), f"default {_plain(defaults[name])}" if changed else "", marked=changed))
    return rows


def _tile(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _row(name: str, value: str, note: str = "", marked: bool = False) -> dict[str, Any]:
    return {"name": name, "value": value, "note": note, "marked": marked}


def _section(title: str, rows: list[dict[str, Any]], note: str = "", has_long_values: bool = False) -> dict[str, Any]:
    return {"title": title, "note": note, "rows": rows, "has_long_values": has_long_values}


def _plain(value: object) -> str:
    """`value` as a user writes it in JSON or on the command line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _duration(seconds: float) -> str:
    """Seconds in the two largest units that say something."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def _shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
