"""Mixtures by a schedule: exact counts in each global batch, and each source in its own order."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyte_ddp.data import Mixture, Shards, loader
from flyte_ddp.data.mixture import SLACK
from flyte_ddp.data.order import EpochOrder
from flyte_ddp.data.schedule import BatchCounts, Schedule, ScheduledOrder, drop_ahead
from flyte_ddp.data.shares import UNIT, read_shares
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.plan import Share
from tests.support.errors import raises_one_line
from tests.support.image_store import write_tree
from tests.support.shards import make_tree

NAMES = ["a", "b", "c"]
WEIGHTS = st.lists(st.sampled_from([0, 0, 0.01, 1, 2, 7]), min_size=3, max_size=3).filter(any)


def scheduled(parts):
    """The schedule of pairs of a distance from the change before, and three weights."""
    steps = itertools.accumulate((distance for distance, _ in parts[1:]), initial=0)
    shares = [
        read_shares("", dict(zip(NAMES, each, strict=True)), NAMES, minimum=0) for _, each in parts
    ]
    return Schedule(tuple(steps), tuple(shares))


def open_epochs(lengths, counts, seed, lanes, num_epochs):
    def make(source, epoch):
        return EpochOrder(np.array([lengths[source]]), seed, epoch, lanes, 9)

    return [
        ScheduledOrder(make, lengths, counts, seed, epoch, lanes) for epoch in range(num_epochs)
    ]


def list_steps(orders, counts):
    """The samples of each step of a run."""
    for order in orders:
        for first in range(0, counts.num_samples, counts.batch_size):
            yield order.batch(first, counts.batch_size).tolist()


@given(
    lengths=st.lists(st.integers(1, 60), min_size=3, max_size=3),
    parts=st.lists(st.tuples(st.integers(1, 9), WEIGHTS), min_size=1, max_size=4),
    batch_size=st.integers(1, 40),
    num_samples=st.integers(1, 200),
    lanes=st.integers(1, 9),
    seed=st.integers(0, 2**64),
)
@settings(max_examples=60, deadline=None, derandomize=True)
@pytest.mark.long
def test_each_batch_has_exact_counts_and_each_source_its_own_order(
    lengths, parts, batch_size, num_samples, lanes, seed
):
    schedule = scheduled(parts)
    counts = BatchCounts(schedule, batch_size, num_samples)
    num_read, in_part, exact = np.zeros(3, int), np.zeros(3), np.zeros(3)
    orders = open_epochs(lengths, counts, seed, lanes, 4)
    total, own = sum(lengths), []
    for source, length in enumerate(lengths):
        epochs = range(1 + 4 * num_samples // length)
        starts = sum(lengths[:source]) + total * np.arange(len(epochs))
        orders_alone = [EpochOrder(np.array([length]), seed, each, lanes, 9) for each in epochs]
        alone = np.stack([each.samples(np.arange(length)) for each in orders_alone])
        own.append((alone + starts[:, None]).flatten())
    seen = Counter()
    for step, batch in enumerate(list_steps(orders, counts)):
        if step in schedule.steps:  # a block ends at a change
            in_part, exact = np.zeros(3), np.zeros(3)
        shares = np.array(schedule.shares[np.searchsorted(schedule.steps, step, "right") - 1])
        sources = np.searchsorted(np.cumsum(lengths), np.array(batch) % total, "right")
        found = np.bincount(sources, minlength=3)
        assert (abs(found - len(batch) * shares / UNIT) < 1).all()
        assert not found[shares == 0].any()
        in_part, exact = in_part + found, exact + len(batch) * shares / UNIT
        assert (abs(in_part - exact) < 2 * SLACK).all()
        for source, number in enumerate(num_read):
            expected = own[source][number : number + found[source]]
            assert sorted(expected) == sorted(np.array(batch)[sources == source])
        num_read += found
        seen.update(batch)
    assert set(seen.values()) == {1}, "a sample that comes again has another number"


@given(
    parts=st.lists(st.tuples(st.integers(1, 5), WEIGHTS), min_size=1, max_size=3),
    ahead=st.lists(st.tuples(st.integers(1, 3), WEIGHTS), max_size=2),
    num_steps=st.integers(0, 12),
    batch_size=st.integers(4, 30),
    seed=st.integers(0, 2**64),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_weights_that_lie_ahead_change_no_earlier_step(parts, ahead, num_steps, batch_size, seed):
    lengths, schedule = [20, 33, 50], scheduled(parts)
    past = [step for step in schedule.steps if step < num_steps]
    steps = itertools.accumulate((distance for distance, _ in ahead[1:]), initial=num_steps)
    changed = Schedule(
        (*past, *itertools.islice(steps, len(ahead))),
        (*schedule.shares[: len(past)], *scheduled(ahead).shares[: len(ahead)]),
    )
    found = []
    for each in (schedule, changed):
        counts = BatchCounts(each, batch_size, 77)
        if each.steps:
            steps = list_steps(open_epochs(lengths, counts, seed, 4, 5), counts)
            found.append(list(itertools.islice(steps, num_steps)))
    assert found[0] == found[-1]
    described = [drop_ahead(each.describe(NAMES), num_steps) for each in (schedule, changed)]
    assert described[0] == described[1]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_rank_needs_few_lanes_of_each_source(num_ranks):
    lengths, lanes = [9000, 20_000, 30_000], 32
    schedule = scheduled([(0, [1, 2, 5]), (40, [5, 2, 1])])
    counts = BatchCounts(schedule, 96, 96 * 80)
    (order,) = open_epochs(lengths, counts, 3, lanes, 1)
    needed = [set() for _ in range(num_ranks)]
    ends = np.cumsum(lengths)
    own = [EpochOrder(np.array([each]), 3, 0, lanes, 9) for each in lengths]
    lane_of = [np.argsort(each.samples(np.arange(each.num_samples))) % lanes for each in own]
    for batch in list_steps([order], counts):
        for rank in range(num_ranks):
            for number in Share(rank, num_ranks).cut(batch):
                source = int(np.searchsorted(ends, number, side="right"))
                start = ends[source] - lengths[source]
                needed[rank].add((source, int(lane_of[source][number - start])))
    most = max(len(each) for each in needed) / (3 * lanes)
    assert most <= 1 / num_ranks + 2 / lanes  # docs/streams.md states this bound.


def numbered(name):
    return {"a": from_a, "b": from_b}[name]


def from_a(fields):
    return ["a", int(fields["number"])]


def from_b(fields):
    return ["b", int(fields["number"])]


def count_sources(step):
    return Counter(source for source, _ in step)


def make_sources(directory, sizes=(30, 14), **options):
    sources = {}
    for name, size in zip("ab", sizes, strict=True):
        tree, _ = make_tree("jsonl", [size // 2] * 2)
        place = write_tree(tree, directory / name)
        sources[name] = Shards(place, transform=numbered(name), **options)
        sources[name].prepare()
    return sources


SCHEDULE = [(0, {"a": 1, "b": 0}), (3, {"a": 1, "b": 1}), (6, {"a": 0, "b": 1})]


def test_a_source_starts_late_and_begins_again_in_its_next_epochs_order(tmp_path):
    sources = make_sources(tmp_path)
    made = loader(Mixture(sources, schedule=SCHEDULE, num_samples=20), 4, epochs=2, collate_fn=list)
    steps = [batch for _ in range(2) for batch in made]
    assert len(steps) == 10
    found = [count_sources(step) for step in steps]
    assert found == [{"a": 4}] * 3 + [{"a": 2, "b": 2}] * 3 + [{"b": 4}] * 4
    own = []
    window = made.batches.dataset.describe_order(4, 0)["b: window"]
    for epoch in range(2):
        order = dataclasses.replace(sources["b"], lanes=8, window=window).order(4, 0, epoch)
        own += order.samples(np.arange(14)).tolist()
    read = []
    for step in steps[3:]:
        read.append(sorted(number for source, number in step if source == "b"))
    ends = np.cumsum([len(each) for each in read])
    assert read == [sorted(each) for each in np.split(np.array(own[: ends[-1]]), ends[:-1])]


def state_after(data, num_steps, **options):
    made = loader(data, 4, collate_fn=list, **options)
    for _ in range(num_steps):
        next(iter(made))
    return json.loads(json.dumps(made.state_dict()))


@pytest.mark.parametrize("num_steps", [2, 5, 7])
def test_a_schedule_may_change_for_steps_that_lie_ahead(num_steps, tmp_path):
    data = Mixture(make_sources(tmp_path), schedule=SCHEDULE, num_samples=20)
    state = state_after(data, num_steps)
    weights = {"a": 2, "b": 6}  # step 5 is the first of epoch 1
    past = [entry for entry in SCHEDULE if entry[0] < num_steps]
    made = loader(
        dataclasses.replace(data, schedule=[*past, (num_steps, weights)]), 4, collate_fn=list
    )
    made.load_state_dict(state)
    steps = list(itertools.chain(made, made))[:3]
    assert [count_sources(step)["b"] for step in steps] == [3, 3, 3]
    for schedule in (past[:-1], [*past[:-1], (past[-1][0], {"a": 1, "b": 4})]):
        if schedule:
            other = loader(dataclasses.replace(data, schedule=schedule), 4)
            match = f"loader: weights from step {past[-1][0]}: expected a .*, with which the state"
            with raises_one_line(ConfigError, match=match):
                other.load_state_dict(state)


@pytest.mark.parametrize("num_steps", [2, 5])
def test_a_state_of_another_order_is_one_line(num_steps, tmp_path):
    sources = make_sources(tmp_path / "one")
    data = Mixture(sources, schedule=SCHEDULE, num_samples=20)
    state, grown = state_after(data, num_steps), make_sources(tmp_path / "two", (32, 14))
    fixed = Mixture(sources, {"a": 1, "b": 1}, lanes=8)
    for other, size, expected in (
        (dataclasses.replace(data, sources=grown), 4, "a: checksum of the shards: expected"),
        (dataclasses.replace(data, lanes=4), 4, "lanes: expected 8, .* got 4"),
        (dataclasses.replace(data, num_samples=40), 4, "samples of an epoch: expected 20, .* 40"),
        (data, 5, "global batch size: expected 4, .* got 5"),
        (fixed, 4, "global batch size: expected 4, .* got None" if num_steps == 2 else None),
    ):
        made = loader(other, size)
        if expected:
            with raises_one_line(ConfigError, match=f"loader: {expected}"):
                made.load_state_dict(state)
        else:  # an epoch of fixed proportions begins anew
            made.load_state_dict(state)
    with raises_one_line(ConfigError, match="loader: shares: expected .* got None"):
        loader(data, 4).load_state_dict(state_after(fixed, 1))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"schedule": []}, r"schedule: expected pairs of a step .*, got \[\]"),
        ({"schedule": {0: {"a": 1, "b": 1}}}, "schedule: expected pairs of a step"),
        ({"schedule": [3]}, r"schedule\[0\]: expected a step and its weights, got 3"),
        ({"schedule": [(1, {"a": 1, "b": 1})]}, r"schedule\[0\]: step: expected 0, got 1"),
        ({"schedule": [(0.5, {"a": 1, "b": 1})]}, r"schedule\[0\]: step: expected a whole number"),
        (
            {"schedule": [*SCHEDULE, (6, {"a": 1, "b": 1})]},
            r"schedule\[3\]: step: expected one after 6, got 6",
        ),
        (
            {"schedule": [(0, {"a": 1, "c": 1})]},
            r"schedule\[0\]: weights: expected one for each of a, b, got a, c",
        ),
        ({"schedule": [(0, 1)]}, r"schedule\[0\]: weights: expected one for each of a, b, got 1"),
        (
            {"schedule": [(0, {"a": 1, "b": -1})]},
            r"schedule\[0\]: weights\['b'\]: expected .* at least 0, got -1",
        ),
        (
            {"schedule": [(0, {"a": 1, "b": 1e-9})]},
            r"schedule\[0\]: weights\['b'\]: expected at least 1e-06 of their sum",
        ),
        (
            {"schedule": [SCHEDULE[0], (2, {"a": 0, "b": 0})]},
            r"schedule\[1\]: weights: expected a number above 0, got 0 for each source",
        ),
        ({"proportions": {"a": 1, "b": 1}}, "proportions: expected none beside a schedule"),
        ({"stop": "all_exhausted"}, "stop: expected none beside a schedule"),
        ({"num_samples": 0}, "num_samples: expected a whole number of at least 1, got 0"),
        ({"schedule": None}, "proportions: expected one for each of a, b, got None"),
        (
            {"schedule": None, "num_samples": 3, "proportions": {"a": 1, "b": 1}},
            "num_samples: expected None without a schedule, got 3",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_one_line(arguments, expected):
    sources = {"a": Shards("/data"), "b": Shards("/data")}
    with raises_one_line(ConfigError, match=expected):
        Mixture(sources, **{"schedule": SCHEDULE, **arguments})


def test_data_without_steps_have_no_schedule(tmp_path):
    data = Mixture(make_sources(tmp_path), schedule=SCHEDULE)
    assert len(data) == 44
    with raises_one_line(ConfigError, match="schedule: expected proportions for held-out data"):
        next(iter(loader(data, 4, shuffle=False)))


def test_a_source_with_lanes_of_its_own_is_one_line():
    with raises_one_line(ConfigError, match=r"sources\['a'\]: lanes: expected None, .* got 4"):
        Mixture({"a": Shards("/data", lanes=4)}, {"a": 1})
