"""The memory of a node, in which a state outlives the ranks that had it. Imports no torch.

It is a file of the kernel's that has no name and no disk (`memfd_create`). The node's supervisor has it open and passes
it on to its ranks. The kernel frees it with the last of these processes, however they end, so nothing is left behind.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing import reduction
from pathlib import Path
from typing import Any

LOCK_TIMEOUT = 1.0  # seconds for a rank to end the optimizer step that it is in
ANSWER_TIMEOUT = 1.5  # seconds for a rank to begin to write its state: one that is stopped never does
KEEP_TIMEOUT = 10.0  # seconds for it to be written
SPARE_BYTES = 256 << 20  # of memory that stay free


class MemoryFile:
    """A file in memory. Can be sent to a process at its start, which then has the same file."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("flyte-ddp-state")

    @property
    def path(self) -> str:
        """The path at which this process can open it."""
        return f"/proc/self/fd/{self._descriptor}"

    def close(self) -> None:
        os.close(self._descriptor)

    def __getstate__(self) -> dict[str, Any]:
        return {"descriptor": reduction.DupFd(self._descriptor)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._descriptor = state["descriptor"].detach()


@dataclass(frozen=True)
class Kept:
    """A state in a node's memory.

    Attributes:
        run: names the run.
        attempt: number of the one that left it.
        version: of torch, which wrote it.
        digest: of the weights and the optimizer's state, which all ranks have alike after a step.
    """

    file: MemoryFile
    run: str
    attempt: int
    step: int
    num_bytes: int
    checksum: str
    version: str
    digest: str


class NodeMemory:
    """What the supervisor of a node keeps from one attempt to the next: a state that counts, and the newest one.

    A node cannot know why its ranks lost a peer. So what they leave counts only once the driver says so, which knows
    the failures of all nodes. Until then the one before stays.
    """

    def __init__(self) -> None:
        self._kept: Kept | None = None
        self._newest: Kept | None = None
        self._file: MemoryFile | None = None  # of the attempt that runs

    def begin(self, counted: Collection[int]) -> tuple[MemoryFile | None, Kept | None]:
        """Return a new file for the state that an attempt may leave, and the state that it may go on from.

        Args:
            counted: the attempts of which the states count.
        """
        if self._newest and self._newest.attempt in counted:
            if self._kept:
                self._kept.file.close()
            self._kept = self._newest
        elif self._file:
            self._file.close()
        self._newest = self._file = None
        if hasattr(os, "memfd_create"):  # Linux
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                self._file = MemoryFile()
        return self._file, self._kept

    def keep(self, run: str, attempt: int, **values: Any) -> None:
        """Note that the file of this attempt has a state. `values` are the other fields of `Kept`."""
        if self._file:
            self._newest = Kept(self._file, run, attempt, **values)

    @property
    def newest_step(self) -> int:
        """The step of the state that the last attempt has left; 0 for none."""
        return self._newest.step if self._newest else 0

    def close(self) -> None:
        """Free the memory."""
        for file in {each.file for each in (self._kept, self._newest) if each} | (
            {self._file} if self._file else set()
        ):
            file.close()
        self._kept = self._newest = self._file = None


def has_memory_for(num_bytes: int) -> bool:
    """Return whether this machine, or the container, has memory for so many bytes more."""
    import psutil  # type: ignore[import-untyped]

    free = [psutil.virtual_memory().available]
    for names in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or no limit
            limit, used = (int((Path("/sys/fs/cgroup") / name).read_text()) for name in names)
            free.append(limit - used)
    return bool(min(free) > num_bytes + SPARE_BYTES)
