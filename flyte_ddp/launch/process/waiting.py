"""Notice that the main thread waits for other ranks, for a function that reports no progress. Imports no torch.

A thread looks now and then. The main thread waits if torch's flight recorder has a collective that has not ended, which
also shows a wait for a GPU; or if torch.distributed or a backward pass has called what runs now, and it has used no
processor time since the last look.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from flyte_ddp.launch.process.collectives import waiting_since

PLACES = ("torch.distributed", "torch.autograd")  # modules whose calls wait for other ranks
MAX_CPU_SECONDS = 0.001  # of a thread that only waits, between two looks
NUM_LOOKS = 10  # in the timeout


def watch_main_thread(set_waiting_since: Callable[[float], None], timeout: float) -> None:
    """Call `set_waiting_since`, from a thread, with the monotonic time since when the main thread waits; else with 0.

    Args:
        timeout: seconds of waiting that matter.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        return
    main = threading.main_thread().ident
    assert main is not None
    clock = time.pthread_getcpuclockid(main)

    def run() -> None:
        since, used = 0.0, time.clock_gettime(clock)
        while True:
            time.sleep(timeout / NUM_LOOKS)
            before, used = used, time.clock_gettime(clock)
            if begun := waiting_since():
                since = time.monotonic() - (time.time() - begun)
            elif used - before > MAX_CPU_SECONDS or not _is_in_collective(main):
                since = 0.0
            else:
                since = since or time.monotonic() - timeout / NUM_LOOKS
            set_waiting_since(since)

    threading.Thread(target=run, name="waiting", daemon=True).start()


def _is_in_collective(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame:
        if frame.f_globals.get("__name__", "").startswith(PLACES):
            return True
        frame = frame.f_back
    return False
