"""States in the memory of nodes, of which every rank saves its part: how often, and how they are found and read."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flyte_ddp.checkpoints.files import FORMAT, Damaged
from flyte_ddp.checkpoints.resharding import BoxOf, assemble
from flyte_ddp.checkpoints.state_file import check_file
from flyte_ddp.config import TrainingConfig
from flyte_ddp.launch.process.link import RankProcess
from flyte_ddp.launch.process.memory import Part, lacking_memory, name_memory
from flyte_ddp.rank.sharding import OPTIMIZER_STATES, count_own_parameters, is_sharded
from flyte_ddp.world import World

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
    """A state of which all parts are in the memory of nodes.

    Attributes:
        readers: the ranks that have its parts, by part.
    """

    step: int
    attempt: int
    turn: int
    readers: list[int]


def find_states(process: RankProcess, world: World) -> list[MemoryState]:
    """Return the whole states in the memory of all nodes, the newest first. Every rank calls it.

    A part that differs between two nodes counts as missing.
    """
    own = [each for each in process.parts if _is_of_this_run(each, process)]
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
    return assemble(entries, lambda entry: _read(own[entry["number"]]), world, box_of, state.readers)


def name_place(readers: Sequence[int], process: RankProcess, world: World) -> str:
    """Return, for people, in whose memory a state is that these ranks read. Every rank calls it."""
    of_ranks = world.all_gather(float(process.node.node_rank))
    return name_memory((int(of_ranks[reader]) for reader in readers), process.node.num_nodes)


def _is_of_this_run(part: Part, process: RankProcess) -> bool:
    return part.run == process.node.run_id and part.version == str(torch.__version__)


def _read(part: Part) -> dict[str, Any]:
    if check_file(part.file.path) != (part.num_bytes, part.checksum):
        raise Damaged(f"the checksum of part {part.number} is not the one that was recorded when it was written")
    # Not mapped: its tensors may outlive the file.
    contents: dict[str, Any] = torch.load(part.file.path, map_location="cpu", weights_only=True)
    step = contents.get("progress", contents).get("step", part.step)
    if contents["format"] != FORMAT or step != part.step:
        raise Damaged(f"expected step {part.step}, got step {step}")
    return contents
