"""How often the node check names a slow node of three, and how often a good one.

`python -m benchmarks.node_check --starts 20` runs as root on Linux with cgroups of version 1, `ip`
and `tc`. Three nodes are threads of this process: each has the real probes, a network namespace and
cgroups of its own, and one is slowed down by the kernel. There are no ranks and no cluster. With
`--load 8` as many busy processes run beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import queue
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flyte_ddp.launch.agent.node_check import NodeProbes
from flyte_ddp.launch.control.node_check import NodeCheck
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.control.reference import Reference
from flyte_ddp.launch.protocol.messages import Check

NUM_NODES, SLOW = 3, 1
CLONE_NEWNET = 0x40000000
CGROUPS = Path("/sys/fs/cgroup")
BRIDGE, NETWORK = "nc-bridge", "10.213.7"


class Gang(Nodes):
    """Three nodes in threads of this process."""

    def __init__(self, directory: Path) -> None:
        self.nodes = [Node(index, f"node {index}") for index in range(NUM_NODES)]
        self.reference = Reference("", "")
        self.answers: queue.Queue[tuple[Node, Any]] = queue.Queue()
        self.probes = []
        for node in self.nodes:
            host = f"{NETWORK}.{1 + (node.index + 1) % NUM_NODES}"  # a neighbour
            send = functools.partial(self._take, node)
            self.probes.append(NodeProbes(directory, node.index, host, send))

    def _take(self, node: Node, answer: Any) -> None:
        self.answers.put((node, answer))

    def send(self, command: Any) -> None:
        if not isinstance(command, Check):
            return
        for index, each in enumerate(self.probes):
            thread = threading.Thread(target=begin_inside, args=(index, each, command))
            thread.start()
            thread.join()

    def replace_leaving(self) -> None:
        """There are no others."""


def begin_inside(index: int, probes: NodeProbes, command: Any) -> None:
    """Begin a check in the namespace and the cgroups of a node, which its threads inherit."""
    with open(f"/run/netns/nc-{index}") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    for controller in ("cpu", "blkio"):
        (CGROUPS / controller / f"nc-{index}" / "tasks").write_text(str(threading.get_native_id()))
    probes.begin(command)


def call(command: str) -> None:
    subprocess.run(command.split(), check=True)


@contextlib.contextmanager
def made_nodes() -> Iterator[None]:
    """A network namespace and cgroups for each node."""
    _remove_nodes()  # a run that was killed leaves some
    call(f"ip link add {BRIDGE} type bridge")
    call(f"ip link set {BRIDGE} up")
    for index in range(NUM_NODES):
        call(f"ip netns add nc-{index}")
        call(f"ip link add nc-v{index} type veth peer name eth0 netns nc-{index}")
        call(f"ip link set nc-v{index} master {BRIDGE} up")
        call(f"ip -n nc-{index} addr add {NETWORK}.{1 + index}/24 dev eth0")
        call(f"ip -n nc-{index} link set eth0 up")
        for controller in ("cpu", "blkio"):
            (CGROUPS / controller / f"nc-{index}").mkdir(exist_ok=True)
    try:
        yield
    finally:
        _remove_nodes()


def _remove_nodes() -> None:
    commands = [f"ip link del {BRIDGE}"]
    for index in range(NUM_NODES):
        commands += [f"ip netns del nc-{index}", f"ip link del nc-v{index}"]
    for command in commands:
        subprocess.run(command.split(), stderr=subprocess.DEVNULL)
    for index in range(NUM_NODES):
        for controller in ("cpu", "blkio"):
            group = CGROUPS / controller / f"nc-{index}"
            with contextlib.suppress(OSError):
                for thread in (group / "tasks").read_text().split():  # still serves bytes
                    with contextlib.suppress(OSError):  # the thread has just ended
                        (CGROUPS / controller / "tasks").write_text(thread)
                group.rmdir()


@contextlib.contextmanager
def with_half_the_cores(node: int = SLOW) -> Iterator[None]:
    file = CGROUPS / "cpu" / f"nc-{node}" / "cpu.cfs_quota_us"
    file.write_text(str(50_000 * (os.cpu_count() or 1)))
    yield
    file.write_text("-1")


@contextlib.contextmanager
def with_slow_disk(node: int = SLOW) -> Iterator[None]:
    file = CGROUPS / "blkio" / f"nc-{node}" / "blkio.throttle.write_bps_device"
    device = os.stat(tempfile.gettempdir()).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    file.write_text(f"{name} 5000000")
    yield
    file.write_text(f"{name} 0")


@contextlib.contextmanager
def with_slow_sending(node: int = SLOW) -> Iterator[None]:
    shape = "root tbf rate 20mbit burst 32kbit latency 400ms"
    call(f"ip netns exec nc-{node} tc qdisc add dev eth0 {shape}")
    yield
    call(f"ip netns exec nc-{node} tc qdisc del dev eth0 root")


@contextlib.contextmanager
def with_slow_receiving(node: int = SLOW) -> Iterator[None]:
    call(f"tc qdisc add dev nc-v{node} root tbf rate 20mbit burst 32kbit latency 400ms")
    yield
    call(f"tc qdisc del dev nc-v{node} root")


FAULTS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {
    "none": contextlib.nullcontext,
    "cores": with_half_the_cores,
    "disk": with_slow_disk,
    "sending": with_slow_sending,
    "receiving": with_slow_receiving,
}


def check_once(directory: Path) -> tuple[str, float, float]:
    """Return the slow nodes and probes, the seconds, and the CPU's seconds for each node."""
    gang, found = Gang(directory), []
    check = NodeCheck(gang, found.append)
    begun, used = time.monotonic(), _used()
    while not check.is_over:
        check.look()
        with contextlib.suppress(queue.Empty):
            check.take(*gang.answers.get(timeout=0.02))
    time.sleep(0.2)  # the processes of the probes have been waited for
    named = "; ".join(f"{each.node} {each.probe}" for event in found for each in event.nodes)
    return named, time.monotonic() - begun - 0.2, (_used() - used) / NUM_NODES


def _used() -> float:
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in spent)


@contextlib.contextmanager
def load(count: int) -> Iterator[None]:
    """Keep processes of ours busy beside the block."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", nargs="*", default=list(FAULTS), help=", ".join(FAULTS))
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--load", type=int, default=0, help="busy processes beside it")
    arguments = parser.parse_args()
    with (
        load(arguments.load),
        tempfile.TemporaryDirectory() as directory,
        made_nodes(),
    ):
        for fault in arguments.faults:
            with FAULTS[fault]():
                seen = [check_once(Path(directory)) for _ in range(arguments.starts)]
            named = [each[0] for each in seen]
            is_right = [(f"{SLOW} " in each) == (fault != "none") for each in named]
            print(
                f"{fault}: {sum(is_right)} of {len(seen)} right; "
                f"{statistics.median(each[1] for each in seen):.1f} s, "
                f"{statistics.median(each[2] for each in seen):.2f} s of CPU a node, at most "
                f"{max(each[2] for each in seen):.2f}; {sorted(set(named))}"
            )


if __name__ == "__main__":
    main()
