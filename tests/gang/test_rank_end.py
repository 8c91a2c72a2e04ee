"""A rank ends as Python ends a program: nothing that was written is lost, and exit codes mean what
they mean.
"""

from __future__ import annotations

import gzip
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from collections import Counter

import pytest

import flyte_ddp
from flyte_ddp.errors import ConfigError, RankFailure
from flyte_ddp.process.tracebacks import is_of_program
from tests.gang.test_run import OURS, SCRIPTS, environment

FILES = {"log": "log", "csv": "a,1\r\n", "local": "local", "atexit": "exit"}


def launch(directory, *arguments):
    return subprocess.run(
        [*OURS, "--nproc-per-node", "2", *map(str, arguments)],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("how", ["exit", "raise", "late"])
def test_what_is_written_and_printed_at_the_end_is_whole(tmp_path, how):
    done = launch(tmp_path, SCRIPTS / "ending.py", tmp_path, how)
    complete = [rank for rank in (0, 1) if (tmp_path / f"atexit-{rank}").exists()]
    # After an error the other rank may be ended before its own end.
    assert complete == [0, 1] if how == "late" else complete
    for rank in complete:
        found = {name: (tmp_path / f"{name}-{rank}").read_bytes().decode() for name in FILES}
        assert found == FILES, (rank, done.stderr)
        assert gzip.decompress((tmp_path / f"gzip-{rank}").read_bytes()) == b"packed"
        assert (tmp_path / f"del-{rank}").read_text() == how
    printed = done.stdout + done.stderr
    counts = sorted(printed.count(f"[rank {rank}] printed") for rank in (0, 1))
    assert counts == [1, 1] or (counts == [0, 1] and how != "late")
    assert done.returncode == (0 if how == "late" else 1)
    assert ("failed: ValueError: an error\nTraceback" in done.stderr) is (how == "raise")
    assert ("Traceback" in done.stderr) is (how == "raise")
    assert ("failed: SystemExit: an end\nin two lines" in done.stderr) is (how == "exit")


# Exit codes


def script(directory, *lines):
    file = directory / "script.py"
    file.write_text("import os, sys, time, signal\nrank = os.environ['RANK']\n" + "\n".join(lines))
    return file


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["if rank == '0': os._exit(0)", "time.sleep(1)"], 0),
        (["if rank == '1': os.execv(sys.executable, [sys.executable, '-c', 'exit(7)'])"], 1),
        (
            [
                "if os.fork() == 0: sys.exit(5)",
                "if os.wait()[1] != 5 << 8: sys.exit(1)",
                "if os.fork() == 0: raise KeyError('of a child')",
                "if os.wait()[1] != 1 << 8: sys.exit(1)",
            ],
            0,
        ),
    ],
    ids=["_exit", "exec that fails", "ends of forked processes"],
)
@pytest.mark.long
def test_a_rank_that_ends_its_process_itself_is_judged_by_its_code(tmp_path, lines, code):
    count = f"open({str(tmp_path / 'starts')!r}, 'a').write(rank)"
    done = launch(tmp_path, "--max-restarts", 1, script(tmp_path, count, *lines))
    assert done.returncode == code, done.stderr
    # A rank that another one's end has ended may not have come to its first line.
    starts = Counter((tmp_path / "starts").read_text())
    assert starts["1"] == (1 if code == 0 else 2)
    assert starts["0"] <= starts["1"]
    if code:
        assert "rank 1 exited with code 7" in done.stderr


def test_a_function_that_ends_its_process_returns_nothing(forked_functions):
    assert flyte_ddp.run(os._exit, 0) is None


# Errors of any kind


class ConfigErrorOfTheirOwn(Exception):
    pass


ConfigErrorOfTheirOwn.__name__ = "ConfigError"


def fail(error):
    raise error


@pytest.mark.parametrize(
    ("error", "expected", "is_user_error"),
    [
        (
            ConfigErrorOfTheirOwn("theirs"),
            "tests.gang.test_rank_end.ConfigError: theirs\nTraceback",
            False,
        ),
        (ConfigError("ours"), "rank 0 failed: ConfigError: ours", True),
    ],
)
def test_an_error_of_a_function_keeps_its_class_and_frames(
    error, expected, is_user_error, forked_functions
):
    with pytest.raises(RankFailure) as raised:
        flyte_ddp.run(fail, error)
    assert expected in str(raised.value)
    first_frame = "".join(str(raised.value).splitlines()[2:3])
    assert (f'File "{__file__}"' in first_frame and "in fail" in first_frame) is not is_user_error
    assert raised.value.is_user_error is is_user_error


def fail_with_hooks(file):
    import torch.distributed as dist

    def hook(kind, error, frames):
        previous(kind, error, frames)
        file.write_text(f"{kind.__name__}: {error} in {frames.tb_frame.f_code.co_name}")

    previous, sys.excepthook = sys.excepthook, hook
    # This call installs a hook around the former one, and prints the same.
    dist.init_process_group("gloo")
    raise KeyError("lost")


@pytest.mark.long
def test_a_programs_hook_for_errors_is_called_and_the_traceback_shown_once(tmp_path, capfd):
    with pytest.raises(RankFailure, match="KeyError: 'lost'\nTraceback"):
        flyte_ddp.run(fail_with_hooks, tmp_path / "hooked")
    assert (tmp_path / "hooked").read_text() == "KeyError: 'lost' in fail_with_hooks"
    assert "Traceback" not in capfd.readouterr().err


def test_this_package_and_libraries_are_no_part_of_a_program():
    modules = {
        name: module for name, module in sys.modules.items() if isinstance(module, types.ModuleType)
    }
    found = {name for name, module in modules.items() if is_of_program(vars(module))}
    assert {"tests.gang.test_rank_end", "tests.gang.test_run"} <= found
    assert (
        not {"flyte_ddp", "flyte_ddp.session", "pytest", "json", "subprocess", "builtins"} & found
    )


# Leftovers of a killed rank


def kill_with_semaphores(file):
    """Die with semaphores of the rank's own and of a child's, as loader processes have; write their
    names first.
    """
    method = multiprocessing.get_context("spawn")
    words = method.Queue()
    method.Process(target=make_semaphore, args=(words,)).start()
    with open(file, "a") as names:
        print(words._rlock._semlock.name, words.get(timeout=60), file=names)
    os.kill(os.getpid(), signal.SIGKILL)


def make_semaphore(words):
    lock = multiprocessing.get_context("spawn").Lock()
    words.put(lock._semlock.name)
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists semaphores")
@pytest.mark.long
def test_killed_ranks_and_their_children_leave_no_semaphores(tmp_path):
    kept = multiprocessing.get_context("spawn").Lock()
    with pytest.raises(RankFailure, match="SIGKILL"):
        flyte_ddp.run(kill_with_semaphores, tmp_path / "names", max_restarts=1)
    names = (tmp_path / "names").read_text().split()
    assert len(names) == 4
    left = {f"/{file.removeprefix('sem.')}" for file in os.listdir("/dev/shm")}
    assert left.isdisjoint(names)
    assert kept._semlock.name in left
