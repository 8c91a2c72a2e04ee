"""Tell Flyte how a failed task is to be retried, and what to show. Imports none of its SDKs."""

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
RECOVERABLE_KINDS = ("signal", "exit", "stall")  # of a rank's failure


class Retry(enum.Enum):
    """The answer to a failed attempt."""

    USER = enum.auto()  # no: the user has to change something
    REPEATS = enum.auto()  # no: it would fail in the same way, such as by a bug in a recipe
    MAY_SUCCEED = enum.auto()


@dataclass(frozen=True)
class Outcome:
    """The end of a task by an error: a line, and the one traceback that matters."""

    kind: Retry
    message: str
    details: str = ""

    @property
    def text(self) -> str:
        return f"{self.message}\n{self.details}" if self.details else self.message


def judge_failure(error: Exception, *recoverable: str) -> Outcome | None:
    """Return the outcome of the library's errors, and of those of a recipe's `prepare`; None for
    others.

    Args:
        recoverable: names of exceptions of an SDK after which its user wants another attempt.
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
        kind = Retry.MAY_SUCCEED if may_succeed else Retry.REPEATS
    text = str(error)
    return Outcome(kind, first_line(text), shorten(text.partition("\n")[2]))


def _failure_of_prepare(error: Exception) -> RankFailure | None:
    """Return the failure of a recipe's own `prepare`, as of a rank; None if `error` is from
    elsewhere.
    """
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_name != "prepare_data":  # of recipes/prepare.py
        frames = frames.tb_next
    frames = frames and frames_of_user(frames)
    if not frames:
        return None
    cause = f"{type(error).__name__}: {error}"
    text = redact_url("".join(traceback.format_exception(type(error), error, frames)))
    return RankFailure(
        f"prepare failed: {first_line(cause)}\n{shorten_traceback(text)}", -1, cause=cause
    )
