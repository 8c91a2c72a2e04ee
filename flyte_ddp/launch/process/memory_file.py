"""Files in the memory of a node, in which a state outlives the ranks that had it. Imports no torch.

Such a file is the kernel's, and has no name and no disk (`memfd_create`). The node's supervisor has it open and passes
it on to its ranks. The kernel frees it with the last of these processes, however they end, so nothing is left behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from multiprocessing import reduction
from pathlib import Path
from typing import Any

from flyte_ddp.launch.process.cgroups import memory_cgroups

SPARE_BYTES = 256 << 20  # of memory that stay free
UNLIMITED = 1 << 62  # bytes


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
    """A file in memory as one process writes it, again and again: a new page costs more than what is written to it.

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
        self._pages[begin : self._size] = data
        return len(data)

    def flush(self) -> None:
        """Do nothing: what was written is in the file."""

    def __enter__(self) -> MappedFile:
        os.ftruncate(self._descriptor, len(self._pages))
        self._size = 0
        return self

    def __exit__(self, *_: object) -> None:
        os.ftruncate(self._descriptor, self._size)


def has_memory_for(num_bytes: int) -> bool:
    """Return whether this machine, or the container, has memory for so many bytes more."""
    return free_memory() > num_bytes


def free_memory() -> int:
    """Return the bytes that may still be used on this machine, or in the container; some stay free."""
    import psutil  # type: ignore[import-untyped]

    return min(int(psutil.virtual_memory().available), *map(free_in, memory_cgroups()), UNLIMITED) - SPARE_BYTES


def free_in(cgroup: Path) -> int:
    """Return the bytes that a cgroup may still use. Files that it has read can go, so they count as free."""
    for limit, used, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or no limit
            counters = (cgroup / "memory.stat").read_text().split()
            spare = int(counters[counters.index(cached) + 1])
            return int((cgroup / limit).read_text()) - int((cgroup / used).read_text()) + spare
    return UNLIMITED
