"""Measure the cost of the driver and the scheduler at many nodes: `python -m
benchmarks.many_nodes`, or `--nodes 4 16`.

The driver and the Dask scheduler are real, and so are the messages between them and the nodes'
agents. The nodes are light: Dask workers that share one process, each with an agent
process that has no ranks. It sends a heartbeat a second; the first node also reports a step each
second, and the last one is a process of its own, which is killed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

import psutil

from benchmarks.measure import machine, show_rows
from flyte_ddp.cluster.config import DASK_CONFIG, ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.config.waits import POLL_INTERVAL
from flyte_ddp.errors import TrainingStopped
from flyte_ddp.events import AttemptStarted, Event, Reported
from flyte_ddp.launch.agent.main import DriverLink
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask import worker
from flyte_ddp.launch.nodes.dask.nodes import DaskNodes
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.protocol.messages import Beat, End, Outcome
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.process.devices import num_cores
from flyte_ddp.rehearsal.faults import Nodes, send_to_all

NUM_NODES = (4, 16, 64)
WINDOW = 10.0  # seconds over which the costs are taken
START_TIMEOUT = 180.0  # seconds for all nodes to report
STEPS_PER_SECOND = 10
SUPERVISOR = (
    "import sys; sys.path.insert(0, sys.argv[1]); from benchmarks.many_nodes import "
    "supervise; supervise()"
)
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Cost:
    """The cost of a gang of one size while it trains, and the time from the loss of a node to the
    next attempt.
    """

    num_nodes: int
    driver: float  # share of a core
    scheduler: float  # share of a core
    messages_per_second: float  # messages from the nodes to the driver
    # time from the death of a node's processes to the start of the next attempt
    recovery_seconds: float


def supervise() -> None:
    """Run the agent of a node without ranks, with the arguments of
    `flyte_ddp.launch.agent.main.main`.
    """
    connection = Connection(int(sys.argv[4]))
    job = pickle.loads(connection.recv_bytes())
    if job.ranks.first_rank == 0:
        recv_handle(connection)
    link = DriverLink(connection, job.driver_timeout)

    def obey() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                link.obey(pickle.loads(connection.recv_bytes()))
        link.kill_ranks("the worker is gone")

    threading.Thread(target=obey, daemon=True).start()
    polls = 0
    while not link.stop.is_set():
        time.sleep(POLL_INTERVAL)
        polls += 1
        step = int(polls * POLL_INTERVAL * STEPS_PER_SECOND)
        link.note_beat(Beat(step, has_reported=True))
        if job.ranks.first_rank == 0 and polls % round(1 / POLL_INTERVAL) == 0:
            link.emit(Reported(step, None, {"loss": 0.5}))
    reason = link.stop.reason
    link.send(End(Outcome.KILLED if link.stop.is_urgent else Outcome.STOPPED, reason))
    os._exit(0)


async def run_workers(address: str, count: int) -> None:
    """Run `count` Dask workers in this process until its standard input ends."""
    from distributed import Worker

    workers = [
        Worker(address, nthreads=1, name=f"light-{index}", dashboard=False)
        for index in range(count)
    ]
    await asyncio.gather(*workers)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0)


class Watch:
    """A listener that notes when attempts begin."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.num_steps = 0

    def handle(self, event: Event) -> None:
        if isinstance(event, AttemptStarted):
            self.starts.append(time.monotonic())
        elif isinstance(event, Reported):
            self.num_steps += 1

    def close(self, error: BaseException | None) -> None:
        pass


