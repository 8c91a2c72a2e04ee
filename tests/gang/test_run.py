"""Functions and scripts of a user's: what they find, what is returned, and what happens when a rank
of them dies.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import importlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipapp
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster

import flyte_ddp
from flyte_ddp import __main__ as command_line
from flyte_ddp import session
from flyte_ddp.cluster import connect
from flyte_ddp.cluster.config import GRACE_VARIABLE
from flyte_ddp.code.source_code import packages_beside
from flyte_ddp.errors import ConfigError, RankFailure
from flyte_ddp.launch.nodes.dask.place import has_own_terminal
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.run import Gang, count_workers, run_job, script_program
from tests.support.errors import raises_one_line
from tests.support.runs import hear_hangups, new_run

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "tests/support/scripts"
OURS = [sys.executable, "-m", "flyte_ddp", "run"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FLAGS = ["--nproc-per-node", "2", "--max-restarts", "1"]

# Variables that differ from run to run.
FROM_RUN_TO_RUN = {"TORCHELASTIC_RUN_ID", "MASTER_PORT", "PYTEST_CURRENT_TEST"}
OUR_OWN = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "FLYTE_DDP_COMMAND"}
THEIR_OWN = {"TORCHELASTIC_ERROR_FILE"}


def environment():
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": ""}


# A script


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return run_script(OURS, tmp_path_factory.mktemp("ours"))


def run_script(command, directory):
    """Return the script's surroundings in each rank, its finished process, and the directory."""
    (directory / "scripts").mkdir()
    for script in ("surroundings.py", "beside.py"):
        shutil.copy(SCRIPTS / script, directory / "scripts")
    (directory / "sklearn").mkdir()  # An installed package has the same name.
    (directory / "sklearn/__init__.py").touch()
    done = subprocess.run(
        [*command, *FLAGS, "scripts/surroundings.py", str(directory), "--max-restarts", "9"],
        cwd=directory,
        env={name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = [json.loads((directory / f"found-{rank}").read_text()) for rank in (0, 1)]
    return ranks, done, directory


@pytest.mark.long
def test_a_script_finds_the_surroundings_that_torchrun_gives_it(ours, tmp_path):
    torchrun = run_script(TORCHRUN, tmp_path)
    check_surroundings(torchrun)
    for theirs, own in zip(torchrun[0], ours[0], strict=True):
        assert theirs["session"] == [False, None, False]
        theirs, own = dict(theirs["environment"]), dict(own["environment"])
        assert (theirs.pop("MASTER_ADDR"), own.pop("MASTER_ADDR")) == ("localhost", "127.0.0.1")
        names = {name for name in theirs.keys() | own.keys() if theirs.get(name) != own.get(name)}
        assert (
            names - FROM_RUN_TO_RUN - OUR_OWN - THEIR_OWN - {"PWD", "OLDPWD", "OMP_NUM_THREADS"}
            == set()
        )
        assert own["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert {*FROM_RUN_TO_RUN, "OMP_NUM_THREADS"} <= own.keys()


@pytest.mark.long
def test_a_script_runs_as_the_main_program_with_its_own_arguments_and_is_waited_for(ours):
    check_surroundings(ours)


def check_surroundings(finished):
    ranks, _, directory = finished
    script = directory / "scripts/surroundings.py"
    for rank, found in enumerate(ranks):
        assert found["arguments"] == [
            "scripts/surroundings.py",
            str(directory),
            "--max-restarts",
            "9",
        ]
        assert (found["path"], found["directory"]) == (str(script.parent), str(directory))
        assert (found["file"], found["package"], found["is main"]) == (str(script), None, True)
        assert "site-packages" in found["sklearn"]
        assert (found["process"], found["torch is imported"]) == ("MainProcess", False)
        # a process of the start method spawn
        assert (directory / f"child-{rank}").read_text() == "beside"
        assert (directory / f"thread-{rank}").exists()
        assert (directory / f"atexit-{rank}").exists()
        assert found["sum"] == 3.0
    assert ranks[1]["store"] == "kept"  # The store is served while any rank runs.


SHOW = """
import json, os, sys, beside
print(json.dumps([sys.argv, os.path.normpath(sys.path[0]), os.path.normpath(__file__), __name__, __package__,
    __spec__ and __spec__.name, type(__loader__).__name__, os.path.normpath(beside.__file__)]))
"""  # noqa: E501
FORK = """
import os, sys, cloudpickle
from flyte_ddp.launch.run import script_program
for path in sys.argv[1:]:
    if os.fork() == 0:
        cloudpickle.loads(script_program(path, ["a"]).call)()
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def test_whatever_python_runs_is_run_as_python_runs_it(tmp_path):
    app = tmp_path / "v2/app"
    (tmp_path / "jobs").mkdir()
    app.mkdir(parents=True)
    for name in ("train_v2.py", "odd name-x", "ending.txt", "app/__main__.py"):
        (tmp_path / "v2" / name).write_text(SHOW)
    for directory in (tmp_path / "v2", app):
        (directory / "beside.py").touch()
        for decoy in ("train.py", "other.py", "pyz", "model"):
            (directory / decoy).write_text("print('\"another script\"')\n")
    zipapp.create_archive(app, tmp_path / "v2/app.pyz")
    links = {
        "train.py": "train_v2.py",
        "other.py": "odd name-x",
        "model": "app",
        "pyz": "app.pyz",
        "twice.py": "train.py",
    }
    for name, target in links.items():
        (tmp_path / "jobs" / name).symlink_to(target if name == "twice.py" else f"../v2/{target}")
    (tmp_path / "linked").symlink_to("v2")
    paths = [f"jobs/{name}" for name in links]
    paths += [
        "v2/train_v2.py",
        "v2/odd name-x",
        "v2/ending.txt",
        "v2/app",
        "./v2/app/",
        "v2/app.pyz",
    ]
    paths += ["linked/train_v2.py", str(tmp_path / "jobs/train.py"), str(app)]

    options = {
        "cwd": tmp_path,
        "env": {**environment(), "RANK": "0"},
        "capture_output": True,
        "text": True,
    }
    theirs = [subprocess.run([sys.executable, path, "a"], **options) for path in paths]
    ours = subprocess.run([sys.executable, "-c", FORK, *paths], **options)
    assert ours.returncode == 0, ours.stderr
    found = [json.loads(line) for line in ours.stdout.splitlines()]
    assert len(found) == len(paths), ours.stderr
    for path, plain, own in zip(paths, theirs, found, strict=True):
        assert own == json.loads(plain.stdout), (path, plain.stderr)
        assert own[0] == [path, "a"]


def test_lines_that_ranks_print_are_the_commands_output(ours):
    done = ours[1]
    lines = done.stdout.splitlines()
    assert sorted(lines) == sorted(
        f"[rank {rank}] {line}" for rank in (0, 1) for line in ("all is done", "bye")
    )
    assert "surroundings.py, 2 ranks" in done.stderr
    assert "step 1: loss 0.5" in done.stderr


def test_a_session_without_a_run_does_nothing(ours, monkeypatch):
    assert [found["session"] for found in ours[0]] == [[True, None, False]] * 2
    monkeypatch.setattr(session, "_current", None)
    session.save({"step": 1}, 1)
    session.report(loss=0.5)
    assert (session.checkpoints, session.load(), session.stop_requested) == ("", None, False)
    with pytest.raises(AttributeError, match="no attribute 'stop'"):
        _ = session.stop


# A function


def test_only_a_function_that_has_reported_is_ended_by_the_stall_timeout_with_the_stacks_of_all(
    forked_functions,
):
    """A signal asks for them only where no thread can answer: its handler has crashed ranks with
    running threads.
    """

    def function():
        time.sleep(2.5)  # more than the stall timeout, without a report
        session.report()
        if os.environ["RANK"] == "0":
            # The default action of this signal kills the process.
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            stand_still()
        hold_all_threads()

    def stand_still():
        time.sleep(600)

    def hold_all_threads():
        ctypes.PyDLL(None).sleep(600)

    with pytest.raises(
        RankFailure,
        match=(
            r"no rank made progress for \d+ s \(stall_timeout: "
            r"1\)"
        ),
    ) as caught:
        flyte_ddp.run(function, nproc_per_node=2, stall_timeout=1)
    assert caught.value.kind == "stall"
    for expected in (
        "rank 0, at step 1",
        "rank 1, at step 1",
        "in stand_still",
        "in hold_all_threads",
    ):
        assert expected in str(caught.value)


@pytest.mark.long
def test_a_function_that_never_reports_is_ended_when_all_ranks_but_one_wait_for_it():
    def function():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        begun = time.monotonic()
        while True:  # collectives that end, and for longer than the timeout
            dist.all_reduce(torch.ones(1))
            if dist.get_rank() == 2:
                time.sleep(0.01)
            dist.all_reduce(is_over := torch.tensor(float(time.monotonic() > begun + 5)))
            if is_over:
                break
        if dist.get_rank() == 2:
            stand_still()
        dist.all_reduce(torch.ones(77, 3))

    def stand_still():
        time.sleep(300)

    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        flyte_ddp.run(function, nproc_per_node=4, stall_timeout=3)
    assert time.monotonic() - started > 8
    assert (caught.value.rank, caught.value.kind) == (2, "stall")
    assert re.match(
        r"no rank made progress for \d s \(stall_timeout: 3\): rank 2 did not arrive at "
        r"all_reduce of float \[77, 3\], "
        r"where ranks 0, 1 and 3 wait \(collective \d+ of the default group\)\n--- rank 2, at "
        r"step 0, last progress",
        str(caught.value),
    )
    assert str(caught.value).count("in stand_still") == 1
    assert "--- ranks 0, 1 and 3, at step 0" in str(caught.value)


@pytest.mark.long
def test_a_rank_of_another_node_that_does_not_arrive_is_named(client):
    """Its own node notices nothing: the function never reports, and this rank is in no
    collective.
    """

    def function():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        if dist.get_rank() == 1:
            time.sleep(60)
        dist.barrier()
        dist.all_reduce(torch.ones(1))

    with pytest.raises(
        RankFailure, match=r"stall_timeout: 2\): rank 1 on node 1 .* did not arrive at barrier"
    ) as caught:
        flyte_ddp.run(function, nnodes=2, client=client, stall_timeout=2)
    assert (caught.value.rank, caught.value.kind) == (1, "stall")
    assert "in function" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda: b"x" * (65 << 20), "expected a value of at most 64 MiB, got 65 MiB"),
        (threading.Lock, "failed: TypeError: cannot pickle '_thread.lock' object"),
    ],
)
def test_a_value_that_cannot_be_returned_is_one_clear_error(function, expected, forked_functions):
    with pytest.raises(RankFailure, match=expected):
        flyte_ddp.run(function)


def train_plainly():
    return "trained"


@dask.delayed
def train_delayed(value=1):
    return value


async def train_as_coroutine():
    return 1


def train_as_generator():
    yield 1


async def train_as_async_generator():
    yield 1


class AsyncCallable:
    async def __call__(self):
        return 1


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (train_delayed(2), "a value of Dask's that is not computed"),
        (train_as_coroutine, "train_as_coroutine, whose call makes a coroutine"),
        (functools.partial(train_as_coroutine), "whose call makes a coroutine"),
        (dask.delayed(train_as_coroutine), "whose call makes a coroutine"),
        (train_as_generator, "train_as_generator, whose call makes a generator"),
        (train_as_async_generator, "whose call makes a generator"),
        (AsyncCallable(), "AsyncCallable, whose call makes a coroutine"),
        (3, "expected one to call, got 3"),
    ],
)
def test_a_function_whose_call_runs_nothing_is_refused(function, got):
    for call in (flyte_ddp.run, lambda function: flyte_ddp.sweep(function, [1, 2])):
        with raises_one_line(ConfigError, match=f"^function: .*{got}"):
            call(function)


@pytest.mark.parametrize(
    "function",
    [lambda: train_as_coroutine(), lambda: train_as_generator(), lambda: train_delayed(2)],
)
def test_a_function_that_returns_what_has_not_run_is_refused(function, forked_functions):
    with pytest.raises(RankFailure, match="function: expected one whose call does the work and"):
        flyte_ddp.run(function)


def test_a_delayed_function_is_run(forked_functions):
    assert flyte_ddp.run(train_delayed, 3) == 3
    assert flyte_ddp.run(functools.partial(train_delayed, value=4)) == 4


def log_lines():
    """Be called as a function of a script, which no rank imports."""
    sys.stdout.write("a printed line\n")
    for name in ("distributed.worker", "any.logger"):
        logging.getLogger(name).info("an info of %s", name)
        logging.getLogger(name).debug("a detail of %s", name)
    logging.getLogger("flyte_ddp.own").info("an info of the library")
    return os.environ["WORLD_SIZE"]


log_lines.__module__ = "__main__"
LOGGED = ["an info of distributed.worker", "an info of any.logger"]


def test_what_a_scripts_function_logs_is_printed(forked_functions, capfd):
    flyte_ddp.run(log_lines)
    lines = capfd.readouterr().err.splitlines()
    assert [each for each in lines if "an info" in each or "a detail" in each] == [
        f"[rank 0] {line}" for line in LOGGED
    ]


def test_a_callers_level_and_format_are_those_of_its_functions(
    forked_functions, capfd, monkeypatch
):
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("{levelname}: {message}", style="{"))
    monkeypatch.setattr(logging.root, "handlers", [handler])
    monkeypatch.setattr(logging.root, "level", logging.DEBUG)
    monkeypatch.setattr(logging.getLogger("any.logger"), "level", logging.WARNING)
    flyte_ddp.run(log_lines)
    lines = capfd.readouterr().err.splitlines()
    found = [each for each in lines if "an info" in each or "a detail" in each]
    assert found == [
        "[rank 0] INFO: an info of distributed.worker",
        "[rank 0] DEBUG: a detail of distributed.worker",
        "[rank 0] INFO: an info of the library",
    ]


class LockedError(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")
        self.lock = threading.Lock()


def fail_with_a_lock():
    raise LockedError(1, 2)


@pytest.mark.long
def test_an_exception_that_cannot_be_pickled_is_the_ranks_error_on_several_nodes(client):
    with pytest.raises(RankFailure, match=r"rank \d failed: LockedError: 1 and 2\nTraceback"):
        flyte_ddp.run(fail_with_a_lock, nnodes=2, client=client)


def test_one_rank_alone_returns_and_an_exit_with_code_0_is_none(forked_functions):
    assert flyte_ddp.run(lambda *numbers: sum(numbers), 1, 2, 3) == 6
    assert flyte_ddp.run(lambda: sys.exit(0)) is None


# A stop


def run_until_signal(script, number, *flags, arguments=()):
    """Send signal `number` to a run after its ranks' first two lines; return its exit code, lines
    and errors.
    """
    parent = subprocess.Popen(
        [*OURS, "--nproc-per-node", "2", *flags, script, *arguments],
        env=environment(),
        preexec_fn=hear_hangups,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = [line.rstrip() for line in itertools.islice(parent.stdout, 2)]
    parent.send_signal(number)
    output, errors = parent.communicate()
    return parent.returncode, lines + output.splitlines(), errors


WAITS = """
import os, signal, sys, time
def save(number, frame):
    print("saved after", signal.Signals(number).name)
    sys.exit(number == signal.SIGQUIT)
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, save)
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("saved after SIGINT")
    raise
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP", "SIGQUIT"])
@pytest.mark.long
def test_a_script_that_does_not_ask_gets_the_signal_itself_as_under_torchrun(name, tmp_path):
    (tmp_path / "waits.py").write_text(WAITS)
    number = signal.Signals[name]
    code, lines, errors = run_until_signal(tmp_path / "waits.py", number)

    assert code == 128 + number, errors
    assert sorted(lines) == sorted(
        f"[rank {rank}] {text}" for rank in (0, 1) for text in ("ready", f"saved after {name}")
    )
    assert f"{name}: the run was stopped" in errors
    # The run kept them for its own restarts alone.
    assert "checkpoints" not in errors


SAVES_SLOWLY = """
import time
from flyte_ddp import session
from flyte_ddp.storage import Storage

write = Storage.write
def write_slowly(self, *arguments):
    time.sleep(1)
    return write(self, *arguments)
Storage.write = write_slowly

if session.load() is None:
    session.save({"step": 1}, step=1)
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.mark.long
def test_a_script_that_does_not_ask_is_ended_after_its_last_save_is_stored(tmp_path):
    (tmp_path / "saves.py").write_text(SAVES_SLOWLY)
    flags = ["--checkpoints", tmp_path / "place"]
    code, _, errors = run_until_signal(tmp_path / "saves.py", signal.SIGTERM, *flags)

    assert code == 128 + signal.SIGTERM, errors
    names = [each.name for each in (tmp_path / "place").rglob("step-*")]
    assert sorted(name.split("-")[1][:10] for name in names) == ["0000000001"] * 2, names


def test_a_second_signal_ends_the_run_at_once_and_nohup_ignores_a_hangup(tmp_path):
    (tmp_path / "stubborn.py").write_text(
        "import signal, time\n"
        "signal.signal(signal.SIGINT, lambda number, frame: print('no', flush=True))\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    time.sleep(1)\n"
    )
    parent = subprocess.Popen(
        ["nohup", *OURS, tmp_path / "stubborn.py"],
        # Only the second signal ends the run.
        env={**environment(), GRACE_VARIABLE: "600"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert parent.stdout.readline() == b"[rank 0] ready\n"
    parent.send_signal(signal.SIGHUP)  # If this signal counted, the next one would be the second.
    parent.send_signal(signal.SIGINT)
    assert parent.stdout.readline() == b"[rank 0] no\n"
    parent.send_signal(signal.SIGINT)
    _, errors = parent.communicate()
    assert parent.returncode == 130
    assert b"SIGINT: the ranks were killed" in errors


def test_a_signal_while_a_cluster_starts_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(connect, "open_cluster", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    # flytekit, if imported, has set one of its own
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = command_line.main(
            ["run", "--nnodes=2", "--cluster", '{"kind": "local"}', str(SCRIPTS / "ending.py")]
        )
    finally:
        signal.signal(signal.SIGINT, handler)
    assert code == 130
    assert capsys.readouterr().err == "SIGINT: the run was stopped while no rank was running\n"


# Bad input


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (
            {"nnodes": "2:1"},
            "nnodes: expected a number of machines such as 2, or a range such as 1:4, got '2:1'",
        ),
        (
            {"nnodes": 0},
            "nnodes: expected a number of machines such as 2, or a range such as 1:4, got 0",
        ),
        (
            {"nproc_per_node": "all"},
            "nproc_per_node: expected a number of ranks, gpu, cpu or auto, got 'all'",
        ),
        (
            {"nproc_per_node": 0},
            "nproc_per_node: expected a number of ranks, gpu, cpu or auto, got 0",
        ),
        ({"max_restarts": -1}, "max_restarts: expected a whole number of at least 0, got -1"),
        (
            {"stall_timeout": float("nan")},
            "stall_timeout: expected a finite number above 0 (seconds), got nan",
        ),
        (
            {"stall_timeout": "1"},
            "stall_timeout: expected a finite number above 0 (seconds), got '1'",
        ),
        (
            {"nnodes": 2, "cluster": {"num_nodes": 3}},
            "cluster.num_nodes: expected 2, as nnodes has it, got 3",
        ),
        (
            {"nnodes": 2, "nproc_per_node": "cpu"},
            "nproc_per_node: expected a number, gpu or auto on several machines",
        ),
        ({"cluster": {"nodes": 2}}, "nodes"),
        (
            {"nnodes": 2, "max_restarts": 1, "cluster": {"max_restarts": 2}},
            "cluster.max_restarts: expected 1",
        ),
    ],
)
def test_a_gang_that_cannot_be_is_refused(values, expected):
    with pytest.raises(ConfigError) as caught:
        Gang(**values).cluster_config()
    assert expected in str(caught.value)


# On a Dask cluster


@pytest.mark.long
def test_a_function_runs_on_a_dask_cluster_with_the_code_beside_it(client, tmp_path, monkeypatch):
    (tmp_path / "functions.py").write_text(
        "import os\n"
        "import torch, torch.distributed as dist\n"
        "from constants import FACTOR\n"
        "from flyte_ddp import session\n"
        "def train(value):\n"
        "    dist.init_process_group('gloo')\n"
        "    total = torch.ones(1) * value * FACTOR\n"
        "    dist.all_reduce(total)\n"
        "    for number in range(3):\n"
        "        name = f'{os.environ[\"RANK\"]}/{number}'\n"
        "        session.submit_result(name, bytes([number]) * (3 << 20))\n"
        "    names = ('RANK', 'GROUP_RANK', 'GROUP_WORLD_SIZE', 'LOCAL_WORLD_SIZE', "
        "'TORCHELASTIC_RESTART_COUNT')\n"
        "    return total.item(), [os.environ[name] for name in names], bytes(5 << 20)\n"
    )
    (tmp_path / "constants.py").write_text("FACTOR = 3\n")
    # This process alone has the path: the workers run already.
    monkeypatch.syspath_prepend(tmp_path)
    functions = importlib.import_module("functions")
    assert packages_beside("functions") == ("constants", "functions")
    with pytest.raises(ModuleNotFoundError):
        client.submit(importlib.import_module, "constants").result()

    listener = new_run(tmp_path)
    total, variables, rest = flyte_ddp.run(
        functions.train,
        2,
        nnodes=2,
        client=client,
        listeners=[listener],
        results=tmp_path / "results",
    )

    assert (total, variables, rest) == (12.0, ["0", "0", "2", "1", "0"], bytes(5 << 20))
    started = listener.started
    assert (started.name, started.world_size, started.num_nodes) == ("train", 2, 2)
    for name in (f"{rank}/{number}" for rank in (0, 1) for number in range(3)):
        assert (tmp_path / "results" / name).read_bytes() == bytes([int(name[-1])]) * (3 << 20)
    left = client.run(lambda dask_worker: glob.glob(f"{dask_worker.local_directory}/results-*"))
    assert [*left.values()] == [[], []]


@pytest.mark.long
def test_a_clients_workers_are_all_used_and_what_ranks_print_is_in_their_logs(client, capfd):
    with Client(client.scheduler.address) as other:
        assert flyte_ddp.run(log_lines, client=other) == "2"
        lines = capfd.readouterr().err.splitlines()
        for line in ("a printed line", *LOGGED):
            for rank in (0, 1):
                assert f"[node {rank}] [rank {rank}] {line}" in lines
        gang = Gang(client=other)
        assert (gang.nnodes, Gang(nnodes=1, client=other).nnodes, Gang().nnodes) == (2, 1, 1)
        config = gang.cluster_config()
        assert (config.resolved_kind, config.num_nodes) == ("existing", 2)
        assert not has_own_terminal(other, config)
    # A cluster in this process shares its terminal, where the lines are shown already.
    with LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster:
        with Client(cluster) as own:
            assert has_own_terminal(own, config)


@pytest.mark.long
def test_a_recipe_is_trained_on_all_workers_of_a_client(client, tmp_path):
    listener = new_run(tmp_path)
    with Client(client.scheduler.address) as other:
        trained = flyte_ddp.train(
            listener.recipe,
            {"epochs": 1},
            nproc_per_node=1,
            client=other,
            checkpoints=str(listener.checkpoints),
            listeners=[listener],
        )
    assert len(trained.epochs) == 1
    assert (listener.started.world_size, listener.started.num_nodes) == (2, 2)


@pytest.mark.long
def test_a_clients_cluster_without_workers_needs_a_number_of_them(scheduler):
    with Client(scheduler, timeout=60) as client:
        for call in (
            flyte_ddp.run,
            lambda function, client: flyte_ddp.sweep(function, [1], client=client),
        ):
            with raises_one_line(ConfigError, match="client: expected a cluster with workers, got"):
                call(log_lines, client=client)


def test_a_cluster_has_workers_while_another_thread_asks_for_fewer_facts(client):
    # Dask's client asks in this way every two seconds, and keeps the answer.
    is_over = threading.Event()

    def ask():
        while not is_over.is_set():
            client.scheduler_info(n_workers=0)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        assert {count_workers(client) for _ in range(200)} == {2}
    finally:
        is_over.set()
        thread.join()


@pytest.mark.long
def test_a_scripts_directory_is_shipped_to_the_workers(client, tmp_path, monkeypatch):
    directory = tmp_path / "code"
    shutil.copytree(SCRIPTS, directory)
    monkeypatch.chdir(tmp_path)
    (directory / "placed.py").write_text("print('runs another script')\n")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/placed.py").symlink_to("../code/placed_v2.py")
    (directory / "placed_v2.py").write_text(
        "import os, sys, beside\n"
        "print('runs', os.path.basename(os.path.dirname(beside.__file__)), os.getcwd(), "
        "*sys.argv[1:])\n"
    )
    listener = new_run(tmp_path)
    gang = Gang(nnodes=2, cluster={"kind": "local", "node_timeout": 60}, client=client)
    program = script_program("jobs/placed.py", ["--lr", "1"])
    run_job(Job(program), gang, relay=listener.lines.append)

    shipped = [line for line in listener.lines if "runs" in line]
    assert len(shipped) == 2
    # This machine has the working directory, so what is written there stays; the code is the
    # driver's.
    assert all(f"runs flyte_ddp_script {tmp_path} --lr 1" in line for line in shipped)


def test_a_module_is_shipped_with_its_package_and_a_notebook_with_the_modules_beside_it(
    tmp_path, monkeypatch
):
    (tmp_path / "shipped_package").mkdir()
    (tmp_path / "shipped_package/train.py").write_text("print(1)\n")
    (tmp_path / "notes.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    program = script_program("shipped_package.train", [], is_module=True)
    assert "shipped_package/train.py" in program.source_files()
    assert "flyte_ddp/session.py" in program.source_files()

    importlib.import_module("notes")
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__path__", [], raising=False)
    assert packages_beside("__main__") == ("notes",)


@pytest.mark.long
def test_a_plain_script_runs_its_own_functions_and_tasks_on_several_nodes(tmp_path):
    """Without a guard, so that a process that imports the main module again starts a run in
    that.
    """
    (tmp_path / "beside.py").write_text("def double(value):\n    return 2 * value\n")
    (tmp_path / "flow.py").write_text(
        "import os\n"
        "import flyte_ddp\n"
        "import torch.distributed as dist\n"
        "from flytekit import task\n"
        "from flyte_ddp.flytekit_plugin import Distributed\n"
        "from beside import double\n"
        "class Place:\n"
        "    def __init__(self, value):\n"
        "        self.value = value\n"
        "        self.config = dist.is_available()\n"
        "def train(value):\n"
        "    return Place((double(value), os.environ['GROUP_WORLD_SIZE']))\n"
        "@task(task_config=Distributed(nnodes=2, cluster={'kind': 'local'}))\n"
        "def trained(value: int) -> str:\n"
        "    assert train(value).config and dist.config\n"
        "    return str(train(value).value)\n"
        "place = flyte_ddp.run(train, 4, nnodes=2, cluster={'kind': 'local'})\n"
        "print(__name__, place.value, isinstance(place, Place), trained(value=5))\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "flow.py"], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "__main__ (8, '2') True (10, '2')\n"


def test_an_exception_that_names_a_connection_is_the_ranks_own_where_no_node_can_be_lost(
    forked_functions,
):

    def read_from_a_server():
        raise ConnectionResetError("Connection reset by peer")

    with pytest.raises(RankFailure, match=r"rank \d failed: ConnectionResetError: .*\nTraceback"):
        flyte_ddp.run(read_from_a_server)
