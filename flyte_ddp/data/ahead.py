"""Fetch coming data while the present data are used. Imports no torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from flyte_ddp.data.source import CONCURRENT_READS
from flyte_ddp.process.threads import start_thread

T = TypeVar("T")
Item = TypeVar("Item")


def fetch_ahead(
    items: Iterable[T], coming: Iterable[Item], fetch: Callable[[Item], object], distance: int
) -> Iterator[T]:
    """Yield `items`, while threads call `fetch` for the parts in `coming`.

    There is one part for each item. The threads are at most `distance` parts ahead of the items. A
    thread ends at its first error, because the user of the item meets the same error.
    """
    room, turn, is_over = threading.Semaphore(distance), threading.Lock(), threading.Event()
    parts = iter(coming)

    def fetch_all() -> None:
        with contextlib.suppress(Exception):
            while True:
                with turn:
                    room.acquire()
                    if is_over.is_set():
                        return
                    part = next(parts)
                fetch(part)

    if distance:
        for _ in range(CONCURRENT_READS):
            start_thread("fetch-ahead", fetch_all)
    try:
        for item in items:
            yield item
            room.release()
    finally:
        is_over.set()
        room.release(CONCURRENT_READS)
