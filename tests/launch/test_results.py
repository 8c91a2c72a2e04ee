"""Files that ranks submit: which are taken, how they reach the caller of the run, and what happens
where they cannot.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import signal
import threading
import time

import pytest

import flyte_ddp
from flyte_ddp import __main__ as command_line
from flyte_ddp import session
from flyte_ddp.errors import ConfigError, RankFailure, TrainingStopped
from flyte_ddp.events import AttemptEnded, RankReported
from flyte_ddp.launch import run as launch_run
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.control.results import Results
from flyte_ddp.launch.protocol.messages import End, Outcome, Submitted
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.process import temporary_directories
from flyte_ddp.process.temporary_directories import take_files
from flyte_ddp.rank import reporter
from tests.support.gang import session_of


def session_with(directory):
    """Return a rank's session. Its files are written to `directory` on their way to the driver."""
    made, link = session_of()
    made.process.node = dataclasses.replace(made.process.node, results=str(directory))
    return made, link


@pytest.mark.parametrize("path", ["", ".", "/", "/a", "//a", "..", "../a", "a/../../b", "a\nb", 1])
def test_a_path_that_leaves_the_directory_or_is_none_is_refused(path, tmp_path):
    expected = r"^session\.submit_result: path: expected that of a file below [^\n]*$"
    with pytest.raises(ConfigError, match=expected):
        session_with(tmp_path)[0].files.submit(path, "data")


@pytest.mark.parametrize("data", [1, None, bytearray(1), bytes((64 << 20) + 1), "é" * (33 << 20)])
def test_data_that_are_too_large_or_no_bytes_are_refused(data, tmp_path):
    expected = "data: expected str or bytes, at most 64 MiB, got "
    with pytest.raises(ConfigError, match=expected + type(data).__name__):
        session_with(tmp_path)[0].files.submit("a", data)
    assert not list(tmp_path.iterdir())


def test_a_rank_waits_while_its_files_are_not_taken_away(tmp_path, monkeypatch):
    most = []

    def take_one(seconds):
        found = sorted(tmp_path.iterdir())
        most.append((len(found), sum(each.stat().st_size for each in found)))
        found[0].unlink()

    monkeypatch.setattr(time, "sleep", take_one)
    monkeypatch.setattr(reporter, "MAX_SUBMITTED", 18)
    monkeypatch.setattr(reporter, "FILE_COST", 6)
    made, _ = session_with(tmp_path)
    for data in ("", "", "", "", "123456789012", "123"):
        made.files.submit("a", data)
    assert [max(each) for each in zip(*most, strict=True)] == [3, 12]
    assert [each.read_text() for each in tmp_path.iterdir()] == ["123"]


def submit(place):
    """Send files from both ranks; a killed one sends one of them again, in its next attempt."""
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    session.report(1, **{f"loss_{rank}": 0.5})
    for name in (f"rank-{rank}/{attempt}", f"./rank-{rank}//last", "both"):
        session.submit_result(name, f"{place} {attempt} ü".encode())
    if (rank, attempt) == ("1", "0"):
        os.kill(os.getpid(), signal.SIGKILL)
    if attempt == "0":
        time.sleep(60)
    return attempt


class Seen(list):
    def handle(self, event):
        self.append(event)

    def close(self, error):
        pass


def files_below(directory):
    return {
        str(file.relative_to(directory)): file.read_text()
        for file in directory.rglob("*")
        if file.is_file()
    }


