"""The order of shards' samples: each once, the same for any ranks, and few shards for each."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flyte_ddp.data import Mixture, Shards
from flyte_ddp.data.mixture import SLACK, MixedOrder
from flyte_ddp.data.order import EpochOrder, choose_lanes, choose_window
from flyte_ddp.data.permutation import derive_key, permute
from flyte_ddp.data.shares import GOLDEN, UNIT, sum_floors
from flyte_ddp.errors import ConfigError

ORDERS = st.builds(
    lambda sizes, **fields: EpochOrder(np.array(sizes, np.int64), **fields),
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30),
    seed=st.integers(0, 2**64),
    epoch=st.integers(0, 100),
    lanes=st.integers(1, 16),
    window=st.integers(1, 60),
)


def samples(order, times=None):
    """The samples of some times, all by default."""
    times = np.arange(order.num_samples) if times is None else times
    return order.samples(times).tolist()


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_permutation_has_each_number_once_wherever_one_looks(size, seed):
    key = derive_key(seed)
    whole = permute(np.arange(size), size, key)
    assert sorted(whole) == list(range(size))
    assert permute(np.array([size - 1]), size, key) == whole[-1:]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_each_permutation_of_few_numbers_is_as_likely(size):
    num_keys = 500 * np.prod(np.arange(1, size + 1))
    keys = derive_key(np.arange(num_keys))
    columns = [permute(np.array(place), size, keys) for place in range(size)]
    found = collections.Counter(map(tuple, np.stack(columns, axis=1).tolist()))
    assert len(found) == num_keys // 500
    # the chance of more than six standard deviations is below 10^-8
    assert all(abs(count - 500) < 6 * 500**0.5 for count in found.values())


@given(order=ORDERS)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_each_sample_is_in_an_epoch_once(order):
    assert sorted(samples(order)) == list(range(order.num_samples))


@given(order=ORDERS, size=st.integers(1, 50), first=st.integers(0, 300))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_batches_are_runs_of_times_listed_lane_by_lane(order, size, first):
    end = min(first + size, order.num_samples)
    times = sorted(range(first, end), key=lambda time: (time % order.lanes, time))
    assert order.batch(first, size).tolist() == samples(order, np.array(times, np.int64))


@given(order=ORDERS)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_a_sample_stays_in_its_window(order):
    whole = samples(order)
    starts, shift = order._line
    ends = [*starts[1:], order.num_samples]
    line = [
        place + each
        for start, end, each in zip(starts, ends, shift, strict=True)
        for place in range(start, end)
    ]
    start = 0
    for lane in range(order.lanes):
        found = whole[lane :: order.lanes]
        first = -(-order.window * (lane + 1) // order.lanes)
        ends = itertools.count(first, order.window)
        begin = 0
        while begin < len(found):
            end = min(next(ends), len(found))
            assert sorted(found[begin:end]) == sorted(line[start + begin : start + end])
            begin = end
        start += len(found)


def test_seed_and_epoch_draw_other_orders_which_a_version_keeps():
    orders = [
        EpochOrder(np.full(50, 20), seed, epoch, lanes=8, window=30)
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    # Checkpoints were written with them: other numbers need another `VERSION`.
    assert [order.checksum_next(0) for order in orders[:2]] == [2327856266, 1765122551]
    assert orders[0].checksum_next(333) == 3627216391
    found = {tuple(samples(order)) for order in orders}
    assert len(found) == 3


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_a_rank_needs_few_shards(num_ranks):
    order = EpochOrder(np.full(1000, 180), seed=3, epoch=1, lanes=48, window=2000)
    needed = [set() for _ in range(num_ranks)]
    for first in range(0, order.num_samples, 96):
        parts = np.array_split(order.batch(first, 96), num_ranks)
        for shards, part in zip(needed, parts, strict=True):
            shards.update((part // 180).tolist())
    most = max(map(len, needed)) / 1000
    assert most <= (1 / num_ranks + 2 / 48) * (1 + 48 / 1000)  # docs/streams.md states this bound.
    assert most * num_ranks <= (1.25 if num_ranks == 5 else 1.1)


@given(
    lengths=st.lists(st.integers(20, 900), min_size=1, max_size=4),
    proportions=st.lists(st.integers(1, 50), min_size=4, max_size=4),
    lanes=st.integers(1, 8),
    until_all=st.booleans(),
    epoch=st.integers(0, 3),
)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_a_mixture_has_exact_counts_and_is_through_before_it_begins_again(
    lengths, proportions, lanes, until_all, epoch
):
    total = sum(proportions[: len(lengths)])
    shares = [UNIT * each // total for each in proportions[: len(lengths)]]
    shares[0] += UNIT - sum(shares)

    def make(source, seed):
        return EpochOrder(np.array([lengths[source]]), seed, epoch, lanes, 30)

    order = MixedOrder(make, lengths, shares, until_all, 5, epoch, lanes)
    found = np.array(samples(order), np.int64)
    starts = np.cumsum([0, *lengths])
    sources = np.searchsorted(starts, found % sum(lengths), side="right") - 1
    if not until_all:
        assert len(np.unique(found)) == len(found)
        assert found.max(initial=0) < sum(lengths)
    for lane in range(lanes):
        own = sources[lane::lanes].reshape(-1, order.block)
        counts = np.stack([(own == each).sum(axis=1) for each in range(len(lengths))], axis=1)
        exact = np.array(shares) * order.block / UNIT
        assert (abs(counts - exact) < 1).all()
        # The remainders of the shares are distributed in turn.
        so_far = np.cumsum(counts - exact, axis=0)
        assert (abs(so_far) < SLACK).all()
    in_passes = collections.Counter(found.tolist())
    assert set(in_passes.values()) <= {1}, "a pass has other numbers"
    if until_all:
        assert set(found % sum(lengths)) == set(range(sum(lengths)))
    for lane, (source, length) in itertools.product(range(lanes), enumerate(lengths)):
        own = found[lane::lanes][sources[lane::lanes] == source] // sum(lengths)
        *whole, last = np.bincount(own, minlength=1).tolist()
        own_length = (length - lane + lanes - 1) // lanes
        assert set(whole) <= {own_length}, "a lane of a source is through before it begins again"
        assert last <= own_length


def mixed(lengths, proportions, lanes, epoch=0, seed=0, until_all=False):
    """The order of a mixture, and its sources' shares."""
    shares = Mixture(
        {str(number): Shards("/data") for number in range(len(lengths))},
        {str(number): each for number, each in enumerate(proportions)},
    )._shares

    def make(source, seed):
        return EpochOrder(np.array([lengths[source]]), seed, epoch, lanes, 30)

    return MixedOrder(make, lengths, shares, until_all, seed, epoch, lanes), np.array(shares) / UNIT


