"""Load the state that a lost attempt left in the memory of nodes, if it is newer than the newest in the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from flyte_ddp.checkpoints.files import FORMAT, Damaged, checkpoint_name
from flyte_ddp.checkpoints.resharding import BoxOf, assemble
from flyte_ddp.checkpoints.state_file import check_file
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.launch.process.link import RankProcess
from flyte_ddp.launch.process.memory import Kept
from flyte_ddp.rank.memory_states import find_states, name_place, read_state
from flyte_ddp.world import ALONE, World


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
    kept, node = process.kept, process.node
    if kept and (kept.run != node.run_id or kept.version != str(torch.__version__)):
        kept = None
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
    if min(steps) < newest:
        return assemble([{"file": "memory"}], lambda _: _read(kept), world, box_of, [reader])
    damage = ""
    state: dict[str, Any] = {}
    try:  # each rank has it on its own node, so that none waits for another
        state = assemble([{"file": "memory"}], lambda _: _read(kept), ALONE, box_of)
    except Damaged as error:
        damage = str(error)
    if any(is_damaged := world.all_gather(float(bool(damage)))):
        raise Damaged(world.broadcast_object(damage, is_damaged.index(1.0)))
    return state


def _read(kept: Kept | None) -> dict[str, Any]:
    """Return the contents of a state in memory, in which its tensors stay: they have to be copied at once."""
    assert kept is not None  # of the rank that reads
    if check_file(kept.file.path) != (kept.num_bytes, kept.checksum):
        raise Damaged("its checksum is not the one that was recorded when it was written")
    state: dict[str, Any] = torch.load(kept.file.path, map_location="cpu", weights_only=True, mmap=True)
    if state["format"] != FORMAT or state["progress"]["step"] != kept.step:
        raise Damaged(f"expected step {kept.step}, got step {state['progress']['step']}")
    return state
