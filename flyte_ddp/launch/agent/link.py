"""The link of one node's supervisor to the driver, on whatever machine: its commands, and the
messages about the ranks.

The same in the driver's own process (local.py) and in the supervisor that a Dask worker has started
(dask/node.py). They differ in the `Link`, which carries commands in and messages out.

Commands are tuples of the driver's:
    "go", for nothing but to be heard
    "stop", the reason, seconds of grace: save the state and end
    "kill"
    "stall", seconds: the gang stands still for so long; report and end
    "stall", seconds, numbers of ranks: these have ended, and the others wait in collectives; end if
        that is so
and of a worker's:
    "leave", seconds: the machine goes away then

Messages are tuples:
    "beat", a `Beat`
    "event", an event of the run, on the node of rank 0
    "lines", a list of those that the ranks have printed
    "end", the error with which the ranks have ended, or None; parts of states in the memory of the
        node, as `NodeMemory.held` has them; last
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp import events
from flyte_ddp.launch.protocol.messages import Beat
from flyte_ddp.launch.protocol.signals import StopRequest


@dataclass(eq=False)
class Link:
    """An attempt's link to its driver."""

    # passes a message on; called from any thread, one call at a time
    put: Callable[[tuple[Any, ...]], None]
    stop: StopRequest = field(default_factory=StopRequest)
    is_killed: bool = False  # ordered to end at once, or left alone
    beat: Beat = field(default_factory=Beat)
    leaves_at: float = float("inf")  # monotonic: when this machine is gone
    # seconds for which the gang stands still, as the driver has noticed
    stalled_for: float | None = None
    # ranks that have ended, for which the others wait, as the driver has noticed
    left: tuple[int, ...] = ()
    is_over: threading.Event = field(default_factory=threading.Event)
    _previous: tuple[Any, ...] = ()  # command
    _lines: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def obey(self, *command: Any) -> None:
        """Do what a command says, which may be repeated. After the end of the attempt, do
        nothing.
        """
        if command == self._previous:
            return
        self._previous = command
        match command:
            case ("stop", reason, grace):
                self.stop.revise(reason, grace)
            case ("kill",):
                self.kill_ranks("the driver ended the attempt")
            case ("stall", seconds):
                self.stalled_for = seconds
            case ("stall", _, *left):
                self.left = tuple(left)
            case ("leave", seconds):
                self.leaves_at = time.monotonic() + seconds
                self.send_beat()

    def kill_ranks(self, reason: str) -> None:
        """Request that the ranks are killed."""
        self.is_killed = True
        self.stop.set(reason)
        self.stop.set(reason)  # the second request is urgent

    def send(self, kind: str, *values: Any) -> None:
        """Send a message, in order; nothing after the end."""
        with self._lock:
            if not self.is_over.is_set():
                if kind == "end":
                    self.is_over.set()
                self.put((kind, *values))

    def emit(self, event: events.Event) -> None:
        self.send_lines()
        self.send("event", event)

    def note_beat(self, beat: Beat) -> None:
        """Take note of what the ranks are at. What the driver must know at once is sent at once."""
        is_new = beat.news != self.beat.news
        self.beat = beat
        self.send_lines()
        if is_new:
            self.send_beat()

    def send_beat(self) -> None:
        leaves_in = self.leaves_at - time.monotonic() if self.leaves_at < float("inf") else None
        self.send("beat", dataclasses.replace(self.beat, leaves_in=leaves_in))

    def relay(self, line: str) -> None:
        self._lines.append(line)

    def send_lines(self) -> None:
        """Send the lines that the ranks have printed: many at a time, so that a talkative rank
        costs little.
        """
        lines, self._lines = self._lines, []
        if lines:
            self.send("lines", lines)
