"""`flyte-ddp rehearse`: faults on purpose, the verdict, and the line to change."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.rehearsals import VARIANTS
from flyte_ddp.rehearsal import runs
from flyte_ddp.rehearsal.left import read_tensors

REPOSITORY = Path(__file__).parents[2]
PAGE = (REPOSITORY / "docs/rehearse.md").read_text()
CARELESS = re.search(r"# careless.py\n(.*?)```", PAGE, re.S)[1]

# A script with a function that saves after each step.
FUNCTION = """
import torch
from flyte_ddp import session

def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data, state = torch.randn(8, 16, 4), session.load() or {"step": 0}
    if state["step"]:
        model.load_state_dict(state["model"])
    for step in range(state["step"], 8):
        optimizer.zero_grad()
        model(data[step]).pow(2).mean().backward()
        optimizer.step()
        session.save({"model": model.state_dict(), "step": step + 1}, step + 1)
"""
SHORT = """
import sys
from flyte_ddp.__main__ import main
from flyte_ddp.rehearsal import runs
runs.TITLES = {name: runs.TITLES[name] for name in ("undisturbed", "again", "kill")}
sys.exit(main(["rehearse", "--json", "--nproc-per-node", "1", *sys.argv[1:]]))
"""

FAILING = ("raise RuntimeError('No CUDA GPUs are available')", "input()", "")


def rehearse(directory, *arguments, command=("-m", "flyte_ddp", "rehearse")):
    """Return the exit code and what was printed, without the lines of progress."""
    done = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout or done.stderr


@pytest.mark.slow
def test_a_script_that_resumes_is_right_under_every_fault(tmp_path):
    script = REPOSITORY / "examples/scripts/ddp.py"
    plan = ["--per-hour", "kill=4,notice=2,node=6"]
    code, printed = rehearse(tmp_path, "--json", *plan, str(script), "--epochs", "2")
    verdict = json.loads(printed)
    assert (code, verdict["right"], verdict["causes"]) == (0, True, []), printed
    rows = {row["fault"]: row for row in verdict["rows"]}
    assert rows.keys() == runs.TITLES.keys()
    assert {row["verdict"] for row in rows.values()} == {"right"}
    assert rows["notice"]["steps_again"] == 0
    found = verdict["forecast"]
    assert (found["problem"], found["costs"].keys()) == ("", {"kill", "notice", "node"})
    assert 0.5 < found["goodput"] < 1
    cost = found["costs"]["node"]
    assert cost["waiting"] > 1, "a worker of Dask has to start"
    assert cost["pause"] + cost["waiting"] < rows["node"]["seconds_without_a_step"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_mistakes_are_named_with_their_lines(tmp_path):
    (tmp_path / "careless.py").write_text(CARELESS)
    code, printed = rehearse(tmp_path, "--json", "careless.py", "{outputs}")
    verdict = json.loads(printed)
    assert (code, verdict["right"]) == (1, False), printed
    lines = CARELESS.splitlines()
    named = {
        cause["name"]: lines[int(cause["where"].rpartition(":")[2]) - 1].strip()
        for cause in verdict["causes"]
    }
    assert named == {
        "set_epoch": "for inputs, targets in loader:",
        "learning rate": lines[16],
        "checkpoint in place": "torch.save(state, checkpoint)",
    }


@pytest.mark.parametrize(
    "titles",
    [
        pytest.param(["average lost", "norm"], marks=pytest.mark.slow, id="some"),
        *(pytest.param([title], marks=pytest.mark.slow, id=title) for title in VARIANTS),
    ],
)
def test_a_script_of_known_truth_has_its_verdict_and_its_causes(tmp_path, titles):
    """Real ranks, which are killed, and which begin again on another number."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rehearsals", "--faults", "kill,larger", *titles],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("| right |") == len(titles)


class Own:
    """A class of a user's, which is not imported where the files are read."""

    def __init__(self, tensor):
        self.tensor, self.itself = tensor, self


class OwnList(list):
    pass


