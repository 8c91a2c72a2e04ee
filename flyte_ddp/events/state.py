"""The state of a run, folded from its events.

`RunState` is the only place that knows what a restart from a checkpoint undoes. Whoever needs a
run's epochs, reports or result folds its events with it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from flyte_ddp.config import Monitor
from flyte_ddp.events.kinds import (
    AttemptEnded,
    AttemptStarted,
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointWritten,
    EpochFinished,
    Event,
    Listener,
    NodeMeasured,
    PictureShown,
    PredictionsMade,
    RankReported,
    Reported,
    RunFinished,
    RunStarted,
    StepFoundBad,
    StragglersFound,
)
from flyte_ddp.events.wall_time import TimeSpent, WallTime

T = TypeVar("T", bound=EpochFinished | Reported)

MAX_PICTURES = 50  # pictures of a run that are kept
# Fields with the newest event of a kind.
NEWEST: dict[type, str] = {
    RunStarted: "started",
    CheckpointLoaded: "loaded",
    CheckpointWritten: "checkpoint",
    PredictionsMade: "predictions",
    RunFinished: "finished",
}


def find_best(results: Iterable[T], monitor: Monitor) -> T | None:
    """Return the best of epochs or reports: of equal ones that with the lowest held-out loss, of
    these the first.
    """

    def key(result: T) -> tuple[float, float]:
        values = result.figures().values
        return monitor.score(values), values.get("test_loss", 0.0)

    return min(results, key=key, default=None)


def list_accuracies(epochs: Iterable[EpochFinished]) -> list[float]:
    """Return the accuracy after each epoch, in [0, 1]; an empty list without an accuracy."""
    return [epoch.metrics["accuracy"] for epoch in epochs if "accuracy" in epoch.metrics]


def list_metrics(epochs: Sequence[EpochFinished]) -> dict[str, list[float]]:
    """Return the held-out loss and every metric after each epoch, by name; NaN where an epoch
    lacks a metric.
    """
    lists = {"test_loss": [epoch.test_loss for epoch in epochs]}
    for name in dict.fromkeys(itertools.chain(*(epoch.metrics for epoch in epochs))):
        lists[name] = [epoch.metrics.get(name, math.nan) for epoch in epochs]
    return lists


@dataclass
class RunState(Listener):
    """The state of a run, folded from its events. A listener: give it each event in order.

    When the program resumes from a checkpoint, the reports and epochs after that checkpoint are
    removed.
    """

    # every `Reported`; off where there are many runs and only the epochs matter
    keep_reports: bool = True
    started: RunStarted | None = None  # the latest
    loaded: CheckpointLoaded | None = None  # the load of the ranks that started last
    reports: list[Reported] = field(default_factory=list)
    # the newest values of the other ranks in this attempt
    rank_values: dict[int, dict[str, float]] = field(default_factory=dict)
    # The epochs of all attempts. With `evaluation_interval` an epoch is there several times.
    epochs: list[EpochFinished] = field(default_factory=list)
    checkpoint: CheckpointWritten | None = None  # the newest
    predictions: PredictionsMade | None = None
    finished: RunFinished | None = None
    # each change of the slow ranks
    stragglers: list[StragglersFound] = field(default_factory=list)
    bad_steps: list[StepFoundBad] = field(default_factory=list)
    # the newest of each name, the last shown at the end, if reports are kept
    pictures: dict[str, PictureShown] = field(default_factory=dict)
    measured: list[NodeMeasured] = field(default_factory=list)  # if reports are kept
    num_starts: int = 0
    num_announced_losses: int = 0  # ends of a gang because nodes left, as they had announced
    departure: str = ""  # why nodes left, the last time
    grace_seconds: float = 0.0  # see `AttemptStarted`
    # from the copy of the newest whole checkpoint until the store had it; 0: not known
    writing_seconds: float = 0.0

    def __post_init__(self) -> None:
        # seconds and step of the first and the last sign of progress of the ranks that started last
        self._progress: list[tuple[float, int]] = []
        self._copied_at: dict[int, float] = {}  # seconds by step
        self._time = WallTime()

    @classmethod
    def of(cls, events: Iterable[Event], keep_reports: bool = True) -> RunState:
        """Fold `events`, in their order."""
        state = cls(keep_reports)
        for event in events:
            state.handle(event)
        return state

    def handle(self, event: Event) -> None:
        """Update the state with the next event of the run."""
        self._time.handle(event)
        if isinstance(event, Reported | EpochFinished) and event.at:
            self._progress = [*self._progress[:1], (event.at, event.step)]
        self._follow_attempts(event)
        if type(event) in NEWEST:
            setattr(self, NEWEST[type(event)], event)
        self._add_results(event)
        self._add_others(event)

    def _follow_attempts(self, event: Event) -> None:
        """Take note of what starts, ends and resumes the ranks."""
        match event:
            case AttemptStarted():
                self.grace_seconds = event.grace_seconds
            case AttemptEnded():
                if event.num_leaving:
                    self.num_announced_losses += 1
                    self.departure = event.reason
                if self.stragglers and self.stragglers[-1].stragglers:
                    # compared anew
                    self.stragglers.append(StragglersFound(event.step, [], at=event.at))
            case RunStarted():
                self.num_starts += 1
                self.loaded, self._progress, self.rank_values = None, [], {}
            case CheckpointLoaded():
                self.reports = [each for each in self.reports if each.step <= event.step]
                self.epochs = list(event.epochs)

    def _add_results(self, event: Event) -> None:
        """Add the results that ranks report."""
        match event:
            case Reported() if self.keep_reports:
                if self.loaded is None and len(self._progress) == 1:
                    # the first of a function that has looked for no checkpoint
                    self.reports = [each for each in self.reports if each.step < event.step]
                self.reports.append(event)
            case RankReported():
                values = self.rank_values.setdefault(event.rank, {})
                for report in event.reports:
                    values.update(report.values)
            case EpochFinished():
                # A history file repeats the epochs of earlier attempts that `CheckpointLoaded` has
                # brought already.
                by_step = {epoch.step: epoch for epoch in self.epochs} | {event.step: event}
                self.epochs = list(by_step.values())

    def _add_others(self, event: Event) -> None:
        match event:
            case CheckpointSaved():
                self._copied_at[event.step] = event.at
            case CheckpointWritten():
                self.writing_seconds = event.at - self._copied_at.pop(event.step, event.at)
            case StragglersFound():
                self.stragglers.append(event)
            case StepFoundBad():
                self.bad_steps.append(event)
            case PictureShown() if self.keep_reports:
                self.pictures.pop(event.name, None)
                self.pictures[event.name] = event
                if len(self.pictures) > MAX_PICTURES:
                    del self.pictures[next(iter(self.pictures))]
            case NodeMeasured() if self.keep_reports:
                self.measured.append(event)

    @property
    def monitor(self) -> Monitor:
        """The figure of an epoch that decides which is the best."""
        if self.started is None:
            return Monitor()
        return Monitor(**self.started.config.get("monitor", {}))

    @property
    def num_epochs(self) -> int:
        """The number of whole epochs that are done."""
        return sum(each.share == 1 for each in self.epochs)

    @property
    def best(self) -> EpochFinished | None:
        """The best of the finished epochs."""
        return find_best(self.epochs, self.monitor)

    @property
    def last_step(self) -> int:
        """The last optimizer step that is known to be done."""
        newest: list[Reported | EpochFinished] = [*self.reports[-1:], *self.epochs[-1:]]
        return max([self.resumed_step, *(each.step for each in newest)])

    @property
    def resumed_step(self) -> int:
        """The step of the checkpoint that the ranks have resumed from; 0 for none."""
        if self.loaded is None:
            return 0
        return self.loaded.step

    def seconds_left(self, now: float) -> float | None:
        """Estimate the seconds from `now`, since the epoch, to the last step, by the pace since
        these ranks' first report; None where it is not known.
        """
        if self.started is None or self.finished or len(self._progress) < 2:
            return None
        (began, first), (ended, last) = self._progress
        if last <= first or not self.started.num_steps:
            return None
        pace = (ended - began) / (last - first)
        return max(0.0, ended - now + (self.started.num_steps - last) * pace)

    def time_spent(self, until: float = 0.0) -> TimeSpent:
        """Return what the wall time went to, up to the last event, or `until` (seconds since the
        epoch) if it is later.

        All zeros where the events have no times.
        """
        if self.finished:
            until = 0.0
        return self._time.spent(until)

    def position(self, step: int) -> float:
        """Convert an optimizer step to epochs, such as 1.5 for the middle of the second."""
        if self.started is None:
            return 0.0
        return step * int(self.started.config.get("epochs", 0)) / max(1, self.started.num_steps)
