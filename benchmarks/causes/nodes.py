"""Three nodes on this machine, each a Dask worker with a network, cgroups and names of its own, and
an S3 server that refuses requests when it is told to.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed import Client

from benchmarks.node_check import BRIDGE, CGROUPS, NETWORK, NUM_NODES, call, made_nodes
from flyte_ddp.rehearsal.faults import children, send_to_all

HOST = f"{NETWORK}.100"  # address of the scheduler, the driver and the store
NAME = "store.test"
KEYS = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "k", "AWS_DEFAULT_REGION": "us-east-1"}
# in the node's network: cgroups, and a file of host names of its own
ENTER = """
for each in cpu blkio memory; do echo $$ > /sys/fs/cgroup/$each/nc-$0/tasks; done
mount --bind $1 /etc/hosts
shift
exec "$@"
"""


@contextlib.contextmanager
def made_networks() -> Iterator[None]:
    """The networks and cgroups of the nodes."""
    with made_nodes():
        call(f"ip addr add {HOST}/24 dev {BRIDGE}")
        groups = [CGROUPS / "memory" / f"nc-{index}" for index in range(NUM_NODES)]
        for index, group in enumerate(groups):
            call(f"ip -n nc-{index} link set lo up")
            group.mkdir(exist_ok=True)
        try:
            yield
        finally:
            for group in groups:
                with contextlib.suppress(OSError):
                    group.rmdir()


class Cluster:
    """A Dask scheduler, and a worker on each node."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self.directory = directory
        self.environment = {**os.environ, **environment}
        file = directory / "scheduler.json"
        options = ["--host", HOST, "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
        self.scheduler = self._start([], ["scheduler", *options], self.environment)
        while not (file.exists() and file.read_text().endswith("}")):
            time.sleep(0.1)
        self.address = str(json.loads(file.read_text())["address"])
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        for index in range(NUM_NODES):
            self.add(index)

    def hosts(self, index: int) -> Path:
        return self.directory / f"hosts-{index}"

    def add(self, index: int, **environment: str) -> None:
        """Start the worker of a node."""
        self.name_store(index)
        own = self.directory / f"node-{index}"
        own.mkdir(exist_ok=True)
        enter = ["nsenter", f"--net=/run/netns/nc-{index}", "unshare", "--mount", "sh", "-c", ENTER]
        options = ["--name", f"node-{index}", "--nthreads", "1", "--no-dashboard"]
        options += ["--memory-limit", "0", "--local-directory", str(own)]
        self.workers[index] = self._start(
            [*enter, str(index), str(self.hosts(index))],
            ["worker", self.address, *options],
            {**self.environment, "TMPDIR": str(own), "CAUSES_NODE": str(index), **environment},
        )

    def replace(self, index: int, **environment: str) -> None:
        """End the worker of a node, and start another one."""
        self._kill(self.workers[index])
        self.add(index, **environment)

    def wait(self) -> None:
        """Wait until all workers are there."""
        with Client(self.address) as client:
            names = {f"node-{index}" for index in self.workers}
            while True:
                found = client.scheduler_info(n_workers=-1)["workers"].values()
                if sorted(each["name"] for each in found) == sorted(names):
                    return
                time.sleep(0.2)

    def name_store(self, index: int, names: str = f"{HOST} {NAME}\n") -> None:
        """Write the host names that a node knows."""
        self.hosts(index).write_text(f"127.0.0.1 localhost\n{names}")

    def ranks(self, index: int) -> list[Any]:
        """Return the processes of the ranks of a node."""
        found = []
        for process in children(self.workers[index].pid, recursive=True):
            with contextlib.suppress(Exception):  # the process has just ended
                server = process.parent()
                above = " ".join(server.parent().cmdline())
                if "forkserver" in str(server.cmdline()) and "agent.main" in above:
                    found.append(process)
        return found

    def close(self) -> None:
        for process in [*self.workers.values(), self.scheduler]:
            self._kill(process)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        send_to_all(process, signal.SIGKILL)
        process.wait()

    def _start(
        self, before: list[str], command: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        log = open(self.directory / "dask.log", "ab")  # noqa: SIM115 - the process keeps it
        return subprocess.Popen(
            [*before, sys.executable, "-m", "dask", *command],
            env=environment,
            stdout=log,
            stderr=log,
        )


class Store:
    """An S3 server. `answer` is what every request gets: "", or the code of an error."""

    def __init__(self) -> None:
        # Before moto is imported: it would take the host's first part for a bucket.
        os.environ["S3_IGNORE_SUBDOMAIN_BUCKETNAME"] = "true"
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.server = ThreadedMotoServer(HOST, 0, verbose=False)
        self.server.start()
        assert self.server._server is not None
        self.app, self.server._server.app = self.server._server.app, self
        self.port = self.server.get_host_and_port()[1]
        self.answer = ""

    def __call__(self, environ: Any, start_response: Any) -> Any:
        if not self.answer:
            return self.app(environ, start_response)
        status = "503 Slow Down"
        if self.answer == "ExpiredToken":
            status = "400 Bad Request"
        body = f"<Error><Code>{self.answer}</Code><Message>no</Message></Error>".encode()
        headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        if environ["REQUEST_METHOD"] == "HEAD":
            return []
        return [body]


@contextlib.contextmanager
def with_lost_packets(index: int, share: float) -> Iterator[None]:
    rule = f"INPUT -i eth0 -m statistic --mode random --probability {share} -j DROP"
    call(f"ip netns exec nc-{index} iptables -A {rule}")
    try:
        yield
    finally:
        call(f"ip netns exec nc-{index} iptables -D {rule}")


@contextlib.contextmanager
def with_delay(index: int, seconds: float) -> Iterator[None]:
    """Let a process of ours carry the frames of a node, and hold each for a time."""
    off = ["tx", "off", "tso", "off", "gso", "off"]
    for each in range(NUM_NODES):  # no frames that only a kernel could cut
        subprocess.run(
            ["ip", "netns", "exec", f"nc-{each}", "ethtool", "-K", "eth0", *off],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    subprocess.run(
        ["ethtool", "-K", BRIDGE, *off],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    call("ip link add nc-d type veth peer name nc-e")
    call(f"ip link set nc-e master {BRIDGE} up")
    call("ip link set nc-d up promisc on")
    call(f"ip link set nc-v{index} nomaster promisc on")
    is_over = threading.Event()
    carrier = threading.Thread(target=_carry, args=(f"nc-v{index}", "nc-d", seconds, is_over))
    carrier.start()
    try:
        yield
    finally:
        is_over.set()
        carrier.join()
        call("ip link del nc-d")
        call(f"ip link set nc-v{index} master {BRIDGE} promisc off")


def _carry(one: str, other: str, seconds: float, is_over: threading.Event) -> None:
    sockets = []
    for name in (one, other):
        sockets.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)))
        sockets[-1].bind((name, 0))
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while not is_over.is_set():
        pause = 0.05
        if waiting:
            pause = max(0.0, min(pause, waiting[0][0] - time.monotonic()))
        for ready in select.select(sockets, [], [], pause)[0]:
            frame, origin = ready.recvfrom(65535)
            if origin[2] != socket.PACKET_OUTGOING:
                number += 1
                to = 1 - sockets.index(ready)
                heapq.heappush(waiting, (time.monotonic() + seconds, number, to, frame))
        while waiting and waiting[0][0] <= time.monotonic():
            *_, to, frame = heapq.heappop(waiting)
            with contextlib.suppress(OSError):
                sockets[to].send(frame)
    for each in sockets:
        each.close()
