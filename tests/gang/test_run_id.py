"""A run that its caller names, for retries elsewhere; and signals to a run that is started beside
the main thread.
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading

import pytest

import flyte_ddp
from flyte_ddp.__main__ import main
from flyte_ddp.checkpoints.ownership import OWNER, Ownership, check_owner, read_owner
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.protocol import signals
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


def start(door, place, run_id):
    if door == "run":
        flyte_ddp.run(go_on, checkpoints=place, run_id=run_id)
    elif door == "flyte_ddp.train":
        flyte_ddp.train("digits", checkpoints=place, run_id=run_id)
    else:
        command, target = door.split()
        main([command, "--checkpoints", place, "--run-id", run_id, target])


@pytest.mark.parametrize("door", ["run", "flyte_ddp.train", f"run {__file__}", "train digits"])
def test_each_door_passes_the_run_id_on(door, tmp_path, monkeypatch):
    passed = []

    def stand_in(job, *arguments, **options):
        passed.append((job.run, job.checkpoints))
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "run", stand_in)
    with contextlib.suppress(KeyboardInterrupt):
        start(door, str(tmp_path), "nightly 7")
    assert passed == [("nightly 7", str(tmp_path))]


@pytest.mark.parametrize("door", ["run", "flyte_ddp.train"])
@pytest.mark.parametrize("wrong", ["two\nlines", "x" * 300, 5, None])
def test_a_run_id_is_one_line(door, wrong, tmp_path):
    expected = r"^run_id: expected one line of at most 256 characters, got [^\n]*$"
    with pytest.raises(ConfigError, match=expected):
        start(door, str(tmp_path), wrong)


def test_another_reason_to_stop_changes_neither_the_urgency_nor_an_earlier_deadline():
    stop = signals.StopRequest(grace=60.0)
    stop.revise("the gang grows", 90.0)
    stop.revise("a node leaves", 30.0)
    deadline = stop.deadline
    stop.revise("the gang grows again", 90.0)
    assert (stop.is_set(), stop.is_urgent) == (True, False)
    assert (stop.reason, stop.deadline) == ("the gang grows again", deadline)
    stop.set("the driver ended the attempt")
    assert stop.is_urgent
    stop.revise("a node leaves", 30.0)
    assert stop.is_urgent


@pytest.fixture
def recorded():
    """Signals that reach no run, in place of the end of this process."""
    found = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: found.append(number))
    yield found
    signal.signal(signal.SIGTERM, before)


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
    hangup = "SIGHUP, "
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup starts processes so
        hangup = ""
    assert caplog.messages[0] == (
        f"this run does not notice {hangup}SIGINT, SIGQUIT, SIGTERM, because it was not started "
        "in the main thread: if such a signal ends the process, there is no final checkpoint"
    )
