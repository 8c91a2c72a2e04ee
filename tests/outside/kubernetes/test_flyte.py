"""Tasks as Flyte 1.16 runs them: the very command of the packaged task, in a pod of the image, with
the arguments, the environment, labels and pod template that Flyte gives it, and inputs and outputs
in S3, under the service account of deploy/. Storage keys reach the pod as FLYTE_AWS_* alone, as in
Flyte's demo sandbox, and no other pod gets any.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
from flyteidl.core.errors_pb2 import ContainerError
from flytekit.types.file import FlyteFile

from flyte_ddp.cluster.kubernetes.manifest import cluster_name
from flyte_ddp.flyte.inputs import ClusterInput, TrainingOverrides
from flyte_ddp.recipes import config_of
from tests.outside.kubernetes.conftest import ROOT, Namespace, eventually, small_cluster
from tests.outside.kubernetes.flyte import NESTED, Flyte, Package, listed, literals
from tests.outside.kubernetes.store import Store
from tests.support import kubernetes_task

NEWER = "code that is newer than the image"
# Takes memory in its third step until the kernel kills. Kubernetes 1.28 and later (cgroup v2) kill
# all processes of the container then. Older versions kill the process with the highest score: here
# the container's first, and its end ends the others. Two processes share the memory, because one
# process that has it all, and the mapped libraries, would have a higher score yet.
HUNGRY = """
import os
from pathlib import Path
from flyte_ddp.recipes.digits import Digits


class Hungry(Digits):
    num_losses = 0

    def losses(self, outputs, targets):
        self.num_losses += 1
        if self.num_losses == 3:
            Path("/proc/1/oom_score_adj").write_text("1000")
            os.fork()
            hoard = []
            while True:
                hoard.append(b"." * (16 << 20))
        return super().losses(outputs, targets)
