"""States that every rank keeps in memory every few steps: a loss costs no more than the steps since the newest one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flyte_ddp.launch.dask.place import DaskPlace
from flyte_ddp.launch.local import LocalPlace
from tests.support.dask_runs import LOCAL
from tests.test_last_breath import train

pytestmark = pytest.mark.usefixtures("server_with_compiler")

FSDP = {"parallel": "fsdp", "memory_interval": 2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run, _ = train(tmp_path_factory.mktemp("undisturbed"), LocalPlace(2), parallel="fsdp")
    return run.state()


def assert_resumed(resumed, *expected):
    """Each from so late a step, or one interval earlier: while a copy is on its way, the one before it counts."""
    assert [place for _, place in resumed] == [place for _, place in expected]
    assert all(0 <= latest - step <= 2 for (step, _), (latest, _) in zip(resumed, expected, strict=True)), resumed


def test_a_killed_rank_costs_the_steps_since_the_newest_state_in_memory(tmp_path, undisturbed):
    orders = ("forward-1-1", "forward-1-8", "between-1-8", "forward-0-1", "evaluation-0-1")
    run, resumed = train(tmp_path, LocalPlace(2, max_restarts=9), *orders, **FSDP)
    assert_resumed(resumed, *((step, "this node's memory") for step in (6, 12, 12, 18)))
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)
    warning = "memory_interval: on one node a state in memory protects from killed ranks only"
    assert f"[rank 0] {warning}" in run.lines


def test_two_nodes_go_on_from_the_memory_of_both(tmp_path, undisturbed, client):
    place = DaskPlace(client, dataclasses.replace(LOCAL, max_restarts=3))
    run, resumed = train(tmp_path, place, "backward-1-6", "forward-0-5", **FSDP)
    assert_resumed(resumed, (4, "the memory of nodes 0 and 1"), (8, "the memory of nodes 0 and 1"))
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)


def test_a_lost_node_costs_the_steps_since_the_newest_state_next_door(tmp_path, undisturbed, client):
    place = DaskPlace(client, dataclasses.replace(LOCAL, max_restarts=3))
    run, resumed = train(tmp_path, place, "worker-1-6", "worker-0-5", **FSDP)
    assert_resumed(resumed, (4, "node 0's memory"), (8, "node 1's memory"))
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)
