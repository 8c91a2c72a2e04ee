"""Training on a real Kubernetes, driven by a pod under the RBAC of deploy/, while pods and nodes
are taken away.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from flyte_ddp.cluster.connect import open_cluster
from tests.outside.kubernetes.conftest import (
    IMAGE,
    KILL_UNANNOUNCED,
    ROOT,
    Namespace,
    eventually,
    install_operator,
    kubectl,
    small_cluster,
)
from tests.outside.kubernetes.store import Store

HELM = "v3.19.0"  # built where the path has none
RECIPE = "tests.support.recipes.Dropping"
WITHOUT_DROPOUT = "tests.support.recipes.Tiny"  # dropout's draws depend on the number of ranks
STEPS_PER_EPOCH = 25
NUM_STEPS = 2 * STEPS_PER_EPOCH
ALL_STEPS = list(range(1, NUM_STEPS + 1))
CONFIG = {"epochs": 2, "global_batch_size": 4, "checkpoint_interval": 2}
# Settings of single runs. A run that loses a worker after a notice has no checkpoint before that.
SEES_NO_CHECKPOINT = {"checkpoint_interval": 1000}
CONFIGS = {
    "bereaved": {"parallel": "fsdp", **SEES_NO_CHECKPOINT},
    "drained": {"parallel": "fsdp", **SEES_NO_CHECKPOINT},
    "headless": SEES_NO_CHECKPOINT,
    "endless": {"epochs": 1000},
    "spared": {"epochs": 4},  # the spare node gets ready meanwhile
    "unannounced": {"memory_interval": 2, **SEES_NO_CHECKPOINT},
}
STEP_SECONDS = "0.4"  # an epoch is long enough to be met in the middle
# a step on one node takes long enough for a mended node to come back before the run ends
ALONE_SECONDS = "4"
ONE_WORKER_TO_A_NODE = {
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {
                    "labelSelector": {"matchLabels": {"dask.org/component": "worker"}},
                    "topologyKey": "kubernetes.io/hostname",
                }
            ]
        }
    }
}
DEATH_NOTICED = 20  # seconds
NEW_POD_SECONDS = 6  # less than a new pod needs until it can train
# seconds of silence that a busy machine may cause, where silence is not what a test is about
PATIENT = 90
SILENCE_NOTICED = 45  # seconds; with node_timeout at its default


@dataclass
class Driver:
    """A pod that trains."""

    namespace: Namespace
    pod: str

    def records(self, **values: Any) -> list[dict[str, Any]]:
        """Return the printed JSON lines that have these values."""
        lines = [line for line in self.namespace.log(self.pod).splitlines() if line.startswith("{")]
        return [each for each in map(json.loads, lines) if values.items() <= each.items()]

    def wait_for(self, timeout: float = 600, **values: Any) -> dict[str, Any]:
        """The first thing that it prints with these values."""

        def records() -> list[dict[str, Any]]:
            # first, because what was printed before the end is in the log then
            phase = self.namespace.phase(self.pod)
            found = self.records(**values)
            assert found or phase not in ("Failed", "Succeeded"), (
                f"{self.pod} ended:\n{self.namespace.log(self.pod)}"
            )
            return found

        return dict(eventually(records, timeout, f"{values} from {self.pod}")[0])

    def wait_for_step(self, run: str, step: int) -> None:
        self.wait_for(run=run, event="Reported", step=step)

    def world_sizes(self, run: str) -> list[int]:
        return [each["world_size"] for each in self.records(run=run, event="RunStarted")]

    def departures(self) -> list[dict[str, Any]]:
        """Its log lines about workers that were told to go."""
        return [each for each in self.records() if "leaves: the gang ended" in each.get("log", "")]

    def steps(self, run: str) -> list[int]:
        return [each["step"] for each in self.records(run=run, event="Reported")]

    def losses_of_gang(self) -> list[dict[str, Any]]:
        """Its log lines about gangs that were lost."""
        return [each for each in self.records() if "the gang was lost" in each.get("log", "")]

    def succeeded(self) -> None:
        assert self.namespace.wait_for_end(self.pod, timeout=600) == 0, self.namespace.log(self.pod)

    def pods(self, component: str) -> list[dict[str, Any]]:
        """The pods of its cluster."""
        (cluster,) = self.namespace.clusters()
        return self.namespace.pods(cluster, component)


@pytest.fixture(scope="module")
def start(namespace: Namespace, store: Store) -> Callable[..., Driver]:
    """start(pod, *runs, **cluster): a driver that trains `runs` in turn; each is stored under its
    name.
    """

    def start(
        pod: str,
        *runs: str,
        recipe: str = RECIPE,
        alone_seconds: str = ALONE_SECONDS,
        settings: str = "",
        **cluster: Any,
    ) -> Driver:
        orders = {
            "settings": settings,
            "cluster": small_cluster(
                image="",  # an empty name means the image of the driver's own pod
                env={"STEP_SECONDS": STEP_SECONDS, "ALONE_SECONDS": alone_seconds},
                **cluster,
            ),
            "runs": [
                {
                    "name": run,
                    "recipe": recipe,
                    "checkpoints": f"s3://runs/{run}",
                    "config": CONFIG | CONFIGS.get(run, {}),
                }
                for run in runs
            ],
        }
        program = 'python -m tests.outside.kubernetes.driver "$0"'
        namespace.start_driver(pod, program, json.dumps(orders))
        return Driver(namespace, pod)

    return start


@dataclass
class Bereaved:
    """A driver that has trained "undisturbed", then "bereaved" with a worker's pod deleted, and
    "unannounced" with one deleted without grace.
    """

    driver: Driver
    pods: list[dict[str, Any]]  # the workers', before
    deleted_at: float  # seconds since the epoch
    # The recipe "bereaved" alone writes this.
    departures: list[dict[str, Any]]
    losses: list[dict[str, Any]]


@pytest.fixture(scope="module")
def bereaved(start: Callable[..., Driver], namespace: Namespace) -> Bereaved:
    # A short grace: with a longer one the deleted worker would train to the end of so short a run.
    # And room for the states in memory of the third run beside what the first two have read.
    driver = start(
        "bereaved",
        "undisturbed",
        "bereaved",
        "unannounced",
        node_timeout=PATIENT,
        termination_grace=20,
        worker_memory="2Gi",
    )
    driver.wait_for_step("undisturbed", 3)
    pods = driver.pods("worker")
    driver.wait_for_step("bereaved", 5)
    deleted_at = time.time()
    namespace.kubectl("delete", "pod", pods[0]["metadata"]["name"], "--wait=false")
    driver.wait_for_step("unannounced", 5)
    logged = driver.departures(), driver.losses_of_gang()
    pod = next(
        each["metadata"]["name"]
        for each in driver.pods("worker")
        if "deletionTimestamp" not in each["metadata"]
    )
    namespace.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
    driver.succeeded()
    return Bereaved(driver, pods, deleted_at, *logged)


def test_two_pods_on_two_nodes_give_the_weights_of_two_local_processes(
    bereaved: Bereaved, store: Store, finished_run: Callable[..., Any]
) -> None:
    (started,) = bereaved.driver.records(run="undisturbed", event="RunStarted")
    assert started["world_size"] == 2
    assert len({pod["spec"]["nodeName"] for pod in bereaved.pods}) == 2
    torch.testing.assert_close(
        store.state("undisturbed"), finished_run("Dropping", 2, **CONFIG).state()
    )
    lines = {each.get("line") for each in bereaved.driver.records()}
    assert {f"[node {index}] [rank {index}] the data are opened" for index in (0, 1)} <= lines
    assert store.keys["AWS_SECRET_ACCESS_KEY"] not in bereaved.driver.namespace.log(
        bereaved.driver.pod
    )


def test_a_run_costs_its_pods_times_time_times_price(bereaved: Bereaved) -> None:
    records = bereaved.driver.records(run="undisturbed")
    (begun,) = [each for each in records if each.get("event") == "AttemptStarted"]
    (finished,) = [each for each in records if each.get("event") == "RunFinished"]
    (cost,) = [each["cost"] for each in records if "cost" in each]
    seconds = 0.0
    for pod in bereaved.pods:
        text = pod["status"]["startTime"].replace("Z", "+00:00")
        start = datetime.datetime.fromisoformat(text).timestamp()
        seconds += finished["at"] - max(start, begun["launched_at"])
    assert cost["total"] == pytest.approx(seconds, rel=0.01)  # the price is 1 a second


def test_a_deleted_worker_pod_of_a_split_model_costs_no_step(
    bereaved: Bereaved, store: Store
) -> None:
    driver = bereaved.driver
    (left,) = bereaved.departures
    assert left["at"] - bereaved.deleted_at < 2 * DEATH_NOTICED
    assert bereaved.losses == []
    assert driver.world_sizes("bereaved") == [2, 2]
    first, second = driver.records(run="bereaved", event="CheckpointLoaded")
    assert first["step"] == 0
    assert 5 < second["step"] < NUM_STEPS
    assert driver.steps("bereaved") == ALL_STEPS, "a step was done again"
    torch.testing.assert_close(store.state("bereaved"), store.state("undisturbed"))


def test_a_worker_pod_that_is_deleted_without_grace_costs_the_steps_since_the_newest_state_in_memory(  # noqa: E501
    bereaved: Bereaved, store: Store
) -> None:
    driver = bereaved.driver
    _, resumed = driver.records(run="unannounced", event="CheckpointLoaded")
    assert re.fullmatch(r"node [01]'s memory", resumed["url"])
    (ended,) = driver.records(run="unannounced", event="AttemptEnded")
    assert resumed["step"] >= 2
    steps = driver.steps("unannounced")
    assert sorted(set(steps)) == ALL_STEPS
    assert len(steps) <= NUM_STEPS + ended["step"] - resumed["step"]
    torch.testing.assert_close(store.state("unannounced"), store.state("undisturbed"))


@contextlib.contextmanager
def reserved_for_workers(node: str) -> Iterator[dict[str, Any]]:
    """Keep new pods off `node`, except for workers. Return what a pod needs to be admitted, with
    one worker per node.
    """
    taint = "flyte-ddp.test/workers-only"
    kubectl("taint", "node", node, f"{taint}=:NoSchedule")
    try:
        tolerations = [{"key": taint, "operator": "Exists"}]
        yield {"pod_template": {**ONE_WORKER_TO_A_NODE, "tolerations": tolerations}}
    finally:
        kubectl("taint", "node", node, f"{taint}-")


@contextlib.contextmanager
def drained(node: str) -> Iterator[None]:
    """Keep pods off the node, and evict the runs' pods, with the commands of the runbook."""
    ours = "--pod-selector=app.kubernetes.io/managed-by=flyte-ddp"
    try:
        kubectl("drain", node, ours, "--delete-emptydir-data", "--timeout=120s")
        yield
    finally:
        kubectl("uncordon", node)


