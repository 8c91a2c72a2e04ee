"""The loop's view of the process that started it, and how all ranks agree to stop."""

from __future__ import annotations

import time
from typing import Protocol

from flyte_ddp.events import Event
from flyte_ddp.rank.world import World

STOP_CHECK_INTERVAL = 1.0  # seconds between two times that the ranks ask each other whether to stop


class Supervisor(Protocol):
    """What the loop needs of its supervisor; `rank.process.SupervisorLink` is one."""

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to end the run. The other ranks may not have been, or not yet."""

    def beat(self, step: int) -> None:
        """Report progress; `step` counts optimizer steps from the start of the run."""

    def emit(self, event: Event) -> None:
        """Send `event` to the listeners of the run. Only rank 0 calls it."""


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
