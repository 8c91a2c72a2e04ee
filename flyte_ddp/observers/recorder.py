"""A run's record in a tracking service, sent by one thread from one bounded queue.

A service that hangs, refuses or is slow holds up neither the training nor its end. This module
knows no service: a tracker is a `Recorder` with four methods, `_open`, `_log`, `_image` and
`_close`. The queue, the resuming, the configuration and the redaction are here.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from flyte_ddp.errors import TrainingStopped
from flyte_ddp.events import (
    CheckpointLoaded,
    EpochFinished,
    Event,
    Histogram,
    HistogramsTaken,
    PictureShown,
    Prediction,
    PredictionsMade,
    RunStarted,
    RunState,
    StepFoundBad,
    plain,
)
from flyte_ddp.process.threads import call_in_background
from flyte_ddp.storage import redact_url, redact_values

TRACKERS = ("wandb", "mlflow", "tensorboard")  # the names in settings.toml and in options
MAX_EVENTS = 20_000  # events that may wait for the service
MAX_VALUES = 500  # sent at once; MLflow takes 1000 in one request, and an event adds some
# Fields of RunStarted that are not shown beside the configuration, or under another name.
NOT_IN_CONFIG = ("at", "name", "num_restarts", "config", "named_arguments", "hidden", "layers")

NOTHING = {"step": 0.0, "epoch": 0.0}
# Beginning of the name of a figure, by its axis.
PREFIXES = {"step": "train/", "epoch": "epoch/", "": ""}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """What an event adds to a run."""

    axis: str  # the axis of the curves, as in `Figures`
    step: int | None
    epoch: float | None
    # Values by names with the prefix of their axis. A str is a text to show. A tracker leaves out
    # the kinds that its service does not show.
    values: Mapping[str, float | str | Histogram | Sequence[Prediction]]
    at: float  # seconds since the epoch
    alert: str = ""  # line that people should read at once

    @property
    def place(self) -> float:
        """The place on the axis; 0 without an axis."""
        return getattr(self, self.axis, 0)


@dataclass(eq=False)
class Sender:
    """Passes events to a service in a thread of its own. An error there is printed once and ends
    the recording.
    """

    is_off = False  # the service has failed, or is not wanted
    hint = ""  # end of the line about a failure: what to do

    service: ClassVar[str]
    close_timeout: ClassVar[float]  # seconds until this process continues without the service

    _: KW_ONLY
    # API keys by their environment variables; no message contains them
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    say: Callable[[str], None] = logger.warning  # prints a line for people
    _recording: Future[None] | None = field(default=None, init=False)  # set by the first event
    # The run's own state. The thread reads it at the end only, when it changes no more.
    _state: RunState = field(default_factory=RunState, init=False)
    # events, or what a sender makes of them, and at last the status at the end
    _queue: queue.Queue[Any] = field(default_factory=lambda: queue.Queue(MAX_EVENTS), init=False)

    def close(self, error: BaseException | None) -> None:
        """Finish the service's run. Wait at most `close_timeout`."""
        if self._recording and not self._recording.done():
            status = "FAILED"
            if error is None:
                status = "FINISHED"
            elif isinstance(error, TrainingStopped):
                status = "KILLED"
            self._put(status)
            if wait([self._recording], self.close_timeout).not_done:
                self._give_up(TimeoutError(f"it did not finish within {self.close_timeout:.0f} s"))

    def handle(self, event: Event, state: RunState) -> None:
        self._state = state
        self._put(event)

    def _put(self, item: Any) -> None:
        """Put an event, or the status at the end, into the queue."""
        if self.is_off:
            return
        self._recording = self._recording or call_in_background(self._work)
        try:
            self._queue.put_nowait(item)
        except queue.Full:
            self._give_up(TimeoutError(f"it is {MAX_EVENTS} events behind"))

    def _work(self) -> None:
        status = "FAILED"
        try:
            item = self._queue.get()
            while not isinstance(item, str):
                self._record(item)
                if self._queue.empty():
                    self._send()
                item = self._queue.get()
            status = item
        except Exception as error:  # whatever a service raises, training goes on
            self._give_up(error)
        try:
            self._end(status)
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self.is_off:
            return
        self.is_off = True
        message = redact_url(" ".join(f"{type(error).__name__}: {error}".split()))
        for key in filter(None, self.keys.values()):
            message = message.replace(key, "***")
        self.say(
            f"{self.service} failed and records no more of this run; the training continues: "
            f"{message}{self.hint}"
        )

    def _record(self, item: Any) -> None:
        """Take the next event, or whatever else was put into the queue."""

    def _send(self) -> None:
        """Send what waits; called whenever the queue is empty."""

    def _end(self, status: str) -> None:
        """End the record as FINISHED, FAILED or KILLED."""


