"""The price of a run's nodes, and the limit of its cost, without any rank."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace

import pytest

from flyte_ddp.code import source_code
from flyte_ddp.config.training import Needs
from flyte_ddp.errors import ClusterError, ConfigError, TrainingStopped
from flyte_ddp.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointLoaded,
    CheckpointSaved,
    CheckpointWritten,
    Reported,
    RunState,
)
from flyte_ddp.launch.control import costs
from flyte_ddp.launch.control.costs import Costs
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.storage import Storage
from tests.support.errors import raises_one_line
from tests.support.short_run import run_finished, started

TYPE = "node.kubernetes.io/instance-type"
NODES = SimpleNamespace(
    nodes=[SimpleNamespace(worker="worker-0"), SimpleNamespace(worker="worker-1")],
    namespace="team",
    num_spares=0,
)
LABELS = [({TYPE: "p4d.24xlarge"}, 1000.0), ({TYPE: "m5.large", "zone": "b"}, 1090.0)]


@pytest.fixture
def make_costs(tmp_path, monkeypatch):
    """make_costs(table, max_cost): the costs of a run in a project with these prices."""

    def make(table, max_cost=0.0, end=lambda: None):
        (tmp_path / "settings.toml").write_text(f"recipes = []\n[prices]\n{table}")
        monkeypatch.setattr(source_code, "_project", tmp_path)
        job = Job(Program("f", b"", needs=Needs(max_cost=max_cost)), run="run-1")
        return Costs(job, Storage(str(tmp_path)), end)

    return make


@pytest.mark.parametrize(
    ("table", "max_cost", "message"),
    [
        ("'a=b' = -1", 0, "prices['a=b']: expected a finite number of at least 0, got -1"),
        ("'a=b' = 'dear'", 0, "prices['a=b']: expected a finite number of at least 0, got 'dear'"),
        ("", 5, "max_cost: expected a table `prices` in settings.toml, got none"),
    ],
)
def test_a_wrong_price_and_a_limit_without_prices_are_one_line(
    table, max_cost, message, make_costs
):
    with raises_one_line(ConfigError, re.escape(message)):
        make_costs(table, max_cost)


def test_the_first_pattern_that_fits_a_label_of_a_node_gives_its_price(make_costs, monkeypatch):
    table = f"'{TYPE}=p4d.*' = 30\n'{TYPE}=*' = 0.1\n'zone=b' = 7"
    asked = []
    monkeypatch.setattr(costs, "locate_nodes", lambda *of: asked.append(of) or LABELS)
    price, absent_cost = make_costs(table).find_price(NODES, waiting_since=1000.0)
    assert asked == [(["worker-0", "worker-1"], "team")]
    assert price == pytest.approx(30.1)
    assert absent_cost == pytest.approx(0.1 * 90 / 3600)  # the second pod started 90 s later


def test_a_spare_node_costs_as_much_as_the_mean_node(make_costs, monkeypatch):
    monkeypatch.setattr(costs, "locate_nodes", lambda *_: LABELS)
    nodes = SimpleNamespace(**{**vars(NODES), "num_spares": 1})
    table = f"'{TYPE}=p4d.*' = 30\n'{TYPE}=*' = 10"
    price, absent_cost = make_costs(table).find_price(nodes, waiting_since=1000.0)
    assert price == pytest.approx(30 + 10 + 20)
    assert absent_cost == pytest.approx(1.5 * 10 * 90 / 3600)


@pytest.mark.parametrize("error", ["", "nodes is forbidden"])
def test_a_node_without_a_price_is_one_line_and_ends_only_a_limited_run(
    error, make_costs, monkeypatch, caplog
):
    def locate(*_):
        if error:
            raise ClusterError(error)
        return LABELS

    monkeypatch.setattr(costs, "locate_nodes", locate)
    found = error or f"prices: expected a label of each node, such as ['{TYPE}=p4d.24xlarge'], got "
    assert make_costs("'zone=b' = 7").find_price(NODES, 0.0) == (0.0, 0.0)
    (line,) = caplog.messages
    assert line.startswith(f"what this run costs is not known: {found}")
    with pytest.raises(ConfigError, match="^max_cost: expected a price of each node: ") as raised:
        make_costs("'zone=b' = 7", max_cost=5).find_price(NODES, 0.0)
    assert found in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_limit_counts_all_attempts_and_ends_the_run_for_good(make_costs):
    ended = []
    watch = make_costs("'a=b' = 1", 100.0, lambda: ended.append(True))
    state = RunState()

    def feed(*events):
        for event in events:
            state.handle(event)
            watch.handle(event, state)

    first = AttemptStarted(2, 1000.0, 0.0, price=3600.0, at=1000.0)
    feed(first)
    assert watch._timer.interval == pytest.approx(100)
    feed(CheckpointWritten(1, "/c", False, at=1040.0), Reported(1, 0.1, {}, at=1060.0))
    feed(AttemptEnded(1, "node 1 was lost", 0.0, at=1060.0))
    feed(dataclasses.replace(first, price=1800.0, at=1060.0))
    assert watch._timer.interval == pytest.approx(2 * 40)
    watch.close(None)
    error = TrainingStopped("SIGTERM: the run was stopped at step 1", "SIGTERM")
    assert watch.convert_error(error) is error
    watch.start(0.001)
    watch._timer.join()
    assert ended == [True]
    with raises_one_line(
        ConfigError,
        "max_cost: the run has reached its limit of 100, over all attempts: the run was stopped at "
        "step 1",
    ):
        raise watch.convert_error(error)
    # Another process of the same run has 40 left.
    again = make_costs("'a=b' = 1", 100.0)
    state = RunState()
    again.handle(first, state)
    assert again._timer.interval == pytest.approx(40)
    again.close(None)
    with raises_one_line(
        ConfigError, "max_cost: the run has reached its limit of 60, over all attempts"
    ):
        make_costs("'a=b' = 1", 60.0)


def test_the_cost_is_split_and_adds_up_over_attempts_of_different_sizes():
    events = [
        # A pod of the two was there for the last 4 of 10 seconds only.
        (1010, AttemptStarted(2, 1000.0, 10.0, price=2 * 3600.0, absent_cost=6.0)),
        (1011, started()),
        (1012, CheckpointLoaded(0, "")),
        (1020, Reported(1, 0.1, {})),
        (1021, CheckpointSaved(1, "/c", False, 1.0)),
        (1031, Reported(2, 0.2, {})),
        (1034, AttemptEnded(2, "node 1 was lost", 3.0)),
        (1035, AttemptStarted(1, 1034.0, 0.0, price=3600.0)),
        (1036, started()),
        (1037, CheckpointLoaded(1, "/c")),
        (1057, Reported(2, 0.2, {})),
        (1058, run_finished()),
    ]
    state = RunState.of(dataclasses.replace(event, at=at) for at, event in events)
    cost = state.cost()
    # two nodes until the second attempt, then one
    assert cost["total"] == pytest.approx(2 * 34 - 6 + 24)
    assert cost["repeated_work"] == pytest.approx(2 * 10)
    assert cost["training"] == pytest.approx(2 * 8 + 20)
    assert sum(cost.values()) == pytest.approx(2 * cost["total"])
    unpriced = RunState.of(
        dataclasses.replace(event, at=at, **({"price": 0.0} if hasattr(event, "price") else {}))
        for at, event in events
    )
    assert unpriced.cost() == {}
