"""The gang launcher, on real clusters of this machine's processes: runs, failures and restarts."""

from __future__ import annotations

import dataclasses
import os
import sys
from types import SimpleNamespace

import pytest
import torch

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.code import source_code
from flyte_ddp.errors import (
    ClusterError,
    ConfigError,
    NodeLost,
)
from flyte_ddp.events import RunState
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask import nodes
from flyte_ddp.launch.nodes.dask import worker as worker_code
from flyte_ddp.launch.nodes.dask.assignment import assign_nodes
from flyte_ddp.launch.nodes.dask.calls import call_workers, listed_workers
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.reports.run_card import card_page, run_card
from flyte_ddp.storage import read_file
from flyte_ddp.storage.state_dict_file import from_bytes
from tests.support.dask_runs import (
    LOCAL,
    dask_config,
    events_of,
    pid_of,
    ranks_below,
    states_equal,
    train,
    worker,
)
from tests.support.image_store import running_store
from tests.support.runs import new_run


@pytest.fixture
def fault(client):
    """fault("kind rank step"): what the ranks of the next run do, see tests.support.recipes."""

    def switch_on(text, write_seconds=0):
        variables = {"FAULT": text, "WRITE_SECONDS": str(write_seconds)}
        # a bound method would arrive with an environment of its own
        client.run(lambda: os.environ.update(variables))

    yield switch_on
    client.run(lambda: [os.environ.pop(name, None) for name in ("FAULT", "WRITE_SECONDS")])


@pytest.mark.long
def test_two_nodes_give_the_weights_and_the_events_of_two_processes(client, tmp_path, finished_run):
    on_one_machine = finished_run()
    run = train(new_run(tmp_path), client, LOCAL)

    torch.testing.assert_close(run.state(), on_one_machine.state())
    # The interval of states in memory is by their cost.
    at_any_step = (events.CheckpointWritten, events.CheckpointSaved, events.NodeMeasured)

    def types_of(run):
        return [type(event) for event in run.events if not isinstance(event, at_any_step)]

    assert types_of(run) == types_of(on_one_machine)
    assert [event.step for event in events_of(run, events.Reported)] == list(range(1, 28))
    assert events_of(run, events.PredictionsMade) == events_of(
        on_one_machine, events.PredictionsMade
    )
    assert run.result.epochs == events_of(run, events.EpochFinished)
    assert run.error is None
    assert {f"[node {index}] [rank {index}] the data are opened" for index in (0, 1)} <= set(
        run.lines
    )
    plugins = client.run(lambda dask_worker: list(dask_worker.plugins))
    assert not [
        name for names in plugins.values() for name in names if name.startswith("training-")
    ]
    assert "torch" not in client.run(lambda: list(sys.modules)).popitem()[1]


@pytest.mark.long
def test_others_see_the_workers_of_a_run_as_busy_until_it_ends(client, tmp_path):
    """Also after a restart, so that no cluster that scales itself closes one that trains."""
    seen = []

    def look():
        facts = call_workers(client, list(listed_workers(client)), worker_code.introduce, "other")
        seen.append(
            (
                [is_busy for *_, is_busy in listed_workers(client).values()],
                [each["is_busy"] for each in facts.values()],
                client.run_on_scheduler(lambda dask_scheduler: sorted(dask_scheduler.tasks)),
            )
        )

    def end_rank():
        ranks_below(pid_of(client, 1))[0].kill()

    at_steps = [(2, look), (4, end_rank), (20, look)]
    run = train(new_run(tmp_path), client, LOCAL, at_steps=at_steps, checkpoint_interval=2)
    assert len(events_of(run, events.RunStarted)) == 2
    before, after = seen
    assert before[:2] == after[:2] == ([True, True], [True, True])
    assert before[2] == after[2]  # the same tasks in both attempts
    look()
    assert seen[-1] == ([False, False], [False, False], [])


@pytest.mark.long
def test_a_run_costs_its_nodes_times_time_times_price_and_ends_at_max_cost(
    client, tmp_path, monkeypatch
):
    price = 3600.0  # per hour of a node
    (tmp_path / "settings.toml").write_text(
        f"recipes = []\n[prices]\n'kubernetes.io/hostname=*' = {price}\n"
    )
    monkeypatch.setattr(source_code, "_project", tmp_path)
    run = train(new_run(tmp_path / "whole"), client, LOCAL, epochs=2)
    (begun,) = events_of(run, events.AttemptStarted)
    (finished,) = events_of(run, events.RunFinished)
    seconds = finished.at - begun.launched_at
    cost = run.result.cost()
    assert cost["total"] == pytest.approx(2 * seconds * price / 3600, rel=0.01)
    parts = [cost[name] for name in ("training", "waiting", "repeated_work")]
    assert sum(parts) == pytest.approx(cost["total"])
    assert parts[0] > 0
    assert parts[1] > 0
    card = run_card(RunState.of(run.events))
    assert card["cost"] == pytest.approx(cost)
    assert f"| Cost | total {cost['total']:,.2f}, training " in card_page(card)
    page = tmp_path / "report.html"
    Report.of(run.result).write(page)
    assert f"{cost['total']:,.2f}" in page.read_text()
    with pytest.raises(
        ConfigError, match=r"^max_cost: the run has reached its limit of 8, over all attempts: "
    ):
        train(new_run(tmp_path / "limited"), client, LOCAL, epochs=100_000, max_cost=8)


