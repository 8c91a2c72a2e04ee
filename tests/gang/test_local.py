"""The launcher on one machine: whatever happens to a rank, a run ends soon with its reason and
leaves no process.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from flyte_ddp.errors import ConfigError, RankFailure
from flyte_ddp.events import AttemptEnded
from flyte_ddp.launch.agent import rank_start, supervisor
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.control.stalls import find_culprits
from flyte_ddp.launch.nodes import local
from flyte_ddp.launch.protocol.messages import Collective, Group, InspectedRank
from flyte_ddp.process.memory_limits import UNLIMITED, use_of
from tests.support.dask_runs import eventually
from tests.support.runs import how_it_ended, new_run, start_parent, wait_for_step


def _surroundings():
    """Return the state of this process and its machine that a run must not change."""
    return {
        "environment": dict(os.environ),
        "handlers": [
            signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
        ],
        "main module": sys.modules["__main__"],
        "directory": os.getcwd(),
        "temporary files": sorted(Path(tempfile.gettempdir()).glob("ranks-*")),
    }


# A rank that dies


def test_an_exception_ends_the_run_with_that_ranks_number_and_traceback(
    tmp_path, monkeypatch, survivors
):
    monkeypatch.setenv("FAULT", "raise 1 6")  # step 5 shows that rank 0 has begun to save step 4
    monkeypatch.setenv("WRITE_SECONDS", "1")
    # The server and the directory of its socket outlive the run.
    rank_start.start_server(["torch"])
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run = new_run(tmp_path)
    run.data()
    before, threads = _surroundings(), set(threading.enumerate())

    with pytest.raises(RankFailure) as caught:
        run.train(checkpoint_interval=4)

    # rank 0 was still writing when the exception came
    assert (run.checkpoints / "step-0000000004.json").exists()
    assert (caught.value.rank, caught.value.kind) == (1, "exception")
    assert caught.value.cause == "ValueError: broken on purpose"
    assert re.match(
        r"rank 1 failed: ValueError: broken on purpose\nTraceback \(most recent call last\):\n"
        # The place is not in the training loop.
        r'  File ".*/tests/support/recipes.py", line \d+, in losses',
        str(caught.value),
    )
    assert {f"[rank {rank}] the data are opened" for rank in (0, 1)} <= set(run.lines)
    # The other rank only lost its peer, and its error is left out.
    assert "gloo" not in "".join([str(caught.value), *run.lines])
    assert run.error is caught.value  # the listeners get it
    assert _surroundings() == before
    # The thread that renewed the run's ownership has been asked to end, and nobody waits for it.
    # Threads of earlier tests may end meanwhile.
    assert eventually(lambda: set(threading.enumerate()) <= threads)


@pytest.mark.long
def test_a_killed_rank_ends_the_run_with_all_its_processes(tmp_path, monkeypatch, survivors):
    monkeypatch.setenv("FAULT", "fork-kill 1 15")  # leaves a process that holds the rank's pipes
    monkeypatch.setenv("STEP_SECONDS", "0.05")
    # The last printed lines arrive without this variable too.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    run = new_run(tmp_path, "Listed")

    with pytest.raises(RankFailure, match="rank 1 was killed by SIGKILL") as caught:
        run.train(data_workers=1, log_interval=100, epochs=3)

    assert (caught.value.rank, caught.value.kind, caught.value.cause) == (1, "signal", "SIGKILL")
    assert "this rank is killed on purpose" in str(caught.value)  # the last it printed
    (ended,) = [event for event in run.events if isinstance(event, AttemptEnded)]
    assert 10 <= ended.step <= 15  # between two reports


def test_a_rank_that_dies_while_the_data_are_prepared_ends_the_run(
    tmp_path, monkeypatch, survivors
):
    (tmp_path / "dies_in_ranks.py").write_text(
        "import multiprocessing\n"
        "from tests.support.recipes import Tiny\n"
        "if multiprocessing.parent_process():\n"
        "    raise ValueError('no such thing on this node')\n"
        "class Dying(Tiny): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    prepared = threading.Event()

    def prepare():
        prepared.wait(60)
        return str(tmp_path)

    with pytest.raises(RankFailure, match="no such thing on this node"):
        new_run(tmp_path, "dies_in_ranks.Dying").train(data=prepare)

    assert not prepared.is_set()
    prepared.set()


def test_files_that_a_container_has_read_take_none_of_its_memory(tmp_path):
    (tmp_path / "memory.max").write_text("1000")
    (tmp_path / "memory.current").write_text("900")
    (tmp_path / "memory.stat").write_text("anon 200\ninactive_file 650\nslab 50\n")
    assert use_of(tmp_path) == (250, 1000)
    (tmp_path / "memory.max").write_text("max")
    assert use_of(tmp_path) == (0, UNLIMITED)


@pytest.mark.parametrize(
    ("group", "mounted", "file"),
    [
        ("0::/", "/", "memory.events"),
        ("0::/pods/p/c", "/pods/p/c", "memory.events"),  # a container sees its own as the root
        ("0::/init", "/", "init/memory.events"),
        ("0::/a/b", "/elsewhere", "memory.events"),
        ("4:memory:/pods/c", "/pods/c", "memory.oom_control"),
    ],
)
def test_processes_killed_for_lack_of_memory_are_counted(tmp_path, group, mounted, file):
    events = "low 0\nhigh 0\nmax 7\noom 1\noom_kill 2\noom_group_kill 0\n"
    kind = "cgroup2 cg rw"
    if "memory:" in group:
        kind, events = "cgroup cg rw,memory", "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    mounts = f"23 1 254:0 / / rw - ext4 /dev/vda rw\n41 31 0:38 {mounted} /cg rw - {kind}\n"
    assert supervisor.count_oom_kills(tmp_path) == 0
    for name, contents in {
        "proc/self/cgroup": f"{group}\n",
        "proc/self/mountinfo": mounts,
        f"cg/{file}": events,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(contents)
    assert supervisor.count_oom_kills(tmp_path) == 2


def test_a_rank_that_was_killed_for_lack_of_memory_is_told(tmp_path, monkeypatch):
    counts = itertools.count()
    monkeypatch.setattr(supervisor, "count_oom_kills", lambda: next(counts))
    monkeypatch.setenv("FAULT", "kill 0 2")
    with pytest.raises(
        RankFailure, match="rank 0 was killed by SIGKILL: its container ran out of memory"
    ):
        new_run(tmp_path).train(1)


# A run that hangs


@pytest.fixture
def driven(monkeypatch):
    """The runs of the driver, the newest last."""
    found, start = [], driver.Run

    def keep(*arguments, **options):
        found.append(start(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(driver, "Run", keep)
    return found


def shorten_stall_timeout(driven):
    """Return a relay that shortens the stall timeout when the rank hangs."""

    def relay(line):
        # In this process, and only now, because how long ranks take to start depends on the
        # machine.
        if line == "[rank 1] this rank hangs on purpose":
            object.__setattr__(driven[-1].job.program.needs, "stall_timeout", 0.5)

    return relay


def test_a_stopped_rank_is_named_first_as_the_cause_of_a_stall(
    tmp_path, monkeypatch, survivors, driven
):
    """It can neither write its stack nor answer."""
    monkeypatch.setenv("FAULT", "stop 1 5")
    run = new_run(tmp_path)
    run.relay = shorten_stall_timeout(driven)
    with pytest.raises(RankFailure) as caught:
        run.train()

    head, *rest = str(caught.value).splitlines()
    why = r"rank 1 did not arrive at all_reduce of .*, where rank 0 waits \(collective"
    assert re.match(rf"no rank made progress for \d+ s \(stall_timeout: 0.5\): {why}", head)
    assert rest[0].startswith("--- rank 1, at step 4")
    assert rest[1] == "  no stack: none was written within 5 s"
    assert rest[2].startswith("--- rank 0, at step 4")
    assert "trainer.py" in str(rest[3:])
    assert (caught.value.rank, caught.value.kind) == (1, "stall")


def waiting(number, *collectives, entered=5, name="the default group", ranks=(0, 1, 2, 3)):
    pending = [Collective(n, what.split()[0], what, 1.0) for n, what in collectives]
    return InspectedRank(number, 4, 5.0, [], [Group(name, ranks, entered, pending)])


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([waiting(0), waiting(1), waiting(2)], ()),  # no rank is in a collective
        ([waiting(0, (5, "barrier")), waiting(1, (5, "barrier")), waiting(2, (5, "barrier"))], ()),
        ([waiting(0, (5, "barrier")), waiting(1, entered=4), waiting(2, (5, "barrier"))], (1,)),
        # The others are in two collectives already, as DDP's are.
        ([waiting(0, (5, "all_reduce of x"), (6, "all_reduce of y"), entered=6), waiting(1, entered=4)], (1,)),  # noqa: E501
        # Only the first of the two that it waits in hangs.
        ([waiting(0, (5, "a"), (6, "b"), entered=6), waiting(1, (5, "a")), waiting(2, entered=4)], (2,)),  # noqa: E501
        ([waiting(0, (5, "barrier")), waiting(1, (5, "all_reduce of x")), waiting(2, (5, "barrier"))], (1,)),  # noqa: E501
        # Shapes may differ in an all_gather.
        ([waiting(0, (5, "all_gather of x")), waiting(1, (5, "all_gather of y"))], ()),
        # Rank 1 waits for rank 3 in a group of theirs.
        (
            [
                waiting(0, (5, "barrier")),
                InspectedRank(1, 4, 5.0, [], [
                    Group("the default group", (0, 1, 2, 3), 4),
                    *waiting(1, (9, "barrier"), name="group b", ranks=(1, 3), entered=9).groups,
                ]),
                waiting(3, name="group b", ranks=(1, 3), entered=8),
            ],
            (3,),
        ),
    ],
)  # fmt: skip
def test_the_rank_that_the_others_wait_for_is_found_by_what_each_has_entered(ranks, expected):
    assert find_culprits(ranks).numbers == expected


def test_a_long_preparation_of_data_is_no_stall(tmp_path, driven):
    run = new_run(tmp_path)

    def prepare():
        while not driven:  # the data are prepared while the run is made
            time.sleep(0.01)
        object.__setattr__(driven[-1].job.program.needs, "stall_timeout", 0.1)
        time.sleep(1)
        object.__setattr__(driven[-1].job.program.needs, "stall_timeout", 600.0)
        return str(run.data())

    run.train(1, data=prepare, epochs=1)
    assert run.result.finished.step == 9


# Signals to the parent


@pytest.mark.long
def test_a_signal_while_the_data_are_prepared_ends_the_run(tmp_path, monkeypatch, survivors):
    monkeypatch.setenv("PREPARE_SECONDS", "600")
    parent = start_parent(tmp_path)
    for line in parent.stdout:
        if "preparing" in line:
            break
    parent.terminate()
    ended = how_it_ended(parent)

    expected = (
        f"data were prepared. Its checkpoints are in {tmp_path}/checkpoints: the same run "
        "resumes there"
    )
    assert ended == ("TrainingStopped", f"SIGTERM: the run was stopped while its {expected}")


@pytest.mark.long
def test_the_ranks_of_a_killed_parent_end_themselves(tmp_path, monkeypatch, survivors):
    # The ranks hang, so no communication shows them that the parent is gone.
    monkeypatch.setenv("FAULT", "hang 1 3")
    parent = start_parent(tmp_path)
    wait_for_step(parent, 2)
    assert len(survivors()) >= 1 + 2  # parent and ranks
    parent.kill()
    parent.wait()

    assert eventually(lambda: not survivors())


# Other conditions of a machine


def test_a_listener_that_fails_does_not_end_the_run_whose_lines_go_to_standard_error(
    tmp_path, caplog, capfd
):
    run = new_run(tmp_path)
    run.relay = None

    def fail(event):
        raise OSError("nobody listens")

    run.handle = fail
    run.train(1, epochs=1)

    assert run.result.finished.step == 9
    assert caplog.text.count("failed and receives no more events") == 1
    assert "[rank 0] the data are opened\n" in capfd.readouterr().err


# Bad input, before any process is started


@pytest.fixture
def no_processes(monkeypatch):
    """Fails the test where a process is started."""
    monkeypatch.setattr(
        supervisor, "_Ranks", lambda *arguments: pytest.fail("a process was started")
    )


@pytest.mark.parametrize(
    ("num_gpus", "num_processes", "config", "message"),
    [
        (0, 5, {}, "global_batch_size: expected a multiple of 5, got 12"),
        (
            0,
            2,
            {"gradient_accumulation": 5},
            "global_batch_size: expected a multiple of 10, got 12",
        ),
        (0, -1, {}, "num_processes: expected a whole number of at least 1, got -1"),
        (1, 2, {}, "num_processes: expected at most 1, one per GPU, got 2"),
        (
            0,
            2,
            {"backend": "nccl"},
            "backend: expected auto or gloo for ranks without GPUs, got 'nccl'",
        ),
    ],
)
def test_an_impossible_run_is_refused_before_any_process_starts(
    tmp_path, monkeypatch, no_processes, num_gpus, num_processes, config, message
):
    monkeypatch.setattr(local, "num_gpus", lambda: num_gpus)
    with pytest.raises(ConfigError, match=message):
        new_run(tmp_path).train(num_processes, **config)