def test_the_tensors_in_files_of_every_kind_are_read(tmp_path):
    (tmp_path / "outputs").mkdir()
    ones = torch.ones(3)
    values = {
        "model": torch.nn.Linear(3, 1, bias=False).state_dict(),
        "own": Own(ones),
        "list": OwnList([ones, 2 * ones]),
        "random": torch.get_rng_state(),
        "step": 3,
    }
    torch.save(values, tmp_path / "outputs/state.pt")
    save_file({"x": ones}, tmp_path / "outputs/x.safetensors")
    numpy.savez(tmp_path / "outputs/y.npz", y=numpy.ones(2))
    whole = (tmp_path / "outputs/state.pt").read_bytes()
    (tmp_path / "outputs/half.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "outputs/notes.txt").write_text("no tensors")
    found = read_tensors(tmp_path)
    assert found.keys() == {
        "outputs/state.pt: model.weight",
        "outputs/state.pt: own.state.tensor",
        "outputs/state.pt: list.parts.0",
        "outputs/state.pt: list.parts.1",
        "outputs/x.safetensors: x",
        "outputs/y.npz: y",
    }
    assert found["outputs/state.pt: list.parts.1"] == [6.0, 6.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    "program",
    [
        ["trains:main"],
        ["tests.support.recipes.Tiny", "--epochs", "2", "--checkpoint-interval", "2"],
    ],
    ids=["function", "recipe"],
)
@pytest.mark.long
def test_a_function_and_a_recipe_are_rehearsed(tmp_path, program):
    (tmp_path / "trains.py").write_text(FUNCTION)
    plan = ["--per-hour", "kill=36", "--hours", "1"]
    code, printed = rehearse(tmp_path, *plan, *program, command=("-c", SHORT))
    verdict = json.loads(printed[printed.index("{") :])
    assert (code, verdict["right"], verdict["causes"]) == (0, True, []), printed
    rows = {row["fault"]: row for row in verdict["rows"]}
    assert [row["verdict"] for row in rows.values()] == ["right"] * 3
    assert (rows["kill"]["restarts"], rows["kill"]["weights_difference"] < 1e-6) == (1, True)
    assert rows["undisturbed"]["steps"] >= 3
    cost, lost = verdict["forecast"]["costs"]["kill"], 1 - verdict["forecast"]["goodput"]
    assert 0 < cost["pause"] < rows["kill"]["seconds_without_a_step"]
    assert lost > 36 * (cost["pause"] + cost["repeated"]) / 3600, "the start counts too"


def test_a_shorter_run_has_two_epochs_of_whole_batches():
    assert runs.shorten(num_steps=9, num_samples=9 * 48) == (6, 3 * 48)
    assert runs.shorten(num_steps=100, num_samples=1000) == (66, 330)
    for num_steps in range(40):
        shorter, length = runs.shorten(num_steps, 10 * num_steps)
        assert shorter <= num_steps * 2 / 3
        assert 2 * length == 10 * shorter


@pytest.mark.long
@pytest.mark.parametrize("line", [*FAILING, "open('own.txt', 'w')"])
def test_a_program_that_fails_by_itself_is_refused_in_one_line(tmp_path, line):
    (tmp_path / "own.txt").write_text("mine")
    (tmp_path / "train.py").write_text(line)
    code, printed = rehearse(tmp_path, "--nproc-per-node", "1", "train.py")
    expected = {
        "raise": "No CUDA GPUs are available",
        "input": "EOF",
        "open(": "own.txt: expected a file below the directory in which the rehearsal runs",
        "": "expected at least 3 steps of an optimizer of torch, got 0",
    }[line[:5]]
    assert (code, expected in printed.splitlines()[-1]) == (2, True), printed
    assert (tmp_path / "own.txt").read_text() == "mine"


SHARING = """
import os, sys, tempfile
import torch

with tempfile.TemporaryDirectory() as place:  # nobody else's
    torch.save({"step": 1}, f"{place}/state.pt")
torch.save({"step": 1}, sys.argv[1] + ".tmp")
os.replace(sys.argv[1] + ".tmp", sys.argv[1])
"""


@pytest.mark.long
def test_a_checkpoint_that_all_runs_would_share_is_refused_in_one_line(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/train.py").write_text(SHARING)
    arguments = ("--nproc-per-node", "1", "train.py", f"{tmp_path}/state.pt")
    code, printed = rehearse(tmp_path / "home", *arguments)
    assert code == 2, printed
    line = printed.splitlines()[-1]
    assert f"got {str(tmp_path / 'state.pt.tmp')!r}, which all runs would share" in line
