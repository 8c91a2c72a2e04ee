"""What a real run with a killed rank tells the collector of spans, against its own report."""

from __future__ import annotations

import hashlib
import socket

import pytest

from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.traces import ENDPOINT_VARIABLE
from tests.support.collector import attributes, open_collector
from tests.support.runs_that_lose_ranks import train


@pytest.mark.long
def test_the_spans_of_a_run_with_a_killed_rank_add_up_to_its_report(tmp_path, monkeypatch):
    report = Report()
    with open_collector() as collector:
        monkeypatch.setenv(ENDPOINT_VARIABLE, collector.url)
        place = LocalPlace(2, max_restarts=1)
        run, _ = train(
            tmp_path, place, "backward-0-5", listeners=[report], epochs=2, memory_interval=0
        )
    spent = run.result.time_spent()
    assert report._state.time_spent() == spent
    assert spent.redone_steps > 0
    (redone,) = collector.find("redone_steps")
    within = pytest.approx
    for name, seconds in spent.parts().items():
        lost = attributes(redone).get(f"flyte_ddp.lost_{name}", 0.0)
        assert collector.seconds(name) - lost == within(seconds, rel=0.01, abs=1e-4), name
    # Another driver that continues this run has the same trace.
    place = f"{socket.gethostname()}:{tmp_path / 'checkpoints'}"
    trace = hashlib.sha256(place.encode()).digest()[:16]
    assert {span.trace_id for span in collector.spans} == {trace}
    assert collector.seconds("run") == within(spent.wall, rel=0.01)
    killed, finished = collector.find("attempt")
    assert "killed" in killed.status.message
    assert [each.status.code for each in (killed, finished)] == [2, 0]
    assert [attributes(each)["flyte_ddp.epoch"] for each in collector.find("epoch")][-1] == 2
