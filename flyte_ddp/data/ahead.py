"""Fetch what will be needed while what is there is used. No torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from flyte_ddp.config.background import start_thread
from flyte_ddp.data.source import CONCURRENT_READS

T = TypeVar("T")
Part = TypeVar("Part")


def fetch_ahead(
    items: Iterable[T], coming: Iterable[Part], fetch: Callable[[Part], object], distance: int
) -> Iterator[T]:
    """Yield `items`. Threads call `fetch` for those of `coming`, one for each item, at most
    `distance` further than these.

    A thread ends at its first error, which whoever needs that item meets too.
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

    for _ in range(CONCURRENT_READS if distance else 0):
        start_thread("fetch-ahead", fetch_all)
    try:
        for item in items:
            yield item
            room.release()
    finally:
        is_over.set()
        room.release(CONCURRENT_READS)
