"""Report progress during an operation that reports none itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from flyte_ddp.rank.fast_start import call_around_compilations

BEAT_INTERVAL = 1.0  # seconds between two such reports
MAX_OPERATION_SECONDS = 1800.0  # after which such an operation counts as a stall


@contextmanager
def keep_beating(beat: Callable[[], None]) -> Iterator[None]:
    """Call `beat` every second, from a thread, for the length of a block that is known to take long.

    No longer than `MAX_OPERATION_SECONDS`, so that a block that hangs is found.
    """
    is_over = threading.Event()

    def beat_until_over() -> None:
        deadline = time.monotonic() + MAX_OPERATION_SECONDS
        while time.monotonic() < deadline and not is_over.wait(BEAT_INTERVAL):
            beat()

    beat()
    thread = threading.Thread(target=beat_until_over, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def beat_while_compiling(beat: Callable[[], None]) -> None:
    """Call `beat` every second while torch compiles something in this process, such as the first step of a model."""
    running = ExitStack()
    call_around_compilations(lambda: running.enter_context(keep_beating(beat)), running.close)
