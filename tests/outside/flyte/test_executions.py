"""A user's first steps with a real Flyte, as real executions."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from flytekit.models.core.execution import WorkflowExecutionPhase as Phase
from flytekit.remote import FlyteRemote

from tests.outside.flyte.conftest import (
    DOMAIN,
    IMAGE,
    NAMESPACE,
    PROJECT,
    Checkout,
    Execution,
    assert_quiet,
    eventually,
    items,
    kubectl,
)
from tests.support.checkout import REPOSITORY, copy_repository
from tests.support.clusters import SMALL_CLUSTER

PACED = """
import time
from flyte_ddp.recipes.digits import Digits


class Paced(Digits):
    def losses(self, outputs, targets):
        time.sleep(0.1)
        return super().losses(outputs, targets)
"""
LEFT = re.compile(r"leaves?: the gang ended at step (\d+) and restarts from there")
DIGITS = str.maketrans("0123456789", "ghijklmnop")


@pytest.fixture(scope="module")
def version(checkout: Checkout, unique: str) -> str:
    """The version under which everything is registered by `make register`."""
    checkout.register(f"registered-{unique}", RETRAIN_INPUTS=json.dumps({"config": {"epochs": 2}}))
    return f"registered-{unique}"


@pytest.fixture(scope="module")
def trained(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory, unique: str) -> Execution:
    """A run on one node with a file of this machine's own; other runs of the tests have other names
    in it.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    names = [
        f"{first}{second}{third}o"
        for first in letters
        for second in "aeiou"
        for third in letters[:10]
    ]
    file = tmp_path_factory.mktemp("names") / "names.txt"
    file.write_text(
        "\n".join([*names, *(f"{unique.translate(DIGITS)}{name}" for name in names[:20])])
    )
    return checkout.train(
        "--recipe", "pet_names", "--data", str(file), "--config", json.dumps({"epochs": 2})
    )


def test_make_register_registers_every_task_workflow_and_launch_plan(
    checkout: Checkout, version: str
) -> None:
    remote = checkout.remote
    assert len(remote.list_tasks_by_version(version)) >= 10
    for workflow in (
        "single_node.single_node_training_wf",
        "multi_node.multi_node_training_wf",
        "retrain.retrain_wf",
    ):
        assert remote.fetch_workflow(name=f"workflows.{workflow}", version=version)
    assert remote.fetch_launch_plan(name="retrain", version=version).id.version == version


def test_uploaded_data_are_trained_on_one_node(trained: Execution) -> None:
    outputs = trained.outputs()
    assert len(outputs["epoch_accuracies"]) == 2
    (started,) = [event for event in trained.history(outputs) if event["event"] == "RunStarted"]
    assert started["world_size"] == 2
    assert "<svg" in trained.deck("train_on_one_node")
    assert_quiet(trained)


def test_several_nodes_train_without_configured_keys(checkout: Checkout, unique: str) -> None:
    seed = json.dumps({"epochs": 3, "seed": int(unique, 16)})
    execution = checkout.train_on_cluster("--recipe", "digits", "--config", seed)
    outputs = execution.outputs()
    assert len(outputs["epoch_accuracies"]) == 3
    (started,) = [event for event in execution.history(outputs) if event["event"] == "RunStarted"]
    assert started["world_size"] == 2
    assert not items("daskclusters", f"execution-id={execution.name}")
    assert_quiet(execution)


@pytest.fixture(scope="module")
def checkout_with_recipes(checkout: Checkout) -> Checkout:
    """The checkout with two more recipes: one file, and a package with files that import each
    other.
    """
    recipes = checkout.directory / "recipes"
    shutil.copy(REPOSITORY / "examples/recipes/wine.py", recipes / "wine.py")
    package = recipes / "cellar"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "layers.py").write_text(
        "from torch import nn\n\n\ndef net(n):\n    return nn.Linear(n, 3)\n"
    )
    (package / "wines.py").write_text(
        "from recipes.cellar.layers import net\nfrom recipes.wine import Wine\n\n\n"
        "class Cellar(Wine):\n    def model(self):\n        return net(13)\n"
    )
    return checkout


