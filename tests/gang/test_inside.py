"""People look into a run of two nodes while it goes on, and while it hangs."""

from __future__ import annotations

import gzip
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import flyte_ddp
from flyte_ddp.__main__ import main
from flyte_ddp.launch.inside import open_run
from tests.support.steps import take_steps


@pytest.fixture
def call(capsys):
    """call(command, ...) returns the exit status, and the lines of output and of errors."""

    def call(*arguments):
        status = main([*map(str, arguments)])
        out, error = capsys.readouterr()
        return status, out.splitlines(), error.splitlines()

    return call


def wait_for(is_reached):
    while not is_reached():
        time.sleep(0.05)


@pytest.mark.long
def test_a_run_of_two_nodes_is_profiled_and_its_hang_is_shown(client, tmp_path, call):
    place = tmp_path / "run"
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(
            flyte_ddp.run, take_steps, str(tmp_path), nnodes=2, client=client,
            checkpoints=str(place), progress=False,
        )  # fmt: skip
        try:
            wait_for(lambda: (tmp_path / "steps").exists() or run.done())
            wait_for(lambda: (place / "status.json").exists() or run.done())
            wait_for(lambda: open_run(str(place))[1].phase == "running" or run.done())
            status, lines, _ = call("status", place)
            assert (status, lines[0].partition(", written")[0]) == (
                0,
                "take_steps: running, 2 ranks",
            )

            status, lines, errors = call("profile", place, "--rank", "1", "--steps", "3")
            assert status == 0, errors
            stacks, trace = lines
            assert trace.endswith("trace-rank-1.json.gz")
            with gzip.open(trace) as file:
                names = [each.get("name") for each in json.load(file)["traceEvents"]]
            assert {"ProfilerStep#0", "ProfilerStep#2"} <= {*names}
            assert "ProfilerStep#3" not in names
            assert "Optimizer.step#SGD.step" in names
            assert "in take_steps" in Path(stacks).read_text()
            assert not (place / "request.json").exists()
            status, _, errors = call("profile", place, "--rank", "2")
            assert (status, errors) == (1, ["error: profile: --rank: expected 0 to 1, got 2"])

            (tmp_path / "hang").touch()
            wait_for((tmp_path / "hangs").exists)
            _, lines, _ = call("stacks", place)
            assert lines[0].startswith("at this moment rank 1 on node 1 ")
            assert "did not arrive at all_reduce of float [1], where rank 0 waits" in lines[0]
            # A stack of now, and not of the profile before.
            assert any("[rank 1]" in line and "in hang" in line for line in lines)
            (tmp_path / "hang").unlink()
        finally:
            (tmp_path / "hang").unlink(missing_ok=True)
            (tmp_path / "end").touch()
    num_steps, weight, left = run.result()
    assert weight == -2.0 * num_steps  # no step of either rank is lost
    assert left == []
    status, lines, _ = call("status", place)
    assert (status, lines[0].partition(", 2 ranks")[0]) == (0, "take_steps: finished")
    status, _, errors = call("profile", place)
    assert status == 2
    assert len(errors) == 1
    assert "RUN: expected a run that goes on, got take_steps: finished" in errors[0]
