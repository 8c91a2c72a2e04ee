"""What the place of a run reports while workers are missing, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.events import NodesAwaited
from flyte_ddp.launch.nodes.dask import place as places
from flyte_ddp.launch.nodes.dask.place import LINE_INTERVAL, DaskPlace


@pytest.mark.parametrize("kind", ["kubernetes", "existing"])
def test_a_wait_for_pods_is_reported_once_for_each_reason(kind, monkeypatch):
    emitted, reasons = [], iter(["no quota", "no quota", "", "no node"])
    monkeypatch.setattr(places, "explain", lambda *_: next(reasons))
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(places, "time", SimpleNamespace(monotonic=lambda: clock.now))
    place = SimpleNamespace(
        config=SimpleNamespace(resolved_kind=kind), run_name="run", _explain_at=0.0, _reason=""
    )
    run = SimpleNamespace(emit=emitted.append)

    DaskPlace._report_wait(place, run, LINE_INTERVAL)  # too early
    for _ in range(4):
        clock.now += LINE_INTERVAL
        DaskPlace._report_wait(place, run, LINE_INTERVAL + 1)
        DaskPlace._report_wait(place, run, LINE_INTERVAL + 1)  # too soon after the last look

    expected = [NodesAwaited("no quota"), NodesAwaited("no node")]
    assert emitted == (expected if kind == "kubernetes" else [])


@pytest.mark.parametrize("answer", ["1", "2"])
def test_another_scheduler_knows_of_no_worker_that_is_held(answer, monkeypatch):
    class Client:
        """A client that notes which tasks it was asked for."""

        scheduler, security, status = SimpleNamespace(address="there"), None, "running"

        def __init__(self):
            self.keys = []

        def map(self, function, *arguments, key, **options):
            self.keys += key
            return [SimpleNamespace(done=lambda: False, release=lambda: None) for _ in key]

        def close(self, timeout):
            pass

    first, second = Client(), Client()
    monkeypatch.setattr(places, "scheduler_id", lambda client: answer)
    monkeypatch.setattr(places, "connect", lambda *_: second)
    place = DaskPlace(first, ClusterConfig(kind="existing", scheduler_address="there"))
    place._latest = SimpleNamespace(scheduler_id="1")
    place._holds.begin(first, "run", "run-0", ["a", "b"])
    assert place._is_connected()
    place._holds.begin(place.client, "run", "run-1", ["a", "b", "c"])
    new = ["run-1-hold-0"]
    if answer == "2":
        new += ["run-1-hold-1", "run-1-hold-2"]
    assert first.keys == ["run-0-hold-0", "run-0-hold-1", *(new if answer == "1" else [])]
    assert second.keys == (new if answer == "2" else [])
