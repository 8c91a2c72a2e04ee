"""The memory of nodes, in which states outlive the ranks that had them. No torch at the top.

A state is in files that are the kernel's, and have no name and no disk (`memfd_create`). The node's
agent has them open and passes them on to its ranks. The kernel frees them with the last of these
processes, however they end.

Every few steps each rank writes its part of a state into one of two files in turn, and another node
has two of its own for it. Of a model that every rank has whole, rank 0 writes the state. A rank
begins to write the next state only when the one before it is whole: each rank has written its part,
and the other node has it too. So there is always a whole state on the nodes that are left when one
is lost. A file that was being overwritten then has another checksum than the one that is recorded.

A copy goes from rank to rank, over a process group that the two have for that alone. It is made
directly, over the store where all ranks meet: `new_group` would have to be called by all of them,
in the order of the program's own calls.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import pickle
import queue
from collections.abc import Callable, Iterable
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import first_line
from flyte_ddp.process.threads import start_thread
from flyte_ddp.storage.uncached_file import copy_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store

NUM_FILES = 2  # files of each rank
MAX_NAMED = 8  # nodes that a line names one by one
TIMEOUT = timedelta(days=20)  # the longest wait for the next state; its milliseconds fit a C int
HEADER_BYTES = 512  # the size of a message with a pickled `PartSaved`

logger = logging.getLogger(__name__)


class MemoryFile:
    """A file in memory. Can be sent to a process at its start, which then has the same file."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("flyte-ddp-state")

    @property
    def path(self) -> str:
        """The path at which this process can open the file."""
        return f"/proc/self/fd/{self.descriptor}"

    def close(self) -> None:
        os.close(self.descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": reduction.DupFd(self.descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.descriptor = state["descriptor"].detach()


class MappedFile:
    """A file in memory that one process writes again and again. It keeps its pages, because a new
    page costs more than the write to it.

    A `with` block writes the file from its beginning, and the file ends where the block ended.
    """

    def __init__(self, file: MemoryFile) -> None:
        self._descriptor = file.descriptor
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self._pages = mmap.mmap(self._descriptor, mmap.PAGESIZE)
        self._size = 0  # bytes that are written

    def write(self, data: Any) -> int:
        begin, self._size = self._size, self._size + len(data)
        if self._size > len(self._pages):
            self._pages.resize(self._size)  # the file, too
        copy_bytes(data, self._pages, begin)
        return len(data)

    def flush(self) -> None:
        """Do nothing: all writes are in the file already."""

    def view(self, num_bytes: int) -> Tensor:
        """Return the first `num_bytes` of the file as a tensor for reads and writes. Drop the
        tensor before `write`.
        """
        import torch

        if num_bytes > len(self._pages):
            self._pages.resize(num_bytes)
        self._size = num_bytes
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=num_bytes)

    def __enter__(self) -> MappedFile:
        os.ftruncate(self._descriptor, len(self._pages))
        self._size = 0
        return self

    def __exit__(self, *_: object) -> None:
        os.ftruncate(self._descriptor, self._size)


@dataclass(frozen=True)
class PartSaved:
    """The message that a file in the node's memory contains a rank's part of a state."""

    turn: int  # counts the states that the attempt has saved in memory, from 1
    step: int
    number: int  # the rank that saved the part
    num_parts: int  # the state has so many parts
    num_bytes: int
    checksum: str


@dataclass(frozen=True)
class MemoryPart(PartSaved):
    """One rank's part of a state, and where it is."""

    file: MemoryFile
    attempt: int  # number of the attempt that saved the part

    @property
    def state(self) -> tuple[int, int, int]:
        """The name of the part's state. Of the same step, the newest state has the largest attempt
        and turn.
        """
        return self.step, self.attempt, self.turn


@dataclass(eq=False)
class NodeMemory:
    """The parts of states in the memory of a node, from one attempt to the next."""

    _attempt: int = 0
    _slots: dict[int, list[MemoryFile]] = field(
        default_factory=dict
    )  # this attempt's files by rank
    # parts by attempt, rank and slot
    _parts: dict[tuple[int, int, int], MemoryPart] = field(default_factory=dict)

    def begin(self, attempt: int, ranks: Iterable[int]) -> list[MemoryPart]:
        """Make files for the parts of an attempt's ranks, and return the parts that earlier
        attempts have left.
        """
        self._close_unused()
        self._attempt = attempt
        # A sandbox may forbid memory files, and macOS has none.
        with contextlib.suppress(OSError, AttributeError):
            for rank in ranks:
                self._slots[rank] = [MemoryFile() for _ in range(NUM_FILES)]
        return list(self._parts.values())

    @property
    def held(self) -> list[tuple[int, int, int, int, int]]:
        """For each part here: the three numbers that name its state, the part's number, and the
        number of parts of the state.
        """
        return [(*each.state, each.number, each.num_parts) for each in self._parts.values()]

    def slots_of(self, number: int) -> list[MemoryFile]:
        """Return the files for a rank's parts; none if the system has no files in memory."""
        return self._slots.get(number, [])

    def take(self, saved: PartSaved) -> None:
        """Note that a file here contains a part."""
        number, slot = saved.number, saved.turn % NUM_FILES
        part = MemoryPart(**vars(saved), file=self._slots[number][slot], attempt=self._attempt)
        self._parts[self._attempt, number, slot] = part
        if saved.turn > 1:  # the attempt's first state may still lack other ranks' parts
            self._drop(each for each in self._parts.values() if each.attempt != self._attempt)

    def keep_only(self, attempt: int, turn: int) -> None:
        """Free the states of earlier attempts, except the state from which this attempt resumes."""
        others = [
            each for each in self._parts.values() if (each.attempt, each.turn) != (attempt, turn)
        ]
        self._drop(each for each in others if each.attempt != self._attempt)

    def close(self) -> None:
        """Free the memory."""
        self._close_unused()
        self._drop(self._parts.values())

    def _close_unused(self) -> None:
        """Close the files of the attempt that has ended in which there is nothing."""
        used = {id(each.file) for each in self._parts.values()}
        for file in [
            file for files in self._slots.values() for file in files if id(file) not in used
        ]:
            file.close()
        self._slots = {}

    def _drop(self, parts: Iterable[MemoryPart]) -> None:
        for part in list(parts):
            # Ranks that resumed from this part may have the file open.
            os.ftruncate(part.file.descriptor, 0)
            part.file.close()
            self._parts = {key: each for key, each in self._parts.items() if each is not part}


