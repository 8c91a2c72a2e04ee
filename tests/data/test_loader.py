"""The loader for any loop: each sample once at any number of ranks, from one state of all ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from flyte_ddp.config import TrainingConfig
from flyte_ddp.data import Mixture, Shards, loader
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.plan import evaluation_shard
from flyte_ddp.world import World
from tests.support.errors import raises_one_line
from tests.support.image_store import write_tree
from tests.support.shards import make_tree


class Drawing:
    """Pairs of a number and a random augmentation."""

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return index, random.random()


class Stream(IterableDataset):
    """Numbers without a length, in the order of the epoch."""

    def __init__(self, size):
        self.size, self.epoch = size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in range(self.size):
            yield (number + self.epoch) % self.size, random.random()


def to_pair(fields):
    return int(fields["number"]), random.random()


def make_shards(directory, sizes, **options):
    tree, _ = make_tree("jsonl", sizes)
    shards = Shards(write_tree(tree, directory), transform=to_pair, **options)
    shards.prepare()
    return shards


def make_data(kind, directory, sizes):
    if kind == "items":
        return Drawing(sum(sizes))
    if kind == "iterable":
        return Stream(sum(sizes))
    if kind == "shards":
        return make_shards(directory, sizes, lanes=3, window=5)
    sources = {"a": make_shards(directory / "a", sizes), "b": make_shards(directory / "b", [40])}
    if kind == "schedule":
        sources["a"] = make_shards(directory / "a", [*sizes, 1])
        schedule = [(0, {"a": 1, "b": 0}), (2, {"a": 1, "b": 2}), (5, {"a": 0.1, "b": 3})]
        return Mixture(sources, schedule=schedule, lanes=3, num_samples=sum(sizes))
    return Mixture(sources, {"a": 0.3, "b": 0.7}, stop="all_exhausted", lanes=3)


def from_a(fields):
    return "a"


def from_b(fields):
    return "b"


@dataclasses.dataclass
class HeldOut:
    dataset: Mixture
    index_device = torch.device("cpu")

    def __len__(self):
        return len(self.dataset)


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_a_mixture_in_the_order_of_the_data_has_its_proportions(stop, tmp_path):
    sources = {
        "a": dataclasses.replace(make_shards(tmp_path / "a", [50, 50]), transform=from_a),
        "b": dataclasses.replace(make_shards(tmp_path / "b", [100]), transform=from_b),
    }
    data = Mixture(sources, {"a": 0.2, "b": 0.8}, stop, lanes=3)
    held_out = []
    for rank in range(3):
        world = World(rank, 3, torch.device("cpu"))
        for part in evaluation_shard(HeldOut(data), TrainingConfig(), world):
            held_out += part.tolist()
    assert len(held_out) == len(set(held_out)) == len(data)
    batches = loader(data, 6, shuffle=False, epochs=1, collate_fn=list, num_ranks=1, rank=0)
    for found in (list(itertools.chain(*batches)), [data[number] for number in held_out]):
        assert len(found) == len(data)
        assert found.count("b") / len(found) == pytest.approx(0.8, abs=0.03)


def take(data, size, num_ranks, state, num_batches, **options):
    """The global batches that ranks with this state make together, at most so many, and the state
    behind each of them.
    """
    loaders = []
    for rank in range(num_ranks):
        made = loader(data, size, rank=rank, num_ranks=num_ranks, weights=True, **options)
        if state:
            made.load_state_dict(json.loads(state))
        loaders.append(made)
    found, states = [], []
    while len(found) < num_batches and loaders[0].epoch < options["epochs"]:
        for parts in zip(*loaders, strict=True):
            own = [json.dumps(each.state_dict()) for each in (loaders[0], loaders[-1])]
            assert own[0] == own[1]  # one state, the same on every rank
            batch = []
            for (numbers, draws), weight in parts:
                if weight:
                    batch += zip(numbers.tolist(), draws.tolist(), strict=True)
            for (numbers, _), weight in parts:
                expected = len(numbers) * num_ranks / len(batch)
                assert weight == pytest.approx(expected if weight else 0)
            found.append(batch)
            states.append(own[0])
            if len(found) == num_batches:
                break
    return found, states


@given(
    kind=st.sampled_from(["items", "iterable", "shards", "mixture", "schedule"]),
    sizes=st.lists(st.integers(0, 20), min_size=2, max_size=8).filter(lambda each: sum(each) > 2),
    size=st.integers(8, 20),
    stops=st.lists(st.tuples(st.integers(1, 8), st.integers(0, 9)), max_size=4),
)
@settings(max_examples=16, deadline=None, derandomize=True)
@pytest.mark.long
def test_any_chain_of_numbers_of_ranks_trains_on_each_sample_once_an_epoch(
    kind, sizes, size, stops
):
    # A thread that fetches ahead may still write to the folder.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("TMPDIR", directory)
        patch.setattr("tempfile.tempdir", None)
        data = make_data(kind, Path(directory, "data"), sizes)
        whole, _ = take(data, size, 1, None, 1000, epochs=3)
        if kind not in ("mixture", "schedule"):
            numbers = sorted(number for batch in whole for number, _ in batch)
            assert numbers == sorted(3 * [*range(sum(sizes))])
        found, state = [], None
        for num_ranks, num_batches in [*stops, (8, 3), (2, 3), (8, 1000)]:
            # The last batch is trained on and lost: no state has it.
            batches, states = take(data, size, num_ranks, state, num_batches + 1, epochs=3)
            is_last = num_batches == 1000
            if not is_last:
                batches, states = batches[:num_batches], states[:num_batches]
            found += batches
            state = (states or [state])[-1]
        assert found == whole


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_what_loader_processes_have_prepared_does_not_count(num_workers):
    data, seen, states = Drawing(40), [], []
    made = loader(data, 4, num_workers=num_workers)
    for numbers, _ in made:
        seen += numbers.tolist()
        states.append(made.state_dict())
        if len(states) == 3:
            break
    assert [state["num_samples"] for state in states] == [4, 8, 12]
    later = loader(data, 4, num_workers=2 - num_workers)
    later.load_state_dict(states[1])
    assert seen[8:] == next(iter(later))[0].tolist()
    # A loop that was left goes on where it was left.
    seen += [number for numbers, _ in made for number in numbers.tolist()]
    assert sorted(seen) == list(range(40))
    assert len(made) == 10


def test_an_epochs_end_is_the_beginning_of_the_next_epoch_also_for_an_iterator_that_is_not_asked():
    made = loader(range(6), 2, epochs=2)
    first = iter(made)
    seen = [next(first).tolist() for _ in range(3)]
    assert (made.epoch, made.state_dict()["num_samples"]) == (1, 0)
    resumed = loader(range(6), 2, epochs=2)
    resumed.load_state_dict(made.state_dict())
    rest = [batch.tolist() for batch in made]
    assert [batch.tolist() for batch in resumed] == rest
    assert sorted(sum(seen + rest, [])) == sorted(2 * [*range(6)])
    assert seen != rest
    assert list(made) == list(resumed) == []
    assert made.epoch == 2


def test_one_loop_at_a_time():
    made = loader(range(6), 2)
    first = iter(made)
    next(first)
    next(iter(made))
    with raises_one_line(ConfigError, match="loader: expected one loop at a time"):
        next(first)


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_torchdata_and_a_loader_that_reads_ahead_keep_its_position(reads_ahead):
    """Accelerate's loader takes a batch before it yields the one before."""

    def open_loader():
        own = loader(Drawing(21), 4, weights=True)
        if not reads_ahead:
            return StatefulDataLoader(own, batch_size=None)
        shard = pytest.importorskip("accelerate.data_loader").DataLoaderShard
        return shard(own, use_stateful_dataloader=True, batch_size=None)

    def read(made):
        return [(numbers.tolist(), weight) for (numbers, _), weight in made]

    expected = [read(open_loader()), None]
    made, states = open_loader(), []
    for _ in made:
        states.append(made.state_dict())
    expected[1] = read(made)
    for number, state in enumerate(states):
        resumed = open_loader()
        resumed.load_state_dict(state)
        rest = expected[0][number + 1 :]
        assert read(resumed) == (rest or expected[1])
        assert read(resumed) == (expected[1] if rest else read(made))


