"""A rank that is lost costs at most the step that it was in: one that is left keeps the state in its node's memory."""

from __future__ import annotations

import dataclasses
import io
import time
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from flyte_ddp import events
from flyte_ddp.checkpoints.files import FORMAT
from flyte_ddp.checkpoints.state_file import CHECKSUM, save_state
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.config import resolve
from flyte_ddp.launch import driver
from flyte_ddp.launch.dask.place import DaskPlace
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.launch.policy import leaves_state_whole
from flyte_ddp.launch.process.link import RankProcess
from flyte_ddp.launch.process.memory import NodeMemory
from flyte_ddp.launch.process.programs import Job, Program, recipe_program
from flyte_ddp.launch.process.ranks import NodeRanks
from flyte_ddp.launch.run import _Call
from flyte_ddp.launch.survivors import Survivors
from flyte_ddp.rank.memory_states import load_from_memory
from flyte_ddp.rank.state_keeper import StateKeeper
from flyte_ddp.recipes import get_recipe
from flyte_ddp.world import ALONE
from tests.support.bereaved import save_and_lose_a_rank
from tests.support.dask_runs import LOCAL, events_of
from tests.support.gang import run_gang
from tests.support.runs import fork_functions, new_run
from tests.test_policy import ECHO, EXITED, GPU_FULL, KILLED, LOST, OOM, OOM_POD, SHAPES, STALLED, THEIRS

RECIPE = "tests.support.bereaved.Bereaved"
STEPS_PER_EPOCH = 9
CONFIG = {"momentum": 0.9, "log_interval": 1, "model_state": "last"}


