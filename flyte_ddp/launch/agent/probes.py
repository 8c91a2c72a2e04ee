"""The process that measures its machine for a node check. Its agent can kill it when it hangs.

`python -m flyte_ddp.launch.agent.probes DIRECTORY` prints a line of JSON whenever it knows a rate
better: the name of the probe, and the rate. After an error, the text of the error follows. A core
and memory are measured in time of the CPU, so that other processes on the machine change little.
This time does not pass while a quota throttles the container, so no counter has to be subtracted.
The disk is that of the directory. Imports nothing of ours but small modules, and torch only where
there are GPUs.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyte_ddp.process.cgroups import usable_cores
from flyte_ddp.process.devices import visible_gpus

if TYPE_CHECKING:
    import torch

# The name in events.py, whose import would take more time than a probe.
CORES = "usable cores"
PROBE_SECONDS = 0.03  # time of the CPU for each turn of cores and memory
SIZE = 256  # rows and columns of the matrices
NUM_PRODUCTS = 8  # matrix products of which the time is taken: some 5 ms
COPY_BYTES = 16 << 20  # more than fits into caches of a core
DISK_SECONDS = 0.5
PAUSE_SECONDS = 0.3
GPU_SECONDS = 0.1  # seconds of one probe of a GPU
GPU_SIZE = 4096  # rows and columns of its matrices: 32 MiB each
GPU_COPY_BYTES = 64 << 20  # more than fits into its cache
NUM_GPU_CALLS = 4  # products or copies of which the time is taken
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


def measure_core() -> Iterator[float]:
    """Yield the floating-point operations per second of matrix products on one core."""
    import numpy as np

    matrix, best = np.ones((SIZE, SIZE), np.float32), 0.0
    ends_at = time.thread_time() + PROBE_SECONDS
    while time.thread_time() < ends_at:
        begun = time.thread_time()
        for _ in range(NUM_PRODUCTS):
            np.matmul(matrix, matrix)
        seconds = max(time.thread_time() - begun, 1e-6)
        best = max(best, NUM_PRODUCTS * 2 * SIZE**3 / seconds)
        yield best


def measure_memory() -> Iterator[float]:
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


def list_gpu_probes() -> Iterator[tuple[str, Iterator[float]]]:
    """Yield the probes of each GPU that this process may use, with their names.

    Each GPU gives some 0.7 GB of memory to this process, until it ends.
    """
    gpus = visible_gpus()
    if not gpus:
        return
    import torch

    for index, number in enumerate(gpus):
        device = torch.device("cuda", index)
        name = f"GPU {number} ({torch.cuda.get_device_name(device)})"
        yield f"products of {name}", measure_products(device)
        yield f"copies of {name}", measure_copies(device)


def measure_products(device: torch.device) -> Iterator[float]:
    """Yield the floating-point operations per second of matrix products on a GPU."""
    import torch

    matrix = torch.ones(GPU_SIZE, GPU_SIZE, dtype=torch.float16, device=device)
    product = torch.empty_like(matrix)
    yield from _repeat(lambda: torch.mm(matrix, matrix, out=product), 2 * GPU_SIZE**3, device)


def measure_copies(device: torch.device) -> Iterator[float]:
    """Yield the bytes per second that a GPU copies in its memory."""
    import torch

    source = torch.ones(GPU_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    yield from _repeat(lambda: target.copy_(source), GPU_COPY_BYTES, device)


def _repeat(call: Callable[[], object], amount: float, device: torch.device) -> Iterator[float]:
    """Yield the best rate so far of calls on a device, each of which does `amount` of work."""
    import torch

    def finish() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    call()  # the first call loads libraries
    finish()
    best, ends_at = 0.0, time.monotonic() + GPU_SECONDS
    while time.monotonic() < ends_at:
        begun = time.monotonic()
        for _ in range(NUM_GPU_CALLS):
            call()
        finish()
        best = max(best, NUM_GPU_CALLS * amount / max(time.monotonic() - begun, 1e-6))
        yield best


def list_probes(directory: str) -> Iterator[tuple[str, Iterator[float]]]:
    """Yield the probes in their order, with their names.

    The disk may hang, so it comes after the core and memory. Then these have a second turn: what
    disturbed the first is perhaps gone. GPUs come last, because a driver may hang, too.
    """
    yield CORES, iter([usable_cores()])
    yield "core speed", measure_core()
    yield "memory", measure_memory()
    yield "disk", measure_disk(directory)
    time.sleep(PAUSE_SECONDS)
    yield "core speed", measure_core()
    yield "memory", measure_memory()
    yield from list_gpu_probes()


def main() -> None:
    """Measure, and print the rates."""
    try:
        for name, rates in list_probes(sys.argv[1]):
            try:
                for rate in rates:
                    report(name, rate)
            except Exception as error:
                report(name, 0.0, error)
    except Exception as error:
        report("GPUs", 0.0, error)


def report(name: str, rate: float, error: Exception | None = None) -> None:
    text = ""
    if error:
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
    print(json.dumps([name, rate, text]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
