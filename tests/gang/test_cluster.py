"""Local and existing Dask clusters, with real schedulers and workers; Kubernetes' own are in
tests/outside/kubernetes.
"""

import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
from distributed import LocalCluster, Security

from flyte_ddp.cluster import connect
from flyte_ddp.cluster.config import ADDRESS_VARIABLE, ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.cluster.kubernetes import lifecycle
from flyte_ddp.cluster.kubernetes.manifest import CERTIFICATE_MOUNT, cluster_spec
from flyte_ddp.errors import ClusterError, ConfigError
from tests.support.dask_runs import eventually


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of a Dask cluster of one worker."""
    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None
    ) as cluster:
        yield cluster.scheduler_address


def double_in_a_child(number: int) -> int:
    """Start a process from a worker, as it must for its ranks."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return int(pool.apply(abs, (-2 * number,)))


def find_level() -> int:
    return logging.getLogger("distributed.worker.state_machine").level


@pytest.mark.long
def test_a_local_cluster_has_one_thread_per_node_and_workers_that_may_have_children_and_survive_ctrl_c() -> (  # noqa: E501
    None
):
    nannies = logging.getLogger("distributed.nanny")
    level = nannies.getEffectiveLevel()
    with open_cluster(ClusterConfig(kind="local", num_nodes=2), "run") as client:
        assert nannies.getEffectiveLevel() == logging.WARNING  # people want to read of epochs
        workers = client.scheduler_info(n_workers=-1)["workers"]
        assert [(each["nthreads"], each["memory_limit"]) for each in workers.values()] == [
            (1, 0),
            (1, 0),
        ]
        assert client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.allowed_failures) == 0
        assert client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.worker_ttl) == 20
        # At this level a closing worker logs nothing about a task in hand.
        assert set(client.run(find_level).values()) == {logging.ERROR}
        # A terminal sends SIGINT to this process group.
        assert os.getpgrp() not in client.run(os.getpgrp).values()
        futures = [
            client.submit(double_in_a_child, 3, workers=[address], pure=False)
            for address in workers
        ]
        assert client.gather(futures) == [6, 6]
        address = client.scheduler.address
    assert nannies.getEffectiveLevel() == level
    host, port = address.removeprefix("tcp://").split(":")
    with pytest.raises(ConnectionError), socket.create_connection((host, int(port)), timeout=5):
        pass


@pytest.mark.filterwarnings("error:Port 8787")
def test_a_local_cluster_leaves_dasks_usual_port_to_others() -> None:
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # Another process may have the port already.
            other.bind(("", 8787))
            other.listen()
        with open_cluster(ClusterConfig(kind="local", num_nodes=1), "run"):
            pass


