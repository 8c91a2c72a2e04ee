"""Compare the ranks' own times per step, and name the ranks that are slower than the others for a
minute.

The nodes' heartbeats bring the sums that flyte_ddp/rank/step_timer.py makes. Knows nothing of
processes and nodes.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flyte_ddp import events
from flyte_ddp.launch.protocol.messages import PHASES, Pace

# for which a rank is slow, or no longer slow, until it is named: that is within a minute
SLOW_SECONDS = 50.0
NUM_WINDOWS = 5  # in these seconds; a rank is slow if it is in each of them
MIN_STEPS = 2  # of every rank in a window; it lasts longer where steps are long
SLOW_FACTOR = 1.3  # times the median of the other ranks, in all phases or in one
MIN_EXCESS = 0.1  # of the time from step to step, by which it must be longer

logger = logging.getLogger(__name__)


@dataclass
class PaceWatch:
    """The comparison of the ranks of one attempt."""

    world_size: int  # number of ranks
    emit: Callable[[events.Event], None]  # called with an event when the slow ranks have changed
    # that were named, by their rank
    slow: dict[int, events.Straggler] = field(default_factory=dict)
    _latest: dict[int, Pace] = field(default_factory=dict)
    _begun: dict[int, Pace] = field(default_factory=dict)  # when the window began
    _begun_at: float = 0.0
    # the slow ranks of the last ones
    _windows: list[dict[int, events.Straggler]] = field(default_factory=list)

    def note(self, node: str, paces: Sequence[Pace], step: int) -> None:
        """Take in what a heartbeat of a node says of its ranks; compare when a window is over."""
        for pace in paces:
            self._latest[pace.rank] = dataclasses.replace(pace, node=node)
        now = time.monotonic()
        if len(self._latest) < max(2, self.world_size):  # one alone has none to be compared with
            return
        if not self._begun:
            self._begun, self._begun_at = dict(self._latest), now
        if now - self._begun_at < SLOW_SECONDS / NUM_WINDOWS:
            return
        steps = {
            rank: pace.num_steps - self._begun[rank].num_steps
            for rank, pace in self._latest.items()
        }
        if min(steps.values()) < MIN_STEPS:
            return
        means = {
            rank: [
                (now_spent - before) / steps[rank]
                for now_spent, before in zip(pace.seconds, self._begun[rank].seconds, strict=True)
            ]
            for rank, pace in self._latest.items()
        }
        interval = (now - self._begun_at) / max(steps.values())
        self._windows.append(
            {rank: each for rank in means if (each := self._compare(rank, means, interval))}
        )
        self._begun, self._begun_at = dict(self._latest), now
        self._conclude(step)

    def _compare(
        self, rank: int, means: dict[int, list[float]], interval: float
    ) -> events.Straggler | None:
        """Return how a rank is slower than others on its kind of GPU, if so. Steps begin every
        `interval` seconds.
        """
        own, kind = means[rank], _kind_of_gpu(self._latest[rank])
        others = [
            each
            for number, each in means.items()
            if number != rank and _kind_of_gpu(self._latest[number]) == kind
        ]
        if not others:
            return None
        medians = [statistics.median(each[phase] for each in others) for phase in range(len(own))]
        median = statistics.median(sum(each) for each in others)
        excesses = [mine - theirs for mine, theirs in zip(own, medians, strict=True)]
        phase = max(range(len(own)), key=excesses.__getitem__)
        if not any(
            mine >= SLOW_FACTOR * theirs and mine - theirs >= MIN_EXCESS * interval
            for mine, theirs in ((sum(own), median), (own[phase], medians[phase]))
        ):
            return None
        pace = self._latest[rank]
        return events.Straggler(
            rank,
            pace.node,
            pace.device,
            PHASES[phase],
            own[phase],
            medians[phase],
            sum(own),
            median,
        )

    def _conclude(self, step: int) -> None:
        """Name the slow ranks if they have changed."""
        found = self._windows = self._windows[-NUM_WINDOWS:]
        if len(found) < NUM_WINDOWS:
            return
        always = {
            rank: each for rank, each in found[-1].items() if all(rank in slow for slow in found)
        }
        kept = {
            rank: each for rank, each in self.slow.items() if any(rank in slow for slow in found)
        }
        # The phase of a rank that was named changes only if another one is the slow one for as
        # long.
        for rank, each in always.items():
            is_other = rank in kept and all(slow[rank].phase == each.phase for slow in found)
            if rank not in kept or (is_other and kept[rank].phase != each.phase):
                kept[rank] = each
                logger.warning("%s", each)
        for rank in self.slow.keys() - kept.keys():
            logger.warning("rank %d is no longer slower than the others", rank)
        if kept != self.slow:
            self.slow = kept
            self.emit(events.StragglersFound(step, [kept[rank] for rank in sorted(kept)]))


def _kind_of_gpu(pace: Pace) -> str:
    """Return the kind of the rank's GPU; "" for a CPU."""
    return pace.device.partition(" (cuda")[0]
