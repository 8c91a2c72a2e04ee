"""Show a report as a Flyte Deck while its task runs."""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable

from flytekit import Deck
from flytekit.core.context_manager import FlyteContextManager
from flytekit.loggers import logger as flytekit_logger

from flyte_ddp.config.waits import BEAT_INTERVAL
from flyte_ddp.events import Event, RunStarted
from flyte_ddp.observers.reports.page import Page

DECK_NAME = "Training"


class DeckPublisher:
    """Publishes `report` as the Deck "Training" of the current Flyte task. A listener; it must come
    after the report.

    It publishes when a run starts, then at most every `interval` seconds, and at the end. Outside a
    task with Decks it does nothing. A failure to publish is logged once and never raised. A store
    that hangs delays an event by at most a second: the listeners behind this one show that very
    trouble.

    Args:
        interval: seconds; it grows to `SHARE_OF_TIME` of the task's duration, because flytekit
            leaves a copy of every version on the pod's disk.
        clock: seconds from any start.
    """

    SHARE_OF_TIME = 0.05

    def __init__(
        self, report: Page, interval: float = 15.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._started_at = clock()
        self._due_at = self._started_at
        self._has_failed = False
        # Taken here, in the task's thread, because events may arrive in another one.
        self._context = contextvars.copy_context()
        parameters = FlyteContextManager.current_context().user_space_params
        self._deck = (
            _ReportDeck(report) if parameters is not None and parameters.enable_deck else None
        )
        self._upload: threading.Thread | None = None
        self._lock = threading.Lock()  # the runs of a sweep have a thread of events each

    def handle(self, event: Event) -> None:
        has_curves = bool(event.figures().axis)
        if isinstance(event, RunStarted) or (has_curves and self._clock() >= self._due_at):
            self._publish()

    def close(self, error: BaseException | None) -> None:
        self._join_upload()
        self._publish()
        self._join_upload()

    def _publish(self) -> None:
        """Start an upload of the report as it is now, unless the one before is still going on."""
        if self._deck is not None:
            with self._lock:
                if self._upload is None or not self._upload.is_alive():
                    self._deck.is_rendered.clear()
                    self._upload = threading.Thread(
                        target=self._publish_now, args=(self._deck,), name="deck", daemon=True
                    )
                    self._upload.start()
                    self._deck.is_rendered.wait()  # the report changes with the next event
            self._join_upload(BEAT_INTERVAL)
        now = self._clock()
        self._due_at = now + max(self._interval, self.SHARE_OF_TIME * (now - self._started_at))

    def _join_upload(self, timeout: float | None = None) -> None:
        if (upload := self._upload) is not None:
            upload.join(timeout)

    def _publish_now(self, deck: _ReportDeck) -> None:
        # flytekit catches most errors and logs each of them
        flytekit_logger.addFilter(self._is_first_error)
        try:
            self._context.copy().run(Deck.publish)
        except OSError as error:  # it does not catch a full or unwritable local disk
            flytekit_logger.error("The report could not be published: %s", error)
        finally:
            flytekit_logger.removeFilter(self._is_first_error)
            deck.is_rendered.set()

    def _is_first_error(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.ERROR:
            return True
        has_failed, self._has_failed = self._has_failed, True
        return not has_failed


class _ReportDeck(Deck):  # type: ignore[misc]
    """A Deck that renders the report whenever flytekit writes it."""

    def __init__(self, report: Page) -> None:
        super().__init__(DECK_NAME)
        self._report = report
        self.is_rendered = threading.Event()

    @property
    def html(self) -> str:
        try:
            return self._report.render_fragment()
        finally:
            self.is_rendered.set()
