"""Requests to stop a run early, and what makes them: signals, and the clock (`max_hours`)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass, field

from flyte_ddp.config.fields import finite_number
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.launch.protocol.programs import stop_grace
from flyte_ddp.launch.protocol.ranks import STOP_SIGNALS

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StopRequest:
    """A request, possibly repeated, to end a run early. Set from a signal handler or another
    thread.
    """

    # seconds from the request until the run is killed; by default the time that this process has
    # after SIGTERM
    grace: float = field(default_factory=stop_grace)
    reason: str = ""
    num_requests: int = 0
    deadline: float = float("inf")  # monotonic; the run is killed then if it has not ended

    def set(self, reason: str) -> None:
        """Request the end of the run. The second request is urgent."""
        self.reason = self.reason or reason
        self.deadline = min(self.deadline, time.monotonic() + self.grace)
        self.num_requests += 1

    def revise(self, reason: str, grace: float) -> None:
        """Request the end of the run within `grace` seconds for this reason. The request is not
        urgent, whatever was requested before.
        """
        self.reason = reason
        self.deadline = min(self.deadline, time.monotonic() + grace)
        self.num_requests = max(1, self.num_requests)

    def is_set(self) -> bool:
        return self.num_requests > 0

    @property
    def is_urgent(self) -> bool:
        """A second request: the run ends at once, without a last checkpoint."""
        return self.num_requests > 1


def find_signal(reason: str) -> signal.Signals:
    """Return the signal for a function that does not ask for stop requests: the signal that ends
    the run, or SIGTERM if something else ends it.
    """
    return signal.Signals.__members__.get(reason, signal.SIGTERM)


_stops: list[StopRequest] = []  # requests of all runs, which share their signal handlers


@contextlib.contextmanager
def stop_on_signals(grace: float | None = None) -> Iterator[StopRequest]:
    """Turn signals into a stop request for the length of the block.

    An ignored SIGHUP stays ignored: the run was started with nohup. Only the main thread may set
    signal handlers. In another thread no signal reaches a run, unless a run in the main thread has
    set the handlers. A line in the log then says so.
    """
    if grace is None:
        grace = stop_grace()
    stop = StopRequest(grace)
    numbers = {signal.Signals[name] for name in STOP_SIGNALS}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.discard(signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()
    _stops.append(stop)
    if is_main:
        before = {number: signal.signal(number, _handle) for number in numbers}
    elif signal.getsignal(signal.SIGTERM) is not _handle:
        logger.warning(
            "%s: not noticed by this run, which began beside the main thread: it ends without a "
            "last checkpoint",
            ", ".join(sorted(number.name for number in numbers - {signal.SIGHUP})),
        )
    try:
        yield stop
    finally:
        _stops.remove(stop)
        if is_main:
            for number, handler in before.items():
                signal.signal(number, handler)


def _handle(number: int, frame: types.FrameType | None) -> None:
    for each in _stops:
        each.set(signal.Signals(number).name)


class TimeLimit:
    """Ends the work of this process when its time is up, as a SIGTERM does, with a last checkpoint.

    Args:
        hours: the limit; 0 is no limit.
        begun_at: start of the time, in seconds since the epoch.
        hint: added to the error if the time is up already.

    Raises:
        ConfigError: `hours` is negative, or the time is up already.
    """

    def __init__(self, hours: float, begun_at: float, hint: str = "") -> None:
        hours = finite_number("max_hours", hours, minimum=0, unit="hours")
        self._message = (
            f"max_hours: the run has taken {hours:g} h, all attempts together, which is its limit"
        )
        self._is_up = False
        self._timer: threading.Timer | None = None
        if not hours:
            return
        remaining = begun_at + 3600 * hours - time.time()
        if remaining <= 0:
            raise ConfigError(f"{self._message}{hint}")
        self._timer = threading.Timer(min(remaining, threading.TIMEOUT_MAX), self._stop)
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
        """Return `error`, or a ConfigError with its text if the time limit caused it. A retry would
        end in the same way.
        """
        if not self._is_up or not isinstance(error, (TrainingStopped, SystemExit)):
            return error
        rest = "nothing was running yet"
        if isinstance(error, TrainingStopped):
            rest = str(error).removeprefix(f"{error.reason}: ")
        return ConfigError(f"{self._message}: {rest}")
