"""The files in memory that a rank writes its parts of states to, in turn; see parts.py. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flyte_ddp.launch.process.link import SupervisorLink
from flyte_ddp.launch.process.memory_file import MappedFile, MemoryFile
from flyte_ddp.launch.process.parts import NUM_FILES


class Slots:
    """The two files of one rank, as it writes them."""

    def __init__(self, files: list[MemoryFile], link: SupervisorLink, number: int, version: str) -> None:
        self._files = [MappedFile(file) for file in files]
        self._link = link
        self._number = number
        self._version = version
        self._turn = 0

    @property
    def is_ready(self) -> bool:
        """True when the last part is here and where it is copied to, so that the one before it may be overwritten."""
        return bool(self._files) and self._link.whole_turn == self._turn

    def begin(self) -> None:
        """Note that a part will be written: nothing is ready until then."""
        self._turn += 1

    def write(self, step: int, num_parts: int, save: Callable[[Any], tuple[int, str]]) -> None:
        """Write the part that was begun. `save` writes it to a file, and returns its size and checksum."""
        with self._files[self._turn % NUM_FILES] as file:
            num_bytes, checksum = save(file)
        where = {"turn": self._turn, "step": step, "number": self._number, "num_parts": num_parts}
        what = {"num_bytes": num_bytes, "checksum": checksum, "version": self._version}
        self._link.send("part", {**where, **what})