def train(directory, place, *orders, recipe=RECIPE, checkpoints="", listeners=(), **config):
    """Train, and return what was seen of the run and the steps and places that it was resumed from."""
    (directory / "orders").mkdir(parents=True)
    for number, order in enumerate(orders):
        (directory / "orders" / f"{number}-{order}").touch()
    run = new_run(directory, recipe)
    options = {"orders": str(directory / "orders") if orders else ""}
    values = {**CONFIG, "checkpoint_interval": 1000, "recipe_options": options, **config}
    program = recipe_program(recipe, resolve(get_recipe(recipe, {}).defaults, values))
    job = Job(program, checkpoints or str(directory / "checkpoints"), time.time())
    run.result = driver.run(job, place, lambda: str(run.data()), [run, *listeners], run.relay)
    loaded = [(event.step, event.url) for event in events_of(run, events.CheckpointLoaded) if event.step]
    return run, loaded


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The weights and statistics of a run that nothing happens to."""
    run, _ = train(tmp_path_factory.mktemp("undisturbed"), LocalPlace(2))
    return run.state()


def test_wherever_a_rank_is_lost_no_step_that_was_taken_is_taken_again(tmp_path, undisturbed):
    orders = (
        "forward-1-1",  # before the first step: there is nothing to keep
        "backward-0-4",  # rank 0, whose statistics are those that count
        "between-1-4",  # rank 0 has taken the step that rank 1 has not
        "forward-1-1",  # again before a step: the state in memory stays
        "evaluation-0-1",  # the other rank has got its statistics at the start
    )
    run, resumed = train(tmp_path, LocalPlace(2, max_restarts=9), *orders)
    memory = "this node's memory"
    assert resumed == [(3, memory), (7, memory), (7, memory), (9, memory)]
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)


def test_two_nodes_keep_the_state_on_the_one_that_is_left(tmp_path, undisturbed, client):
    place = DaskPlace(client, dataclasses.replace(LOCAL, max_restarts=3))
    run, resumed = train(tmp_path, place, "backward-1-4", "backward-0-3")
    assert resumed == [(3, "node 0's memory"), (5, "node 1's memory")]
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)


def test_a_rank_that_dies_while_it_keeps_its_state_is_replaced_by_the_next(tmp_path):
    plain, _ = train(tmp_path / "plain", LocalPlace(3))
    run, resumed = train(tmp_path / "lost", LocalPlace(3, max_restarts=3), "backward-1-4", "keep-0-4")
    assert resumed == [(3, "this node's memory")]
    torch.testing.assert_close(run.state(), plain.state(), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["keep", "keepnode"])
def test_the_last_rank_that_is_lost_while_it_keeps_its_state_costs_the_steps_since_the_checkpoint(
    tmp_path, undisturbed, client, how
):
    place = DaskPlace(client, dataclasses.replace(LOCAL, max_restarts=3))
    run, resumed = train(tmp_path, place, "backward-1-4", f"{how}-0-4", checkpoint_interval=2)
    assert resumed == [(2, str(tmp_path / "checkpoints" / "step-0000000002.json"))]
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)


@pytest.mark.slow
def test_a_loss_while_the_next_ranks_read_the_state_leaves_it_where_it_was(tmp_path, undisturbed, client):
    """On rank 0, which has it, and on the new rank 1, which gets it from there. With the node of rank 0 it is gone."""
    place = DaskPlace(client, dataclasses.replace(LOCAL, max_restarts=9))
    orders = ("worker-1-4", "read-0-0", "read-1-0", "readnode-1-0", "backward-1-3", "readnode-0-0")
    run, resumed = train(tmp_path, place, *orders, checkpoint_interval=4)
    assert resumed == [(3, "node 0's memory"), (4, str(tmp_path / "checkpoints" / "step-0000000004.json"))]
    assert not any((tmp_path / "orders").iterdir())
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)


@pytest.mark.slow
def test_a_rank_that_hangs_costs_no_step(tmp_path, undisturbed):
    run, resumed = train(tmp_path, LocalPlace(2, max_restarts=3), "hang-1-4", stall_timeout=10.0)
    assert resumed == [(3, "this node's memory")]
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)


@pytest.mark.slow
def test_without_the_statistics_of_rank_0_the_checkpoint_counts(tmp_path, undisturbed):
    """Rank 1 learns of them at its next forward pass or evaluation."""
    run, resumed = train(tmp_path, LocalPlace(2, max_restarts=3), "between-0-6", checkpoint_interval=4)
    assert resumed == [(4, str(tmp_path / "checkpoints" / "step-0000000004.json"))]
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)


@pytest.mark.slow
def test_each_rank_has_what_rank_0_has_told_of_earlier_epochs(tmp_path):
    run, resumed = train(tmp_path, LocalPlace(2, max_restarts=3), "backward-0-11", epochs=2)
    assert resumed == [(10, "this node's memory")]
    assert [epoch.sample for epoch in run.result.epochs] == ["a sample"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_rank_that_is_lost_during_a_save_costs_no_step(tmp_path, undisturbed, monkeypatch, lost):
    monkeypatch.setenv("WRITE_SECONDS", "1")
    run, resumed = train(tmp_path, LocalPlace(2, max_restarts=3), f"backward-{lost}-6", checkpoint_interval=5)
    assert resumed == [(5, "this node's memory")]
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)


class Outage:
    """Takes the store away when it has the first epoch's checkpoint, has the rank that waits for it die, and brings the
    store back when the run has resumed."""

    def __init__(self, outage, orders):
        self.outage, self.orders, self.has_begun = outage, orders, False

    def handle(self, event):
        if isinstance(event, events.CheckpointWritten) and not self.has_begun:
            self.has_begun = True
            self.outage.__enter__()
            (order,) = self.orders.iterdir()
            order.rename(str(order).replace("hold", "forward"))
        elif isinstance(event, events.CheckpointLoaded) and event.step:
            self.outage.__exit__(None, None, None)

    def close(self, error):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("how", ["refusing", "hanging"])
def test_a_loss_while_the_store_is_away_costs_no_step(tmp_path, store_server, how):
    """Nor is the store waited for, which has the best epoch's checkpoint. What is saved is held until it is back."""
    best = {"model_state": "best", "epochs": 2, "store_timeout": 60.0}
    plain, _ = train(tmp_path / "plain", LocalPlace(2), **best)
    place, options = LocalPlace(2, max_restarts=3), {"checkpoints": f"s3://bucket/{how}", **best}
    outage = Outage(getattr(store_server, how)(), tmp_path / "lost" / "orders")
    run, resumed = train(tmp_path / "lost", place, "hold-1-12", listeners=[outage], **options)
    assert resumed == [(11, "this node's memory")]
    final = torch.load(io.BytesIO(store_server.files.cat_file(run.result.finished.model_state_url)), weights_only=True)
    torch.testing.assert_close(final, plain.state(), rtol=0, atol=0)
    assert run.result.finished.best_epoch == plain.result.finished.best_epoch