@dataclass(eq=False)
class Recorder(Sender):
    """Records a run in a service.

    A run with the same `run_id` is continued: only what it does not have yet is logged.
    """

    # name under which the model is uploaded at the end, see `TrainingConfig`; "" uploads none
    model_artifact = ""
    url = ""  # URL of the run's page, when the service has answered
    _reached = NOTHING  # the last place that the service's run has on each axis
    _known = NOTHING  # the same when the ranks started

    label: ClassVar[str]  # text of the link to the run

    _: KW_ONLY
    name: str | None = None  # title of the run on the pages of the service
    group: str | None = None  # name that the runs of a sweep share
    notes: str | None = None  # shown with the run, such as the URL of the Flyte execution
    # shown besides the run's own configuration
    config: Mapping[str, Any] = field(default_factory=dict)

    _run: Any = field(default=None, init=False)  # the run, in the form of the service's client
    _waiting: list[Entry] = field(default_factory=list, init=False)  # entries for `_send`
    # step from which the latest ranks resumed
    _resumed_step: int | None = field(default=None, init=False)

    def _open(self, event: RunStarted, config: Mapping[str, Any]) -> None:
        """Open the service's run, or continue it, as `self._run`, and log the configuration of the
        ranks. Called at each start of the ranks. A tracker that continues a run sets `_reached`.
        """

    def _log(self, entries: Sequence[Entry]) -> None:
        """Log values on their axis, or as part of the run's summary."""

    def _image(self, step: int, name: str, png: bytes) -> None:
        """Log a picture at its step."""

    def _close(self, status: str) -> None:
        """End the service's run as FINISHED, FAILED or KILLED. `_state` is the run's last state."""

    def _record(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._send()
        at = event.at or time.time()
        match event:
            case RunStarted():
                self.model_artifact = event.config.get("model_artifact", "")
                known = {
                    name: value
                    for name, value in vars(event).items()
                    if value and name not in NOT_IN_CONFIG
                }
                config = {**self.config, **event.config, **event.named_arguments, **known}
                config["program"] = event.name
                self._resumed_step = None
                self._open(event, plain(redact_values(config)))
                self._known = self._reached
            case CheckpointLoaded():
                self._resumed_step = event.step
                for epoch in event.epochs:
                    self._add(epoch)
            case PictureShown():
                self._send()
                self._image(event.step, f"pictures/{event.name}", event.png)
            case HistogramsTaken() if event.step > self._known["step"]:
                self._waiting.append(Entry("step", event.step, None, event.histograms, at))
            case PredictionsMade():
                values = {"predictions/test": event.predictions}
                self._waiting.append(Entry("epoch", None, event.epoch, values, at))
            case StepFoundBad():
                self._waiting.append(Entry("", event.step, None, {}, at, str(event)))
        self._add(event)

    def _add(self, event: Event) -> None:
        """Let the figures of an event wait, unless the service's run has them already."""
        figures = event.figures()
        axis, at = figures.axis, event.at or time.time()
        if axis:
            place, known = figures.epoch, self._reached
            if axis == "step":
                # A step may have several reports. Ranks that started again repeat all of them.
                place, known = figures.step, self._known
            if place is None or place <= known[axis]:
                return
            self._reached = {**self._reached, axis: max(self._reached[axis], place)}
        elif not figures.values:
            return
        values: dict[str, Any] = {PREFIXES[axis] + name: x for name, x in figures.values.items()}
        if isinstance(event, EpochFinished) and event.sample:
            values["epoch/sample"] = event.sample
        self._waiting.append(Entry(axis, figures.step, figures.epoch, values, at))
        if sum(len(each.values) for each in self._waiting) >= MAX_VALUES:
            self._send()

    def _send(self) -> None:
        entries, self._waiting = self._waiting, []
        if entries:
            self._log(entries)

    def _end(self, status: str) -> None:
        if self._run is not None:
            if not self.is_off:
                self._send()
            self._close(status)
