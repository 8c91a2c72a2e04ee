"""Standard streams that may be closed, full, or without a reader: what is printed must not end what
prints it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Any, TextIO

NAMES = ("stdin", "stdout", "stderr")  # the position is the file descriptor


def open_standard_streams() -> None:
    """Open those to nothing that this process was started without: the next file or pipe would take
    their numbers.
    """
    for descriptor, name in enumerate(NAMES):
        try:
            os.fstat(descriptor)
        except OSError:
            # The new file gets the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:  # not of its descriptor, which may be another file's by now
            setattr(sys, name, open(os.devnull, "w" if descriptor else "r"))  # noqa: SIM115
    atexit.unregister(_release)
    atexit.register(_release)


def _release() -> None:
    """Drop what cannot be written any more. Python would try it at its end once more, and exit with
    code 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except ValueError:
            pass  # the stream is closed


class Output:
    """An output that drops what it does not take, and escapes what it cannot encode.

    It raises nothing, because tqdm keeps its lock for ever after an error.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def __eq__(self, other: object) -> bool:
        return self.stream is getattr(other, "stream", other)

    __hash__ = None  # type: ignore[assignment]

    def isatty(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            return self.stream.isatty()
        return False

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            if not text.isascii() and self.stream.encoding:
                text = text.encode(self.stream.encoding, "backslashreplace").decode(
                    self.stream.encoding
                )
            self.stream.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()


def print_line(line: str) -> None:
    """Print a line on standard error, if that takes it."""
    print(line, file=Output(sys.stderr), flush=True)