@pytest.mark.slow
def test_the_best_epochs_checkpoint_is_there_at_the_end(tmp_path):
    """A state from which the run could not go back to the weights of the best epoch is not used."""
    best = {"model_state": "best", "checkpoints_to_keep": 1}
    plain, _ = train(tmp_path / "plain", LocalPlace(2), **best)
    run, _ = train(tmp_path / "lost", LocalPlace(2, max_restarts=3), "backward-0-11", "backward-1-9", **best)
    torch.testing.assert_close(run.state(), plain.state(), rtol=0, atol=0)
    assert run.result.finished.best_epoch == plain.result.finished.best_epoch


@pytest.mark.slow
def test_a_best_epochs_checkpoint_that_is_still_written_is_completed_first(tmp_path, monkeypatch):
    monkeypatch.setenv("WRITE_SECONDS", "1.5")
    best = {"model_state": "best", "epochs": 2}
    _, resumed = train(tmp_path, LocalPlace(2, max_restarts=3), "forward-1-11", **best)
    assert resumed == [(10, "this node's memory")]


@pytest.mark.slow
def test_a_best_epochs_checkpoint_that_is_lost_with_rank_0_costs_the_steps_since_the_one_before(tmp_path):
    """The run ends with the weights of that epoch all the same, because it trains it again."""
    best = {"model_state": "best", "epochs": 2, "checkpoint_interval": 4}
    plain, _ = train(tmp_path / "plain", LocalPlace(2), **best)
    run, resumed = train(tmp_path / "lost", LocalPlace(2, max_restarts=3), "write-0-11", **best)
    ((step, place),) = resumed
    assert step in (4, 8)
    assert place == str(tmp_path / "lost" / "checkpoints" / f"step-{step:010}.json")
    why = "the store has no checkpoint of the best epoch, at step 9"
    loaded = events_of(run, events.CheckpointLoaded)[-1]
    assert loaded.skipped == [f"the state of step 10 in this node's memory is not used: {why}"]
    torch.testing.assert_close(run.state(), plain.state(), rtol=0, atol=0)
    assert run.result.finished.best_epoch == plain.result.finished.best_epoch


def test_what_a_function_has_saved_is_in_the_store_when_another_rank_is_lost(tmp_path, monkeypatch):
    fork_functions(monkeypatch)
    call = cloudpickle.dumps(_Call(save_and_lose_a_rank, (str(tmp_path / "lost"),)))
    job = Job(Program("save", call, ("tests",)), str(tmp_path / "checkpoints"), time.time())
    state = driver.run(job, LocalPlace(2, max_restarts=1))
    assert cloudpickle.loads(state.finished.value) == 4


@pytest.mark.parametrize("failure", [KILLED, LOST, STALLED, ECHO])
def test_the_state_counts_after_a_loss(failure):
    assert leaves_state_whole(failure)


@pytest.mark.parametrize("failure", [OOM, OOM_POD, SHAPES, THEIRS, GPU_FULL, EXITED])
def test_the_state_does_not_count_after_what_may_have_spoiled_it_or_would_repeat(failure):
    assert not leaves_state_whole(failure)


class Rank:
    """One as the supervisor knows it."""

    def __init__(self, number, is_left=True):
        self.number, self.is_left, self.messages = number, is_left, []

    def tell(self, *message):
        self.messages += message

    def kill(self):
        self.is_left = False
        self.messages.append("killed")


