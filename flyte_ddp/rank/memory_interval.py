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
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.storage.cgroups import free_memory
from flyte_ddp.world import World

MAX_SHARE = 0.01  # of the training's time that states in memory may take
NUM_MEASURED = 5  # newest states, of which the medians count
# factor by which what was measured has to differ from the interval, so that another one is chosen
MIN_CHANGE = 1.25

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MemoryInterval:
    """The optimizer steps between two states in memory, the same on every rank.

    An automatic one is as short as `MAX_SHARE` allows. For that the first states are kept one step
    after another: the first `NUM_FILES` of them take new memory, and so are not measured.

    """

    steps: int  # 0: there are none; as configured, negative for automatic
    process: RankProcess
    world: World
    # returns the bytes of what the ranks of this node save of a state
    count_bytes: Callable[[], int]
    is_on: bool = False  # the first one was due, and they fit into memory
    _num_steps: int = 0  # of this process
    _num_kept: int = 0
    # number of the step after which one was due, and when it was over
    _previous: tuple[int, float] = 0, 0.0
    # for which a state held the loop
    _copy_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEASURED))
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_MEASURED))

    def __post_init__(self) -> None:
        self.is_automatic = self.steps < 0
        if self.is_automatic:
            self.steps = 0 if self.process.job.ran_out_of_memory else 1

    def is_due(self, step: int) -> bool:
        """Return whether a state is kept after this step. Every rank calls it, after each step.

        Not after this process's first step, which gives the optimizer its memory: so it is known
        what is left.
        """
        self._num_steps += 1
        if not self.steps or step % self.steps or self._num_steps == 1:
            return False
        if not self.is_on:
            self.is_on = has_memory("memory_interval", self.count_bytes(), self.process, self.world)
            self.steps = self.steps if self.is_on else 0
        return self.is_on

    def measure(self, started: float, is_kept: bool) -> None:
        """Note when keeping a state began, by `time.perf_counter`, and that it is over. Every rank
        calls it.

        Args:
            is_kept: it was not left out on this rank, which is one that writes.
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
                found = math.ceil(
                    median(self._copy_seconds) / (MAX_SHARE * median(self._step_seconds))
                )
        found = max(self.world.all_gather(found))
        if found > MIN_CHANGE * self.steps or 0 < MIN_CHANGE * found < self.steps:
            self.steps = int(found)
        self._previous = self._num_steps, time.perf_counter()


def has_memory(setting: str, num_bytes: int, process: RankProcess, world: World) -> bool:
    """Return whether states fit into the memory of each node; warn on rank 0 if not. Every rank of
    `world` calls it.

    Args:
        setting: the name of what asks for it, for the warning.
        num_bytes: of what the ranks of this node save of a state.
    """
    lacking = (
        _describe_lack(num_bytes, process.node)
        if process.slots
        else "expected Linux, with memfd_create"
    )
    lacking = world.find_text(lacking)
    if lacking and world.is_first:
        logger.warning("%s: no state is kept in memory: %s", setting, lacking)
    return not lacking


def _describe_lack(num_bytes: int, node: NodeRanks) -> str:
    """Return what this node lacks for two states in memory, and copies of another node's; "" if it
    lacks nothing.

    One more is left for the copy from which a thread writes.

    Args:
        num_bytes: of a state, of what the ranks of one node save of it.
    """
    needed, free = num_bytes * (NUM_FILES * min(2, node.num_nodes) + 1), free_memory()
    return (
        ""
        if free > needed
        else f"expected {_gib(needed)} of free memory on each node, got {_gib(free)}"
    )


def _gib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / 2**30:.2f} GiB"