def test_a_drained_worker_costs_a_split_model_no_step_and_the_run_grows_back(
    start: Callable[..., Driver], store: Store, finished_run: Callable[..., Any]
) -> None:
    node = kubectl("get", "nodes", "--output", "jsonpath={.items[*].metadata.name}").split()[-1]
    elastic = {"min_nodes": 1, "grow_delay": 5, "grow_interval": 0, "node_timeout": PATIENT}
    with reserved_for_workers(node) as placement:
        driver = start(
            "drained", "drained", recipe=WITHOUT_DROPOUT, alone_seconds="1", **elastic, **placement
        )
        driver.wait_for_step("drained", 5)
    with drained(node):
        driver.wait_for(run="drained", event="RunStarted", world_size=1)
    driver.succeeded()
    assert len(driver.departures()) == 1
    assert driver.losses_of_gang() == []
    assert driver.world_sizes("drained") == [2, 1, 2]
    assert driver.steps("drained") == ALL_STEPS, "a step was lost or done again"
    torch.testing.assert_close(store.state("drained"), finished_run("Tiny", 2, **CONFIG).state())


def test_a_run_shrinks_without_a_silent_node_and_grows_back_when_it_is_mended(
    start: Callable[..., Driver], store: Store, finished_run: Callable[..., Any]
) -> None:
    nodes = kubectl("get", "nodes", "--output", "jsonpath={.items[*].metadata.name}").split()
    cut = next((node for node in nodes if Path("/sys/class/net", node).exists()), "")
    if not cut or os.geteuid() != 0:
        pytest.skip("no node is on a network link of this machine that this user may cut")
    with reserved_for_workers(cut) as placement:
        elastic = {"min_nodes": 1, "return_timeout": 5, "grow_delay": 5}
        driver = start("cut-off", "cut-off", recipe=WITHOUT_DROPOUT, **elastic, **placement)
        driver.wait_for_step("cut-off", 3)
        eventually(lambda: store.checkpoint_steps("cut-off"), 180, "a checkpoint")
    assert [pod["spec"]["nodeName"] for pod in driver.pods("worker")].count(cut) == 1
    cut_at = time.time()
    subprocess.run(["ip", "link", "set", cut, "down"], check=True)
    try:
        driver.wait_for(run="cut-off", event="RunStarted", world_size=1)
    finally:
        subprocess.run(["ip", "link", "set", cut, "up"], check=True)
        kubectl("wait", "--for=condition=Ready", f"node/{cut}", "--timeout=300s")
    driver.succeeded()
    (lost,) = driver.losses_of_gang()
    assert "has been silent for" in lost["log"]
    assert lost["at"] - cut_at < SILENCE_NOTICED
    assert driver.world_sizes("cut-off") == [2, 1, 2]
    _, shrunk, _ = driver.records(run="cut-off", event="CheckpointLoaded")
    assert 0 < shrunk["step"] < STEPS_PER_EPOCH, "it was not met in mid-epoch"
    steps = [
        each["step"]
        for each in driver.records(run="cut-off", event="Reported")
        if each["at"] > shrunk["at"]
    ]
    assert steps == ALL_STEPS[shrunk["step"] :], "the growth lost or redid a step"
    torch.testing.assert_close(store.state("cut-off"), finished_run("Tiny", 2, **CONFIG).state())


