"""Measure the cost of the driver and the scheduler at many nodes: `python -m
benchmarks.many_nodes`, or `--nodes 4 16`.

The driver and the Dask scheduler are real, and so are the messages between them and the nodes'
agents. The nodes are light (benchmarks/light_nodes.py): Dask workers that share a few processes.
Each has an agent with counters in place of ranks. Its heartbeats, its measurements, the start of an
attempt and the end of one with the list of the states in its memory are those of a real one, and
the first node, where all meet, reports a step each second. It is a process of its own, and so is
the last one, which is killed.

The CPU time of the driver and of the scheduler is measured, because the nodes take the same cores.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.light_nodes import LightAgent
from benchmarks.measure import machine, show_rows
from flyte_ddp.cluster.config import ClusterConfig, dask_config
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.config.waits import LINE_INTERVAL
from flyte_ddp.errors import TrainingStopped
from flyte_ddp.events import AttemptStarted, Event, Reported
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.control.nodes import Node
from flyte_ddp.launch.nodes.dask import worker
from flyte_ddp.launch.nodes.dask.assignment import DaskNode
from flyte_ddp.launch.nodes.dask.nodes import DaskNodes
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.protocol.messages import Beat
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.process.devices import num_cores
from flyte_ddp.rehearsal.faults import Nodes, send_to_all

NUM_NODES = (4, 64, 256, 1024)
WINDOW = 10.0  # seconds over which the costs are taken
SETTLE_TIME = 3.0  # seconds from the first step until then
START_TIMEOUT = 240.0  # seconds for all nodes to start
NODES_PER_PROCESS = 256
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Cpu:
    """The CPU time of the driver and of the scheduler, in seconds, and the moment."""

    driver: float
    scheduler: float
    at: float

    def since(self, before: Cpu) -> Cpu:
        return Cpu(
            self.driver - before.driver, self.scheduler - before.scheduler, self.at - before.at
        )


@dataclass(frozen=True)
class Cost:
    """The cost of a gang of one size."""

    num_nodes: int
    # from the call of the driver to the first step: nodes found, checked and met
    start: Cpu
    window: Cpu  # while all nodes train
    num_beats: int  # heartbeats that the driver got in the window
    attempt: Cpu  # from the death of a node's processes to the start of the next attempt
    recovery: Cpu  # from then to the first step of it
    smaller: Cpu  # while one node is missing


@dataclass
class Gang:
    """The nodes of the latest attempt, as the driver sees them."""

    nodes: Sequence[DaskNode] = ()
    num_beats: int = 0  # heartbeats that the driver got

    def __str__(self) -> str:
        counts = {
            "have taken their job": sum(node.is_admitted for node in self.nodes),
            "have an agent": sum(node.is_started for node in self.nodes),
            "have met the others": sum(node.beat.has_reported for node in self.nodes),
            "have ended": sum(node.end is not None for node in self.nodes),
        }
        of_nodes = ", ".join(f"{count} {what}" for what, count in counts.items())
        return f"of {len(self.nodes)} nodes, {of_nodes}"


class Watch:
    """A listener that notes when attempts begin, and when each makes its first step."""

    def __init__(self) -> None:
        self.num_attempts = 0
        self.num_met = 0

    def handle(self, event: Event) -> None:
        if isinstance(event, AttemptStarted):
            self.num_attempts += 1
        elif isinstance(event, Reported):
            self.num_met = self.num_attempts

    def close(self, error: BaseException | None) -> None:
        pass


@contextlib.contextmanager
def run_nodes(num_nodes: int) -> Iterator[tuple[Nodes, subprocess.Popen[bytes]]]:
    """Yield a scheduler with so many light nodes, and the process of the last one."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for name, value in dask_config(ClusterConfig()).items():
        environment["DASK_" + name.upper().replace(".", "__").replace("-", "_")] = str(value)
    names = [f"light-{index}" for index in range(num_nodes)]
    groups = [
        names[start : min(start + NODES_PER_PROCESS, num_nodes - 1)]
        for start in range(1, num_nodes - 1, NODES_PER_PROCESS)
    ]
    with tempfile.TemporaryDirectory(prefix="many-nodes-") as directory:
        nodes = Nodes(Path(directory), environment)
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.light_nodes", nodes.address, *group],
                env={**environment, "TMPDIR": directory},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for group in (names[:1], *groups, names[-1:])
        ]
        try:
            yield nodes, processes[-1]
        finally:
            for process in processes:
                send_to_all(process, signal.SIGKILL)
                process.wait()
            nodes.close()


def measure(num_nodes: int) -> Cost:
    """Run a gang of `num_nodes`, take its costs, and kill its last node."""
    with run_nodes(num_nodes) as (nodes, victim), follow_gang() as gang:
        with tempfile.TemporaryDirectory(prefix="many-nodes-") as checkpoints:
            return _measure(num_nodes, nodes, victim, gang, checkpoints)


