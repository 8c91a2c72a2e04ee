"""Tasks as Flyte 1.16 runs them: the very command of the packaged task, in a pod of the image, with
the arguments, the environment, labels and pod template that Flyte gives it, and inputs and outputs
in S3, under the service account of deploy/. Storage keys reach the pod as FLYTE_AWS_* alone, as in
Flyte's demo sandbox, and no other pod gets any.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flyteidl.core.errors_pb2 import ContainerError
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit.types.file import FlyteFile

from flyte_ddp.cluster.kubernetes.manifest import cluster_name
from flyte_ddp.recipes import config_of
from tests.kubernetes.conftest import ROOT, Namespace, eventually, small_cluster
from tests.kubernetes.flyte import DOMAIN, NESTED, PROJECT, Flyte, Package, listed, literals
from tests.kubernetes.store import FORBIDDEN, Store
from tests.support import kubernetes_task

NEWER = "code that is newer than the image"
OWN = "a recipe of a user's own"
# Takes memory in its third step until the kernel kills. Kubernetes 1.28 and later (cgroup v2) kill
# all processes of the container then. Older ones kill the one with the highest score: here the
# container's first, whose end ends the others. Two processes share the memory, because one that has
# it all, and the mapped libraries, would have a higher score yet.
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
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    # --fast: this checkout's code on an older image
    options = os.environ.get("FLYTE_DDP_TEST_PACKAGE", "").split()
    return Package.of(ROOT, tmp_path_factory.mktemp("package"), *options)


@pytest.fixture(scope="module")
def start_flyte(namespace: Namespace, store: Store) -> Callable[[str], Flyte]:
    store.files.makedirs("flyte", exist_ok=True)
    return lambda execution: Flyte(namespace, store, execution)


@pytest.fixture(scope="module")
def tasks() -> Any:
    import tasks.prepare
    import tasks.study
    import tasks.train

    return tasks


@pytest.fixture(scope="module")
def digits(start_flyte: Callable[[str], Flyte], package: Package, tasks: Any) -> Any:
    """The literal of the prepared data of recipe `digits`."""
    return prepared(start_flyte("data"), package, tasks, "digits")


def cluster_input(tasks: Any, **fields: Any) -> Any:
    """A cluster of two small nodes, of the image that the task's own pod has."""
    return tasks.inputs.ClusterInput.from_json(json.dumps(small_cluster(**{"image": "", **fields})))


def prepared(flyte: Flyte, package: Package, tasks: Any, recipe: str) -> Any:
    """The literal of the recipe's prepared data, from a pod of the task that prepares it."""
    inputs = literals(tasks.prepare.prepare, recipe=recipe, config=tasks.inputs.TrainingOverrides())
    return flyte.run(package, "tasks.prepare.prepare", "n0/data", inputs).literals["data"]


def test_a_killed_rank_restarts_within_the_task_and_a_killed_pod_with_flytes_next_attempt(
    start_flyte: Callable[[str], Flyte], package: Package, tasks: Any, digits: Any, tmp_path: Path
) -> None:
    flyte = start_flyte("retried")
    config = config_of(
        "digits", {"epochs": 150, "checkpoint_interval": 1, "global_batch_size": 360}
    )
    inputs = literals(
        tasks.train.train_on_one_node,
        recipe="digits",
        config=config,
        data=digits,
        num_processes=2,
    )
    checkpoints = f"flyte/data/checkpoints/{PROJECT}/{DOMAIN}/retried/n2-0-n2-n1-0-n0"

    def newest_step() -> int:
        files = flyte.store.files
        files.invalidate_cache()
        found = files.glob(f"{checkpoints}/step-*.json")
        return max(
            (int(path.rsplit("step-", 1)[1].removesuffix(".json")) for path in found), default=0
        )

    def train(attempt: int) -> str:
        return flyte.start(package, "tasks.train.train_on_one_node", NESTED, inputs, attempt)

    # A rank is killed: all ranks start again within the task.
    pod = train(0)
    eventually(lambda: newest_step() >= 5, 600, "a checkpoint of the first attempt")
    kill_a_rank = (
        "kill -KILL $(grep -l '[f]orkserver' /proc/[0-9]*/cmdline | cut -d/ -f3 | sort "
        "-n | tail -n 1)"
    )
    flyte.namespace.kubectl("exec", pod, "--", "bash", "-c", kill_a_rank)
    restarted = "(restart 1 of at most 3): rank"
    eventually(lambda: restarted in flyte.namespace.log(pod), 60, "a restart of the ranks")
    first_end = newest_step()
    eventually(lambda: newest_step() >= first_end + 5, 600, "a checkpoint after the restart")

    # The whole pod is killed, as by a node that goes: it can leave no word.
    flyte.namespace.kubectl(
        "exec", pod, "--", "bash", "-c", "kill -KILL $(cat /proc/1/task/1/children)"
    )
    flyte.namespace.wait_for_end(pod)
    assert flyte.error(NESTED, 0) is None
    assert flyte.outputs(NESTED, 0) is None
    second_end = newest_step()

    pod = train(1)
    assert flyte.namespace.wait_for_end(pod, timeout=900) == 0, flyte.namespace.log(pod)
    outputs = flyte.outputs(NESTED, 1)
    assert outputs is not None, f"{flyte.error(NESTED, 1)}\n{flyte.namespace.log(pod)}"
    assert flyte.error(NESTED, 1) is None
    accuracies = [
        each.scalar.primitive.float_value
        for each in outputs.literals["epoch_accuracies"].collection.literals
    ]
    assert len(accuracies) == 150
    assert accuracies[-1] > 0.9
    assert flyte.state(outputs, tmp_path).resumed_step >= second_end
    model = tmp_path / "model_state.pt"
    flyte.store.files.get_file(outputs.literals["model_state"].scalar.blob.uri, str(model))
    assert torch.load(model, weights_only=True)
    deck = flyte.read(NESTED, 1, "deck.html")
    assert deck is not None
    assert "<svg" in deck.decode()
    assert flyte.store.keys["AWS_SECRET_ACCESS_KEY"] not in deck.decode() + flyte.namespace.log(pod)