def test_shards_that_were_added_are_read_from_the_next_epoch_on(tmp_path):
    made = loader(make_shards(tmp_path, [10] * 3), 5)
    next(iter(made))
    state = json.dumps(made.state_dict())
    rest = [numbers.tolist() for numbers, _ in made]
    more = loader(make_shards(tmp_path, [10] * 4), 5)
    more.load_state_dict(json.loads(state))
    assert [numbers.tolist() for numbers, _ in more] == rest
    assert sorted(n for numbers, _ in more for n in numbers.tolist()) == list(range(40))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"global_batch_size": 0}, "global_batch_size: expected .* got 0"),
        ({"global_batch_size": 4.0}, "global_batch_size: expected .* got 4.0"),
        ({"seed": "1"}, "seed: expected .* got '1'"),
        ({"epochs": 0}, "epochs: expected .* got 0"),
        ({"num_workers": -1}, "num_workers: expected .* got -1"),
        ({"data": 5}, "data: expected a data set with a length and items.* got a int"),
        ({"data": []}, "data: expected at least one sample, got none"),
        ({"data": Stream(4), "num_workers": 2}, "num_workers: expected at most 1 for an iterable"),
        ({"rank": 0}, "rank: expected rank and num_ranks together"),
        ({"rank": 2, "num_ranks": 2}, "rank: expected .* got 2"),
        ({"rank": 0, "num_ranks": 2, "mesh": object()}, "rank: expected .* without a mesh"),
        ({"rank": 0, "num_ranks": 9}, "global_batch_size: expected at least 9, a sample for each"),
        (
            {"rank": 0, "num_ranks": 3},
            "global_batch_size: expected batches that 3 .* got 8 samples",
        ),
        (
            {"data": range(13), "rank": 0, "num_ranks": 2},
            "global_batch_size: .* weights=True, got 8 samples, and 5 in an epoch's last batch",
        ),
    ],
)
def test_a_wrong_argument_is_one_line(arguments, expected):
    given = {"data": range(16), "global_batch_size": 8, **arguments}
    with raises_one_line(ConfigError, match=f"loader: {expected}"):
        loader(given.pop("data"), given.pop("global_batch_size"), **given)


