"""Requests to stop a run early, and what makes them: signals, and the clock (`max_hours`)."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
import types
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Pipe

from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.launch.process.programs import STOP_SIGNALS, stop_grace


class StopRequest:
    """A request, possibly repeated, to end a run early. Set from a signal handler or another thread.

    Args:
        grace: seconds from the request until the run is killed; by default as long as this process has after SIGTERM.
    """

    def __init__(self, grace: float | None = None) -> None:
        self.grace = stop_grace() if grace is None else grace
        self.reason = ""
        self.num_requests = 0
        self.keeps_state = False  # in the memory of this node, before the ranks are killed
        self.deadline = float("inf")  # monotonic; the run is killed then if it has not ended
        # A byte can be read from `news` for each request, by a thread that waits for other pipes too.
        self.news, self._told = Pipe(duplex=False)

    def set(self, reason: str) -> None:
        """Request the end of the run. The second request is urgent."""
        self.reason = self.reason or reason
        self.deadline = min(self.deadline, time.monotonic() + self.grace)
        self.num_requests += 1
        self._told.send_bytes(b".")

    def revise(self, reason: str, grace: float) -> None:
        """Request the end of the run within `grace` seconds for this reason, without urgency, whatever was before."""
        self.reason = reason
        self.deadline = min(self.deadline, time.monotonic() + grace)
        self.num_requests = max(1, self.num_requests)
        self._told.send_bytes(b".")

    def is_set(self) -> bool:
        return self.num_requests > 0

    @property
    def forwarded(self) -> signal.Signals:
        """The signal for a function that does not ask whether to stop: the one that ends the run, or else SIGTERM."""
        return signal.Signals.__members__.get(self.reason, signal.SIGTERM)

    @property
    def is_urgent(self) -> bool:
        """A second request: the run ends at once, without a last checkpoint."""
        return self.num_requests > 1


@contextlib.contextmanager
def stop_on_signals(signals: Sequence[str] = STOP_SIGNALS, grace: float | None = None) -> Iterator[StopRequest]:
    """Turn signals into a stop request for the length of the block.

    A SIGHUP that is ignored stays so: the run was started with nohup. Signal handlers belong to the main thread. In
    another thread this changes nothing, and the owner of the main thread has to set the request.
    """
    stop = StopRequest(grace)
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: types.FrameType | None) -> None:
        stop.set(signal.Signals(number).name)

    numbers = {signal.Signals[name] for name in signals}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.discard(signal.SIGHUP)
    previous = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


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
