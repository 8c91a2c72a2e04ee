"""Batches of shards: each sample once, the same at any number of ranks, also after a restart in
mid-epoch.
"""

from __future__ import annotations

import copy
import random
import tempfile
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from flyte_ddp import events, session
from flyte_ddp.data import Shards
from flyte_ddp.errors import ConfigError, DataError
from tests.support.dask_runs import events_of
from tests.support.gang import session_of
from tests.support.image_store import write_tree
from tests.support.runs import new_run
from tests.support.shards import FORMATS, make_tree

EPOCH = 2


def to_row(fields):
    draws = random.random(), numpy.random.rand(), torch.rand(()).item()
    return torch.tensor([int(fields["number"]), *draws], dtype=torch.float64)


def prepared(directory, kind="jsonl", sizes=None, **options):
    tree, read = make_tree(kind, *([sizes] if sizes else []))
    shards = Shards(write_tree(tree, directory), transform=to_row, reader=read, **options)
    shards.prepare()
    return shards


def read(data, rank, world_size, size, stop=None, position=None, epoch=EPOCH, **options):
    """([(rows, weight)] of one rank from `position` on, up to `stop` batches; its position)."""
    current, _ = session_of(rank, world_size, HashStore())
    if position:
        current._position = current._resumed = copy.deepcopy(position)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "_current", current)
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world_size))
        if stop == 0:
            return [], None
        for rows, weight in session.batches(data, size, epoch, **options):
            found.append(([tuple(row) for row in rows.tolist()], weight))
            if len(found) == stop:
                break
    return found, current._position


def batches_of(ranks):
    """The batches that the ranks' parts make, each with the weights of the parts checked."""
    whole = []
    for parts in zip(*ranks, strict=True):
        batch = [row for rows, weight in parts if weight for row in rows]
        # With DDP's mean over the ranks it is the mean of the batch.
        for rows, weight in parts:
            assert weight == pytest.approx(len(rows) * len(parts) / len(batch) if weight else 0)
        whole.append(batch)
    return whole


@pytest.mark.parametrize("kind", FORMATS)
def test_an_epoch_goes_on_at_another_number_of_ranks_for_each_format(kind, tmp_path):
    data = prepared(tmp_path, kind, lanes=8, window=5)
    (alone, _) = read(data, 0, 1, 12)
    expected = batches_of([alone])
    assert sorted(int(row[0]) for batch in expected for row in batch) == list(range(100))
    assert len({row[1:] for batch in expected for row in batch}) == 100  # each its own draws
    begun = [read(data, rank, 2, 12, stop=3) for rank in range(2)]
    parts = [
        read(data, rank, 3, 12, position=begun[0][1], num_workers=rank)[0] for rank in range(3)
    ]
    assert batches_of([found for found, _ in begun]) + batches_of(parts) == expected


@given(
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(any),
    lanes=st.integers(1, 9),
    window=st.integers(1, 30),
    size=st.integers(4, 20),
    stops=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None)
def test_any_chain_of_stops_and_numbers_of_ranks_reads_each_sample_once(
    sizes, lanes, window, size, stops
):
    with tempfile.TemporaryDirectory() as directory:
        data = prepared(Path(directory), sizes=sizes, lanes=lanes, window=window)
        expected = batches_of([read(data, 0, 1, size)[0]])
        found, position = [], None
        for stop, world_size in [*stops, (None, 3)]:
            parts = [
                read(data, rank, world_size, size, stop, position) for rank in range(world_size)
            ]
            found += batches_of([batches for batches, _ in parts])
            position = parts[0][1] or position
            if position and position["is_over"]:
                break
        assert found == expected
        assert sorted(int(row[0]) for batch in found for row in batch) == list(range(sum(sizes)))


