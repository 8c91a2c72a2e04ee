"""Nodes for benchmarks.many_nodes, many to a process: `python -m benchmarks.light_nodes ADDRESS
NAME...` runs a Dask worker for each name.

The workers, their plugins and what their agents send are the product's own. The ranks of a node are
a counter of steps, which meets the other ranks in a real rendezvous.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pickle
import queue
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from flyte_ddp.config.waits import BEAT_INTERVAL, POLL_INTERVAL
from flyte_ddp.events import NodeMeasured, Reported
from flyte_ddp.launch.agent.link import Link
from flyte_ddp.launch.nodes.dask.worker import Agent
from flyte_ddp.launch.protocol.messages import (
    PHASES,
    Beat,
    Check,
    Checked,
    End,
    NodeJob,
    Outcome,
    Pace,
)
from flyte_ddp.process.threads import call_in_background

STEPS_PER_SECOND = 10
REPORT_INTERVAL = 1.0  # seconds between two reports of rank 0, as of the counters of steps
MEASURE_INTERVAL = 15.0  # seconds between two measurements of a node, as in its first 25 minutes
START_THREADS = 32  # workers of a process that start at once, or ranks that meet
# Dask's monitor in each worker lists the open files of its process, which are those of all nodes.
MONITOR_INTERVAL = "60s"
# answer of each node to the node check
RATES = {"usable cores": 4, "core speed": 1e11, "memory": 1e10, "disk": 1e9}

_meetings = ThreadPoolExecutor(START_THREADS)


class FakeRank:
    """The ranks of one node in one attempt: a counter of steps for each."""

    def __init__(self, job: NodeJob, link: Link, listener: socket.socket | None) -> None:
        self.ranks, self.link, self.listener = job.ranks, link, listener
        self.begun_at = time.monotonic()
        self.looked_at = self.beat_at = 0.0
        self.measured_at = self.begun_at
        self.store: Any = None
        self.meeting: Future[None]
        if listener:  # the others wait for it, in all threads of the pool
            self.meeting = call_in_background(self._meet)
        else:
            self.meeting = _meetings.submit(self._meet)

    def _meet(self) -> None:
        """Connect to the store of rank 0, as the first rank of the node."""
        from torch.distributed import TCPStore

        ranks = self.ranks
        descriptor = None
        if self.listener:
            descriptor = self.listener.detach()
        self.store = TCPStore(
            ranks.host,
            ranks.port,
            is_master=descriptor is not None,
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
        self.store.add("nodes", 1)

    def look(self, now: float) -> bool:
        """Do what is due. Return whether the attempt goes on."""
        stop = self.link.stop
        if stop.is_set():
            self._end(stop.reason, stop.is_urgent)
            return False
        if now - self.beat_at >= BEAT_INTERVAL:
            self.beat_at = now
            self.link.send(self.link.beat)
        if now - self.looked_at < REPORT_INTERVAL or not self.meeting.done():
            return True
        self.meeting.result()
        self.looked_at = now
        is_first = self.ranks.first_rank == 0
        if is_first and self.store.add("nodes", 0) < self.ranks.num_nodes:
            return True
        step = int((now - self.begun_at) * STEPS_PER_SECOND)
        seconds = [0.02 * step] * len(PHASES)
        paces = [Pace(number, step, seconds) for number in self.ranks.numbers]
        self.link.note_beat(Beat(step, is_stoppable=True, has_reported=True, paces=paces))
        if is_first:
            self.link.emit(Reported(step, None, {"loss": 0.5}))
        if now - self.measured_at > MEASURE_INTERVAL:
            self.measured_at = now
            self.link.emit(NodeMeasured(self.ranks.node_rank, 0.5, 0.5, 1 << 34))
        return True

    def _end(self, reason: str, is_urgent: bool) -> None:
        state = (1, self.ranks.num_restarts + 1, 1)  # step, attempt and turn
        parts = [(*state, number, self.ranks.world_size) for number in self.ranks.ranks_in_memory]
        outcome = Outcome.STOPPED
        if is_urgent:
            outcome = Outcome.KILLED
        self.link.send(End(outcome, reason, parts))


class Pipe:
    """The connection of a worker to its agent, which is in this process, and the agent's link to
    the driver. No thread belongs to it: with several for each node, some would wait for seconds.
    """

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._link: Link | None = None

    def begin(self, job: NodeJob, listener: socket.socket | None) -> None:
        self._link = link = Link(self._put)
        link.check = functools.partial(_answer, link, job.ranks.node_rank)
        _running.append(FakeRank(job, link, listener))

    def send_bytes(self, command: bytes) -> None:
        if self._link and not self._link.is_over.is_set():
            self._link.obey(pickle.loads(command))

    def recv_bytes(self) -> bytes:
        message = self._messages.get()
        if message is None:
            raise EOFError
        return message

    def close(self) -> None:
        if self._link and not self._link.is_over.is_set():
            self._link.kill_ranks("the worker is gone")
        self._messages.put(None)

    def _put(self, message: Any) -> None:
        if isinstance(message, End):
            self._messages.put(b"")  # a real agent does the same
        self._messages.put(pickle.dumps(message))


class _Process:
    """The process of an agent, which is none."""

    pid = os.getpid()
    returncode: int | None = None

    def __init__(self, connection: Pipe) -> None:
        self._connection = connection

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self.kill()
        return 0

    def kill(self) -> None:
        self.returncode = 0
        self._connection.close()


class LightAgent(Agent):
    """An agent whose process is this one."""

    @classmethod
    def start(cls, directories: Sequence[str], outputs: str) -> LightAgent:
        connection = Pipe()
        return cls(_Process(connection), connection)

    def begin(self, job: bytes, listener: socket.socket | None) -> None:
        if listener:
            listener = listener.dup()
        self.connection.begin(pickle.loads(job), listener)

    def end(self) -> None:
        self.process.kill()


def _answer(link: Link, index: int, check: Check) -> None:
    """Answer a question of the node check."""
    links: dict[int, float] = {}
    if check.addresses:
        links = {(index + step) % len(check.addresses): 1e9 for step in (-1, 1)}
    link.send(Checked(check.number, RATES, links, [], ("127.0.0.1", 1 + index), "light"))


_running: list[FakeRank] = []


def _run_ranks() -> None:
    """Run the ranks of all nodes of this process."""
    while True:
        time.sleep(POLL_INTERVAL)
        now = time.monotonic()
        for each in list(_running):
            if not each.look(now):
                _running.remove(each)


async def run_workers(address: str, names: Sequence[str]) -> None:
    """Run a Dask worker for each of `names` until the standard input of this process ends."""
    import dask
    import torch.distributed  # noqa: F401 - otherwise in the rendezvous, beside all nodes' threads
    from distributed import Worker

    dask.config.set({"distributed.admin.system-monitor.interval": MONITOR_INTERVAL})
    logging.getLogger("distributed").setLevel(logging.CRITICAL)
    threading.Thread(target=_run_ranks, daemon=True).start()
    places = asyncio.Semaphore(START_THREADS)
    directory = tempfile.mkdtemp(prefix="light-nodes-")  # the code is unpacked there once

    async def start(name: str) -> Worker:
        number = int(name.rpartition("-")[2])
        host = f"127.0.{1 + number // 250}.{1 + number % 250}"
        async with places:
            worker = await Worker(
                address, host=host, nthreads=1, name=name, dashboard=False, memory_limit=0
            )
        worker.local_directory = directory
        return worker

    workers = await asyncio.gather(*(start(name) for name in names))
    await asyncio.to_thread(sys.stdin.read)
    del workers
    os._exit(0)


if __name__ == "__main__":
    from benchmarks.light_nodes import run_workers as run

    asyncio.run(run(sys.argv[1], sys.argv[2:]))
