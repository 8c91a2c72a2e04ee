"""Translate errors for Flyte: recoverable or not, the user's or the system's, and the text that Flyte shows.

Flyte shows an error as "Trace:" and "Message:", both with its whole text. So the text of ours is short: the first line
says what happened, the lines after it are the one traceback that matters, which is the rank's. The driver's own frames
lead from Flyte to the launcher and explain nothing, so they are hidden. The report has the complete text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click
from flytekit.core.context_manager import FlyteContextManager
from flytekit.exceptions.user import FlyteRecoverableException

from flyte_ddp import errors
from flyte_ddp.errors import RankFailure, SweepFailed, TrainingStopped
from flyte_ddp.launch.failures import first_line, shorten

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


class _WithoutFrames:
    """A mixin for exceptions that hides the frames of the driver."""

    __traceback__ = property(lambda self: None, lambda self, value: None)


class InputError(click.BadParameter, ValueError):
    """A user's mistake. `pyflyte run` prints its message alone, where another exception comes with a traceback."""

    def format_message(self) -> str:
        return self.message  # it names the field itself


class UserError(_WithoutFrames, InputError):
    """The user's mistake, in one line with its remedy. Flyte does not retry it."""


class RecoverableError(_WithoutFrames, FlyteRecoverableException):  # type: ignore[misc]
    """A failure that another attempt may survive. Flyte retries it."""


class TaskFailed(_WithoutFrames, RuntimeError):
    """A failure that another attempt would repeat, such as a bug in a recipe."""


@contextlib.contextmanager
def flyte_errors() -> Iterator[None]:
    """Turn the library's errors into those that Flyte knows. Any other error passes as it is.

    Raises:
        UserError: only the user can fix it.
        RecoverableError: another attempt may succeed.
        TaskFailed: a rank raised an exception.
        KeyboardInterrupt: Ctrl-C ended the run.
    """
    try:
        yield
    except (*USER_ERRORS, *RECOVERABLE_ERRORS, RankFailure, SweepFailed) as error:
        translated = _translate(error)
    else:
        return
    raise translated from None


def _translate(error: Exception) -> BaseException:
    if isinstance(error, TrainingStopped) and str(error).startswith("SIGINT"):
        return KeyboardInterrupt(str(error))
    if isinstance(error, RankFailure):
        if error.kind in RECOVERABLE_KINDS:
            return _shown(RecoverableError, str(error))
        if error.is_user_error:
            return UserError(error.cause.partition(": ")[2])
        kind = getattr(errors, error.error_name, Exception)
        may_succeed = issubclass(kind, RECOVERABLE_ERRORS) or error.error_name == FlyteRecoverableException.__name__
        return _shown(RecoverableError if may_succeed else TaskFailed, str(error))
    if isinstance(error, SweepFailed):
        return _shown(RecoverableError, str(error)) if error.may_succeed else UserError(str(error))
    if isinstance(error, USER_ERRORS):
        return UserError(str(error))
    return _shown(RecoverableError, str(error))


def _shown(kind: type[Exception], text: str) -> Exception:
    """Return an exception with the first line of `text` as its message, and the rest as its one traceback."""
    details = shorten(text.partition("\n")[2])
    error = kind(first_line(text))
    state = FlyteContextManager.current_context().execution_state
    if details and hasattr(error, "add_note") and state is not None and not state.is_local_execution():
        error.add_note(details)  # Flyte prints the notes in "Trace:" alone
        return error
    return kind(f"{first_line(text)}\n{details}") if details else error