def test_a_batch_without_a_weight_that_it_needs_is_one_line():
    made = loader(Stream(7), 4, rank=0, num_ranks=2)
    with raises_one_line(ConfigError, match="loader: weights: expected True for .* got False"):
        list(made)
    assert made.state_dict()["num_samples"] == 4


def test_a_loader_in_a_loader_process_is_one_line():
    with pytest.raises(ConfigError, match="loader: num_workers: expected 0 of a DataLoader around"):
        next(iter(DataLoader(loader(range(8), 4), batch_size=None, num_workers=1)))


def state_of(data, **options):
    made = loader(data, 4, **options)
    next(iter(made))
    return made.state_dict()


def shuffled(numbers):
    return torch.tensor(numbers)[torch.randperm(len(numbers))]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (lambda _: state_of(range(16)), "dataset: number of samples: expected 16, .* got 40"),
        (lambda _: state_of(Stream(40)), "dataset: number of samples: expected None, .* got 40"),
        (lambda _: state_of(range(1, 41)), "dataset: sample 0: expected the same, with which the"),
        (lambda _: state_of(range(40), seed=1), "seed: expected 1, with which the state was saved"),
        (lambda _: state_of(range(40), shuffle=False), "shuffle: expected False, .* got True"),
        (
            lambda path: state_of(make_shards(path, [20] * 2)),
            "dataset: number of samples: expected None, .* got 40",
        ),
        (lambda _: [1], "state: expected what state_dict.. has returned, got a list"),
        (lambda _: {"epoch": 1}, "state: expected what .* got the keys epoch"),
        (lambda _: state_of(range(40)) | {"call": 1}, "state: .* got other values in it"),
        (lambda _: state_of(range(40)) | {"epoch": "1"}, r"state\['epoch'\]: expected .* got '1'"),
        (lambda _: state_of(range(40)) | {"num_samples": 40}, r"state\['num_samples'\]: .* got 40"),
    ],
)
def test_a_state_of_other_data_is_one_line_and_changes_nothing(state, expected, tmp_path):
    made, given = loader(range(40), 4), state(tmp_path)
    with raises_one_line(ConfigError, match=f"loader: {expected}"):
        made.load_state_dict(given)
    assert (made.epoch, made.num_samples) == (0, 0)
    made.load_state_dict({})
    assert sorted(torch.cat(list(made)).tolist()) == list(range(40))


@pytest.mark.parametrize("is_between", [False, True])
def test_a_state_of_other_shards_is_one_line(is_between, tmp_path):
    made, pieces = loader(make_shards(tmp_path / "a", [10] * 3), 5), 6 if is_between else 2
    for _ in zip(range(pieces), made, strict=False):
        pass
    state = made.state_dict()
    assert state["epoch"] == int(is_between)
    for name, sizes in (("number of", [10] * 2), ("checksum of the", [10, 11, 9])):
        other = loader(make_shards(tmp_path / name, sizes), 5)
        with raises_one_line(ConfigError, match=f"loader: {name} shards: expected"):
            other.load_state_dict(state)
    with raises_one_line(ConfigError, match="loader: number of shards: expected None, .* got 3"):
        made.load_state_dict(state_of(Stream(30)))


class Unseeded(Drawing):
    """Samples whose augmentation no seed reaches."""

    generator = torch.Generator()

    def __getitem__(self, index):
        return index, torch.rand((), generator=self.generator)


def test_augmentation_that_cannot_be_seeded_is_not_compared():
    made = loader(Unseeded(20), 4)
    made.load_state_dict(state_of(Unseeded(20)))
    assert made.num_samples == 4
