"""States in the memory of nodes: how often they are saved there, and how a run finds them and goes on from one.

It goes on from what a rank that was left has kept of itself (state_keeper.py), or from a state of which every rank has
saved its part.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from flyte_ddp.checkpoints.files import FORMAT, Damaged, checkpoint_name
from flyte_ddp.checkpoints.resharding import BoxOf, assemble
from flyte_ddp.checkpoints.state_file import check_file
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.config import TrainingConfig
from flyte_ddp.launch.process.link import RankProcess
from flyte_ddp.launch.process.memory import Kept, Part, lacking_memory, name_memory
from flyte_ddp.rank.sharding import OPTIMIZER_STATES, count_own_parameters, is_sharded
from flyte_ddp.world import ALONE, World

DEFAULT_INTERVAL = 10  # optimizer steps, of a split model on several nodes

logger = logging.getLogger(__name__)


def choose_interval(config: TrainingConfig, process: RankProcess, world: World, model: nn.Module) -> int:
    """Return the optimizer steps between two states in memory; 0 for none, also if they do not fit there.

    Every rank calls it. Warns as `has_memory`.
    """
    node, interval = process.node, config.memory_interval
    if interval < 0:
        interval = DEFAULT_INTERVAL if is_sharded(model) and node.num_nodes > 1 else 0
    if not interval:
        return 0
    num_savers = node.num_ranks if is_sharded(model) else 1
    num_values = count_own_parameters(model) * (1 + OPTIMIZER_STATES[config.optimizer])
    num_bytes = 4 * num_values + sum(each.nbytes for each in model.buffers())
    return interval if has_memory("memory_interval", num_savers * num_bytes, process, world) else 0


def has_memory(setting: str, num_bytes: int, process: RankProcess, world: World) -> bool:
    """Return whether states fit into the memory of each node. Every rank of `world` calls it.

    Warns on rank 0 if they do not fit, or if they protect from killed ranks only.

    Args:
        setting: the name of what asks for it, for the warning.
        num_bytes: of what the ranks of this node save of a state.
    """
    node = process.node
    lacking = lacking_memory(num_bytes, node) if process.slots else "expected Linux, with memfd_create"
    if any(lacks := world.all_gather(float(bool(lacking)))):
        lacking = world.broadcast_object(lacking, lacks.index(1.0))
        line = f"{setting}: no state is kept in memory: {lacking}"
    elif node.num_nodes == 1:
        line = f"{setting}: on one node a state in memory protects from killed ranks only"
    else:
        return True
    if world.is_first:
        logger.warning("%s", line)
    return not lacking


@dataclass(frozen=True)
class MemoryState:
    """A state of which all parts are in the memory of nodes."""

    step: int
    attempt: int
    turn: int
    readers: list[int]  # the ranks that have its parts, by part


def find_states(process: RankProcess, world: World) -> list[MemoryState]:
    """Return the whole states in the memory of all nodes, the newest first. Every rank calls it.

    A part that differs between two nodes counts as missing.
    """
    own = [each for each in process.parts if _is_readable(each, process)]
    if not any(world.all_gather(float(len(own)))):
        return []
    found: dict[tuple[int, int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    num_parts: dict[tuple[int, int, int], int] = {}
    checksums: dict[Any, set[str]] = defaultdict(set)
    for rank in range(world.world_size):
        held = [(each.state, each.number, each.num_parts, each.checksum) for each in own]
        for state, number, size, checksum in world.broadcast_object(held, rank):
            found[state][number].append(rank)
            num_parts[state] = size
            checksums[state, number].add(checksum)
    states = []
    for state in sorted(found, reverse=True):
        holders, load, readers = found[state], Counter[int](), []
        numbers = range(num_parts[state])
        if holders.keys() != set(numbers) or any(len(checksums[state, number]) > 1 for number in numbers):
            continue
        for number in numbers:
            ranks = holders[number]
            reader = number if number in ranks else min(ranks, key=lambda rank: (load[rank], rank))
            load[reader] += 1
            readers.append(reader)
        states.append(MemoryState(*state, readers))
    return states


def read_state(state: MemoryState, process: RankProcess, world: World, box_of: BoxOf) -> dict[str, Any]:
    """Return a state, of which each rank reads the parts that are on its node. Every rank calls it.

    Raises:
        Damaged: on every rank, if a part is damaged.
    """
    own = {each.number: each for each in process.parts if each.state == (state.step, state.attempt, state.turn)}
    entries = [{"file": str(number), "number": number} for number in range(len(state.readers))]
    return assemble(entries, lambda entry: _read(own[entry["number"]], maps=False), world, box_of, state.readers)


def name_place(readers: Sequence[int], process: RankProcess, world: World) -> str:
    """Return, for people, in whose memory a state is that these ranks read. Every rank calls it."""
    of_ranks = world.all_gather(float(process.node.node_rank))
    return name_memory((int(of_ranks[reader]) for reader in readers), process.node.num_nodes)


@dataclass
class LoadedState:
    """The state that was loaded from memory, and its place; or None. `skipped` says why others were refused."""

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
    """Return the newest state in the memory of the nodes, unless the store has one as new. Every rank calls it.

    A store that is away is not waited for. What it is known to have counts only as the checkpoint of the best epoch.

    Args:
        needed_step: returns the step of the checkpoint that a run from this state will ask the store for; 0 for none.
    """
    kept = process.kept if process.kept and _is_readable(process.kept, process) else None
    steps = [int(step) for step in world.all_gather(kept.step if kept else 0)]
    newest, states = max(steps), find_states(process, world)
    # The driver has asked the store since the last attempt ended, so this does not ask again.
    stored = process.job.stored
    newest_stored = 0 if process.job.is_store_away else max(stored, default=0)
    found: list[tuple[int, list[int], tuple[int, int], Callable[[], dict[str, Any]]]] = [
        (each.step, each.readers, (each.attempt, each.turn), partial(read_state, each, process, world, box_of))
        for each in states
        if each.step > max(newest, newest_stored)
    ]
    if newest > newest_stored:
        found.append((newest, [steps.index(newest)], (-1, 0), partial(_read_kept, kept, steps, world, box_of)))
    skipped: list[str] = []
    for step, readers, saved, read in found:
        place = name_place(readers, process, world)
        try:
            state = read()
        except Damaged as damage:
            problem = str(damage)
        else:
            needed = needed_step(state)
            if needed in (0, step, *stored):
                # Older ones are removed as if it were in the store.
                store.retention.resumed = f"{checkpoint_name(step)}.json"
                return LoadedState(state, place, saved, skipped)
            problem = f"the store has no checkpoint of the best epoch, at step {needed}"
        skipped.append(f"the state of step {step} in {place} is not used: {problem}")
    return LoadedState(skipped=skipped)


def load_for_function(
    process: RankProcess, open_store: Callable[[], Store], key: str, checkpoints: CheckpointStore, box_of: BoxOf
) -> LoadedState:
    """Return the newest state in memory as `load_from_memory` does, for ranks that may have no process group.

    Args:
        open_store: returns the store where the ranks meet, in which `key` is this call's alone.
        box_of: returns what this rank keeps of each tensor.
    """
    rank, world_size = process.rank, process.node.world_size
    group = None
    if world_size > 1:
        store = PrefixStore(key, open_store().clone())  # other threads use the connection of the first one
        group = ProcessGroupGloo(store, rank, world_size, timedelta(seconds=process.job.program.stall_timeout))
    world = World(rank, process.local_rank, world_size, torch.device("cpu"), group)
    loaded = load_from_memory(world, process, checkpoints, box_of, lambda state: 0)
    process.free_parts(*loaded.saved)
    return loaded


def _read_kept(kept: Kept | None, steps: list[int], world: World, box_of: BoxOf) -> dict[str, Any]:
    """Return the newest state that a rank has left. Raises Damaged on every rank if it is damaged on one.

    Args:
        kept: what this rank's node has.
        steps: of what each rank's node has.
    """
    newest = max(steps)
    reader = steps.index(newest)
    kept = kept if kept and kept.step == newest else None
    digest = world.broadcast_object(kept.digest if kept else "", reader)
    if world.all_reduce(float(kept is not None and kept.digest != digest))[0]:
        raise Damaged("it is not that of another node")

    def read(_: Any) -> dict[str, Any]:
        assert kept is not None  # of the rank that reads
        return _read(kept, maps=True)

    if min(steps) < newest:
        return assemble([{"file": "memory"}], read, world, box_of, [reader])
    damage = ""
    state: dict[str, Any] = {}
    try:  # each rank has it on its own node, so that none waits for another
        state = assemble([{"file": "memory"}], read, ALONE, box_of)
    except Damaged as error:
        damage = str(error)
    if any(is_damaged := world.all_gather(float(bool(damage)))):
        raise Damaged(world.broadcast_object(damage, is_damaged.index(1.0)))
    return state


def _is_readable(state: Kept | Part, process: RankProcess) -> bool:
    """Return whether it is of this run, and was written by this torch."""
    return state.run == process.node.run_id and state.version == str(torch.__version__)


def _read(state: Kept | Part, maps: bool) -> dict[str, Any]:
    """Return the contents of a state, or of a part of one.

    Args:
        maps: its tensors stay in the file, and are copied at once; else they may outlive it.

    Raises:
        Damaged: they are not what was written.
    """
    if check_file(state.file.path) != (state.num_bytes, state.checksum):
        what = f"the checksum of part {state.number}" if isinstance(state, Part) else "its checksum"
        raise Damaged(f"{what} is not the one that was recorded when it was written")
    contents: dict[str, Any] = torch.load(state.file.path, map_location="cpu", weights_only=True, mmap=maps)
    step = contents.get("progress", contents).get("step", state.step)  # not every part has it
    if contents["format"] != FORMAT or step != state.step:
        raise Damaged(f"expected step {state.step}, got step {step}")
    return contents
