"""States in the memory of nodes, in parts: each rank's of its own, and copies of those of one other node.

A rank has two files in the memory of its node (memory.py), which it writes in turn, every few steps. Another node has
two of its own for it. A rank begins to write the next state only when the one before it is whole: each rank has written
its part, and the other node has it too. So there is always a whole state on the nodes that are left when one is lost.
A file that was being overwritten then has another checksum than the one that is recorded. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyte_ddp.launch.process.memory_file import MemoryFile, free_memory

if TYPE_CHECKING:
    from flyte_ddp.launch.process.ranks import NodeRanks

NUM_FILES = 2  # files of a rank's
COPY, SLOTS = "copy", "slots"  # a supervisor's lines for its Dask worker: where there is a part to send, and to receive
COPIED, TAKE = "copied", "take"  # the worker's answers: a part has been sent, and received


@dataclass(frozen=True)
class Part:
    """One rank's part of a state.

    Attributes:
        attempt: number of the one that saved it.
        turn: counts the states that the attempt has saved in memory, from 1.
        number: of the part: the rank that saved it.
        num_parts: of the state.
        version: of torch, which wrote it.
    """

    file: MemoryFile
    run: str
    attempt: int
    turn: int
    step: int
    number: int
    num_parts: int
    num_bytes: int
    checksum: str
    version: str

    @property
    def state(self) -> tuple[int, int, int]:
        """Names the state that it is a part of; the newest one's is the largest."""
        return self.step, self.attempt, self.turn


class NodeParts:
    """The parts in the memory of a node, from one attempt to the next. Called from several threads.

    Attributes:
        send: passes a line for the Dask worker on, of which the first argument is the kind; None where there is no
            other node.
        source: the node whose ranks' parts are copied here, by its number.
    """

    def __init__(self) -> None:
        self.send: Callable[..., None] | None = None
        self.source = 0
        self._run = ""
        self._attempt = 0
        self._slots: dict[int, list[MemoryFile]] = {}  # of this attempt, by rank
        self._parts: dict[tuple[int, int, int], Part] = {}  # by attempt, rank and slot
        self._whole: dict[int, int] = {}  # by rank of this node: the newest turn of which the part was copied as well
        self._lock = threading.Lock()

    def begin(self, node: NodeRanks) -> list[Part]:
        """Make room for the parts of an attempt, and return those that earlier ones have left."""
        with self._lock:
            self._close_unused()
            self._run, self._attempt = node.run_id, node.num_restarts
            self._whole = {}
            theirs = range(self.source * node.num_ranks, (self.source + 1) * node.num_ranks)
            numbers = {*node.numbers, *(theirs if self.send else ())}
            with contextlib.suppress(OSError, AttributeError):  # a sandbox may forbid it; macOS has none
                self._slots = {number: [MemoryFile() for _ in range(NUM_FILES)] for number in sorted(numbers)}
            if self.send:
                files = {number: [file.descriptor for file in self._slots.get(number, ())] for number in theirs}
                self.send(SLOTS, files=files)
            return list(self._parts.values())

    @property
    def held(self) -> list[tuple[int, int, int, int, int]]:
        """Of each part here the three numbers that name its state, its own number, and the number of parts."""
        with self._lock:
            return [(*each.state, each.number, each.num_parts) for each in self._parts.values()]

    def slots_of(self, number: int) -> list[MemoryFile]:
        """Return the files for the parts of a rank of this node; none where there is no such memory."""
        return self._slots.get(number, [])

    def keep(self, **values: Any) -> None:
        """Note that a rank of this node has written a part, and have it copied. `values` are fields of `Part`."""
        values = {**values, "run": self._run, "attempt": self._attempt}
        self.take(values)
        if self.send:
            file = self._slots[values["number"]][values["turn"] % NUM_FILES]
            self.send(COPY, descriptor=file.descriptor, part=values)
        else:
            self.note_copied(values)

    def take(self, values: dict[str, Any]) -> None:
        """Note that a file here has a part, of this node's ranks or of the other one's."""
        number, turn, attempt = values["number"], values["turn"], values["attempt"]
        with self._lock:
            if attempt == self._attempt and number in self._slots:
                slot = turn % NUM_FILES
                self._parts[attempt, number, slot] = Part(self._slots[number][slot], **values)
                if turn > 1:  # else the first state of this attempt would not be whole
                    self._drop(each for each in self._parts.values() if each.attempt != attempt)

    def note_copied(self, values: dict[str, Any]) -> None:
        """Note that a part of a rank of this node is also where it is copied to."""
        if values["attempt"] == self._attempt:
            self._whole[values["number"]] = values["turn"]

    def whole_turn(self, number: int) -> int:
        """Return the newest turn of which a rank's part is also where it is copied to; 0 for none."""
        return self._whole.get(number, 0)

    def keep_only(self, attempt: int, turn: int) -> None:
        """Free all that earlier attempts have left but the state from which this one goes on."""
        with self._lock:
            others = [each for each in self._parts.values() if (each.attempt, each.turn) != (attempt, turn)]
            self._drop(each for each in others if each.attempt != self._attempt)

    def close(self) -> None:
        """Free the memory."""
        with self._lock:
            self._close_unused()
            self._drop(self._parts.values())

    def _close_unused(self) -> None:
        """Close the files of the attempt that has ended in which there is nothing."""
        used = {id(each.file) for each in self._parts.values()}
        for file in [file for files in self._slots.values() for file in files if id(file) not in used]:
            file.close()
        self._slots = {}

    def _drop(self, parts: Iterable[Part]) -> None:
        for part in list(parts):
            os.ftruncate(part.file.descriptor, 0)  # ranks may have it open, as what they have gone on from
            part.file.close()
            self._parts = {key: each for key, each in self._parts.items() if each is not part}


def name_memory(nodes: Iterable[int], num_nodes: int) -> str:
    """Return, for people, the memory of these nodes of a gang."""
    if num_nodes == 1:
        return "this node's memory"
    *others, last = sorted(set(nodes))
    return f"the memory of nodes {', '.join(map(str, others))} and {last}" if others else f"node {last}'s memory"


def lacking_memory(num_bytes: int, node: NodeRanks) -> str:
    """Return what this node lacks for two states in memory, and copies of another node's; "" if it lacks nothing.

    Args:
        num_bytes: of a state, of what the ranks of one node save of it.
    """
    needed, free = num_bytes * NUM_FILES * min(2, node.num_nodes), free_memory()
    return "" if free > needed else f"expected {_gib(needed)} of free memory on each node, got {_gib(free)}"


def _gib(num_bytes: int) -> str:
    return f"{max(0, num_bytes) / 2**30:.2f} GiB"
