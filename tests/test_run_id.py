"""A run that its caller names, for retries elsewhere; and signals to a run that is started beside
the main thread.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time

import pytest

import flyte_ddp
from flyte_ddp.__main__ import main
from flyte_ddp.checkpoints.ownership import OWNER, Ownership, check_owner, read_owner
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.launch import driver, signals
from flyte_ddp.storage import Storage


def go_on():
    from flyte_ddp import session

    state = session.load() or {"step": 0}
    session.save({"step": state["step"] + 1}, state["step"] + 1)
    return state["step"]


def be_killed_elsewhere(url):
    """Leave the place at `url` as a run that was killed a moment ago on another machine does."""
    storage = Storage(url)
    owner = json.loads(storage.read(OWNER))
    storage.write(
        OWNER,
        json.dumps({**owner, "released": False, "machine": "another", "host": "pod-1"}).encode(),
    )


@pytest.mark.long
def test_a_retry_elsewhere_with_the_same_run_id_goes_on_at_once(tmp_path):
    url = str(tmp_path)
    assert flyte_ddp.run(go_on, checkpoints=url, run_id="r1-a0") == 0
    be_killed_elsewhere(url)
    ghost = read_owner(Storage(url))[1].token
    assert flyte_ddp.run(go_on, checkpoints=url, run_id="r1-a0") == 1
    with pytest.raises(ConfigError, match="so this process writes nothing more there"):
        check_owner(Storage(url), ghost)


def test_a_living_run_of_this_machine_keeps_its_place_also_from_its_own_run_id(tmp_path):
    with (
        Ownership(str(tmp_path), "r1-a0", 60),
        pytest.raises(ConfigError, match="belongs to run r1-a0"),
    ):
        flyte_ddp.run(go_on, checkpoints=str(tmp_path), run_id="r1-a0")


@pytest.mark.parametrize("door", ["run", "train", "command line"])
def test_each_door_passes_the_run_id_on_and_refuses_one_that_is_none(
    door, tmp_path, monkeypatch, capsys
):
    (tmp_path / "script.py").write_text("")

    def start(run_id):
        if door == "run":
            flyte_ddp.run(go_on, checkpoints=str(tmp_path), run_id=run_id)
        elif door == "train":
            flyte_ddp.train("digits", checkpoints=str(tmp_path), run_id=run_id)
        elif main(
            ["run", "--checkpoints", str(tmp_path), "--run-id", run_id, str(tmp_path / "script.py")]
        ):
            raise ConfigError(capsys.readouterr().err.removeprefix("error: ").rstrip())

    class Passed(Exception):
        pass

    def stand_in(job, *arguments, **options):
        raise Passed(job.run, job.checkpoints)

    monkeypatch.setattr(driver, "run", stand_in)
    with pytest.raises(Passed) as passed:
        start("nightly 7")
    assert passed.value.args == ("nightly 7", str(tmp_path))
    wrong = ["two\nlines", "x" * 300, *([5, None] if door != "command line" else [])]
    for each in wrong:
        with pytest.raises(
            ConfigError,
            match=(
                r"^run_id: expected one line of at most 256 "
                r"characters, got [^\n]*$"
            ),
        ):
            start(each)


@pytest.fixture
def recorded():
    """Signals that reach no run, in place of the end of this process."""
    found = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


def wait_for(stop):
    deadline = time.monotonic() + 60
    while not stop.is_set() and time.monotonic() < deadline:
        time.sleep(0.01)
    return stop.reason


def test_a_signal_reaches_runs_beside_a_main_thread_with_an_asyncio_loop(recorded, caplog):
    both_in, first_out = threading.Barrier(2), threading.Event()

    def stop_run(is_first):
        with signals.stop_on_signals() as stop:
            both_in.wait(60)
            if is_first:
                os.kill(os.getpid(), signal.SIGTERM)
            reason = wait_for(stop)
            both_in.wait(60)
            if is_first:
                return reason, 0
            assert first_out.wait(60)
            num_before = stop.num_requests
            os.kill(os.getpid(), signal.SIGTERM)  # the handlers stay until the last run has ended
            while stop.num_requests == num_before:
                time.sleep(0.01)
            return reason, stop.num_requests - num_before

    async def run_both():
        async def first():
            try:
                return await asyncio.to_thread(stop_run, True)
            finally:
                first_out.set()

        return await asyncio.gather(first(), asyncio.to_thread(stop_run, False))

    assert asyncio.run(run_both()) == [("SIGTERM", 0), ("SIGTERM", 1)]
    assert not recorded
    os.kill(os.getpid(), signal.SIGTERM)
    assert recorded == [signal.SIGTERM]  # the handler from before is back
    assert not caplog.messages


def test_a_run_that_no_signal_can_reach_says_so_in_one_line(recorded, caplog):
    def begin():
        with signals.stop_on_signals() as stop:
            stopped.append(stop.is_set())

    stopped = []
    for _ in range(2):
        thread = threading.Thread(target=begin)
        thread.start()
        thread.join(60)
    assert stopped == [False, False]
    assert len(caplog.messages) == 2
    assert caplog.messages[0] == (
        "SIGINT, SIGQUIT, SIGTERM: not noticed by this run, which began beside the main thread: "
        "it ends without a "
        "last checkpoint"
    )


def train_until_stopped(process):
    from flyte_ddp import session

    step = (session.load() or {"step": 0})["step"]
    while not session.stop_requested:
        step += 1
        session.report(step=step)
        if step == 3:
            os.kill(process, signal.SIGTERM)
        time.sleep(0.01)
    session.save({"step": step}, step)


@pytest.mark.long
def test_sigterm_to_a_task_beside_the_main_thread_costs_no_step(tmp_path, recorded):
    task = asyncio.to_thread(
        flyte_ddp.run, train_until_stopped, os.getpid(), checkpoints=str(tmp_path), run_id="a"
    )
    with pytest.raises(TrainingStopped, match="SIGTERM: the run was stopped at step"):
        asyncio.run(task)
    assert not recorded
    assert flyte_ddp.run(go_on, checkpoints=str(tmp_path)) >= 3
