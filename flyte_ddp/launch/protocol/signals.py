"""Requests to stop a run early, and what makes them: signals, and the clock (`max_hours`)."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import logging
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.config.fields import finite_number
from flyte_ddp.config.waits import ANSWER_TIMEOUT
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.launch.protocol.programs import stop_grace
from flyte_ddp.launch.protocol.ranks import STOP_SIGNALS

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class StopRequest:
    """A request, possibly repeated, to end a run early. Set from a signal handler or another
    thread.
    """

    # seconds from the request until the run is killed; by default as long as this process has after
    # SIGTERM
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
        """Request the end of the run within `grace` seconds for this reason, without urgency,
        whatever was before.
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
    """Return the signal for a function that does not ask for a stop: the one that ends the run, or
    else SIGTERM.
    """
    return signal.Signals.__members__.get(reason, signal.SIGTERM)


_stops: list[StopRequest] = []  # of the runs, which share their handlers
_before: dict[int, Any] = {}  # the handlers that those have replaced
_entering = threading.Lock()


@contextlib.contextmanager
def stop_on_signals(grace: float | None = None) -> Iterator[StopRequest]:
    """Turn signals into a stop request for the length of the block.

    A SIGHUP that is ignored stays so: the run was started with nohup. Signal handlers belong to the
    main thread. Beside it, as in a task of Flyte 2, the asyncio loop that runs there sets them.
    Without one no signal reaches the run, which a line says.
    """
    stop = StopRequest() if grace is None else StopRequest(grace)
    numbers = {signal.Signals[name] for name in STOP_SIGNALS}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.discard(signal.SIGHUP)
    with _entering:
        _stops.append(stop)
        if not _before and not _call_in_main_thread(
            lambda: _before.update({number: signal.signal(number, _handle) for number in numbers})
        ):
            logger.warning(
                (
                    "%s: not noticed by this run, which began beside the main thread: it ends "
                    "without "
                    "a last checkpoint"
                ),
                ", ".join(sorted(number.name for number in numbers - {signal.SIGHUP})),
            )
    try:
        yield stop
    finally:
        with _entering:
            _stops.remove(stop)
            if not _stops or threading.current_thread() is threading.main_thread():
                _call_in_main_thread(_restore)


def _handle(number: int, frame: types.FrameType | None) -> None:
    for each in _stops:
        each.set(signal.Signals(number).name)


def _restore() -> None:
    while _before:
        signal.signal(*_before.popitem())


def _call_in_main_thread(function: Callable[[], object]) -> bool:
    """Call `function` in the main thread, there by the asyncio loop that runs; return False if none
    does.
    """
    called: concurrent.futures.Future[None] = concurrent.futures.Future()

    def call() -> None:
        if (
            threading.current_thread() is threading.main_thread()
            and called.set_running_or_notify_cancel()
        ):
            function()
            called.set_result(None)

    call()
    if called.done():
        return True
    loops = [each for each in gc.get_objects() if issubclass(type(each), asyncio.AbstractEventLoop)]
    running = [loop for loop in loops if loop.is_running()]
    for loop in running:
        with contextlib.suppress(RuntimeError):  # it has just ended
            loop.call_soon_threadsafe(call)
    concurrent.futures.wait([called], ANSWER_TIMEOUT if running else 0)
    return not called.cancel()


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
        """Return `error`, or a ConfigError with its text if the time limit caused it: a retry would
        end likewise.
        """
        if not self._is_up or not isinstance(error, (TrainingStopped, SystemExit)):
            return error
        rest = "nothing was running yet"
        if isinstance(error, TrainingStopped):
            rest = str(error).removeprefix(f"{error.reason}: ")
        return ConfigError(f"{self._message}: {rest}")
