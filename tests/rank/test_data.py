"""The samples of each rank and step: as the ranks of real runs recorded them, and as computed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.data import (
    LoadedSamples,
    TensorSamples,
    open_samples,
    take_sample,
    weigh_samples,
)
from flyte_ddp.rank.plan import epoch_shards, evaluation_shard
from flyte_ddp.recipes.digits import Digits
from flyte_ddp.training.evaluation import evaluate
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import World, single_process_world
from tests.support.recipes import Augmented, Tiny
from tests.support.runs import new_run


def _world(rank, world_size):
    return World(rank, world_size, torch.device("cpu"))


def _noted(run, split):
    """Return the notes of each rank, in its order: [[(sample, gradient of its loss or
    nothing)]].
    """
    ranks = []
    for file in sorted((run.directory / "record").glob(f"{split}-*.jsonl")):
        ranks.append([json.loads(line) for line in file.read_text().splitlines()])
    return ranks


def _batches_seen(run, num_steps):
    """The samples that counted in each optimizer step, over all ranks."""
    ranks = _noted(run, "train")
    per_step = len(ranks[0]) // num_steps  # micro-batches
    batches = []
    for step in range(num_steps):
        counted = [
            sample
            for rank in ranks
            for samples, gradients in rank[step * per_step : (step + 1) * per_step]
            for sample, gradient in zip(samples, gradients, strict=True)
            if gradient != 0
        ]
        batches.append(sorted(counted))
    return batches


@pytest.mark.long
def test_each_sample_counts_once_per_epoch_in_batches_that_no_world_size_changes(finished_run):
    runs = [finished_run(num_processes=ranks) for ranks in (1, 2, 3)]
    per_epoch = runs[0].started.num_steps // 3
    steps = [_batches_seen(run, 3 * per_epoch) for run in runs]

    assert steps[0] == steps[1] == steps[2]
    epochs = [steps[0][epoch * per_epoch :][:per_epoch] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(sum(epoch, [])) == list(range(97))
    assert len({str(epoch[0]) for epoch in epochs}) == 3  # each in an order of its own
    for run in runs:
        held_out = Counter(
            sample for rank in _noted(run, "test") for samples, _ in rank for sample in samples
        )
        assert held_out == dict.fromkeys(range(Tiny.num_test), 3)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("size", [1, 5, 13, 24, 25, 97, 103])
def test_all_ranks_have_as_many_micro_batches_of_the_size_that_fits(size, world_size):
    config = TrainingConfig(global_batch_size=24, gradient_accumulation=2)
    numbers = TensorDataset(torch.arange(size), torch.arange(size))
    samples = LoadedSamples(numbers, Tiny(), config, _world(0, 1))
    ranks = [
        epoch_shards(samples, config, _world(rank, world_size), epoch=1)
        for rank in range(world_size)
    ]
    for shares in zip(*ranks, strict=True):
        # SyncBatchNorm's layers communicate in every forward pass, so each pass has a sample.
        assert len({len(share.micro_batches) for share in shares}) == 1
        lengths = [len(part) for share in shares for part in share.micro_batches]
        assert 0 < min(lengths) <= max(lengths) <= 24 / world_size / 2
        own = sum(share.own_targets for share in shares)
        assert own == shares[0].num_targets == shares[0].num_samples
    assert [share.num_samples for share in ranks[0][:-1]] == [24] * (len(ranks[0]) - 1)


@st.composite
def _changing_sizes(draw):
    """An epoch of some samples, and the world sizes at which its batches are trained, a few batches
    each.

    An attempt ends in a loss that was announced, so that its last state is kept, or in one that was
    not.
    """
    per_rank, accumulation = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    batch = per_rank * accumulation * draw(st.sampled_from([1, 2, 4, 6, 8, 12]))
    sizes = [size for size in range(1, batch + 1) if batch % (size * accumulation) == 0]
    config = TrainingConfig(
        global_batch_size=batch, gradient_accumulation=accumulation, seed=draw(st.integers(0, 99))
    )
    # An attempt may end before its first step.
    stretches = st.tuples(st.sampled_from(sizes), st.integers(0, 5), st.booleans())
    num_samples, epoch, interval = (
        draw(st.integers(1, 5 * batch)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
    )
    return config, num_samples, epoch, interval, draw(st.lists(stretches, max_size=8))


def _counted_in_batch(ranks, number):
    """Return the samples that count in the batch's loss, in the order of the ranks, and the number
    that divides their sum.
    """
    samples = [
        index
        for shards in ranks
        for part, weight in zip(shards[number].micro_batches, shards[number].weights, strict=True)
        for index in part.tolist()
        if weight
    ]
    (num_targets,) = {shards[number].num_targets for shards in ranks}
    return samples, num_targets


# A machine that stands still for a second is no defect of the examples.
@settings(
    max_examples=150, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
@given(_changing_sizes())
def test_a_run_that_shrinks_and_grows_sees_each_sample_once_in_the_batches_of_an_undisturbed_one(
    run,
):
    config, num_samples, epoch, interval, stretches = run
    samples = LoadedSamples(
        TensorDataset(torch.arange(num_samples), torch.arange(num_samples)),
        Tiny(),
        config,
        _world(0, 1),
    )

    def shards_from(first_batch, world_size):
        return [
            list(epoch_shards(samples, config, _world(rank, world_size), epoch).read(first_batch))
            for rank in range(world_size)
        ]

    undisturbed = shards_from(0, 1)
    expected = [_counted_in_batch(undisturbed, number) for number in range(len(undisturbed[0]))]
    seen = []  # the samples of the state that the next attempt resumes from
    for world_size, num_steps, is_announced in [*stretches, (1, len(expected), True)]:
        first = len(seen)
        ranks = shards_from(first, world_size)
        seen += [
            _counted_in_batch(ranks, number) for number in range(min(num_steps, len(ranks[0])))
        ]
        if not is_announced:
            del seen[max(first, len(seen) // interval * interval) :]

    assert seen == expected
    assert sorted(index for batch, _ in seen for index in batch) == list(range(num_samples))


def _sample(dataset, sample_size, seed=0):
    """The samples of `dataset` that a run trains on."""
    part = take_sample(dataset, TrainingConfig(sample_size=sample_size, seed=seed))
    return [int(part[index][1]) for index in range(len(part))]


class Loaded(Dataset):
    """Samples that are read one by one, some of them ahead. Sample 13 cannot be read."""

    UNREADABLE = "unreadable"

    def __init__(self, size):
        self.size = size
        self.prefetched = []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return (float(index), index) if index != 13 else self.UNREADABLE

    def prefetch(self, indices):
        self.prefetched += indices


def weighed(weights, size=2000):
    """Samples that are drawn by `weights`."""
    dataset = TensorDataset(torch.arange(size), torch.zeros(size))
    recipe = Tiny()
    recipe_class = type("Weighed", (Tiny,), {"sampling_weights": lambda self, dataset: weights})
    samples = TensorSamples(dataset, recipe, _world(0, 1))
    weigh_samples(samples, dataset, recipe_class(), TrainingConfig())
    return samples


def test_weighed_samples_are_drawn_in_proportion_and_the_same_at_any_number_of_ranks():
    samples = weighed([0.0, 1.0, 3.0, 0.0] * 500)
    config = TrainingConfig(global_batch_size=60)
    batches = {}
    for world_size in (1, 2, 3):
        ranks = [
            epoch_shards(samples, config, _world(rank, world_size), epoch=1)
            for rank in range(world_size)
        ]
        batches[world_size] = []
        for shards in zip(*ranks, strict=True):
            parts = [
                part
                for shard in shards
                for part, weight in zip(shard.micro_batches, shard.weights, strict=True)
                if weight
            ]
            batches[world_size].append(torch.cat(parts).tolist())
    assert batches[1] == batches[2] == batches[3]
    drawn = torch.tensor(sum(batches[1], []))
    assert len(drawn) == 2000
    counts = (drawn % 4).bincount(minlength=4).tolist()
    assert counts[0] == counts[3] == 0
    assert 1400 < counts[2] < 1600
    assert len(drawn.unique()) < 1000, "with replacement"
    later = epoch_shards(samples, config, _world(0, 1), epoch=2)
    assert later[0].micro_batches[0].tolist() != batches[1][0]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([1.0], r"a number for each of 2000 training samples, got shape \(1,\)"),
        ([1.0, -1.0] * 1000, "finite numbers of at least 0, got -1.0 for sample 1"),
        ([float("nan")] * 2000, "finite numbers of at least 0, got nan for sample 0"),
        ([0] * 2000, "a number above 0, got 0 for every sample"),
    ],
)
def test_weights_that_draw_nothing_are_refused_in_one_line(weights, expected):
    with pytest.raises(ConfigError, match=f"sampling_weights: expected {expected}$"):
        weighed(weights)


def test_a_sample_of_the_data_is_drawn_by_the_seed_and_part_of_every_larger_one():
    dataset = TensorDataset(torch.zeros(97, 2), torch.arange(97))
    small, large = _sample(dataset, 10), _sample(dataset, 40)

    assert len(set(small)) == 10
    assert set(small) < set(large)
    assert _sample(dataset, 10, seed=1) != small
    assert _sample(Loaded(97), 10) == small
    for sample_size in (0, 97):
        assert take_sample(dataset, TrainingConfig(sample_size=sample_size)) is dataset


def test_a_sample_of_loaded_data_reads_ahead_and_counts_what_cannot_be_read():
    loaded, config = Loaded(97), TrainingConfig(sample_size=96)
    part = take_sample(loaded, config)
    chosen = [part.indices.index(number) for number in (13, 7)]
    samples = LoadedSamples(part, Tiny(), config, _world(0, 1))
    (batch,) = samples.batches([torch.tensor(chosen)], epoch=1)

    assert len(samples) == 96
    assert (batch[1].tolist(), loaded.prefetched) == ([7], [13, 7])
    assert samples.num_unreadable == 1


class Gappy(TensorDataset):
    """Samples with a whole unreadable batch in the evaluation, and one more unreadable sample."""

    UNREADABLE = None

    def __getitem__(self, index):
        return None if index in (2, 4, 5, 6, 7) else super().__getitem__(index)


def test_held_out_samples_that_cannot_be_read_do_not_count():
    recipe, config, world = Digits(), TrainingConfig(evaluation_batch_size=4), _world(0, 1)
    model = torch.nn.Linear(8, 10)
    data = Gappy(torch.randn(12, 8), torch.arange(12) % 10)
    readable = Subset(TensorDataset(*data.tensors), [0, 1, 3, 8, 9, 10, 11])

    def measure(dataset):
        samples = LoadedSamples(dataset, recipe, config, world)
        return evaluate(model, samples, Parallelism(recipe, config, world))

    with_gaps, without = measure(data), measure(readable)
    assert (with_gaps.loss, with_gaps.metrics) == (pytest.approx(without.loss), without.metrics)


def test_a_sample_larger_than_the_data_is_refused_in_one_line():
    expected = "sample_size: expected at most 97, the number of training samples, or 0 for all"
    with pytest.raises(ConfigError, match=f"{expected}, got 98$"):
        _sample(TensorDataset(torch.zeros(97), torch.arange(97)), 98)


class Shapeless(Tiny):
    def num_targets(self, targets):
        return torch.full((len(targets),), 3)


# Emulated: no tensor is on a GPU here, so what would be moved there is only noted.
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((300, 100), [300, 100]),
        ((300, 200), [300]),
        ((500, 100), [100]),
        ((500, 500), []),
        ((400,), [400]),
    ],
)
def test_all_data_in_memory_together_take_a_bounded_share_of_a_gpus_memory(
    monkeypatch, sizes, expected
):
    moved, world = [], World(0, 1, torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(TensorSamples, "move_to_device", lambda self: moved.append(self.nbytes))
    datasets = [
        TensorDataset(torch.zeros(1, size - 8, dtype=torch.uint8), torch.zeros(1).long())
        for size in sizes
    ]
    samples = open_samples(datasets, Shapeless(), TrainingConfig(), world)
    assert moved == expected
    # batches of data that are too large are planned on the host
    (shard,) = epoch_shards(samples[0], TrainingConfig(), world, epoch=1)
    planned = [*shard.micro_batches, *evaluation_shard(samples[0], TrainingConfig(), world)]
    # a scalar from the host goes to a kernel as an argument
    assert {each.device.type for each in (*planned, shard.num_targets)} == {"cpu"}


def test_a_state_is_evaluated_on_a_numbered_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    # torch.device("cuda") != torch.device("cuda", 0)
    assert single_process_world().device == torch.device("cuda", 0)
    assert World(0, 1, torch.device("cuda")).device == torch.device("cuda", 0)


@pytest.mark.slow
def test_augmentation_and_dropout_do_not_depend_on_how_many_workers_load_the_data(finished_run):
    without, with_two = finished_run("Augmented", 1), finished_run("Augmented", 1, data_workers=2)

    torch.testing.assert_close(with_two.state(), without.state(), rtol=0, atol=0)


def test_loaded_data_and_data_in_memory_give_the_same_weights(finished_run):
    listed, tiny = finished_run("Listed", 2), finished_run("Tiny", 2)
    torch.testing.assert_close(listed.state(), tiny.state())


def test_augmentation_is_the_samples_own_in_each_epoch_and_repeats_between_runs(tmp_path):
    train, _ = Augmented().datasets(new_run(tmp_path, "Augmented").data())
    samples = LoadedSamples(train, Tiny(), TrainingConfig(), _world(0, 1))

    def inputs_of(epoch):
        return torch.cat([row for row, _ in samples.batches(torch.arange(10).split(5), epoch)])

    first, second, other = inputs_of(1), inputs_of(1), inputs_of(2)
    assert torch.equal(first, second)
    noise = first - torch.stack([train.inputs[index] for index in range(10)])
    assert len(noise[:, 0].unique()) == 10
    assert (first != other).all()