def test_the_rank_with_the_highest_step_is_asked_and_then_the_next(monkeypatch):
    monkeypatch.setattr("flyte_ddp.launch.survivors.ANSWER_TIMEOUT", 0.05)
    kept = []
    behind, ahead, dead = ranks = Rank(0), Rank(1), Rank(2, is_left=False)
    survivors = Survivors(lambda **values: kept.append(values))

    def is_busy(cause=KILLED):
        return survivors.is_busy(cause, ranks, lambda rank: (4, 5, 6)[rank.number])

    assert is_busy()
    assert (behind.messages, ahead.messages, dead.messages) == ([], ["keep"], [])
    time.sleep(0.06)  # it does not answer, as one that is stopped
    assert is_busy()
    assert ahead.messages == ["keep", "killed"]  # or it might write over what the next one has written
    assert behind.messages == ["keep"]
    survivors.take(ahead, "kept", {"step": 5})  # too late
    survivors.take(behind, "keeping", 0)
    time.sleep(0.06)
    assert is_busy()
    survivors.take(behind, "kept", {"step": 4})
    assert not is_busy()
    assert kept == [{"step": 4}]
    assert not Survivors(print).is_busy(SHAPES, ranks, lambda rank: 1)
    assert ahead.messages[2:] == ["release"] * 2


def test_a_rank_has_the_longer_the_larger_its_state_is(monkeypatch):
    monkeypatch.setattr("flyte_ddp.launch.survivors.KEEP_TIMEOUT", 0.0)
    monkeypatch.setattr("flyte_ddp.launch.process.memory.KEEP_TIMEOUT", 0.0)
    survivors, ranks = Survivors(print), [Rank(0)]
    for num_bytes, is_busy in ((100 << 30, True), (0, False)):
        survivors.is_busy(KILLED, ranks, lambda rank: 5)
        survivors.take(ranks[0], "keeping", num_bytes)
        time.sleep(0.01)
        assert survivors.is_busy(KILLED, ranks, lambda rank: 5) is is_busy


def test_one_line_says_that_a_model_with_large_buffers_is_not_kept(monkeypatch, caplog):
    monkeypatch.setattr("flyte_ddp.rank.state_keeper.MAX_BUFFER_BYTES", 8)
    world = dataclasses.replace(ALONE, world_size=2)
    process = SimpleNamespace(memory=SimpleNamespace(path=""), link=SimpleNamespace())
    for model, is_kept in ((torch.nn.BatchNorm1d(1), False), (torch.nn.Linear(1, 1), True)):
        with StateKeeper(model, world, dict, lambda: 0).may_keep(process, is_compiled=False, is_sharded=False):
            assert hasattr(process.link, "on_keep") == is_kept
    assert caplog.messages == [
        "a model with 16 bytes of buffers, more than 8, is not kept in memory when a rank is lost: `memory_interval` "
        "keeps one with any"
    ]


@pytest.mark.parametrize(
    ("name", "value", "is_kept"),
    [
        ("mask", -torch.inf, True),
        ("mask", torch.nan, True),
        ("weight", 1.0, True),
        ("weight", torch.nan, False),
        ("moment", torch.inf, False),
    ],
)
def test_only_a_weight_or_a_moment_that_is_not_finite_keeps_a_state_from_memory(name, value, is_kept, tmp_path, caplog):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("mask", torch.zeros(2, 2))
    moments = {"moment": torch.zeros(2, 2)}
    with torch.no_grad():
        {**model.state_dict(), **moments}[name][0, 1] = value
    step, process = 0, SimpleNamespace(memory=SimpleNamespace(path=str(tmp_path / "kept")), link=SimpleNamespace())
    state = {"model": model.state_dict(), "optimizer": {"state": {0: moments}}}
    keeper = StateKeeper(model, dataclasses.replace(ALONE, world_size=2), lambda: dict(state), lambda: step)
    keeping = keeper.may_keep(process, is_compiled=False, is_sharded=False)
    keeping.__enter__()  # and never left: no step follows
    step = 3
    kept = process.link.on_keep(lambda num_bytes: None)
    assert bool(kept) == (tmp_path / "kept").exists() == is_kept
    line = "this rank's state is not kept: a weight or the optimizer's state is not finite"
    assert caplog.messages == [line] * (not is_kept)


def memory_with(step=5, run="run", attempt=0, epochs=(), spoil=False, version=None, digest=""):
    """A node's memory with a state."""
    memory = NodeMemory()
    file, _ = memory.begin(())
    state = {"format": FORMAT, "progress": {"step": step, "epochs": list(epochs)}, "model": {"weight": torch.ones(3)}}
    with open(file.path, "wb") as stream:
        entry = save_state(state, stream, with_crc32=False)
        if spoil:
            stream.seek(-9, 2)
            stream.write(b"different")
    values = {"num_bytes": entry["bytes"], "checksum": entry[CHECKSUM], "version": version or str(torch.__version__)}
    memory.keep(run, attempt, step=step, digest=digest, **values)
    return memory


