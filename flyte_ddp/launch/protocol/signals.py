"""Requests to stop a run early. Signals cause them, and so do limits (`max_hours`, `max_cost`)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flyte_ddp.config.fields import finite_number
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.launch.protocol.programs import stop_grace
from flyte_ddp.launch.protocol.ranks import STOP_SIGNALS

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StopRequest:
    """A request, possibly repeated, to end a run early. A signal handler or another thread makes
    it.
    """

    # seconds from a request until the launcher kills the ranks; by default what remains of this
    # pod's time after SIGTERM
    grace: float = field(default_factory=stop_grace)
    reason: str = ""  # name of the first signal, or another reason; "" without a request
    num_requests: int = 0
    # The launcher then kills ranks that still run. Seconds, by `time.monotonic`.
    deadline: float = float("inf")

    def set(self, reason: str) -> None:
        """Request the end of the run within `self.grace` seconds. An existing request becomes
        urgent.
        """
        self.reason = self.reason or reason
        self.deadline = min(self.deadline, time.monotonic() + self.grace)
        self.num_requests += 1

    def revise(self, reason: str, grace: float) -> None:
        """Make a request to end the run within `grace` seconds, or give the existing request this
        reason. The request does not become urgent by this call. An earlier deadline stays.
        """
        self.reason = reason
        self.deadline = min(self.deadline, time.monotonic() + grace)
        self.num_requests = max(1, self.num_requests)

    def is_set(self) -> bool:
        return self.num_requests > 0

    @property
    def is_urgent(self) -> bool:
        """True after a `set` of an existing request: the run has to end at once, without a final
        checkpoint.
        """
        return self.num_requests > 1


def find_signal(reason: str) -> signal.Signals:
    """Return the signal for a rank that does not read `session.stop_requested`. It is the signal
    that `reason` names, such as "SIGINT", or SIGTERM.
    """
    return signal.Signals.__members__.get(reason, signal.SIGTERM)


_stops: list[StopRequest] = []  # requests of all runs in this process; a signal sets all of them


@contextlib.contextmanager
def stop_on_signals(grace: float | None = None) -> Iterator[StopRequest]:
    """Yield a stop request. During the block, a signal in `STOP_SIGNALS` sets it.

    An ignored SIGHUP stays ignored: the run was started with nohup. Only the main thread may set
    signal handlers. So a run in another thread notices signals only while a run in the main thread
    has set the handlers. Otherwise a warning is logged.
    """
    if grace is None:
        grace = stop_grace()
    stop = StopRequest(grace)
    handled = {signal.Signals[name] for name in STOP_SIGNALS}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        handled.discard(signal.SIGHUP)
    is_main = threading.current_thread() is threading.main_thread()
    _stops.append(stop)
    if is_main:
        previous = {number: signal.signal(number, _handle) for number in handled}
    elif signal.getsignal(signal.SIGTERM) is not _handle:
        logger.warning(
            "this run does not notice %s, because it was not started in the main thread: if such "
            "a signal ends the process, there is no final checkpoint",
            ", ".join(sorted(number.name for number in handled)),
        )
    try:
        yield stop
    finally:
        _stops.remove(stop)
        if is_main:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _handle(number: int, frame: types.FrameType | None) -> None:
    for each in _stops:
        each.set(signal.Signals(number).name)


class Limit:
    """Ends a run with a final checkpoint when its time is over.

    Args:
        name: the field of the limit.
        limit: its value, with the unit.
        end: asks the run to stop.
    """

    def __init__(self, name: str, limit: str, end: Callable[[], object]) -> None:
        self._message = f"{name}: the run has reached its limit of {limit}, over all attempts"
        self._stop_run = end
        self._has_ended = False
        self._timer: threading.Timer | None = None

    def start(self, seconds: float, hint: str = "") -> None:
        """End the run after so many seconds, and at no earlier set time. Raises ConfigError, with
        `hint` at the end, if none are left.
        """
        self.cancel()
        if seconds <= 0:
            raise ConfigError(f"{self._message}{hint}")
        self._timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        self._has_ended = True
        self._stop_run()

    def cancel(self) -> None:
        """Do not end the run any more."""
        if self._timer:
            self._timer.cancel()

    def convert_error(self, error: BaseException) -> BaseException:
        """Return a ConfigError with the text of `error` if this limit caused the error, and
        `error` itself otherwise. A ConfigError is not retried, since a retry would end at once.
        """
        if not self._has_ended or not isinstance(error, (TrainingStopped, SystemExit)):
            return error
        # Outside `stop_on_signals`, SIGTERM raises SystemExit: no rank was running.
        how = "nothing was running yet"
        if isinstance(error, TrainingStopped):
            how = str(error).removeprefix(f"{error.reason}: ")
        return ConfigError(f"{self._message}: {how}")


class TimeLimit(Limit):
    """Sends SIGTERM to this process at the end of its time.

    Args:
        hours: the limit; 0 is no limit.
        begun_at: start of the time, as Unix time.
        hint: added to the error if the time has already ended.

    Raises:
        ConfigError: `hours` is negative, or the time has already ended.
    """

    def __init__(self, hours: float, begun_at: float, hint: str = "") -> None:
        hours = finite_number("max_hours", hours, minimum=0, unit="hours")
        super().__init__("max_hours", f"{hours:g} h", lambda: os.kill(os.getpid(), signal.SIGTERM))
        if hours:
            self.start(begun_at + 3600 * hours - time.time(), hint)
