"""Projects of users' own, with the images that they build: one of `flyte-ddp new`, one that only
uses `Distributed`.

FLYTE_DDP_TEST_BUILDER names a command that takes the arguments of `docker build` and gives the
image to the nodes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from flytekit.remote import FlyteRemote

from tests.outside.flyte.conftest import SETTINGS, Checkout, assert_quiet
from tests.support.checkout import REPOSITORY, own_environment

BUILDER = os.environ.get("FLYTE_DDP_TEST_BUILDER", "")
BUILD_SECONDS = 2400  # time for an image of 7 GB, which goes to two nodes
pytestmark = pytest.mark.skipif(
    not BUILDER, reason="FLYTE_DDP_TEST_BUILDER names no command that builds images"
)


def new_project(directory: Path, wheel: Path, *options: str) -> None:
    """Make a project by the command of the README."""
    made = [sys.executable, "-m", "flyte_ddp", "new", directory, "--wheel", wheel, *options]
    subprocess.run(made, cwd=REPOSITORY, check=True)


@pytest.fixture(scope="module")
def project(
    remote: FlyteRemote, wheel: Path, unique: str, tmp_path_factory: pytest.TempPathFactory
) -> Checkout:
    """A new project with the environment and the image that it makes."""
    directory = tmp_path_factory.mktemp("new") / "my-project"
    new_project(directory, wheel, "--with", "retrain")
    project = Checkout(directory, remote, f"my-project:{unique}", directory / ".venv/bin")
    make = ("make", f"PYTHON={sys.executable}", f"IMAGE={project.image}", f"BUILDER={BUILDER}")
    for command, timeout in (("setup", 900), ("image", BUILD_SECONDS)):
        environment = {**own_environment(), **SETTINGS}
        subprocess.run(
            [*make, command], cwd=directory, env=environment, check=True, timeout=timeout
        )
    return project


def test_a_new_project_trains_on_one_and_two_nodes_and_again_with_a_changed_setting(
    remote: FlyteRemote, project: Checkout, unique: str
) -> None:
    """By the commands of the README and of the project's own alone."""
    project.register("")
    inputs = (
        *("--recipe", "recipes.wine.Wine"),
        *("--config", json.dumps({"epochs": 5, "seed": int(unique, 16)})),
    )
    executions = [project.train(*inputs), project.train_on_cluster(*inputs)]
    settings = project.directory / "settings.toml"
    settings.write_text(settings.read_text().replace("memory_gib = 4", "memory_gib = 3"))
    project.register("")
    executions.append(project.train(*inputs))
    states, versions = [], []
    for num_nodes, execution in zip((1, 2, 1), executions, strict=True):
        outputs = execution.outputs()
        assert len(outputs["epoch_accuracies"]) == 5
        (started,) = [
            event for event in execution.history(outputs) if event["event"] == "RunStarted"
        ]
        assert (started["world_size"], started["num_nodes"]) == (2, num_nodes)
        states.append(execution.load(outputs["model_state"].remote_source))
        versions.append(execution.sync().spec.launch_plan.version)
        assert_quiet(execution)
    torch.testing.assert_close(states[0], states[1])
    assert versions[0] != versions[2]
    assert remote.fetch_launch_plan(name="retrain")


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
    project: Checkout, wheel: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "lines"
    new_project(directory, wheel, "--function")
    (directory / "lines").mkdir()
    files = {"workflows/lines.py": TRAIN, "lines/model.py": MODEL, "lines/__init__.py": ""}
    for name, text in files.items():
        (directory / name).write_text(text)
    with open(directory / ".dockerignore", "a") as file:
        file.write("!lines\n")
    execution = dataclasses.replace(project, directory=directory).run("workflows/lines.py", "train")
    outputs = execution.outputs()
    one, two = (execution.load(outputs[name].remote_source) for name in ("o0", "o1"))
    torch.testing.assert_close(one, two)
    torch.testing.assert_close(one["weight"], torch.ones(1, 4), rtol=0, atol=0.1)
