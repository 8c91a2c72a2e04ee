"""Translate errors for Flyte: recoverable or not, the user's or the system's, and the text that
Flyte shows.

Flyte shows an error as "Trace:" and "Message:", both with its whole text. So the text of our errors
is short: the first line describes what happened, and the lines after it are the rank's traceback.
The driver's own frames lead from Flyte to the launcher and explain nothing, so they are hidden. The
report has the complete text.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import click
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException

from flyte_ddp.errors import TrainingStopped
from flyte_ddp.flyte.flyte_context import is_flyte_task
from flyte_ddp.storage import redact_errors
from flyte_ddp.task_run.outcome import FailureReport, Retry, judge_failure


def _frames(error: Any) -> TracebackType | None:
    if is_flyte_task() or click.get_current_context(silent=True) is not None:
        return None
    frames: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)
    return frames


class _WithoutFrames:
    """A mixin for exceptions. It hides the driver's frames from Flyte and pyflyte, which would
    print them.

    Other programs see the frames: pytest cannot report an exception without a traceback.
    """

    __traceback__ = property(_frames, lambda self, value: None)


class InputError(click.BadParameter, ValueError):
    """A user's mistake. `pyflyte run` prints its message alone, and other exceptions with a
    traceback.
    """

    def format_message(self) -> str:
        return self.message  # click would add the field's name, but the message contains it.


class UserError(_WithoutFrames, InputError):
    """The user's mistake, in one line with its remedy. Flyte does not retry it."""


class RecoverableError(_WithoutFrames, FlyteRecoverableException):  # type: ignore[misc]
    """A failure that another attempt may survive. Flyte retries it."""


class TaskFailed(_WithoutFrames, FlyteUserRuntimeException, RuntimeError):  # type: ignore[misc]
    """A failure that another attempt would repeat, such as a bug in a recipe. Its base class is the
    class that kfpytorch raises.
    """

    def __init__(self, text: str, timestamp: float | None = None) -> None:
        FlyteUserRuntimeException.__init__(self, RuntimeError(text), timestamp)

    def __str__(self) -> str:
        return str(self.args[0])


@contextlib.contextmanager
def flyte_errors() -> Iterator[None]:
    """Turn errors of the library and of a recipe's `prepare` into errors that Flyte knows. Other
    errors pass unchanged.

    Raises:
        UserError: only the user can fix the problem.
        RecoverableError: another attempt may succeed.
        TaskFailed: a rank or a recipe's `prepare` raised an exception.
        KeyboardInterrupt: Ctrl-C ended the run.
    """
    try:
        with redact_errors():
            yield
    except Exception as error:
        outcome = judge_failure(error, FlyteRecoverableException.__name__)
        if outcome is None:
            raise
        translated = _translate(error, outcome)
    else:
        return
    raise translated from None


def _translate(error: Exception, outcome: FailureReport) -> BaseException:
    if isinstance(error, TrainingStopped) and error.reason == signal.SIGINT.name:
        return KeyboardInterrupt(str(error))
    if outcome.retry is Retry.USER_ERROR:
        return UserError(outcome.text)
    kind: Any = TaskFailed
    if outcome.retry is Retry.MAY_SUCCEED:
        kind = RecoverableError
    can_note = hasattr(kind, "add_note") and is_flyte_task()
    text = outcome.text
    if can_note:
        text = outcome.message
    translated: BaseException = kind(text, timestamp=getattr(error, "timestamp", time.time()))
    if outcome.details and can_note:
        # Flyte prints the notes in "Trace:" alone.
        translated.add_note(outcome.details)  # type: ignore[attr-defined,unused-ignore]
    return translated