def test_a_recipe_in_a_package_of_two_files_trains_on_several_nodes(
    checkout_with_recipes: Checkout, unique: str
) -> None:
    config = json.dumps({"epochs": 3, "seed": int(unique, 16)})
    execution = checkout_with_recipes.train_on_cluster(
        "--recipe", "recipes.cellar.wines.Cellar", "--config", config
    )
    assert len(execution.outputs()["epoch_accuracies"]) == 3


SCRIPT = """
import sys
import torch.distributed as dist
from helper import GREETING
from flyte_ddp import session

dist.init_process_group("gloo")
for step in range(1, 4):
    dist.barrier()
    session.report(step=step, loss=1 / step)
print(GREETING, "from rank", dist.get_rank(), "of", dist.get_world_size())
if dist.get_rank() == 0:
    with open(f"{sys.argv[1]}/model.txt", "w") as file:
        file.write("trained")
"""


def test_a_script_runs_on_several_nodes_with_the_file_beside_it(
    checkout: Checkout, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text("GREETING = 'hello'\n")
    script = ("--script", str(tmp_path / "train.py"), "--arguments", '["{outputs}"]')
    execution = checkout.run(
        "workflows/script.py",
        "script_wf",
        *script,
        "--cluster",
        json.dumps({"kind": "kubernetes", **SMALL_CLUSTER}),
    )
    outputs = execution.outputs()
    assert execution.read(f"{outputs['outputs'].remote_source.rstrip('/')}/model.txt") == "trained"
    log = execution.read(outputs["log"].remote_source)
    assert all(f"[node {rank}] [rank {rank}] hello from rank {rank} of 2" in log for rank in (0, 1))
    assert [
        event["step"] for event in execution.history(outputs) if event["event"] == "Reported"
    ] == [1, 2, 3]
    assert "hello from rank 0 of 2" in execution.deck("run_script")
    assert not items("daskclusters", f"execution-id={execution.name}")


def test_a_users_task_trains_on_two_nodes_and_the_next_task_reads_its_file(
    checkout: Checkout, tmp_path: Path
) -> None:
    shutil.copy(
        REPOSITORY / "tests/support/kubernetes_task.py", checkout.directory / "workflows/own.py"
    )
    (tmp_path / "words.txt").write_text("the sum is")
    inputs = ("--text", str(tmp_path / "words.txt"), "--steps", "5")
    execution = checkout.run("workflows/own.py", "train_and_read", *inputs)
    outputs = execution.outputs()
    assert (outputs["o0"], outputs["o1"]) == ("the sum is 10 own", 0)
    assert "the Deck of rank 0" in execution.deck("own.train")


def test_a_deleted_pod_loses_only_the_last_steps(
    checkout: Checkout, unique: str, aborted: list[Execution]
) -> None:
    config = json.dumps({"epochs": 30, "seed": int(unique, 16), "checkpoint_interval": 20})
    execution = checkout.train("--recipe", "digits", "--config", config)
    aborted.append(execution)
    pod = execution.pod_of("train-on-one-node")
    eventually(lambda: "epoch 5/" in execution.log(pod), 600, f"epoch 5 in the log of {pod}")
    kubectl("delete", "pod", pod, "--wait=false")
    outputs = execution.outputs()
    loaded = [
        event for event in execution.history(outputs) if event["event"] == "CheckpointLoaded"
    ][-1]
    assert loaded["step"] > 0
    assert len(outputs["epoch_accuracies"]) == 30


def test_drained_nodes_of_a_worker_and_of_the_driver_cost_no_step(
    checkout_with_recipes: Checkout, unique: str, aborted: list[Execution], tmp_path: Path
) -> None:
    """One after the other, in one execution: its gang goes on smaller, and Flyte's next attempt
    where it was.
    """
    (checkout_with_recipes.directory / "recipes/paced.py").write_text(PACED)
    config = json.dumps({"epochs": 6, "seed": int(unique, 16), "checkpoint_interval": 1000})
    inputs = ("--recipe", "recipes.paced.Paced", "--config", config)
    execution = checkout_with_recipes.train_on_cluster(*inputs, min_nodes=1)
    aborted.append(execution)
    driver = execution.pod_of("train-on-cluster")

    def has_reached(step: int) -> bool:
        assert not execution.is_over, execution.sync().error
        return max(map(int, re.findall(r"step (\d+) of", execution.log(driver))), default=0) >= step

    with open(tmp_path / "log", "w") as log:
        follow = subprocess.Popen(
            ["kubectl", "--namespace", NAMESPACE, "logs", "--follow", driver], stdout=log
        )
    try:
        eventually(lambda: has_reached(20), 600, f"step 20 in the log of {driver}")
        nodes = {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in items("pods")}
        (cluster,) = clusters_of(driver)
        workers = [name for name in nodes if name.startswith(f"{cluster}-default-worker")]
        drain(
            next(nodes[name] for name in workers if nodes[name] != nodes[driver]),
            f"dask.org/cluster-name={cluster}",
        )
        left = eventually(
            lambda: LEFT.search(execution.log(driver)),
            120,
            "the start of a gang without the node",
        )
        eventually(lambda: has_reached(int(left[1]) + 20), 300, "20 steps after it")
        drain(nodes[driver], f"execution-id={execution.name}")
    finally:
        follow.terminate()
        follow.wait()
    outputs = execution.outputs()
    assert len(outputs["epoch_accuracies"]) == 6
    told = (tmp_path / "log").read_text()
    assert f"resumed at step {left[1]} of" in told
    (stopped,) = set(re.findall(r"the run was stopped at step (\d+)", told))
    loaded = [
        event["step"]
        for event in execution.history(outputs)
        if event["event"] == "CheckpointLoaded"
    ]
    assert loaded[0] == int(stopped) >= int(left[1]) + 20, "steps are done again"
    assert list(execution.errors("train_on_cluster")) == [0]


@pytest.fixture
def mended_nodes() -> Iterator[None]:
    """No node keeps the taint of the test."""
    yield
    kubectl("taint", "node", "--all", "upkeep-", check=False)


def test_a_retry_that_finds_all_nodes_tainted_is_repeated_until_they_are_not(
    checkout: Checkout, unique: str, aborted: list[Execution], mended_nodes: None
) -> None:
    """The operator's "no node could ever run a worker pod" ends a first attempt for good, and a
    retry recoverably.
    """
    config = json.dumps({"epochs": 12, "seed": int(unique, 16), "checkpoint_interval": 20})
    execution = checkout.train_on_cluster("--recipe", "digits", "--config", config)
    aborted.append(execution)
    first = execution.pod_of("train-on-cluster")
    eventually(lambda: "epoch 3/" in execution.log(first), 600, f"epoch 3 in the log of {first}")
    kubectl("delete", "pod", first, "--wait=false")
    execution.pod_of("train-on-cluster", attempt=1, timeout=300, running=False)
    kubectl("taint", "node", "--all", "upkeep=:NoSchedule")
    error = eventually(
        lambda: execution.errors("train_on_cluster").get(1), 120, "the end of the second attempt"
    )
    assert "with the taint upkeep" in error, error
    eventually(lambda: any(pod.endswith("-2") for pod in execution.pods()), 300, "a third attempt")
    kubectl("taint", "node", "--all", "upkeep-")
    outputs = execution.outputs()
    assert len(outputs["epoch_accuracies"]) == 12
    loaded = [
        event for event in execution.history(outputs) if event["event"] == "CheckpointLoaded"
    ][-1]
    assert loaded["step"] > 0


def test_an_abort_deletes_the_dask_cluster(
    checkout: Checkout, unique: str, aborted: list[Execution]
) -> None:
    config = json.dumps({"epochs": 2000, "seed": int(unique, 16)})
    execution = checkout.train_on_cluster("--recipe", "digits", "--config", config)
    aborted.append(execution)
    pod = execution.pod_of("train-on-cluster")
    eventually(lambda: "epoch 2/" in execution.log(pod), 600, f"epoch 2 in the log of {pod}")
    owned = f"dask.org/cluster-name={next(iter(clusters_of(pod)))}"
    checkout.remote.terminate(
        checkout.remote.fetch_execution(name=execution.name), "somebody changed their mind"
    )
    start = time.monotonic()
    eventually(lambda: not clusters_of(pod), 30, "an end to the Dask cluster")
    eventually(lambda: not items("pods", owned), 180, "an end to the pods of the Dask cluster")
    print(f"the Dask cluster and its pods were gone after {time.monotonic() - start:.0f} s")
    assert execution.wait().closure.phase == Phase.ABORTED


def drain(node: str, pods: str) -> None:
    """Drain `node` of the pods of a selector, and let it take pods again."""
    try:
        kubectl(
            "drain",
            node,
            f"--pod-selector={pods}",
            "--delete-emptydir-data",
            "--force",
            "--timeout=180s",
        )
    finally:
        kubectl("uncordon", node)


def clusters_of(pod: str) -> list[str]:
    """Return the names of the Dask clusters that a task's pod owns and nobody has deleted."""
    names = []
    for cluster in items("daskclusters"):
        metadata = cluster["metadata"]
        owners = [owner["name"] for owner in metadata.get("ownerReferences", [])]
        if "deletionTimestamp" not in metadata and pod in owners:
            names.append(metadata["name"])
    return names


def test_a_launch_plan_starts_by_hand_as_in_the_readme(
    checkout: Checkout, version: str, aborted: list[Execution]
) -> None:
    plan = (
        "pyflyte",
        "run",
        "--project",
        PROJECT,
        "--domain",
        DOMAIN,
        "remote-launchplan",
        f"retrain:{version}",
    )
    shown = checkout.call(*plan, "--help")
    assert shown.returncode == 0, shown.stderr
    assert "--kickoff_time" in shown.stdout
    execution = checkout.started(checkout.call(*plan, "--kickoff_time", "now"))
    aborted.append(execution)
    outputs = execution.outputs()
    assert outputs["outcome"] in ("promoted", "not_better", "unchanged")


@pytest.fixture
def every_minute(remote: FlyteRemote, tmp_path: Path) -> Checkout:
    """A checkout whose launch plan starts every minute."""
    copy_repository(tmp_path)
    settings = tmp_path / "settings.toml"
    assert '"0 3 * * *"' in settings.read_text()
    settings.write_text(settings.read_text().replace('"0 3 * * *"', '"* * * * *"'))
    return Checkout(tmp_path, remote)


def test_a_cron_of_a_minute_retrains_and_promotes(
    every_minute: Checkout, unique: str, aborted: list[Execution]
) -> None:
    version, start = f"cron-{unique}", time.monotonic()
    inputs = {"config": {"epochs": 2, "seed": int(unique, 16)}}
    where = ("--project", PROJECT, "--domain", DOMAIN)
    # The files of this checkout are not the image's, so they are shipped.
    registered = every_minute.call(
        *(
            "pyflyte",
            "register",
            *where,
            "--version",
            version,
            "--image",
            IMAGE,
            "--service-account",
            "flyte-ddp",
        ),
        *("--copy", "all", "workflows"),
        RETRAIN_INPUTS=json.dumps(inputs),
    )
    assert registered.returncode == 0, registered.stdout + registered.stderr
    activated = every_minute.call("pyflyte", "launchplan", *where, "--activate", "retrain", version)
    assert activated.returncode == 0, activated.stdout + activated.stderr

    def scheduled() -> list[Execution]:
        return [
            Execution(every_minute.remote, each.id.name)
            for each in every_minute.remote.recent_executions(limit=50)
            if each.spec.launch_plan.name == "retrain" and each.spec.launch_plan.version == version
        ]

    try:
        first = eventually(scheduled, 180, "a scheduled execution")[-1]
        assert first.outputs()["outcome"] in ("promoted", "not_better", "unchanged")
    finally:
        every_minute.call("pyflyte", "launchplan", *where, "--deactivate", "retrain", version)
        aborted.extend(scheduled())
    print(
        f"the first scheduled execution was over {time.monotonic() - start:.0f} s after the "
        "registration"
    )