def test_what_ranks_sent_is_there_when_the_run_returns_and_the_newest_attempts_wins(
    tmp_path, forked_functions
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out/both").write_text("of an earlier run")
    seen = Seen()
    options = {"nproc_per_node": 2, "max_restarts": 1, "progress": False}
    value = flyte_ddp.run(submit, "to", results=tmp_path / "out", listeners=[seen], **options)
    assert value == "1"
    expected = {
        f"rank-{rank}/{attempt}": f"to {attempt} ü" for rank in (0, 1) for attempt in (0, 1)
    }
    expected |= dict.fromkeys(("rank-0/last", "rank-1/last", "both"), "to 1 ü")
    assert files_below(tmp_path / "out") == {
        name: data
        for name, data in expected.items()
        # Without this file the rank was killed before.
        if name != "rank-0/0" or (tmp_path / "out/rank-0/0").exists()
    }
    reported = [event for event in seen if isinstance(event, RankReported)]
    assert (reported[-1].rank, reported[-1].reports[-1].values) == (1, {"loss_1": 0.5})


def fail_on_rank_1():
    session.submit_result(f"rank-{os.environ['RANK']}", "data")
    if os.environ["RANK"] == "1":
        raise ValueError("no luck")
    time.sleep(60)


def test_a_failure_is_in_the_result_where_errors_are_not_raised(monkeypatch, forked_functions):
    has_ended, given, seen = threading.Event(), {}, Seen()

    def handle(path, data):  # a slow one: all is passed on after the end of the ranks
        assert has_ended.wait(60)
        time.sleep(1)
        given[path] = data

    monkeypatch.setattr(
        seen, "handle", lambda event: has_ended.set() if isinstance(event, AttemptEnded) else None
    )
    options = {"nproc_per_node": 2, "progress": False, "results": handle, "listeners": [seen]}
    result = flyte_ddp.run(fail_on_rank_1, raise_errors=False, **options)
    assert (result.value, type(result.error)) == (None, RankFailure)
    assert "ValueError: no luck" in str(result.error)
    assert given["rank-1"] == b"data"


def send_and_return(value):
    session.submit_result("a", "data")
    return value


def test_a_value_is_in_the_result_beside_a_file_that_was_refused(monkeypatch, forked_functions):
    options = {"progress": False, "results": lambda path, data: 1 / 0, "raise_errors": False}
    result = flyte_ddp.run(send_and_return, 5, **options)
    assert result.value == 5
    assert str(result.error).startswith("results: expected a place or a function that takes 'a'")

    def stop(*arguments):
        raise TrainingStopped("SIGINT: stopped")

    monkeypatch.setattr(launch_run, "run_job", stop)
    with pytest.raises(TrainingStopped):
        flyte_ddp.run(send_and_return, 5, **options)


class FilesOfNodes(Nodes):
    """Nodes that send two files at a time. The second node is gone."""

    def __init__(self):
        self.calls = []

    def take_results(self, node, names):
        self.calls.append((node.index, list(names)))
        return [name.encode() for name in names[:2]] if node.outcome is None else 1 / 0


def take(handle):
    """Let `handle` get three files of each of two nodes; return the calls of the nodes."""
    nodes, results = FilesOfNodes(), Results(handle)
    found = [Node(0), Node(1, "node 1", end=End(Outcome.FAILED))]
    for number in range(3):
        for node in found:
            results.put(nodes, node, Submitted(f"{node.index}{number}", "a"))
    results.close(StopRequest())
    results.check()
    return nodes.calls


def test_files_are_passed_on_in_their_order_and_those_of_a_lost_node_are_left_out(caplog):
    given = []
    calls = take(lambda path, data: given.append((path, data)))
    assert given == [("a", b"00"), ("a", b"01"), ("a", b"02")]
    lost = [each for each in caplog.messages if each.endswith("with node 1")]
    assert sum(int(each.split()[1]) for each in lost) == 3
    assert {index for index, _ in calls} == {0, 1}


def test_the_first_file_that_is_refused_is_one_line_and_no_other_is_passed_on(caplog):
    given = []

    def refuse(path, data):
        given.append(data)
        raise OSError(28, "No space left on device")

    refused = (
        "results: expected a place or a function that takes 'a', got OSError: [Errno 28] No space "
        "left on device"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(refused)}$"):
        take(refuse)
    assert given == [b"00"]
    lines = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert lines == [f"no more results are kept, while the run goes on: {refused}"]


def test_a_second_request_to_stop_does_not_wait_for_what_is_on_its_way():
    is_over, results, stop = (
        threading.Event(),
        Results(lambda path, data: is_over.wait(60)),
        StopRequest(),
    )
    results.put(FilesOfNodes(), Node(), Submitted("0", "a"))
    for _ in range(2):
        stop.set("SIGINT")
    results.close(stop)
    with pytest.raises(TrainingStopped, match="^SIGINT: the run was stopped while its results"):
        results.check()
    is_over.set()


def test_files_are_taken_in_portions(tmp_path, monkeypatch):
    monkeypatch.setattr(temporary_directories, "MAX_TAKEN", 4)
    for name, size in (("a", 9), ("b", 3), ("c", 2), ("d", 1)):
        (tmp_path / name).write_bytes(bytes(size))
    names, portions = ["a", "b", "gone", "c", "d"], []
    while names:
        portions.append(take_files(str(tmp_path), names))
        names = names[len(portions[-1]) :]
    assert portions == [[bytes(9)], [bytes(3), None, bytes(2)], [bytes(1)]]
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_started(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"^results: expected a place that this process may [^\n]*$"
    ):
        Results(tmp_path / "file/below")


def test_each_door_passes_the_place_on(tmp_path, monkeypatch):
    passed = []

    def stand_in(*arguments, results, **options):
        passed.append(results)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "run", stand_in)
    assert command_line.main(["run", "--results", str(tmp_path), __file__]) == 130
    with pytest.raises(KeyboardInterrupt):
        flyte_ddp.run(submit, "to", results=print)
    assert passed == [str(tmp_path), print]
