"""Tasks of Flyte 2 on a real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.flyte2.conftest import kubectl, pods, wait_for_line
from tests.kubernetes.conftest import eventually

KEYS = {
    "endpoint_url": os.environ.get("FLYTE_AWS_ENDPOINT"),
    "key": os.environ.get("FLYTE_AWS_ACCESS_KEY_ID"),
    "secret": os.environ.get("FLYTE_AWS_SECRET_ACCESS_KEY"),
}
flyte = pytest.importorskip("flyte")


def start(task, **inputs):
    return flyte.with_runcontext(mode="remote", copy_style="all").run(task, **inputs)


def end(run):
    """The run's outputs; that it was one attempt shows that no retry of the user's was used."""
    run.wait(quiet=True)
    run.sync()
    assert run.phase == "succeeded", run
    return run.outputs()


def task_pod(run):
    eventually(
        lambda: any(pod["status"]["phase"] == "Running" for pod in pods(run.name)), 120, "a pod"
    )
    return f"{run.name}-a0-0"


def test_a_recipe_trains_as_on_this_machine(project):
    from workflows.flyte2 import train

    inputs = {"recipe": "digits", "config": {"epochs": 3}, "num_processes": 2}
    outputs = end(run := start(train, **inputs))
    here = flyte.with_runcontext(mode="local").run(train, **inputs).outputs()
    assert outputs[:2] == here[:2]
    there, local = Path(outputs[4].download_sync()), Path(here[4].path)
    import torch

    one, other = (torch.load(file, weights_only=True) for file in (there, local))
    assert all(torch.equal(one[name], other[name]) for name in one)
    import s3fs

    store = s3fs.S3FileSystem(**KEYS)
    (file,) = store.glob(f"flyte-data/*/*/*/{run.name}/a0/1/report.html")
    page = store.cat(file).decode()
    assert ">finished<" in page


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
