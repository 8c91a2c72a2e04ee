"""Ranks that compute wrongly: they are found, and their node is left out."""

from __future__ import annotations

import pytest
import torch

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import RankFailure
from flyte_ddp.events import AttemptEnded, AttemptStarted
from tests.support.dask_runs import events_of, train
from tests.support.runs import new_run

RECIPE = "tests.support.recipe_that_computes_wrongly.Wrong"


@pytest.mark.long
def test_the_check_changes_nothing_of_a_run_and_knows_the_ranks_masks_of_dropout(tmp_path):
    recipe = "tests.support.recipes.Dropping"
    with_check = new_run(tmp_path / "with", recipe).train(2, verify_interval=2).state()
    without = new_run(tmp_path / "without", recipe).train(2).state()
    assert all(torch.equal(with_check[name], without[name]) for name in without)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_computes_wrongly_is_named(tmp_path, monkeypatch, rank):
    monkeypatch.setenv("WRONG", str(rank))
    run = new_run(tmp_path, RECIPE)
    with pytest.raises(RankFailure, match=f"rank {rank} computes a wrong gradient: after step 2"):
        run.train(2, verify_interval=2)
    assert not [*run.checkpoints.glob("step-*")]


@pytest.mark.long
def test_a_node_that_computes_wrongly_is_left_out(tmp_path, scheduler, start_worker, caplog):
    start_worker(scheduler, "node-0")
    start_worker(scheduler, "node-1", WRONG="node")
    config = ClusterConfig(
        kind="existing",
        scheduler_address=scheduler,
        min_nodes=1,
        max_restarts=0,
        node_timeout=30,
        grow_delay=300,
    )
    run = new_run(tmp_path, RECIPE)
    with open_cluster(config, "test") as client:
        train(run, client, config, verify_interval=2)
    (ended,) = events_of(run, AttemptEnded)
    assert ended.reason.startswith("node 1 (node-1 at ")
    assert "rank 1 computes a wrong gradient: after step 2" in ended.reason
    assert "rank 1 computes a wrong gradient" in caplog.text
    assert [each.num_nodes for each in events_of(run, AttemptStarted)] == [2, 1]
