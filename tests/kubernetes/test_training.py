"""Training on a real Kubernetes, driven by a pod under the RBAC of deploy/, while pods and nodes
are taken away.
"""

from __future__ import annotations

import ast
import contextlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import pytest
import torch
import yaml

import flyte_ddp
from tests.kubernetes.conftest import (
    CONTAINER_SECURITY,
    IMAGE,
    POD_SECURITY,
    ROOT,
    Namespace,
    apply,
    eventually,
    install_operator,
    kubectl,
    small_cluster,
)
from tests.kubernetes.driver import FUNCTION, FUNCTIONS, SPLIT_FUNCTION, SPLIT_SAMPLES, train_split
from tests.kubernetes.store import Store

HELM = "v3.19.0"  # built where the path has none
RECIPE = "tests.support.recipes.Dropping"
WITHOUT_DROPOUT = "tests.support.recipes.Tiny"  # dropout's draws depend on the number of ranks
STEPS_PER_EPOCH = 25
CONFIG = {"epochs": 2, "global_batch_size": 4, "checkpoint_interval": 2}
# What differs in a run. One that loses a worker that is told to go has no checkpoint before that.
SEES_NO_CHECKPOINT = {"checkpoint_interval": 1000}
CONFIGS = {
    "bereaved": {"parallel": "fsdp", **SEES_NO_CHECKPOINT},
    "drained": SEES_NO_CHECKPOINT,
    "tainted": {"parallel": "fsdp", **SEES_NO_CHECKPOINT},
    "headless": SEES_NO_CHECKPOINT,
    "unannounced": {"memory_interval": 2, **SEES_NO_CHECKPOINT},
    "counted": {"num_steps": 60},
    "split": {"epochs": 3},
    "throttled": {"epochs": 100, **SEES_NO_CHECKPOINT},
}
STEP_SECONDS = "0.4"  # an epoch is long enough to be met in the middle
ALONE_SECONDS = "4"  # of a step on one node: a mended node is there before the run is finished
# Files for the driver that the image does not have: the tests' own code, and this checkout's
# version of the package.
CODE = ["flyte_ddp", "tests/__init__.py", "tests/support/runs.py", "tests/support/recipes.py"]
CODE += ["tests/kubernetes/__init__.py", "tests/kubernetes/driver.py"]
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
KILL_UNANNOUNCED = "kill -KILL $(cat /proc/1/task/1/children)"  # in a container
DEATH_NOTICED = 20  # seconds
STORE_OUTAGE = 40  # seconds
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

    def wait_for_checkpoint(self, run: str, store: Store) -> None:
        """Return once the run has a complete checkpoint. It trains on while one is written."""
        self.wait_for_step(run, 3)
        eventually(lambda: store.checkpoint_steps(run), 180, f"a checkpoint of {run}")

    def departures(self) -> list[dict[str, Any]]:
        """Its log lines about workers that were told to go."""
        return [each for each in self.records() if "leaves: the gang ended" in each.get("log", "")]

    def steps(self, run: str) -> list[int]:
        return [each["step"] for each in self.records(run=run, event="Reported")]

    def print_pauses(self, run: str) -> None:
        """Print, as -rP shows them, the longest times that the run made no step."""
        times = [each["at"] for each in self.records(run=run, event="Reported")]
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
        print(
            f"{run}: the longest times without a step: {gaps[-1]:.1f} s, {gaps[-2]:.1f} s, "
            f"{gaps[-3]:.1f} s"
        )

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
def code(namespace: Namespace) -> None:
    """The ConfigMap `training-code`."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for path in CODE:
            tar.add(
                ROOT / path,
                path,
                filter=lambda member: None if "__pycache__" in member.name else member,
            )
    manifest = kubectl(
        *("--namespace", namespace.name, "create", "configmap", "training-code"),
        *("--dry-run=client", "--output", "json", "--from-file", "code.tar.gz=/dev/stdin"),
        stdin=archive.getvalue(),
    )
    kubectl("create", "-f", "-", stdin=manifest)


@pytest.fixture(scope="module")
def start(namespace: Namespace, store: Store, code: None) -> Callable[..., Driver]:
    """start(pod, *runs, **cluster): a driver that trains `runs` in turn; each is stored under its
    name.
    """

    def start(
        pod: str,
        *runs: str,
        recipe: str = RECIPE,
        alone_seconds: str = ALONE_SECONDS,
        **cluster: Any,
    ) -> Driver:
        configs = {
            run: CONFIGS.get(run, {}) if recipe in FUNCTIONS else CONFIG | CONFIGS.get(run, {})
            for run in runs
        }
        orders = {
            "cluster": small_cluster(
                image="",  # as of the driver's own pod
                env={"STEP_SECONDS": STEP_SECONDS, "ALONE_SECONDS": alone_seconds},
                **cluster,
            ),
            "runs": [
                {
                    "name": run,
                    "recipe": recipe,
                    "checkpoints": f"s3://runs/{run}",
                    "config": configs[run],
                }
                for run in runs
            ],
        }
        # The working directory comes before all else on Python's path, and in the image it holds
        # the image's own code.
        unpack = "mkdir /tmp/code && cd /tmp/code && tar xzf /code/code.tar.gz"
        program = f'{unpack} && exec python -m tests.kubernetes.driver "$0"'
        apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": pod, "namespace": namespace.name},
                "spec": {
                    **POD_SECURITY,
                    "restartPolicy": "Never",
                    "serviceAccountName": "flyte-ddp",
                    "containers": [
                        {
                            **CONTAINER_SECURITY,
                            "name": "driver",
                            "image": IMAGE,
                            "imagePullPolicy": "IfNotPresent",
                            "args": ["bash", "-c", program, json.dumps(orders)],
                            "envFrom": [{"secretRef": {"name": "storage"}}],
                            "volumeMounts": [{"name": "code", "mountPath": "/code"}],
                        }
                    ],
                    "volumes": [{"name": "code", "configMap": {"name": "training-code"}}],
                },
            }
        )
        return Driver(namespace, pod)

    return start


@dataclass
class Bereaved:
    """A driver that has trained "undisturbed", and then "bereaved" with a worker's pod deleted."""

    driver: Driver
    pods: list[dict[str, Any]]  # the workers', before
    deleted_at: float  # seconds since the epoch


