"""The recipe of `examples/` in a directory of a user's own, trained by every workflow without a change here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
EXAMPLE = REPOSITORY / "examples" / "wine.py"
LOCAL = json.dumps({"kind": "local", "node_timeout": 60})  # a busy machine's workers are slow to answer, not lost


@pytest.fixture
def elsewhere(tmp_path):
    """A directory outside the repository with nothing but the example in it."""
    shutil.copy(EXAMPLE, tmp_path)
    return tmp_path


def pyflyte_run(directory, workflow, *arguments):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [Path(sys.executable).parent / "pyflyte", "run", REPOSITORY / "workflows" / workflow[0], workflow[1]]
        + ["--recipe", "wine.Wine", *arguments],
        cwd=directory,
        env={**environment, "WANDB_MODE": "disabled", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    return run.returncode, run.stdout + run.stderr


def accuracies(output):
    return [float(accuracy) for accuracy in re.findall(r"accuracy ([\d.]+) ?%", output)]


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 60


def test_a_recipe_outside_the_package_trains_to_a_meaningful_accuracy(elsewhere):
    workflow = ("single_node.py", "single_node_training_wf")
    status, output = pyflyte_run(elsewhere, workflow, "--config", '{"epochs": 10}', "--num_processes", "1")
    assert status == 0, output
    assert accuracies(output)[-1] > 90  # of three classes
    assert [path.name for path in elsewhere.iterdir() if path.name != "__pycache__"] == ["wine.py"]


@pytest.mark.slow
def test_its_options_come_from_the_config_and_a_wrong_one_is_named(elsewhere):
    workflow = ("single_node.py", "single_node_training_wf")
    options = {"epochs": 1, "recipe_options": {"hidden": 64}}
    status, output = pyflyte_run(elsewhere, workflow, "--config", json.dumps(options))
    assert status == 0, output
    assert "1,091 parameters" in output  # 14 x 64 + 65 x 3
    status, output = pyflyte_run(elsewhere, workflow, "--config", '{"recipe_options": {"width": 64}}')
    assert status != 0
    assert "recipe_options: expected one of hidden" in " ".join(re.sub(r"[│\n]", " ", output).split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workflow", "arguments"),
    [
        (("multi_node.py", "multi_node_training_wf"), []),
        (("scaling.py", "scaling_wf"), ["--world_sizes", "[1, 2]"]),
        (("sweep.py", "sweep_wf"), ["--grid", '{"recipe_options.hidden": [8, 64]}']),
    ],
)
def test_every_other_workflow_trains_the_example(elsewhere, workflow, arguments):
    status, output = pyflyte_run(elsewhere, workflow, "--cluster", LOCAL, *arguments)
    assert status == 0, output
    assert accuracies(output)[-1] > 90
