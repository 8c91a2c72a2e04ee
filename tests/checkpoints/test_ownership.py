"""A run's place belongs to one run at a time: a second is refused, a successor takes over, a ghost
writes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flyte_ddp.checkpoints import ownership
from flyte_ddp.checkpoints.ownership import OWNER, Ownership, check_owner, read_owner
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.errors import ConfigError
from flyte_ddp.storage import Storage
from tests.support.dask_runs import eventually
from tests.support.emulators import abfs, gs, place_url, s3  # noqa: F401 - fixtures
from tests.support.runs import new_run

ELSEWHERE = {"machine": "another", "host": "other-host"}


@pytest.fixture(autouse=True)
def looks_often(monkeypatch):
    monkeypatch.setattr(ownership, "LOOK_INTERVAL", 0.05)


@pytest.fixture
def beats_often(monkeypatch):
    monkeypatch.setattr(ownership, "BEAT_INTERVAL", 0.05)


def owns(url, run=""):
    return Ownership(url, run, 600)


def change(url, **values):
    """Rewrite the owner of the place at `url`, such as to one on another machine."""
    storage = Storage(url)
    storage.write(OWNER, json.dumps({**json.loads(storage.read(OWNER)), **values}).encode())


def beat_elsewhere(url, monkeypatch):
    """Let the owner of the place at `url` seem to be on another machine, from where it sends
    heartbeats.
    """
    init = Ownership.__init__

    def start_elsewhere(owner, url, run, *others):
        init(owner, url, run, *others)
        if run == "f1-n0":
            owner._owner = dataclasses.replace(owner._owner, **ELSEWHERE)

    monkeypatch.setattr(Ownership, "__init__", start_elsewhere)


def test_a_second_run_is_refused_in_one_line_that_names_the_first(url, monkeypatch, beats_often):
    beat_elsewhere(url, monkeypatch)
    with owns(url, "f1-n0"):
        for run in ("f2-n0", ""):
            with pytest.raises(ConfigError) as caught, owns(url, run):
                pass
            message = str(caught.value)
            assert "\n" not in message
            assert message.startswith("checkpoints: expected a place of this run's own, got ")
            assert "belongs to run f1-n0 on other-host since 20" in message


def test_a_released_place_is_free_and_an_attempt_of_the_same_run_takes_it_over_at_once(
    url, monkeypatch
):
    beat_elsewhere(url, monkeypatch)
    with owns(url, "f0-n0"):
        pass
    storage = Storage(url)
    with owns(url, "f1-n0") as first:
        with owns(url, "f1-n0") as second:
            check_owner(storage, second.token)
            with pytest.raises(ConfigError, match="belongs to run f1-n0 on .* now"):
                check_owner(storage, first.token)
            first.__exit__(None, None, None)  # a ghost does not take its place back
            assert read_owner(storage)[1].token == second.token


def test_one_of_two_simultaneous_runs_gets_the_place(url):
    def start(number):
        with contextlib.suppress(ConfigError):
            return owns(url, f"run-{number}").__enter__()

    with ThreadPoolExecutor(4) as pool:
        taken = list(filter(None, pool.map(start, range(4))))
    for each in taken:
        each.__exit__(None, None, None)
    # the store in memory knows no condition for a put
    assert len(taken) == 1 or url.startswith("memory")


def test_heartbeats_survive_any_error(tmp_path, monkeypatch, beats_often):
    errors = [OSError(errno.ESTALE, "Stale file handle"), ValueError("the client's")]
    replace = Storage.replace

    def fail_at_first(storage, name, *contents):
        if threading.current_thread().name == "ownership" and errors:
            raise errors.pop(0)
        replace(storage, name, *contents)

    monkeypatch.setattr(Storage, "replace", fail_at_first)
    with owns(str(tmp_path)):
        before = beat_at(tmp_path)
        assert eventually(lambda: beat_at(tmp_path) != before)
    assert not errors


def beat_at(directory):
    return read_owner(Storage(str(directory)))[1].beat_at


def hold(url, ready):
    with owns(url):
        ready.set()
        time.sleep(600)


@pytest.mark.long
def test_a_local_run_whose_process_is_gone_is_over_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(str(tmp_path), ready))
    process.start()
    assert ready.wait(120)
    with (
        pytest.raises(ConfigError, match=f"belongs to process {process.pid} on .* since"),
        owns(str(tmp_path)),
    ):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    with owns(str(tmp_path)):
        assert read_owner(Storage(str(tmp_path)))[1].pid == os.getpid()


@pytest.mark.parametrize("seconds", [-90, 3 * 86400])
def test_a_living_run_keeps_its_place_when_the_clock_is_set(tmp_path, monkeypatch, seconds):
    now = time.time
    with owns(str(tmp_path), "f1-n0") as first:
        with monkeypatch.context() as patch:  # A process that starts now has this clock.
            patch.setattr(time, "time", lambda: now() + seconds)
            for run in ("", "f2-n0", "f1-n0"):
                with (
                    pytest.raises(ConfigError, match="belongs to run f1-n0"),
                    owns(str(tmp_path), run),
                ):
                    pass
        check_owner(Storage(str(tmp_path)), first.token)


@pytest.mark.parametrize("pid", [os.getpid(), 2**22 + 1], ids=["a number used again", "no process"])
def test_a_run_whose_process_number_means_another_process_is_over(tmp_path, pid):
    with owns(str(tmp_path)):
        change(str(tmp_path), pid=pid, process_start="1", token="another-0")
        with owns(str(tmp_path)) as second:
            check_owner(Storage(str(tmp_path)), second.token)


@pytest.mark.parametrize("behind", [-10_000, 10_000])
def test_a_lease_ends_by_the_clock_of_who_waits_and_not_while_a_heartbeat_comes(
    tmp_path, monkeypatch, caplog, behind
):
    url, storage, looks = str(tmp_path), Storage(str(tmp_path)), []
    with owns(url, "f1-n0"):
        pass
    change(url, **ELSEWHERE, released=False, beat_at=time.time() - behind)

    def beat_meanwhile(seconds):
        looks.append(seconds)
        change(url, beat_at=time.time() - behind + len(looks))

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", beat_meanwhile)
        with (
            pytest.raises(ConfigError, match="belongs to run f1-n0 on other-host"),
            owns(url, "f2-n0"),
        ):
            pass
    assert len(looks) == 1
    change(url, lease=1.0)
    begun = time.monotonic()
    with owns(url, "f2-n0") as second:
        assert time.monotonic() - begun > 1.0
        check_owner(storage, second.token)
    line = caplog.messages[-1]
    assert "belongs to run f1-n0 on other-host since " in line
    assert line.endswith(
        f"; waiting up to 1 s for a heartbeat of it. If it is over, delete {url}/owner.json"
    )


def test_a_damaged_token_does_not_lock_the_place(tmp_path, beats_often):
    (tmp_path / OWNER).write_text("half a li")
    with owns(str(tmp_path)) as owner:
        check_owner(Storage(str(tmp_path)), owner.token)
        (tmp_path / OWNER).unlink()  # The error advises a user to do this by hand.
        check_owner(Storage(str(tmp_path)), owner.token)
        assert eventually((tmp_path / OWNER).exists)
        check_owner(Storage(str(tmp_path)), owner.token)


def test_a_replaced_owner_writes_deletes_and_renames_nothing(tmp_path):
    with owns(str(tmp_path), "f1-n0") as first:
        store = CheckpointStore(str(tmp_path), 1, owner=first.token)
        store.save({"step": 2}, 2, best=False)
        store.wait()
        change(str(tmp_path), token="another", run="f2-n0")
        (tmp_path / "step-0000000002.json").write_text("damaged")
        before = sorted(tmp_path.iterdir())
        store.save({"step": 3}, 3, best=False)
        expected = "belongs to run f2-n0 .* now, so this process writes nothing more there"
        for act in (store.wait, CheckpointStore(str(tmp_path), 1, owner=first.token).load_latest):
            with pytest.raises(ConfigError, match=expected):
                act()
        assert sorted(tmp_path.iterdir()) == before


@pytest.mark.long
def test_a_run_owns_its_place_and_a_second_one_starts_no_process(tmp_path):
    run = new_run(tmp_path)
    with owns(str(run.checkpoints), "f1-n0"):
        with pytest.raises(ConfigError, match="belongs to run f1-n0"):
            run.train(1, data=lambda: pytest.fail("data were prepared"))
    run.train(1, epochs=1)
    assert read_owner(Storage(str(run.checkpoints)))[1].released


def test_the_end_of_a_run_does_not_wait_for_a_store_that_hangs(tmp_path, monkeypatch):
    answers, answered = threading.Event(), []
    monkeypatch.setattr(ownership, "ANSWER_TIMEOUT", 0.2)
    with owns(str(tmp_path)):
        monkeypatch.setattr(Storage, "replace", lambda *_: answered.append(answers.wait(60)))
    assert answered == []
    answers.set()
