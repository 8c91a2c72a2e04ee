"""Tasks as Flyte runs them: the very command of the packaged task, in a pod of the image, with its inputs and outputs
in S3, under the service account of deploy/. What stands for Flyte here only fills in the command's placeholders."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.core.errors_pb2 import ContainerError, ErrorDocument
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from flyte_ddp.events import RunStarted, read_history
from tests.kubernetes.conftest import IMAGE, ROOT, Namespace, Store, apply, eventually, small_cluster

PROJECT, DOMAIN = "flytesnacks", "development"
NEWER = "code that is newer than the image"


@dataclass
class Package:
    """What `pyflyte package` made of a checkout."""

    directory: Path
    tasks: dict[str, TaskSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, checkout: Path, directory: Path, *options: str) -> Package:
        archive = directory / "package.tgz"
        command = [str(Path(sys.executable).with_name("pyflyte")), "--pkgs", "workflows", "package"]
        environment = {**os.environ, "SANDBOX": "1", "WANDB_MODE": "offline"}
        subprocess.run(
            [*command, "--image", IMAGE, "--output", str(archive), *options],
            cwd=checkout,
            env=environment,
            check=True,
            capture_output=True,
        )
        shutil.unpack_archive(archive, directory)
        package = cls(directory)
        for file in directory.glob("*_1.pb"):  # 1: a task
            spec = TaskSpec.FromString(file.read_bytes())
            package.tasks[spec.template.id.name] = spec
        return package

    @property
    def code(self) -> Path:
        """The archive that a fast registration uploads."""
        (archive,) = self.directory.glob("fast*.tar.gz")
        return archive


@dataclass
class Flyte:
    """An execution's place in the object store, and the pods of its nodes."""

    namespace: Namespace
    store: Store
    execution: str

    def prefix(self, node: str) -> str:
        return f"flyte/metadata/propeller/{PROJECT}-{DOMAIN}-{self.execution}/{node}/data"

    def start(self, package: Package, task: str, node: str, inputs: LiteralMap, attempt: int = 0) -> str:
        """Start an attempt's pod; returns its name."""
        container = package.tasks[task].template.container
        pod = f"{self.execution}-{node}-{attempt}"
        prefix = self.prefix(node)
        self.store.files.pipe_file(f"{prefix}/inputs.pb", inputs.SerializeToString())
        raw = f"s3://flyte/raw/8d/{pod}"
        values = {
            "{{.input}}": f"s3://{prefix}/inputs.pb",
            "{{.outputPrefix}}": f"s3://{prefix}/{attempt}",
            "{{.rawOutputDataPrefix}}": raw,
            "{{.checkpointOutputPrefix}}": f"{raw}/_flytecheckpoints",
            "{{.prevCheckpointPrefix}}": '""',
        }
        if "pyflyte-fast-execute" in container.args:
            self.store.files.put_file(str(package.code), f"flyte/code/{package.code.name}")
            values["{{ .remote_package_path }}"] = f"s3://flyte/code/{package.code.name}"
        arguments = [values.get(argument, argument) for argument in container.args]
        assert not [each for each in arguments if "{{" in each]
        environment = {each.key: each.value for each in container.env} | {
            "FLYTE_INTERNAL_EXECUTION_ID": self.execution,
            "FLYTE_INTERNAL_EXECUTION_PROJECT": PROJECT,
            "FLYTE_INTERNAL_EXECUTION_DOMAIN": DOMAIN,
            "FLYTE_ATTEMPT_NUMBER": str(attempt),
        }
        apply(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": pod,
                    "namespace": self.namespace.name,
                    "labels": {"execution-id": self.execution, "node-id": node},
                },
                "spec": {
                    "restartPolicy": "Never",
                    "serviceAccountName": "flyte-ddp",
                    "containers": [
                        {
                            "name": pod,
                            "image": container.image,
                            "imagePullPolicy": "IfNotPresent",
                            "args": arguments,
                            "env": [{"name": name, "value": value} for name, value in environment.items()],
                            "envFrom": [{"secretRef": {"name": "flyte-storage"}}],
                            # Not the template's: these nodes have two cores, which other pods share.
                            "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
                        }
                    ],
                },
            }
        )
        return pod

    def run(self, package: Package, task: str, node: str, inputs: LiteralMap) -> LiteralMap:
        """The outputs of a task that ends well at its first attempt."""
        pod = self.start(package, task, node, inputs)
        code = self.namespace.wait_for_end(pod, timeout=300)
        outputs = self.outputs(node)
        assert outputs is not None, f"exit code {code}\n{self.error(node)}\n{self.namespace.log(pod)}"
        return outputs

    def read(self, node: str, attempt: int, name: str) -> bytes | None:
        try:
            return bytes(self.store.files.cat_file(f"{self.prefix(node)}/{attempt}/{name}"))
        except FileNotFoundError:
            return None

    def outputs(self, node: str, attempt: int = 0) -> LiteralMap | None:
        raw = self.read(node, attempt, "outputs.pb")
        return None if raw is None else LiteralMap.FromString(raw)

    def error(self, node: str, attempt: int = 0) -> ContainerError | None:
        raw = self.read(node, attempt, "error.pb")
        return None if raw is None else ErrorDocument.FromString(raw).error

    def started(self, outputs: LiteralMap, directory: Path) -> RunStarted:
        """The beginning of the last attempt, from the history that a training task returned."""
        file = directory / "history.jsonl"
        self.store.files.get_file(outputs.literals["history"].scalar.blob.uri, str(file))
        return [event for event in read_history(file) if isinstance(event, RunStarted)][-1]


