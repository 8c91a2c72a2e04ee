"""Account for the wall time of a run. Knows attempts only; `RunState` translates the other events."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from flyte_ddp.events.kinds import AttemptStarted


@dataclass(frozen=True)
class TimeSpent:
    """Wall time of a run by purpose, in seconds. Folded from its events; the last line of a history."""

    stepping: float = 0.0  # optimizer steps that count
    evaluating: float = 0.0
    checkpoint_stalls: float = 0.0  # the training waited for a copy of its state; at the end for the last uploads
    waiting_for_nodes: float = 0.0
    restarting: float = 0.0  # from the launch, or from the last sign of progress before a failure, to the first step
    redone_steps: float = 0.0  # all work that was lost with an attempt, because no checkpoint had it

    @property
    def wall(self) -> float:
        """The wall time, from the launch."""
        return sum(self.parts().values())

    @property
    def goodput(self) -> float:
        """The share of the wall time in which the run got on: stepping and evaluating, in [0, 1]."""
        return (self.stepping + self.evaluating) / self.wall if self.wall else 0.0

    def parts(self) -> dict[str, float]:
        """Return the seconds of each purpose."""
        return dataclasses.asdict(self)


class WallTime:
    """The account: each interval between two events is booked once, so the parts always add up to the wall time."""

    def __init__(self) -> None:
        self.seconds = TimeSpent().parts()
        self.phase = "restarting"  # what the time since the last event goes to
        self.last = 0.0  # event, seconds since the epoch
        self.elapsed = 0.0  # seconds between the last two events
        self.saved: list[tuple[int, dict[str, float]]] = []  # steps of this attempt's checkpoints, and the seconds then

    def advance(self, at: float) -> None:
        """Book the time since the last event on what the run was doing."""
        self.elapsed = max(0.0, at - self.last) if self.last else 0.0
        self.last = max(self.last, at)
        self.seconds[self.phase] += self.elapsed

    def start_attempt(self, event: AttemptStarted) -> None:
        """Book the time until the nodes were there."""
        if event.launched_at > self.last:
            self.last, self.phase = event.launched_at, "restarting"  # another process: nobody waited in between
        self.advance(event.at)
        self._move(min(event.waited_seconds, self.elapsed), self.phase, "waiting_for_nodes")
        self.phase = "restarting"

    def end_attempt(self, idle_seconds: float) -> None:
        """Book the time in which the attempt was dead already."""
        self._move(min(idle_seconds, self.elapsed), self.phase, "restarting")
        self.phase = "restarting"

    def start_training(self, resumed_step: int) -> None:
        """Book what the last attempt did after the checkpoint of `resumed_step` as work that is done again."""
        kept = [seconds for step, seconds in self.saved if step <= resumed_step]
        if kept:
            for name in ("stepping", "evaluating", "checkpoint_stalls"):
                self._move(self.seconds[name] - kept[-1][name], name, "redone_steps")
        self.saved = [(resumed_step, dict(self.seconds))]
        self.phase = "stepping"

    def start_run(self) -> None:
        """As `start_training`, from the start if nothing was saved; else the program says what it resumes from."""
        if not any(step for step, _ in self.saved):
            self.start_training(0)
        self.phase = "stepping"

    def resume(self, step: int) -> None:
        """As `start_training`, and book the time of the loading."""
        self._move(self.elapsed, "stepping", "restarting")
        self.start_training(step)

    def evaluate(self, seconds: float) -> None:
        self._move(seconds, "stepping", "evaluating")

    def save(self, step: int, seconds: float) -> None:
        self._move(min(seconds, self.elapsed), "stepping", "checkpoint_stalls")
        self.saved.append((step, dict(self.seconds)))

    def finish(self) -> None:
        """Book the time since the last event on the uploads."""
        self._move(self.elapsed, "stepping", "checkpoint_stalls")

    def spent(self, until: float) -> TimeSpent:
        """Return the account up to the last event, or `until` if it is later."""
        seconds = dict(self.seconds)
        if self.last:
            seconds[self.phase] += max(0.0, until - self.last)
        return TimeSpent(**seconds)

    def _move(self, seconds: float, source: str, target: str) -> None:
        seconds = min(max(0.0, seconds), self.seconds[source])
        self.seconds[source] -= seconds
        self.seconds[target] += seconds
