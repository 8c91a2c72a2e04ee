"""Collect the failures of an attempt, and choose the failure that explains them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from flyte_ddp.checkpoints import WRITE_GRACE
from flyte_ddp.errors import OUT_OF_MEMORY, FailureKind, NodeLost, RankFailure, WrongResult
from flyte_ddp.launch.control.nodes import Node
from flyte_ddp.launch.control.stalls import explain, lost_failure, misfit_failure
from flyte_ddp.launch.protocol.failures import find_place
from flyte_ddp.launch.protocol.messages import InspectedRank

LIBRARIES = re.compile("gloo|NCCL")  # libraries that report a lost peer in their errors
# no failure of another rank ends a rank in these ways
NEVER_CONSEQUENCES = ("SIGKILL", OUT_OF_MEMORY)
# Seconds to wait for the cause of a failure that looks like the consequence of another node's. Also
# the time in which a rank that has raised may call its exit handlers and write its files.
ECHO_GRACE = 3.0
CAUSE_GRACE = 0.5  # seconds in which a second failure may turn out to be the cause of the first

Failure = RankFailure | NodeLost


@dataclass(eq=False)
class Failures:
    """The failures of the ranks and nodes of one attempt."""

    nodes: Sequence[Node]
    world_size: int
    noted: list[Failure] = field(default_factory=list)  # failures in the order of their notice
    # Failures of ranks that had been asked to end. A signal may have ended these ranks.
    late: list[Failure] = field(default_factory=list)
    first_at: float = float("inf")  # monotonic
    # ranks that lost a peer in a collective, by their number
    _bereaved: dict[int, InspectedRank] = field(default_factory=dict)

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
            trace, groups = str(failure).splitlines()[::-1], failure.details.get("groups")
            self._bereaved[failure.rank] = InspectedRank(
                failure.rank, node.beat.step, None, trace, groups, node=node.label
            )
        if is_wrong_result(failure):
            node.is_slow = True
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
            len({each.rank for each in failures if isinstance(each, RankFailure)})
            < self.world_size,
        )
        return time.monotonic() - self.first_at >= grace

    def explain(self) -> Failure:
        """Return the failure that has ended the gang."""
        cause = find_cause(self.noted)
        if isinstance(cause, RankFailure):
            ended = [number for node in self.nodes for number in node.beat.ended]
            if cause.rank in self._bereaved and ended:
                place = find_place(self._bereaved[cause.rank].stack)
                return lost_failure(cause.rank, ended, place)
            if "sizes" in cause.details:
                return misfit_failure(cause, [each for _, each in sorted(self._bereaved.items())])
            # Where no other node could be lost, the program itself has closed the connection that
            # the error names.
            cause.is_consequence &= len(self.nodes) > 1
        return cause


def cause_grace(
    failures: Sequence[Failure],
    num_nodes: int,
    is_writing: bool,
    is_ending: bool,
    lacks_ranks: bool = False,
) -> float:
    """Return for how many seconds failures may wait for their cause, and for a checkpoint.

    Args:
        is_writing: rank 0 writes a checkpoint.
        is_ending: a rank that has raised still runs.
        lacks_ranks: some ranks have not failed yet. Their collectives may tell which rank entered
            another one than they did.
    """
    if any(_rank(each) == 0 for each in failures):
        return 0.0
    if is_writing and all(each.kind is FailureKind.EXCEPTION for each in failures):
        return WRITE_GRACE
    if lacks_ranks and any(
        isinstance(each, RankFailure) and "sizes" in each.details for each in failures
    ):
        return ECHO_GRACE
    if any(each.is_user_error for each in failures):
        return 0.0
    is_echo = num_nodes > 1 and all(_rank(each) > 1 for each in failures)
    if is_echo or is_ending:
        return ECHO_GRACE
    return CAUSE_GRACE


def find_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure that explains the others; the first if several explain them equally well.

    A program may raise an exception of its own because a node was lost. The loss may be noticed
    after the exception.
    """
    return min(failures, key=_rank)


def is_wrong_result(failure: Failure) -> bool:
    """Return whether a rank has ended because it computes wrongly."""
    return failure.cause.partition(":")[0] == WrongResult.__name__


def _rank(failure: Failure) -> int:
    """Return a number that is smaller for what explains more."""
    if failure.kind is FailureKind.LOST or failure.cause in NEVER_CONSEQUENCES:
        return 0
    if failure.is_consequence:
        return 3
    if failure.kind is FailureKind.STALL:
        return 2
    return 1
