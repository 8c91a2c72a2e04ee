"""Pass a run's events to its listeners, in a thread, so that a slow listener delays neither the run nor its rescue."""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from flyte_ddp import events

CLOSE_TIMEOUT = 120.0  # seconds for listeners to finish what they have begun, such as an upload

logger = logging.getLogger(__name__)


class Dispatcher:
    """A context manager: `emit` inside the block; at its end every listener is closed, with the error if there is one.

    A listener that raises is named in the log and receives no more events: watching a run must not end it. Listeners
    run with the context variables of the dispatcher's creator, so that a Flyte Deck finds its task.
    """

    def __init__(self, listeners: Sequence[events.Listener]) -> None:
        self._listeners = list(listeners)
        self._queue: queue.SimpleQueue[events.Event | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._deliver,), name="listeners", daemon=True)

    def emit(self, event: events.Event) -> None:
        """Pass `event` on, with the time: one clock for all of a run's processes."""
        self._queue.put(dataclasses.replace(event, at=time.time()))

    def __enter__(self) -> Dispatcher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._error = error
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT)
        if self._thread.is_alive():
            logger.warning("a listener did not finish within %.0f s of the end of the run", CLOSE_TIMEOUT)

    def _deliver(self) -> None:
        active = list(self._listeners)
        while (event := self._queue.get()) is not None:
            for listener in list(active):
                try:
                    listener.handle(event)
                except Exception:
                    logger.exception("%s failed and receives no more events of this run", type(listener).__name__)
                    active.remove(listener)
        for listener in self._listeners:
            try:
                listener.close(self._error)
            except Exception:
                logger.exception("%s could not be closed", type(listener).__name__)
