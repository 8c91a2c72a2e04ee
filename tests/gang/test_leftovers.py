"""Runs leave no open files or directories behind, and start whatever TMPDIR is and whatever lies
beside a script.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import flyte_ddp
from flyte_ddp.process.temporary_directories import temporary_directory
from tests.support.runs import REPOSITORY

STANDARD = (
    "random",
    "token",
    "queue",
    "logging",
    "socket",
    "pickle",
    "types",
    "struct",
    "tempfile",
    "json",
)
SCRIPT = "import sys, helper; print('beside', helper.NAME, flush=True)\n"
COMMAND = (
    "import sys; sys.path[0] = sys.argv.pop(1); from flyte_ddp.__main__ import main; "
    "sys.exit(main())"
)


def number_of_ranks():
    return int(os.environ["WORLD_SIZE"])


@pytest.mark.long
def test_runs_leave_no_open_file():
    counts = []
    gc.disable()  # a pipe that waits to be collected is a pipe that is open
    try:
        for _ in range(4):
            assert flyte_ddp.run(number_of_ranks, nproc_per_node=2) == 2
            counts.append(len(os.listdir("/proc/self/fd")))
    finally:
        gc.enable()
    assert counts[-1] <= counts[1], counts


def test_the_directory_of_a_killed_process_is_removed_by_the_next(tmp_path):
    code = (
        "import sys, time; from flyte_ddp.process import temporary_directories as made\n"
        "with made.temporary_directory('ranks-', sys.argv[1]) as d:\n"
        "    print(d, flush=True); open(d + '/log', 'w'); time.sleep(600)"
    )
    (tmp_path / "ranks-mine").mkdir()  # The owner of this folder is not known.
    with subprocess.Popen(
        [sys.executable, "-c", code, tmp_path], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as other:
        theirs = Path(other.stdout.readline().strip())
        with temporary_directory("ranks-", str(tmp_path)) as directory:
            assert theirs.is_dir()
            assert Path(directory).stat().st_mode & 0o777 == 0o700
        other.kill()
    assert theirs.is_dir()
    with temporary_directory("ranks-", str(tmp_path)):
        assert not theirs.exists()
    assert [each.name for each in tmp_path.iterdir()] == ["ranks-mine"]


def test_a_forked_process_leaves_its_parents_directory(tmp_path):
    """Such as a loader process, which drops what it has inherited: its sockets would be in a
    directory that is gone.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(temporary_directory("pymp-", str(tmp_path))))
        child = multiprocessing.get_context("fork").Process(target=stack.close)
        child.start()
        child.join()
        assert child.exitcode == 0
        assert directory.is_dir()
        assert len(list(tmp_path.iterdir())) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("length", [75, 200])
@pytest.mark.long
def test_a_recipe_trains_whatever_the_length_of_tmpdir(length, tmp_path):
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        directory = Path(
            root,
            *["d" * 40] * (length // 41),
            "e" * max(1, length - len(root) - length // 41 * 41 - 2),
        )
        directory.mkdir(parents=True)
        code = (
            "from flyte_ddp.launch.agent.rank_start import ForkedProcess, start_server\n"
            "from multiprocessing import forkserver\nfrom multiprocessing.connection import "
            "Listener\n"
            "assert start_server(('json',)); probe = ForkedProcess(target=int)\n"
            "probe.start(); probe.join()\n"
            "address = forkserver._forkserver._forkserver_address\n"
            "assert len(Listener().address) < 108; print(address)"
        )
        environment = {**os.environ, "TMPDIR": str(directory)}
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=REPOSITORY,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert not done.stdout.startswith(str(directory))
        assert not Path(done.stdout.strip()).parent.exists()  # The folder is removed at the end.


@pytest.mark.long
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_modules_with_names_of_the_standard_library_beside_a_script_end_nothing(
    num_nodes, tmp_path
):
    for name in STANDARD:
        (tmp_path / f"{name}.py").write_text("raise ImportError('the one beside the script')\n")
    (tmp_path / "helper.py").write_text("NAME = 'mine'\n")
    (tmp_path / "train.py").write_text(SCRIPT)
    on = [] if num_nodes == 1 else ["--nnodes", "2", "--cluster", json.dumps({"kind": "local"})]
    arguments = [
        "run",
        *on,
        "--nproc-per-node",
        "1",
        "--checkpoints",
        str(tmp_path / "c"),
        "train.py",
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, REPOSITORY, *arguments], cwd=tmp_path, capture_output=True, text=True,  # noqa: E501
        env={**os.environ, "PYTHONSAFEPATH": "", "HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("beside mine\n") == num_nodes