@pytest.fixture(scope="module")
def bereaved(start: Callable[..., Driver], namespace: Namespace, store: Store) -> Bereaved:
    # A short grace: with a longer one the deleted worker would train to the end of so short a run.
    driver = start(
        "bereaved", "undisturbed", "bereaved", node_timeout=PATIENT, termination_grace=20
    )
    driver.wait_for_step("undisturbed", 3)
    pods = driver.pods("worker")
    driver.wait_for_step("bereaved", 5)
    deleted_at = time.time()
    namespace.kubectl("delete", "pod", pods[0]["metadata"]["name"], "--wait=false")
    driver.succeeded()
    return Bereaved(driver, pods, deleted_at)


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


def test_a_deleted_worker_pod_of_a_split_model_costs_no_step(
    bereaved: Bereaved, store: Store
) -> None:
    driver = bereaved.driver
    (left,) = driver.departures()
    assert left["at"] - bereaved.deleted_at < 2 * DEATH_NOTICED
    assert driver.losses_of_gang() == []
    assert [each["world_size"] for each in driver.records(run="bereaved", event="RunStarted")] == [
        2,
        2,
    ]
    first, second = driver.records(run="bereaved", event="CheckpointLoaded")
    assert first["step"] == 0
    assert 5 < second["step"] < 2 * STEPS_PER_EPOCH
    assert driver.steps("bereaved") == list(range(1, 2 * STEPS_PER_EPOCH + 1)), (
        "a step was done again"
    )
    driver.print_pauses("bereaved")
    torch.testing.assert_close(store.state("bereaved"), store.state("undisturbed"))


