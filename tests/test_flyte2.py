"""The library in tasks of Flyte 2, whose SDK is installed beside it for these tests, and flytekit is not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.test_project import PROJECT, REPOSITORY, installed, link, run, wheel, with_dependencies  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.version_info < (3, 11), reason="one Python is enough")]

VERSION = "2.12.1"
LOST = """
import os, sys
sys.path.insert(0, {examples!r})
import flyte
import flyte_ddp
from flyte2 import checkpoints, env

def train():
    from flyte_ddp import session
    state = session.load() or {{"step": 0, "starts": []}}
    state["starts"].append(state["step"])
    for step in range(state["step"] + 1, 7):
        session.report(step=step)
        session.save({{**state, "step": step}}, step)
        if step == 4 and len(state["starts"]) == 1:
            session.current().wait()
            os.kill(os.getpid(), 9)
    return state["starts"]

@env.task(retries=1)
def lose_a_rank() -> list[int]:
    return flyte_ddp.run(train, checkpoints=checkpoints())

flyte.init()
print("resumed", flyte.run(lose_a_rank).outputs().o0)
"""


@pytest.fixture(scope="module")
def packages(installed, tmp_path_factory):  # noqa: F811
    """Directories with the library, what it needs but for flytekit, and the SDK."""
    place, sdk = tmp_path_factory.mktemp("core"), tmp_path_factory.mktemp("sdk")
    needed = [each for each in PROJECT["dependencies"] if not each.startswith("flytekit")]
    link(place, with_dependencies([*needed, *PROJECT["optional-dependencies"]["digits"]]) - {"flyteidl"}, installed)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(sdk), f"flyte=={VERSION}"]
    subprocess.run(command, check=True, timeout=300)
    return [sdk, place]


def test_a_recipe_and_a_function_train_without_flytekit(packages, tmp_path):
    status, output = run(packages, "-S", str(REPOSITORY / "examples/flyte2.py"), cwd=tmp_path)
    assert status == 0, output
    lines = [line for line in output.splitlines() if line.startswith("ActionOutputs")]
    assert lines[0] == "ActionOutputs(o0=15.0)"
    assert ["model_state.pt" in line for line in lines] == [False, True, True]
    assert lines[1].partition("o1=")[2] == lines[2].partition("o1=")[2]  # one machine, and two nodes
    assert run(packages, "-S", "-c", "import flytekit", cwd=tmp_path)[0] == 1


def test_a_retry_of_flyte_2_goes_on_from_the_last_checkpoint(packages, tmp_path):
    (tmp_path / "lost.py").write_text(LOST.format(examples=str(REPOSITORY / "examples")))
    status, output = run(packages, "-S", "lost.py", cwd=tmp_path)
    assert status == 0, output
    assert "resumed [0, 4]" in output
