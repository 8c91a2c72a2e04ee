"""Fetch what will be needed while what is there is used. No torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")
Part = TypeVar("Part")


def fetch_ahead(
    items: Iterable[T], coming: Iterable[Part], fetch: Callable[[Part], object], distance: int
) -> Iterator[T]:
    """Yield `items`. A thread calls `fetch` for those of `coming`, one for each item, at most
    `distance` further than these.

    It ends at the first error, which whoever needs that item meets too.
    """
    room, is_over = threading.Semaphore(distance), threading.Event()

    def fetch_all() -> None:
        with contextlib.suppress(Exception):
            for part in coming:
                room.acquire()
                if is_over.is_set():
                    return
                fetch(part)

    if distance:
        threading.Thread(target=fetch_all, name="fetch-ahead", daemon=True).start()
    try:
        for item in items:
            yield item
            room.release()
    finally:
        is_over.set()
        room.release()