def test_a_worker_pod_that_is_deleted_without_grace_costs_the_steps_since_the_newest_state_in_memory(  # noqa: E501
    start: Callable[..., Driver],
    namespace: Namespace,
    store: Store,
    finished_run: Callable[..., Any],
) -> None:
    driver = start("unannounced", "unannounced", node_timeout=PATIENT)
    driver.wait_for_step("unannounced", 5)
    pod = driver.pods("worker")[0]["metadata"]["name"]
    namespace.kubectl("delete", "pod", pod, "--force", "--grace-period=0")
    driver.succeeded()
    driver.print_pauses("unannounced")
    print([each["log"] for each in (*driver.departures(), *driver.losses_of_gang())])
    _, resumed = driver.records(run="unannounced", event="CheckpointLoaded")
    assert re.fullmatch(r"node [01]'s memory", resumed["url"])
    (ended,) = driver.records(run="unannounced", event="AttemptEnded")
    assert resumed["step"] >= 2
    steps = driver.steps("unannounced")
    assert sorted(set(steps)) == list(range(1, 2 * STEPS_PER_EPOCH + 1))
    assert len(steps) <= 2 * STEPS_PER_EPOCH + ended["step"] - resumed["step"]
    torch.testing.assert_close(
        store.state("unannounced"), finished_run("Dropping", 2, **CONFIG).state()
    )


