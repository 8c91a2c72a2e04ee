"""The messages between the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

KILL_GRACE = 5.0  # seconds in which the ranks must be gone after a command to kill them
KILLED = "killed"  # cause of a NodeLost whose ranks were killed by such a command, or left alone


@dataclass
class Beat:
    """The state of a node's ranks."""

    step: int = 0  # that they have reached
    is_writing: bool = False  # rank 0 writes a checkpoint
    is_stoppable: bool = False  # they save their state when they are asked to stop
    has_reported: bool = False  # one has, since the start
    paces: list[dict[str, Any]] = field(default_factory=list)  # as launch/control/paces.py has them
    # seconds for which each rank that waits for others does
    waits: list[float] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)  # ranks whose function has ended
    leaves_in: float | None = None  # seconds that the machine is still there, if it was told to go

    @property
    def news(self) -> tuple[Any, ...]:
        """The part of it that the driver must know at once."""
        return self.is_writing, self.is_stoppable, self.ended
