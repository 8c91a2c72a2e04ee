"""Show a report as a Flyte Deck while its task runs."""

from __future__ import annotations

import contextvars
import logging
import time
from collections.abc import Callable

from flytekit import Deck
from flytekit.core.context_manager import FlyteContextManager
from flytekit.loggers import logger as flytekit_logger

from flyte_ddp.events import EpochFinished, Event, FunctionStarted, Reported, RunStarted, StepFinished
from flyte_ddp.observers.page import Page

DECK_NAME = "Training"


class DeckPublisher:
    """Publishes `report` as the Deck "Training" of the current Flyte task. A listener; it must come after the report.

    It publishes when a run starts, then at most every `interval` seconds, and at the end. Outside a task with Decks it
    does nothing. A failure to publish is logged once and never raised.

    Args:
        interval: seconds; it grows to `SHARE_OF_TIME` of the task's duration, because flytekit leaves a copy of every
            version on the pod's disk.
        clock: seconds from any start.
    """

    SHARE_OF_TIME = 0.05

    def __init__(self, report: Page, interval: float = 15.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval = interval
        self._clock = clock
        self._started_at = clock()
        self._due_at = self._started_at
        self._has_failed = False
        # Taken here, in the task's thread, because events may arrive in another one.
        self._context = contextvars.copy_context()
        parameters = FlyteContextManager.current_context().user_space_params
        self._is_shown = parameters is not None and parameters.enable_deck
        if self._is_shown:
            _ReportDeck(report)

    def handle(self, event: Event) -> None:
        is_progress = isinstance(event, (StepFinished, EpochFinished, Reported))
        if isinstance(event, (RunStarted, FunctionStarted)) or (is_progress and self._clock() >= self._due_at):
            self._publish()

    def close(self, error: BaseException | None) -> None:
        self._publish()

    def _publish(self) -> None:
        if self._is_shown:
            flytekit_logger.addFilter(self._is_first_error)  # flytekit catches most errors and logs each of them
            try:
                self._context.run(Deck.publish)
            except OSError as error:  # it does not catch a full or unwritable local disk
                flytekit_logger.error("The report could not be published: %s", error)
            finally:
                flytekit_logger.removeFilter(self._is_first_error)
        now = self._clock()
        self._due_at = now + max(self._interval, self.SHARE_OF_TIME * (now - self._started_at))

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

    @property
    def html(self) -> str:
        return self._report.render_fragment()
