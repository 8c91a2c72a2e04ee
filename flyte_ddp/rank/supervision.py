"""The loop's view of the process that started it: reports of progress, and how all ranks agree to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol, TypeVar

from flyte_ddp.events import Event
from flyte_ddp.rank.fast_start import call_around_compilations
from flyte_ddp.world import World

T = TypeVar("T")

STOP_CHECK_INTERVAL = 1.0  # seconds between two times that the ranks ask each other whether to stop
BEAT_INTERVAL = 1.0  # seconds between two reports of progress on behalf of an operation that makes none
MAX_OPERATION_SECONDS = 1800.0  # after which such an operation counts as a stall


class Supervisor(Protocol):
    """The supervisor as the loop sees it; `rank.process.SupervisorLink` is one."""

    @property
    def stop_requested(self) -> bool:
        """True once this rank was asked to end the run. The other ranks may not have been asked yet."""

    def beat(self, step: int) -> None:
        """Report progress; `step` counts optimizer steps from the start of the run."""

    def set_stoppable(self) -> None:
        """Report that all ranks save their state and end when they are asked to. Only rank 0 calls it."""

    def emit(self, event: Event) -> None:
        """Send `event` to the listeners of the run. Only rank 0 calls it."""


@contextmanager
def keep_beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` every second, from a thread, for the length of a block that is known to take long.

    No longer than `MAX_OPERATION_SECONDS`, so that a block that hangs is found.
    """
    is_over = threading.Event()

    def run() -> None:
        deadline = time.monotonic() + MAX_OPERATION_SECONDS
        while time.monotonic() < deadline and not is_over.wait(BEAT_INTERVAL):
            beat()

    beat()
    thread = threading.Thread(target=run, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def beat_while_compiling(beat: Callable[[], None]) -> None:
    """Call `beat` every second while torch compiles something in this process, such as the first step of a model."""
    running = ExitStack()
    call_around_compilations(lambda: running.enter_context(keep_beating(beat)), running.close)


class StopPoll:
    """Lets all ranks agree, after the same step, on whether any of them was asked to stop.

    The agreement is a collective, so it takes place about once a second and not at every call. Rank 0's speed decides
    after how many calls.
    """

    def __init__(self, world: World, supervisor: Supervisor) -> None:
        self._world = world
        self._supervisor = supervisor
        self._num_calls = self._next_poll = self._last_poll = 0
        self._last_time = time.perf_counter()

    def stop_agreed(self) -> bool:
        """Return whether to stop. Every rank calls it after every step, and gets the same answer."""
        self._num_calls += 1
        if self._num_calls < self._next_poll:
            return False
        now = time.perf_counter()
        calls_per_second = (self._num_calls - self._last_poll) / (now - self._last_time) if self._world.is_first else 0
        num_requests, calls_per_second = self._world.sum(float(self._supervisor.stop_requested), calls_per_second)
        self._last_poll, self._last_time = self._num_calls, now
        self._next_poll = self._num_calls + max(1, round(calls_per_second * STOP_CHECK_INTERVAL))
        return num_requests > 0
