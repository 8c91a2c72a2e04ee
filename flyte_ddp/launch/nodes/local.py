"""The driver's own machine as the place of a run. Its only node runs the ranks as children of the
driver's process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyte_ddp.checkpoints.memory import NodeMemory
from flyte_ddp.config.waits import ANSWER_TIMEOUT, POLL_INTERVAL
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.agent.link import Link
from flyte_ddp.launch.agent.supervisor import supervise
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.protocol.messages import End, Outcome
from flyte_ddp.launch.protocol.programs import Job, stop_grace
from flyte_ddp.launch.protocol.ranks import NodeRanks
from flyte_ddp.process.devices import (
    check_requested_gpus,
    default_num_processes,
    num_cores,
    num_gpus,
)
from flyte_ddp.process.temporary_directories import take_files, temporary_directory
from flyte_ddp.process.threads import call_in_background

if TYPE_CHECKING:
    from flyte_ddp.launch.control.driver import Run
    from flyte_ddp.launch.control.policy import AttemptEnd

LOOPBACK = "127.0.0.1"


@dataclass(eq=False)
class LocalPlace:
    """The ranks of a run on this machine."""

    num_processes: int = 0  # number of ranks; 0: one per GPU, or two on a machine without GPUs
    # How often all ranks start again, without a newer state in between, after a rank was killed,
    # hung, or failed in a way that another attempt may not repeat.
    max_restarts: int = 0
    port: int = 0  # port where the ranks meet; 0 for any free port
    larger_memory = (
        "memory: expected a larger limit of the task (training.memory_gib in settings.toml)"
    )
    is_cluster = False
    memory: NodeMemory = field(default_factory=NodeMemory)
    results: str = ""  # directory for files that ranks submit
    notice_seconds: float = field(default_factory=stop_grace)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __post_init__(self) -> None:
        self.num_processes = self.num_processes or default_num_processes()

    def check(self, job: Job) -> None:
        num_processes = self.num_processes
        if num_processes < 1:
            raise ConfigError(
                f"num_processes: expected a whole number of at least 1, got {num_processes}"
            )
        if multiprocessing.current_process().daemon:
            raise ConfigError(
                "flyte_ddp.run: expected a process that may have children, got a daemonic one, as "
                "workers of Dask and of pools are: set DASK_DISTRIBUTED__WORKER__DAEMON=False "
                "before they start, or call it from the client"
            )
        check_requested_gpus()
        gpus = num_gpus()
        if gpus and num_processes > gpus:
            raise ConfigError(
                f"num_processes: expected at most {gpus}, one per GPU, got {num_processes}"
            )
        job.program.check(num_processes, gpus > 0)
        job.program.check_compiler()

    def gather(self, run: Run, previous: AttemptEnd | None) -> LocalNodes:
        """Return this machine at once."""
        if run.results and not self.results:
            self.results = self._stack.enter_context(temporary_directory("results-"))
        return LocalNodes(self, run)

    def close(self, run: Run) -> None:
        """Free the memory in which attempts may have left a state."""
        self.memory.close()
        self._stack.close()


@dataclass(eq=False)
class LocalNodes(Nodes):
    """The driver's machine in one attempt. It never announces that it leaves, because its driver is
    stopped instead. A thread supervises its ranks.
    """

    place: LocalPlace
    run: Run
    nodes: list[Node] = field(default_factory=lambda: [Node()])
    _arrivals: queue.SimpleQueue[Any] = field(default_factory=queue.SimpleQueue)
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _agent: Future[None] | None = None

    def __post_init__(self) -> None:
        self.world_size = self.place.num_processes
        self._link = Link(self._arrivals.put)

    def start(self, job: Job, num_restarts: int) -> None:
        place = self.place
        listener = self._stack.enter_context(listening_socket(place.port))
        interface = "lo"
        if sys.platform == "darwin":
            interface = "lo0"
        ranks = NodeRanks(
            first_rank=0,
            num_ranks=place.num_processes,
            world_size=place.num_processes,
            host=LOOPBACK,
            port=listener.getsockname()[1],
            interface=interface,
            use_gpus=num_gpus() > 0,
            num_threads=max(1, num_cores() // place.num_processes),
            run_id=self.run.name,
            num_restarts=num_restarts,
            max_restarts=place.max_restarts,
            results=place.results,
        )
        self._agent = call_in_background(
            lambda: supervise(job, ranks, listener, self.run.prepared, self._link, place.memory)
        )

    def send(self, command: Any) -> None:
        self._link.obey(command)
        if self._agent is None:  # the ranks were never started
            self.nodes[0].end = End(Outcome.FAILED)

    def messages(self) -> Sequence[tuple[Node, Any]]:
        found: list[Any] = [self._link.beat]
        with contextlib.suppress(queue.Empty):
            found.append(self._arrivals.get(timeout=POLL_INTERVAL))
            while True:
                found.append(self._arrivals.get_nowait())
        return [(self.nodes[0], message) for message in found]

    def take_results(self, node: Node, names: Sequence[str]) -> list[bytes | None]:
        return take_files(self.place.results, names)

    def close(self) -> None:
        if self._agent:
            self._agent.result()  # the ranks are gone
        self._link.close()
        self._stack.close()


def listening_socket(port: int) -> socket.socket:
    """Return a listening socket on `port` of this machine; 0 for a free one.

    It is bound before its port is known, and passed to rank 0 open, so no other process can take
    the port in between.

    Raises:
        ConfigError: another process has the port, or the ranks of this machine cannot reach it.
    """
    try:
        with socket.create_server((LOOPBACK, 0)) as probe:
            socket.create_connection(probe.getsockname(), ANSWER_TIMEOUT).close()
    except OSError as error:
        raise ConfigError(
            f"{LOOPBACK}: expected a loopback interface that is up (ip link set lo up), by which "
            f"the ranks of this machine meet: {error}"
        ) from None
    try:
        return socket.create_server((LOOPBACK, port), backlog=1024)
    except OSError as error:
        if not port:
            raise
        raise ConfigError(
            f"master_port: expected a port that is free, or 0, got {port}: {error}"
        ) from None
