"""Choose the failure that explains the others, and the time to wait for it. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flyte_ddp.checkpoints import WRITE_GRACE
from flyte_ddp.errors import OUT_OF_MEMORY, FailureKind, NodeLost, RankFailure

LIBRARIES = re.compile("gloo|NCCL")  # libraries that report a lost peer in their errors
# no failure of another rank ends a rank in these ways
NEVER_CONSEQUENCES = ("SIGKILL", OUT_OF_MEMORY)
# Seconds to wait for the cause of a failure that looks like the consequence of another node's. Also
# the time in which a rank that has raised may call its exit handlers and write its files.
ECHO_GRACE = 3.0
CAUSE_GRACE = 0.5  # seconds in which a second failure may turn out to be the cause of the first

Failure = RankFailure | NodeLost


def cause_grace(
    failures: Sequence[Failure], num_nodes: int, is_writing: bool, is_ending: bool
) -> float:
    """Return for how many seconds failures may wait for their cause, and for a checkpoint.

    Args:
        is_writing: rank 0 writes a checkpoint.
        is_ending: a rank that has raised still runs.
    """
    if any(_rank(each) == 0 for each in failures):
        return 0.0
    if is_writing and all(each.kind is FailureKind.EXCEPTION for each in failures):
        return WRITE_GRACE
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


def _rank(failure: Failure) -> int:
    """Return a number that is smaller for what explains more."""
    if failure.kind is FailureKind.LOST or failure.cause in NEVER_CONSEQUENCES:
        return 0
    if failure.is_consequence:
        return 3
    if failure.kind is FailureKind.STALL:
        return 2
    return 1
