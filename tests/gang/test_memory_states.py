"""States that every rank keeps in memory every few steps: a loss costs no more than the steps since
the newest one.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from types import SimpleNamespace

import pytest
import torch

from flyte_ddp.checkpoints import stored_steps
from flyte_ddp.checkpoints.files import CHECKSUM, check_file, save_state
from flyte_ddp.checkpoints.memory import NodeMemory, Slots
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.messages import PartSaved
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.protocol.ranks import NodeRanks
from flyte_ddp.rank import memory_interval
from flyte_ddp.rank.link import RankProcess
from flyte_ddp.rank.memory_interval import MemoryInterval
from flyte_ddp.rank.states import load_newest
from flyte_ddp.world import ALONE
from tests.support.dask_runs import LOCAL
from tests.support.runs_that_lose_ranks import train

FSDP = {"parallel": "fsdp", "memory_interval": 2}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run, _ = train(tmp_path_factory.mktemp("undisturbed"), LocalPlace(2), parallel="fsdp")
    return run.state()


def assert_resumed(resumed, *expected):
    """Each from so late a step, or one interval earlier: while a copy is on its way, the one before
    it counts.
    """
    assert [place for _, place in resumed] == [place for _, place in expected]
    assert all(
        0 <= latest - step <= 2 for (step, _), (latest, _) in zip(resumed, expected, strict=True)
    ), resumed


@pytest.mark.long
def test_a_killed_rank_costs_no_more_than_the_interval_that_is_chosen(tmp_path):
    plain, _ = train(tmp_path / "plain", LocalPlace(2))
    run, resumed = train(tmp_path / "lost", LocalPlace(2, max_restarts=3), "backward-0-5")
    ((step, place),) = resumed
    assert place == "this node's memory"
    assert 2 <= step < 5
    torch.testing.assert_close(run.state(), plain.state(), rtol=0, atol=0)


@pytest.mark.long
def test_a_lost_node_costs_the_steps_since_the_newest_state_next_door(
    tmp_path, undisturbed, client
):
    """Losses while the next ranks read it leave it where it was; with the node that has no part of
    it yet, too.
    """
    place = DaskPlace(client, dataclasses.replace(LOCAL, max_restarts=9))
    orders = ("worker-1-6", "read-0-0", "read-1-0", "readnode-1-0", "worker-0-9")
    run, resumed = train(tmp_path, place, *orders, **FSDP)
    assert_resumed(resumed, (4, "node 0's memory"), (12, "node 1's memory"))
    assert not any((tmp_path / "orders").iterdir())
    torch.testing.assert_close(run.state(), undisturbed, rtol=0, atol=0)


BOTH = (0, 1)
NODE = NodeRanks(0, 2, 2, False, 1, "127.0.0.1", 0, "lo", run_id="run")


JOB = Job(None, "", 0.0)


def node_with(*states, num_parts=2, spoilt=()):
    """A node's memory with states that attempt 0 has saved, each as its step and the numbers of its
    parts.

    Args:
        spoilt: step and number of a part with another checksum than was recorded.
    """
    memory = NodeMemory()
    memory.begin(0, BOTH)
    for turn, (step, numbers) in enumerate(states, 1):
        for number in numbers:
            values = {
                "progress": {"step": step, "epochs": []},
                "model": {"weight": torch.empty(4, device="meta")},
            }
            piece = (0, [2 * number], torch.full((2,), float(step)))
            part = {"values": values if number == 0 else None, "pieces": [piece]}
            with open(memory.slots_of(number)[turn % 2].path, "r+b") as file:
                entry = save_state(part, file, with_crc32=False)
                file.truncate()
                if (step, number) == spoilt:
                    file.seek(-9, 2)
                    file.write(b"different")
            memory.take(PartSaved(turn, step, number, num_parts, entry["bytes"], entry[CHECKSUM]))
    return memory


DAMAGED = "the checksum of part 1 is not the one that was recorded when it was written"
NO_BEST = "the store has no checkpoint of the best epoch, at step 3"


@pytest.mark.parametrize(
    ("states", "spoilt", "job", "needed", "expected", "problem"),
    [
        (((2, BOTH), (4, BOTH), (6, BOTH)), (), {}, 0, 6, ""),
        (((2, BOTH), (6, BOTH), (4, BOTH)), (), {}, 0, 4, ""),  # saved after a later step
        # a rank was lost before it wrote its part
        (((2, BOTH), (4, BOTH), (6, (1,))), (), {}, 0, 4, ""),
        (((2, BOTH), (2, BOTH)), (), {}, 0, 2, ""),  # before and after an evaluation
        (((4, BOTH),), (), {"stored": (3,)}, 0, 4, ""),
        (((4, BOTH),), (), {"stored": (4,)}, 0, 4, ""),  # the store may be away
        (((4, BOTH),), (), {"stored": (5,)}, 0, None, ""),
        ((), (), {}, 0, None, ""),
        (((2, BOTH), (4, BOTH)), (4, 1), {}, 0, 2, DAMAGED),
        (((4, BOTH),), (4, 1), {}, 0, None, DAMAGED),
        (((4, BOTH),), (), {}, 3, None, NO_BEST),
    ],
)
def test_the_newest_state_in_memory_that_is_whole_and_right_is_used(
    states, spoilt, job, needed, expected, problem, tmp_path
):
    left = node_with(*states, spoilt=spoilt).begin(1, BOTH)
    job = dataclasses.replace(JOB, is_in_memory=True, **job)
    link = SimpleNamespace(send=lambda *_: None)
    process = RankProcess(job, NODE, 0, None, link, parts=left)
    store = CheckpointStore(str(tmp_path), 2)
    found = load_newest(ALONE, process, store, lambda *_: None, lambda state: needed)
    if expected is None:
        assert found.state is None
    else:
        assert found.state["progress"]["step"] == expected
        assert found.state["model"]["weight"].tolist() == [float(expected)] * 4
    skipped = f"the state of step 4 in this node's memory is not used: {problem}"
    assert found.skipped == ([skipped] if problem else [])


def test_the_state_before_a_loss_stays_until_a_new_one_is_whole():
    memory = node_with((2, (0, 1)), (4, (0, 1)))
    left = memory.begin(1, BOTH)
    assert sorted(part.step for part in left) == [2, 2, 4, 4]
    # Ranks that never close the files have them open.
    opened = [os.dup(part.file.descriptor) for part in left if part.step == 2]
    memory.keep_only(0, 2)  # The ranks continue from this step.
    assert [os.fstat(each).st_size for each in opened] == [0, 0]
    for number in (0, 1):
        memory.take(PartSaved(1, 6, number, 2, 0, ""))
    left = memory.begin(2, BOTH)
    assert sorted(part.step for part in left) == [4, 4, 6, 6]  # the last may be there in part
    # each rank that begins the next knows that the one before is whole
    memory.take(PartSaved(2, 8, 0, 2, 0, ""))
    memory.close()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_rank_writes_its_two_files_again_whatever_size_its_state_has(
    tmp_path, monkeypatch, on_gpu
):
    if on_gpu:  # A thread writes a copy of the state on the GPU.
        monkeypatch.setattr(
            "flyte_ddp.checkpoints.store.find_tensors",
            lambda state: [((), SimpleNamespace(is_cuda=True))],
        )
    memory = NodeMemory()
    memory.begin(0, BOTH)

    slots = Slots(memory.slots_of(0), 0, memory.take, False, lambda: None)
    store = CheckpointStore(str(tmp_path), 1, slots=slots)
    for step, size in enumerate((9, 3 << 20, 2 << 20, 5, 3 << 20, 1 << 20), 1):
        weight = torch.randn(size, requires_grad=True)
        store.save(
            {"progress": {"step": step}, "weight": weight},
            step,
            False,
            to_store=step % 2 == 0,
            to_memory=True,
        )
        store.wait()
        if step == 1:
            assert (
                bool(store.staging._free) is on_gpu
            )  # The store's states alone are copied on a CPU.
        part = max(memory._parts.values(), key=lambda part: part.turn)
        assert check_file(part.file.path) == (part.num_bytes, part.checksum)
        found = torch.load(part.file.path, weights_only=True)
        ((_, _, values),) = found["pieces"]
        assert found["values"]["progress"]["step"] == step
        assert torch.equal(values, weight)
        assert not values.requires_grad
    assert stored_steps(str(tmp_path)) == [6]
    memory.close()


def test_what_does_not_fit_into_memory_is_not_kept_there_and_one_line_says_so(monkeypatch, caplog):
    process = SimpleNamespace(
        node=dataclasses.replace(NODE, num_nodes=2), slots=[object()], job=JOB
    )
    # a fifth time for the copy that is written
    for num_bytes, is_kept in ((62 << 20, True), (58 << 20, False)):
        monkeypatch.setattr(memory_interval, "free_memory", lambda num_bytes=num_bytes: num_bytes)
        interval = MemoryInterval(5, process, ALONE, lambda: 12 << 20)
        due = [step for step in range(1, 16) if interval.is_due(step)]
        assert due == ([5, 10, 15] if is_kept else [])
        assert interval.is_on is is_kept
    lacking = "expected 0.06 GiB of free memory on each node, got 0.06 GiB"
    assert caplog.messages == [f"memory_interval: no state is kept in memory: {lacking}"]


def test_an_automatic_interval_costs_a_hundredth_of_the_time_and_follows_what_is_measured(
    monkeypatch,
):
    now = 100.0
    monkeypatch.setattr(memory_interval.time, "perf_counter", lambda: now)
    monkeypatch.setattr(memory_interval, "free_memory", lambda: 1 << 40)
    process = SimpleNamespace(node=NODE, slots=[object()], job=JOB)
    interval, due = MemoryInterval(-1, process, ALONE, lambda: 8), []
    for step in range(1, 400):
        now += 1.0 if step < 250 else 4.0
        if interval.is_due(step):
            started, is_kept = now, step != 3  # the one before it was not complete
            due.append(step)
            now += 0.875 if len(due) < 4 else 0.25  # new memory is slower
            interval.measure(started, is_kept)
    assert due[:7] == [2, 3, 4, 5, 25, 50, 75]
    assert due[-3:] == [385, 392, 399]
    assert interval.steps == 7
    process.job = dataclasses.replace(JOB, ran_out_of_memory=True)
    assert MemoryInterval(-1, process, ALONE, lambda: 8).steps == 0


def test_a_state_after_the_best_epoch_is_left_out_until_the_store_has_that_one(
    tmp_path, monkeypatch
):
    class Slots:
        is_ready = True

        def begin(self):
            pass

        def write(self, step, num_parts, save):
            kept.append(step)

    kept, store = [], CheckpointStore(str(tmp_path), 1, slots=Slots())
    store.returns_to_best, may_write = True, threading.Event()
    sink = store.queue.writer.sink
    write = sink.write
    monkeypatch.setattr(sink, "write", lambda *arguments: (may_write.wait(), write(*arguments)))
    store.save({"progress": {}}, 1, True, to_store=True, to_memory=True)
    assert store.save({"progress": {}}, 2, False, to_store=False, to_memory=True) is None
    may_write.set()
    store.wait()
    store.save({"progress": {}}, 3, False, to_store=False, to_memory=True)
    assert kept == [1, 3]
