"""Watch for workers that could make a gang larger, or replace leaving workers, while it trains.
Prepare spare workers.

The watch asks only workers outside the gang, so it takes no time from the ranks. They import and
fetch what their ranks will need while the gang trains, which ends only then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config.waits import BEAT_INTERVAL
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.nodes.dask.assignment import DaskNode, Worker, assign_nodes
from flyte_ddp.launch.nodes.dask.discovery import WorkerDiscovery
from flyte_ddp.process.threads import start_thread

# seconds after which a worker may join unprepared: its preparation has probably failed
MAX_PREPARATION = 900.0

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Preparation:
    """The preparation of workers for the ranks that they may get."""

    # Begins to prepare the nodes given; workers that are prepared have `has_agent`.
    begin: Callable[[Sequence[DaskNode]], None]
    timeout: float  # seconds after which a worker may join unprepared
    # end of the wait for each worker, by address
    _ends: dict[str, float] = field(default_factory=dict)

    def is_over(self, nodes: Sequence[DaskNode], ready: set[str], now: float) -> bool:
        """Return whether the nodes are `ready`, or have had the time for it. Begins to prepare
        others.
        """
        missing = [each for each in nodes if each.address not in self._ends.keys() | ready]
        if missing:
            self.begin(missing)
            self._ends.update((each.address, now + self.timeout) for each in missing)
        return all(each.address in ready or now >= self._ends[each.address] for each in nodes)

    def forget(self, now: float) -> None:
        """Forget workers after their time: an agent that has waited for so long has ended."""
        self._ends = {each: end for each, end in self._ends.items() if now < end}


@dataclass(eq=False)
class ScaleUpWatch:
    """Looks for workers, from a thread, until it is closed. A full gang needs spare
    ones alone.
    """

    gang: Sequence[Worker]  # the workers of the gang
    sizes: Sequence[int]  # the numbers of nodes at which the run can go on, largest first
    config: ClusterConfig
    discovery: WorkerDiscovery
    # Raises ConfigError if one of the given nodes cannot take part, and an error of any kind if the
    # gang could not save its state just now.
    check_nodes: Callable[[Sequence[DaskNode]], None]
    preparation: Preparation
    not_before: float  # monotonic time before which the gang may not grow

    # addresses of the workers of the next gang, once it is possible
    members: frozenset[str] = frozenset()
    # addresses of workers of the gang that are not in the next gang
    leaving: frozenset[str] = frozenset()
    # time at which each idle worker was first seen, without workers that were away since
    _first_seen: dict[str, float] = field(default_factory=dict)
    _problem: str = ""  # the latest problem, to log each once
    _spares: str = ""  # the latest line about spare nodes
    _is_over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        start_thread("growth", self._run)

    def replace(self, leaving: frozenset[str]) -> None:
        """Look for workers that replace the leaving workers of the gang."""
        if leaving != self.leaving:
            self.leaving, self.members = leaving, frozenset()

    def close(self) -> None:
        """End the watch without waiting for its thread. `members` stays."""
        self._is_over.set()

    def _run(self) -> None:
        while not self._is_over.wait(BEAT_INTERVAL):
            try:
                if self.leaving or len(self.gang) < self.sizes[0]:
                    self.members = self._find_members()
                elif self.config.spare_nodes:
                    self._keep_spares()
                self._problem = ""
            except Exception as error:  # nothing that only watches may end a run
                self.members = frozenset()
                if self._problem != str(error):
                    self._problem = str(error)
                    logger.warning("the gang cannot grow for now: %s", error)

    def _find_members(self) -> frozenset[str]:
        """Return the addresses of the workers of the largest gang that is possible now; none if it
        is the present gang.
        """
        own = {each.address for each in self.gang}
        staying = [each for each in self.gang if each.address not in self.leaving]
        idle = [each for each in self.discovery.present_workers(own) if self._is_fit(each)]
        now = time.monotonic()
        settled = self._find_settled(idle, now)
        size = next((size for size in self.sizes if size <= len(staying) + len(settled)), 0)
        newcomers = settled[: max(0, size - len(staying))]
        if not newcomers or (now < self.not_before and not self.leaving):
            return frozenset()
        nodes = assign_nodes([*staying, *newcomers], size, self.config)
        new = [node for node in nodes if node.address not in own]
        for node in new:
            try:
                self.check_nodes([node])
            except ConfigError as error:
                self.discovery.mark_unfit(node.address, str(error))
                return frozenset()  # the next look leaves it out
        ready = {each.address for each in idle if each.has_agent}
        # A gang with leaving nodes does not wait.
        if not self.leaving and not self.preparation.is_over(new, ready, now):
            return frozenset()
        return frozenset(node.address for node in nodes)

    def _keep_spares(self) -> None:
        """Prepare idle workers for the loss of a node, and log when their number changes."""
        own = {each.address for each in self.gang}
        idle = [each for each in self.discovery.present_workers(own) if self._is_fit(each)]
        wanted = self.config.spare_nodes
        spares: list[DaskNode] = []
        if idle:
            spares = assign_nodes(idle, min(wanted, len(idle)), self.config)
        ready, now = {each.address for each in idle if each.has_agent}, time.monotonic()
        self.preparation.forget(now)
        self.preparation.is_over(spares, ready, now)
        names = [node.worker for node in spares if node.address in ready]
        text = f"{len(names)} of {wanted} spare nodes are ready: {', '.join(names) or 'none'}"
        if text != self._spares:
            self._spares = text
            logger.info("%s", text)

    def _find_settled(self, idle: Sequence[Worker], now: float) -> list[Worker]:
        """Return the idle workers that are there for long enough to be counted on."""
        self._first_seen = {each.address: self._first_seen.get(each.address, now) for each in idle}
        if self.leaving:
            return list(idle)
        delay = self.config.grow_delay
        return [each for each in idle if now - self._first_seen[each.address] >= delay]

    def _is_fit(self, each: Worker) -> bool:
        if len(each.gpus) < self.config.gpus_per_node:
            self.discovery.mark_unfit(
                each.address,
                f"gpus_per_node: expected {self.config.gpus_per_node}, got {len(each.gpus)} on "
                f"worker {each.name}",
            )
            return False
        return not (each.is_busy or each.is_slow)
