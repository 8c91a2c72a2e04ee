"""The memory of a node, in which states outlive the ranks that had them. Imports no torch.

A state is in files that are the kernel's, and have no name and no disk (`memfd_create`). The node's
supervisor has them open and passes them on to its ranks. The kernel frees them with the last of
these processes, however they end.

Every few steps each rank writes its part of a state into one of two files in turn, and another node
has two of its own for it. Of a model that every rank has whole, rank 0 writes the state. A rank
begins to write the next state only when the one before it is whole: each rank has written its part,
and the other node has it too. So there is always a whole state on the nodes that are left when one
is lost. A file that was being overwritten then has another checksum than the one that is recorded.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.storage.uncached_file import copy_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from flyte_ddp.launch.protocol.ranks import NodeRanks

SPARE_BYTES = 256 << 20  # of memory that stay free
UNLIMITED = 1 << 62  # bytes
NUM_FILES = 2  # files of a rank's


class MemoryFile:
    """A file in memory. Can be sent to a process at its start, which then has the same file."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("flyte-ddp-state")

    @property
    def path(self) -> str:
        """The path at which this process can open it."""
        return f"/proc/self/fd/{self.descriptor}"

    def close(self) -> None:
        os.close(self.descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": reduction.DupFd(self.descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.descriptor = state["descriptor"].detach()


class MappedFile:
    """A file in memory as one process writes it, again and again: a new page costs more than what
    is written to it.

    In a `with` block it is written from its beginning, and ends where that has ended.
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
        """Do nothing: what was written is in the file."""

    def view(self, num_bytes: int) -> Tensor:
        """Return so many bytes of the file, to be read or written. The tensor must be gone before
        `write`.
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
class Part:
    """One rank's part of a state."""

    file: MemoryFile
    attempt: int  # number of the one that saved it
    turn: int  # counts the states that the attempt has saved in memory, from 1
    step: int
    number: int  # of the part: the rank that saved it
    num_parts: int  # of the state
    num_bytes: int
    checksum: str

    @property
    def state(self) -> tuple[int, int, int]:
        """Names the state that it is a part of; the newest one's is the largest."""
        return self.step, self.attempt, self.turn


class NodeMemory:
    """The parts of states in the memory of a node, from one attempt to the next."""

    def __init__(self) -> None:
        self._attempt = 0
        self._slots: dict[int, list[MemoryFile]] = {}  # of this attempt, by rank
        self._parts: dict[tuple[int, int, int], Part] = {}  # by attempt, rank and slot

    def begin(self, node: NodeRanks) -> list[Part]:
        """Make room for the parts of an attempt, and return those that earlier ones have left."""
        self._close_unused()
        self._attempt = node.num_restarts
        distances = {0, node.copy_distance}
        numbers = [
            node.rank_away(number, -distance) for number in node.numbers for distance in distances
        ]
        # a sandbox may forbid it; macOS has none
        with contextlib.suppress(OSError, AttributeError):
            self._slots = {number: [MemoryFile() for _ in range(NUM_FILES)] for number in numbers}
        return list(self._parts.values())

    @property
    def held(self) -> list[tuple[int, int, int, int, int]]:
        """Of each part here the three numbers that name its state, its own number, and the number
        of parts.
        """
        return [(*each.state, each.number, each.num_parts) for each in self._parts.values()]

    def slots_of(self, number: int) -> list[MemoryFile]:
        """Return the files for the parts of a rank; none where there is no such memory."""
        return self._slots.get(number, [])

    def take(self, **values: Any) -> None:
        """Note that a file here has a part. `values` are fields of `Part`."""
        number, turn = values["number"], values["turn"]
        slot = turn % NUM_FILES
        part = Part(self._slots[number][slot], self._attempt, **values)
        self._parts[self._attempt, number, slot] = part
        if turn > 1:  # else the first state of this attempt would not be whole
            self._drop(each for each in self._parts.values() if each.attempt != self._attempt)

    def keep_only(self, attempt: int, turn: int) -> None:
        """Free all that earlier attempts have left but the state from which this one goes on."""
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

    def _drop(self, parts: Iterable[Part]) -> None:
        for part in list(parts):
            # ranks may have it open, as what they have gone on from
            os.ftruncate(part.file.descriptor, 0)
            part.file.close()
            self._parts = {key: each for key, each in self._parts.items() if each is not part}


def name_memory(nodes: Iterable[int], num_nodes: int) -> str:
    """Return, for people, the memory of these nodes of a gang."""
    if num_nodes == 1:
        return "this node's memory"
    *others, last = sorted(set(nodes))
    return (
        f"the memory of nodes {', '.join(map(str, others))} and {last}"
        if others
        else f"node {last}'s memory"
    )


def lacking_memory(num_bytes: int, node: NodeRanks) -> str:
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


def free_memory() -> int:
    """Return the bytes that may still be used on this machine, or in the container; some stay
    free.
    """
    import psutil  # type: ignore[import-untyped]

    return (
        min(int(psutil.virtual_memory().available), *map(free_in, memory_cgroups()), UNLIMITED)
        - SPARE_BYTES
    )


def free_in(cgroup: Path) -> int:
    """Return the bytes that a cgroup may still use. Files that it has read can go, so they count as
    free.
    """
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or no limit
            counters = (cgroup / "memory.stat").read_text().split()
            spare = int(counters[counters.index(cached) + 1])
            return int((cgroup / limit).read_text()) - int((cgroup / used).read_text()) + spare
    return UNLIMITED


def count_oom_kills(root: Path = Path("/")) -> int:
    """Count the processes of this container that the kernel killed for lack of memory; 0 if that is
    not known.

    Of this process's cgroup and of the one that the container sees as its root, with both versions
    of cgroups.
    """
    return sum(map(_count_kills, memory_cgroups(root)))


def memory_cgroups(root: Path = Path("/")) -> set[Path]:
    """Return the directories of this process's cgroup for memory, and of the root of what is
    mounted of the cgroups.
    """
    try:
        groups = [
            line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()
        ]
        mounts = [line.split() for line in (root / "proc/self/mountinfo").read_text().splitlines()]
    except OSError:  # not Linux
        return set()
    paths = {
        "cgroup2" if not names else "cgroup": path
        for _, names, path in groups
        if "memory" in names or not names
    }
    found = set()
    for _, _, _, mounted, point, *_, kind, _, options in mounts:
        if kind in paths and (kind == "cgroup2" or "memory" in options.split(",")):
            directory = root / point.lstrip("/")
            # a container may see its cgroup as the root
            own = os.path.relpath(paths[kind], mounted)
            found |= {directory, directory / own} if not own.startswith("..") else {directory}
    return found


def _count_kills(cgroup: Path) -> int:
    for name in ("memory.events", "memory.oom_control"):  # of version 2, of version 1
        with contextlib.suppress(OSError, ValueError):
            counters = (cgroup / name).read_text().split()
            return int(counters[counters.index("oom_kill") + 1])
    with contextlib.suppress(OSError, ValueError):
        # before Linux 4.13: how often the limit was reached
        return int((cgroup / "memory.failcnt").read_text())
    return 0