def test_a_user_error_is_one_line_and_not_retried(
    start_flyte: Callable[[str], Flyte], package: Package, tasks: Any, digits: Any
) -> None:
    flyte = start_flyte("mistaken")
    unknown = literals(
        tasks.prepare.prepare, recipe="no_such_recipe", config=tasks.inputs.TrainingOverrides()
    )
    forbidden = literals(
        tasks.train.train_on_cluster,
        recipe="digits",
        config=config_of("digits", {}),
        data=digits,
        cluster=cluster_input(tasks),
        checkpoints=f"s3://{FORBIDDEN}/run",
    )
    mistakes = {
        flyte.start(package, "tasks.prepare.prepare", "n0/data", unknown): (
            "n0/data",
            "recipe: .*'no_such_recipe'",
        ),
        flyte.start(package, "tasks.train.train_on_cluster", "n1/data", forbidden): (
            "n1/data",
            f"checkpoints: .*s3://{FORBIDDEN}/run.*",
        ),
    }
    for pod, (node, message) in mistakes.items():
        flyte.namespace.wait_for_end(pod)
        error = flyte.error(node)
        log = flyte.namespace.log(pod)
        assert error is not None, log
        assert error.kind == ContainerError.NON_RECOVERABLE, error
        assert re.search(message, error.message), error
        assert flyte.outputs(node) is None
        assert "is starting in namespace" not in log, "a cluster was created"


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A fast registration of a checkout that is newer than the image, and has recipes of a user's
    own.

    Its recipe `digits` prints that it is newer. Recipe `Twin` is a package of two files, `Hungry`
    takes all memory, and the image has neither.
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
    package = checkout / "recipes/twins"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "words.py").write_text(f"print({OWN!r})\n")
    (package / "recipe.py").write_text(
        "import recipes.twins.words\nfrom flyte_ddp.recipes.digits import Digits\n\n\nclass "
        "Twin(Digits):\n    pass\n"
    )
    (checkout / "recipes/hungry.py").write_text(HUNGRY)
    shutil.copy(ROOT / "tests/support/kubernetes_task.py", checkout / "workflows/own.py")
    return Package.of(checkout, tmp_path_factory.mktemp("newer-package"), "--fast")


def test_a_multi_node_task_runs_the_registered_code_and_the_users_recipe_on_its_cluster(
    start_flyte: Callable[[str], Flyte], newer: Package, tasks: Any, digits: Any, tmp_path: Path
) -> None:
    flyte = start_flyte("wide")
    # with Flyte's console every number is a float
    template = {"terminationGracePeriodSeconds": 20.0}
    inputs = literals(
        tasks.train.train_on_cluster,
        recipe="recipes.twins.recipe.Twin",
        config=config_of("digits", {"epochs": 3}),
        data=digits,
        cluster=cluster_input(tasks, pod_template=template),
    )
    pod = flyte.start(newer, "tasks.train.train_on_cluster", NESTED, inputs)
    (cluster,) = eventually(lambda: flyte.namespace.items("daskclusters"), 300, "a Dask cluster")
    name = cluster["metadata"]["name"]
    policy = flyte.namespace.policy(name)
    workers = eventually(lambda: flyte.namespace.pods(name, "worker"), 300, "a worker's pod")
    outputs, log = flyte.finish(pod, NESTED), flyte.namespace.log(pod)
    assert name == cluster_name(pod)
    assert cluster["metadata"]["ownerReferences"][0]["name"] == pod
    assert flyte.namespace.clusters() == []
    callers = [each.get("podSelector") for each in policy["spec"]["ingress"][1]["from"]]
    assert flyte.labels("tasks.train.train_on_cluster", NESTED) in [
        each["matchLabels"] for each in callers if each
    ]
    assert workers[0]["spec"]["terminationGracePeriodSeconds"] == 20
    for printed in (NEWER, OWN):
        for node in (0, 1):
            assert f"[node {node}] [rank {node}] {printed}" in log
        assert printed in log.splitlines()  # the driver's own
    assert flyte.store.keys["AWS_SECRET_ACCESS_KEY"] not in log
    started = flyte.state(outputs, tmp_path).started
    assert started is not None
    assert started.world_size == 2
    assert len(listed(outputs, "epoch_accuracies")) == 3
    deck = (flyte.read(NESTED, 0, "deck.html") or b"").decode()
    assert "<svg" in deck
    assert flyte.store.keys["AWS_SECRET_ACCESS_KEY"] not in deck


