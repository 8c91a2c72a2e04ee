"""A rank as its agent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from flyte_ddp.launch.agent.output import LogTail
from flyte_ddp.launch.protocol.messages import Outcome

# what the kernel's letters mean for a process that something outside keeps from running
HALTED = {"T": "stopped (SIGSTOP)", "t": "held by a debugger"}


@dataclass
class Rank:
    """The agent's view of one rank."""

    number: int
    process: BaseProcess
    pipe: Connection
    log: LogTail
    outcome: Outcome | None = None  # as the rank reported
    # the collectives that it has entered, once it was asked
    groups: list[dict[str, Any]] | None = None
    device: str = ""  # its GPU, for people

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # it has just died
            self.pipe.send(message)

    def kill_group(self, number: int = signal.SIGKILL) -> bool:
        """Kill it and all that it started, without waiting, or send them another signal. Return
        whether there was any.
        """
        # The rank makes itself the leader of a group early on. Until then it has no children. The
        # number of a group that is gone may belong to another user's now.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, number)
            return True
        return False

    def how_halted(self) -> str:
        """Return how something outside keeps it from running; "" if nothing does, and on macOS."""
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state in HALTED:
                return f"rank {self.number} is {HALTED[state]}"
        return ""