def count_sources(order, lengths):
    """Samples of each source in an epoch."""
    numbers = np.array(samples(order), np.int64) % sum(lengths)
    sources = np.searchsorted(np.cumsum(lengths), numbers, side="right")
    return np.bincount(sources, minlength=len(lengths))


@given(
    rare=st.floats(0.001, 0.1),
    others=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    lanes=st.integers(1, 64),
    per_lane=st.integers(6, 60),
    seed=st.integers(0, 2**64),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_all_lanes_of_an_epoch_together_have_each_sources_share(
    rare, others, lanes, per_lane, seed
):
    proportions = [rare, *(each * (1 - rare) / sum(others) for each in others)]
    lengths = [int(per_lane * each) * lanes + lanes for each in proportions]
    found, num_samples = np.zeros(len(lengths)), set()
    for epoch in range(6):
        order, shares = mixed(lengths, proportions, lanes, epoch, seed)
        counts = count_sources(order, lengths)
        # The bound also holds where lanes have blocks of one place.
        assert (abs(counts - shares * order.num_samples) < SLACK).all()
        num_samples.add(order.num_samples)
        found += counts
    assert len(num_samples) == 1, "epochs are equally long"
    error = abs(found - shares * sum(num_samples) * 6)
    assert (error < 2 * SLACK).all(), "other epochs have what one has not"


def test_a_rare_source_is_read_where_lanes_are_many():
    lengths, found = [64, 10_000, 10_000], np.zeros(3)
    for epoch in range(20):
        order, shares = mixed(lengths, [0.005, 0.2, 0.795], 64, epoch)
        found += count_sources(order, lengths)
    assert found == pytest.approx(shares * 20 * order.num_samples, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(-9 * UNIT, 9 * UNIT)), min_size=1))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_sums_of_floors_are_those_of_a_loop(pairs):
    counts, starts = np.array(pairs).T
    expected = []
    for count, start in pairs:
        expected.append(sum((GOLDEN * n + start) // UNIT for n in range(count)))
    assert sum_floors(counts, starts).tolist() == expected


@pytest.mark.parametrize("share", [1e-9, 1e-300])
def test_a_share_that_is_too_small_is_refused_in_a_line(share):
    expected = r"proportions\['0'\]: expected at least 1e-06 of their sum, got"
    with pytest.raises(ConfigError, match=expected):
        mixed([1000, 1000], [share, 1], 8)
    order, _ = mixed([10**9, 10**9], [2e-6, 1], 8)
    assert order.batch(10**8, 16).shape == (16,)
    with pytest.raises(ConfigError, match=r'stop: expected "first_exhausted", .* of more than'):
        mixed([10**11, 1000], [2e-6, 1], 8, until_all=True)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"lanes": 0}, "lanes: expected a whole number of at least 1, got 0"),
        ({"lanes": 2.5}, "lanes: expected a whole number.*, got 2.5"),
        ({"sources": {"0": ["/data"]}}, r"sources\['0'\]: expected Shards or Packed, got a list"),
    ],
)
def test_an_argument_of_a_mixture_that_has_a_wrong_value_is_refused(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        Mixture(**{"sources": {"0": Shards("/data")}, "proportions": {"0": 1}, **arguments})


def test_proportions_whose_sum_is_no_number_are_shares():
    assert mixed([100, 100], [1.5e308, 0.5e308], 8)[1].tolist() == [0.75, 0.25]


def test_lanes_and_window_follow_from_batch_and_index():
    found = [choose_lanes(*each) for each in ((96, 1000), (96, 500), (97, 9999), (64, 2000))]
    assert found == [48, 24, 8, 64]
    assert choose_lanes(96, 100) == 8  # fewer than 128 shards
    assert choose_window(48, 10**6, 10**9) == 2**18 // 48
    assert choose_window(48, 10**6, 10**12) == 8 * 2**30 // 10**6 // 48
    assert choose_window(64, 3, 10**12) == 1
