"""The process that measures its machine for a node check. Its agent can kill it when it hangs.

`python -m flyte_ddp.launch.agent.probes DIRECTORY` prints a line of JSON whenever it knows a rate
better: the name of the probe, and the rate. After an error, the text of the error follows. Cores
and memory are measured in time of the CPU, so that other processes on the machine change little.
The disk is that of the directory. Imports nothing of ours but small modules.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flyte_ddp.process.cgroups import usable_cores

PROBE_SECONDS = 0.03  # time of the CPU for each turn of cores and memory
SIZE = 256  # rows and columns of the matrices
NUM_PRODUCTS = 8  # matrix products of which the time is taken: some 5 ms
COPY_BYTES = 16 << 20  # more than fits into caches of a core
DISK_SECONDS = 0.5
PAUSE_SECONDS = 0.3
BLOCK_BYTES, DISK_BYTES = 256 << 10, 32 << 20
# A rate in wall time is the best of windows of this length. Other processes may stop the probe, and
# a quota stops the whole container for most of each 0.1 s while ranks import.
WINDOW_SECONDS = 0.02


@dataclass
class RateMeter:
    """The rate of a flow, such as bytes per second, from its first part on."""

    amount: float = 0.0
    best: float = 0.0  # largest rate of a whole window
    _begun_at: float = 0.0
    _window_at: float = 0.0
    _in_window: float = 0.0

    def add(self, amount: float) -> None:
        now = time.monotonic()
        if not self._begun_at:  # the time of the first part is not known
            self._begun_at = self._window_at = now
            return
        self.amount += amount
        self._in_window += amount
        if now - self._window_at >= WINDOW_SECONDS:
            self.best = max(self.best, self._in_window / (now - self._window_at))
            self._window_at, self._in_window = now, 0.0

    @property
    def rate(self) -> float:
        """The rate of the best window; without a whole window, the rate so far."""
        elapsed = time.monotonic() - self._begun_at
        return self.best or self.amount / max(elapsed, 1e-6)


def measure_cores(directory: str) -> Iterator[float]:
    """Yield the floating-point operations per second of matrix products on all usable cores."""
    import numpy as np

    num_cores, matrix, best = usable_cores(), np.ones((SIZE, SIZE), np.float32), 0.0
    ends_at = time.thread_time() + PROBE_SECONDS
    while time.thread_time() < ends_at:
        begun = time.thread_time()
        for _ in range(NUM_PRODUCTS):
            np.matmul(matrix, matrix)
        seconds = max(time.thread_time() - begun, 1e-6)
        best = max(best, NUM_PRODUCTS * 2 * SIZE**3 / seconds)
        yield best * num_cores


def measure_memory(directory: str) -> Iterator[float]:
    """Yield the bytes per second that one core copies in memory."""
    source, target = memoryview(bytearray(COPY_BYTES)), memoryview(bytearray(COPY_BYTES))
    target[:] = source  # the kernel gives the pages now
    best, ends_at = 0.0, time.thread_time() + PROBE_SECONDS
    while time.thread_time() < ends_at:
        begun = time.thread_time()
        target[:] = source
        best = max(best, COPY_BYTES / max(time.thread_time() - begun, 1e-6))
        yield best


def measure_disk(directory: str) -> Iterator[float]:
    """Yield the bytes per second that the disk takes, past the cache of the kernel."""
    block, meter = mmap.mmap(-1, BLOCK_BYTES), RateMeter()
    path = os.path.join(directory, f"probe-{os.getpid()}")
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    try:
        os.unlink(path)
        yield BLOCK_BYTES / DISK_SECONDS  # if not even one block gets there in time
        ends_at = time.monotonic() + DISK_SECONDS
        while time.monotonic() < ends_at and meter.amount < DISK_BYTES:
            meter.add(os.write(file, block))
            if meter.amount:
                yield meter.rate
    finally:
        os.close(file)


def pause(directory: str) -> Iterator[float]:
    """Yield nothing, for a moment."""
    time.sleep(PAUSE_SECONDS)
    yield from ()


# The disk may hang, so it comes after the others. Then they have a second turn: what disturbed the
# first is perhaps gone.
PROBES = (
    ("cores", measure_cores),
    ("memory", measure_memory),
    ("disk", measure_disk),
    ("pause", pause),
    ("cores", measure_cores),
    ("memory", measure_memory),
)


def main() -> None:
    """Measure, and print the rates."""
    for name, probe in PROBES:
        try:
            for rate in probe(sys.argv[1]):
                print(json.dumps([name, rate, ""]), flush=True)  # noqa: T201
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            print(json.dumps([name, 0.0, text]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
