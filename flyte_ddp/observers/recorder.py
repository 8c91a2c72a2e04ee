"""A run's record in a tracking service, sent by one thread from one bounded queue.

A service that hangs, refuses or is slow holds up neither the training nor its end. Knows no
service: a tracker is a `Recorder` with four methods, `_open`, `_log`, `_image` and `_close`.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar

from flyte_ddp.config.background import call_in_background
from flyte_ddp.errors import TrainingStopped
from flyte_ddp.events import (
    CheckpointLoaded,
    Event,
    Figures,
    Histogram,
    HistogramsTaken,
    PictureShown,
    RunStarted,
    plain,
)
from flyte_ddp.storage import redact_url, redact_values

TRACKERS = ("wandb", "mlflow", "tensorboard")  # by their options
MAX_EVENTS = 20_000  # that wait for the service
MAX_VALUES = 500  # sent at once; MLflow takes 1000 in one request, and an event adds some
# Fields of RunStarted that are not shown beside the configuration, or under another name.
NOT_IN_CONFIG = ("at", "name", "num_restarts", "config", "hidden", "layers")

NOTHING = {"step": 0.0, "epoch": 0.0}
PREFIXES = {"step": "train/", "epoch": "epoch/", "": ""}  # of figures, by their axis

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """What an event adds to a run."""

    axis: str  # the axis of the curves, as in `Figures`
    step: int | None
    epoch: float | None
    # by names with the prefix of their axis; a str is a text to show
    values: Mapping[str, float | str | Histogram]
    at: float  # seconds since the epoch

    @property
    def place(self) -> float:
        """The place on the axis; 0 without an axis."""
        return getattr(self, self.axis) if self.axis else 0


@dataclass(eq=False)
class Sender:
    """Passes events to a service in a thread of its own. An error there is printed once and ends
    the recording.
    """

    service: ClassVar[str]
    close_timeout: ClassVar[float]  # seconds until this process continues without the service

    _: KW_ONLY
    # by their variables; no message has them
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    say: Callable[[str], None] = logger.warning  # prints a line for people
    is_off: bool = field(default=False, init=False)  # the service has failed, or is not wanted
    _recording: Future[None] | None = field(default=None, init=False)  # from the first event on
    # a str is the status at the end
    _queue: queue.Queue[Event | str] = field(
        default_factory=lambda: queue.Queue(MAX_EVENTS), init=False
    )

    def close(self, error: BaseException | None) -> None:
        """Finish the service's run. Wait at most `close_timeout`."""
        if self._recording and not self._recording.done():
            is_stopped = isinstance(error, TrainingStopped)
            self.handle("FINISHED" if error is None else "KILLED" if is_stopped else "FAILED")
            if wait([self._recording], self.close_timeout).not_done:
                self._give_up(TimeoutError(f"it did not finish within {self.close_timeout:.0f} s"))

    def handle(self, event: Event | str) -> None:
        """Put the event, or the status at the end, into the queue."""
        if self.is_off:
            return
        self._recording = self._recording or call_in_background(self._work)
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self._give_up(TimeoutError(f"it is {MAX_EVENTS} events behind"))

    def _work(self) -> None:
        status = "FAILED"
        try:
            while not isinstance(item := self._queue.get(), str):
                self._record(item)
                if self._queue.empty():
                    self._send()
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
            f"{message}{self._hint()}"
        )

    def _record(self, event: Event) -> None:
        """Take the next event."""

    def _send(self) -> None:
        """Send what waits; called whenever the queue is empty."""

    def _end(self, status: str) -> None:
        """End the record as FINISHED, FAILED or KILLED."""

    def _hint(self) -> str:
        """Return what to do about a failure, for the end of its line."""
        return ""


@dataclass(eq=False)
class Recorder(Sender):
    """Records a run in a service.

    A run with the same `run_id` is continued: only what it does not have yet is logged.
    """

    label: ClassVar[str]  # text of the link to the run

    _: KW_ONLY
    name: str | None = None  # title of the run on the pages of the service
    group: str | None = None  # name that the runs of a sweep share
    notes: str | None = None  # shown with the run, such as the URL of the Flyte execution
    # shown besides the run's own configuration
    config: Mapping[str, Any] = field(default_factory=dict)

    # the name under which the model is uploaded at the end, as of `TrainingConfig`; "" for none
    model_artifact: str = field(default="", init=False)
    url: str = field(default="", init=False)  # of the run's page, when the service has answered
    # what the service's run has, by axis; what it had when the ranks started
    _reached: dict[str, float] = field(default_factory=lambda: dict(NOTHING), init=False)
    _known: dict[str, float] = field(default_factory=lambda: dict(NOTHING), init=False)
    _run: Any = field(default=None, init=False)  # the service's
    _waiting: list[Entry] = field(default_factory=list, init=False)  # for `_send`

    def _open(self, event: RunStarted, config: Mapping[str, Any]) -> None:
        """Open the service's run, or continue it, as `self._run`, and log the configuration that
        the ranks have started with. Called at each start of the ranks.
        """

    def _log(self, entries: Sequence[Entry]) -> None:
        """Log values on their axis, or as part of the run's summary."""

    def _image(self, step: int, name: str, png: bytes) -> None:
        """Log a picture at its step."""

    def _close(self, status: str) -> None:
        """End the service's run as FINISHED, FAILED or KILLED."""

    def _record(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._send()
                self.model_artifact = event.config.get("model_artifact", "")
                known = {
                    name: value
                    for name, value in vars(event).items()
                    if value and name not in NOT_IN_CONFIG
                }
                config = {**self.config, **event.config, **known, "program": event.name}
                self._open(event, plain(redact_values(config)))
                self._known = dict(self._reached)
            case CheckpointLoaded():
                for epoch in event.epochs:
                    self._add(epoch)
            case PictureShown():
                self._send()
                self._image(event.step, f"pictures/{event.name}", event.png)
            case HistogramsTaken() if event.step > self._known["step"]:
                entry = Entry("step", event.step, None, event.histograms, event.at or time.time())
                self._waiting.append(entry)
        self._add(event)

    def _add(self, event: Event) -> None:
        """Add what is new of an event's figures to what waits."""
        figures = event.figures()
        if not self._is_new(figures):
            return
        axis, at = figures.axis, event.at or time.time()
        values: dict[str, Any] = {PREFIXES[axis] + name: x for name, x in figures.values.items()}
        if sample := getattr(event, "sample", ""):
            values["epoch/sample"] = sample
        self._waiting.append(Entry(axis, figures.step, figures.epoch, values, at))
        if sum(len(each.values) for each in self._waiting) >= MAX_VALUES:
            self._send()

    def _is_new(self, figures: Figures) -> bool:
        """Return True if there are figures, and the service's run does not have them yet."""
        if not (axis := figures.axis):
            return bool(figures.values)
        place = figures.step if axis == "step" else figures.epoch
        # A step may have several reports, of which none is new to ranks that started again.
        if place is None or place <= (self._known if axis == "step" else self._reached)[axis]:
            return False
        self._reached[axis] = max(self._reached[axis], place)
        return True

    def _send(self) -> None:
        entries, self._waiting = self._waiting, []
        if entries:
            self._log(entries)

    def _end(self, status: str) -> None:
        if self._run is not None:
            if not self.is_off:
                self._send()
            self._close(status)