def loaded(memory, directory, counted=(0,), needed=0, stored=(), known=None, world=ALONE):
    file, kept = memory.begin(counted)
    rank, size = world.rank, world.world_size
    node = NodeRanks(rank, 1, size, "127.0.0.1", 0, "lo", False, 1, node_rank=rank, num_nodes=size, run_id="run")
    job = Job(None, "", 0.0, stored=known or tuple(stored), is_store_away=known is not None)
    process = RankProcess(job, node, 0, None, None, file, kept)
    store = CheckpointStore(str(directory), 2)
    found = load_from_memory(world, process, store, lambda place, tensor: None, lambda state: needed)
    return (found.state and found.state["progress"]["step"]), found.skipped


def test_a_state_in_memory_is_used_if_it_is_newer_whole_and_counts(tmp_path):
    assert loaded(memory_with(), tmp_path) == (5, [])
    assert loaded(memory_with(), tmp_path, stored=[4]) == (5, [])
    assert loaded(memory_with(), tmp_path, stored=[4], needed=4) == (5, [])
    assert loaded(memory_with(), tmp_path, known=()) == (5, [])  # the store is away
    assert loaded(memory_with(), tmp_path, known=(3, 5), needed=3) == (5, [])
    assert loaded(memory_with(), tmp_path, needed=5) == (5, [])  # its own epoch is the best: it is saved again


def test_a_state_in_memory_that_is_not_right_is_not_used(tmp_path):
    assert loaded(memory_with(), tmp_path, counted=()) == (None, [])  # an exception ended the attempt
    assert loaded(memory_with(run="another"), tmp_path) == (None, [])
    assert loaded(memory_with(version="1.0"), tmp_path) == (None, [])
    place = "the state of step 5 in this node's memory is not used: "
    damaged = "its checksum is not the one that was recorded when it was written"
    assert loaded(memory_with(spoil=True), tmp_path) == (None, [place + damaged])
    best = "the store has no checkpoint of the best epoch, at step 3"
    assert loaded(memory_with(), tmp_path, needed=3) == (None, [place + best])
    assert loaded(memory_with(), tmp_path, stored=[5]) == (None, [])


def load_on_two_nodes(world, store, directory):
    """Two nodes have the same state, different ones of one step, or those of two steps: what they go on from."""
    both = [{"digest": "same"}, {"digest": str(world.rank)}, {"step": 5 - world.rank}]
    return [loaded(memory_with(**values), Path(directory), world=world) for values in both]


@pytest.mark.slow
def test_two_nodes_that_disagree_go_on_from_the_store(tmp_path):
    refusal = "the state of step 5 in node 0's memory is not used: it is not that of another node"
    expected = [(5, []), (None, [refusal]), (5, [])]
    assert run_gang(2, load_on_two_nodes, str(tmp_path)) == [expected] * 2


def test_the_state_that_counts_stays_until_a_newer_one_does():
    memory = memory_with(step=5)
    _, kept = memory.begin([0])
    assert kept.step == 5
    memory.keep("run", 1, step=7, num_bytes=0, checksum="", version="", digest="")
    assert memory.steps == (7, 5)
    _, kept = memory.begin([0])  # attempt 1 ended by an exception
    assert kept.step == 5
    memory.keep("run", 2, step=8, num_bytes=0, checksum="", version="", digest="")
    assert memory.begin([0, 2])[1].step == 8
    memory.note_stored(7)
    assert memory.steps == (0, 8)
    memory.note_stored(9)  # which is newer
    assert memory.steps == (0, 0)
    memory.close()


@pytest.mark.slow
def test_a_state_in_memory_is_freed_when_the_store_has_a_newer_one(tmp_path):
    place, steps = LocalPlace(2, max_restarts=3), []

    class Watch:
        def handle(self, event):
            if isinstance(event, events.CheckpointWritten):
                steps.append((event.step, place.memory.steps))

        def close(self, error):
            pass

    train(tmp_path, place, "forward-1-4", listeners=[Watch()], epochs=1)
    assert steps == [(9, (0, 0))]
