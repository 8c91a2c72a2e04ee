"""Batches of shards: each sample once, the same at any number of ranks, also after a restart in
mid-epoch.
"""

from __future__ import annotations

import copy
import dataclasses
import queue
import random
import re
import tempfile
import threading
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from flyte_ddp import events, session
from flyte_ddp.data import Mixture, Shards
from flyte_ddp.data.ahead import fetch_ahead
from flyte_ddp.data.readers import HEAD
from flyte_ddp.data.source import Source
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.storage import Storage
from tests.support.dask_runs import events_of
from tests.support.emulators import s3, s3_bucket  # noqa: F401 - fixtures
from tests.support.gang import session_of
from tests.support.image_store import write_tree
from tests.support.runs import new_run
from tests.support.shards import FORMATS, make_tree

EPOCH = 2


@pytest.fixture(autouse=True, scope="module")
def _temporary_directory(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("tempfile.tempdir", None)
        yield


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
        current.position.resume(copy.deepcopy(position))
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
                return found, current.position.current
    return found, current.position.current


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
@settings(max_examples=40, deadline=None, derandomize=True)
@pytest.mark.long
def test_any_chain_of_stops_and_numbers_of_ranks_reads_each_sample_once(
    sizes, lanes, window, size, stops
):
    # A thread that fetches ahead may still write to the folder.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
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


@pytest.mark.parametrize("kind", ["tar", "jsonl", "mds", "parquet"])
def test_a_resumed_run_reads_the_same_by_parts_and_no_part_that_was_consumed(
    kind, tmp_path, monkeypatch
):
    data = prepared(tmp_path / "data", kind, sizes=[40] * 6, lanes=2, window=30)
    expected = batches_of([read(data, 0, 1, 12)[0]])
    position = read(data, 0, 1, 12, stop=10)[1]
    monkeypatch.setattr(Source, "local_path", lambda *_: "")  # A store has no local paths.
    # The index was made on a disk, so it has no versions as a store gives them.
    monkeypatch.setattr("flyte_ddp.data.index._fill_versions", lambda source, index: index)
    monkeypatch.setattr("flyte_ddp.data.readers.PART_BYTES", 1)  # a sample or a row group is a part
    size, parts = 8 if kind == "parquet" else 1, []
    for rank in range(3):
        cache = tmp_path / str(rank)
        late = dataclasses.replace(data, cache_dir=str(cache))
        found, _ = read(late, rank, 3, 12, position=position, num_workers=rank % 2)
        parts.append(found)
        wanted = {int(row[0]) // size for rows, _ in found for row in rows}
        heads = [late._cache._place(late._index.entry(n), HEAD)[0] for n in range(6)]
        made = {str(file) for file in cache.iterdir() if not file.suffix}
        assert len(made - set(heads)) == len(wanted)
    assert batches_of(parts) == expected[10:]


@given(
    kind=st.sampled_from(["tar", "jsonl", "mds", "parquet"]),
    sizes=st.lists(st.integers(0, 20), min_size=1, max_size=8).filter(any),
    part_bytes=st.integers(1, 2000),
    stop=st.integers(1, 4),
    world_size=st.integers(1, 3),
)
@settings(max_examples=24, deadline=None, derandomize=True)
@pytest.mark.long
def test_parts_of_any_size_have_the_same_samples(kind, sizes, part_bytes, stop, world_size):
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        options = {"cache_dir": f"{directory}/whole", "lanes": 2, "window": 7}
        data = prepared(Path(directory, "data"), kind, sizes, **options)
        expected = batches_of([read(data, 0, 1, 6)[0]])
        position = read(data, 0, 1, 6, stop=stop)[1]
        patch.setattr("flyte_ddp.data.readers.PART_BYTES", part_bytes)
        patch.setattr(Source, "local_path", lambda *_: "")  # A store has no local paths.
        late = dataclasses.replace(data, cache_dir=f"{directory}/parts")
        ranks = [read(late, rank, world_size, 6, None, position) for rank in range(world_size)]
        assert batches_of([found for found, _ in ranks]) == expected[stop:]


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
        ({"lanes": 16, "window": 3}, None),  # The lanes and window of the checkpoint count.
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


def test_shards_that_changed_between_two_epochs_are_refused_and_those_added_are_read(tmp_path):
    sizes = [10] * 9
    data = prepared(tmp_path / "a", sizes=sizes)
    _, position = read(data, 0, 1, 8)
    assert position["is_over"]
    options = {"position": position, "epoch": EPOCH + 1}
    assert len(read(data, 0, 1, 8, **options)[0]) == 12
    assert len(read(prepared(tmp_path / "b", sizes=[*sizes, 30]), 0, 1, 8, **options)[0]) == 15
    for other, expected in (([10] * 8, "number of shards"), ([*[10] * 8, 11], "checksum of the")):
        data = prepared(tmp_path / str(len(other)), sizes=other)
        with pytest.raises(ConfigError, match=f"session.batches: {expected}"):
            read(data, 0, 1, 8, **options)


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


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_samples_that_are_ignored_keep_their_places_with_weight_0(world_size, tmp_path, caplog):
    def to_odd(fields):
        number = fields["number"]
        if not number % 2 or 30 <= number < 60:
            raise ValueError("an even one")
        return torch.tensor(float(number), dtype=torch.float64)

    tree, _ = make_tree("jsonl")
    shards = Shards(write_tree(tree, tmp_path), transform=to_odd, unreadable="ignore", lanes=5)
    shards.prepare()
    order = [number for batch in order_of(shards, 10) for number in batch]
    expected = []
    for first in range(0, 100, 10):
        batch = order[first : first + 10]
        expected.append(sum(each for each in batch if each % 2 and not 30 <= each < 60) / 10)
    means = [0.0] * 10
    for rank in range(world_size):
        for number, (values, weight) in enumerate(mean_batches(shards, rank, world_size, 10)):
            means[number] += weight * values / world_size
    assert means == pytest.approx(expected)
    if world_size == 1:  # Otherwise some of it is in the loader processes.
        told = re.findall(r"shard-000\d.jsonl: sample \d+ cannot .*: an even one", caplog.text)
        assert len(told) == 10
    with pytest.raises(DataError, match="an even one"):
        mean_batches(dataclasses.replace(shards, unreadable="fail"), 0, 1, 10)
    tree = {"a.jsonl": tree["shard-0000.jsonl"][:15]}
    shards = Shards(write_tree(tree, tmp_path / "none"), unreadable="ignore")
    shards.prepare()
    with pytest.raises(DataError, match="expected a sample that can be read, got none of 100"):
        mean_batches(shards, 0, 1, 10)


def order_of(shards, size):
    plain = dataclasses.replace(shards, transform=to_row)
    order = []
    for rows, _ in read(plain, 0, 1, size)[0]:
        order.append([int(row[0]) for row in rows])
    return order


def mean_batches(shards, rank, world_size, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(world_size))
        return [
            (float(values.mean()), weight)
            for values, weight in session.batches(shards, size, EPOCH, num_workers=rank % 2)
        ]


@pytest.mark.long
@pytest.mark.parametrize("data_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_recipe_counts_the_samples_that_it_ignores_at_any_number_of_ranks(data_workers, tmp_path):
    states, losses = [], []
    for num_ranks in (1, 2):  # One of two ranks often has no sample of a batch.
        run = new_run(tmp_path / str(num_ranks), "tests.support.promises.Sparse")
        run.train(num_ranks, data_workers=data_workers, epochs=2, global_batch_size=2)
        finished = events_of(run, events.EpochFinished)
        # the last batch has one sample, which both ranks read
        # and the held-out ones, which are the same
        assert {each.num_unreadable for each in finished} <= {2 * 48, 2 * 48 - 1 + num_ranks}
        losses.append([each.test_loss for each in finished])
        states.append(run.state())
    torch.testing.assert_close(*states)
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.long
def test_a_rank_fetches_its_part_of_a_store_once_and_ahead(bucket, s3, tmp_path):  # noqa: F811
    tree, _ = make_tree("tar", [5] * 64)
    place = Storage(bucket)
    for name, contents in tree.items():
        place.write(name, contents)
    options = {"transform": to_row, "lanes": 8, "window": 8}
    Shards(bucket, **options).prepare()
    s3.requests.clear()
    data = [Shards(bucket, cache_dir=f"{tmp_path}/{rank}", **options) for rank in range(2)]
    parts = [read(data[rank], rank, 2, 16)[0] for rank in range(2)]
    assert sorted(int(row[0]) for batch in batches_of(parts) for row in batch) == list(range(320))
    fetched = [path for method, path, *_ in s3.requests if method == "GET" and ".tar" in path]
    assert len(fetched) <= 2 * 64 * (1 / 2 + 2 / 8) * (1 + 8 / 64)
    assert max(Counter(fetched).values()) <= 2  # Each rank fetches once.
    # nothing that was consumed is fetched again
    _, position = read(data[0], 0, 1, 16, stop=12)
    s3.requests.clear()
    late = Shards(bucket, cache_dir=f"{tmp_path}/late", **options)
    read(late, 0, 1, 16, position=position)
    fetched = {path for method, path, *_ in s3.requests if method == "GET" and ".tar" in path}
    assert len(fetched) <= 64 * (1 - 12 / 20) + 8 * (2 + 8 / 5)


def test_what_is_fetched_ahead_is_a_few_items_further_at_most():
    consumed, seen = [], queue.SimpleQueue()
    items = fetch_ahead(range(20), range(20), lambda item: seen.put((item, len(consumed))), 3)
    for item in items:
        if item == 0:  # Three items are fetched before the second one is asked for.
            found = [seen.get(timeout=60) for _ in range(3)]
        consumed.append(item)
    assert sorted(found) == [(0, 0), (1, 0), (2, 0)]  # Several threads fetched these.
    while not seen.empty():
        number, count = seen.get()
        assert number - count <= 3
    assert consumed == list(range(20))


def test_several_items_are_fetched_at_once():
    two, is_met = threading.Barrier(2), threading.Event()
    items = fetch_ahead(range(2), range(2), lambda _: two.wait(60) in (0, 1) and is_met.set(), 2)
    next(items)
    assert is_met.wait(60)


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


@pytest.mark.long
@pytest.mark.parametrize("data_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_a_mixture_goes_on_at_another_number_of_ranks(stop, tmp_path, caplog):
    def mixture(grown=()):
        sources = {
            "code": prepared(tmp_path / "code", sizes=[10] * 9),
            "web": prepared(tmp_path / "web", "tar", sizes=[20] * 12 + list(grown), window=16),
        }
        return Mixture(sources, {"code": 1, "web": 3}, stop, lanes=4)

    data = mixture()
    expected = batches_of([read(data, 0, 1, 24)[0]])
    assert sum(map(len, expected)) == len(data)
    draws = [row[1:] for batch in expected for row in batch]
    assert len(set(draws)) == len(draws)  # A sample that comes again gets a new draw.
    begun = [read(data, rank, 2, 24, stop=3) for rank in range(2)]
    data = mixture(grown=[7])  # The next epoch has more data.
    parts = [
        read(data, rank, 3, 24, position=begun[0][1], num_workers=rank)[0] for rank in range(3)
    ]
    assert batches_of([found for found, _ in begun]) + batches_of(parts) == expected
    assert "web/ has 1 shards more than its checkpoint" in caplog.text
    web = dataclasses.replace(data.sources["web"], window=5)
    # The windows are the checkpoint's.
    other = dataclasses.replace(data, sources={**data.sources, "web": web})
    assert batches_of([read(other, 0, 1, 24, position=begun[0][1])[0]]) == expected[3:]
    for change, what in (
        ({"proportions": {"code": 1, "web": 2}}, "shares: expected"),
        (
            {"sources": dict(reversed(data.sources.items())), "proportions": {"code": 3, "web": 1}},
            "sources: expected",
        ),
        ({}, "version of the order: expected 1, .* got 2: end this run with the flyte-ddp that"),
    ):
        position = copy.deepcopy(begun[0][1])
        if not change:
            position["sets"][0]["order"] = as_of_version_1(position["sets"][0]["order"])
        other = dataclasses.replace(data, **change)
        with pytest.raises(ConfigError, match=f"session.batches: {what}"):
            read(other, 0, 1, 24, position=position)


def to_far_row(fields):
    return to_row(fields) + 1000


def test_a_schedule_goes_on_at_another_number_of_ranks(tmp_path):
    web = prepared(tmp_path / "web", "tar", sizes=[20] * 12)
    sources = {
        "code": prepared(tmp_path / "code", sizes=[10] * 9),
        "web": dataclasses.replace(web, transform=to_far_row),
    }
    schedule = [(0, {"code": 1, "web": 0}), (6, {"code": 1, "web": 3})]
    data = Mixture(sources, schedule=schedule, num_samples=90, lanes=4)

    def count_web(batches):
        found = []
        for batch in batches:
            found.append(sum(row[0] >= 1000 for row in batch))
        return found

    expected = batches_of([read(data, 0, 1, 24, epoch=1)[0]])  # steps 4 to 7
    assert count_web(expected) in ([0, 0, 18, 13], [0, 0, 18, 14])
    begun = [read(data, rank, 2, 24, stop=3, epoch=1) for rank in range(2)]
    position = begun[0][1]
    parts = [
        read(data, rank, 3, 24, position=position, num_workers=rank, epoch=1)[0]
        for rank in range(3)
    ]
    assert batches_of([found for found, _ in begun]) + batches_of(parts) == expected
    ahead = dataclasses.replace(data, schedule=[*schedule, (7, {"code": 0, "web": 1})])
    assert count_web(batches_of([read(ahead, 0, 1, 24, position=position, epoch=1)[0]])) == [18]
    past = dataclasses.replace(data, schedule=[schedule[0], (5, {"code": 0, "web": 1})])
    with pytest.raises(ConfigError, match="session.batches: weights from step 6: expected code"):
        read(past, 0, 1, 24, position=position, epoch=1)


def as_of_version_1(order):
    """What a mixture's order was described with before the windows of its sources were."""
    names = ("number of shards", "checksum of the shards")
    kept = [f"{source}: {name}" for source in ("code", "web") for name in names]
    kept += ["shares", "stop", "lanes", "version of the order", "checksum of the order"]
    return {name: order[name] for name in kept} | {"version of the order": 1}


def test_the_windows_of_a_mixture_of_a_recipe_are_facts_of_its_checkpoint(tmp_path):
    described = [
        Mixture(
            {"a": prepared(tmp_path / "a", window=window), "b": prepared(tmp_path / "b")},
            {"a": 1, "b": 1},
        ).describe_order(12, 0)
        for window in (5, 6)
    ]
    differing = {name for name in described[0] if described[0][name] != described[1][name]}
    assert "a: window" in differing


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"proportions": {"a": 1, "c": 1}}, "proportions: expected one for each of a, b, got a, c"),
        ({"proportions": {"a": 1, "b": 0}}, r"proportions\['b'\]: expected .* got 0"),
        ({"stop": "never"}, 'stop: expected "first_exhausted" or "all_exhausted", got'),
        ({"lanes": 200}, "sources: expected more samples for 200 lanes, got 100 of a, 100 of b"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(arguments, expected, tmp_path):
    sources = {name: prepared(tmp_path / name) for name in ("a", "b")}
    with pytest.raises(ConfigError, match=expected):
        len(Mixture(sources, **{"proportions": {"a": 1, "b": 1}, **arguments}))
