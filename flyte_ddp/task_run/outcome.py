"""Decide if a failed task is to be retried, and what Flyte shows. This module imports no SDK."""

from __future__ import annotations

import enum
import traceback
from dataclasses import dataclass

from flyte_ddp import errors
from flyte_ddp.config.frames import frames_of_user
from flyte_ddp.errors import RankFailure, SweepFailed
from flyte_ddp.launch.protocol.failures import first_line, shorten, shorten_traceback
from flyte_ddp.storage import redact_url

# Only the user can fix these. Another attempt would end in the same way.
USER_ERRORS = (errors.ConfigError, errors.DataError, errors.NonFiniteLoss)
# Another attempt may succeed, and continues from the last checkpoint.
RECOVERABLE_ERRORS = (
    errors.CheckpointError,
    errors.ClusterError,
    errors.GangLost,
    errors.NodeLost,
    errors.StorageUnavailable,
    errors.TrainingStopped,
)
RECOVERABLE_KINDS = ("signal", "exit", "stall")  # kinds of a rank's failure


class Retry(enum.Enum):
    """The answer to a failed attempt."""

    USER = enum.auto()  # no retry: the user has to change something
    REPEATS = enum.auto()  # no retry: it would fail in the same way, for example by a recipe's bug
    MAY_SUCCEED = enum.auto()  # retry


@dataclass(frozen=True)
class Outcome:
    """The end of a task by an error: a line, and the traceback that matters."""

    kind: Retry
    message: str
    details: str = ""

    @property
    def text(self) -> str:
        if not self.details:
            return self.message
        return f"{self.message}\n{self.details}"


def judge_failure(error: Exception, *recoverable: str) -> Outcome | None:
    """Return the outcome of an error of the library or of a recipe's `prepare`; None for other
    errors.

    Args:
        recoverable: names of an SDK's exceptions after which another attempt is wanted.
    """
    if not isinstance(error, (*USER_ERRORS, *RECOVERABLE_ERRORS, RankFailure, SweepFailed)):
        failure = _failure_of_prepare(error)
        if failure is None:
            return None
        error = failure
    if isinstance(error, USER_ERRORS) or (isinstance(error, SweepFailed) and not error.may_succeed):
        return Outcome(Retry.USER, str(error))
    kind = Retry.MAY_SUCCEED
    if isinstance(error, RankFailure):
        if error.is_user_error:
            return Outcome(Retry.USER, error.cause.partition(": ")[2])
        may_succeed = (
            error.kind in RECOVERABLE_KINDS
            or issubclass(getattr(errors, error.error_name, Exception), RECOVERABLE_ERRORS)
            or error.error_name in recoverable
        )
        if not may_succeed:
            kind = Retry.REPEATS
    text = str(error)
    return Outcome(kind, first_line(text), shorten(text.partition("\n")[2]))


def _failure_of_prepare(error: Exception) -> RankFailure | None:
    """Return the failure of a recipe's own `prepare` in the form of a rank's failure; None if
    `error` is from elsewhere.
    """
    frames = error.__traceback__
    # The function is in recipes/prepare.py.
    while frames and frames.tb_frame.f_code.co_name != "prepare_data":
        frames = frames.tb_next
    frames = frames and frames_of_user(frames)
    if not frames:
        return None
    cause = f"{type(error).__name__}: {error}"
    text = redact_url("".join(traceback.format_exception(type(error), error, frames)))
    return RankFailure(
        f"prepare failed: {first_line(cause)}\n{shorten_traceback(text)}", -1, cause=cause
    )
