"""What an earlier version has begun or written, this version goes on with.

The earlier version is a wheel, built from its commit.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flyte_ddp import __main__ as command_line
from flyte_ddp import load_champion
from flyte_ddp.checkpoints import stored_steps
from flyte_ddp.cluster.config import ClusterConfig, cluster_config
from flyte_ddp.config import TrainingConfig, resolve
from flyte_ddp.promotion.champion import ChampionStore
from tests.support.checkout import REPOSITORY, build_wheel
from tests.support.image_store import write_tree
from tests.support.shards import make_tree
from tests.support.upgrade import NUM_EPOCHS, SAVE_INTERVAL

EARLIER = "0.2.0"
# The commit of its tag. A clone has it without the tag, unless it is shallow.
COMMIT = "e732b913ddae4b363ab55a516d22633eb3ef549c"
NUM_STEPS = 27  # number of steps of a run of `Tiny`

pytestmark = pytest.mark.slow


def git(*arguments):
    return subprocess.run(["git", "-C", REPOSITORY, *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A directory with the installed wheel of the earlier version."""
    if git("rev-parse", "--verify", "--quiet", f"{COMMIT}^{{commit}}").returncode:
        pytest.skip(
            f"NOT TESTED: upgrades from {EARLIER}, because this clone is shallow; "
            "to fetch the rest: git fetch --unshallow"
        )
    place = tmp_path_factory.mktemp("earlier")
    worktree = place / "worktree"
    added = git("worktree", "add", "--detach", worktree, COMMIT)
    assert added.returncode == 0, added.stderr
    try:
        wheel = build_wheel(place, worktree)
    finally:
        git("worktree", "remove", "--force", worktree)
    return install(wheel, place / "installed")


@pytest.fixture(scope="module")
def current(wheel, tmp_path_factory):
    """A directory with the installed wheel of this version."""
    return install(wheel, tmp_path_factory.mktemp("current"))


def install(wheel, place):
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(place)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True, timeout=120
    )
    return place


def start(command, cwd, *path, **variables):
    """Start Python with the packages of `path` before those of its environment."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "WANDB_MODE": "disabled",
        "COLUMNS": "200",
        **variables,
    }
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    """Return the output of a process that ends well."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


def kill_at(process, run, step):
    """Kill a driver once the store has the checkpoint of `step` or a later one, and wait until its
    ranks are gone.
    """
    while not any(found >= step for found in stored_steps(str(run))):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()  # the ranks have closed their end of the output, too


@pytest.fixture(scope="module")
def written(earlier, tmp_path_factory):
    """The directory in which the earlier version has written what `tests.support.upgrade` says."""
    directory = tmp_path_factory.mktemp("written")
    write_tree(make_tree("jsonl")[0], directory / "shards")
    path = (earlier, REPOSITORY)
    finish(start(["-m", "tests.support.upgrade", directory], directory, *path))
    return directory


