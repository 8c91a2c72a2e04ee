"""How often the node check names a node with half the CPUs, 20 Mbit/s or a disk of 5 MB/s, and how
often a good one. `make drills` runs it, with `-s` for its table.

A start is a new run on the same pods: agents start, ranks import, nodes are measured.
FLYTE_DDP_DRILL_STARTS changes the number of starts.
"""

from __future__ import annotations

import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from distributed import Client

from benchmarks.node_check import load
from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import TrainingStopped
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask.calls import listed_workers
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.launch.run import FunctionCall
from tests.outside.kubernetes.conftest import Namespace, eventually
from tests.outside.kubernetes.test_training import limit_cores

NUM_STARTS = int(os.environ.get("FLYTE_DDP_DRILL_STARTS", "20"))
NUM_QUIET_STARTS = 5 * NUM_STARTS
LOAD = 8  # busy processes beside the starts without a slow node
NUM_NODES = 3  # three have a median
CORES = 0.4  # CPU limit of each worker
MAX_SECONDS = 120.0  # until the check of a start has certainly ended
BANDWIDTH, DISK_BYTES = "20mbit", 5_000_000
BLKIO = Path("/sys/fs/cgroup/blkio")


class End(logging.Handler):
    """Ends a run when the check logs that no node is slow."""

    def __init__(self, stop: StopRequest) -> None:
        super().__init__()
        self.stop = stop

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith("none of "):
            self.stop.set("SIGTERM")


class Verdict(events.Listener):
    """Ends the run when nodes are named, and knows them."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop, self.end = stop, End(stop)
        self.named: list[events.SlowNode] = []

    def handle(self, event: events.Event) -> None:
        if isinstance(event, events.NodesFoundSlow):
            self.named += event.nodes
            self.stop.set("SIGTERM")


def start_once(client: Client, config: ClusterConfig) -> list[events.SlowNode]:
    """Start ranks, and return the nodes that are named."""
    stop = StopRequest()
    verdict = Verdict(stop)
    log = logging.getLogger("flyte_ddp.launch.control.node_check")
    log.setLevel(logging.INFO)
    log.addHandler(verdict.end)
    program = Program("sleep", cloudpickle.dumps(FunctionCall(time.sleep, (MAX_SECONDS,))), ())
    job, place = Job(program, "", time.time()), DaskPlace(client, config)
    try:
        driver.run(job, place, None, [verdict], stop=stop)
    except TrainingStopped:
        return verdict.named
    finally:
        log.removeHandler(verdict.end)
    raise AssertionError("the check did not end")


def count(client: Client, config: ClusterConfig, num_starts: int) -> list[str]:
    """Return the nodes and probes that were named, a line for each start."""
    lines = []
    for _ in range(num_starts):
        named = start_once(client, config)
        lines.append("; ".join(f"{each.label.split(' at ')[0]} {each.probe}" for each in named))
    return lines


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """The cluster stays from one test to the next."""


@pytest.fixture(scope="module")
def nodes(namespace: Namespace) -> Iterator[tuple[Client, ClusterConfig]]:
    """A cluster of small pods that is there for all starts."""
    config = namespace.config(num_nodes=NUM_NODES, worker_cpus=CORES, scheduler_cpus=0.2)
    with open_cluster(config, "drill-nodes") as client:
        yield client, config


def report(title: str, lines: list[str], word: str) -> None:
    num_right = sum(word in line for line in lines)
    print(f"{title}: {num_right} of {len(lines)}; {sorted(set(lines))}")


def workers(namespace: Namespace) -> list[dict[str, Any]]:
    (cluster,) = namespace.clusters()
    return [
        pod
        for pod in namespace.pods(cluster, "worker")
        if "deletionTimestamp" not in pod["metadata"]
    ]


@pytest.mark.timeout(7200)
def test_no_node_is_named_beside_a_load(nodes: tuple[Client, ClusterConfig]) -> None:
    with load(LOAD):
        lines = count(*nodes, NUM_QUIET_STARTS)
    report(f"none is slow, load {LOAD}", lines, "node")
    assert not any(lines)


@pytest.mark.timeout(3600)
def test_a_slow_disk_is_named(namespace: Namespace, nodes: tuple[Client, ClusterConfig]) -> None:
    pod = workers(namespace)[0]["metadata"]
    uid = pod["uid"]
    groups = [*BLKIO.glob(f"**/*{uid}*"), *BLKIO.glob(f"**/*{uid.replace('-', '_')}*")]
    if not groups or os.geteuid() != 0:
        pytest.skip("no cgroup of the pod's disk is on this machine, or this user may not limit it")
    disk = os.stat("/").st_dev
    rule = f"{os.major(disk)}:{os.minor(disk)} "
    files = [each for group in groups for each in group.glob("**/blkio.throttle.write_bps_device")]
    for file in files:
        file.write_text(f"{rule}{DISK_BYTES}")
    try:
        lines = count(*nodes, NUM_STARTS)
    finally:
        for file in files:
            file.write_text(f"{rule}0")
    report("a disk of 5 MB/s", lines, "disk")
    assert all("disk" in line for line in lines)


@pytest.mark.timeout(3600)
def test_a_slow_network_is_named(namespace: Namespace, nodes: tuple[Client, ClusterConfig]) -> None:
    places = [pod["spec"]["nodeName"] for pod in workers(namespace)]
    alone = next((each for each in places if places.count(each) == 1), "")
    if not alone or not Path("/sys/class/net", alone).exists() or os.geteuid() != 0:
        pytest.skip("no node with one worker is on a network link that this user may shape")
    shape = ["tc", "qdisc", "add", "dev", alone, "root", "tbf", "rate", BANDWIDTH]
    subprocess.run([*shape, "burst", "32kbit", "latency", "400ms"], check=True)
    try:
        lines = count(*nodes, NUM_STARTS)
    finally:
        subprocess.run(["tc", "qdisc", "del", "dev", alone, "root"], check=True)
    report("20 Mbit/s", lines, "network")
    assert all("network" in line for line in lines)


@pytest.mark.timeout(3600)
def test_half_the_cores_are_named(
    namespace: Namespace, nodes: tuple[Client, ClusterConfig]
) -> None:
    client, config = nodes
    known = set(listed_workers(client))
    (cluster,) = namespace.clusters()
    limit_cores(namespace, cluster, f"{CORES / 2:g}")
    eventually(lambda: set(listed_workers(client)) - known, 180, "a worker that started anew")
    lines = count(client, config, NUM_STARTS)
    report("half the cores", lines, "cores")
    assert all("cores" in line for line in lines)
