"""Projects of users' own, with the images that they build: one of `flyte-ddp new`, one that only
uses `Distributed`.

FLYTE_DDP_TEST_BUILDER names a command that takes the arguments of `docker build` and gives the
image to the nodes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flytekit.remote import FlyteRemote

from tests.flyte.conftest import IMAGE, SETTINGS, Checkout
from tests.support.checkout import REPOSITORY, install_wheel, own_environment

BUILDER = os.environ.get("FLYTE_DDP_TEST_BUILDER", "")
BUILD_SECONDS = 2400  # of an image of 7 GB, which goes to two nodes
pytestmark = pytest.mark.skipif(
    not BUILDER, reason="FLYTE_DDP_TEST_BUILDER names no command that builds images"
)


@pytest.fixture(scope="module")
def commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment into which the wheel was installed, and nothing else."""
    return Path(install_wheel(tmp_path_factory.mktemp("environment"), wheel))


def test_a_new_project_trains_on_one_and_two_nodes_with_the_image_that_it_builds(
    remote: FlyteRemote, commands: Path, wheel: Path, unique: str, tmp_path: Path
) -> None:
    """By the commands of the README and of the project's own alone."""
    directory = tmp_path / "my-project"
    made = [commands / "flyte-ddp", "new", directory, "--with", "retrain", "--wheel", wheel]
    subprocess.run(made, check=True)
    project = Checkout(directory, remote, f"my-project:{unique}", directory / ".venv/bin")
    make = ("make", f"PYTHON={sys.executable}", f"IMAGE={project.image}")
    environment = own_environment()
    subprocess.run([*make, "setup"], cwd=directory, env=environment, check=True, timeout=900)
    build = [*make, "image", f"BUILDER={BUILDER}"]
    subprocess.run(
        build, cwd=directory, env={**environment, **SETTINGS}, check=True, timeout=BUILD_SECONDS
    )
    version = f"new-{unique}"
    project.register(version)
    assert remote.fetch_launch_plan(name="retrain", version=version).id.version == version

    inputs = (
        "--recipe",
        "recipes.wine.Wine",
        "--config",
        json.dumps({"epochs": 5, "seed": int(unique, 16)}),
    )
    executions = project.train(*inputs), project.train_on_cluster(*inputs)
    states = []
    for num_nodes, execution in enumerate(executions, start=1):
        outputs = execution.outputs()
        assert len(outputs["epoch_accuracies"]) == 5
        (started,) = [
            event for event in execution.history(outputs) if event["event"] == "RunStarted"
        ]
        assert (started["world_size"], started["num_nodes"]) == (2, num_nodes)
        states.append(execution.load(outputs["model_state"].remote_source))
    torch.testing.assert_close(*states)


TRAIN = """
import flytekit
import torch
import torch.distributed as dist
from flytekit import Resources, task, workflow
from flytekit.types.file import FlyteFile
from lines.model import line
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp import session
from flyte_ddp.flytekit_plugin import Distributed

SIZE = Resources(cpu="1", mem="2Gi")
PODS = {"worker_cpus": 0.5, "worker_memory": "1Gi", "shared_memory": "64Mi", "scheduler_cpus": 0.25}


def fit(steps):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(line())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(64, 4)[dist.get_rank() :: dist.get_world_size()]
    for step in range(1, steps + 1):
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(step=step, loss=loss.item())
    file = f"{flytekit.current_context().working_directory}/model.pt"
    torch.save(model.module.state_dict(), file)
    return FlyteFile(file)


@task(task_config=Distributed(nnodes=1, nproc_per_node=2), requests=SIZE, limits=SIZE)
def on_one_node(steps: int) -> FlyteFile:
    return fit(steps)


@task(task_config=Distributed(nnodes=2, cluster={"start_timeout": 400.0, "kubernetes": PODS}))
def on_two_nodes(steps: int) -> FlyteFile:
    return fit(steps)


@workflow
def train(steps: int = 100) -> tuple[FlyteFile, FlyteFile]:
    return on_one_node(steps=steps), on_two_nodes(steps=steps)
"""
MODEL = """
from torch import nn


def line():
    return nn.Linear(4, 1)
"""


def test_a_project_that_only_uses_distributed_trains_on_one_and_two_nodes(
    remote: FlyteRemote, commands: Path, wheel: Path, unique: str, tmp_path: Path
) -> None:
    """With the image of docs/install.md, built on one that has the packages already."""
    inits = dict.fromkeys(("workflows/__init__.py", "lines/__init__.py"), "")
    for name, text in {**inits, "workflows/train.py": TRAIN, "lines/model.py": MODEL}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / wheel.name).write_bytes(wheel.read_bytes())
    (dockerfile,) = re.findall(
        r"```dockerfile\n(.*?)```", (REPOSITORY / "docs/install.md").read_text(), re.S
    )
    start = f"FROM {IMAGE}\nUSER 0\nENV PYTHONPATH=\nRUN rm -r /opt/flyte-ddp\n"
    (tmp_path / "Dockerfile").write_text(re.sub(r"^FROM .*\n", start, dockerfile))
    project = Checkout(tmp_path, remote, f"own-project:{unique}", commands)
    subprocess.run(
        [*BUILDER.split(), "-t", project.image, "."],
        cwd=tmp_path,
        check=True,
        timeout=BUILD_SECONDS,
    )
    execution = project.run("workflows/train.py", "train")
    outputs = execution.outputs()
    one, two = (execution.load(outputs[name].remote_source) for name in ("o0", "o1"))
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(one["weight"], torch.ones(1, 4), rtol=0, atol=0.1)
