"""A rank as its agent sees it."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from flyte_ddp.launch.agent.output import LogTail
from flyte_ddp.launch.protocol.messages import Outcome


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
