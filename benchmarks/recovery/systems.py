"""The systems that are compared, each as processes of this machine: its nodes, and the driver where
it has one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.counting import STEP_SECONDS_VARIABLE
from benchmarks.recovery.driver import PATIENCE
from benchmarks.recovery.script import MODEL_STATE
from benchmarks.recovery.workload import DIRECTORY, MAX_RESTARTS, STEP_SECONDS
from flyte_ddp.rehearsal.faults import Nodes, send_to_all

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Task:
    """The training that every system is given."""

    data: Path
    directory: Path  # directory of this run alone
    epochs: int
    store: str = ""  # URL for the checkpoints; "" is `directory`
    config: Mapping[str, Any] = field(default_factory=dict)  # additional config of our run

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
    has_store = True

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
        self.groups: list[int] = []  # process groups that were started here

    def launch(self) -> None:
        """Start two nodes and what else there is."""
        self.start()
        self.add_node()
        self.add_node()
        self.start_driver()

    def launch_on_one_node(self) -> None:
        """Start both ranks on one node, which is this machine."""
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
        # A node's first process may have ended before the rest of its group.
        for group in self.groups:
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
        command = (sys.executable, "-m", "benchmarks.recovery.driver", "--address", address)
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


SYSTEMS: dict[str, type[System]] = {"ours": Ours, "torchrun": Torchrun}


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