@dataclass(eq=False)
class Slots:
    """The two files in memory that a rank writes its parts of states to, in turn."""

    files: InitVar[Iterable[MemoryFile]]
    rank: int
    send: Callable[[PartSaved], None]  # sends a message to the agent
    is_copied: bool  # another node gets each part, too
    # returns the store where the ranks meet; unused on a single node
    open_store: Callable[[], Store]
    # the message about the part in each file, by the file's number
    written: dict[int, PartSaved] = field(default_factory=dict)
    _turn: int = 0
    _complete_turn: int = 0  # the newest turn that is complete here and on the node of the copy
    # parts that wait for their copy
    _written: queue.SimpleQueue[PartSaved] | None = None

    def __post_init__(self, files: Iterable[MemoryFile]) -> None:
        self._files = [MappedFile(file) for file in files]

    @property
    def is_ready(self) -> bool:
        """True when the last part is here and on the node of the copy. The part before it may then
        be overwritten.
        """
        return bool(self._files) and self._complete_turn == self._turn

    def write(self, step: int, num_parts: int, save: Callable[[Any], tuple[int, str]]) -> None:
        """Write a part. `is_ready` is False until the part is complete. `save` writes the part to a
        file, and returns its size and checksum.
        """
        self._turn += 1
        with self._files[self._turn % NUM_FILES] as file:
            num_bytes, checksum = save(file)
        part = PartSaved(self._turn, step, self.rank, num_parts, num_bytes, checksum)
        self.written[self._turn % NUM_FILES] = part
        self.send(part)
        if not self.is_copied:
            self._complete_turn = self._turn
            return
        if self._written is None:
            self._written = queue.SimpleQueue()
            start_thread("copies", self._send_copies, self._written)
        self._written.put(part)

    def _send_copies(self, written: queue.SimpleQueue[PartSaved]) -> None:
        import torch

        try:
            store = self.open_store().clone()  # other threads use the first connection
            store.set(_name_copies(self.rank), "")
            group = _connect(self.rank, 0, store)
            while True:
                part = written.get()
                header = bytearray(pickle.dumps(part).ljust(HEADER_BYTES, b"\0"))
                group.send([torch.frombuffer(header, dtype=torch.uint8)], 1, 0).wait()
                file = self._files[part.turn % NUM_FILES]
                group.send([file.view(part.num_bytes)], 1, 0).wait()
                group.recv([torch.zeros(1)], 1, 0).wait()
                self._complete_turn = part.turn
        except RuntimeError as error:  # `is_ready` stays False from now on
            logger.warning(
                "no more states are kept in memory: they cannot be copied to another node: %s",
                first_line(error),
            )


def receive_copies(
    given: Iterable[MemoryFile],
    source: int,
    send: Callable[[PartSaved], None],
    open_store: Callable[[], Store],
) -> None:
    """Receive the parts of the rank `source` of another node into this node's memory, until one of
    them ends. For the other arguments see `Slots`.
    """
    import torch

    files = [MappedFile(file) for file in given]
    # A RuntimeError means that one of the two ranks, or the rank with the store, has ended.
    with contextlib.suppress(RuntimeError):
        store = open_store().clone()
        store.wait([_name_copies(source)], TIMEOUT)
        group = _connect(source, 1, store)
        while files:
            header = torch.zeros(HEADER_BYTES, dtype=torch.uint8)
            group.recv([header], 0, 0).wait()
            part = pickle.loads(header.numpy().tobytes())
            with files[part.turn % NUM_FILES] as file:
                group.recv([file.view(part.num_bytes)], 0, 0).wait()
            send(part)
            group.send([torch.zeros(1)], 0, 0).wait()


def _name_copies(source: int) -> str:
    return f"flyte_ddp/copies-{source}"


def _connect(source: int, rank: int, store: Store) -> Any:
    """Return the process group of two ranks: `source`, which is rank 0 of the group, and the rank
    with its copies.
    """
    from torch.distributed import PrefixStore, ProcessGroupGloo

    return ProcessGroupGloo(PrefixStore(f"{_name_copies(source)}/group", store), rank, 2, TIMEOUT)


def name_memory(nodes: Iterable[int], num_nodes: int) -> str:
    """Return words for the memory of these nodes of a gang."""
    if num_nodes == 1:
        return "this node's memory"
    *others, last = sorted(set(nodes))
    if len(others) > MAX_NAMED:
        return f"the memory of {len(others) + 1} nodes"
    if others:
        return f"the memory of nodes {', '.join(map(str, others))} and {last}"
    return f"node {last}'s memory"
