"""Judge why a rank, a node or a gang failed, and describe it on less than a screen. Starts and ends nothing."""

from __future__ import annotations

import builtins
import re
from dataclasses import dataclass

from flyte_ddp.errors import OUT_OF_MEMORY, NodeLost, RankFailure, StorageUnavailable
from flyte_ddp.launch.process.programs import Program

MAX_LINES = 30  # of a traceback or a log in an error; with what stands around it, a screen
MAX_WIDTH = 300  # characters of such a line
HEAD_LINES = 4  # of a text that is shortened: where a traceback begins

# Exceptions of these classes may be a machine's or a network's doing. Other builtin ones are bugs.
ENVIRONMENT_ERRORS = (RuntimeError, OSError, MemoryError, EOFError, SystemError)
BUGS = ("NotImplementedError", "RecursionError")  # RuntimeErrors that only code raises

_CHAINED = re.compile(r"\n+(?:During handling of the above|The above) exception[^\n]*\n+")


@dataclass(frozen=True)
class Ended:
    """The end of an attempt, to compare the next one with.

    Attributes:
        step: that it had reached.
        resumed_step: that it had started from; -1 if it ended before that was known.
    """

    failure: RankFailure | NodeLost
    step: int
    resumed_step: int

    def position(self) -> str:
        """Return where the attempt ended, as messages have it."""
        return f"at step {self.step}" if self.step else "before its first step"


def is_bug(ended: Ended, previous: Ended | None, program: Program) -> bool:
    """Return whether the program or its input is to blame, and another attempt is not to be made."""
    failure = ended.failure
    if not isinstance(failure, RankFailure) or failure.kind != "exception" or is_store_outage(ended):
        return False
    if failure.is_user_error:
        return True
    if program.repeats_bugs:
        return False
    if failure.error_name in BUGS:
        return True
    kind = getattr(builtins, failure.error_name, None)
    if isinstance(kind, type) and not issubclass(kind, ENVIRONMENT_ERRORS):
        return True
    if previous is None or not isinstance(previous.failure, RankFailure):
        return False
    return previous.failure.cause == failure.cause and ended.step <= previous.step


def is_out_of_memory(ended: Ended | None) -> bool:
    """Return whether the kernel ended the attempt for lack of memory."""
    return ended is not None and ended.failure.cause == OUT_OF_MEMORY


def is_store_outage(ended: Ended | None) -> bool:
    """Return whether the attempt ended because the store could not be reached."""
    return ended is not None and ended.failure.cause.partition(":")[0] == StorageUnavailable.__name__


def made_no_progress(ended: Ended, previous: Ended | None) -> bool:
    """Return whether the attempt started from the same checkpoint as the one before it, or died at the same step."""
    if previous is None:
        return False
    died_at_same_step = 0 < previous.step >= ended.step  # a function may report none
    return ended.resumed_step <= previous.resumed_step or died_at_same_step


def first_line(text: object) -> str:
    """Return the first line of `text`, which names what happened."""
    return str(text).partition("\n")[0][:MAX_WIDTH]


def shorten_traceback(text: str) -> str:
    """Return the last of a traceback's chained exceptions, and one line for each of those that led to it."""
    *earlier, last = _CHAINED.split(text.strip())
    causes = [f"after {part.strip().splitlines()[-1]}" for part in earlier if part.strip()]
    return shorten("\n".join([last, *causes[-3:]]))


def shorten(text: str, max_lines: int = MAX_LINES) -> str:
    """Return `text` with its first and last lines only, none of them too wide."""
    lines = [line if len(line) <= MAX_WIDTH else f"{line[:MAX_WIDTH]}..." for line in text.strip("\n").splitlines()]
    if len(lines) > max_lines:
        head = min(HEAD_LINES, max_lines // 4)
        tail = max_lines - head - 1
        lines = [*lines[:head], f"... ({len(lines) - head - tail} lines are left out)", *lines[-tail:]]
    return "\n".join(lines)