def test_a_pod_that_was_killed_twice_for_its_memory_ends_the_run_at_the_next_attempt(
    start_flyte: Callable[[str], Flyte], newer: Package, tasks: Any, digits: Any
) -> None:
    flyte = start_flyte("hungry")
    inputs = literals(
        tasks.train.train_on_one_node,
        recipe="recipes.hungry.Hungry",
        config=config_of("digits", {}),
        data=digits,
        num_processes=1,
    )

    def train(attempt: int) -> int:
        limits = {"cpu": "1", "memory": "1536Mi"}
        pod = flyte.start(
            newer, "tasks.train.train_on_one_node", "n1/data", inputs, attempt, limits
        )
        return flyte.namespace.wait_for_end(pod)

    for attempt in (0, 1):
        assert train(attempt) == 137, flyte.namespace.log(flyte.name("n1/data", attempt))
        assert flyte.error("n1/data", attempt) is None  # nothing in the pod survived to write one
    train(2)
    error = flyte.error("n1/data", 2)
    assert error is not None, flyte.namespace.log(flyte.name("n1/data", 2))
    assert error.kind == ContainerError.NON_RECOVERABLE, error
    assert re.search(
        r"memory: expected a larger limit of the task \(training.memory_gib in settings.toml\).* "
        r"ran out of memory "
        rf"twice\. The pod of the attempt before, {flyte.name('n1/data', 1)}, ended with "
        r"OOMKilled$",
        error.message,
        re.MULTILINE,
    ), error


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
    inputs = literals(kubernetes_task.train, text=FlyteFile("s3://flyte/words.txt"), steps=100)
    pod = flyte.start(newer, "workflows.own.train", NESTED, inputs)
    checkpoints = f"flyte/data/checkpoints/{PROJECT}/{DOMAIN}/own/n2-0-n2-n1-0-n0"

    def newest_step() -> int:
        flyte.store.files.invalidate_cache()
        found = flyte.store.files.glob(f"{checkpoints}/step-*.json")
        return max(
            (int(path.rsplit("step-", 1)[1].removesuffix(".json")) for path in found), default=0
        )

    eventually(lambda: newest_step() >= 5, 600, "a checkpoint")
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
    for text in (log, deck):
        assert flyte.store.keys["AWS_SECRET_ACCESS_KEY"] not in text
    next_inputs = literals(kubernetes_task.read, file=file)
    (contents,) = flyte.run(newer, "workflows.own.read", "n3/data", next_inputs).literals.values()
    assert contents.scalar.primitive.string_value == "the total is 200 own"


def rows(flyte: Flyte, outputs: LiteralMap) -> list[dict[str, str]]:
    """The table that a task returned as a CSV file."""
    text = flyte.store.files.cat_file(outputs.literals["csv"].scalar.blob.uri).decode()
    return list(csv.DictReader(text.splitlines()))


def test_a_sweep_trains_its_models_side_by_side_on_a_cluster_of_its_own(
    start_flyte: Callable[[str], Flyte], package: Package, tasks: Any, digits: Any
) -> None:
    flyte = start_flyte("swept")
    inputs = literals(
        tasks.study.train_sweep,
        recipe="digits",
        config=tasks.inputs.TrainingOverrides(epochs=2),
        trials=[
            {"learning_rate": rate, "global_batch_size": size}
            for rate in (0.0001, 0.005)
            for size in (64, 128)
        ],
        data=digits,
        cluster=cluster_input(tasks),
    )
    outputs = flyte.run(package, "tasks.study.train_sweep", "n1/data", inputs)
    table = rows(flyte, outputs)
    assert len(table) == 4 * 2
    assert {row["status"] for row in table} == {"finished"}
    best = min(
        (row for row in table if row["epoch"] == "2"), key=lambda row: float(row["test_loss"])
    )
    assert float(best["learning_rate"]) == 0.005
    assert listed(outputs, "best_accuracies")[-1].scalar.primitive.float_value == float(
        best["accuracy"]
    )
    assert "<svg" in (flyte.read("n1/data", 0, "deck.html") or b"").decode()
    assert flyte.namespace.clusters() == []
