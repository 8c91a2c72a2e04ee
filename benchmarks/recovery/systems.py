"""The systems that are compared, each as processes of this machine: its nodes, and the driver where
it has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.counting import STEP_SECONDS_VARIABLE
from benchmarks.recovery.drivers import PATIENCE
from benchmarks.recovery.script import MODEL_STATE
from benchmarks.recovery.workload import DIRECTORY, MAX_RESTARTS, STEP_SECONDS
from flyte_ddp.rehearsal.faults import Nodes, send_to_all

ROOT = Path(__file__).parents[2]
START_TIMEOUT = 180.0  # seconds for a node of Ray to start


@dataclass(frozen=True)
class Task:
    """The training that every system is given."""

    data: Path
    directory: Path  # of this run alone
    epochs: int
    store: str = ""  # URL for the checkpoints; "" is `directory`
    config: Mapping[str, Any] = field(default_factory=dict)  # of our run, besides the benchmark's

    def options(self) -> tuple[str, ...]:
        return (
            "--data",
            str(self.data),
            "--directory",
            str(self.directory),
            "--epochs",
            str(self.epochs),
        )


class System:
    """Nodes and a driver that run one task. Subclasses start them."""

    name = ""
    needs = ""  # a module without which it cannot run
    has_store = True
    has_one_node = True  # it can run on one machine without a cluster
    # seconds from the notice that a node has to go until it is killed; 0: until its ranks have
    # ended
    notice = 0.0

    def __init__(self, task: Task) -> None:
        self.task = task
        self.environment = {
            **os.environ,
            DIRECTORY: str(task.directory),
            STEP_SECONDS_VARIABLE: str(STEP_SECONDS),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": str(ROOT),
        }
        self.log = open(task.directory / "output.log", "ab")  # noqa: SIM115 - closed by `close`
        self.nodes: list[subprocess.Popen[bytes]] = []
        self.others: list[subprocess.Popen[bytes]] = []  # the driver is the last one
        self.groups: list[int] = []  # of the processes that were started here

    def launch(self) -> None:
        """Start two nodes and what else there is."""
        self.start()
        self.add_node()
        self.add_node()
        self.start_driver()

    def launch_on_one_node(self) -> None:
        """Start both ranks on one node, which is this machine. For a system that has
        `has_one_node`.
        """
        raise NotImplementedError

    def start(self) -> None:
        """Start what the nodes need."""

    def add_node(self) -> None:
        raise NotImplementedError

    def start_driver(self) -> None:
        """Start the driver."""

    def exit_code(self) -> int | None:
        """Return how the run ended; None while it runs."""
        return self.others[-1].poll()

    def weights_url(self) -> str:
        return f"{self.task.directory}/{MODEL_STATE}"

    def popen(
        self, *command: str, more: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            command,
            env={**self.environment, **(more or {})},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            cwd=ROOT,
            start_new_session=True,
        )
        self.groups.append(process.pid)
        return process

    def rank_process(self, rank: int) -> psutil.Process:
        """Return the process of a rank of the present gang."""
        return psutil.Process(int((self.task.directory / f"rank-{rank}.pid").read_text()))

    def node_of(self, process: psutil.Process) -> subprocess.Popen[bytes]:
        """Return the node that `process` runs on."""
        ancestors = {each.pid for each in process.parents()}
        return next(node for node in self.nodes if node.pid in ancestors)

    def kill_node(self, node: subprocess.Popen[bytes]) -> None:
        """Kill everything that runs on a node, at once."""
        self.nodes.remove(node)
        send_to_all(node, signal.SIGKILL)
        node.wait()

    def drain_node(self, node: subprocess.Popen[bytes]) -> None:
        """Tell a node's first process to go, as a pod is told; it may take its time."""
        self.nodes.remove(node)
        self.others.insert(0, node)
        node.send_signal(signal.SIGTERM)

    def stop_node(self, node: subprocess.Popen[bytes]) -> None:
        """Stop everything that runs on a node, without a word to anybody."""
        self.nodes.remove(node)
        self.others.insert(0, node)
        send_to_all(node, signal.SIGSTOP)

    def close(self) -> None:
        for process in [*self.nodes, *reversed(self.others)]:
            send_to_all(process, signal.SIGKILL)
            process.wait()
        for group in self.groups:  # what is left of a node whose first process has ended
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        self.log.close()


class Ours(System):
    """Our launcher on a Dask cluster of two workers."""

    name = "flyte-ddp"

    def start(self) -> None:
        self.dask = Nodes(self.task.directory, self.environment)

    def add_node(self) -> None:
        self.nodes.append(self.dask.workers[self.dask.add()])

    def launch_on_one_node(self) -> None:
        self._start_driver("")

    def start_driver(self) -> None:
        self._start_driver(self.dask.address)

    def _start_driver(self, address: str) -> None:
        command = (
            sys.executable,
            "-m",
            "benchmarks.recovery.drivers",
            "ours",
            "--address",
            address,
        )
        options = ("--store", self.task.store, "--config", json.dumps(self.task.config))
        self.others.append(self.popen(*command, *self.task.options(), *options))

    def weights_url(self) -> str:
        return f"{self.task.store or self.task.directory}/{MODEL_STATE}"

    def close(self) -> None:
        super().close()
        if hasattr(self, "dask"):
            self.dask.close()


