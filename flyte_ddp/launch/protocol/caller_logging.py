"""The logging of the process that starts a run, for the ranks, which do not run the main module.

Knows nothing of torch.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

from flyte_ddp.config.frames import LIBRARIES


@dataclass(frozen=True)
class CallerLogging:
    """The levels and the format of a process's logging."""

    level: int  # of the root logger
    levels: dict[str, int]  # of the loggers that have their own
    formatter: logging.Formatter | None  # None for the message alone

    @classmethod
    def read(cls) -> CallerLogging:
        """Return that of this process. Dask's levels are for the lines of Dask itself."""
        loggers = logging.root.manager.loggerDict
        levels = {
            name: each.level
            for name, each in loggers.items()
            if isinstance(each, logging.Logger)
            and each.level != logging.NOTSET
            and name.partition(".")[0] != "distributed"
        }
        formatters = [
            each.formatter
            for each in logging.root.handlers
            if type(each) is logging.StreamHandler and type(each.formatter) is logging.Formatter
        ]
        return cls(logging.root.level, levels, formatters[0] if formatters else None)

    def apply(self) -> None:
        """Print on standard error what loggers without a handler log: what the caller would, and
        INFO of the user's own code.

        Python's handler of last resort prints it, so that handlers that the program itself adds
        take its place.
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
