"""Compare the ranks' own times per step, and name the ranks that are slower than the others for a
minute.

The nodes' heartbeats bring the sums that flyte_ddp/rank/step_timer.py makes. Knows nothing of
processes and nodes.
"""

from __future__ import annotations

import bisect
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flyte_ddp import events
from flyte_ddp.config.waits import BEAT_INTERVAL
from flyte_ddp.launch.protocol.messages import PHASES, Pace

# seconds until a rank that became slow, or fast again, is reported: less than a minute
SLOW_SECONDS = 50.0
NUM_WINDOWS = 5  # windows in SLOW_SECONDS; a rank must be slow in each of them
MIN_STEPS = 2  # steps of every rank in a window; a window with longer steps lasts longer
SLOW_FACTOR = 1.3  # least ratio of a slow rank's time to the median of the other ranks
MIN_EXCESS = 0.1  # least difference to the median, as a share of the time from step to step

logger = logging.getLogger(__name__)


@dataclass
class PaceWatch:
    """The comparison of the ranks of one attempt."""

    world_size: int  # number of ranks
    emit: Callable[[events.Event], None]  # called with an event when the slow ranks have changed
    # the reported slow ranks, by their numbers
    slow: dict[int, events.Straggler] = field(default_factory=dict)
    _latest: dict[int, Pace] = field(default_factory=dict)
    _begun: dict[int, Pace] = field(default_factory=dict)  # paces at the start of the window
    _begun_at: float = 0.0
    _look_at: float = 0.0  # monotonic: when to look again whether the window is over
    # slow ranks of each of the last windows
    _windows: list[dict[int, events.Straggler]] = field(default_factory=list)

    def note(self, node: str, paces: Sequence[Pace], step: int) -> None:
        """Note the paces in a heartbeat of a node. Compare the ranks when a window is over."""
        for pace in paces:
            self._latest[pace.rank] = dataclasses.replace(pace, node=node)
        now = time.monotonic()
        if len(self._latest) < max(2, self.world_size):  # no comparison without all of the ranks
            return
        if not self._begun:
            self._begun, self._begun_at = dict(self._latest), now
        if now - self._begun_at < SLOW_SECONDS / NUM_WINDOWS or now < self._look_at:
            return
        self._look_at = now + BEAT_INTERVAL / 2  # many nodes send many heartbeats
        steps = {
            rank: pace.num_steps - self._begun[rank].num_steps
            for rank, pace in self._latest.items()
        }
        if min(steps.values()) < MIN_STEPS:
            return
        means = {}
        for rank, pace in self._latest.items():
            pairs = zip(pace.seconds, self._begun[rank].seconds, strict=True)
            means[rank] = [(spent - before) / steps[rank] for spent, before in pairs]
        interval = (now - self._begun_at) / max(steps.values())
        self._windows.append(self._find_slow(means, interval))
        self._begun, self._begun_at = dict(self._latest), now
        self._conclude(step)

    def _find_slow(
        self, means: dict[int, list[float]], interval: float
    ) -> dict[int, events.Straggler]:
        """Return how ranks are slower than the other ranks on their kind of GPU.

        Args:
            means: seconds per step in each phase, by rank.
            interval: seconds from the start of one step to the start of the next.
        """
        kinds: dict[str, list[int]] = {}
        for rank in means:
            kinds.setdefault(_kind_of_gpu(self._latest[rank]), []).append(rank)
        slow = {}
        for ranks in kinds.values():
            if len(ranks) < 2:
                continue
            # Each list is sorted once: with a thousand ranks, a list for each rank takes seconds.
            times = [means[rank] for rank in ranks]
            totals = sorted(map(sum, times))
            phases = [sorted(phase) for phase in zip(*times, strict=True)]
            for rank in ranks:
                straggler = self._compare(rank, means[rank], totals, phases, interval)
                if straggler:
                    slow[rank] = straggler
        return slow

    def _compare(
        self,
        rank: int,
        own: list[float],
        totals: list[float],
        phases: list[list[float]],
        interval: float,
    ) -> events.Straggler | None:
        """Return how a rank is slower than the others; None if it is not.

        Args:
            own: seconds per step in each phase.
            totals: sorted sums of `own`, of all ranks with this one.
            phases: sorted seconds of all ranks in each phase.
        """
        medians = [median_of_others(times, mine) for times, mine in zip(phases, own, strict=True)]
        median = median_of_others(totals, sum(own))
        excesses = [mine - theirs for mine, theirs in zip(own, medians, strict=True)]
        phase = max(range(len(own)), key=excesses.__getitem__)
        is_slow = False
        for mine, theirs in ((sum(own), median), (own[phase], medians[phase])):
            if mine >= SLOW_FACTOR * theirs and mine - theirs >= MIN_EXCESS * interval:
                is_slow = True
        if not is_slow:
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
        in_any = {rank for window in found for rank in window}
        in_all = in_any.intersection(*found)
        always = {rank: each for rank, each in found[-1].items() if rank in in_all}
        kept = {rank: each for rank, each in self.slow.items() if rank in in_any}
        # The phase of a reported rank changes only if another phase is slow in all windows.
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


def median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median of sorted values without `own`, which is one of at least two."""
    place = bisect.bisect_left(ordered, own)
    num_others = len(ordered) - 1
    middle = ((num_others - 1) // 2, num_others // 2)  # the same twice for an odd number
    low, high = (ordered[each + (each >= place)] for each in middle)
    return (low + high) / 2