class Torchrun(System):
    """Two elastic agents of torchrun, which meet at the first one's store. There is no driver."""

    name = "torchrun elastic"
    has_store = False

    def start(self) -> None:
        self.port = free_port()
        # Otherwise an agent that joins later waits for an address that the others published in an
        # earlier round.
        self.environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def launch_on_one_node(self) -> None:
        launcher = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
        )
        command = (*launcher, f"--max-restarts={MAX_RESTARTS}", "-m", "benchmarks.recovery.script")
        self.nodes.append(self.popen(*command, *self.task.options()))

    def add_node(self) -> None:
        launcher = (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"),
            *(
                f"--max-restarts={MAX_RESTARTS}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint=127.0.0.1:{self.port}",
            ),
            *("--rdzv-id=recovery", f"--rdzv-conf=last_call_timeout={PATIENCE:g}"),
        )
        self.nodes.append(
            self.popen(*launcher, "-m", "benchmarks.recovery.script", *self.task.options())
        )
        while len(self.nodes) == 1 and not answers(self.port):
            time.sleep(0.05)  # the first one serves the store

    def exit_code(self) -> int | None:
        codes = [node.poll() for node in self.nodes]
        return None if None in codes else max(map(abs, codes), default=0)


class RayTrain(System):
    """Ray Train with an elastic group of one or two workers; head, two nodes and the driver are
    processes.
    """

    name = "Ray Train"
    needs = "ray"
    has_one_node = False
    notice = 10.0  # it trains on until then, and starts again when that is over
    num_started = 0  # nodes, the head among them

    def launch(self) -> None:
        self.start()
        # First, so that it belongs to the head: the controller would die with any other node of
        # this machine.
        self.start_driver()
        self._wait_for("Connected to Ray cluster.", 1)
        self.add_node()
        self.add_node()

    def start(self) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        head = (
            "--head",
            f"--port={self.address.split(':')[1]}",
            "--include-dashboard=false",
            "--num-cpus=0",
        )
        self.others.append(self._node(*head))

    def add_node(self) -> None:
        self.nodes.append(self._node(f"--address={self.address}", "--num-cpus=1"))

    def drain_node(self, node: subprocess.Popen[bytes]) -> None:
        """Give Ray's notice of a preemption, and kill the node when its time is over."""
        self.nodes.remove(node)
        self.others.insert(0, node)
        words = [
            word
            for each in psutil.Process(node.pid).children(recursive=True)
            for word in each.cmdline()
        ]
        node_id = next(
            word.split("=")[1] for word in words if word.startswith(("--node-id=", "--node_id="))
        )
        command = [
            str(Path(sys.executable).with_name("ray")),
            "drain-node",
            "--address",
            self.address,
        ]
        command += [
            "--node-id",
            node_id,
            "--reason",
            "DRAIN_NODE_REASON_PREEMPTION",
            "--reason-message",
            "drained",
        ]
        command += ["--deadline-remaining-seconds", f"{self.notice:.0f}"]
        threading.Timer(self.notice, send_to_all, (node, signal.SIGKILL)).start()
        subprocess.run(command, check=True, stdout=self.log, stderr=self.log)

    def start_driver(self) -> None:
        store = ("--store", self.task.store) if self.task.store else ()
        command = (
            sys.executable,
            "-m",
            "benchmarks.recovery.drivers",
            "ray",
            "--address",
            self.address,
        )
        self.others.append(self.popen(*command, *self.task.options(), *store))

    def _node(self, *options: str) -> subprocess.Popen[bytes]:
        """Start the head or another node, and wait until it is up."""
        common = ("--block", "--disable-usage-stats", "--object-store-memory=80000000")
        ports = ("--min-worker-port=0", "--max-worker-port=0")
        command = shlex.join(
            (str(Path(sys.executable).with_name("ray")), "start", *options, *common, *ports)
        )
        # A node ends if its agents take more than 15 s to start, as on a machine in use: it is
        # started again.
        node = self.popen("sh", "-c", f"until {command}; do sleep 1; done")
        # Two nodes of one machine that start at the same time would choose the same names for their
        # sockets.
        self.num_started += 1
        self._wait_for("Ray runtime started.", self.num_started)
        return node

    def _wait_for(self, line: str, count: int) -> None:
        """Wait until the output has a line so many times, or the time is over."""
        log, deadline = self.task.directory / "output.log", time.monotonic() + START_TIMEOUT
        while log.read_text(errors="replace").count(line) < count and time.monotonic() < deadline:
            time.sleep(0.05)


SYSTEMS: dict[str, type[System]] = {"ours": Ours, "torchrun": Torchrun, "ray": RayTrain}


@contextlib.contextmanager
def running(kind: type[System], task: Task, on_one_node: bool) -> Iterator[System]:
    """Run a system for the length of the block; nothing of it is left after that."""
    system = kind(task)
    try:
        (system.launch_on_one_node if on_one_node else system.launch)()
        yield system
    finally:
        system.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        return True
    return False