def _measure(
    num_nodes: int,
    nodes: Nodes,
    victim: subprocess.Popen[bytes],
    gang: Gang,
    checkpoints: str,
) -> Cost:
    cluster = ClusterConfig(
        kind="existing",
        scheduler_address=nodes.address,
        num_nodes=num_nodes,
        min_nodes=num_nodes - 1,
        return_timeout=0.1,
        check_nodes="always",
    )
    watch, stop = Watch(), StopRequest()
    job = Job(Program("no ranks", b"", packages=("benchmarks",)), checkpoints, time.time())
    processes = psutil.Process(), psutil.Process(nodes.scheduler.pid)

    def cpu() -> Cpu:
        times = [each.cpu_times() for each in processes]
        return Cpu(*(each.user + each.system for each in times), time.monotonic())

    def run() -> None:
        with open_cluster(cluster, "many-nodes") as client:
            client.wait_for_workers(num_nodes, timeout=START_TIMEOUT)
            begun.append(cpu())
            with contextlib.suppress(TrainingStopped):
                driver.run(job, DaskPlace(client, cluster), None, [watch], stop=stop)

    def describe() -> str:
        if not begun:
            return f"not all of {num_nodes} workers are there"
        return f"attempt {watch.num_attempts}: {gang}"

    def take_window() -> Cpu:
        time.sleep(SETTLE_TIME)
        before, gang.num_beats = cpu(), 0
        time.sleep(WINDOW)
        return cpu().since(before)

    begun: list[Cpu] = []  # once all workers are there
    thread = threading.Thread(target=run, name="driver")
    thread.start()
    try:
        _wait_until(thread, lambda: watch.num_met == 1, describe)
        start = cpu().since(begun[0])
        window, num_beats = take_window(), gang.num_beats
        before = cpu()
        victim.kill()
        _wait_until(thread, lambda: watch.num_attempts == 2, describe)
        attempt = cpu().since(before)
        _wait_until(thread, lambda: watch.num_met == 2, describe)
        recovery = cpu().since(before)
        return Cost(num_nodes, start, window, num_beats, attempt, recovery, take_window())
    finally:
        stop.set("the measurement is over")
        stop.set("the measurement is over")
        thread.join()


@contextlib.contextmanager
def follow_gang() -> Iterator[Gang]:
    """Give the workers light agents, and yield what the driver knows of them."""
    messages, agent, gang = DaskNodes.messages, worker.Agent, Gang()

    def messages_counted(nodes: DaskNodes) -> Iterator[tuple[Node, Any]]:
        gang.nodes = nodes.nodes
        for node, message in messages(nodes):
            gang.num_beats += isinstance(message, Beat)
            yield node, message

    DaskNodes.messages = messages_counted  # type: ignore[method-assign]
    worker.Agent = LightAgent  # type: ignore[misc]
    try:
        yield gang
    finally:
        DaskNodes.messages = messages  # type: ignore[method-assign]
        worker.Agent = agent  # type: ignore[misc]


def _wait_until(
    thread: threading.Thread, condition: Callable[[], bool], describe: Callable[[], str]
) -> None:
    """Wait for the condition. Print every ten seconds what has come of it so far."""
    begun = time.monotonic()
    next_line_at = begun + LINE_INTERVAL
    while not condition():
        now = time.monotonic()
        if not thread.is_alive() or now > begun + START_TIMEOUT:
            raise RuntimeError(f"the gang did not come so far in time: {describe()}")
        if now > next_line_at:
            next_line_at = now + LINE_INTERVAL
            print(f"after {now - begun:.0f} s: {describe()}", file=sys.stderr, flush=True)
        time.sleep(0.02)


def table(costs: Sequence[Cost]) -> str:
    """Format the costs as a Markdown table."""
    titles = (
        "nodes",
        "driver, of a core",
        "scheduler, of a core",
        "heartbeats to the driver",
        "node lost to the next attempt",
        "to its first step",
        "with a node missing",
        "roll call to first step",
    )
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for cost in costs:
        window, smaller = cost.window, cost.smaller
        cells = (
            f"{cost.num_nodes}",
            f"{window.driver / window.at:.1%}",
            f"{window.scheduler / window.at:.1%}",
            f"{cost.num_beats / window.at:.0f} a second",
            _describe(cost.attempt),
            _describe(cost.recovery),
            f"{smaller.driver / smaller.at:.1%} + {smaller.scheduler / smaller.at:.1%}",
            _describe(cost.start),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _describe(cpu: Cpu) -> str:
    return f"{cpu.at:.1f} s ({cpu.driver:.2f} + {cpu.scheduler:.2f} s of CPU)"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=NUM_NODES, help="%(default)s")
    arguments = parser.parse_args()
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
