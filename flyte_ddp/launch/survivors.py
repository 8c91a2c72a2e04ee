"""A rank as its supervisor sees it. After a loss, one of those that are left keeps its state before all are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from flyte_ddp.errors import RankFailure
from flyte_ddp.launch.policy import leaves_state_whole
from flyte_ddp.launch.process.memory import ANSWER_TIMEOUT, KEEP_TIMEOUT, keep_timeout
from flyte_ddp.launch.process.output import LogTail

DEATH_GRACE = 2.0  # seconds for the kernel to end killed processes, and for their new parent to reap them


@dataclass
class Rank:
    """The supervisor's view of one rank."""

    number: int
    process: BaseProcess
    up: Connection
    down: Connection
    log: LogTail
    outcome: str = ""  # "done", "stopped" or "error", as the rank reported, or "killed"; "" before
    groups: list[dict[str, Any]] | None = None  # the collectives that it has entered, once it was asked
    has_lost_peers: bool = False  # which is why it has raised an exception
    device: str = ""  # its GPU, for people

    def is_running(self) -> bool:
        # The server of ranks, which alone can reap them, may be stopped.
        return self.process.is_alive() and process_state(self.process.pid) != "Z"

    @property
    def is_left(self) -> bool:
        return (not self.outcome or self.has_lost_peers) and not self.up.closed and self.is_running()

    def tell(self, *message: Any) -> None:
        with contextlib.suppress(OSError):  # it has just died, and the other pipe will report that
            self.down.send(message)

    def kill(self) -> None:
        self.outcome = "killed"  # which is no failure
        self.begin_to_kill()
        self.process.join(DEATH_GRACE)

    def begin_to_kill(self) -> None:
        """Kill it and all that it started, without waiting."""
        if self.process.pid is not None:
            # The rank makes itself the leader of a group early on. Until then it has no children.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            if self.process.is_alive():
                self.process.kill()


class Survivors:
    """The ranks of a node after a loss, of which one is asked to keep its state: the one with the highest step.

    If it has no state, the next rank is asked; also if it does not answer, but then it is killed first. Ranks that are
    not asked are released, because they would wait.

    Args:
        keep: called with what is known of a state that was kept.
    """

    def __init__(self, keep: Callable[..., None] | None) -> None:
        self._keep = keep
        self._candidates: list[Rank] | None = None  # those that were not asked yet; None before the first
        self._asked: Rank | None = None
        self._until = 0.0  # monotonic: for so long the one that was asked may take
        self._total_until = 0.0
        self._released: set[int] = set()  # ranks, by number

    def is_busy(self, cause: RankFailure | None, ranks: Sequence[Rank], step_of: Callable[[Rank], int]) -> bool:
        """Return whether a rank is about to keep its state. The first call for a failure that allows it has one asked.

        Args:
            cause: the failure as far as it is known; None if the driver has decided that the state counts.
        """
        if self._keep is None or (cause is not None and not leaves_state_whole(cause)):
            self._release(ranks)
            return False
        now = time.monotonic()
        if self._candidates is None:
            self._candidates = sorted(ranks, key=lambda rank: (-step_of(rank), rank.number))
            self._total_until = now + KEEP_TIMEOUT
        while self._asked is None or not self._asked.is_left or now > self._until:
            if self._asked and self._asked.is_left:
                self._asked.kill()  # or it might later write over what the next one writes
            if not self._candidates or now > self._total_until:
                self._asked, self._candidates = None, []
                self._release(ranks)
                return False
            self._asked = self._candidates.pop(0)
            self._until = now + ANSWER_TIMEOUT
            if self._asked.is_left:
                self._asked.tell("keep")
        return True

    def take(self, rank: Rank, kind: str, *values: Any) -> None:
        """Take in the answer of `rank`: "keeping" when it begins, with the bytes, "kept" at the end."""
        if rank is not self._asked:
            return
        if kind == "keeping":
            self._until = self._total_until = time.monotonic() + keep_timeout(*values)
        elif values[0] and self._keep:
            self._keep(**values[0])
            self._candidates, self._asked = [], None
        else:
            self._asked = None  # the next one is asked

    def _release(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            if rank is not self._asked and rank.number not in self._released:
                self._released.add(rank.number)
                rank.tell("release")


def process_state(pid: int | None) -> str:
    """Return the kernel's letter for what a process does, such as T for a stopped one and Z for one that has ended.

    "" where that is not known, as on macOS.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
