"""Show a report in Flyte's console while its task runs. Knows neither of Flyte's SDKs."""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

from flyte_ddp.config.waits import BEAT_INTERVAL
from flyte_ddp.errors import log_failures
from flyte_ddp.events import Event, NodesAwaited, RunStarted
from flyte_ddp.observers.reports.page import Page
from flyte_ddp.process.threads import call_in_background


@dataclass(eq=False)
class PagePublisher:
    """Publishes `report` by `send`. A listener; it must come after the report.

    It publishes when a run starts, then at most every `interval` seconds, and at the end. A failure
    to publish is logged and never raised. A store that hangs delays an event by at most a second:
    the listeners behind this one show that very trouble.

    Args:
        send: gets the page as a fragment of HTML, in a thread with the context variables of the one
            that made this publisher; None publishes nothing.
        interval: seconds; it grows to `SHARE_OF_TIME` of the task's duration, because a copy of
            every version may be left on the pod's disk.
        clock: seconds from any start.
    """

    SHARE_OF_TIME = 0.05

    report: Page
    send: Callable[[str], None] | None
    interval: float = 15.0
    clock: Callable[[], float] = time.monotonic
    # The context of the task's thread, because events may arrive in another one.
    _context: contextvars.Context = field(default_factory=contextvars.copy_context)
    _html: str = ""
    _upload: Future[None] | None = None

    def __post_init__(self) -> None:
        self._started_at = self._due_at = self.clock()

    def handle(self, event: Event) -> None:
        is_news = bool(event.figures().axis) or isinstance(event, NodesAwaited)
        if isinstance(event, RunStarted) or (is_news and self.clock() >= self._due_at):
            self._publish()

    def close(self, error: BaseException | None) -> None:
        if self._upload is not None:
            wait([self._upload])
        self._publish(None)

    def _publish(self, max_delay: float | None = BEAT_INTERVAL) -> None:
        """Start an upload of the report as it is now, unless the one before is still going on."""
        if self.send is not None:
            with log_failures("report"):  # rendered here: the report changes with the next event
                self._html = self.report.render_fragment()
            if self._upload is None or self._upload.done():
                self._upload = call_in_background(self._upload_now)
            wait([self._upload], max_delay)
        now = self.clock()
        self._due_at = now + max(self.interval, self.SHARE_OF_TIME * (now - self._started_at))

    def _upload_now(self) -> None:
        assert self.send is not None
        with log_failures("report"):
            self._context.copy().run(self.send, self._html)
