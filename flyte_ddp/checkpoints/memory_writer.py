"""The states of a rank in the memory of its node."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.checkpoints.memory import Slots
from flyte_ddp.checkpoints.state import map_tensors
from flyte_ddp.checkpoints.writer import Write, yield_cores_to_training
from flyte_ddp.config.background import start_thread
from flyte_ddp.storage.failures import describe

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MemoryWriter:
    """Writes one state at a time."""

    slots: Slots | None  # None where nothing is kept in memory
    _is_idle: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._is_idle.set()

    @property
    def is_ready(self) -> bool:
        """True when the last state is complete, so that the one before it may be overwritten."""
        return self.slots is not None and self.slots.is_ready and self._is_idle.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds`, and return whether nothing is being written."""
        return self._is_idle.wait(seconds)

    def save(self, write: Write, part: Any, num_parts: int) -> None:
        """Write a part: from the copy in `write` that a GPU has made, in a thread, or on a CPU at
        once.

        A thread would need a copy there, too, which takes as long on the same cores.
        """
        self._is_idle.clear()
        if write.state is None:
            write.state = map_tensors(part, lambda each: each.detach())
            self._write(write, num_parts)
        else:
            start_thread("memory", self._write_copy, write, num_parts)

    def _write_copy(self, write: Write, num_parts: int) -> None:
        yield_cores_to_training()
        self._write(write, num_parts)

    def _write(self, write: Write, num_parts: int) -> None:
        assert self.slots is not None  # else nothing is ready
        try:
            self.slots.write(write.step, num_parts, write.save_to)
        except Exception as error:  # nothing is ready any more, and the store has its checkpoints
            logger.warning("no more states are kept in memory: %s", describe(error))
        write.free()
        self._is_idle.set()
