"""Show the launchers' log records, such as a starting cluster or a restarting gang, as lines of the task's output."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def launcher_log(say: Callable[[str], None]) -> Iterator[None]:
    """Pass the launchers' log records to `say`, and to no other handler, for the length of the block."""
    logger = logging.getLogger("flyte_ddp")
    handler = _LineHandler(say)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


class _LineHandler(logging.Handler):
    """Prints each record as a line. In a sweep it begins with the trial, whose thread is named after it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        thread = record.threadName or ""
        line = self.format(record)
        self._say(f"[{thread}] {line}" if thread.startswith("trial ") else line)
