"""How the processes of ranks start: forked where that changes nothing for them, else fresh."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import forkserver

import psutil
import pytest
from fsspec import asyn

from flyte_ddp.__main__ import COMMANDS, main
from flyte_ddp.config import resolve
from flyte_ddp.errors import RankFailure
from flyte_ddp.launch.agent import rank_start
from flyte_ddp.launch.agent.rank_start import start_rank
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.launch.recipe_program import recipe_program
from tests.support.dask_runs import At
from tests.support.runs import REPOSITORY, new_run

RECIPE = recipe_program("digits", resolve({}, {}))
TRAINING_LOOP = (
    str(REPOSITORY / "flyte_ddp/training/main.py") if sys.version_info >= (3, 11) else ""
)
FUNCTION = Program("function", b"")


def _describe(pipe):
    pipe.send(
        {
            "parent": os.getppid(),
            "has torch": "torch" in sys.modules,
            "collects garbage": gc.isenabled(),
            "leaves imports alone": gc.get_freeze_count() > 100_000,
            "training loop": getattr(sys.modules.get("flyte_ddp.training.main"), "__file__", ""),
            "client of S3": (
                "s3fs" in sys.modules,
                asyn.iothread,
                asyn.loop,
                psutil.Process(os.getppid()).net_connections("inet"),
            ),
            "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
            **{name: os.environ.get(name) for name in ("GIVEN_LATER", "TAKEN_AWAY", "TORCH_LOGS")},
        }
    )


def _description(program):
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = start_rank(program, _describe, (theirs,), "rank-0")
    theirs.close()
    found = ours.recv()
    process.join()
    assert process.exitcode == 0
    return found


@pytest.fixture
def server(monkeypatch):
    read = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(rank_start.READ_ON_IMPORT)
    }
    # another file's test has started it in another environment
    if rank_start._variables_of_server not in (None, read):
        # The variables are not restored: they belong to that other test.
        rank_start._variables_of_server = None
        if pid := forkserver._forkserver._forkserver_pid:
            os.kill(pid, signal.SIGKILL)
        while pid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
    monkeypatch.setenv("TAKEN_AWAY", "1")
    parent = _description(RECIPE)["parent"]
    # The parent is the server and not this process, which no test may kill.
    assert parent == forkserver._forkserver._forkserver_pid
    return psutil.Process(parent)


def test_a_recipes_rank_has_torch_and_the_environment_of_its_start(server, monkeypatch):
    # the launcher's, which it outlives
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        server.send_signal(number)
    # Variables that Dask and scikit-learn set here do not prevent the use of the server.
    for name in ("OMP_NUM_THREADS", "MALLOC_TRIM_THRESHOLD_", "KMP_INIT_AT_FORK"):
        monkeypatch.setenv(name, os.environ.get(name, "") + "1")
    monkeypatch.setenv("GIVEN_LATER", "1")
    monkeypatch.delenv("TAKEN_AWAY")
    found = _description(RECIPE)
    del found["client of S3"]  # another test's
    assert found == {
        "parent": server.pid,
        "has torch": True,
        "collects garbage": True,
        "leaves imports alone": True,
        "training loop": TRAINING_LOOP,
        "blocked": set(),
        "GIVEN_LATER": "1",
        "TAKEN_AWAY": None,
        "TORCH_LOGS": None,
    }


@pytest.mark.parametrize(("program", "logs"), [(RECIPE, "+dynamo"), (FUNCTION, None)])
def test_a_functions_rank_is_fresh_and_any_if_torch_would_not_see_its_environment(
    program, logs, server, monkeypatch
):
    if logs:
        monkeypatch.setenv("TORCH_LOGS", logs)
    found = _description(program)
    given = (os.getpid(), False, logs)
    assert (found["parent"], found["has torch"], found["TORCH_LOGS"]) == given


@pytest.mark.long
def test_a_process_without_server_has_its_own_code_and_fresh_ranks_where_torch_does_not_load(
    tmp_path,
):
    """And a rank that compiles nothing does not import the compiler."""
    package = tmp_path / "flyte_ddp/rank"  # The package in the working directory does not count.
    package.mkdir(parents=True)
    for name in ("main.py", "__init__.py", "../__init__.py"):
        (package / name).write_text("")
    (tmp_path / "broken.py").write_text("import os\nos._exit(3)\n")
    code = """
