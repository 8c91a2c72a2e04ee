"""An agent's link to the driver in one attempt: obeys commands, sends messages.

An agent in the driver's own process (nodes/local.py) has the same link as an agent that a Dask
worker has started (main.py). They differ in the transport of the messages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from typing import Any

from flyte_ddp import events
from flyte_ddp.launch.protocol.messages import (
    Beat,
    Check,
    Emitted,
    End,
    Inspect,
    Kill,
    Lines,
    Profile,
    Stop,
)
from flyte_ddp.launch.protocol.signals import StopRequest


@dataclass(eq=False)
class Link:
    """An attempt's link to its driver."""

    # passes a message on; called from any thread, one call at a time
    put: Callable[[Any], None]
    stop: StopRequest = field(default_factory=StopRequest)
    beat: Beat = field(default_factory=Beat)
    question: Inspect | Profile | None = None  # question that the ranks have not got yet
    # begins to measure the machine; None where nobody asks for that
    check: Callable[[Check], None] | None = None
    is_over: threading.Event = field(default_factory=threading.Event)
    _previous: Any = None  # the latest command
    _lines: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # `alarm` can be read when a command has come.
        self.alarm, self._bell = Pipe(duplex=False)

    def obey(self, command: Any) -> None:
        """Obey a command. A repeated command, or a command after the end of the attempt, changes
        nothing.
        """
        if command == self._previous:
            return
        self._previous = command
        match command:
            case Stop(reason, seconds):
                self.stop.revise(reason, seconds)
            case Inspect() | Profile():
                self.question = command
            case Check() if self.check:
                self.check(command)
            case Kill():
                self.kill_ranks("the driver ended the attempt")
        self._bell.send_bytes(b"-")

    def close(self) -> None:
        """Close the pipe of `alarm`, after the end of the attempt. No command may follow."""
        self.alarm.close()
        self._bell.close()

    def kill_ranks(self, reason: str) -> None:
        """Request that the ranks are killed."""
        self.stop.set(reason)
        self.stop.set(reason)  # the second request is urgent

    def send(self, message: Any) -> None:
        """Send a message, in order; nothing after the end."""
        with self._lock:
            if not self.is_over.is_set():
                if isinstance(message, End):
                    self.is_over.set()
                self.put(message)

    def emit(self, event: events.Event) -> None:
        self.send_lines()
        self.send(Emitted(event))

    def note_beat(self, beat: Beat) -> None:
        """Note the state of the ranks. Send it at once if the driver must know it at once."""
        is_new = beat.news != self.beat.news
        self.beat = beat
        self.send_lines()
        if is_new:
            self.send(beat)

    def relay(self, line: str) -> None:
        self._lines.append(line)

    def send_lines(self) -> None:
        """Send the lines that the ranks have printed: many at a time, so that a talkative rank
        costs little.
        """
        lines, self._lines = self._lines, []
        if lines:
            self.send(Lines(lines))
