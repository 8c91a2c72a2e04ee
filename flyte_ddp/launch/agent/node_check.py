"""The agent's part of a node check: measure this machine beside the imports of its ranks, and fetch
bytes from its neighbours. Decides nothing: the driver compares the nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flyte_ddp.launch.agent.probes import RateMeter
from flyte_ddp.launch.protocol.messages import Check, Checked
from flyte_ddp.process.devices import cpu_model
from flyte_ddp.process.threads import start_thread

PROBES = "flyte_ddp.launch.agent.probes"
MACHINE_SECONDS = 15.0  # until the process of the probes is killed; a busy machine needs some
FETCH_SECONDS = 1.5  # time to fetch bytes, from all neighbours together
FETCH_BYTES = 64 << 20
RECEIVED_BYTES = 1 << 18
# seconds for the sender's count of lost bytes, which may itself be lost several times
LOSS_SECONDS = 2.0
LOSS = struct.Struct("d")
# `tcpi_bytes_sent` and `tcpi_bytes_retrans` of Linux's `struct tcp_info`, since 4.19
TCP_INFO = struct.Struct("200x2Q")
SERVE_SECONDS = 120.0  # without a caller, after which this node serves no more bytes
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@dataclass(eq=False)
class NodeProbes:
    """The probes of this machine in one attempt."""

    directory: Path  # a directory on the disk that is measured
    index: int  # position of this node among the nodes
    host: str  # a host that this node reaches as it reaches the other nodes
    send: Callable[[Any], None]
    _address: tuple[str, int] = field(default=("", 0))

    def begin(self, check: Check) -> None:
        """Measure what is asked for in a thread, which sends the rates."""
        start_thread("node check", self._answer, check)

    def _answer(self, check: Check) -> None:
        rates: dict[str, float] = {}
        links: dict[int, float] = {}
        losses: dict[int, float] = {}
        problems: list[str] = []
        neighbours: set[int] = set()
        count = len(check.addresses)
        if count:
            neighbours = {(self.index + step) % count for step in (-1, 1)} - {self.index}
        try:
            if check.is_machine:
                rates, problems = measure_machine(self.directory)
            if not self._address[1]:
                self._address = start_serving(self.host)
        except Exception as error:  # a failed measurement must not end the ranks
            problems.append(_in_one_line(error))
        for each in neighbours:
            share = FETCH_BYTES // len(neighbours), FETCH_SECONDS / len(neighbours)
            try:
                links[each], loss = fetch(check.addresses[each], *share)
                if loss is not None:
                    losses[each] = loss
            except Exception as error:  # nor may this one
                problems.append(_in_one_line(error))
        answer = Checked(check.number, rates, links, problems, self._address, cpu_model(), losses)
        self.send(answer)


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def measure_machine(
    directory: Path, max_seconds: float = MACHINE_SECONDS
) -> tuple[dict[str, float], list[str]]:
    """Return the rates of this machine by the names of the probes, and the problems of probes. A
    probe that was cut off has the rate of its last report.
    """
    rates: dict[str, float] = {}
    problems: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-m", PROBES, str(directory)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            **ONE_THREAD,
            "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
            "PYTHONSAFEPATH": "1",
        },
    )
    assert process.stdout is not None  # because of PIPE

    def read() -> None:
        for line in process.stdout or ():
            name, rate, problem = json.loads(line)
            if problem:
                problems.append(f"{name}: {problem}")
            else:
                rates[name] = max(rate, rates.get(name, 0.0))

    reader = start_thread("probes", read)
    reader.join(max_seconds)
    process.kill()
    # A process that hangs in the kernel ends later.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
    if not rates and not problems:
        problems.append(f"machine: no rate within {max_seconds:g} s")
    return dict(rates), list(dict.fromkeys(problems))


def start_serving(host: str) -> tuple[str, int]:
    """Serve bytes to neighbours from threads, for as long as any come. Return the address at which
    they reach this node, which reaches `host` from there.
    """
    own, family = own_address(host), socket.AF_INET
    if ":" in own:
        family = socket.AF_INET6
    server = socket.create_server((own, 0), family=family)
    server.settimeout(SERVE_SECONDS)

    def serve() -> None:
        with contextlib.suppress(OSError), server:
            while True:
                connection, _ = server.accept()
                start_thread("serve bytes", send_bytes, connection)

    start_thread("serve", serve)
    address = server.getsockname()
    return str(address[0]), int(address[1])


def send_bytes(connection: socket.socket) -> None:
    """Send bytes until the neighbour has enough, and then the share that was lost on the way."""
    block, count = b"\xff" * (1 << 20), 0  # no eight of these bytes are a share
    connection.settimeout(FETCH_SECONDS)
    # An error: the neighbour waits no longer, or the kernel does not count, as on macOS.
    with contextlib.suppress(OSError, struct.error, AttributeError), connection:
        # A neighbour has enough after `FETCH_BYTES` at most, and says so.
        while count < 2 * FETCH_BYTES and not select.select([connection], [], [], 0)[0]:
            connection.sendall(block)
            count += len(block)
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO.size)
        num_bytes, num_repeated = TCP_INFO.unpack(info)
        connection.sendall(LOSS.pack(num_repeated / max(1, num_bytes)))


def fetch(
    address: tuple[str, int], max_bytes: int, max_seconds: float
) -> tuple[float, float | None]:
    """Return the bytes per second that arrive from a neighbour, 0 if none arrives in time, and the
    share of the bytes that were sent again; None if the neighbour does not report it in time.

    Raises:
        OSError: the neighbour cannot be reached.
    """
    meter, end = RateMeter(), b""
    ends_at = time.monotonic() + max_seconds
    # A loss of packets delays a connection by seconds.
    with (
        contextlib.suppress(TimeoutError),
        socket.create_connection(address, timeout=max_seconds) as connection,
    ):
        with contextlib.suppress(TimeoutError):
            while meter.amount < max_bytes:
                received = _receive(connection, ends_at)
                if not received:
                    break
                meter.add(len(received))
        connection.shutdown(socket.SHUT_WR)  # this is enough
        ends_at = time.monotonic() + LOSS_SECONDS
        while received := _receive(connection, ends_at):
            end = (end + received)[-LOSS.size :]
        if len(end) == LOSS.size:
            (loss,) = LOSS.unpack(end)
            if loss <= 1:
                return meter.rate, loss
    return meter.rate, None


def _receive(connection: socket.socket, ends_at: float) -> bytes:
    """Return the bytes that arrive next, none after the last. Raises TimeoutError at `ends_at`."""
    seconds = ends_at - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    connection.settimeout(seconds)
    return connection.recv(RECEIVED_BYTES)


def own_address(host: str) -> str:
    """Return the address of this machine by which it reaches `host`, which may be this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing: it only asks the routing table
        return str(probe.getsockname()[0])
