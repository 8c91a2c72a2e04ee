"""The link of one node's supervisor to the driver, on whatever machine: its commands, and the
messages about the ranks.

The same in the driver's own process (local.py) and in the supervisor that a Dask worker has started
(dask/node.py). They differ in the `Link`, which carries commands in and messages out.

Messages, by kind:
    beat     step that the node's ranks have reached; is_writing: rank 0 writes a checkpoint;
    is_stoppable: the ranks
             save their state when they are asked to stop; has_reported: one has, since the
             start; paces: of the ranks, as launch/paces.py has them; waits: seconds for which each
             rank that waits for others does; ended: numbers of the ranks whose function has ended;
             leaves_in: seconds that the machine is still there, None for one that was not told to
             go
    event    event of the run, on the node of rank 0
    lines    that the ranks have printed
    end      outcome: done, stopped, failed, killed or broken; parts: of states in the memory of the
    node, as
             `NodeMemory.held` has them; last
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from flyte_ddp import events
from flyte_ddp.launch.signals import StopRequest

KILL_GRACE = 5.0  # seconds in which the ranks must be gone after a command to kill them
# the driver's commands; seconds of grace and the reason follow STOP
GO, STOP, KILL = "go", "stop", "kill"
# The driver's command: the gang stands still, for as many seconds as follow; report and end. If
# numbers of ranks follow those, such as 0,2, these have ended, and the others wait in collectives,
# which is to be verified first.
STALL = "stall"
LEAVE = "leave"  # the worker's command: the machine goes away in as many seconds as follow


class Link:
    """An attempt's link to its driver.

    Args:
        put: passes a message on. Called from any thread, one call at a time.
    """

    def __init__(self, put: Callable[[dict[str, Any]], None]) -> None:
        self.stop = StopRequest()
        self.is_killed = False  # ordered to end at once, or left alone
        self.beat: dict[str, Any] = {
            "step": 0,
            "is_writing": False,
            "is_stoppable": False,
            "ended": [],
        }
        self.beat |= {"has_reported": False, "paces": [], "waits": []}
        self.leaves_at = float("inf")  # monotonic: when this machine is gone
        # seconds for which the gang stands still, as the driver has noticed
        self.stalled_for: float | None = None
        # ranks that have ended, for which the others wait, as the driver has noticed
        self.left: list[int] = []
        self._put = put
        self._previous = ""  # command
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self.is_over = threading.Event()

    def obey(self, text: str) -> None:
        """Do what a command says. After the end of the attempt, do nothing."""
        command, _, rest = text.partition(" ")
        if command == KILL:
            self.kill_ranks("the driver ended the attempt")
        elif command == STOP and text != self._previous:  # commands are repeated
            grace, _, reason = rest.partition(" ")
            self.stop.revise(reason, float(grace))
        elif command == STALL:
            seconds, _, left = rest.partition(" ")
            if left and text != self._previous:
                self.left = [int(number) for number in left.split(",")]
            elif not left:
                self.stalled_for = float(seconds)
        elif command == LEAVE:
            self.leaves_at = time.monotonic() + float(rest)
            self.send_beat()
        self._previous = text

    def kill_ranks(self, reason: str) -> None:
        """Request that the ranks are killed."""
        self.is_killed = True
        self.stop.set(reason)
        self.stop.set(reason)  # the second request is urgent

    def send(self, kind: str, **values: Any) -> None:
        """Send a message, in order; nothing after the end."""
        with self._lock:
            if not self.is_over.is_set():
                if kind == "end":
                    self.is_over.set()
                self._put({"kind": kind, **values})

    def emit(self, event: events.Event) -> None:
        self.send_lines()
        self.send("event", event=event)

    def note_beat(self, beat: dict[str, Any]) -> None:
        """Take note of what the ranks are at. What the driver must know at once is sent at once."""
        is_new = any(
            beat[name] != self.beat[name] for name in ("is_writing", "is_stoppable", "ended")
        )
        self.beat = beat
        self.send_lines()
        if is_new:
            self.send_beat()

    def send_beat(self) -> None:
        leaves_in = self.leaves_at - time.monotonic() if self.leaves_at < float("inf") else None
        self.send("beat", **self.beat, leaves_in=leaves_in)

    def relay(self, line: str) -> None:
        self._lines.append(line)

    def send_lines(self) -> None:
        """Send the lines that the ranks have printed: many at a time, so that a talkative rank
        costs little.
        """
        lines, self._lines = self._lines, []
        if lines:
            self.send("lines", lines=lines)
