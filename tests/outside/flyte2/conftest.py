"""Real runs on the Flyte 2 that FLYTECTL_CONFIG names, with the cluster that KUBECONFIG names.

`make test-flyte2 IMAGE=...` runs them, from a new project. The image is that project's:
FLYTE_DDP_TEST_BUILDER names a command that takes the arguments of `docker build` and gives the
image to the nodes. Without it they have it already. The Dask operator is there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.outside.kubernetes.conftest import eventually
from tests.support.checkout import REPOSITORY, own_environment

IMAGE = os.environ.get("FLYTE_DDP_TEST_IMAGE", "my-project:dev")
BUILDER = os.environ.get("FLYTE_DDP_TEST_BUILDER", "")
BUILD_SECONDS = 2400  # time for an image of 7 GB, which goes to two nodes
NAMESPACE = "flyte"
OWN = '''
import tempfile, time
from pathlib import Path
import flyte
from flyte.io import File
from flyte_ddp import flyte2, session

SIZE = flyte2.SETTINGS.driver

def count(num_steps: int, seconds: float) -> tuple[list[int], File]:
    """Save every fifth step; return the step that each attempt began behind, and a file."""
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    state = session.load() or {"step": 0, "starts": []}
    state["starts"] = [*state["starts"], state["step"]]
    for step in range(state["step"] + 1, num_steps + 1):
        time.sleep(seconds)
        total = torch.ones(1)
        dist.all_reduce(total)
        is_last = session.stop_requested or step == num_steps
        session.report(step=step, total=total.item())
        print(f"did {step}.", flush=True)
        if is_last or step % 5 == 0:
            session.save({**state, "step": step}, step)
        if is_last:
            break
    dist.destroy_process_group()
    file = Path(tempfile.mkdtemp(), "made.txt")  # pods of a cluster write to /tmp alone
    file.write_text(str(total.item()))
    return state["starts"], File.from_local_sync(str(file))

one = flyte2.environment("one", SIZE, flyte2.Distributed(nproc_per_node=2))

@one.task(report=True)
def count_here(num_steps: int, seconds: float) -> tuple[list[int], File]:
    return count(num_steps, seconds)

PODS = {"worker_cpus": 0.5, "worker_memory": "1Gi", "shared_memory": "64Mi", "scheduler_cpus": 0.25}
CLUSTER = {"start_timeout": 400.0, "kubernetes": PODS}
two = flyte2.environment("two", SIZE, flyte2.Distributed(nnodes=2, max_restarts=2, cluster=CLUSTER))

@two.task(report=True)
def count_on_two(num_steps: int, seconds: float) -> tuple[list[int], File]:
    return count(num_steps, seconds)
'''
PACED = """
import time
from flyte_ddp.recipes.digits import Digits


class Paced(Digits):
    def losses(self, outputs, targets):
        time.sleep(0.1)
        return super().losses(outputs, targets)
"""
SETTINGS = '\n[allowed]\nurls = ["s3://flyte-data/*"]\n'


def kubectl(*arguments: str) -> str:
    command = ["kubectl", "--namespace", NAMESPACE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pods(run: str) -> list[dict[str, Any]]:
    """The existing pods of a run's tasks and clusters."""
    found: list[dict[str, Any]] = json.loads(kubectl("get", "pods", "--output", "json"))["items"]
    return [pod for pod in found if run in json.dumps(pod["metadata"])]


def wait_for_line(pod: str, text: str) -> None:
    eventually(lambda: text in kubectl("logs", pod, "--all-containers"), 300, text)


def clusters_of(pod: str) -> list[str]:
    """The Dask clusters that a task's pod owns and nobody has deleted."""
    found = json.loads(kubectl("get", "daskclusters", "--output", "json"))["items"]
    names = []
    for cluster in found:
        metadata = cluster["metadata"]
        owners = [owner["name"] for owner in metadata.get("ownerReferences", [])]
        if "deletionTimestamp" not in metadata and pod in owners:
            names.append(metadata["name"])
    return names


def cluster_pods(cluster: str, component: str = "") -> list[str]:
    selector = f"dask.org/cluster-name={cluster}"
    if component:
        selector += f",dask.org/component={component}"
    found = kubectl("get", "pods", "--selector", selector, "--output", "name")
    return [name.removeprefix("pod/") for name in found.split()]


def call(project: Path, *command: str, timeout: float = 300, **environment: str) -> str:
    """The output of a command that a user gives in the project's directory."""
    done = subprocess.run(
        command,
        cwd=project,
        env={**own_environment(), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="session")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of `new` with its environment, image and rights, as its README has them, and with
    tasks and a recipe of a user's own, which this process can import.
    """
    place = tmp_path_factory.mktemp("flyte2") / "my-project"
    new = (sys.executable, "-m", "flyte_ddp", "new", str(place), "--flyte", "2")
    call(REPOSITORY, *new, "--wheel", str(wheel))
    os.environ |= {"SANDBOX": "1", "WANDB_MODE": "disabled", "DO_NOT_TRACK": "1", "IMAGE": IMAGE}
    call(place, "make", "setup", f"PYTHON={sys.executable}", timeout=900)
    if BUILDER:
        call(place, "make", "image", f"BUILDER={BUILDER}", timeout=BUILD_SECONDS)
    rights = (".venv/bin/flyte-ddp", "deploy", "--namespace", NAMESPACE, "--image", IMAGE)
    manifests = place / "rights.yaml"
    manifests.write_text(call(place, *rights))
    kubectl("apply", "--filename", str(manifests))
    manifests.unlink()
    (place / "workflows/own.py").write_text(OWN)
    (place / "recipes/paced.py").write_text(PACED)
    # the pods of a task and of the one that calls it fit beside the operator on nodes of two cores
    settings = (place / "settings.toml").read_text().replace("{ cpus = 2,", "{ cpus = 1,")
    (place / "settings.toml").write_text(settings + SETTINGS)
    os.chdir(place)
    sys.path.insert(0, str(place))
    import flyte

    # beside its configuration the SDK notes the code that a store has: another one may be empty
    os.environ["FLYTECTL_CONFIG"] = shutil.copy(os.environ["FLYTECTL_CONFIG"], place.parent)
    flyte.init_from_config(os.environ["FLYTECTL_CONFIG"], root_dir=place)
    return place
