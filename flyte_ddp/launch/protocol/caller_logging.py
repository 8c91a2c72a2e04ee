"""The logging of the process that starts a run, for the ranks, which do not run the main module.

Knows nothing of torch.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

from flyte_ddp.process.tracebacks import LIBRARIES


@dataclass(frozen=True)
class CallerLogging:
    """The levels and the format of a process's logging."""

    level: int  # level of the root logger
    levels: dict[str, int]  # each logger with a level of its own
    formatter: logging.Formatter | None  # None for the message alone

    @classmethod
    def read(cls) -> CallerLogging:
        """Return the logging of this process, without the levels that Dask sets for itself."""
        levels = {}
        for name, each in logging.root.manager.loggerDict.items():
            if not isinstance(each, logging.Logger) or each.level == logging.NOTSET:
                continue
            if name.partition(".")[0] != "distributed":
                levels[name] = each.level
        formatters = [
            each.formatter
            for each in logging.root.handlers
            if type(each) is logging.StreamHandler and type(each.formatter) is logging.Formatter
        ]
        formatter = next(iter(formatters), None)
        return cls(logging.root.level, levels, formatter)

    def apply(self) -> None:
        """Print log records on standard error: those that the caller would print, and INFO of the
        user's own code.

        Python's handler of last resort prints the records of loggers without a handler. So handlers
        that the program itself adds take its place.
        """
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(self.formatter)
        handler.addFilter(self._is_shown)
        logging.lastResort = handler
        logging.root.setLevel(min(self.level, logging.INFO))
        for name, level in self.levels.items():
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:
                logger.setLevel(level)

    def _is_shown(self, record: logging.LogRecord) -> bool:
        has_own_level = record.name in self.levels
        if record.levelno >= self.level or has_own_level:
            return True
        is_ours = record.name.partition(".")[0] == __name__.partition(".")[0]
        return not is_ours and not any(part in record.pathname for part in LIBRARIES)
