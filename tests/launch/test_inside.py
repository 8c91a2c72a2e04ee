"""Looking into a run through its store: what the files say, who may ask, and who answers."""

from __future__ import annotations

import json
import re
import threading
import time
from types import SimpleNamespace

import pytest

from flyte_ddp import events
from flyte_ddp.__main__ import main
from flyte_ddp.errors import NoAnswer, StorageDenied, TrainingStopped
from flyte_ddp.launch import inside as asking
from flyte_ddp.launch.control import inside
from flyte_ddp.launch.control.inside import Inside, describe_end, find_phase, show_waits
from flyte_ddp.launch.control.inspection import Inspection
from flyte_ddp.launch.control.states import Ended, Killing, Running, Stopping, Why
from flyte_ddp.launch.protocol.messages import (
    Beat,
    Inspect,
    Inspected,
    InspectedRank,
    Profile,
    Profiled,
)
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.requests import (
    REQUEST,
    STATUS,
    Request,
    RunStatus,
    read_json,
    to_json,
)
from flyte_ddp.storage import Storage

NAME = "20261129-031500-0a1b2c3d"
STOPPING = Stopping(Why.NODES_LEAVE, "worker-1 leaves", 0.0)
PROGRAM = Program("digits", b"")


def attempt(state=None, step=0):
    """What a driver shows of an attempt with three ranks on a node."""
    node = SimpleNamespace(index=0, label="", outcome=None, beat=Beat())
    nodes = SimpleNamespace(world_size=3, nodes=[node], sent=[])
    nodes.send = nodes.sent.append
    return SimpleNamespace(
        state=state or Running(),
        step=step,
        nodes=nodes,
        inspection=Inspection(nodes, relay=lambda line: None),
    )


def watch(directory, monkeypatch, attempt=None, state=None):
    """The part of a driver, without its thread."""
    monkeypatch.setattr(inside, "start_thread", lambda *_: None)
    run = SimpleNamespace(job=Job(PROGRAM, str(directory)), attempt=attempt)
    return Inside(run, state or events.RunState())


@pytest.mark.parametrize(
    ("attempt", "awaited", "phase"),
    [
        (None, "", ("waiting", "its nodes")),
        (None, "1 of 2 workers", ("waiting", "1 of 2 workers")),
        (attempt(), "", ("running", "")),
        (attempt(step=3), "", ("training", "")),
        (attempt(STOPPING, 3), "", ("saving", "worker-1 leaves")),
        (attempt(Killing(0.0), 3), "", ("restarting", "")),
        (attempt(Ended((None,)), 3), "0 of 2 workers", ("waiting", "0 of 2 workers")),
    ],
)
def test_the_phase_of_a_run(attempt, awaited, phase):
    state = events.RunState(awaited=events.NodesAwaited(awaited) if awaited else None)
    assert find_phase(attempt, state) == phase


def test_the_phase_shows_why_the_ranks_have_ended_before():
    state = events.RunState.of([events.AttemptEnded(3, "rank 2 was killed", 0.0, 0)])
    why = "after the ranks ended: rank 2 was killed"
    assert find_phase(attempt(Ended((None,))), state) == ("restarting", why)
    assert find_phase(attempt(step=4), state) == ("training", why)


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, ("finished", "")),
        (TrainingStopped("SIGTERM: at step 3", "SIGTERM"), ("stopped", "SIGTERM: at step 3")),
        (ValueError("one\ntwo"), ("failed", "one")),
        (KeyboardInterrupt(), ("failed", "KeyboardInterrupt")),
    ],
)
def test_the_end_of_a_run(error, end):
    assert describe_end(error) == end


# Reading a status


def write_status(directory, **values):
    known = {"name": "digits", "phase": "training", "written_at": time.time()}
    Storage(str(directory)).write(STATUS, to_json(RunStatus(**{**known, **values})))


