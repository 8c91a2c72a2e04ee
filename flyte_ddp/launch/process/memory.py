"""The memory of a node, in which a state outlives the ranks that had it. Imports no torch."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from flyte_ddp.launch.process.memory_file import MemoryFile
from flyte_ddp.launch.process.parts import NodeParts

LOCK_TIMEOUT = 1.0  # seconds for a rank to end the optimizer step that it is in
ANSWER_TIMEOUT = 1.5  # seconds for a rank to begin to write its state: one that is stopped never does
KEEP_TIMEOUT = 10.0  # seconds for it to be written, if it is small
KEEP_BANDWIDTH = 100 << 20  # bytes a second that are written at least
MAX_KEEP_TIMEOUT = 300.0  # seconds for a state of any size


def keep_timeout(num_bytes: int) -> float:
    """Return the seconds for a state of so many bytes to be written."""
    return min(KEEP_TIMEOUT + num_bytes / KEEP_BANDWIDTH, MAX_KEEP_TIMEOUT)


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
    """States that a node's supervisor keeps from one attempt to the next: one that counts, and the newest one.

    A node cannot know why its ranks lost a peer. So what they leave counts only once the driver says so, which knows
    the failures of all nodes. Until then the one before stays.
    """

    def __init__(self) -> None:
        self._kept: Kept | None = None
        self._newest: Kept | None = None
        self._file: MemoryFile | None = None  # of the attempt that runs
        self.parts = NodeParts()

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
    def steps(self) -> tuple[int, int]:
        """The steps of the state that the last attempt has left, and of the one that counts already; 0 for none."""
        newest, kept = (each.step if each else 0 for each in (self._newest, self._kept))
        return newest, kept

    def note_stored(self, step: int) -> None:
        """Free the state that counts if the store has one as new."""
        if self._kept and self._kept.step <= step:
            self._kept.file.close()
            self._kept = None

    def close(self) -> None:
        """Free the memory."""
        for file in {each.file for each in (self._kept, self._newest) if each} | (
            {self._file} if self._file else set()
        ):
            file.close()
        self._kept = self._newest = self._file = None
        self.parts.close()
