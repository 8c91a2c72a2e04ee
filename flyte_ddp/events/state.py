"""The state of a run, computed from its events.

`RunState` handles one event after another. It is the only place that knows what a restart from a
checkpoint undoes. Pages, trackers and results take a run's epochs and reports from it.
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
    NodesAwaited,
    NodesFoundSlow,
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
# fields of `RunState` with the newest event of a class
NEWEST: dict[type, str] = {
    NodesAwaited: "awaited",
    NodesFoundSlow: "slow_nodes",
    AttemptEnded: "ended",
    RunStarted: "started",
    CheckpointLoaded: "loaded",
    CheckpointWritten: "checkpoint",
    PredictionsMade: "predictions",
    RunFinished: "finished",
}


def find_best(results: Iterable[T], monitor: Monitor) -> T | None:
    """Return the epoch or the report with the best value of `monitor`. If several have this value,
    return the one with the lowest held-out loss; if several have this loss, the first of them.
    """

    def key(result: T) -> tuple[float, float]:
        values = result.figures().values
        # The better of two values has the lower score.
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
    """The state of a run. Pass each event of the run to `handle`, in order.

    When the program resumes from a checkpoint, the reports and epochs after that checkpoint are
    removed.

    state = RunState.of(read_history("history.jsonl"))
    print(state.last_step, state.best)
    """

    # Keep reports, pictures and measurements of nodes. False saves memory where there are many
    # runs and only the epochs matter.
    keep_reports: bool = True
    awaited: NodesAwaited | None = None  # reason of the current wait; None while ranks run
    slow_nodes: NodesFoundSlow | None = None  # slow nodes that were found last
    ended: AttemptEnded | None = None  # the newest end of an attempt
    started: RunStarted | None = None  # the newest start of the ranks
    # result of the search for a checkpoint in this attempt; None before, or without a search
    loaded: CheckpointLoaded | None = None
    reports: list[Reported] = field(default_factory=list)  # rank 0's reports of all attempts
    # By rank, for all ranks but rank 0: the newest value of each figure in this attempt.
    rank_values: dict[int, dict[str, float]] = field(default_factory=dict)
    # All evaluations, of all attempts. With `evaluation_interval` an epoch has several entries: one
    # for each evaluation, whose `share` is the part of the epoch that was trained.
    epochs: list[EpochFinished] = field(default_factory=list)
    checkpoint: CheckpointWritten | None = None  # the newest checkpoint in the store
    predictions: PredictionsMade | None = None
    finished: RunFinished | None = None
    # Each event lists all ranks that are slow from its time on.
    stragglers: list[StragglersFound] = field(default_factory=list)
    bad_steps: list[StepFoundBad] = field(default_factory=list)
    # the newest picture of each name, in the order in which they were shown
    pictures: dict[str, PictureShown] = field(default_factory=dict)
    measured: list[NodeMeasured] = field(default_factory=list)
    num_starts: int = 0  # starts of the ranks
    # attempts that ended because nodes left and had announced it
    num_announced_losses: int = 0
    departure: str = ""  # why nodes left, the last time
    grace_seconds: float = 0.0  # see `AttemptStarted`
    # seconds from the copy of the newest stored checkpoint until the store had it; 0: not known
    writing_seconds: float = 0.0

    def __post_init__(self) -> None:
        # (Unix time, step) of the first and of the last report or epoch in this attempt
        self._progress: list[tuple[float, int]] = []
        # Unix time by step of checkpoints that are copied, and not yet in the store
        self._copied_at: dict[int, float] = {}
        self._time, self._cost = WallTime(), WallTime(is_cost=True, rate=0.0)

    @classmethod
    def of(cls, events: Iterable[Event], keep_reports: bool = True) -> RunState:
        """Return the state of a run after `events`."""
        state = cls(keep_reports)
        for event in events:
            state.handle(event)
        return state

    def handle(self, event: Event) -> None:
        """Update the state with the next event of the run."""
        self._time.handle(event)
        self._cost.handle(event)
        # This comes before `_add_results`, which reads `_progress`.
        if isinstance(event, Reported | EpochFinished) and event.at:
            self._progress = [*self._progress[:1], (event.at, event.step)]
        self._follow_attempts(event)
        if type(event) in NEWEST:
            setattr(self, NEWEST[type(event)], event)
        self._add_results(event)
        self._add_incidents(event)

    def _follow_attempts(self, event: Event) -> None:
        """Update the state when the ranks start, end or resume."""
        match event:
            case AttemptStarted():
                self.awaited = None
                self.grace_seconds = event.grace_seconds
            case AttemptEnded():
                if event.num_leaving:
                    self.num_announced_losses += 1
                    self.departure = event.reason
                if self.stragglers and self.stragglers[-1].stragglers:
                    # The next attempt compares its ranks from the beginning.
                    self.stragglers.append(StragglersFound(event.step, [], at=event.at))
            case RunStarted():
                self.num_starts += 1
                self.loaded, self._progress, self.rank_values = None, [], {}
            case CheckpointLoaded():
                self.reports = [each for each in self.reports if each.step <= event.step]
                # The events of earlier attempts have the phases, which checkpoints have not.
                known = {epoch.step: epoch for epoch in self.epochs}
                self.epochs = [known.get(epoch.step, epoch) for epoch in event.epochs]

    def _add_results(self, event: Event) -> None:
        """Add the results that ranks report."""
        match event:
            case Reported() if self.keep_reports:
                if self.loaded is None and len(self._progress) == 1:
                    # This is the first report of the attempt, and the program has not called
                    # `session.load`. So it began again, and repeats all steps from here.
                    self.reports = [each for each in self.reports if each.step < event.step]
                self.reports.append(event)
            case RankReported():
                values = self.rank_values.setdefault(event.rank, {})
                for report in event.reports:
                    values.update(report.values)
            case EpochFinished():
                # An epoch can arrive twice: with `CheckpointLoaded`, and again from a history
                # file. The later one replaces the one of the same step.
                by_step = {epoch.step: epoch for epoch in self.epochs} | {event.step: event}
                self.epochs = list(by_step.values())

    def _add_incidents(self, event: Event) -> None:
        """Add what happens beside the training: stored checkpoints, slow ranks, bad steps, pictures
        and measurements.
        """
        match event:
            case CheckpointSaved():  # The state is copied, and the training continues.
                self._copied_at[event.step] = event.at
            case CheckpointWritten():  # The copy is in the store.
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
        """The metric that decides which epoch is the best."""
        if self.started is None:
            return Monitor()
        return Monitor(**self.started.config.get("monitor", {}))

    @property
    def num_epochs(self) -> int:
        """The number of epochs that are trained to their end."""
        return sum(each.share == 1 for each in self.epochs)

    @property
    def best(self) -> EpochFinished | None:
        """The best of all evaluations."""
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

    @property
    def ends_at(self) -> float | None:
        """The estimated Unix time of the last step, by the pace since the first report in this
        attempt; None while the pace or the last step is unknown.
        """
        if self.started is None or self.finished or len(self._progress) < 2:
            return None
        (first_at, first_step), (last_at, last_step) = self._progress
        if last_step <= first_step or not self.started.num_steps:
            return None
        step_seconds = (last_at - first_at) / (last_step - first_step)
        return last_at + (self.started.num_steps - last_step) * step_seconds

    def seconds_left(self, now: float) -> float | None:
        """Estimate the seconds from `now` (Unix time) until the last step. Return None while
        `ends_at` is unknown.
        """
        if self.ends_at is None:
            return None
        return max(0.0, self.ends_at - now)

    def time_spent(self, until: float = 0.0) -> TimeSpent:
        """Return the wall time of the run by purpose, up to the last event, or up to `until` (Unix
        time) if that is later and the run goes on.

        All times are 0 if the events have no timestamps.
        """
        if self.finished:
            until = 0.0
        return self._time.spent(until)

    def cost(self, until: float = 0.0) -> dict[str, float]:
        """Return what the nodes have cost, as `time_spent` counts: in all, and of it for training,
        for waiting, and for work that was lost and is repeated. It is empty if no price is known.
        """
        if self.finished:
            until = 0.0
        spent = self._cost.spent(until)
        if not spent.wall:
            return {}
        training = spent.stepping + spent.evaluating + spent.program
        return {
            "total": spent.wall,
            "training": training,
            "waiting": spent.wall - training - spent.redone_steps,
            "repeated_work": spent.redone_steps,
        }

    def position(self, step: int) -> float:
        """Convert an optimizer step to epochs, such as 1.5 for the middle of the second epoch."""
        if self.started is None:
            return 0.0
        if self.epochs:
            return step * self.epochs[-1].position / self.epochs[-1].step
        return step * int(self.started.config.get("epochs", 0)) / max(1, self.started.num_steps)
