"""The faults that a run is given on purpose, on this machine. Imports neither torch nor Dask.

A store that is away and a full disk are answers of `Refusal`, in the processes that write. Lost
nodes are processes of `Nodes`, a Dask cluster.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.storage import Storage

if TYPE_CHECKING:
    from psutil import Process  # type: ignore[import-untyped]

OUTAGE = 2.0  # seconds from the first refused request on


class Nodes:
    """A Dask scheduler and its workers, as processes."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self.environment = environment  # variables of all processes
        self.file = directory / "scheduler.json"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}
        self.num_started = 0
        options = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        self.scheduler = self._start("scheduler", *options, "--scheduler-file", str(self.file))
        while not (self.file.exists() and self.file.read_text().endswith("}")):
            time.sleep(0.1)
        self.address = str(json.loads(self.file.read_text())["address"])

    def add(self) -> str:
        name = f"node-{self.num_started}"
        self.num_started += 1
        options = ("--name", name, "--nthreads", "1", "--no-dashboard", "--memory-limit", "0")
        self.workers[name] = self._start("worker", self.address, *options)
        return name

    def evict(self, name: str) -> None:
        """Kill a worker with its nanny; its ranks notice that by themselves."""
        nanny = self.workers.pop(name)
        for process in [nanny, *children(nanny.pid, recursive=False)]:
            process.kill()
        nanny.wait()

    def find(self, pid: int) -> str:
        """Return the worker that a process runs on."""
        for name, nanny in self.workers.items():
            if pid in [each.pid for each in children(nanny.pid, recursive=True)]:
                return name
        raise LookupError(f"process {pid} runs on no worker")

    def close(self) -> None:
        for process in [*self.workers.values(), self.scheduler]:
            send_to_all(process, signal.SIGKILL)
            process.wait()

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "dask", *command],
            env=self.environment,
            stderr=subprocess.DEVNULL,
        )


def children(pid: int, recursive: bool) -> list[Process]:
    """Return the processes below one; none if it has ended."""
    import psutil

    with contextlib.suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive))
    return []


def send_to_all(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to `process` and everything below it."""
    import psutil

    for pid in [process.pid, *(each.pid for each in children(process.pid, recursive=True))]:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(number)


@dataclass
class Refusal:
    """A store that is away, or a disk that is full, for this process's writes: for `OUTAGE` seconds
    from the first one on that is refused.

    Args:
        kind: "store", which refuses whatever goes through `flyte_ddp.storage`, or "disk".
        place: directory on the full disk.
    """

    kind: str
    place: str
    begun: float = 0.0

    def check(self) -> None:
        """Raise OSError while the writes are refused."""
        self.begun = self.begun or time.monotonic()
        if time.monotonic() < self.begun + OUTAGE:
            if self.kind == "disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))

    def reach_storage(self, is_due: Callable[[], bool]) -> None:
        """Let `flyte_ddp.storage` meet it, where `is_due`."""
        retry = Storage.retry

        def retry_refused(
            storage: Storage, action: Callable[[], Any], takes_space: bool = False
        ) -> Any:
            def try_once() -> Any:
                if is_due() and (takes_space or self.kind == "store"):
                    self.check()
                return action()

            return retry(storage, try_once, takes_space)

        Storage.retry = retry_refused  # type: ignore[method-assign,assignment]


@dataclass
class FullFile:
    """An open file. Its disk fills up in the middle of the first large write."""

    _file: Any
    _refused: Callable[[], None]

    def write(self, contents: Any) -> Any:
        try:
            if len(contents) > 64:
                self._refused()
        except OSError:
            self._file.write(contents[: len(contents) // 2])
            self._file.flush()
            raise
        return self._file.write(contents)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> FullFile:
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.close()