def test_a_spare_node_takes_the_place_of_a_lost_pod(
    start: Callable[..., Driver], namespace: Namespace
) -> None:
    cluster = {"spare_nodes": 1, "worker_cpus": 0.4, "node_timeout": PATIENT}
    driver = start("spared", "spared", recipe=WITHOUT_DROPOUT, **cluster)
    ready = "1 of 1 spare nodes are ready: "

    def find_spare() -> list[str]:
        logs = [each.get("log", "") for each in driver.records()]
        return [line.removeprefix(ready) for line in logs if line.startswith(ready)]

    spare = eventually(find_spare, 400, "a spare node")[0]
    driver.wait_for_step("spared", 3)
    names = [pod["metadata"]["name"] for pod in driver.pods("worker")]
    assert len(names) == 3
    lost = next(name for name in names if not name.startswith(spare))
    namespace.kubectl("delete", "pod", lost, "--force", "--grace-period=0")
    driver.succeeded()
    assert driver.world_sizes("spared") == [2, 2]
    # A worker may have time to say that it leaves, although its pod is given none.
    assert len(driver.departures() + driver.losses_of_gang()) == 1
    _, second = driver.records(run="spared", event="AttemptStarted")
    assert second["waited_seconds"] < NEW_POD_SECONDS


@pytest.fixture
def endless(start: Callable[..., Driver], namespace: Namespace) -> Iterator[Driver]:
    """A driver of the recipe "endless" on two nodes, which are both found good. A later one resumes
    the run.
    """
    elastic = {"min_nodes": 1, "grow_delay": 1, "grow_interval": 0, "node_timeout": PATIENT}
    driver = start("endless", "endless", recipe=WITHOUT_DROPOUT, **elastic)
    driver.wait_for(log="none of 2 nodes is slow")
    yield driver
    namespace.kubectl("delete", "pod", "endless", "--timeout=300s")