def test_a_recipe_goes_on_with_the_same_steps_and_ends_in_the_same_weights(
    earlier, tmp_path, finished_run, capsys
):
    command = ["-m", "flyte_ddp", "train", "tests.support.recipes.Tiny", "--checkpoints", "run"]
    command += ["--nproc-per-node", 2, "--checkpoint-interval", 4]
    run = tmp_path / "run"
    process = start(command, tmp_path, earlier, REPOSITORY, STEP_SECONDS="0.1")
    kill_at(process, run, 8)
    # A page of what the earlier version alone has written.
    shutil.copy(run / "history.jsonl", tmp_path)
    assert command_line.main(["report", str(tmp_path / "history.jsonl")]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "the history has no end of the run" in page
    (tmp_path / "record").mkdir()
    record = {"RECORD": str(tmp_path / "record")}
    output = finish(start(command, tmp_path, REPOSITORY, **record))
    assert "goes on with other code" in output
    (resumed,) = re.findall(r"resumed at step (\d+)", output)
    assert 8 <= int(resumed) < NUM_STEPS
    state = torch.load(run / "model_state.pt", weights_only=True)
    undisturbed = finished_run().state()
    assert state.keys() == undisturbed.keys()
    assert all(torch.equal(state[name], undisturbed[name]) for name in state)
    card = json.loads((run / "export/run_card.json").read_text())
    assert card
    assert "27" in (run / "report.html").read_text()


def test_a_function_reads_each_sample_of_shards_once_also_after_a_rollback(
    earlier, written, tmp_path
):
    command = ["-m", "flyte_ddp", "run", "--nproc-per-node", 2, "--checkpoints", tmp_path / "run"]
    command += [REPOSITORY / "tests/support/upgrade.py", written]
    index = {file: file.read_bytes() for file in (written / "shards").iterdir()}
    path = (earlier, REPOSITORY)
    process = start(command, tmp_path, *path, STEP_SECONDS="0.1")
    kill_at(process, tmp_path / "run", 2 * SAVE_INTERVAL)
    process = start(command, tmp_path, REPOSITORY, STEP_SECONDS="0.1")
    kill_at(process, tmp_path / "run", 4 * SAVE_INTERVAL)
    finish(start(command, tmp_path, *path))
    assert index == {file: file.read_bytes() for file in (written / "shards").iterdir()}
    lines = [
        json.loads(line)
        for rank in range(2)
        for line in (written / f"samples-{rank}.txt").read_text().splitlines()
    ]
    # step, epoch and samples of each batch, by the first step of the attempt
    attempts = {}
    for package, attempt, *step in lines:
        attempts.setdefault((attempt, package), []).append(step)
    packages = [package for _, package in sorted(attempts)]
    theirs, ours = str(earlier / "flyte_ddp"), str(REPOSITORY / "flyte_ddp")
    assert packages == [theirs, ours, theirs]
    whole = {}
    for _, steps in sorted(attempts.items()):
        first_step = min(step for step, _, _ in steps)
        assert first_step % SAVE_INTERVAL == 1
        assert first_step > SAVE_INTERVAL or not whole
        # What came after the last checkpoint is done again.
        whole = {key: value for key, value in whole.items() if key[0] < first_step}
        for number, (step, epoch, used) in enumerate(steps):
            whole[step, number] = epoch, used
    for epoch in range(NUM_EPOCHS):
        numbers = [number for at, used in whole.values() if at == epoch for number in used]
        assert sorted(numbers) == list(range(100))
    assert float((written / "sum.txt").read_text()) == NUM_EPOCHS * sum(range(100))


def test_a_champion_is_loaded_replaced_and_put_in_use_again(written):
    url = str(written / "champion")
    state, first = load_champion(url)
    assert torch.equal(state["weight"], torch.arange(4.0))
    store = ChampionStore(url)
    contents = Path(store.state_url(first).removeprefix("file://")).read_bytes()
    second = store.promote(contents, first, store.pointer())
    assert (second.parent, store.in_use().version) == (first.version, second.version)
    assert store.rollback() == first
    assert [each.version for each in store.versions()] == [first.version, second.version]


def test_every_hyperparameter_and_field_of_a_cluster_is_accepted(written):
    fields = json.loads((written / "fields.json").read_text())
    assert resolve({}, fields["config"]) == TrainingConfig()
    assert cluster_config(fields["cluster"]) == ClusterConfig()


def test_a_project_trains_and_registers_after_its_wheel_was_replaced(earlier, current, tmp_path):
    made = [earlier / "bin/flyte-ddp", "new", "project"]
    assert f"with flyte-ddp {EARLIER}" in finish(start(made, tmp_path, earlier))
    project = tmp_path / "project"
    path = (current, project)
    train = ["-m", "flytekit.clis.sdk_in_container.pyflyte", "run", "workflows/single_node.py"]
    train += ["single_node_training_wf", "--recipe", "recipes.wine.Wine"]
    assert "model state" in finish(start([*train, "--config", '{"epochs": 1}'], project, *path))
    added = start(["-m", "flyte_ddp", "new", ".", "--with", "sweep"], project, *path)
    assert "added workflows/sweep.py" in finish(added)
    settings = {"SANDBOX": "1", "IMAGE": "registry.example.com/project:1"}
    registered = start(["-m", "flyte_ddp", "register", "--dry-run"], project, *path, **settings)
    assert "sweep" in finish(registered)
