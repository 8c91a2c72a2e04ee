"""Every exception that crosses a package boundary. The code that reports an exception need not
import the package that raises it.

Pickle creates an exception from its message alone and sets the attributes later. So all parameters
have defaults.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

MAX_REASON = 400  # characters of an error in one line
MAX_WIDTH = 300  # characters of a line in an error

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def log_failures(
    what: str, logged: set[str] | None = None, others: tuple[type[BaseException], ...] = ()
) -> Iterator[None]:
    """Log an error of the block in one line instead of raising it. Output for people never ends a
    run.

    Args:
        what: name of the output, for the line.
        logged: outputs that have failed before. They are not logged again. A failure is added.
        others: kinds of errors besides `Exception`: SystemExit, where a user's code is called.
    """
    kinds: tuple[type[BaseException], ...] = (Exception, *others)
    try:
        yield
    except kinds as error:
        if logged is None or what not in logged:
            logger.warning("the %s cannot be shown: %s", what, in_one_line(error))
        if logged is not None:
            logged.add(what)


def in_one_line(error: BaseException) -> str:
    """Return the class and the message of `error` in one line."""
    text = " ".join("".join(traceback.format_exception_only(type(error), error)).split())
    if len(text) > MAX_REASON:
        text = f"{text[:MAX_REASON]} ..."
    return text


def first_line(text: object) -> str:
    """Return the first line of `text`, which names what happened."""
    return str(text).partition("\n")[0][:MAX_WIDTH]


def abbreviate(names: Sequence[object], max_names: int = 5) -> str:
    """Return the first of `names`, and how many more there are."""
    shown = ", ".join(map(str, names[:max_names]))
    left_out = len(names) - max_names
    if left_out > 0:
        shown += f" and {left_out} more"
    return shown


class ConfigError(ValueError):
    """Invalid user input. The message names the field, what was expected and what was given."""


class DataError(ValueError):
    """The data given cannot be used. The message names the file or URL, what is wrong and what
    would be accepted.

    Example:
        class Plants(Recipe):
            def prepare(self, source, directory):
                if not source:
                    raise DataError("data: expected a directory of images, got none")
                return f"plants in {source}"
    """


class StorageDenied(ConfigError):
    """The store refuses: no credentials, wrong ones, no permission, or no such bucket. A retry
    would not help.
    """


class StorageUnavailable(RuntimeError):
    """The store cannot be reached for now. The same work may succeed later.

    Attributes:
        is_full: the store is a disk without space.
    """

    def __init__(self, message: str = "", is_full: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full


class FileChanged(RuntimeError):
    """A file was replaced by another process since it was read. Nothing was written."""


class NonFiniteLoss(RuntimeError):
    """The loss became NaN or infinite: nothing that follows could be of use."""


class WrongResult(RuntimeError):
    """A rank computes another result than the other ranks from the same numbers."""


class ProgramError(RuntimeError):
    """A bug of the program that each attempt would repeat. The message names it in one line."""


class StopRequested(BaseException):
    """The agent wanted the run to end early. The work so far is in a checkpoint.

    It is no `Exception`, so that no program catches it as one of its own errors.
    """


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is damaged."""


OUT_OF_MEMORY = "OOMKilled"  # Kubernetes' name for the reason


class FailureKind(str, enum.Enum):
    """How a rank, or its node, ended the run."""

    EXCEPTION = "exception"
    SIGNAL = "signal"
    EXIT = "exit"
    STALL = "stall"  # nothing moved any more
    LOST = "lost"  # the node is gone, or could not run its ranks


class RankFailure(RuntimeError):
    """A rank ended the run: with an exception, by a signal, or because nothing moved any more.

    Attributes:
        rank: number in the whole gang; -1 where no single rank is to blame (a stall).
        kind: how the rank ended the run; never LOST.
        cause: the exception's class name and message, or the signal's name: equal for the same bug
            in two attempts. OUT_OF_MEMORY for a SIGKILL by the kernel's out-of-memory killer.
        is_consequence: the error of a rank whose peer has died, so another failure is to blame.
        details: further values: the `place` of a crash in the user's code; the `sizes` that gloo
            found to differ; the process `groups` of a rank that lost a peer, with its latest
            collectives.
        timestamp: when the failure was noticed, in seconds since the epoch.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        kind: FailureKind = FailureKind.EXCEPTION,
        cause: str = "",
        is_consequence: bool = False,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.kind = FailureKind(kind)
        self.cause = cause
        self.is_consequence = is_consequence
        self.details = details or {}
        self.timestamp = time.time()

    @property
    def error_name(self) -> str:
        """The class name of the exception that the rank raised."""
        return self.cause.partition(":")[0]

    @property
    def is_user_error(self) -> bool:
        """True if the user has to change the input or the program. Then the message is one line
        that explains the failure.
        """
        kind = globals().get(self.error_name)  # the class has crossed processes by its name
        return isinstance(kind, type) and issubclass(
            kind, (ConfigError, DataError, NonFiniteLoss, ProgramError)
        )


class OutOfMemory(ConfigError):
    """The kernel killed the ranks twice for lack of memory, without progress in between. Further
    attempts would end in the same way.
    """


class TrainingStopped(RuntimeError):
    """The run was stopped early. Its last checkpoint contains the work so far.

    Attributes:
        reason: the name of the signal, or another reason for the stop. The message begins with it.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class NodeLost(RuntimeError):
    """A node died, fell silent or could not run its ranks: another attempt may well succeed.

    Attributes:
        worker: the name of its worker; "" for a silent worker, because its pod's log cannot be read
            either.
        cause: the reason: OUT_OF_MEMORY, or "" for any other.
    """

    kind = FailureKind.LOST
    is_consequence = False
    is_user_error = False

    def __init__(self, message: str, worker: str = "", cause: str = "") -> None:
        super().__init__(message)
        self.worker = worker
        self.cause = cause


class GangLost(RuntimeError):
    """The gang is lost: its restarts are used up, or the nodes it needs did not come back.

    The same run on another cluster resumes from its checkpoints.
    """


class WorkersLost(GangLost):
    """The nodes that the gang needs did not come back."""


class ClusterError(RuntimeError):
    """The cluster did not come up, or could not be reached. The message names the missing part."""


class NoAnswer(RuntimeError):
    """A run does not answer, or could not do what it was asked for. The run itself goes on."""


class PreflightError(ConfigError):
    """The cluster cannot be started. The message lists all findings, one per line."""

    def __init__(self, findings: list[str]) -> None:
        super().__init__(
            "the Dask cluster cannot be started:\n"
            + "\n".join(f"- {finding}" for finding in findings)
        )


class SweepFailed(RuntimeError):
    """No model could be trained to its end. The message contains the error of each model.

    Attributes:
        may_succeed: whether workers were lost, so that the same sweep may end better another time.
    """

    def __init__(self, message: str, may_succeed: bool = False) -> None:
        super().__init__(message)
        self.may_succeed = may_succeed


class ChampionError(RuntimeError):
    """The champion cannot be read. The message names what is wrong and where."""


class NoChampion(ChampionError):
    """No model has been promoted yet."""


class ChampionChanged(RuntimeError):
    """Another version was put in use meanwhile, by another promotion or a rollback. Nothing was
    done.
    """