def look(store: Store, command: str, run: str, *options: str) -> str:
    """Return what a command of `flyte-ddp` prints about a run, on this machine."""
    done = subprocess.run(
        [sys.executable, "-m", "flyte_ddp", command, f"s3://runs/{run}", *options],
        env=os.environ | store.keys | {"AWS_ENDPOINT_URL": store.url},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def look_at_training(store: Store, run: str) -> str:
    """Return the status of a run that trains, as JSON, or "" while it says something else."""
    status = look(store, "status", run, "--json")
    if json.loads(status)["phase"] == "training":
        return status
    return ""


def test_one_looks_into_a_run_on_a_cluster_from_outside(endless: Driver, store: Store) -> None:
    endless.wait_for(run="endless", event="Reported")
    status = json.loads(eventually(lambda: look_at_training(store, "endless"), 60, "a status"))
    assert status["step"] >= 1
    assert status["world_size"] == 2
    stacks = look(store, "stacks", "endless")
    for rank in (0, 1):
        assert f"rank {rank}" in stacks
    assert "train_epoch" in stacks
    profile = look(store, "profile", "endless", "--rank", "1", "--steps", "2")
    written = [line.removeprefix("s3://") for line in profile.splitlines()]
    (trace,) = [path for path in written if path.endswith(".json.gz")]
    names = {each.get("name") for each in read_trace(store, trace)["traceEvents"]}
    assert any("Optimizer.step" in str(name) for name in names)
    steps = endless.steps("endless")
    assert steps == list(range(steps[0], steps[-1] + 1)), "a step was lost or done again"


def read_trace(store: Store, path: str) -> Any:
    return json.loads(gzip.decompress(store.files.cat_file(path)))


def limit_cores(namespace: Namespace, cluster: str, cores: str) -> None:
    """Give one of a cluster's workers this limit, with which its pod starts anew."""
    selector = f"dask.org/cluster-name={cluster},dask.org/component=worker"
    deployment = namespace.items("deployments", selector)[0]["metadata"]["name"]
    resources = {"limits": {"cpu": cores}, "requests": {"cpu": cores}}
    pod = {"containers": [{"name": "worker", "resources": resources}]}
    # The old pod ends first: both workers have the same name.
    strategy = {"type": "Recreate", "rollingUpdate": None}
    patch = {"spec": {"strategy": strategy, "template": {"spec": pod}}}
    namespace.kubectl("patch", "deployment", deployment, "--patch", json.dumps(patch))


def test_a_worker_with_a_third_of_the_cores_is_named_and_left_out(
    endless: Driver, namespace: Namespace
) -> None:
    driver = endless
    driver.wait_for(run="endless", event="Reported")  # The run may be resumed.
    (cluster,) = namespace.clusters()
    before = {pod["metadata"]["name"] for pod in driver.pods("worker")}
    # Not half of them: on a busy machine no worker has all of its cores, and each is measured once.
    limit_cores(namespace, cluster, "200m")

    def named() -> list[dict[str, Any]]:
        """What the check has said of the limited pod. A busy machine may say it of others."""
        found = driver.records(run="endless", event="NodesFoundSlow")
        of_nodes = [each | {"at": event["at"]} for event in found for each in event["nodes"]]
        others = []
        for each in of_nodes:
            if not any(pod in each["label"] for pod in before):
                others.append(each)
        return others

    slow = eventually(named, 400, "the limited pod is named")[0]
    assert slow["probe"].startswith("usable cores")
    assert 0.15 < slow["rate"] / slow["median"] < 0.6

    def without_it() -> list[dict[str, Any]]:
        """The last five steps since the gang went on without the node."""
        sizes = driver.records(run="endless", event="RunStarted")
        steps = driver.records(run="endless", event="Reported")
        later = [each for each in steps if each["at"] > max(slow["at"], sizes[-1]["at"])]
        return later if sizes[-1]["world_size"] == 1 and len(later) >= 5 else []

    eventually(without_it, 200, "the gang goes on without it")
    assert driver.losses_of_gang() == []
    steps = driver.steps("endless")
    assert steps == list(range(steps[0], steps[-1] + 1)), "a step was lost or done again"


def test_a_drained_scheduler_costs_no_step_and_a_deleted_driver_leaves_a_checkpoint_and_no_cluster(
    start: Callable[..., Driver],
    namespace: Namespace,
    store: Store,
    finished_run: Callable[..., Any],
) -> None:
    driver = start("first", "headless", "stopped", node_timeout=PATIENT)
    driver.wait_for_step("headless", 5)
    (scheduler,) = driver.pods("scheduler")
    node = scheduler["spec"]["nodeName"]
    assert [pod["spec"]["nodeName"] for pod in driver.pods("worker")].count(node) == 1
    with drained(node):
        pass
    driver.wait_for(run="headless", ended="well")
    assert driver.losses_of_gang() == []
    assert driver.steps("headless") == ALL_STEPS, "a step was lost or done again"
    torch.testing.assert_close(
        store.state("headless"), finished_run("Dropping", 2, **CONFIG).state()
    )

    driver.wait_for_step("stopped", 3)
    command = ("kubectl", "--namespace", namespace.name, "logs", "--follow", "first")
    log = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    namespace.kubectl("delete", "pod", "first", "--timeout=300s")
    output, _ = log.communicate()
    assert "TrainingStopped" in output
    assert "SIGTERM: the run was stopped at step" in output
    assert namespace.clusters() == []
    last = store.checkpoint_steps("stopped")[-1]

    driver = start("second", "stopped")
    loaded = driver.wait_for(run="stopped", event="CheckpointLoaded")
    assert loaded["step"] == last > 0
    # Not by a deletion without grace: that, too, begins with a SIGTERM, on which the driver deletes
    # the cluster itself.
    namespace.kubectl("exec", "second", "--", "bash", "-c", KILL_UNANNOUNCED)
    namespace.wait_for_end("second")
    assert len(namespace.clusters()) == 1
    namespace.kubectl("delete", "pod", "second")
    eventually(lambda: not namespace.clusters(), 180, "the deletion of what the pod owned")


@pytest.fixture(scope="module")
def helm() -> str:
    """The path of Helm's program. If there is none, it is built with Go, which takes minutes on all
    cores: only where tests may build programs and images.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    cache = home / "flyte-ddp" / f"helm-{HELM}"
    if (found := shutil.which("helm")) or (cache / "helm").exists():
        return found or str(cache / "helm")
    if not os.environ.get("FLYTE_DDP_TEST_BUILDER") or not shutil.which("go"):
        pytest.skip("helm is not on the path; with FLYTE_DDP_TEST_BUILDER and Go it is built")
    build = ("go", "install", f"helm.sh/helm/v3/cmd/helm@{HELM}")
    subprocess.run(build, env={**os.environ, "GOBIN": str(cache)}, check=True)
    return str(cache / "helm")


def test_a_cluster_starts_under_the_operator_of_the_helm_chart(
    helm: str, namespace: Namespace, tmp_path: Path
) -> None:
    # The chart sets no command: its own image begins with the operator, ours with tini alone.
    with_command = tmp_path / "with-command"
    *_, deployment = yaml.safe_load_all((ROOT / "deploy/operator/operator.yaml").read_text())
    command = json.dumps(deployment["spec"]["template"]["spec"]["containers"][0]["command"])
    with_command.write_text(f"#!/bin/sh\nexec sed 's/^\\( *\\)args:$/\\1command: {command}\\n&/'\n")
    with_command.chmod(0o755)
    operator = ("--namespace", "dask-operator")
    repository, _, tag = IMAGE.rpartition(":")
    chart = files("dask_kubernetes") / "operator/deployment/helm/dask-kubernetes-operator"
    release = (helm, *operator)
    values = ("--values", str(ROOT / "deploy/operator/values.yaml"))
    values += ("--set", f"image.name={repository},image.tag={tag}")
    try:
        # Helm refuses a service account that is not its own, and the rights have to be the chart's.
        kubectl(
            *operator,
            "delete",
            "deployment,serviceaccount",
            "dask-operator",
            "--cascade=foreground",
        )
        kubectl("delete", "clusterrole,clusterrolebinding", "dask-operator")
        install = (
            *release,
            "install",
            "dask-operator",
            str(chart),
            *values,
            "--wait",
            "--timeout=120s",
        )
        install += ("--post-renderer", str(with_command))
        subprocess.run(install, check=True)
        with open_cluster(namespace.config(num_nodes=1), "helm") as client:
            assert client.submit(sum, [1, 2]).result(timeout=30) == 3
    finally:
        subprocess.run(
            [*release, "uninstall", "dask-operator", "--ignore-not-found", "--wait"], check=True
        )
        install_operator(IMAGE)
