"""Real runs on the Flyte 2 that FLYTECTL_CONFIG names, with the cluster that KUBECONFIG names.

`make test-flyte2 IMAGE=...` runs them. The nodes have the image; the namespace `flyte` has
deploy/rbac.yaml.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flyte_ddp.config.project import make_project
from tests.kubernetes.conftest import eventually

IMAGE = os.environ.get("FLYTE_DDP_TEST_IMAGE", "flyte-ddp:dev")
NAMESPACE = "flyte"
OWN = '''
import os, time
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
    Path("made.txt").write_text(str(total.item()))
    return state["starts"], File.from_local_sync("made.txt")

one = flyte2.environment("one", SIZE, flyte2.Distributed(nproc_per_node=2))

@one.task(report=True)
def count_here(num_steps: int, seconds: float) -> tuple[list[int], File]:
    return count(num_steps, seconds)
'''
SETTINGS = '\n[allowed]\nurls = ["s3://flyte-data/*"]\n'


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("flyte2")


def kubectl(*arguments: str) -> str:
    command = ["kubectl", "--namespace", NAMESPACE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def pods(run: str) -> list[dict[str, Any]]:
    """The pods of a run's tasks that are there, and those of its clusters."""
    found: list[dict[str, Any]] = json.loads(kubectl("get", "pods", "--output", "json"))["items"]
    return [pod for pod in found if run in json.dumps(pod["metadata"])]


def wait_for_line(pod: str, text: str) -> None:
    eventually(lambda: text in kubectl("logs", pod, "--all-containers"), 120, text)


@pytest.fixture(scope="session")
def project(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project of `new`, with tasks of a user's own, which this process can import."""
    place = tmp_path_factory.mktemp("flyte2") / "project"
    list(make_project(str(place), wheel=str(wheel), flyte=2))
    (place / "workflows/own.py").write_text(OWN)
    text = (place / "settings.toml").read_text()
    (place / "settings.toml").write_text(
        text.replace('image = ""', f'image = "{IMAGE}"') + SETTINGS
    )
    os.environ |= {"SANDBOX": "1", "WANDB_MODE": "disabled", "DO_NOT_TRACK": "1"}
    os.chdir(place)
    sys.path.insert(0, str(place))
    import flyte

    flyte.init_from_config(os.environ["FLYTECTL_CONFIG"], root_dir=place)
    return place
