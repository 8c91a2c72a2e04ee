"""Decide whether Flyte retries a failed task, and what it shows. This module imports neither
flytekit nor Flyte 2's SDK, because the tasks of both use it.
"""

from __future__ import annotations

import enum
import traceback
from collections.abc import Collection
from dataclasses import dataclass

from flyte_ddp import errors
from flyte_ddp.errors import FailureKind, RankFailure, SweepFailed, first_line
from flyte_ddp.launch.protocol.failures import shorten, shorten_traceback
from flyte_ddp.process.tracebacks import frames_of_user
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
RECOVERABLE_KINDS = (FailureKind.SIGNAL, FailureKind.EXIT, FailureKind.STALL)


class Retry(enum.Enum):
    """How Flyte treats a failed task. It starts another attempt only after `MAY_SUCCEED`."""

    MAY_SUCCEED = enum.auto()
    # Not retried: the input or the settings are wrong. The message explains the error.
    USER_ERROR = enum.auto()
    # Not retried: an exception in the program, such as a recipe's bug. Flyte shows the traceback.
    PROGRAM_ERROR = enum.auto()


@dataclass(frozen=True)
class FailureReport:
    """The failure of a task."""

    retry: Retry
    message: str  # the whole text of a user error; the first line of another error
    details: str = ""  # the other lines, such as a traceback, shortened to a screen

    @property
    def text(self) -> str:
        if not self.details:
            return self.message
        return f"{self.message}\n{self.details}"


def judge_failure(error: Exception, *recoverable_names: str) -> FailureReport | None:
    """Return the report for an error of one of the classes above, or for an exception in a recipe's
    `prepare`. Return None for any other error.

    Args:
        recoverable_names: class names of the SDK's exceptions after which another attempt may
            succeed. A rank's exception reaches this process as its class name and its message.
    """
    if not isinstance(error, (*USER_ERRORS, *RECOVERABLE_ERRORS, RankFailure, SweepFailed)):
        failure = _convert_error_of_prepare(error)
        if failure is None:
            return None
        error = failure
    if isinstance(error, USER_ERRORS) or (isinstance(error, SweepFailed) and not error.may_succeed):
        return FailureReport(Retry.USER_ERROR, str(error))
    retry = Retry.MAY_SUCCEED
    if isinstance(error, RankFailure):
        if error.is_user_error:
            _, _, message = error.cause.partition(": ")  # The class name comes first.
            return FailureReport(Retry.USER_ERROR, message)
        if not _may_succeed(error, recoverable_names):
            retry = Retry.PROGRAM_ERROR
    message, _, details = str(error).partition("\n")
    return FailureReport(retry, first_line(message), shorten(details))


def _may_succeed(failure: RankFailure, recoverable_names: Collection[str]) -> bool:
    """Return whether another attempt may succeed after a rank's failure."""
    if failure.kind in RECOVERABLE_KINDS or failure.error_name in recoverable_names:
        return True
    error_class = getattr(errors, failure.error_name, None)  # None for an error of the user's code
    return error_class is not None and issubclass(error_class, RECOVERABLE_ERRORS)


def _convert_error_of_prepare(error: Exception) -> RankFailure | None:
    """Return an exception in a recipe's `prepare` as a `RankFailure`; None for another error.
    `prepare` is the user's code, so its exceptions are judged as a rank's.
    """
    # Find the call of `prepare_data` (recipes/prepare.py), which calls the recipe's `prepare`.
    caller = error.__traceback__
    while caller and caller.tb_frame.f_code.co_name != "prepare_data":
        caller = caller.tb_next
    if caller is None:
        return None
    users_frames = frames_of_user(caller)
    if users_frames is None:
        return None
    cause = f"{type(error).__name__}: {error}"
    text = redact_url("".join(traceback.format_exception(type(error), error, users_frames)))
    return RankFailure(
        f"prepare failed: {first_line(cause)}\n{shorten_traceback(text)}", cause=cause
    )
