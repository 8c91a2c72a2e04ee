"""Load the newest state of a run, from the memory of nodes or from the store."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo

from flyte_ddp.checkpoints.assembly import BoxOf, assemble
from flyte_ddp.checkpoints.files import Damaged, check_file, checkpoint_name
from flyte_ddp.checkpoints.memory import MemoryPart, name_memory
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.world import World


def meet(process: RankProcess, key: str) -> World:
    """Return this rank's world with a new process group for loading. The function may have no
    group, or use its group for collectives at the same time. Every rank calls it.

    Args:
        key: a prefix in the store where the ranks meet, for this call alone.
    """
    group, world_size = None, process.node.world_size
    if world_size > 1:
        # Other threads use the first connection.
        store = PrefixStore(key, process.open_store().clone())
        timeout = timedelta(seconds=process.job.program.needs.stall_timeout)
        group = ProcessGroupGloo(store, process.rank, world_size, timeout)
    return World(process.rank, world_size, torch.device("cpu"), group)


@dataclass(frozen=True)
class Loaded:
    """The state that a run goes on from."""

    state: Any  # the state with tensors on the CPU; None in a new run
    origin: str  # the state's URL, or the nodes with the state in memory; "" in a new run
    is_in_memory: bool
    skipped: list[str]  # reasons why newer states are not used; on rank 0


def check_kind(state: Mapping[str, Any], origin: str, is_function: bool) -> None:
    """Check that a function wrote the checkpoint from `origin`, or a recipe if not `is_function`.

    Raises:
        ConfigError: the checkpoint is of the other kind, or of version 0.1.0.
    """
    if not state.keys() & {"origin", "trainer"}:  # recipes write the one, functions the other
        raise ConfigError(
            f"checkpoints: expected those of version 0.2.0 or later, got {origin}: finish its run "
            "with version 0.2.0, or give another place"
        )
    if ("position" in state) is is_function:
        return
    recipe = state.get("recipe", ["of a recipe"])[0]
    kinds = [f"that of recipe {recipe}", "that of a function"]
    raise ConfigError(
        f"checkpoints: expected a place with those of a {('recipe', 'function')[is_function]}, got "
        f"{origin}, which is {kinds['position' in state]}: give another place"
    )


def load_newest(
    world: World,
    process: RankProcess,
    store: CheckpointStore,
    box_of: BoxOf,
    needed_step: Callable[[Any], int] = lambda state: 0,
) -> Loaded:
    """Return the newest state: from the nodes' memory, unless the store has a newer state. Every
    rank calls it.

    With a state in memory, no rank waits for a store that is away. The store's known checkpoints
    then count only as the checkpoint of the best epoch.

    Args:
        box_of: returns the box of each tensor that this rank keeps.
        needed_step: returns the step of the checkpoint that a run from this state will load from
            the store later; 0 for none.

    Raises:
        StorageUnavailable, StorageDenied: the store could not be listed.
    """
    stored = process.job.stored  # steps from the driver, because the store may be away
    newest_stored = max(stored, default=0)
    skipped: list[str] = []
    in_memory: list[_StateInMemory] = []
    if process.job.is_in_memory:
        in_memory = _find_in_memory(process, world)
    for each in in_memory:
        if each.step < newest_stored:
            break
        node = process.node  # all nodes have equally many ranks
        origin = name_memory((rank // node.num_ranks for rank in each.readers), node.num_nodes)
        try:
            state = _read(each, process, world, box_of)
        except Damaged as damage:
            problem = str(damage)
        else:
            needed = needed_step(state)
            if needed in (0, each.step, *stored):
                # Older checkpoints are removed as if this state were in the store.
                store.retention.resumed_manifest = f"{checkpoint_name(each.step)}.json"
                process.free_parts(each.attempt, each.turn)
                return Loaded(state, origin, True, skipped)
            problem = f"the store has no checkpoint of the best epoch, at step {needed}"
        skipped.append(f"the state of step {each.step} in {origin} is not used: {problem}")
    state, url, damaged = store.load_latest(world, box_of)
    process.free_parts()
    return Loaded(state, url, False, [*skipped, *damaged])


@dataclass(frozen=True)
class _StateInMemory:
    """A state with all its parts in the memory of nodes."""

    step: int
    attempt: int
    turn: int
    readers: list[int]  # the rank that reads each part


def _find_in_memory(process: RankProcess, world: World) -> list[_StateInMemory]:
    """Return the whole states in the memory of all nodes, the newest first. Every rank calls it."""
    if not any(world.all_gather(len(process.parts))):
        return []
    found: dict[tuple[int, int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    num_parts: dict[tuple[int, int, int], int] = {}
    own = [(each.state, each.number, each.num_parts) for each in process.parts]
    for rank in range(world.world_size):
        for state, number, size in world.broadcast_object(own, rank):
            found[state][number].append(rank)
            num_parts[state] = size
    states = []
    # A step may have been saved after a later one.
    for state in sorted(found, key=lambda each: each[1:], reverse=True):
        holders, load, readers = found[state], Counter[int](), []
        if len(holders) < num_parts[state]:
            continue
        for number in range(num_parts[state]):
            ranks = holders[number]
            reader = number
            if number not in ranks:
                reader = min(ranks, key=lambda rank: (load[rank], rank))
            load[reader] += 1
            readers.append(reader)
        states.append(_StateInMemory(*state, readers))
    return states


def _read(state: _StateInMemory, process: RankProcess, world: World, box_of: BoxOf) -> Any:
    """Return a state. Each rank reads the parts on its node. Every rank calls it.

    Raises:
        Damaged: on every rank, if a part is damaged.
    """
    own = {
        each.number: each
        for each in process.parts
        if each.state == (state.step, state.attempt, state.turn)
    }
    numbers = [{"number": number} for number in range(len(state.readers))]
    return assemble(
        numbers, lambda each: _read_part(own[each["number"]]), world, box_of, state.readers, True
    )


def _read_part(part: MemoryPart) -> Any:
    """Return the contents of a part of a state. Raises Damaged if the checksum differs."""
    if check_file(part.file.path) != (part.num_bytes, part.checksum):
        raise Damaged(
            f"the checksum of part {part.number} is not the one that was recorded when "
            "it was written"
        )
    return torch.load(part.file.path, map_location="cpu", weights_only=True, mmap=True)
