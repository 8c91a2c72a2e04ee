"""After a loss, have one of the ranks that are left keep its state in the memory of the node before all are killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flyte_ddp.errors import RankFailure
from flyte_ddp.launch.policy import leaves_state_whole
from flyte_ddp.launch.process.memory import ANSWER_TIMEOUT, KEEP_TIMEOUT, keep_timeout


class Survivor(Protocol):
    """A rank of this node, as the supervisor knows it."""

    number: int

    @property
    def is_left(self) -> bool:
        """It runs, and may have a state that is whole."""

    def tell(self, *message: Any) -> None:
        """Send it a message, if it is there."""

    def kill(self) -> None:
        """Kill it. It writes nothing any more when this returns."""


class Survivors:
    """The ranks of a node after a loss, of which one is asked to keep its state: the one with the highest step.

    If it has no state, the next rank is asked; also if it does not answer, but then it is killed first. Ranks that are
    not asked are released, because they would wait.

    Args:
        keep: called with what is known of a state that was kept.
    """

    def __init__(self, keep: Callable[..., None] | None) -> None:
        self._keep = keep
        self._candidates: list[Survivor] | None = None  # those that were not asked yet; None before the first
        self._asked: Survivor | None = None
        self._until = 0.0  # monotonic: for so long the one that was asked may take
        self._total_until = 0.0
        self._released: set[int] = set()  # ranks, by number

    def is_busy(self, cause: RankFailure | None, ranks: Sequence[Survivor], step_of: Callable[[Survivor], int]) -> bool:
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

    def take(self, rank: Survivor, kind: str, *values: Any) -> None:
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

    def _release(self, ranks: Sequence[Survivor]) -> None:
        for rank in ranks:
            if rank is not self._asked and rank.number not in self._released:
                self._released.add(rank.number)
                rank.tell("release")
