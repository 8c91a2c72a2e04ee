"""Saves of a function in memory: a lost rank or node costs nothing that was saved there, at any
number of ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import cloudpickle
import pytest
import torch

import flyte_ddp
from flyte_ddp import events, session
from flyte_ddp.errors import RankFailure
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.run import FunctionCall
from tests.support.dask_runs import LOCAL
from tests.support.function_that_loses_ranks import train
from tests.support.recipe_that_loses_ranks import wait_for_copies
from tests.support.runs import fork_functions


class Loads(events.Listener):
    """Collects the steps and places from which a run has resumed."""

    def __init__(self):
        self.found = []

    def handle(self, event):
        # a program may load more than once
        is_resumed = isinstance(event, events.CheckpointLoaded) and event.step
        if is_resumed and (event.step, event.url) not in self.found[-1:]:
            self.found.append((event.step, event.url))


def lose(directory, *orders, splits=False, **options):
    """Train while ranks are lost; return the weights, the samples of the last attempt's rank 0, and
    the `Loads`.
    """
    (directory / "orders").mkdir()
    for number, order in enumerate(orders):
        (directory / "orders" / f"{number}-{order}").touch()
    loads = Loads()
    given = (str(directory / "orders"), splits)
    weights, samples = flyte_ddp.run(train, *given, listeners=[loads], **options)
    return weights, samples, loads


@pytest.fixture(scope="module")
def undisturbed():
    """undisturbed(whether the state is split): the weights of a run that nothing happens to."""

    @functools.cache
    def run(splits):
        with pytest.MonkeyPatch.context() as patch:
            fork_functions(patch)
            return flyte_ddp.run(train, "", splits, nproc_per_node=2)[0]

    return run


MEMORY = "this node's memory"


@pytest.mark.long
def test_a_killed_rank_costs_nothing_that_was_saved_in_memory(
    tmp_path, undisturbed, caplog, forked_functions
):
    """Without a place for checkpoints, too."""
    (tmp_path / "orders").mkdir()
    for number, order in enumerate(("rank-1-0", "rank-1-3")):
        (tmp_path / "orders" / f"{number}-{order}").touch()
    call, loads = cloudpickle.dumps(FunctionCall(train, (str(tmp_path / "orders"), False))), Loads()
    job, place = Job(Program("train", call), "", time.time()), LocalPlace(2, max_restarts=1)
    state = driver.run(job, place, listeners=[loads])
    weights, samples = cloudpickle.loads(state.finished.value)
    assert loads.found == [(3, MEMORY)]
    assert weights == undisturbed(False)
    # rank 0's of the last two batches of the first epoch, of 37 samples, and the second
    assert samples == 4 + 3 + 19
    assert "restarts from step 3, from this node's memory" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("splits", "first", "second"),
    [
        (False, "node 1's memory", "node 0's memory"),
        (True, "node 1's memory", "the memory of nodes 0 and 1"),
    ],
)
def test_a_lost_node_costs_nothing_that_was_saved_in_memory_without_a_place_for_checkpoints(
    splits, first, second, tmp_path, undisturbed, client
):
    options = {"nnodes": 2, "cluster": dataclasses.replace(LOCAL, max_restarts=1), "client": client}
    weights, _, loads = lose(tmp_path, "worker-0-3", "rank-0-7", splits=splits, **options)
    assert loads.found == [(3, first), (7, second)]
    assert weights == undisturbed(splits)


@pytest.mark.slow
def test_another_number_of_ranks_goes_on_from_memory(tmp_path, undisturbed, client):
    cluster = dataclasses.replace(LOCAL, max_restarts=1, min_nodes=1, return_timeout=0.1)
    options = {"nnodes": 2, "cluster": cluster, "client": client}
    weights, samples, loads = lose(tmp_path, "worker-0-7", splits=True, **options)
    assert loads.found == [(7, MEMORY)]
    assert samples == 8 + 8 + 5  # all of the last three batches
    weights = {name: torch.tensor(values) for name, values in weights.items()}
    expected = {name: torch.tensor(values) for name, values in undisturbed(True).items()}
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-5)


def save_and_load(splits):
    """Return what each rank loads after each save. Some saves are in memory alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh, found = init_device_mesh("cpu", (2,)), []
    for step, in_memory in enumerate((False, True, True, False, True), 1):
        weights = torch.full((4,), float(step))
        split = distribute_tensor(weights, mesh, [Shard(0)])
        wait_for_copies(60)
        dist.barrier()
        session.save({"weights": split if splits else weights, "step": step}, step, in_memory)
        state = session.load()
        found.append((state["step"], state["weights"].tolist()))
    both = [None] * 2
    dist.all_gather_object(both, found)
    return both


@pytest.mark.parametrize("splits", [False, True])
def test_a_load_in_the_same_attempt_finds_the_newest_save_wherever_it_is(
    splits, tmp_path, forked_functions
):
    ranks = flyte_ddp.run(save_and_load, splits, nproc_per_node=2, checkpoints=str(tmp_path))
    assert ranks == [[(step, [float(step)] * 4) for step in range(1, 6)]] * 2


def save_split_after_whole():
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    split = distribute_tensor(torch.ones(2, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    session.save({"weights": torch.ones(1)}, 1, in_memory=True)
    session.save({"weights": split}, 1, in_memory=True)


def test_a_split_state_after_a_whole_one_in_memory_is_one_line(forked_functions):
    session.save({"step": 1}, 1, in_memory=True)  # This process has no run.
    expected = "save: state: expected whole tensors, as in memory before, got split ones"
    with pytest.raises(RankFailure, match=expected):
        flyte_ddp.run(save_split_after_whole)