def test_a_function_with_a_split_model_loses_no_sample_to_a_worker_that_is_lost_and_comes_back(
    start: Callable[..., Driver], namespace: Namespace, store: Store
) -> None:
    num_steps = CONFIGS["split"]["epochs"] * -(-SPLIT_SAMPLES // 4)
    driver = start("split", "split", recipe=SPLIT_FUNCTION, max_restarts=1, node_timeout=PATIENT)
    driver.wait_for_checkpoint("split", store)
    pod = driver.pods("worker")[0]["metadata"]["name"]
    namespace.kubectl("exec", pod, "--", "bash", "-c", KILL_UNANNOUNCED)
    driver.succeeded()
    print([each["log"] for each in driver.losses_of_gang()])
    assert driver.departures() == []
    assert [each["world_size"] for each in driver.records(run="split", event="RunStarted")] == [
        2,
        2,
    ]
    _, resumed = driver.records(run="split", event="CheckpointLoaded")
    assert 0 < resumed["step"] < num_steps
    again = [
        each["step"]
        for each in driver.records(run="split", event="Reported")
        if each["at"] > resumed["at"]
    ]
    assert again == list(range(resumed["step"] + 1, num_steps + 1))
    driver.print_pauses("split")
    (finished,) = driver.records(run="split", event="RunFinished")
    found = cloudpickle.loads(ast.literal_eval(finished["value"]))
    torch.testing.assert_close(
        found, flyte_ddp.run(train_split, CONFIGS["split"]["epochs"], nproc_per_node=2)
    )


def test_a_store_that_hangs_in_mid_training_and_at_a_restart_costs_only_time(
    start: Callable[..., Driver], namespace: Namespace, store: Store, bereaved: Bereaved
) -> None:
    driver = start("outage", "hanging", node_timeout=PATIENT)
    driver.wait_for_checkpoint("hanging", store)
    pod = driver.pods("worker")[0]["metadata"]["name"]
    with store.hanging():
        gone_at = time.time()
        step = driver.records(run="hanging", event="Reported")[-1]["step"]
        # the training does not wait for the store
        driver.wait_for(run="hanging", event="Reported", step=step + 4)
        namespace.kubectl("exec", pod, "--", "bash", "-c", KILL_UNANNOUNCED)
        time.sleep(max(0.0, gone_at + STORE_OUTAGE - time.time()))
        assert namespace.phase(driver.pod) == "Running", namespace.log(driver.pod)
    driver.wait_for(run="hanging", event="RunFinished")
    assert driver.records(run="hanging", event="CheckpointLoaded")[-1]["step"] > 0
    driver.succeeded()
    torch.testing.assert_close(store.state("hanging"), store.state("undisturbed"), rtol=0, atol=0)
    lines = [each["log"] for each in driver.records() if "log" in each]
    assert len(lines) < 20, lines


@contextlib.contextmanager
def reserved_for_workers(node: str) -> Iterator[dict[str, Any]]:
    """Keep new pods off `node` but for those of workers; gives what workers need to come, one to a
    node.
    """
    taint = "flyte-ddp.test/workers-only"
    kubectl("taint", "node", node, f"{taint}=:NoSchedule")
    try:
        tolerations = [{"key": taint, "operator": "Exists"}]
        yield {"pod_template": {**ONE_WORKER_TO_A_NODE, "tolerations": tolerations}}
    finally:
        kubectl("taint", "node", node, f"{taint}-")


def test_a_tainted_node_costs_a_split_recipe_and_a_drained_one_a_function_no_step_and_they_grow_back(  # noqa: E501
    start: Callable[..., Driver],
    namespace: Namespace,
    store: Store,
    finished_run: Callable[..., Any],
) -> None:
    node = kubectl("get", "nodes", "--output", "jsonpath={.items[*].metadata.name}").split()[-1]
    elastic = {
        "min_nodes": 1,
        "grow_delay": 5,
        "grow_interval": 0,
        "alone_seconds": "1",
        "node_timeout": PATIENT,
    }
    with reserved_for_workers(node) as placement:
        driver = start("tainted", "tainted", recipe=WITHOUT_DROPOUT, **elastic, **placement)
        driver.wait_for_step("tainted", 5)
    kubectl("taint", "node", node, "flyte-ddp.test/goes=:NoExecute")
    try:
        driver.wait_for(run="tainted", event="RunStarted", world_size=1)
    finally:
        kubectl("taint", "node", node, "flyte-ddp.test/goes-")
    driver.succeeded()
    assert len(driver.departures()) == 1
    assert driver.losses_of_gang() == []
    assert [each["world_size"] for each in driver.records(run="tainted", event="RunStarted")] == [
        2,
        1,
        2,
    ]
    assert driver.steps("tainted") == list(range(1, 2 * STEPS_PER_EPOCH + 1)), (
        "a step was lost or done again"
    )
    torch.testing.assert_close(store.state("tainted"), finished_run("Tiny", 2, **CONFIG).state())

    driver = start("counted", "counted", recipe=FUNCTION, **elastic)
    driver.wait_for_step("counted", 5)
    (scheduler,) = driver.pods("scheduler")
    pod = next(
        each
        for each in driver.pods("worker")
        if each["spec"]["nodeName"] != scheduler["spec"]["nodeName"]
    )
    node = pod["spec"]["nodeName"]
    ours = "--pod-selector=app.kubernetes.io/managed-by=flyte-ddp"  # as the runbook has it
    try:
        kubectl("drain", node, ours, "--delete-emptydir-data", "--timeout=120s")
        driver.wait_for(run="counted", event="RunStarted", world_size=1)
    finally:
        kubectl("uncordon", node)
    driver.succeeded()
    driver.print_pauses("counted")
    assert len(driver.departures()) == 1
    assert [each["world_size"] for each in driver.records(run="counted", event="RunStarted")] == [
        2,
        1,
        2,
    ]
    assert driver.steps("counted") == list(range(1, CONFIGS["counted"]["num_steps"] + 1))


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
        driver.wait_for_checkpoint("cut-off", store)
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
    assert [each["world_size"] for each in driver.records(run="cut-off", event="RunStarted")] == [
        2,
        1,
        2,
    ]
    _, shrunk, _ = driver.records(run="cut-off", event="CheckpointLoaded")
    assert 0 < shrunk["step"] < STEPS_PER_EPOCH, "it was not met in mid-epoch"
    steps = [
        each["step"]
        for each in driver.records(run="cut-off", event="Reported")
        if each["at"] > shrunk["at"]
    ]
    assert steps == list(range(shrunk["step"] + 1, 2 * STEPS_PER_EPOCH + 1)), (
        "the growth lost or redid a step"
    )
    torch.testing.assert_close(store.state("cut-off"), finished_run("Tiny", 2, **CONFIG).state())


def test_a_drained_node_with_the_scheduler_and_a_worker_costs_no_step(
    start: Callable[..., Driver],
    namespace: Namespace,
    store: Store,
    finished_run: Callable[..., Any],
) -> None:
    driver = start("headless", "headless", node_timeout=PATIENT)
    driver.wait_for_step("headless", 5)
    (scheduler,) = driver.pods("scheduler")
    node = scheduler["spec"]["nodeName"]
    assert [pod["spec"]["nodeName"] for pod in driver.pods("worker")].count(node) == 1
    told_at = time.time()
    ours = f"--pod-selector=dask.org/cluster-name={namespace.clusters()[0]}"
    try:
        kubectl("drain", node, ours, "--delete-emptydir-data", "--timeout=120s")
        print(f"the node was empty after {time.time() - told_at:.1f} s")
    finally:
        kubectl("uncordon", node)
    driver.succeeded()
    driver.print_pauses("headless")
    for left in driver.departures():  # the worker's may come first
        print(f"{left['log']}, after {left['at'] - told_at:.1f} s")
    assert driver.losses_of_gang() == []
    assert driver.steps("headless") == list(range(1, 2 * STEPS_PER_EPOCH + 1)), (
        "a step was lost or done again"
    )
    torch.testing.assert_close(
        store.state("headless"), finished_run("Dropping", 2, **CONFIG).state()
    )


def test_a_deleted_driver_pod_leaves_a_checkpoint_to_resume_from_and_no_cluster(
    start: Callable[..., Driver], namespace: Namespace, store: Store
) -> None:
    driver = start("first", "stopped")
    driver.wait_for_step("stopped", 3)
    log = subprocess.Popen(
        ["kubectl", "--namespace", namespace.name, "logs", "--follow", "first"],
        stdout=subprocess.PIPE,
        text=True,
    )
    namespace.kubectl("delete", "pod", "first", "--timeout=300s")
    output, _ = log.communicate(timeout=300)
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
    """The path of Helm's program, built with Go if there is none."""
    if found := shutil.which("helm"):
        return found
    if not shutil.which("go"):
        pytest.skip("neither helm nor go, which builds it, is on the path")
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        / "flyte-ddp"
        / f"helm-{HELM}"
    )
    if not (cache / "helm").exists():
        environment = {**os.environ, "GOBIN": str(cache)}
        subprocess.run(
            ["go", "install", f"helm.sh/helm/v3/cmd/helm@{HELM}"], env=environment, check=True
        )
    return str(cache / "helm")


def test_a_run_trains_under_the_operator_of_the_helm_chart(
    helm: str, start: Callable[..., Driver], tmp_path: Path
) -> None:
    # The chart sets no command: its own image begins with the operator, ours with tini alone.
    with_command = tmp_path / "with-command"
    *_, deployment = yaml.safe_load_all((ROOT / "deploy/operator/operator.yaml").read_text())
    command = json.dumps(deployment["spec"]["template"]["spec"]["containers"][0]["command"])
    with_command.write_text(f"#!/bin/sh\nexec sed 's/^\\( *\\)args:$/\\1command: {command}\\n&/'\n")
    with_command.chmod(0o755)
    operator = ("--namespace", "dask-operator")
    image = "jsonpath={.spec.template.spec.containers[0].image}"
    kept = kubectl(*operator, "get", "deployment", "dask-operator", "--output", image)
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
        start("helm", "helm").succeeded()
    finally:
        subprocess.run(
            [*release, "uninstall", "dask-operator", "--ignore-not-found", "--wait"], check=True
        )
        install_operator(kept)
