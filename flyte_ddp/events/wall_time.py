"""Account for the wall time of a run."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from flyte_ddp.events import kinds
from flyte_ddp.events.kinds import Event

# A history has no histograms, predictions and pictures, and is to give the same account. A
# checkpoint is written beside the training, and divides none of its time; nor do the comparison of
# the ranks, the measurements of the nodes, and what others than rank 0 report.
NOT_BOOKED = (
    kinds.HistogramsTaken,
    kinds.PredictionsMade,
    kinds.CheckpointWritten,
    kinds.StragglersFound,
    kinds.NodesFoundSlow,
    kinds.StepFoundBad,
    kinds.RankReported,
    kinds.NodeMeasured,
    kinds.NodesAwaited,
    kinds.PictureShown,
)


@dataclass(frozen=True)
class TimeSpent:
    """Wall time of a run by purpose, in seconds. Folded from its events; the last line of a
    history.
    """

    stepping: float = 0.0  # optimizer steps that count
    evaluating: float = 0.0
    # the training waited for a copy of its state; at the end for the last uploads
    checkpoint_stalls: float = 0.0
    waiting_for_nodes: float = 0.0
    starting: float = 0.0  # from the launch to the first step
    restarting: float = 0.0  # from the last sign of progress before a failure to the next step
    # from the last sign of progress before nodes left, as announced, to the next step
    announced_losses: float = 0.0
    # all work that was lost with an attempt, because no checkpoint had it
    redone_steps: float = 0.0
    # everything that a function or a script did and has not reported
    program: float = 0.0

    @property
    def wall(self) -> float:
        """The wall time, from the launch."""
        return sum(self.parts().values())

    @property
    def goodput(self) -> float:
        """The share of the wall time in which the run got on: stepping and evaluating, in [0,
        1].
        """
        return (self.stepping + self.evaluating) / self.wall if self.wall else 0.0

    def parts(self) -> dict[str, float]:
        """Return the seconds of each purpose."""
        return dataclasses.asdict(self)


def split_steps(epochs: Sequence[kinds.EpochFinished]) -> dict[str, float]:
    """Return the shares of the steps' time by purpose; an empty dict if no epoch has the phases of
    its ranks.

    "stragglers" is what the mean rank waits for the slowest one. "exchange" is all that is left
    beside the slowest rank's own work: the exchange of gradients, and the update.
    """
    seconds: Counter[str] = Counter()
    step = 0
    for epoch in epochs:
        num_steps, step = epoch.step - step, epoch.step
        if not epoch.rank_phase_seconds:
            continue
        means = {name: statistics.fmean(each) for name, each in epoch.rank_phase_seconds.items()}
        slowest, mean = max(epoch.rank_step_seconds), sum(means.values())
        means["stragglers"] = max(0.0, slowest - mean)
        means["exchange"] = max(0.0, epoch.seconds / max(1, num_steps) - slowest)
        seconds.update({name: num_steps * each for name, each in means.items()})
    whole = seconds.total()
    if not whole:
        return {}
    return {name: each / whole for name, each in seconds.items()}


@dataclass
class WallTime:
    """The account: each interval between two events is booked once, so the parts always add up to
    the wall time.

    An account of the cost books the price of each interval in place of its seconds.
    """

    is_cost: bool = False
    rate: float = 1.0  # amount that is booked for each second
    seconds: dict[str, float] = field(default_factory=lambda: TimeSpent().parts())
    pause: str = "starting"  # purpose of the time without steps
    phase: str = "starting"  # purpose of the time since the last event
    # Purpose of the time of running ranks. All time of a recipe is known; another program's time
    # is known only up to a report.
    work: str = "program"
    has_saved: bool = False
    last: float = 0.0  # event, seconds since the epoch
    # steps of this attempt's checkpoints, and the seconds then
    saved: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    # the same after the newest of these checkpoints
    reached: list[tuple[int, dict[str, float]]] = field(default_factory=list)

    def handle(self, event: Event) -> None:
        """Book the time since the last event. Events without a time are ignored."""
        if not event.at or isinstance(event, NOT_BOOKED):
            return
        if isinstance(event, kinds.AttemptStarted) and event.launched_at > self.last:
            self.pause = "starting"
            if self.last:
                self.pause = "restarting"
            self.phase = self.pause
            self.last = event.launched_at  # another process: nobody waited in between
        if self.is_cost and isinstance(event, kinds.AttemptStarted):
            self.rate = event.price / 3600
        elapsed = 0.0
        if self.last:
            elapsed = self.rate * max(0.0, event.at - self.last)
        self.last = max(self.last, event.at)
        self.seconds[self.phase] += elapsed
        self._book_attempts(event, elapsed)
        self._book_work(event, elapsed)

    def _book_attempts(self, event: Event, elapsed: float) -> None:
        """Book the time around the start and the end of ranks."""
        match event:
            case kinds.AttemptStarted():
                waited = min(self.rate * event.waited_seconds, elapsed)
                self._move(waited, self.phase, "waiting_for_nodes")
                if self.is_cost:
                    self.seconds["waiting_for_nodes"] -= min(waited, event.absent_cost)
                self.phase = self.pause
            case kinds.AttemptEnded():
                self.pause = "restarting"
                if event.num_leaving:
                    self.pause = "announced_losses"
                self._move(min(self.rate * event.idle_seconds, elapsed), self.phase, self.pause)
                self.phase = self.pause
                self.reached.append((event.step, dict(self.seconds)))
            case kinds.RunStarted():
                self.work = "program"
                if event.num_steps:
                    self.work = "stepping"
                if not self._has_saved_steps():  # otherwise CheckpointLoaded follows
                    self._start_training(0)
                self.phase = self.work
            case kinds.CheckpointLoaded():
                self._move(elapsed, self.work, self.pause)
                self._start_training(event.step)

    def _book_work(self, event: Event, elapsed: float) -> None:
        """Book the time of ranks that train."""
        match event:
            case kinds.Reported():
                if self.phase == "program":
                    self._move(elapsed, "program", "stepping")
                self.reached.append((event.step, dict(self.seconds)))
            case kinds.EpochFinished():
                self._move(self.rate * event.evaluation_seconds, "stepping", "evaluating")
            case kinds.CheckpointSaved():
                stall = min(self.rate * event.seconds, elapsed)
                self._move(stall, self.work, "checkpoint_stalls")
                self.has_saved = True
                mark = event.step, dict(self.seconds)
                if event.url or not self._has_saved_steps():
                    self.saved.append(mark)
                    self.reached = []
                else:  # states in memory are too many to know each for the whole run
                    self.reached.append(mark)
            case kinds.RunFinished():
                # A recipe ends with its last uploads, and another program with what it likes.
                if self.work == "stepping" and self.has_saved:
                    self._move(elapsed, "stepping", "checkpoint_stalls")

    def _has_saved_steps(self) -> bool:
        return any(step for step, _ in self.saved)

    def spent(self, until: float) -> TimeSpent:
        """Return the account up to the last event, or `until` if it is later."""
        seconds = dict(self.seconds)
        if self.last:
            seconds[self.phase] += self.rate * max(0.0, until - self.last)
        return TimeSpent(**seconds)

    def _start_training(self, resumed_step: int) -> None:
        """Book what the last attempt did after `resumed_step` as work that is done again.

        A state in memory may be of any step: between two reports the steps are taken to be equally
        long.
        """
        marks = self.saved + self.reached
        before = [each for each in marks if each[0] <= resumed_step]
        if before:
            first, seconds = before[-1]
            following = marks[marks.index(before[-1]) :]
            after = [each for each in following if each[0] > resumed_step]
            last, later = [*after, (math.inf, seconds)][0]
            share = (resumed_step - first) / (last - first)
            for name in ("stepping", "evaluating", "checkpoint_stalls", "program"):
                kept = seconds[name] + share * (later[name] - seconds[name])
                self._move(self.seconds[name] - kept, name, "redone_steps")
        self.saved, self.reached = [(resumed_step, dict(self.seconds))], []
        self.phase = self.work

    def _move(self, seconds: float, source: str, target: str) -> None:
        seconds = min(max(0.0, seconds), self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[target] += seconds
