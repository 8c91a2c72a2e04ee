"""The agent of a machine as a process, which a Dask worker starts.

It runs one attempt after another, so that the ranks of a restart find the server from which they
are forked. Its jobs, the driver's commands and its own messages pass through a connection to the
worker. The agent does not know the path from the worker to the driver. The commands cease when the
driver, the scheduler, the network or the worker is gone. The agent then kills its ranks: nothing
trains unsupervised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import queue
import socket
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

from flyte_ddp.checkpoints.memory import NodeMemory
from flyte_ddp.cluster.config import KubernetesConfig
from flyte_ddp.config.waits import BEAT_INTERVAL
from flyte_ddp.errors import NodeLost
from flyte_ddp.launch.agent.link import Link
from flyte_ddp.launch.agent.node_check import NodeProbes, own_address
from flyte_ddp.launch.agent.rank_start import start_rank, start_server
from flyte_ddp.launch.agent.supervisor import supervise
from flyte_ddp.launch.protocol.messages import (
    KILL_GRACE,
    End,
    Failed,
    NodeJob,
    Outcome,
)
from flyte_ddp.process.standard_streams import open_standard_streams
from flyte_ddp.process.threads import call_in_background, start_thread
from flyte_ddp.storage import adopt_storage_environment, fetch_file, permit

# seconds without an attempt until this process ends, for example after the driver's death
IDLE_TIMEOUT = KubernetesConfig.idle_timeout


class DriverLink(Link):
    """One attempt's link to a driver on another machine, with heartbeats.

    Args:
        connection: takes the pickled messages, and an empty message after the last one.
        driver_timeout: seconds without a command after which the driver counts as gone.
        prints_lines: print the ranks' lines into the worker's log as well.
    """

    def __init__(
        self, connection: Connection, driver_timeout: float, prints_lines: bool = False
    ) -> None:
        super().__init__(self._write)
        self._prints_lines = prints_lines
        self._connection = connection
        self._driver_timeout = driver_timeout
        self._last_command_at = time.monotonic()
        start_thread("beat", self._beat_on)

    def obey(self, command: Any) -> None:
        self._last_command_at = time.monotonic()
        super().obey(command)

    def kill_ranks(self, reason: str) -> None:
        """Request that the ranks are killed, and wait for the end of the attempt. If it does not
        end, exit this process.
        """
        super().kill_ranks(reason)
        if not self.is_over.wait(KILL_GRACE):
            os._exit(1)  # the ranks kill themselves when their pipe to this process ends

    def relay(self, line: str) -> None:
        if self._prints_lines:
            print(line, flush=True)  # noqa: T201
        super().relay(line)

    def _write(self, message: Any) -> None:
        # The worker may be gone, which ends the thread that reads its commands.
        with contextlib.suppress(OSError):
            if isinstance(message, End):
                self._connection.send_bytes(b"")  # the next message is the last one
            self._connection.send_bytes(pickle.dumps(message))

    def _beat_on(self) -> None:
        self.send(self.beat)
        while not self.is_over.wait(BEAT_INTERVAL):
            self.send(self.beat)
            silence = time.monotonic() - self._last_command_at
            if silence > self._driver_timeout:
                self.kill_ranks(f"the driver has been silent for {silence:.0f} s")
                os._exit(1)  # no other attempt will come


def main() -> None:
    """Run the ranks of this node, attempt after attempt, and report last how each of them ended.

    Arguments of the process: the directory of the code, one for what later attempts may want again,
    and the file descriptor of a connection to the worker, from which come pickled jobs and
    commands. Where the ranks of a gang meet, the rendezvous' listening socket follows the job.
    """
    open_standard_streams()
    directory, connection = Path(sys.argv[3]), Connection(int(sys.argv[4]))
    own_environment = dict(os.environ)
    attempts: queue.SimpleQueue[tuple[NodeJob, DriverLink | None, socket.socket | None]] = (
        queue.SimpleQueue()
    )
    memory = NodeMemory()
    start_thread("commands", _listen, connection, directory, attempts.put)
    idle_timeout = IDLE_TIMEOUT
    with contextlib.suppress(queue.Empty):
        while True:
            node_job, link, listener = attempts.get(timeout=idle_timeout)
            idle_timeout = IDLE_TIMEOUT + node_job.start_timeout
            os.environ.clear()
            os.environ.update(own_environment | node_job.environment)
            adopt_storage_environment(node_job.storage)  # the worker's own values win
            permit(str(directory))
            if link is None:
                prepare(node_job, directory)
                connection.send_bytes(b"prepared")
                continue
            with listener or contextlib.nullcontext():
                _run_attempt(node_job, link, listener, directory, memory)
    os._exit(0)  # a normal exit would wait for the thread that reads commands


def _listen(
    connection: Connection,
    directory: Path,
    begin: Callable[[tuple[NodeJob, DriverLink | None, socket.socket | None]], None],
) -> None:
    """Begin an attempt for each job, and pass on the commands that follow it."""
    link = None
    try:
        while True:
            message = pickle.loads(connection.recv_bytes())
            if isinstance(message, NodeJob) and message.is_ahead:
                begin((message, None, None))
            elif isinstance(message, NodeJob):
                listener = None
                if message.ranks.first_rank == 0:
                    listener = socket.socket(fileno=recv_handle(connection))
                link = DriverLink(connection, message.driver_timeout, message.prints_lines)
                ranks = message.ranks
                probes = NodeProbes(directory, ranks.node_rank, ranks.host, link.send)
                link.check = probes.begin
                begin((message, link, listener))
            elif link:
                link.obey(message)
    except (EOFError, ConnectionError):
        pass
    except Exception:
        traceback.print_exc()  # the text goes into the worker's log
    if link:
        link.kill_ranks("the worker is gone")
    os._exit(1)


def prepare(node_job: NodeJob, directory: Path) -> None:
    """Import and fetch what the ranks of this job need. An error is ignored here, because their
    attempt will report it.
    """
    program = node_job.job.program
    if program.slow_imports and start_server(program.slow_imports):
        # The rank is forked once its server has imported all modules.
        start_rank(program, os.getpid, (), "prepared").join()
    if node_job.data_archive and not node_job.data:
        with contextlib.suppress(Exception):
            unpack_data(node_job.data_archive, directory, program.needs.store_timeout)


def _run_attempt(
    node_job: NodeJob,
    link: DriverLink,
    listener: socket.socket | None,
    directory: Path,
    memory: NodeMemory,
) -> None:
    """Run the ranks of this node to their end."""
    archive, timeout = node_job.data_archive, node_job.job.program.needs.store_timeout
    prepared = None
    if node_job.data or archive:
        prepared = call_in_background(
            lambda: node_job.data or unpack_data(archive, directory, timeout)
        )
    try:
        ranks = node_job.ranks
        results = ""
        if ranks.results:
            results = str(directory / ranks.results)
        ranks = dataclasses.replace(ranks, interface=interface_to(ranks.host), results=results)
    except OSError as error:
        name = type(error).__name__
        link.send(Failed(NodeLost(f"{name}: {error}", cause=name)))
        link.send(End(Outcome.FAILED))
        return
    supervise(node_job.job, ranks, listener, prepared, link, memory)


def interface_to(host: str) -> str:
    """Return the network interface by which this machine reaches `host`, for gloo and NCCL. `host`
    may be this machine.
    """
    import psutil  # type: ignore[import-untyped]

    own = own_address(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return str(name)
    raise OSError(
        f"no network interface of this machine has the address {own}, by which it reaches {host}"
    )


def unpack_data(url: str, directory: Path, timeout: float) -> str:
    """Fetch the archive of the prepared data into `directory`, once, and return the directory."""
    unpacked = directory / os.path.basename(url).removesuffix(".zip")
    if not unpacked.exists():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            archive = os.path.join(scratch, "data.zip")
            fetch_file(url, archive, "data", timeout)
            with zipfile.ZipFile(archive) as contents:
                contents.extractall(os.path.join(scratch, "data"))
            try:
                os.rename(os.path.join(scratch, "data"), unpacked)
            except OSError:  # another process or thread may have unpacked the data first
                if not unpacked.exists():
                    raise
    return str(unpacked)