def test_a_status_for_people_and_as_json(tmp_path, capsys):
    write_status(
        tmp_path, reason="after the ranks ended: rank 1 was killed by SIGKILL", step=1234,
        num_steps=5000, steps_per_second=40.0, world_size=4,
    )  # fmt: skip
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(
        "digits: training (after the ranks ended: rank 1 was killed by SIGKILL), step 1,234 of "
        "5,000, 40 steps/s, 4 ranks, written "
    )
    assert main(["status", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["phase"]) == (1234, "training")


def test_a_driver_that_no_longer_writes_is_silent(tmp_path, capsys):
    write_status(tmp_path, written_at=time.time() - 100)
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("digits: silent, before that training, written 1 min")
    write_status(tmp_path, phase="failed", written_at=1.0)
    assert main(["status", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("digits: failed")


@pytest.mark.parametrize("contents", ["", '{"name": "a", "new": 1}', "half a li"])
def test_a_place_without_a_readable_status_is_one_line(tmp_path, capsys, contents):
    if contents:
        (tmp_path / STATUS).write_text(contents)
    for command in ("status", "profile", "stacks"):
        assert main([command, str(tmp_path)]) == 2
        line = capsys.readouterr().err
        assert re.fullmatch(
            "error: RUN: expected .*, without a status.json of this version\n", line
        )


# Asking


@pytest.mark.parametrize(
    ("changes", "options", "text"),
    [
        ({"phase": "finished"}, [], "expected a run that goes on, got digits: finished"),
        ({"phase": "waiting"}, [], "expected a run that goes on, got digits: waiting"),
        ({"written_at": 1.0}, [], "expected a run that goes on, got digits: silent"),
        ({}, ["--steps", "0"], "--steps: expected a whole number of at least 1 .*, got 0"),
        ({}, ["--steps", "101"], "--steps: expected .* at most 100, got 101"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line(tmp_path, capsys, changes, options, text):
    write_status(tmp_path, **changes)
    assert main(["profile", str(tmp_path), *options]) == 2
    assert re.fullmatch(f"error: .*{text}.*\n", capsys.readouterr().err)
    assert not (tmp_path / REQUEST).exists()


def test_only_one_asks_at_a_time(tmp_path, capsys):
    write_status(tmp_path)
    (tmp_path / REQUEST).write_bytes(to_json(Request("stacks", NAME)))
    assert main(["stacks", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert re.fullmatch(
        "error: RUN: expected no other request: wait .*, or delete .*/request.json\n", line
    )
    assert (tmp_path / REQUEST).exists()


def test_a_driver_that_does_not_answer_is_one_line(tmp_path, monkeypatch, capsys):
    write_status(tmp_path)
    monkeypatch.setattr(asking, "ANSWER_LIMIT", 0.0)
    assert main(["stacks", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "error: the run has not answered within 0 s\n"
    assert not (tmp_path / REQUEST).exists()


def test_a_place_that_refuses_writes_is_one_line(tmp_path, monkeypatch):
    write_status(tmp_path)

    def refuse(storage, *_):
        raise StorageDenied("RUN: expected a place that this process may use")

    monkeypatch.setattr(Storage, "write", refuse)
    with pytest.raises(StorageDenied, match="^RUN: expected a place"):
        asking.ask(str(tmp_path), "stacks")


@pytest.mark.parametrize(
    "changes", [{"action": "exec"}, {"id": "../../etc"}, {"id": 3}, {"num_steps": "import os"}]
)
def test_a_request_is_checked_where_it_is_read(changes):
    known = {"action": "stacks", "id": NAME}
    assert read_json(Request, json.dumps(known).encode()) == Request(**known)
    assert read_json(Request, json.dumps({**known, **changes}).encode()) is None


# Answering


def put(directory, *fields):
    Storage(str(directory)).write(REQUEST, to_json(Request(*fields)))


def read(directory):
    return read_json(Request, (directory / REQUEST).read_bytes())


def test_ranks_show_their_stacks_and_then_one_is_profiled(tmp_path, monkeypatch):
    current = attempt()
    watched = watch(tmp_path, monkeypatch, current)
    put(tmp_path, "profile", NAME, 1, 3)
    watched._serve_request()
    inspection, sent = current.inspection, current.nodes.sent
    for _ in range(2):  # asks once
        assert inspection.look(PROGRAM) is None
        watched._serve_request()
    assert sent == [Inspect(1)]
    ranks = [InspectedRank(number, 3, 1.0, stacks=f"  File {number}") for number in range(3)]
    inspection.take(current.nodes.nodes[0], Inspected(1, ranks))
    assert inspection.look(PROGRAM) is None
    profile = Profile(NAME, 1, 3, f"{tmp_path}/profiles/{NAME}")
    assert sent == [Inspect(1), profile]
    inspection.take_profile(Profiled("an earlier one", problem="too late"))
    watched._serve_request()
    assert not read(tmp_path).is_done
    inspection.take_profile(Profiled(NAME, ["trace.gz"], "RuntimeError: no profiler"))
    watched._serve_request()
    answer = read(tmp_path)
    assert (answer.is_done, answer.files) == (True, ["stacks.txt", "trace.gz"])
    assert answer.problem == "RuntimeError: no profiler"
    stacks = (tmp_path / "profiles" / NAME / "stacks.txt").read_text()
    assert "[rank 2] --- rank 2, at step 3, last progress 1 s ago\n[rank 2]   File 2\n" in stacks
    # An answered request stays for its asker, and the next attempt does not begin with it.
    watched.run.attempt = attempt()
    watched._serve_request()
    assert watched.run.attempt.inspection.order is None
    assert read(tmp_path) == answer


def test_stacks_alone_send_no_profile(tmp_path, monkeypatch):
    current = attempt()
    watched = watch(tmp_path, monkeypatch, current)
    put(tmp_path, "stacks", NAME)
    watched._serve_request()
    current.inspection.look(PROGRAM)
    current.inspection.take(current.nodes.nodes[0], Inspected(1, []))
    for _ in range(2):  # takes the answers, and asks no more
        current.inspection.look(PROGRAM)
    watched._serve_request()
    assert read(tmp_path).files == ["stacks.txt"]
    assert current.nodes.sent == [Inspect(1)]


@pytest.mark.parametrize(
    ("attempt", "rank", "problem"),
    [
        (None, 0, "no rank runs now"),
        (attempt(Ended((None,))), 0, "no rank runs now"),
        (attempt(), 3, "--rank: expected 0 to 2, got 3"),
        (attempt(), -1, "--rank: expected 0 to 2, got -1"),
    ],
)
def test_why_a_run_does_not_do_what_was_asked(tmp_path, monkeypatch, attempt, rank, problem):
    put(tmp_path, "profile", NAME, rank)
    watch(tmp_path, monkeypatch, attempt)._serve_request()
    assert read(tmp_path).is_done
    assert read(tmp_path).problem.startswith(problem)


def test_what_went_wrong_is_an_error_of_the_command(tmp_path, monkeypatch):
    write_status(tmp_path)
    done = Request("profile", NAME, is_done=True, problem="no profiler")
    monkeypatch.setattr(asking, "wait_for_answer", lambda *_: done)
    with pytest.raises(NoAnswer, match="^profile: no profiler$"):
        asking.ask(str(tmp_path), "profile")


def test_a_status_is_written_for_a_new_phase_and_at_intervals(tmp_path, monkeypatch):
    current = attempt(step=1)
    watched = watch(tmp_path, monkeypatch, current)
    clock = SimpleNamespace(time=lambda: clock.now, now=1000.0)
    monkeypatch.setattr(inside, "time", clock)
    written = []
    monkeypatch.setattr(Storage, "write", lambda storage, name, contents: written.append(contents))
    changes = [
        (0, 1, Running()),
        (2, 5, Running()),  # a step alone waits for its time
        (10, 41, Running()),
        (2, 45, STOPPING),
        (2, 45, STOPPING),
    ]
    for seconds, current.step, current.state in changes:
        clock.now += seconds
        watched._write_status(False)
    watched._error = ValueError("an error")
    watched._write_status(True)
    found = [json.loads(each) for each in written]
    assert [(each["phase"], each["step"]) for each in found] == [
        ("training", 1),
        ("training", 41),
        ("saving", 45),
        ("failed", 45),
    ]
    assert found[1]["steps_per_second"] == 40 / 12


def test_a_store_that_is_away_does_not_end_the_thread(tmp_path, monkeypatch):
    has_failed = threading.Event()

    def fail(storage, name, contents):
        has_failed.set()
        raise OSError("away")

    monkeypatch.setattr(inside, "LOOK_INTERVAL", 0.01)
    run = SimpleNamespace(job=Job(PROGRAM, str(tmp_path)), attempt=attempt())
    put(tmp_path, "stacks", NAME)
    with monkeypatch.context() as patches:
        patches.setattr(Storage, "write", fail)
        watched = Inside(run, events.RunState())
        assert has_failed.wait(10)
    watched.close(None, None, None)
    assert asking.open_run(str(tmp_path))[1].phase == "finished"
    # The request was for an earlier driver.
    assert not (tmp_path / REQUEST).exists()


def test_a_run_that_waits_for_its_cluster_shows_it(tmp_path):
    heard = []
    show_waits(Job(PROGRAM, str(tmp_path)), heard.append)("1 of 2 pods")
    status = asking.open_run(str(tmp_path))[1]
    assert (status.phase, status.reason, heard) == ("waiting", "1 of 2 pods", ["1 of 2 pods"])
    assert show_waits(Job(PROGRAM), print) is print
