"""Describe a failure on less than a screen."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flyte_ddp.errors import MAX_WIDTH, FailureKind, ProgramError, RankFailure

# lines of a traceback or a log in an error; the whole error then fits on a screen
MAX_LINES = 30
HEAD_LINES = 4  # lines kept at the start of a shortened text, where a traceback begins

_FRAME = re.compile(r'\s*File "([^"]+)", line (\d+),? in (\S+)')
_LIBRARIES = (
    sysconfig.get_path("stdlib"),
    "site-packages",
    "<frozen ",
    "<string>",
    str(Path(__file__).parents[2]),
)
_CHAINED = re.compile(r"\n+(?:During handling of the above|The above) exception[^\n]*\n+")


def shorten_traceback(text: str) -> str:
    """Return the last of a traceback's chained exceptions, and one line for each exception that led
    to it.
    """
    *earlier, last = _CHAINED.split(text.strip())
    lines = last.splitlines()
    users = [number for number, line in enumerate(lines) if find_place([line])]
    # Frames before the user's code, such as a loader's process, are the same for every error there.
    if users:
        last = "\n".join([lines[0], *lines[users[0] :]])
    causes = [f"after {part.strip().splitlines()[-1]}" for part in earlier if part.strip()]
    return shorten("\n".join([last, *causes[-3:]]))


def shorten(text: str, max_lines: int = MAX_LINES) -> str:
    """Return `text` with its first and last lines only, none of them too wide."""
    lines = []
    for line in text.strip("\n").splitlines():
        if len(line) > MAX_WIDTH:
            line = f"{line[:MAX_WIDTH]}..."
        lines.append(line)
    if len(lines) > max_lines:
        head = min(HEAD_LINES, max_lines // 4)
        tail = max_lines - head - 1
        lines = [
            *lines[:head],
            f"... ({len(lines) - head - tail} lines are left out)",
            *lines[-tail:],
        ]
    return "\n".join(lines)


def program_failure(text: str, rank: int) -> RankFailure:
    """Return the failure of a rank by a bug of its program. `text` explains the bug in one line."""
    return RankFailure(text, rank, FailureKind.EXCEPTION, f"{ProgramError.__name__}: {text}")


def find_place(lines: Iterable[str]) -> str:
    """Return the newest frame in the user's own code, such as "a.py:3 in f"; "" if there is none.

    Args:
        lines: a stack, with the newest frame first.
    """
    for line in lines:
        found = _FRAME.match(line)
        if found and not any(part in found[1] for part in _LIBRARIES):
            return f"{found[1].rpartition('/')[2]}:{found[2]} in {found[3]}"
    return ""


def natural_key(name: str) -> tuple[Any, ...]:
    """Return a key that sorts worker-10 after worker-9."""
    key: list[tuple[int, str]] = []
    for part in re.split(r"(\d+)", name):
        if part.isdigit():
            key.append((int(part), ""))
        else:
            key.append((-1, part))
    return tuple(key)
