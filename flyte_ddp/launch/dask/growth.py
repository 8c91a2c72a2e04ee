"""Watch for workers with which a gang could be larger, or that replace those that leave it, while
it trains.

Starts and ends nothing.

The watch asks only workers outside the gang, so it takes no time from the ranks.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.dask.placement import DaskNode, Worker, assign_nodes
from flyte_ddp.launch.dask.roll_call import RollCall
from flyte_ddp.launch.failures import natural_key

WATCH_INTERVAL = 0.5  # seconds between two looks at the workers outside the gang
# seconds for which a gang does not take a worker whose ranks could not start at once
PREPARATION_TIMEOUT = 60.0
# seconds for a replacement to import what its ranks need, while the gang still trains
REPLACEMENT_DELAY = 5.0

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class GrowthWatch:
    """Looks for workers, from a thread, until it is closed. A gang of full size has nothing to look
    for.
    """

    gang: Sequence[Worker]  # the workers of the gang
    sizes: Sequence[int]  # the numbers of nodes at which the run can go on, largest first
    config: ClusterConfig
    roll_call: RollCall
    # Called with the address of a worker that the gang may get, so that its ranks start sooner;
    # again until it returns True, when they start at once.
    prepare: Callable[[str], bool]
    # Raises ConfigError if one of the nodes given cannot take part, and any error if the gang could
    # not save its state just now.
    check_nodes: Callable[[Sequence[DaskNode]], None]
    not_before: float  # monotonic time before which the gang may not grow
    grace: float  # seconds for the gang to save its state and end

    def __post_init__(self) -> None:
        # addresses of the workers of the next gang, once it is possible
        self.members: frozenset[str] = frozenset()
        # addresses of workers of the gang that the next one goes without
        self.leaving: frozenset[str] = frozenset()
        # when each idle worker was first seen, of those seen ever since
        self._first_seen: dict[str, float] = {}
        self._prepared: set[str] = set()  # addresses of idle workers whose ranks start at once
        self._problem = ""  # the latest, to log each once
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="growth", daemon=True)
        if len(self.gang) < self.sizes[0]:
            self._thread.start()

    def replace(self, leaving: frozenset[str]) -> None:
        """Look for workers in place of those of the gang that leave it, as soon as there are
        any.
        """
        if leaving != self.leaving:
            self.leaving, self.members = leaving, frozenset()
            if not self._thread.is_alive() and not self._is_over.is_set():
                self._thread = threading.Thread(target=self._run, name="growth", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """End the watch without waiting for what it just does; `members` stays."""
        self._is_over.set()

    def join(self, timeout: float) -> None:
        """Wait until a watch that was closed does nothing more on any worker."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        while not self._is_over.wait(WATCH_INTERVAL):
            try:
                self.members = self._find_members()
                self._problem = ""
            except Exception as error:  # nothing that only watches may end a run
                self.members = frozenset()
                if self._problem != str(error):
                    self._problem = str(error)
                    logger.warning("the gang cannot grow for now: %s", error)

    @property
    def _delay(self) -> float:
        """For how many seconds a worker has been there before the gang takes it."""
        return REPLACEMENT_DELAY if self.leaving else self.config.grow_delay

    @property
    def _not_before(self) -> float:
        return -math.inf if self.leaving else self.not_before

    @property
    def _staying(self) -> list[Worker]:
        return [each for each in self.gang if each.address not in self.leaving]

    def _find_members(self) -> frozenset[str]:
        """Return the addresses of the workers of the largest gang that is possible now; none if it
        is this one.
        """
        own, staying = {each.address for each in self.gang}, self._staying
        present = self.roll_call.present_workers(leave_out=own)
        idle = [each for each in present if self._is_fit(each)]
        now = time.monotonic()
        self._first_seen = {each.address: self._first_seen.get(each.address, now) for each in idle}
        # The ones that came first, so that those that are prepared are those that join.
        idle.sort(key=lambda each: (self._first_seen[each.address], natural_key(each.name)))
        self._prepared &= {each.address for each in idle}
        # earlier, what is prepared would end before it is needed
        if now >= self._not_before - self._delay:
            for each in self._newcomers(idle):
                if (
                    each.address not in self._prepared
                    and not self._is_over.is_set()
                    and self.prepare(each.address)
                ):
                    self._prepared.add(each.address)
        seen = {each.address: now - self._first_seen[each.address] for each in idle}
        settled = [
            each
            for each in idle
            if seen[each.address] >= self._delay
            and (
                each.address in self._prepared
                or seen[each.address] >= self._delay + PREPARATION_TIMEOUT
            )
        ]
        newcomers = self._newcomers(settled)
        if not newcomers or now < self._not_before or self._is_over.is_set():
            return frozenset()
        nodes = assign_nodes([*staying, *newcomers], len(staying) + len(newcomers), self.config)
        for node in nodes:
            if node.address not in own:
                try:
                    self.check_nodes([node])
                except ConfigError as error:
                    self.roll_call.mark_unfit(node.address, str(error))
                    return frozenset()  # the next look leaves it out
        return frozenset(node.address for node in nodes)

    def _newcomers(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Return those of `workers` with which the gang has the largest size that is possible with
        them.
        """
        num_staying = len(self._staying)
        size = next((size for size in self.sizes if size <= num_staying + len(workers)), 0)
        return workers[: max(0, size - num_staying)]

    def _is_fit(self, each: Worker) -> bool:
        if len(each.gpus) < self.config.gpus_per_node:
            why = (
                f"gpus_per_node: expected {self.config.gpus_per_node}, got {len(each.gpus)} on "
                f"worker {each.name}"
            )
            self.roll_call.mark_unfit(each.address, why)
            return False
        return not each.is_busy
