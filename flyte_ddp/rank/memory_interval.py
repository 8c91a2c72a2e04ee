"""How often states are kept in the memory of nodes, and whether they fit there."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from flyte_ddp.checkpoints.memory import NUM_FILES
from flyte_ddp.launch.protocol.ranks import NodeRanks
from flyte_ddp.process.memory_limits import free_memory
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.world import World

MAX_SHARE = 0.01  # the share of the training's time that states in memory may take
NUM_MEASURED = 5  # newest states that are measured; their medians count
# The interval changes if the measured interval differs from it by this factor.
MIN_CHANGE = 1.25

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MemoryInterval:
    """The optimizer steps between two states in memory, the same on every rank.

    An automatic interval is as short as `MAX_SHARE` allows. To measure it, the first states are
    kept one step after another. The first `NUM_FILES` states take new memory, so they are not
    measured.
    """

    steps: int  # the configured interval; 0 for no states, negative for automatic
    process: RankProcess
    world: World
    # returns how many bytes of a state the ranks of this node save
    count_bytes: Callable[[], int]
    is_on: bool = False  # the first state was due, and states fit into memory
    _num_steps: int = 0  # steps of this process
    _num_kept: int = 0
    # number of the step after which the last state was due, and the time when it was kept
    _previous: tuple[int, float] = 0, 0.0
    # seconds for which a state held the loop
    _copy_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEASURED))
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEASURED))

    def __post_init__(self) -> None:
        self.is_automatic = self.steps < 0
        if self.is_automatic:
            self.steps = 1
            if self.process.job.ran_out_of_memory:
                self.steps = 0

    def is_due(self, step: int) -> bool:
        """Return whether a state is kept after this step. Every rank calls it, after each step.

        No state is kept after this process's first step. That step allocates the optimizer's
        memory, so the memory left is known only afterwards.
        """
        self._num_steps += 1
        if not self.steps or step % self.steps or self._num_steps == 1:
            return False
        if not self.is_on:
            self.is_on = has_memory("memory_interval", self.count_bytes(), self.process, self.world)
            if not self.is_on:
                self.steps = 0
        return self.is_on

    def measure(self, started: float, is_kept: bool) -> None:
        """Note that a state was kept. Every rank calls this.

        Args:
            started: the `time.perf_counter` at which the keeping began.
            is_kept: this rank has written its part.
        """
        if not self.is_automatic:
            return
        number, ended = self._previous
        if ended:
            self._step_seconds.append((started - ended) / (self._num_steps - number))
        found = 0.0
        if is_kept:
            found, self._num_kept = 1.0, self._num_kept + 1
            if self._num_kept > NUM_FILES:
                self._copy_seconds.append(time.perf_counter() - started)
                copy_seconds, step_seconds = median(self._copy_seconds), median(self._step_seconds)
                found = math.ceil(copy_seconds / (MAX_SHARE * step_seconds))
        found = max(self.world.all_gather(found))
        if found > MIN_CHANGE * self.steps or 0 < MIN_CHANGE * found < self.steps:
            self.steps = int(found)
        self._previous = self._num_steps, time.perf_counter()


def has_memory(setting: str, num_bytes: int, process: RankProcess, world: World) -> bool:
    """Return whether states fit into the memory of each node; warn on rank 0 if not. Every rank of
    `world` calls it.

    Args:
        setting: the name of the setting, for the warning.
        num_bytes: how many bytes of a state the ranks of this node save.
    """
    lacking = "expected Linux, with memfd_create"
    if process.slots:
        lacking = _describe_lack(num_bytes, process.node)
    lacking = world.find_text(lacking)
    if lacking and world.is_first:
        logger.warning("%s: no state is kept in memory: %s", setting, lacking)
    return not lacking


def _describe_lack(num_bytes: int, node: NodeRanks) -> str:
    """Return what this node lacks for `NUM_FILES` states in memory and the copies of another node's
    states; "" if it lacks nothing.

    Room for one more state is left for the copy from which a thread writes.

    Args:
        num_bytes: how many bytes of a state the ranks of one node save.
    """
    needed, free = num_bytes * (NUM_FILES * min(2, node.num_nodes) + 1), free_memory()
    if free > needed:
        return ""
    return f"expected {_gib(needed)} of free memory on each node, got {_gib(free)}"


def _gib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / 2**30:.2f} GiB"
