"""Collect the failures of an attempt, and choose the failure that explains them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flyte_ddp.errors import NodeLost, RankFailure
from flyte_ddp.launch.control.causes import LIBRARIES, Failure, cause_grace, find_cause
from flyte_ddp.launch.control.nodes import Node
from flyte_ddp.launch.control.stalls import explain, lost_failure
from flyte_ddp.launch.protocol.failures import find_place


@dataclass(eq=False)
class Failures:
    """The failures of the ranks and nodes of one attempt."""

    nodes: Sequence[Node]
    noted: list[Failure] = field(default_factory=list)  # failures in the order of their notice
    # Failures of ranks that had been asked to end. A signal may have ended these ranks.
    late: list[Failure] = field(default_factory=list)
    first_at: float = float("inf")  # monotonic
    # place in the code where each rank lost a peer in a collective, by the rank's number
    _lost_peers: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.noted)

    def add(self, failure: Failure, is_late: bool = False) -> None:
        """Note a failure that was noticed now."""
        if is_late:
            self.late.append(failure)
        else:
            self.noted.append(failure)
        self.first_at = min(self.first_at, time.monotonic())

    def add_of(self, node: Node, failure: Failure, is_stopping: bool) -> None:
        """Note the failure of a node or of one of its ranks.

        Args:
            is_stopping: the ranks had been asked to end.
        """
        if isinstance(failure, NodeLost):
            failure.args = (f"{node} was lost: {failure}",)
            failure.worker = node.worker
            if node.is_silent:
                failure.worker = ""
            self.add(failure)
            return
        if failure.is_consequence and LIBRARIES.search(failure.cause):
            self._lost_peers[failure.rank] = find_place(reversed(str(failure).splitlines()))
        failure = explain(failure)
        if node.label:
            failure.args = (f"{node}: {failure}",)
        self.add(failure, is_late=is_stopping and not failure.is_user_error)

    def is_cause_known(self) -> bool:
        """Return whether the cause is among the failures, or was waited for long enough."""
        failures = [*self.noted, *self.late]
        if not failures:
            return False
        running = [node.beat for node in self.nodes if node.outcome is None]
        grace = cause_grace(
            failures,
            len(self.nodes),
            any(beat.is_writing for beat in running),
            any(beat.is_ending for beat in running),
        )
        return time.monotonic() - self.first_at >= grace

    def explain(self) -> Failure:
        """Return the failure that has ended the gang."""
        cause = find_cause(self.noted)
        if isinstance(cause, RankFailure):
            ended = [number for node in self.nodes for number in node.beat.ended]
            if cause.rank in self._lost_peers and ended:
                return lost_failure(cause.rank, ended, self._lost_peers[cause.rank])
            # Where no other node could be lost, the program itself has closed the connection that
            # the error names.
            cause.is_consequence &= len(self.nodes) > 1
        return cause
