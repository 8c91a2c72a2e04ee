"""Commands that a run prints, to resume it or to replay a step: they run as they are printed."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flyte_ddp.process.invocation import COMMAND_VARIABLE, POD_VARIABLE, find_flyte_ddp_command

REPOSITORY = Path(__file__).parents[2]
TRAINS = """
import time
from pathlib import Path
from flyte_ddp import session

def main(*_):
    first = (session.load() or {"step": 0})["step"]
    with open("starts.txt", "a") as file:
        file.write(f"{first}\\n")
    is_resumed = Path("starts.txt").read_text().count("\\n") > 1
    for step in range(first, first + 2 if is_resumed else 100_000):
        session.report(loss=1.0 / (step + 1))
        session.save({"step": step + 1}, step + 1)
        time.sleep(0.01)
"""
FILES = {
    "trains.py": TRAINS,
    "job.py": "import trains\ntrains.main()\n",
    "own run.py": """
import sys
import flyte_ddp
import trains

if __name__ == "__main__":
    flyte_ddp.run(trains.main, nproc_per_node=1, checkpoints=sys.argv[1])
""",
    "sweeps.py": """
import sys
import flyte_ddp
import trains

if __name__ == "__main__":
    flyte_ddp.sweep(trains.main, [1], checkpoints=sys.argv[1])
""",
    # `make setup` makes this program, beside an interpreter.
    ".venv/bin/flyte-ddp": re.search(
        r"^define PROGRAM\n(.*?)^endef", (REPOSITORY / "Makefile").read_text(), re.M | re.S
    )[1].replace("$$", "$"),
    ".venv/bin/python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
    # pip makes this program.
    "bin/flyte-ddp": f"#!{sys.executable}\n"
    "import sys\n"
    "from flyte_ddp.__main__ import main\n"
    "if __name__ == '__main__':\n"
    "    sys.exit(main())\n",
}
OPTIONS = ("--nproc-per-node", "1", "--checkpoints", "the 'place'")
COMMANDS = {
    "run": (".venv/bin/flyte-ddp", "run", *OPTIONS, "job.py", "a b"),
    "on the path": ("flyte-ddp", "run", *OPTIONS, "job.py"),
    "as a module": (sys.executable, "-m", "flyte_ddp", "run", *OPTIONS, "job.py"),
    "own script": (sys.executable, "own run.py", "the 'place'"),
    "sweep": (sys.executable, "-u", "sweeps.py", "the 'place'"),
}
LONG = ("on the path", "as a module", "own script", "sweep")


def lay_out(directory):
    """Write the files, and return the environment in which commands find them."""
    for name, text in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
        if "bin" in name:
            (directory / name).chmod(0o755)
    search = os.pathsep.join([str(directory / "bin"), os.environ["PATH"]])
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PATH": search}


@pytest.mark.parametrize(
    "typed",
    [
        pytest.param(words, id=name, marks=[pytest.mark.long] * (name in LONG))
        for name, words in COMMANDS.items()
    ],
)
def test_the_printed_command_resumes_as_it_is_printed(tmp_path, typed):
    environment = lay_out(tmp_path)
    with subprocess.Popen(
        typed, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        # The loop ends once a checkpoint is stored.
        while not [*tmp_path.rglob("step-*.json")] and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate()[1]
    (line,) = [each for each in errors.splitlines() if each.startswith("to resume: ")]
    command = line.removeprefix("to resume: ")
    assert shlex.split(command) == list(typed)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment, check=True)
    first, *others = map(int, (tmp_path / "starts.txt").read_text().split())
    assert first == 0
    assert others
    assert min(others) > 0


@pytest.mark.long
def test_a_recipe_resumes_in_the_directory_that_was_made_for_it(tmp_path):
    typed = [sys.executable, "-m", "flyte_ddp", "train", "tests.support.recipes.Tiny"]
    typed += ["--nproc-per-node", "1", "--checkpoint-interval", "2"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "STEP_SECONDS": "0.05"}
    with subprocess.Popen(
        typed, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        while not [*tmp_path.rglob("*.pt")] and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        errors = process.communicate()[1]
    (line,) = [each for each in errors.splitlines() if each.startswith("to resume: ")]
    command = line.removeprefix("to resume: ")
    assert shlex.split(command) == [*typed, "--checkpoints", "runs/Tiny"]
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    assert "resumed at step" in done.stderr


@pytest.mark.parametrize(
    "program",
    [
        (".venv/bin/flyte-ddp",),
        (sys.executable, "-m", "flyte_ddp"),
    ],
)
@pytest.mark.long
def test_the_printed_command_replays_the_bad_step_as_it_is_printed(program, tmp_path):
    environment = lay_out(tmp_path)
    typed = [
        *program,
        "train",
        "tests.support.recipe_with_bad_sample.Planted",
        "--nproc-per-node",
        "1",
    ]
    typed += ["--config", '{"recipe_options": {"bad": 29, "kind": "pixel"}}']
    in_directory = {"cwd": tmp_path, "env": environment, "text": True, "capture_output": True}
    failed = subprocess.run(typed, **in_directory)
    (command,) = re.findall("^to build the step once more: (.*)$", failed.stderr, re.M)
    assert shlex.split(command)[: len(program)] == list(program)
    replayed = subprocess.run(["bash", "-c", command], **in_directory)
    assert (replayed.returncode, "file-29.png" in replayed.stdout) == (0, True)


@pytest.mark.parametrize(
    ("argv", "orig_argv", "pod", "expected"),
    [
        (["a b/flyte-ddp", "run"], ["/p/python", "a b/flyte-ddp", "run"], "", "'a b/flyte-ddp'"),
        (["/m/__main__.py"], ["python", "-m", "flyte_ddp"], "", "python -m flyte_ddp"),
        (["own run.py"], ["venv/bin/python", "own run.py"], "", "venv/bin/python -m flyte_ddp"),
        (["/p/pyflyte", "run"], ["/p/python", "/p/pyflyte", "run"], "", "/p/python -m flyte_ddp"),
        (["/p/pyflyte", "run"], ["/p/python", "/p/pyflyte", "run"], "e1", "flyte-ddp"),
    ],
)
def test_another_command_is_printed_as_this_one_was_typed(
    argv, orig_argv, pod, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("a b").mkdir()
    Path("a b/flyte-ddp").touch(0o755)
    monkeypatch.delenv(COMMAND_VARIABLE, raising=False)
    monkeypatch.delenv(POD_VARIABLE, raising=False)
    if pod:
        monkeypatch.setenv(POD_VARIABLE, pod)
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    assert find_flyte_ddp_command() == expected