def listening_addresses() -> set[tuple[str, int]]:
    """The addresses at which this process and its descendants listen."""
    this_process = psutil.Process()
    processes = [this_process, *this_process.children(recursive=True)]
    return {
        tuple(connection.laddr)
        for process in processes
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.long
def test_a_local_cluster_listens_to_this_machine_alone() -> None:
    before = listening_addresses()
    with open_cluster(ClusterConfig(kind="local", num_nodes=2), "run"):
        opened = listening_addresses() - before
    # Each process has a port of Dask's protocol and an HTTP server; each nanny has one more port.
    assert len(opened) == 8
    assert {host for host, _ in opened} == {"127.0.0.1"}


def test_the_end_of_a_local_cluster_shows_no_warning_of_a_nanny(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logger, end = logging.getLogger("distributed.nanny"), LocalCluster.__exit__

    def end_slowly(cluster: LocalCluster, *error: Any) -> None:
        logger.warning("Worker process still alive after 4.0 seconds, killing")
        end(cluster, *error)

    monkeypatch.setattr(LocalCluster, "__exit__", end_slowly)
    level = logger.level
    with open_cluster(ClusterConfig(kind="local", num_nodes=1), "test"):
        logger.warning("a worker was lost")
    assert logger.level == level
    assert [each.getMessage() for each in caplog.records if each.name == logger.name] == [
        "a worker was lost"
    ]


def test_a_local_worker_comes_back_however_long_it_takes() -> None:
    """Dask waits 15 s for one that was lost, and then ends its nanny. A busy machine or a second
    loss take longer.
    """
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10ms"}),
        open_cluster(ClusterConfig(kind="local", num_nodes=1), "run") as client,
    ):
        (pid,) = client.run(os.getpid).values()
        os.kill(pid, signal.SIGKILL)
        assert eventually(
            lambda: set(client.run(os.getpid, on_error="ignore").values()) - {pid}, timeout=100
        )


@pytest.mark.parametrize("through_environment", [False, True])
def test_an_existing_cluster_is_used_and_left_running(
    through_environment: bool, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ClusterConfig(num_nodes=1, scheduler_address="" if through_environment else address)
    monkeypatch.setenv(ADDRESS_VARIABLE, address if through_environment else "")
    for _ in range(2):
        with open_cluster(config, "run") as client:
            assert client.submit(sum, [1, 2]).result(timeout=30) == 3


def test_a_driver_keeps_its_idle_cluster_from_the_operator(address: str) -> None:
    """It asks the scheduler since when it is idle."""

    def set_idle(dask_scheduler: Any) -> None:
        dask_scheduler.idle_since = 1.0

    config = ClusterConfig(num_nodes=1, scheduler_address=address)
    with open_cluster(config, "run") as client:
        client.run_on_scheduler(set_idle)
        with lifecycle.keep_alive(client, 0.1):
            assert eventually(
                lambda: (
                    client.run_on_scheduler(lambda dask_scheduler: dask_scheduler.idle_since) != 1.0
                )
            )


@pytest.mark.long
def test_with_a_runs_certificate_only_those_who_have_its_key_reach_scheduler_and_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commands and variables of the pods, as processes of this machine."""
    security = Security.temporary()
    (tmp_path / "tls.crt").write_text(security.tls_scheduler_cert)
    (tmp_path / "tls.key").write_text(security.tls_scheduler_key)
    pods = cluster_spec(ClusterConfig(kind="kubernetes", num_nodes=1), "ddp-x-00000000")["spec"]
    noted = tmp_path / "scheduler.json"

    def start(role: str, address: str, *arguments: str) -> subprocess.Popen[bytes]:
        (container,) = pods[role]["spec"]["containers"]
        given = {each["name"]: each.get("value", "worker") for each in container["env"]}
        variables = {
            name: value.replace(CERTIFICATE_MOUNT, str(tmp_path)) for name, value in given.items()
        }
        assert variables.get("DASK_SCHEDULER_ADDRESS", address).startswith("tls://")
        command = [Path(sys.executable).with_name("dask"), *container["args"][1:], *arguments]
        command = [str(each).replace("$(DASK_WORKER_NAME)", "worker") for each in command]
        environment = {
            **os.environ,
            **variables,
            "DASK_SCHEDULER_ADDRESS": address,
            "HOME": str(tmp_path),
        }
        return subprocess.Popen(command, env=environment, cwd=tmp_path)

    arguments = ["--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"]
    processes = [
        start("scheduler", "tls://127.0.0.1:1", *arguments, "--scheduler-file", str(noted))
    ]
    try:
        while not noted.is_file() or not (text := noted.read_text()):
            assert processes[0].poll() is None
            time.sleep(0.05)
        address = json.loads(text)["address"]
        processes.append(start("worker", address))
        with connect.closing(connect.connect(address, time.monotonic() + 60, security)) as client:
            client.wait_for_workers(1, timeout=60)
            (worker,) = client.nthreads()
            assert worker.startswith("tls://")
            assert client.submit(sum, [1, 2]).result(timeout=30) == 3
            monkeypatch.setattr(connect, "API_PATIENCE", 0.0)
            stranger = Security.temporary()
            for other, target in (
                (stranger, address),
                (stranger, worker),
                (None, address.replace("tls", "tcp")),
            ):
                with pytest.raises(ClusterError, match="is not a Dask scheduler|cannot be reached"):
                    connect.connect(target, time.monotonic() + 1, other)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=30)


def test_too_few_workers_end_the_start_at_its_deadline_unless_min_nodes_allows_them(
    address: str,
) -> None:
    config = ClusterConfig(num_nodes=3, scheduler_address=address, start_timeout=1)
    with (
        pytest.raises(ClusterError, match=r"1 of 3 workers connected \(start_timeout: 1 s\)"),
        open_cluster(config, "run"),
    ):
        raise AssertionError("started")
    with open_cluster(dataclasses.replace(config, min_nodes=1), "run") as client:
        assert len(client.nthreads()) == 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("tcp://127.0.0.1:9", r"^the Dask scheduler at tcp://127\.0\.0\.1:9 cannot be reached: "),
        ("", r"^scheduler_address: expected an address such as .*, got ''$"),
    ],
)
def test_an_existing_cluster_needs_an_address_that_answers(
    given: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)
    config = ClusterConfig(kind="existing", scheduler_address=given, start_timeout=1)
    with pytest.raises((ClusterError, ConfigError), match=expected), open_cluster(config, "run"):
        raise AssertionError("connected")


@pytest.mark.parametrize(
    ("environment", "given", "kind"),
    [
        ({}, "", "local"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "", "kubernetes"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", ADDRESS_VARIABLE: "tcp://s:8786"}, "", "existing"),
        ({}, "tcp://s:8786", "existing"),
    ],
)
def test_kind_auto_chooses_an_available_cluster(
    environment: dict[str, str], given: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", ADDRESS_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert ClusterConfig(scheduler_address=given).resolved_kind == kind


def test_a_second_cluster_in_the_same_process_finds_dasks_settings_intact() -> None:
    # A new process is needed, where open_cluster is the first to import Dask.
    script = """
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import ClusterError
for _ in range(2):
    try:
        with open_cluster(ClusterConfig(scheduler_address="tcp://127.0.0.1:9", start_timeout=1), "run"):
            pass
    except ClusterError:
        pass
import dask
assert dask.config.get("distributed.scheduler.allowed-failures") == 3
"""  # noqa: E501
    subprocess.run([sys.executable, "-c", script], check=True)
