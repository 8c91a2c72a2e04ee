"""Files in the memory of a node, in which a state outlives the ranks that had it. Imports no torch.

Such a file is the kernel's, and has no name and no disk (`memfd_create`). The node's supervisor has it open and passes
it on to its ranks. The kernel frees it with the last of these processes, however they end, so nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
from multiprocessing import reduction
from pathlib import Path
from typing import Any

SPARE_BYTES = 256 << 20  # of memory that stay free


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


def has_memory_for(num_bytes: int) -> bool:
    """Return whether this machine, or the container, has memory for so many bytes more."""
    return free_memory() > num_bytes


def free_memory() -> int:
    """Return the bytes that may still be used on this machine, or in the container; some stay free."""
    import psutil  # type: ignore[import-untyped]

    free = [psutil.virtual_memory().available]
    for names in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or no limit
            limit, used = (int((Path("/sys/fs/cgroup") / name).read_text()) for name in names)
            free.append(limit - used)
    return int(min(free)) - SPARE_BYTES