@pytest.mark.long
def test_nodes_have_the_drivers_storage_keys_which_nobody_sees_where_a_rank_fails(
    client, tmp_path, monkeypatch, caplog, finished_run
):
    """The workers have none of the variables, as on Flyte, which gives them to the task alone."""
    secret = "a-secret-that-nobody-sees"
    seen = []

    def fail():
        ranks_below(pid_of(client, 1))[0].kill()
        # All that the dashboard could show of the tasks, and the workers log when one fails.
        seen.append(client.run_on_scheduler(lambda dask_scheduler: describe(dask_scheduler.tasks)))
        seen.extend(client.run(lambda dask_worker: describe(dask_worker.state.tasks)).values())

    def describe(tasks):
        found = []
        for task in tasks.values():
            found += [(name, getattr(task, name, "")) for name in type(task).__slots__]
        return str(found)

    with running_store() as store:
        for ours, theirs in (
            ("AWS_ENDPOINT_URL", "FLYTE_AWS_ENDPOINT"),
            ("AWS_ACCESS_KEY_ID", "FLYTE_AWS_ACCESS_KEY_ID"),
            ("AWS_SECRET_ACCESS_KEY", "FLYTE_AWS_SECRET_ACCESS_KEY"),
        ):
            monkeypatch.setenv(theirs, secret if "SECRET" in ours else os.environ[ours])
            monkeypatch.delenv(ours)
        run = new_run(tmp_path)
        run.url = store.fill({"": b""}).replace("/images", "/run")
        train(
            run,
            client,
            dataclasses.replace(LOCAL, max_restarts=1),
            at_steps=[(6, fail)],
            checkpoint_interval=2,
        )
        state = from_bytes(read_file(run.result.finished.model_state_url))
        assert states_equal(state, finished_run().state())

    assert len(events_of(run, events.RunStarted)) == 2
    assert len(seen) == 3
    assert "-hold-1" in seen[0]
    assert secret not in "".join([*seen, caplog.text, *run.lines])


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("Scheduler-1", "node 0 (w at h) was lost: its task was cancelled"),
        ("", "the Dask scheduler was lost: it does not answer"),
        ("Scheduler-2", "the Dask scheduler was lost: another one has taken its place"),
    ],
)
def test_the_loss_of_the_scheduler_is_not_blamed_on_a_node(monkeypatch, now, expected):
    """Without it, no message of a healthy node arrives."""
    monkeypatch.setattr(nodes, "scheduler_id", lambda client: now)
    lost = NodeLost("node 0 (w at h) was lost: its task was cancelled", "")
    cause = nodes.DaskNodes.explain(SimpleNamespace(client=None, scheduler_id="Scheduler-1"), lost)
    assert str(cause) == expected
    assert isinstance(cause, NodeLost)


def test_missing_workers_are_counted(client, tmp_path):
    config = ClusterConfig(kind="local", num_nodes=3, start_timeout=0.1)
    with pytest.raises(ClusterError, match="2 of 3 workers are there and idle"):
        train(new_run(tmp_path), client, config)


def test_ranks_are_ordered_by_host_and_name():
    config = ClusterConfig(num_nodes=4, processes_per_node=2)
    before = [worker("w-10", "10.0.0.9"), worker("w-3", "10.0.0.1"), worker("w-2", "10.0.0.9")]
    before.append(worker("w-4", "10.0.0.1"))
    nodes = assign_nodes(before, 4, config)
    assert [each.worker for each in nodes] == ["w-2", "w-10", "w-3", "w-4"]
    assert [each.ranks.first_rank for each in nodes] == [0, 2, 4, 6]
    assert {(each.ranks.world_size, each.ranks.num_threads) for each in nodes} == {(8, 2)}
    after = [
        dataclasses.replace(each, host=each.host.replace("10.0.0.9", "10.0.0.0")) for each in before
    ]
    assert [each.worker for each in assign_nodes(after, 4, config)] == ["w-2", "w-10", "w-3", "w-4"]
    # A worker with an agent may hold the state from which the run continues.
    before[1] = dataclasses.replace(before[1], has_agent=True)
    assert [each.worker for each in assign_nodes(before, 2, config)] == ["w-2", "w-3"]


def test_bad_input_is_refused_before_any_cluster_is_asked(tmp_path):
    job = Job(recipe_program("digits", dask_config(global_batch_size=32)), str(tmp_path), 0.0)
    message = (
        "min_nodes: expected a smaller number of nodes, because the global batch splits evenly at "
        "none from 3 to 3"
    )
    with pytest.raises(ConfigError, match=message):
        driver.run(job, DaskPlace(None, ClusterConfig(num_nodes=4, min_nodes=3)), str)
