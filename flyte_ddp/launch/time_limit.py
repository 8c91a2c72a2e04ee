"""An end of a run by the clock: `max_hours`."""

from __future__ import annotations

import os
import signal
import threading
import time

from flyte_ddp.errors import ConfigError, TrainingStopped


class TimeLimit:
    """Ends what this process does when its time is up, as a SIGTERM does, with a last checkpoint.

    Args:
        hours: 0 is no limit.
        begun_at: from when they count, in seconds since the epoch.
        hint: added to the error if they are over already.

    Raises:
        ConfigError: they are less than 0, or over already.
    """

    def __init__(self, hours: float, begun_at: float, hint: str = "") -> None:
        self._message = f"max_hours: the run has taken {hours:g} h, all attempts together, which is its limit"
        self._is_up = False
        self._timer: threading.Timer | None = None
        if hours < 0:
            raise ConfigError(f"max_hours: expected hours of at least 0, got {hours:g}")
        if not hours:
            return
        remaining = begun_at + 3600 * hours - time.time()
        if remaining <= 0:
            raise ConfigError(f"{self._message}{hint}")
        self._timer = threading.Timer(remaining, self._stop)
        self._timer.daemon = True
        self._timer.start()

    def _stop(self) -> None:
        self._is_up = True
        os.kill(os.getpid(), signal.SIGTERM)

    def cancel(self) -> None:
        """End nothing any more."""
        if self._timer:
            self._timer.cancel()

    def explain(self, error: BaseException) -> BaseException:
        """Return `error`, or a ConfigError with its text if the time limit caused it: a retry would end likewise."""
        if not self._is_up or not isinstance(error, (TrainingStopped, SystemExit)):
            return error
        rest = "nothing was running yet"
        if isinstance(error, TrainingStopped):
            rest = str(error).removeprefix(f"{error.reason}: ")
        return ConfigError(f"{self._message}: {rest}")