def measure(num_nodes: int) -> Cost:
    """Run a gang of `num_nodes`, take its costs, and kill its last node."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name, value in DASK_CONFIG.items():
        environment["DASK_" + name.upper().replace(".", "__").replace("-", "_")] = str(value)
    with tempfile.TemporaryDirectory(prefix="many-nodes-") as directory:
        nodes = Nodes(Path(directory), environment)
        command = ("-m", "benchmarks.many_nodes", "--workers", nodes.address, str(num_nodes - 1))
        others = subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            return _measure(num_nodes, nodes, nodes.add())
        finally:
            send_to_all(others, signal.SIGKILL)
            others.wait()
            nodes.close()


def _measure(num_nodes: int, nodes: Nodes, victim: str) -> Cost:
    cluster = ClusterConfig(
        kind="existing",
        scheduler_address=nodes.address,
        num_nodes=num_nodes,
        min_nodes=num_nodes - 1,
        return_timeout=0.1,
    )
    messages = CountedMessages()
    watch, stop = Watch(), StopRequest()
    program = Program("no ranks", b"", packages=("benchmarks",))

    def run() -> None:
        with open_cluster(cluster, "many-nodes") as client:
            with contextlib.suppress(TrainingStopped):
                driver.run(
                    Job(program, "", time.time()),
                    DaskPlace(client, cluster),
                    None,
                    [watch],
                    stop=stop,
                )

    thread = threading.Thread(target=run, name="driver")
    thread.start()
    try:
        _wait_until(thread, lambda: len(messages.senders) == num_nodes)
        processes = psutil.Process(), psutil.Process(nodes.scheduler.pid)
        time.sleep(2.0)  # The start is over then.
        before, begun, num_messages = (
            [_cpu_seconds(each) for each in processes],
            time.monotonic(),
            messages.count,
        )
        time.sleep(WINDOW)
        seconds = time.monotonic() - begun
        ours, theirs = (
            (_cpu_seconds(each) - cpu) / seconds
            for each, cpu in zip(processes, before, strict=True)
        )
        rate = (messages.count - num_messages) / seconds
        killed_at = time.monotonic()
        nodes.evict(victim)
        _wait_until(thread, lambda: len(watch.starts) > 1)
        return Cost(num_nodes, ours, theirs, rate, watch.starts[1] - killed_at)
    finally:
        stop.set("the measurement is over")
        thread.join()
        messages.close()


class CountedMessages:
    """Counts what the nodes send to the driver of this process, until closed."""

    def __init__(self) -> None:
        self.count = 0
        self.senders: set[str] = set()
        self._take = DaskNodes._take
        self._bootstrap = worker.BOOTSTRAP

        def take(nodes: DaskNodes, arrived_at: float, event: dict[str, Any]) -> Any:
            if "message" in event:
                self.count += 1
                self.senders.add(event["worker"])
            return self._take(nodes, arrived_at, event)

        DaskNodes._take = take  # type: ignore[method-assign]
        worker.BOOTSTRAP = SUPERVISOR

    def close(self) -> None:
        DaskNodes._take = self._take  # type: ignore[method-assign]
        worker.BOOTSTRAP = self._bootstrap


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _wait_until(thread: threading.Thread, condition: Any) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while not condition():
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the gang has ended, or did not come so far in time")
        time.sleep(0.01)


def table(costs: list[Cost]) -> str:
    """Format the costs as a Markdown table."""
    lines = [
        (
            "| nodes | driver, of a core | scheduler, of a core | messages to the driver | node "
            "lost "
            "to the next attempt |"
        ),
        "|---|---|---|---|---|",
    ]
    rows = [
        f"| {cost.num_nodes} | {100 * cost.driver:.1f} % | {100 * cost.scheduler:.1f} % "
        f"| {cost.messages_per_second:.0f} a second | {cost.recovery_seconds:.1f} s |"
        for cost in costs
    ]
    return "\n".join([*lines, *rows])


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NUM_NODES, help="%(default)s")
    parser.add_argument("--workers", nargs=2, metavar=("ADDRESS", "COUNT"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.workers:
        asyncio.run(run_workers(arguments.workers[0], int(arguments.workers[1])))
    for name in ("distributed", "flyte_ddp"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    costs: list[Cost] = []
    num_shown = 0
    for count in arguments.nodes:
        costs.append(measure(count))
        num_shown = show_rows(table(costs), num_shown)
    print(f"\n{machine(num_cores())}")


if __name__ == "__main__":
    main()
