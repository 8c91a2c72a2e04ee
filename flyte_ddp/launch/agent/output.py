"""The log file of a rank's output, which its agent reads while it grows.

Imports nothing heavy.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from flyte_ddp.config.waits import LINE_INTERVAL

# Bytes of a rank's output that are passed on at once, and per second after that. More output would
# fill the memory of the driver, which passes lines on more slowly than a rank prints them.
MAX_BURST, RATE = 16 << 20, 2 << 20
MAX_LINE = 1 << 20  # bytes; a longer line is passed on in pieces
MAX_FILE = 32 << 20  # bytes of the file after which the read part is removed
TAIL_BYTES = 512 << 10  # bytes at the end of the output that `last_lines` reads
LEFT_OUT = (
    f"... more was printed than {MAX_BURST >> 20} MiB, and {RATE >> 20} MiB a second: what does "
    "not fit is left out, the oldest first. Write large outputs to a file"
)


@dataclass(eq=False)
class LogTail:
    """The lines that are appended to a growing file.

    A progress bar draws a line again and again, with carriage returns. Such a line is shown as last
    drawn, and from time to time while it is incomplete. If the output is too large, only the newest
    lines are kept, in memory and on the disk. One line then says so.
    """

    path: str
    position: int = 0
    rest: bytes = b""
    _next_redrawn: float = 0.0  # monotonic
    _allowance: float = MAX_BURST  # bytes that may be passed on
    _allowed_at: float = field(default_factory=time.monotonic)
    _has_left_out: bool = False
    _removed: bytes = b""  # the end of what was removed from the file

    def new_lines(self, at_end: bool = False) -> list[str]:
        """Return the new complete lines. With `at_end`, also return an incomplete last line."""
        try:
            with open(self.path, "rb") as file:
                is_first_cut = self._skip(os.fstat(file.fileno()).st_size)
                file.seek(self.position)
                contents = file.read(MAX_BURST)
        except FileNotFoundError:
            return []
        self.position += len(contents)
        self._allowance -= len(contents)
        self._remove_what_was_read(contents)
        contents = self.rest + contents
        *lines, rest = contents.split(b"\n")
        is_redrawn = b"\r" in rest
        if not rest.endswith(b"\r"):
            rest = _as_drawn(rest)
        self.rest = rest
        if (at_end and self.rest) or len(self.rest) > MAX_LINE:
            lines, self.rest = [*lines, self.rest], b""
        elif is_redrawn and time.monotonic() >= self._next_redrawn:
            self._next_redrawn = time.monotonic() + LINE_INTERVAL
            lines.append(self.rest)
        if b"\r" in contents:
            lines = [_as_drawn(line) for line in lines]
        if is_first_cut:
            lines.insert(0, LEFT_OUT.encode())
        if not lines:
            return []
        # All lines are decoded at once, because ranks may print much.
        return b"\n".join(lines).decode(errors="replace").split("\n")

    def _skip(self, size: int) -> bool:
        """Leave out the oldest unread bytes if there are more than may be passed on. Return whether
        this is the first time.
        """
        now = time.monotonic()
        refill = RATE * (now - self._allowed_at)
        self._allowance, self._allowed_at = min(MAX_BURST, self._allowance + refill), now
        num_allowed = max(MAX_LINE, int(self._allowance))
        if size - self.position <= num_allowed:
            return False
        self.position, self.rest = size - num_allowed, b""
        is_first, self._has_left_out = not self._has_left_out, True
        return is_first

    def _remove_what_was_read(self, contents: bytes) -> None:
        """Empty a large file once all of it is read. The rank goes on appending to it."""
        if self.position < MAX_FILE:
            return
        with open(self.path, "r+b") as file:
            if os.fstat(file.fileno()).st_size == self.position or self._has_left_out:
                file.truncate(0)
                self.position = 0
                self._removed = contents[-TAIL_BYTES:]

    def last_lines(self, count: int) -> str:
        try:
            with open(self.path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - TAIL_BYTES))
                contents = file.read(TAIL_BYTES)
        except FileNotFoundError:
            return ""
        contents = (self._removed + contents)[-TAIL_BYTES:]
        return "\n".join(contents.decode(errors="replace").splitlines()[-count:])


def _as_drawn(line: bytes) -> bytes:
    """Return a line with carriage returns as a terminal shows it."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]