def literals(task: Any, **inputs: Any) -> LiteralMap:
    """`inputs` of a task as Flyte passes them on; a literal stays one."""
    given = {name: value for name, value in inputs.items() if not hasattr(value, "WhichOneof")}
    interface = task.python_interface.inputs
    kinds = task.interface.inputs
    context = FlyteContextManager.current_context()
    made = TypeEngine.dict_to_literal_map(context, given, {name: interface[name] for name in given}).to_flyte_idl()
    for name in inputs.keys() - given.keys():
        made.literals[name].CopyFrom(inputs[name])
    for name, (_, default) in task.python_interface.inputs_with_defaults.items():
        if name not in inputs:
            literal = TypeEngine.to_literal(context, default, interface[name], kinds[name].type)
            made.literals[name].CopyFrom(literal.to_flyte_idl())
    return made


def listed(outputs: LiteralMap, name: str) -> list[Any]:
    return list(outputs.literals[name].collection.literals)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return Package.of(ROOT, tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def start_flyte(namespace: Namespace, store: Store) -> Callable[[str], Flyte]:
    names = {
        "FLYTE_AWS_ENDPOINT": store.url,
        "FLYTE_AWS_ACCESS_KEY_ID": store.keys["AWS_ACCESS_KEY_ID"],
        "FLYTE_AWS_SECRET_ACCESS_KEY": store.keys["AWS_SECRET_ACCESS_KEY"],
    }
    metadata = {"name": "flyte-storage", "namespace": namespace.name}
    apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": names})
    store.files.mkdir("flyte")
    return lambda execution: Flyte(namespace, store, execution)


@pytest.fixture(scope="module")
def tasks() -> Any:
    import tasks.prepare
    import tasks.scaling
    import tasks.sweep
    import tasks.train

    return tasks


@pytest.fixture(scope="module")
def digits(start_flyte: Callable[[str], Flyte], package: Package, tasks: Any) -> Any:
    """The literal of the prepared data of recipe `digits`."""
    return prepared(start_flyte("data"), package, tasks, "digits")


def cluster_input(tasks: Any, **fields: Any) -> Any:
    """A cluster of two small nodes, of the image that the task's own pod has."""
    return tasks.inputs.ClusterInput.from_json(
        json.dumps(small_cluster(**{"image": "", "env_from_secrets": ["storage"], **fields}))
    )


def prepared(flyte: Flyte, package: Package, tasks: Any, recipe: str) -> Any:
    """The literal of the recipe's prepared data, from a pod of the task that prepares it."""
    inputs = literals(tasks.prepare.prepare, recipe=recipe, config=tasks.inputs.TrainingOverrides())
    return flyte.run(package, "tasks.prepare.prepare", "n0", inputs).literals["data"]


def test_attempts_go_on_from_each_others_checkpoints_until_one_leaves_typed_outputs_and_a_deck(
    start_flyte: Callable[[str], Flyte], package: Package, tasks: Any, digits: Any, tmp_path: Path
) -> None:
    flyte = start_flyte("retried")
    overrides = tasks.inputs.TrainingOverrides(epochs=150, checkpoint_interval=1, global_batch_size=360)
    inputs = literals(
        tasks.train.train_on_one_node,
        recipe="digits",
        config=overrides,
        data=digits,
        num_processes=2,
    )
    checkpoints = f"flyte/raw/checkpoints/{PROJECT}/{DOMAIN}/retried/n1"

    def newest_step() -> int:
        files = flyte.store.files
        files.invalidate_cache()
        found = files.glob(f"{checkpoints}/step-*.json")
        return max((int(path.rsplit("step-", 1)[1].removesuffix(".json")) for path in found), default=0)

    def train(attempt: int) -> str:
        return flyte.start(package, "tasks.train.train_on_one_node", "n1", inputs, attempt)

    # A rank is killed: the task itself ends, and says that another attempt may do better.
    pod = train(0)
    eventually(lambda: newest_step() >= 5, 240, "a checkpoint of the first attempt")
    kill_a_rank = "kill -KILL $(grep -l '[s]pawn_main' /proc/[0-9]*/cmdline | cut -d/ -f3 | sort -n | tail -n 1)"
    flyte.namespace.kubectl("exec", pod, "--", "bash", "-c", kill_a_rank)
    flyte.namespace.wait_for_end(pod)
    error = flyte.error("n1", 0)
    assert error is not None, flyte.namespace.log(pod)
    assert error.kind == ContainerError.RECOVERABLE, error
    assert "was killed by SIGKILL" in error.message
    assert flyte.outputs("n1", 0) is None
    first_end = newest_step()

    # The whole pod is killed, as by a node that goes: it can leave no word.
    pod = train(1)
    eventually(lambda: newest_step() >= first_end + 5, 240, "a checkpoint of the second attempt")
    flyte.namespace.kubectl("exec", pod, "--", "bash", "-c", "kill -KILL $(cat /proc/1/task/1/children)")
    flyte.namespace.wait_for_end(pod)
    assert flyte.error("n1", 1) is None
    assert flyte.outputs("n1", 1) is None
    second_end = newest_step()

    pod = train(2)
    assert flyte.namespace.wait_for_end(pod, timeout=400) == 0, flyte.namespace.log(pod)
    outputs = flyte.outputs("n1", 2)
    assert outputs is not None, f"{flyte.error('n1', 2)}\n{flyte.namespace.log(pod)}"
    assert flyte.error("n1", 2) is None
    accuracies = [
        each.scalar.primitive.float_value for each in outputs.literals["epoch_accuracies"].collection.literals
    ]
    assert len(accuracies) == 150
    assert accuracies[-1] > 0.9
    assert flyte.started(outputs, tmp_path).resumed_step >= second_end
    model = tmp_path / "model_state.pt"
    flyte.store.files.get_file(outputs.literals["model_state"].scalar.blob.uri, str(model))
    assert torch.load(model, weights_only=True)
    deck = flyte.read("n1", 2, "deck.html")
    assert deck is not None
    assert "<svg" in deck.decode()
    assert flyte.store.keys["AWS_SECRET_ACCESS_KEY"] not in deck.decode() + flyte.namespace.log(pod)


def test_a_users_mistake_is_not_tried_again_and_is_one_line(
    start_flyte: Callable[[str], Flyte], package: Package, tasks: Any
) -> None:
    flyte = start_flyte("mistaken")
    inputs = literals(tasks.prepare.prepare, recipe="no_such_recipe", config=tasks.inputs.TrainingOverrides())
    pod = flyte.start(package, "tasks.prepare.prepare", "n0", inputs)
    flyte.namespace.wait_for_end(pod)
    error = flyte.error("n0")
    assert error is not None, flyte.namespace.log(pod)
    assert error.kind == ContainerError.NON_RECOVERABLE
    assert "recipe: 'no_such_recipe' is unknown; accepted are" in error.message
    assert flyte.outputs("n0") is None


@pytest.fixture(scope="module")
def newer(tmp_path_factory: pytest.TempPathFactory) -> Package:
    """A fast registration of a checkout whose recipe `digits` says that it is newer, in the driver and in the ranks."""
    checkout = tmp_path_factory.mktemp("newer") / "checkout"
    checkout.mkdir()
    for name in ("flyte_ddp", "tasks", "workflows", "recipes"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "settings.toml", checkout)
    recipe = checkout / "flyte_ddp/recipes/digits.py"
    assert "    def model(self)" in recipe.read_text()
    recipe.write_text(
        recipe.read_text().replace("    def model(self)", f"    print({NEWER!r})\n\n    def model(self)", 1)
    )
    return Package.of(checkout, tmp_path_factory.mktemp("newer-package"), "--fast")


def test_a_multi_node_task_starts_its_cluster_and_its_workers_run_code_that_is_newer_than_the_image(
    start_flyte: Callable[[str], Flyte], newer: Package, tasks: Any, tmp_path: Path
) -> None:
    flyte = start_flyte("wide")
    inputs = literals(
        tasks.train.train_on_cluster,
        recipe="digits",
        config=tasks.inputs.TrainingOverrides(epochs=3),
        data=prepared(flyte, newer, tasks, "digits"),
        cluster=cluster_input(tasks),
    )
    assert NEWER in flyte.namespace.log("wide-n0-0")
    pod = flyte.start(newer, "tasks.train.train_on_cluster", "n1", inputs)
    (cluster,) = eventually(lambda: flyte.namespace.items("daskclusters"), 120, "a Dask cluster")
    policy = flyte.namespace.items("networkpolicies", "app.kubernetes.io/managed-by=flyte-ddp")[0]
    code = flyte.namespace.wait_for_end(pod, timeout=400)
    log = flyte.namespace.log(pod)
    outputs = flyte.outputs("n1")
    assert outputs is not None, f"exit code {code}\n{flyte.error('n1')}\n{log}"
    assert cluster["metadata"]["ownerReferences"][0]["name"] == pod
    assert flyte.namespace.clusters() == []
    callers = [each.get("podSelector") for each in policy["spec"]["ingress"][1]["from"]]
    assert {"matchLabels": {"execution-id": "wide", "node-id": "n1"}} in callers
    for node in (0, 1):
        assert f"[node {node}] [rank {node}] {NEWER}" in log
    assert flyte.started(outputs, tmp_path).world_size == 2
    assert len(listed(outputs, "epoch_accuracies")) == 3
    assert "<svg" in (flyte.read("n1", 0, "deck.html") or b"").decode()


def rows(flyte: Flyte, outputs: LiteralMap) -> list[dict[str, str]]:
    """The table that a task returned as a CSV file."""
    text = flyte.store.files.cat_file(outputs.literals["csv"].scalar.blob.uri).decode()
    return list(csv.DictReader(text.splitlines()))


def test_a_sweep_trains_its_models_side_by_side_on_a_cluster_of_its_own(
    start_flyte: Callable[[str], Flyte], package: Package, tasks: Any, digits: Any
) -> None:
    flyte = start_flyte("swept")
    inputs = literals(
        tasks.sweep.train_sweep,
        recipe="digits",
        config=tasks.inputs.TrainingOverrides(epochs=2),
        grid={"learning_rate": [0.0001, 0.005], "global_batch_size": [64, 128]},
        data=digits,
        cluster=cluster_input(tasks),
    )
    outputs = flyte.run(package, "tasks.sweep.train_sweep", "n1", inputs)
    table = rows(flyte, outputs)
    assert len(table) == 4 * 2
    assert {row["status"] for row in table} == {"finished"}
    best = min((row for row in table if row["epoch"] == "2"), key=lambda row: float(row["test_loss"]))
    assert float(best["learning_rate"]) == 0.005
    assert listed(outputs, "best_accuracies")[-1].scalar.primitive.float_value == float(best["accuracy"])
    assert "<svg" in (flyte.read("n1", 0, "deck.html") or b"").decode()
    assert flyte.namespace.clusters() == []


def test_a_scaling_study_measures_one_and_two_nodes_of_one_cluster(
    start_flyte: Callable[[str], Flyte], package: Package, tasks: Any, digits: Any
) -> None:
    flyte = start_flyte("scaled")
    inputs = literals(
        tasks.scaling.train_at_world_sizes,
        recipe="digits",
        config=tasks.inputs.TrainingOverrides(epochs=2),
        data=digits,
        world_sizes=[1, 2],
        learning_rates=[],
        target_loss=0.0,
        projected_world_sizes=[4],
        cluster=cluster_input(tasks),
    )
    outputs = flyte.run(package, "tasks.scaling.train_at_world_sizes", "n1", inputs)
    kinds = [(int(row["world_size"]), row["kind"]) for row in rows(flyte, outputs)]
    assert kinds == [(1, "measured"), (2, "measured"), (4, "projected")]
    losses = [float(row["final_test_loss"]) for row in rows(flyte, outputs) if row["kind"] == "measured"]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)  # the same global batch, but for the draws of dropout
    assert "projected" in (flyte.read("n1", 0, "deck.html") or b"").decode()
    assert flyte.namespace.clusters() == []
