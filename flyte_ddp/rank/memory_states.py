"""States in the memory of nodes: how often they are saved there, and how a run finds them and goes
on from one.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from flyte_ddp.checkpoints.files import Damaged, checkpoint_name
from flyte_ddp.checkpoints.resharding import BoxOf, assemble
from flyte_ddp.checkpoints.state_file import check_file
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.launch.protocol.memory import NUM_FILES, Part, lacking_memory, name_memory
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.world import World

MAX_SHARE = 0.01  # of the training's time that states in memory may take
NUM_MEASURED = 5  # newest states, of which the medians count
# factor by which what was measured has to differ from the interval, so that another one is chosen
MIN_CHANGE = 1.25

logger = logging.getLogger(__name__)


class MemoryInterval:
    """The optimizer steps between two states in memory, the same on every rank.

    An automatic one is as short as `MAX_SHARE` allows. For that the first states are kept one step
    after another: the first `NUM_FILES` of them take new memory, and so are not measured.

    Args:
        interval: the configured one, negative for automatic.
        count_bytes: returns the bytes of what the ranks of this node save of a state.
    """

    def __init__(
        self, interval: int, process: RankProcess, world: World, count_bytes: Callable[[], int]
    ) -> None:
        self.is_automatic = interval < 0
        self.steps = interval  # 0: there are none
        if self.is_automatic:
            self.steps = 0 if process.job.ran_out_of_memory else 1
        self.is_on = False  # the first one was due, and they fit into memory
        self._process = process
        self._world = world
        self._count_bytes = count_bytes
        self._num_steps = 0  # of this process
        self._num_kept = 0
        # number of the step after which one was due, and when it was over
        self._previous: tuple[int, float] = 0, 0.0
        # for which a state held the loop
        self._copy_seconds: deque[float] = deque(maxlen=NUM_MEASURED)
        self._step_seconds: deque[float] = deque(maxlen=NUM_MEASURED)

    def is_due(self, step: int) -> bool:
        """Return whether a state is kept after this step. Every rank calls it, after each step.

        Not after this process's first step, which gives the optimizer its memory: so it is known
        what is left.
        """
        self._num_steps += 1
        if not self.steps or step % self.steps or self._num_steps == 1:
            return False
        if not self.is_on:
            self.is_on = has_memory(
                "memory_interval", self._count_bytes(), self._process, self._world
            )
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
        found = max(self._world.all_gather(found))
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
        lacking_memory(num_bytes, process.node)
        if process.slots
        else "expected Linux, with memfd_create"
    )
    if not any(lacks := world.all_gather(float(bool(lacking)))):
        return True
    lacking = world.broadcast_object(lacking, lacks.index(1.0))
    if world.is_first:
        logger.warning("%s: no state is kept in memory: %s", setting, lacking)
    return False


@dataclass(frozen=True)
class MemoryState:
    """A state of which all parts are in the memory of nodes."""

    step: int
    attempt: int
    turn: int
    readers: list[int]  # the ranks that have its parts, by part


def find_states(process: RankProcess, world: World) -> list[MemoryState]:
    """Return the whole states in the memory of all nodes, the newest first. Every rank calls it."""
    if not any(world.all_gather(float(len(process.parts)))):
        return []
    found: dict[tuple[int, int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    num_parts: dict[tuple[int, int, int], int] = {}
    own = [(each.state, each.number, each.num_parts) for each in process.parts]
    for rank in range(world.world_size):
        for state, number, size in world.broadcast_object(own, rank):
            found[state][number].append(rank)
            num_parts[state] = size
    states = []
    for state in sorted(found, reverse=True):
        holders, load, readers = found[state], Counter[int](), []
        if len(holders) < num_parts[state]:
            continue
        for number in range(num_parts[state]):
            ranks = holders[number]
            reader = number if number in ranks else min(ranks, key=lambda rank: (load[rank], rank))
            load[reader] += 1
            readers.append(reader)
        states.append(MemoryState(*state, readers))
    return states


def read_state(
    state: MemoryState, process: RankProcess, world: World, box_of: BoxOf
) -> dict[str, Any]:
    """Return a state, of which each rank reads the parts that are on its node. Every rank calls it.

    Raises:
        Damaged: on every rank, if a part is damaged.
    """
    own = {
        each.number: each
        for each in process.parts
        if each.state == (state.step, state.attempt, state.turn)
    }
    entries = [{"file": str(number), "number": number} for number in range(len(state.readers))]
    return assemble(
        entries, lambda entry: _read(own[entry["number"]]), world, box_of, state.readers
    )


def name_place(readers: Sequence[int], process: RankProcess, world: World) -> str:
    """Return, for people, in whose memory a state is that these ranks read. Every rank calls it."""
    of_ranks = world.all_gather(float(process.node.node_rank))
    return name_memory((int(of_ranks[reader]) for reader in readers), process.node.num_nodes)


@dataclass
class LoadedState:
    """The state that was loaded from memory, and its place; or None. `skipped` says why others were
    refused.
    """

    state: dict[str, Any] | None = None
    place: str = ""
    saved: tuple[int, int] = (-1, 0)  # the attempt that has saved it before the loss, and its turn
    skipped: list[str] = field(default_factory=list)


def load_from_memory(
    world: World,
    process: RankProcess,
    store: CheckpointStore,
    box_of: BoxOf,
    needed_step: Callable[[dict[str, Any]], int],
) -> LoadedState:
    """Return the newest state in the memory of the nodes, unless the store has a newer one. Every
    rank calls it.

    A store that is away is not waited for. What it is known to have counts only as the checkpoint
    of the best epoch.

    Args:
        needed_step: returns the step of the checkpoint that a run from this state will ask the
            store for; 0 for none.
    """
    stored = process.job.stored  # as the driver knows: the store may be away
    newest_stored = max(stored, default=0)
    skipped: list[str] = []
    for each in find_states(process, world) if process.job.is_in_memory else ():
        if each.step < newest_stored:
            break
        place = name_place(each.readers, process, world)
        try:
            state = read_state(each, process, world, box_of)
        except Damaged as damage:
            problem = str(damage)
        else:
            needed = needed_step(state)
            if needed in (0, each.step, *stored):
                # Older ones are removed as if it were in the store.
                store.retention.resumed = f"{checkpoint_name(each.step)}.json"
                return LoadedState(state, place, (each.attempt, each.turn), skipped)
            problem = f"the store has no checkpoint of the best epoch, at step {needed}"
        skipped.append(f"the state of step {each.step} in {place} is not used: {problem}")
    return LoadedState(skipped=skipped)


def load_for_function(
    process: RankProcess,
    open_store: Callable[[], Store],
    key: str,
    checkpoints: CheckpointStore,
    box_of: BoxOf,
) -> LoadedState:
    """Return the newest state in memory as `load_from_memory` does, for ranks that may have no
    process group.

    Args:
        open_store: returns the store where the ranks meet, in which `key` is this call's alone.
        box_of: returns what this rank keeps of each tensor.
    """
    rank, world_size = process.rank, process.node.world_size
    group = None
    if world_size > 1:
        # other threads use the connection of the first one
        store = PrefixStore(key, open_store().clone())
        group = ProcessGroupGloo(
            store, rank, world_size, timedelta(seconds=process.job.program.stall_timeout)
        )
    world = World(rank, process.local_rank, world_size, torch.device("cpu"), group)
    loaded = load_from_memory(world, process, checkpoints, box_of, lambda state: 0)
    process.free_parts(*loaded.saved)
    return loaded


def _read(part: Part) -> dict[str, Any]:
    """Return the contents of a part of a state. Raises Damaged if they are not what was written."""
    if check_file(part.file.path) != (part.num_bytes, part.checksum):
        raise Damaged(
            f"the checksum of part {part.number} is not the one that was recorded when "
            "it was written"
        )
    contents: dict[str, Any] = torch.load(part.file.path, map_location="cpu", weights_only=True)
    return contents
