"""A rank as its supervisor sees it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from flyte_ddp.launch.process.output import LogTail

# seconds for the kernel to end killed processes, and for their new parent to reap them
DEATH_GRACE = 2.0


@dataclass
class Rank:
    """The supervisor's view of one rank."""

    number: int
    process: BaseProcess
    up: Connection
    down: Connection
    log: LogTail
    outcome: str = ""  # "done", "stopped" or "error", as the rank reported; "" before
    # the collectives that it has entered, once it was asked
    groups: list[dict[str, Any]] | None = None
    device: str = ""  # its GPU, for people

    def is_running(self) -> bool:
        return self.process.is_alive()

    def tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # it has just died, and the other pipe will report that
            self.down.send(message)

    def begin_to_kill(self) -> None:
        """Kill it and all that it started, without waiting."""
        if self.process.pid is not None:
            # The rank makes itself the leader of a group early on. Until then it has no children.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            if self.process.is_alive():
                self.process.kill()


def process_state(pid: int | None) -> str:
    """Return the kernel's letter for what a process does, such as T for a stopped one and Z for one
    that has ended.

    "" where that is not known, as on macOS.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
