"""Translate errors for Flyte: recoverable or not, the user's or the system's, and the text that
Flyte shows.

Flyte shows an error as "Trace:" and "Message:", both with its whole text. So the text of ours is
short: the first line says what happened, the lines after it are the one traceback that matters,
which is the rank's. The driver's own frames lead from Flyte to the launcher and explain nothing, so
they are hidden. The report has the complete text.
"""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import click
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException

from flyte_ddp import errors
from flyte_ddp.errors import RankFailure, SweepFailed, TrainingStopped
from flyte_ddp.flyte.flyte_context import is_flyte_task
from flyte_ddp.launch.protocol.failures import first_line, shorten, shorten_traceback
from flyte_ddp.rank.frames import frames_of_user
from flyte_ddp.storage import redact_errors, redact_url

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


def _frames(error: Any) -> TracebackType | None:
    if is_flyte_task() or click.get_current_context(silent=True) is not None:
        return None
    frames: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)
    return frames


class _WithoutFrames:
    """A mixin for exceptions that hides the frames of the driver from Flyte and pyflyte, which
    would print them.

    Others see them: pytest cannot report an exception without a traceback.
    """

    __traceback__ = property(_frames, lambda self, value: None)


class InputError(click.BadParameter, ValueError):
    """A user's mistake. `pyflyte run` prints its message alone, where another exception comes with
    a traceback.
    """

    def format_message(self) -> str:
        return self.message  # it names the field itself


class UserError(_WithoutFrames, InputError):
    """The user's mistake, in one line with its remedy. Flyte does not retry it."""


class RecoverableError(_WithoutFrames, FlyteRecoverableException):  # type: ignore[misc]
    """A failure that another attempt may survive. Flyte retries it."""


class TaskFailed(_WithoutFrames, FlyteUserRuntimeException, RuntimeError):  # type: ignore[misc]
    """A failure that another attempt would repeat, such as a bug in a recipe; of the class that
    kfpytorch raises.
    """

    def __init__(self, text: str, timestamp: float | None = None) -> None:
        FlyteUserRuntimeException.__init__(self, RuntimeError(text), timestamp)

    def __str__(self) -> str:
        return str(self.args[0])


@contextlib.contextmanager
def flyte_errors() -> Iterator[None]:
    """Turn the library's errors, and those of a recipe's `prepare`, into those that Flyte knows.
    Others pass unchanged.

    Raises:
        UserError: only the user can fix it.
        RecoverableError: another attempt may succeed.
        TaskFailed: a rank or a recipe's `prepare` raised an exception.
        KeyboardInterrupt: Ctrl-C ended the run.
    """
    try:
        with redact_errors():
            yield
    except Exception as error:
        ours = (*USER_ERRORS, *RECOVERABLE_ERRORS, RankFailure, SweepFailed)
        known = error if isinstance(error, ours) else _failure_of_prepare(error)
        if known is None:
            raise
        translated = _translate(known)
    else:
        return
    raise translated from None


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


def _translate(error: Exception) -> BaseException:
    if isinstance(error, TrainingStopped) and error.reason == signal.SIGINT.name:
        return KeyboardInterrupt(str(error))
    if isinstance(error, USER_ERRORS) or (isinstance(error, SweepFailed) and not error.may_succeed):
        return UserError(str(error))
    if not isinstance(error, RankFailure):
        return _shorten_error(RecoverableError, error)
    if error.is_user_error:
        return UserError(error.cause.partition(": ")[2])
    may_succeed = (
        error.kind in RECOVERABLE_KINDS
        or issubclass(getattr(errors, error.error_name, Exception), RECOVERABLE_ERRORS)
        or error.error_name == FlyteRecoverableException.__name__
    )
    return _shorten_error(RecoverableError if may_succeed else TaskFailed, error)


def _shorten_error(kind: Any, error: Exception) -> BaseException:
    """Return an exception with the first line of `error`'s text as its message, and the rest as its
    one traceback.
    """
    text = str(error)
    message, details = first_line(text), shorten(text.partition("\n")[2])
    can_note = hasattr(kind, "add_note") and is_flyte_task()
    shown: Any = kind(
        f"{message}\n{details}" if details and not can_note else message,
        timestamp=getattr(error, "timestamp", time.time()),
    )
    if details and can_note:
        shown.add_note(details)  # Flyte prints the notes in "Trace:" alone
    translated: BaseException = shown
    return translated