import dataclasses, sys; del sys.path[0]
from multiprocessing import forkserver
from flyte_ddp.launch.agent import rank_start
from tests.gang import test_rank_start as test
from tests.support.runs import new_run
print(test._description(test.RECIPE)["training loop"])
run = new_run(sys.argv[1]).train(1, epochs=1)
print(*{line for line in run.lines if "_dynamo" in line})
forkserver._forkserver._stop()
rank_start._variables_of_server = None
rank_start.start_server(["broken"])
print(test._description(dataclasses.replace(test.RECIPE, slow_imports=["broken"]))["has torch"])
"""
    path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": path, "TELL_MODULES": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    compiler = "[rank 0] torch._dynamo imported: False"
    assert done.stdout.splitlines() == [TRAINING_LOOP, "preparing", compiler, "False"]


CLIENT = """
import dataclasses
from flyte_ddp.launch.recipe_program import slow_imports
from tests.gang import test_rank_start as test

config = {"recipe_options": {"shards": [%r]}}
program = dataclasses.replace(test.RECIPE, slow_imports=slow_imports(config))
print(test._description(program)["client of S3"])
"""


@pytest.mark.parametrize(
    ("shards", "found"),
    [
        # Neither fsspec's thread nor its event loop survives a fork, and no rank shares a socket.
        ("s3://bucket/shards", "(True, [None], [None], [])"),
        ("/shards", "(False, [None], [None], [])"),
    ],
)
@pytest.mark.long
def test_the_client_of_a_store_that_the_config_names_is_imported_before_the_fork(shards, found):
    done = subprocess.run(
        [sys.executable, "-c", CLIENT % shards],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == found


def test_the_command_line_names_the_client_of_its_stores(monkeypatch):
    started = []
    monkeypatch.setattr(rank_start, "start_server", started.append)
    monkeypatch.setitem(COMMANDS, "train", ("builtins:bool", ""))
    for place in ("s3://bucket/run", "runs/one"):
        main(["train", "digits", "--checkpoints", place])
    assert started == [("torch", "s3fs"), ("torch",)]


@pytest.mark.parametrize("config", [{"compile": True}, {"parallel": "fsdp"}], ids=str)
def test_a_rank_that_needs_torchs_compiler_is_forked_with_it(config):
    assert recipe_program("digits", resolve({}, config)).slow_imports == (
        *RECIPE.slow_imports,
        "torch._dynamo",
    )


@pytest.mark.long
def test_a_killed_server_ends_the_run_with_all_its_processes_and_the_next_run_has_another(
    tmp_path, monkeypatch, survivors, server
):
    run = new_run(tmp_path)
    monkeypatch.setattr(run, "handle", At(3, server.kill).handle)
    with pytest.raises(
        RankFailure, match="rank . exited with code 255, or the server that .* was killed"
    ):
        run.train()
    assert _description(RECIPE)["parent"] not in (server.pid, os.getpid())


UPGRADE = """
import pathlib
import flyte_ddp

with open("starts.txt", "a") as file:
    file.write("started\\n")
module = pathlib.Path(flyte_ddp.__file__).with_name("session.py")
module.write_text(f"{module.read_text()}# of the next version")
raise OSError("this attempt is lost")
"""


def test_no_attempt_has_ranks_of_another_version_than_its_driver(tmp_path):
    """Also if somebody upgrades the package in the middle of a run."""
    shutil.copytree(
        REPOSITORY / "flyte_ddp",
        tmp_path / "flyte_ddp",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (tmp_path / "upgrade.py").write_text(UPGRADE)
    command = [sys.executable, "-m", "flyte_ddp", "run", "--nproc-per-node", "1"]
    command += ["--max-restarts", "3", "upgrade.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert (tmp_path / "starts.txt").read_text() == "started\n"
    *_, line = done.stderr.strip().splitlines()
    expected = r"error: .*flyte_ddp: expected \w{8}, with which this run has started, got \w{8} on "
    assert re.match(expected, line), done.stderr


@pytest.mark.long
def test_what_ranks_of_this_machine_import_is_imported_while_the_data_are_prepared():
    code = (
        "from multiprocessing.forkserver import _forkserver as server\n"
        "from tasks.train import prepare\n"
        "prepare(recipe='digits')\n"
        "assert server._forkserver_pid is None\n"
        "prepare(recipe='digits', trains_here=True)\n"
        "assert 'torch' in server._preload_modules and server._forkserver_pid\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
