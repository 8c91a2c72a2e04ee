"""A run's record in a tracking service, sent by one thread from one bounded queue.

A service that hangs, refuses or is slow holds up neither the training nor its end. Knows no
service.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Mapping
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
# Fields of RunStarted that are not shown beside the configuration, or under another name.
NOT_IN_CONFIG = ("at", "name", "num_restarts", "config", "hidden", "layers")

NOTHING = {"step": 0.0, "epoch": 0.0}
PREFIXES = {"step": "train/", "epoch": "epoch/", "": ""}  # of figures, by their axis

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Recorder:
    """Records a run in a service, which is only called in this recorder's thread.

    An error there is printed once and ends the recording. A run with the same `run_id` is
    continued: only what it does not have yet is logged. A service implements those of `_open`,
    `_configure`, `_log`, `_log_...`, `_flush`, `_finish` and `_hint` that it needs.
    """

    service: ClassVar[str]
    label: ClassVar[str]  # of a link to the run
    close_timeout: ClassVar[float]  # seconds until this process continues without the service

    _: KW_ONLY
    name: str | None = None  # of the run on the service's pages
    group: str | None = None  # of runs that belong together, such as a sweep
    notes: str | None = None  # shown with the run, such as the URL of the Flyte execution
    # by their variables; no message has them
    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    # shown besides the run's own configuration
    config: Mapping[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = logger.warning  # prints a line for people

    # the name under which the model is uploaded at the end, as of `TrainingConfig`; "" for none
    model_artifact: str = field(default="", init=False)
    url: str = field(default="", init=False)  # of the run's page, when the service has answered
    is_off: bool = field(default=False, init=False)  # the service has failed, or is not wanted
    # what the service's run has, by axis; what it had when the ranks started
    _reached: dict[str, float] = field(default_factory=lambda: dict(NOTHING), init=False)
    _known: dict[str, float] = field(default_factory=lambda: dict(NOTHING), init=False)
    _run: Any = field(default=None, init=False)  # the service's
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
                if self._run is not None and self._queue.empty():
                    self._flush()
            status = item
        except Exception as error:  # of any kind: no failure of a service may end the training
            self._give_up(error)
        try:
            if self._run is not None:
                self._finish(status)
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
        if isinstance(event, RunStarted):
            if self._run is None:
                self.model_artifact = event.config.get("model_artifact", "")
                self._open(event)
            self._known = dict(self._reached)
            known = {
                name: value
                for name, value in vars(event).items()
                if value and name not in NOT_IN_CONFIG
            }
            config = {**self.config, **event.config, **known, "program": event.name}
            self._configure(event, plain(redact_values(config)))
        for each in [*(event.epochs if isinstance(event, CheckpointLoaded) else ()), event]:
            figures = each.figures()
            if self._is_new(figures):
                prefix = PREFIXES[figures.axis]
                values = {prefix + name: value for name, value in figures.values.items()}
                self._log(each, figures, values)
        if isinstance(event, PictureShown):
            self._log_picture(event)
        if isinstance(event, HistogramsTaken) and event.step > self._known["step"]:
            self._log_histograms(event.step, event.histograms)

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

    def _open(self, event: RunStarted) -> None:
        """Open the service's run, or continue it, as `self._run`."""

    def _configure(self, event: RunStarted, config: Mapping[str, Any]) -> None:
        """Log what the ranks have started with."""

    def _log(self, event: Event, figures: Figures, values: Mapping[str, float]) -> None:
        """Log figures on their axis, or as part of the run's summary. `values` have the names of
        `figures` with the prefix of their axis.
        """

    def _log_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms of parameters and gradients by name."""

    def _log_picture(self, event: PictureShown) -> None:
        """Log a picture at its step."""

    def _flush(self) -> None:
        """Send what waits; called whenever the queue is empty."""

    def _finish(self, status: str) -> None:
        """End the service's run as FINISHED, FAILED or KILLED."""

    def _hint(self) -> str:
        """Return what to do about a failure, for the end of its line."""
        return ""
