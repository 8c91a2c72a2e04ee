"""One node's supervisor: a process that a Dask worker starts, and that runs the ranks of its
machine.

It runs one attempt after another, so that the ranks of a restart find the server from which they
are forked. Its jobs and the driver's commands come through a pipe, and its messages leave through
another. What lies between it and the driver it does not know. When the commands cease, because the
driver, the scheduler, the network or the worker is gone, it kills its ranks: nothing trains
unsupervised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import queue
import socket
import sys
import tempfile
import threading
import time
import traceback
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

from flyte_ddp import events
from flyte_ddp.launch.dask.messages import (
    BEAT_INTERVAL,
    END_OF_ATTEMPT,
    JOB,
    PREPARE,
    PREPARED,
    NodeJob,
    encode,
)
from flyte_ddp.launch.node import KILL_GRACE, Link
from flyte_ddp.launch.process.memory import NodeMemory
from flyte_ddp.launch.rank_start import start_server, wait_for_server
from flyte_ddp.launch.supervisor import supervise
from flyte_ddp.observers.streams import open_standard_streams
from flyte_ddp.storage import adopt_storage_environment, fetch_file

# seconds without an attempt, as after the driver's death, after which this process ends
IDLE_TIMEOUT = 300.0


class DriverLink(Link):
    """One attempt's link to a driver on another machine: numbered messages go out, and heartbeats.

    Args:
        driver_timeout: seconds without a command after which the driver counts as gone.
    """

    def __init__(self, messages: BinaryIO, driver_timeout: float) -> None:
        super().__init__(self._write)
        self.is_alone = False  # left alone: no other attempt will come
        self._messages = messages
        self._driver_timeout = driver_timeout
        self._last_command_at = time.monotonic()
        self._num_sent = 0
        threading.Thread(target=self._beat_on, name="beat", daemon=True).start()

    def obey(self, text: str) -> None:
        self._last_command_at = time.monotonic()
        super().obey(text)

    def kill_ranks(self, reason: str) -> None:
        """Request that the ranks are killed, wait for the end of the attempt, and exit this process
        if it does not come.
        """
        super().kill_ranks(reason)
        if not self.is_over.wait(KILL_GRACE):
            os._exit(1)  # the ranks kill themselves when their pipe to this process ends

    def _write(self, message: dict[str, Any]) -> None:
        if message["kind"] != "beat":  # those only count as heartbeats
            message["number"] = self._num_sent
            self._num_sent += 1
        if message["kind"] == "event":
            message["event"] = events.to_dict(message["event"])
        lines = [encode(message), *([END_OF_ATTEMPT] if message["kind"] == "end" else [])]
        # The other end may be gone. The end of the other pipe reports that.
        with contextlib.suppress(BrokenPipeError):
            self._messages.write("".join(f"{line}\n" for line in lines).encode())
            self._messages.flush()

    def _beat_on(self) -> None:
        self.send_beat()
        while not self.is_over.wait(BEAT_INTERVAL):
            self.send_beat()
            silence = time.monotonic() - self._last_command_at
            if silence > self._driver_timeout:
                self.is_alone = True
                self.kill_ranks(f"the driver has been silent for {silence:.0f} s")


def main() -> None:
    """Run the ranks of this node, attempt after attempt, and report last how each of them ended.

    Arguments of the process: the directory of the code, one for what later attempts may want again,
    and the file descriptors of the two pipes and of a socket. Where the ranks of a gang meet, the
    rendezvous' listening socket comes through that before the job does.
    """
    open_standard_streams()
    _, _, directory, commands_in, messages_out, listeners_in = sys.argv
    commands, messages = os.fdopen(int(commands_in), "rb"), os.fdopen(int(messages_out), "wb")
    listeners = socket.socket(fileno=int(listeners_in))
    own_environment = dict(os.environ)
    attempts: queue.SimpleQueue[tuple[NodeJob, DriverLink]] = queue.SimpleQueue()
    memory = NodeMemory()
    threading.Thread(
        target=_listen, args=(commands, messages, attempts), name="commands", daemon=True
    ).start()
    idle_timeout = IDLE_TIMEOUT
    with contextlib.suppress(queue.Empty):
        while True:
            node_job, link = attempts.get(timeout=idle_timeout)
            idle_timeout = IDLE_TIMEOUT + node_job.start_timeout
            os.environ.clear()
            os.environ.update(own_environment | node_job.environment)
            adopt_storage_environment(node_job.storage)  # what the worker has of its own wins
            listener = None
            if node_job.ranks.first_rank == 0:
                _, (descriptor,), _, _ = socket.recv_fds(listeners, 1, 1)
                listener = socket.socket(fileno=descriptor)
            with listener or contextlib.nullcontext():
                _run_attempt(node_job, link, listener, Path(directory), memory)
            if link.is_alone:
                break
    os._exit(0)  # not to wait for the thread that reads commands, which would wait for the driver


def _listen(
    commands: BinaryIO,
    messages: BinaryIO,
    attempts: queue.SimpleQueue[tuple[NodeJob, DriverLink]],
) -> None:
    """Start an attempt for each job, and pass the commands that follow it on. Have the server of
    ranks started.
    """
    link = None
    try:
        for line in commands:
            text = line.decode().rstrip("\n")
            if text.startswith(JOB):
                node_job = NodeJob.from_line(text)
                link = DriverLink(messages, node_job.driver_timeout)
                attempts.put((node_job, link))
            elif text.startswith(f"{PREPARE} "):
                start_server(text.split()[1:])
                threading.Thread(
                    target=_report_server, args=(messages,), name="prepare", daemon=True
                ).start()
            elif link:
                link.obey(text)
    except Exception:
        traceback.print_exc()  # into the worker's log
    if link:
        link.kill_ranks("the worker is gone")
    os._exit(1)


def _report_server(messages: BinaryIO) -> None:
    """Tell the worker when ranks can be forked at once."""
    wait_for_server()
    with contextlib.suppress(BrokenPipeError):
        messages.write(f"{PREPARED}\n".encode())
        messages.flush()


def _run_attempt(
    node_job: NodeJob,
    link: DriverLink,
    listener: socket.socket | None,
    directory: Path,
    memory: NodeMemory,
) -> None:
    """Run the ranks of this node to their end."""

    def relay(line: str) -> None:
        if node_job.prints_lines:
            print(line, flush=True)  # noqa: T201 - into the worker's log
        link.relay(line)

    needs_data = node_job.data or node_job.data_archive
    data = functools.partial(local_data, node_job, directory) if needs_data else None
    try:
        ranks = dataclasses.replace(node_job.ranks, interface=interface_to(node_job.ranks.host))
    except OSError as error:
        link.send(
            "end",
            outcome="broken",
            message=f"{type(error).__name__}: {error}",
            cause=type(error).__name__,
        )
        return
    supervise(node_job.job, ranks, listener, data, link, memory, relay)


def interface_to(host: str) -> str:
    """Return the network interface by which this machine reaches `host`, which may be itself, for
    gloo and NCCL.
    """
    import psutil  # type: ignore[import-untyped]

    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it only asks the routing table
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            return str(name)
    raise OSError(
        f"no network interface of this machine has the address {own}, by which it reaches {host}"
    )


def local_data(node_job: NodeJob, directory: Path) -> str:
    """Return the directory of the prepared data on this machine, fetched and unpacked there if need
    be.
    """
    if node_job.data:
        return node_job.data
    unpacked = directory / node_job.data_name
    if not unpacked.exists():
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            archive = os.path.join(scratch, "data.zip")
            fetch_file(node_job.data_archive, archive, "data", node_job.job.program.store_timeout)
            with zipfile.ZipFile(archive) as contents:
                contents.extractall(os.path.join(scratch, "data"))
            try:
                os.rename(os.path.join(scratch, "data"), unpacked)
            except OSError:  # an earlier attempt's thread was still at it, and was first
                if not unpacked.exists():
                    raise
    return str(unpacked)