"""


@pytest.fixture(scope="module")
def start_flyte(namespace: Namespace, store: Store) -> Callable[[str], Flyte]:
    store.files.makedirs("flyte", exist_ok=True)
    return lambda execution: Flyte(namespace, store, execution)


@pytest.fixture(scope="module")
def tasks() -> Any:
    import tasks.train

    return tasks


@pytest.fixture(scope="module")
def digits(start_flyte: Callable[[str], Flyte], newer: Package, tasks: Any) -> Any:
    """The literal of the prepared data of recipe `digits`, from a pod of the task that prepares
    it.
    """
    inputs = literals(tasks.train.prepare, recipe="digits", config=TrainingOverrides())
    outputs = start_flyte("data").run(newer, "tasks.train.prepare", "n0/data", inputs)
    return outputs.literals["data"]


def cluster_input(tasks: Any, **fields: Any) -> Any:
    """A cluster of two small nodes, of the image that the task's own pod has."""
    return ClusterInput.from_json(json.dumps(small_cluster(**{"image": "", **fields})))


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A fast registration of a checkout that is newer than the image, and has a recipe and a task
    of a user's own.

    Its recipe `digits` prints that it is newer. Recipe `Hungry` takes all memory.
    """
    checkout = tmp_path_factory.mktemp("newer") / "checkout"
    checkout.mkdir()
    for name in ("flyte_ddp", "tasks", "workflows", "recipes"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "settings.toml", checkout)
    recipe = checkout / "flyte_ddp/recipes/digits.py"
    assert "    def model(self)" in recipe.read_text()
    recipe.write_text(
        recipe.read_text().replace(
            "    def model(self)", f"    print({NEWER!r})\n\n    def model(self)", 1
        )
    )
    (checkout / "recipes/hungry.py").write_text(HUNGRY)
    shutil.copy(ROOT / "tests/support/kubernetes_task.py", checkout / "workflows/own.py")
    return Package.of(checkout, tmp_path_factory.mktemp("newer-package"), "--fast")


def test_a_multi_node_task_runs_the_registered_code_on_its_cluster(
    start_flyte: Callable[[str], Flyte], newer: Package, tasks: Any, digits: Any
) -> None:
    flyte = start_flyte("wide")
    # Flyte's console makes every number a float.
    template = {"terminationGracePeriodSeconds": 20.0}
    inputs = literals(
        tasks.train.train_on_cluster,
        recipe="digits",
        config=config_of("digits", {"epochs": 3}),
        data=digits,
        cluster=cluster_input(tasks, pod_template=template),
    )
    pod = flyte.start(newer, "tasks.train.train_on_cluster", NESTED, inputs)
    (cluster,) = eventually(lambda: flyte.namespace.items("daskclusters"), 300, "a Dask cluster")
    name = cluster["metadata"]["name"]
    workers = eventually(lambda: flyte.namespace.pods(name, "worker"), 300, "a worker's pod")
    outputs, log = flyte.finish(pod, NESTED), flyte.namespace.log(pod)
    assert name == cluster_name(pod)
    assert cluster["metadata"]["ownerReferences"][0]["name"] == pod
    assert flyte.namespace.clusters() == []
    assert workers[0]["spec"]["terminationGracePeriodSeconds"] == 20
    assert all(f"[node {node}] [rank {node}] {NEWER}" in log for node in (0, 1))
    assert NEWER in log.splitlines()  # the driver's own
    assert flyte.store.keys["AWS_SECRET_ACCESS_KEY"] not in log
    assert len(listed(outputs, "epoch_accuracies")) == 3
    deck = flyte.read(NESTED, 0, "deck.html") or b""
    assert b"<svg" in deck
    assert flyte.store.keys["AWS_SECRET_ACCESS_KEY"].encode() not in deck


def test_a_workers_pod_that_was_killed_twice_for_its_memory_ends_the_run(
    start_flyte: Callable[[str], Flyte], newer: Package, tasks: Any, digits: Any
) -> None:
    flyte = start_flyte("hungry-twice")
    inputs = literals(
        tasks.train.train_on_cluster,
        recipe="recipes.hungry.Hungry",
        config=config_of("digits", {}),
        data=digits,
        cluster=cluster_input(tasks, num_nodes=1, worker_memory="1536Mi", max_restarts=16),
    )
    pod = flyte.start(newer, "tasks.train.train_on_cluster", "n1/data", inputs)
    flyte.namespace.wait_for_end(pod, timeout=600)
    error, log = flyte.error("n1/data"), flyte.namespace.log(pod)
    assert error is not None, log
    assert error.kind == ContainerError.NON_RECOVERABLE, error
    assert re.search(
        "cluster.kubernetes.worker_memory: expected more than 1536Mi, or .*OOMKilled",
        error.message,
        re.MULTILINE,
    ), error
    assert len(re.findall("restarts from (?:its last checkpoint|the beginning)", log)) == 1, log
    assert flyte.namespace.clusters() == []


def test_a_task_of_a_users_own_goes_on_when_a_pod_is_deleted_and_its_output_reaches_the_next_task(
    start_flyte: Callable[[str], Flyte], newer: Package
) -> None:
    flyte = start_flyte("own")
    flyte.store.files.pipe_file("flyte/words.txt", b"the total is")
    inputs = literals(kubernetes_task.train, text=FlyteFile("s3://flyte/words.txt"), steps=60)
    pod = flyte.start(newer, "workflows.own.train", NESTED, inputs)
    eventually(lambda: flyte.newest_step() >= 5, 600, "a checkpoint")
    worker = flyte.namespace.pods(cluster_name(pod), "worker")[0]["metadata"]["name"]
    flyte.namespace.kubectl("delete", "pod", worker, "--grace-period=0", "--force")
    flyte.namespace.wait_for_end(pod, timeout=600)
    log = flyte.namespace.log(pod)
    outputs = flyte.outputs(NESTED)
    assert outputs is not None, f"{flyte.error(NESTED)}\n{log}"
    # Even so killed, a worker may hear the SIGTERM in time to announce that it goes, which counts
    # no restart.
    assert re.search(
        (
            r"restarts from (its last checkpoint \(restart 1 of at most 2\)|there|step "
            r"\d+)"
        ),
        log,
    ), log
    assert outputs.literals["o1"].scalar.primitive.integer >= 5
    file = outputs.literals["o0"]
    assert file.scalar.blob.uri.startswith(flyte.raw(NESTED, 0))
    deck = (flyte.read(NESTED, 0, "deck.html") or b"").decode()
    assert all(text in deck for text in ("the Deck of rank 0", "Resumed at step", "finished"))
    assert flyte.namespace.clusters() == []
    assert flyte.store.keys["AWS_SECRET_ACCESS_KEY"] not in log + deck
    next_inputs = literals(kubernetes_task.read, file=file)
    (contents,) = flyte.run(newer, "workflows.own.read", "n3/data", next_inputs).literals.values()
    assert contents.scalar.primitive.string_value == "the total is 120 own"