def test_shards_that_were_added_are_read_from_the_next_epoch_on(tmp_path, caplog):
    sizes = [10] * 9
    data = prepared(tmp_path, sizes=sizes)
    expected = batches_of([read(data, 0, 1, 8)[0]])
    position = read(data, 0, 1, 8, stop=3)[1]
    data = prepared(tmp_path, sizes=[*sizes, 30])
    assert len(data) == 120
    rest = batches_of([read(data, 0, 1, 8, position=position)[0]])
    assert rest == expected[3:]
    assert "has 1 shards more than its checkpoint: they are read from the next epoch" in caplog.text
    later = batches_of([read(data, 0, 1, 8, position=position, epoch=EPOCH + 1)[0]])
    assert sorted(int(row[0]) for batch in later for row in batch) == list(range(120))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"sizes": [10] * 8}, "number of shards: expected 9, with which the .* got 8: other data"),
        ({"sizes": [*[10] * 8, 11]}, "checksum of the shards: expected"),
        ({"order": 1}, "checksum of the order: expected"),
        ({"seed": 1}, "seed: expected 0"),
        ({"lanes": 16, "window": 3}, None),  # those of the checkpoint count
    ],
)
def test_other_shards_or_another_order_than_the_checkpoints_are_refused(change, expected, tmp_path):
    sizes, seed = [10] * 9, change.pop("seed", 0)
    data = prepared(tmp_path / "a", sizes=sizes)
    whole = batches_of([read(data, 0, 1, 8)[0]])
    position = read(data, 0, 1, 8, stop=3)[1]
    if change.pop("order", 0):
        position["sets"][0]["order"]["checksum of the order"] += 1
    data = prepared(tmp_path / "b", sizes=change.pop("sizes", sizes), **change)
    if expected is None:
        assert batches_of([read(data, 0, 1, 8, position=position)[0]]) == whole[3:]
        return
    with pytest.raises(ConfigError, match=f"session.batches: {expected}"):
        read(data, 0, 1, 8, position=position, seed=seed)


def test_ranks_with_other_shards_are_refused(tmp_path, monkeypatch):
    store = HashStore()
    for rank in range(2):
        data = prepared(tmp_path / str(rank), sizes=[10] * (8 + rank))
        monkeypatch.setattr(session, "_current", session_of(rank, 2, store)[0])
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        batches = iter(session.batches(data, 8, 0))
        if rank == 0:
            next(batches)
            continue
        with pytest.raises(ConfigError, match="batches: number of shards: .* got 9 on rank 1"):
            next(batches)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_read_ends_the_epoch_in_one_line(num_workers, tmp_path):
    tree, _ = make_tree("jsonl")
    tree["shard-0004.jsonl"] = tree["shard-0004.jsonl"].replace(b'{"number": 30', b'["number": 30')
    data = Shards(write_tree(tree, tmp_path), transform=to_row)
    data.prepare()
    with pytest.raises(DataError, match="shard-0004.jsonl: sample 5 cannot be read") as caught:
        read(data, 0, 1, 12, num_workers=num_workers)
    assert "\n" not in str(caught.value)


def test_a_cache_that_is_too_small_for_the_windows_is_refused_before_the_first_step(tmp_path):
    data = prepared(
        tmp_path / "data", "own", lanes=4, cache_gib=1e-7, cache_dir=f"{tmp_path}/cache"
    )
    with pytest.raises(ConfigError, match="cache_gib: expected at least .*, for windows of"):
        read(data, 0, 1, 12)


def test_held_out_shards_keep_their_order(tmp_path):
    data = prepared(tmp_path)
    found, _ = read(data, 0, 1, 12, epoch=None)
    assert [int(row[0]) for rows, _ in found for row in rows] == list(range(100))


@pytest.mark.parametrize("data_workers", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_rank_of_a_recipe_on_shards_changes_nothing(data_workers, tmp_path):
    states = []
    for name in ("undisturbed", "killed"):
        faults = tmp_path / name / "faults"
        faults.mkdir(parents=True)
        if name == "killed":
            (faults / "1-kill-9").touch()
        run = new_run(tmp_path / name, "tests.support.promises.Sharded")
        options = {"data_workers": data_workers, "checkpoint_interval": 2}
        run.train(2, max_restarts=2, recipe_options={"faults": str(faults)}, **options)
        states.append(run.state())
        assert len(events_of(run, events.AttemptStarted)) == 1 + (name == "killed")
    torch.testing.assert_close(*states, rtol=0, atol=0)
