"""Tasks of Flyte 2 on a real one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from pyarrow import parquet

from flyte_ddp.promotion.champion import LAST_CHALLENGE, ChampionStore
from tests.outside.flyte2.conftest import (
    call,
    cluster_pods,
    clusters_of,
    kubectl,
    pods,
    wait_for_line,
)
from tests.outside.kubernetes.conftest import eventually
from tests.support.checkout import REPOSITORY, own_environment
from tests.support.clusters import SMALL_CLUSTER

KEYS = {
    "endpoint_url": os.environ.get("FLYTE_AWS_ENDPOINT"),
    "key": os.environ.get("FLYTE_AWS_ACCESS_KEY_ID"),
    "secret": os.environ.get("FLYTE_AWS_SECRET_ACCESS_KEY"),
}
FLYTE_1 = """
import sys
from workflows.single_node import single_node_training_wf

outputs = single_node_training_wf(
    recipe="digits", config={"epochs": 3}, num_processes=2, output=sys.argv[1]
)
print("accuracies", outputs.epoch_accuracies)
"""
DIGITS = {"recipe": "digits", "config": {"epochs": 3}, "num_processes": 2}
HERE = """
import json, sys
import flyte
from workflows.flyte2 import train

flyte.init()
outputs = flyte.with_runcontext(mode="local").run(train, **json.loads(sys.argv[1])).outputs()
print("outputs", json.dumps([outputs[0], outputs[1], outputs[4].path]))
"""
flyte = pytest.importorskip("flyte")
pytest.importorskip("flyte.io")  # The types of the outputs are defined there.


def start(task, **inputs):
    return flyte.with_runcontext(mode="remote", copy_style="all").run(task, **inputs)


def end(run):
    """The run's outputs; it was one attempt, so no retry of the user's was used."""
    run.wait(quiet=True)
    details = run.details()
    assert run.phase == "succeeded", details
    assert details.action_details.attempts == 1
    return run.outputs()


def task_pod(run):
    name = f"{run.name}-a0-0"
    eventually(
        lambda: any(
            pod["metadata"]["name"] == name and pod["status"]["phase"] == "Running"
            for pod in pods(run.name)
        ),
        120,
        "a pod",
    )
    return name


def store():
    import s3fs

    return s3fs.S3FileSystem(**KEYS)


def load(file):
    import torch

    return torch.load(file, weights_only=True)


def assert_equal(one, other):
    import torch

    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def train_here(project, **inputs):
    """Accuracies, metrics and weights of the same task in a local run."""
    output = call(project, ".venv/bin/python", "-c", HERE, json.dumps(inputs))
    accuracies, metrics, file = json.loads(re.findall(r"^outputs (.*)$", output, re.MULTILINE)[0])
    return accuracies, metrics, load(file)


def is_gone(pod, cluster):
    return not (clusters_of(pod) or cluster_pods(cluster))


@pytest.fixture(scope="module")
def trained(project):
    from workflows.flyte2 import train

    return start(train, **DIGITS)


def test_a_recipe_trains_as_on_this_machine_and_as_with_flyte_1(project, trained, tmp_path):
    outputs = end(trained)
    accuracies, metrics, state_here = train_here(project, **DIGITS)
    assert outputs[:2] == (accuracies, metrics)
    state = load(outputs[4].download_sync())
    assert_equal(state, state_here)
    done = subprocess.run(
        [sys.executable, "-c", FLYTE_1, str(tmp_path / "flyte-1")],
        cwd=REPOSITORY,
        env=own_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert f"accuracies {outputs[0]}" in done.stdout, done.stdout + done.stderr
    assert_equal(state, load(tmp_path / "flyte-1/model_state.pt"))
    (file,) = store().glob(f"flyte-data/*/*/*/{trained.name}/a0/1/report.html")
    page = store().cat(file).decode()
    assert ">finished<" in page


def test_predictions_are_those_of_this_machine(project, trained, tmp_path):
    from workflows.flyte2 import predict

    file = end(trained)[4]
    run = start(predict, recipe="digits", model_state=file.path, num_processes=2)
    num_rows, directory = end(run)
    assert num_rows == 360
    assert not store().glob(f"flyte-data/*/*/*/{run.name}/a0/1/report.html")
    command = (".venv/bin/flyte-ddp", "predict", "digits", "--output", str(tmp_path / "here"))
    call(project, *command, "--model-state", file.download_sync())
    (path,) = store().glob(f"{directory.path}/*.parquet")
    assert parquet.read_table(store().open(path)) == parquet.read_table(tmp_path / "here")


@pytest.mark.parametrize("grace", [0, 60])
def test_a_deleted_pod_goes_on_and_uses_no_retry(project, grace):
    from workflows.own import count_here

    run = start(count_here, num_steps=40, seconds=0.5)
    pod = task_pod(run)
    wait_for_line(pod, "did 12.")
    options = ["--force"] if grace == 0 else []
    kubectl("delete", "pod", pod, f"--grace-period={grace}", "--wait=true", *options)
    starts, file = end(run)
    assert len(starts) == 2
    assert starts[1] >= 10
    assert grace == 0 or starts[1] >= 12
    assert Path(file.download_sync()).read_text() == "2.0"


def test_a_cluster_goes_on_without_a_lost_worker(project):
    """The same weights as without a loss, and nothing of the cluster is left."""
    from workflows.flyte2 import train_on_cluster

    inputs = {"recipe": "recipes.paced.Paced", "config": {"epochs": 6, "checkpoint_interval": 20}}
    run = start(train_on_cluster, cluster=SMALL_CLUSTER, **inputs)
    pod = task_pod(run)
    wait_for_line(pod, "epoch 2/6")
    (cluster,) = clusters_of(pod)
    lost = cluster_pods(cluster, "worker")[0]
    kubectl("delete", "pod", lost, "--grace-period=0", "--force")
    started = time.monotonic()
    wait_for_line(pod, "resumed at step")
    print(f"it went on {time.monotonic() - started:.0f} s after the loss")
    outputs = end(run)
    eventually(lambda: is_gone(pod, cluster), 60, "an end to the Dask cluster")
    accuracies, _, state = train_here(project, num_processes=2, **inputs)
    assert outputs[0] == accuracies
    import torch

    # bits differ with the threads of a rank, two in the pods
    torch.testing.assert_close(load(outputs[4].download_sync()), state, rtol=0, atol=1e-3)


@pytest.mark.parametrize("grace", [0, 60])
def test_a_deleted_driver_of_a_cluster_goes_on_and_uses_no_retry(project, grace):
    from workflows.own import count_on_two

    run = start(count_on_two, num_steps=30, seconds=0.5)
    pod = task_pod(run)
    wait_for_line(pod, "did 12.")
    (cluster,) = clusters_of(pod)
    options = ["--force"] if grace == 0 else []
    kubectl("delete", "pod", pod, f"--grace-period={grace}", "--wait=true", *options)
    starts, file = end(run)
    assert len(starts) == 2
    assert starts[1] >= (12 if grace else 10)
    assert Path(file.download_sync()).read_text() == "2.0"
    eventually(lambda: is_gone(pod, cluster), 60, "an end to the first Dask cluster")


def test_a_deleted_driver_of_a_sweep_goes_on(project):
    from workflows.flyte2 import sweep

    inputs = {"recipe": "recipes.paced.Paced", "config": {"epochs": 2}, "cluster": SMALL_CLUSTER}
    run = start(sweep, grid={"learning_rate": [0.001, 0.003]}, **inputs)
    pod = task_pod(run)
    eventually(lambda: clusters_of(pod), 120, "a Dask cluster")
    wait_for_line(pod, "trial 2/2")
    kubectl("delete", "pod", pod, "--grace-period=0", "--force", "--wait=true")
    accuracies, config, state, _ = end(run)
    assert len(accuracies) == 2
    assert json.loads(config)["learning_rate"] in (0.001, 0.003)
    assert load(state.download_sync())


def test_an_abort_deletes_the_cluster(project):
    from workflows.flyte2 import train_on_cluster

    config = {"epochs": 2000}
    run = start(
        train_on_cluster, recipe="recipes.paced.Paced", cluster=SMALL_CLUSTER, config=config
    )
    pod = task_pod(run)
    wait_for_line(pod, "epoch 1/2000")
    (cluster,) = clusters_of(pod)
    run.abort("somebody changed their mind")
    started = time.monotonic()
    eventually(lambda: is_gone(pod, cluster) and not pods(run.name), 180, "an end to all pods")
    print(f"the Dask cluster and all pods were gone {time.monotonic() - started:.0f} s after it")
    run.wait(quiet=True)
    assert run.phase == "aborted"


def test_a_schedule_retrains_and_promotes(project):
    """By the commands of the project's README."""
    retraining = {
        "recipe": "recipes.wine.Wine",
        "config": {"epochs": 5},
        "num_processes": 2,
        "champion": f"s3://flyte-data/champions/{uuid.uuid4().hex}",
    }
    settings = {"RETRAIN_SCHEDULE": "* * * * *", "RETRAIN_INPUTS": json.dumps(retraining)}
    call(project, "make", "deploy", **settings)
    update = (".venv/bin/flyte", "update", "trigger", "retrain", "planning.retrain")

    def list_runs():
        return {run.name for run in flyte.remote.Run.listall(task_name="planning.retrain")}

    earlier = list_runs()
    started = time.monotonic()
    call(project, *update, "--activate")
    try:
        first = eventually(lambda: list_runs() - earlier, 150, "a run of the schedule")
        champion, export, metrics, outcome, reason = end(flyte.remote.Run.get(name=min(first)))
        print(f"promoted {time.monotonic() - started:.0f} s after the activation: {reason}")
        seen = list_runs()
        later = eventually(lambda: list_runs() - seen, 150, "a run after the promotion")
    finally:
        call(project, *update, "--deactivate")
    assert outcome == "promoted", reason
    assert all((champion, export, metrics))
    last = ChampionStore(retraining["champion"]).last(LAST_CHALLENGE)
    assert re.fullmatch(r"20\d\d-\S+:00Z", last["kickoff_time"])  # the minute of the schedule
    assert end(flyte.remote.Run.get(name=min(later)))[3] == "unchanged"
    for name in seen - earlier:  # The trigger fired meanwhile, and these runs train too.
        end(flyte.remote.Run.get(name=name))


def test_a_new_project_trains_by_the_commands_of_its_readme(project):
    text = (project / "README.md").read_text().replace("\\\n", "")
    commands = [line for line in text.splitlines() if ".venv/bin/flyte run" in line]
    assert len(commands) == 2, text
    call(project, "make", "deploy", "SANDBOX=1")
    states = []
    for command in commands:
        output = call(project, "sh", "-c", command)
        (name,) = set(re.findall(r"/runs/(\w+)", output))
        outputs = end(flyte.remote.Run.get(name=name))
        states.append(load(outputs[4].download_sync()))
    import torch

    torch.testing.assert_close(*states)
