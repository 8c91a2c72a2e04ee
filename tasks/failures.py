"""How errors reach Flyte: which of them are worth another attempt, which are the user's, and what is shown.

Flyte shows an error as "Trace:" and "Message:", both with its whole text. So the text of ours is short: the first line
says what happened, the lines after it are the one traceback that matters, which is the rank's. The driver's own frames
lead from Flyte to the launcher and explain nothing, so they are hidden. The report has the complete text.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from flytekit.core.context_manager import FlyteContextManager
from flytekit.exceptions.user import FlyteRecoverableException

from flyte_ddp import errors
from flyte_ddp.errors import RankFailure, SweepFailed, TrainingStopped
from tasks.inputs import InputError

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

MAX_LINES = 40  # of the details below the first line: a screen
MAX_FIRST_LINES = 8  # of these, from the beginning; the end of a traceback says more
MAX_LINE_LENGTH = 400  # characters


class _WithoutFrames:
    """A mixin for exceptions that hides the frames of the driver."""

    __traceback__ = property(lambda self: None, lambda self, value: None)


class UserError(_WithoutFrames, InputError):
    """The user's mistake, in one line with its remedy. Flyte does not retry it."""


class RecoverableError(_WithoutFrames, FlyteRecoverableException):
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
        name, _, message = error.cause.partition(": ")
        kind = getattr(errors, name, Exception)
        if issubclass(kind, USER_ERRORS):
            return UserError(message)
        return _shown(RecoverableError if issubclass(kind, RECOVERABLE_ERRORS) else TaskFailed, str(error))
    if isinstance(error, SweepFailed):
        return _shown(RecoverableError, str(error)) if error.may_succeed else UserError(str(error))
    if isinstance(error, USER_ERRORS):
        return UserError(str(error))
    return _shown(RecoverableError, str(error))


def _shown(kind: type[Exception], text: str) -> Exception:
    """Return an exception with the first line of `text` as its message, and the rest as its one traceback."""
    first, _, rest = text.partition("\n")
    details = _screenful(rest)
    error = kind(_cut(first))
    state = FlyteContextManager.current_context().execution_state
    if details and hasattr(error, "add_note") and state is not None and not state.is_local_execution():
        error.add_note(details)  # Flyte prints the notes in "Trace:" alone
        return error
    return kind(f"{_cut(first)}\n{details}") if details else error


def _screenful(text: str) -> str:
    """Return the first and the last lines of `text` if it is longer than a screen."""
    lines = [_cut(line) for line in text.strip("\n").splitlines()]
    if len(lines) > MAX_LINES:
        left_out = len(lines) - MAX_LINES
        last = lines[-(MAX_LINES - MAX_FIRST_LINES) :]
        lines = [*lines[:MAX_FIRST_LINES], f"[{left_out} more lines are in the report]", *last]
    return "\n".join(lines)


def _cut(line: str) -> str:
    return line if len(line) <= MAX_LINE_LENGTH else line[: MAX_LINE_LENGTH - 1] + "…"
