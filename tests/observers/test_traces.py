"""The spans of a run, as a real collector on this machine receives them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from flyte_ddp.errors import RankFailure
from flyte_ddp.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointSaved,
    CheckpointWritten,
    Event,
    RunState,
)
from flyte_ddp.observers.traces import ENDPOINT_VARIABLE, PARENT_VARIABLE, Traces, make_traces
from tests.support.collector import Collector, attributes, open_collector
from tests.support.short_run import (
    epoch_finished,
    feed,
    loaded,
    replay,
    reported,
    run_finished,
    started,
)

LAUNCH = 1000.0
WORK = ("stepping", "evaluating", "checkpoint_stalls", "program")
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with open_collector() as server:
        monkeypatch.setenv(ENDPOINT_VARIABLE, server.url)
        monkeypatch.delenv(PARENT_VARIABLE, raising=False)
        yield server


def timed(*events: Event, begin: float = LAUNCH + 1) -> list[Event]:
    """Return the events with a second between them."""
    clock = itertools.count(begin)
    return [replace(event, at=next(clock)) for event in events]


def saved(step: int, url: str = "/c") -> list[Event]:
    return [CheckpointSaved(step, url, False, 0.25), CheckpointWritten(step, url, False)]


def restarted_run(reason: str = "rank 1 was killed by SIGKILL", url: str = "/c") -> list[Event]:
    """Return the events of a run that loses steps 5 and 6 with a rank."""
    return timed(
        AttemptStarted(2, LAUNCH, 0.5),
        started(),
        loaded(),
        *map(reported, (1, 2, 3, 4)),
        epoch_finished(1),
        *saved(4, url),
        reported(5),
        reported(6),
        AttemptEnded(6, reason, 0.75),
        AttemptStarted(2, LAUNCH, 0.25),
        started(),
        loaded(4),
        *map(reported, (5, 6, 7, 8)),
        epoch_finished(2),
        *saved(8, url),
        run_finished(),
    )


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.01)


def send(events: list[Event], run: str = "run-1") -> None:
    (listener,) = make_traces(run)
    replay(listener, events)


def test_the_spans_add_up_to_the_account_of_the_wall_time(collector: Collector) -> None:
    events = restarted_run()
    send(events)
    spent = RunState.of(events).time_spent().parts()
    (redone,) = collector.find("redone_steps")
    for name, seconds in spent.items():
        lost = attributes(redone).get(f"flyte_ddp.lost_{name}", 0.0)
        assert collector.seconds(name) - lost == pytest.approx(seconds, abs=1e-3), name
    assert spent["redone_steps"] > 1
    (run,) = collector.find("run")
    assert collector.seconds("run") == pytest.approx(sum(spent.values()), abs=1e-3)
    first, second = collector.find("attempt")
    assert (first.status.code, first.status.message) == (2, "rank 1 was killed by SIGKILL")
    assert (second.status.code, run.status.code) == (0, 0)
    assert [attributes(each)["flyte_ddp.attempt"] for each in (first, second)] == [1, 2]
    assert [attributes(each)["flyte_ddp.step"] for each in collector.find("epoch")] == [4, 8]
    assert collector.seconds("checkpoint") == pytest.approx(2 * 1.25, abs=1e-3)
    # The spans of an attempt lie in its own span, and all others in the run's.
    parents = {"attempt": run, "waiting_for_nodes": run, "epoch": first, "run": None}
    for name, parent in parents.items():
        expected = parent.span_id if parent else b""
        assert collector.find(name)[0].parent_span_id == expected, name
    assert collector.services == {"flyte-ddp"}


def test_a_span_is_sent_when_it_ends(collector: Collector) -> None:
    (listener,) = make_traces("run-1")
    feed(listener, *restarted_run()[:13])
    wait_for(lambda: collector.find("attempt"))
    assert collector.find("epoch")
    assert not collector.find("run")
    listener.close(None)


def test_a_restarted_driver_continues_the_trace(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = restarted_run()
    send(events)
    send(events)
    assert len({span.trace_id for span in collector.spans}) == 1
    assert len({span.span_id for span in collector.spans}) == len(collector.spans)
    send(events, "run-2")
    assert len({span.trace_id for span in collector.spans}) == 2
    collector.spans.clear()
    monkeypatch.setenv(PARENT_VARIABLE, PARENT)
    send(events)
    assert {span.trace_id.hex() for span in collector.spans} == {PARENT[3:35]}
    assert collector.find("run")[0].parent_span_id.hex() == PARENT[36:52]


@pytest.mark.parametrize(
    ("parent", "num_listeners"),
    [
        (PARENT[:-2] + "00", 0),
        ("ff" + PARENT[2:], 1),
        ("nonsense", 1),
        (PARENT.replace("4bf9", ""), 1),
    ],
)
def test_a_parent_that_is_not_recorded_or_not_valid(
    parent: str, num_listeners: int, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [each.trace for each in make_traces("run-1")]
    monkeypatch.setenv(PARENT_VARIABLE, parent)
    assert [each.trace for each in make_traces("run-1")] == own[:num_listeners]


def test_a_collector_that_was_away_gets_all_spans(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    said: list[str] = []
    collector.status = 400
    (listener,) = make_traces("run-1")
    listener.say = said.append
    events = restarted_run()
    feed(listener, *events[:13])
    wait_for(lambda: said)
    collector.status = 200
    replay(listener, events[13:])
    assert len(collector.find("attempt")) == 2
    assert said == [
        f"OpenTelemetry: {collector.url} takes no spans; they wait, and the training continues"
    ]


@pytest.mark.parametrize("how", ["down", "hangs"])
def test_a_collector_that_does_not_answer_delays_nothing(
    how: str, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an event nor the end waits for an answer, which does not come."""
    if how == "down":
        monkeypatch.setenv(ENDPOINT_VARIABLE, "http://127.0.0.1:9")
    collector.is_hanging.set()
    monkeypatch.setattr(Traces, "close_timeout", 0.1)
    said: list[str] = []
    (listener,) = make_traces("run-1")
    listener.say = said.append
    replay(listener, restarted_run())
    assert listener.is_off
    assert "did not finish within" in said[-1]
    assert not collector.spans


def test_no_secret_is_in_a_span(collector: Collector) -> None:
    from flyte_ddp.launch.control.driver import Dispatcher

    password = "hunter2hunter2"
    place = f"s3://key:{password}@bucket/run"
    events = restarted_run(f"cannot read {place}", place)
    failure = RankFailure(f"cannot read {place}", 0, "exception", "")
    dispatcher = Dispatcher(make_traces("run-1"))
    dispatcher.__enter__()
    for event in events[:-1]:
        dispatcher.emit(event)
    dispatcher.__exit__(RankFailure, failure, None)
    assert collector.find("run")[0].status.message.startswith("RankFailure: cannot read s3://")
    assert collector.find("checkpoint")
    assert password not in str(collector.spans)


def test_nothing_is_imported_where_no_endpoint_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENDPOINT_VARIABLE, raising=False)
    assert make_traces("run-1") == []
    program = "import sys, flyte_ddp.launch.control.driver; print('opentelemetry' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_a_missing_package_is_one_line_that_says_what_to_install(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    (listener,) = make_traces("run-1")
    listener.say = said.append
    replay(listener, restarted_run())
    (line,) = said
    assert line.endswith("expected the package opentelemetry: pip install 'flyte-ddp[otel]'")
