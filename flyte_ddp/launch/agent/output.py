"""The log file of a rank's output, which its agent reads while it grows.

Imports nothing heavy.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.config.waits import LINE_INTERVAL


@dataclass(eq=False)
class LogTail:
    """The lines that are appended to a growing file.

    A line that a progress bar draws again and again, with carriage returns, is shown as last drawn,
    and from time to time while it is incomplete.
    """

    path: str
    position: int = 0
    rest: bytes = b""
    _next_redrawn: float = 0.0  # monotonic

    def new_lines(self, at_end: bool = False) -> list[str]:
        """Return the new complete lines; `at_end`, also what no line break follows."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                contents = file.read()
        except FileNotFoundError:
            return []
        self.position += len(contents)
        contents = self.rest + contents
        *lines, rest = contents.split(b"\n")
        is_redrawn, self.rest = b"\r" in rest, rest if rest.endswith(b"\r") else _as_drawn(rest)
        if at_end and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        elif is_redrawn and time.monotonic() >= self._next_redrawn:
            self._next_redrawn = time.monotonic() + LINE_INTERVAL
            lines.append(self.rest)
        if b"\r" in contents:
            lines = [_as_drawn(line) for line in lines]
        # at once: ranks may print much
        return b"\n".join(lines).decode(errors="replace").split("\n") if lines else []

    def last_lines(self, count: int) -> str:
        try:
            return "\n".join(
                Path(self.path).read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
            )
        except FileNotFoundError:
            return ""


def _as_drawn(line: bytes) -> bytes:
    """Return what a terminal shows of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
