"""What the place of a run reports while workers are missing, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

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
