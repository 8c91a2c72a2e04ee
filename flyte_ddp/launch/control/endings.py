"""The error that ends a run, and the line about an attempt that is followed by another one."""

from __future__ import annotations

from flyte_ddp.errors import (
    FailureKind,
    GangLost,
    OutOfMemory,
    ProgramError,
    RankFailure,
    StorageUnavailable,
    first_line,
)
from flyte_ddp.launch.control.policy import AttemptEnd, Before, Next
from flyte_ddp.launch.protocol.failures import program_failure


def describe_loss(ended: AttemptEnd, before: Before, how: str, has_store: bool) -> str:
    """Return the line about a gang that was lost.

    Args:
        how: the point from which the gang restarts, such as "from the beginning".
        has_store: the run keeps checkpoints.
    """
    failure = ended.failure
    assert failure is not None  # only a gang that moves has none
    at = ""
    if ended.step or has_store:  # a script may report no step
        at = f" {ended.position}"
    is_known = before.previous is not None and before.previous.cause == failure.cause != ""
    what = str(failure)
    if is_known or failure.kind is FailureKind.STALL:  # the log has all stacks of a stall
        what = first_line(failure)
    return f"the gang was lost{at} and restarts {how}: {what}"


def describe_move(ended: AttemptEnd, reason: str) -> str:
    """Return the line about a gang that ended to start again on other nodes."""
    if not reason and ended.failure:
        reason = first_line(ended.failure)
    start = "there"
    if 0 <= ended.kept_step < ended.step:
        start = f"step {ended.kept_step}, because no later one was saved in time"
    return f"{reason}: the gang ended {ended.position} and restarts from {start}"


def make_error(
    ended: AttemptEnd,
    kind: Next | type[Exception],
    num_restarts: int,
    max_restarts: int,
    larger_memory: str,
) -> Exception:
    """Return the error that ends the run, with its cause.

    Args:
        kind: what `policy.decide` has returned.
        num_restarts, max_restarts: the number of counted restarts, and of allowed restarts.
        larger_memory: see `Place`.
    """
    failure = ended.failure
    assert failure is not None  # only a gang that moves has none
    used_up = (
        f"the gang was lost {ended.position} and has used up its restarts (max_restarts: "
        f"{max_restarts})"
    )
    error: Exception = failure
    if kind is OutOfMemory:
        error = OutOfMemory(
            f"{larger_memory}, or a smaller evaluation_batch_size, data_workers or "
            f"model: the ranks ran out of memory twice. {first_line(failure)}"
        )
    elif kind is ProgramError and isinstance(failure, RankFailure):
        return _make_program_error(failure)
    elif kind is StorageUnavailable:
        error = StorageUnavailable(first_line(failure))
    elif kind is GangLost:
        error = GangLost(f"{used_up}: {failure}")
    elif failure.kind is not FailureKind.EXCEPTION and num_restarts:
        failure.args = (f"{used_up}: {failure}",)
    if error is not failure:
        error.__cause__ = failure
    return error


def _make_program_error(failure: RankFailure) -> RankFailure:
    twice = f"{first_line(failure)} twice, at {failure.details['place']}, without progress"
    return program_failure(
        f"{twice} in between: the program, or a library that it calls there, has a bug",
        failure.rank,
    )
