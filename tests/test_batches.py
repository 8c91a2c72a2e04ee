"""The batches of a user's own loop: each sample once, the same at any number of ranks, also after a
restart.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import flyte_ddp
from flyte_ddp import events, session
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import ConfigError, RankFailure
from flyte_ddp.launch import driver
from flyte_ddp.launch.dask.place import DaskPlace
from flyte_ddp.launch.process.programs import Job, Program
from flyte_ddp.launch.run import _Call
from tests.support.dask_runs import At, events_of
from tests.support.runs import fork_functions, new_run
from tests.test_session import session_of

SIZE, BATCH = 23, 6
NUMBERS = TensorDataset(torch.arange(SIZE))


class Noisy:
    """A data set that draws from every generator, as augmentation does."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), numpy.random.rand(), torch.rand(()).item()])


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(SIZE)


class Shards(IterableDataset):
    """Samples in files of several lengths, which each epoch reads in an order of its own."""

    def __init__(self, directory):
        self.files = []
        for first, end in ((0, 9), (9, 11), (11, SIZE)):
            self.files.append(directory / f"{first}.txt")
            self.files[-1].write_text("\n".join(map(str, range(first, end))))

    def set_epoch(self, epoch):
        random.Random(epoch).shuffle(self.files)

    def __iter__(self):
        for file in self.files:
            yield from map(int, file.read_text().split())


def batches_of(rank, world_size, monkeypatch, dataset=NUMBERS, *arguments, **options):
    """[(samples, weight)] of one rank."""
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    found = []
    for batch, weight in session.batches(dataset, BATCH, *arguments, **options):
        numbers = batch[0] if isinstance(batch, tuple) else batch
        found.append((numbers.tolist(), weight))
    return found


def resume_at(position, monkeypatch):
    """A session of one rank that has loaded a checkpoint with this position."""
    current, _ = session_of()
    current._position = current._resumed = position
    current._num_sets = position.get("num_sets", 0)
    monkeypatch.setattr(session, "_current", current)
    return current


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("dataset", [NUMBERS, Stream()])
def test_each_sample_is_in_one_batch_which_is_the_same_at_any_number_of_ranks(
    world_size, dataset, monkeypatch
):
    alone = [sorted(samples) for samples, _ in batches_of(0, 1, monkeypatch, dataset, 3)]
    ranks = [batches_of(rank, world_size, monkeypatch, dataset, 3) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {4}
    for whole, parts in zip(alone, zip(*ranks, strict=True), strict=True):
        assert sorted(sample for samples, weight in parts if weight for sample in samples) == whole
        # With DDP's mean over the ranks it is the mean of the batch.
        mean = sum(weight * sum(samples) / len(samples) for samples, weight in parts) / world_size
        assert mean == pytest.approx(sum(whole) / len(whole))
    assert sorted(sample for batch in alone for sample in batch) == list(range(SIZE))


@pytest.mark.parametrize("dataset", [NUMBERS, Stream()])
def test_the_ranks_of_a_mesh_share_a_batch_in_the_order_of_their_places(dataset, monkeypatch):
    for row, column in ((0, 1), (1, 0)):
        mesh = SimpleNamespace(
            shape=(2, 2), get_coordinate=lambda place=[row, column]: place, size=lambda: 4
        )
        expected = batches_of(2 * row + column, 4, monkeypatch, dataset, 1)
        assert batches_of(7, 8, monkeypatch, dataset, 1, mesh=mesh) == expected


@pytest.mark.parametrize("visits_the_first", [True, False])
def test_data_sets_that_a_save_in_the_first_epoch_did_not_foresee_are_told(
    visits_the_first, monkeypatch, caplog
):
    first = session_of()[0]
    monkeypatch.setattr(session, "_current", first)
    assert len(batches_of(0, 1, monkeypatch, NUMBERS, 0)) == 4
    resume_at(first._position, monkeypatch)  # as saved after the first of two data sets
    seen = [len(batches_of(0, 1, monkeypatch, NUMBERS, 0)) for _ in range(2 * visits_the_first)]
    seen += [len(batches_of(0, 1, monkeypatch, NUMBERS, 1)) for _ in range(2)]
    assert seen == ([0, 4, 4, 4] if visits_the_first else [4, 4])
    told = [
        line for line in caplog.messages if "epoch 1 has more data sets than epoch 0 had" in line
    ]
    assert len(told) == (not visits_the_first)  # `session.epochs` begins at the second


@pytest.mark.parametrize("num_workers", [0, 1])
def test_shards_are_resumed_in_mid_epoch_at_another_number_of_ranks(
    num_workers, tmp_path, monkeypatch
):
    whole = [batches_of(0, 1, monkeypatch, Shards(tmp_path), epoch) for epoch in range(3)]
    assert len({str(each) for each in whole}) > 1, "the epochs have one order"
    ranks = []
    for rank in range(2):
        resume_at({"epoch": 2, "num_samples": 12, "length": None}, monkeypatch)
        workers = num_workers if rank else 0
        ranks.append(batches_of(rank, 2, monkeypatch, Shards(tmp_path), 2, num_workers=workers))
    rest = [
        sample for parts in zip(*ranks, strict=True) for samples, _ in parts for sample in samples
    ]
    assert rest == [sample for samples, _ in whole[2][2:] for sample in samples]


class NoisyStream(IterableDataset):
    """Samples of which each is drawn from every generator, as in a stream that shuffles or
    augments.
    """

    def __init__(self, size=SIZE):
        self.size = size

    def __iter__(self):
        for _ in range(self.size):
            yield torch.tensor([random.random(), numpy.random.rand(), torch.rand(()).item()])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_streams_draws_are_those_of_its_epoch_on_every_rank_and_after_a_restart(
    num_workers, monkeypatch
):
    def drawn():
        return random.random(), numpy.random.rand(), torch.rand(()).item()

    def read(rank, world_size, epoch, **options):
        return batches_of(
            rank, world_size, monkeypatch, NoisyStream(), epoch, num_workers=num_workers, **options
        )

    whole = [sample for samples, _ in read(0, 1, 2) for sample in samples]
    drawn()
    ranks = [read(rank, 2, 2) for rank in range(2)]
    assert [
        sample for parts in zip(*ranks, strict=True) for samples, _ in parts for sample in samples
    ] == whole
    assert read(0, 1, 3) != read(0, 1, 2)
    assert read(0, 1, 2, seed=1) != read(0, 1, 2)
    position = {"epoch": 2, "num_samples": 12, "length": None}
    resume_at(position, monkeypatch)
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    expected = drawn()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])
    assert [sample for samples, _ in read(0, 1, 2) for sample in samples] == whole[12:]
    assert drawn() == expected, "the loop's own draws have changed"
    resume_at(position, monkeypatch)
    with pytest.raises(
        ConfigError,
        match=(
            r"dataset: expected at least the 12 samples that .* had "
            r"done, got 11"
        ),
    ):
        list(session.batches(NoisyStream(11), BATCH, 2, num_workers=num_workers))
    resume_at(position, monkeypatch)
    assert list(session.batches(NoisyStream(12), BATCH, 2, num_workers=num_workers)) == []


@pytest.mark.parametrize("has_state", [False, True])
def test_torchdatas_loader_goes_on_where_the_session_was_saved(has_state, monkeypatch):
    StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    samples, position, state = [], {}, None
    for resumes in (False, True):
        current, _ = session_of()
        monkeypatch.setattr(session, "_current", current)
        current._resumed = position
        loader = StatefulDataLoader(session.batches(NUMBERS, BATCH, 4), batch_size=None)
        assert len(loader) == 4
        if has_state and resumes:
            loader.load_state_dict(state)
        for number, (batch, weight) in enumerate(loader):
            assert weight == 1
            samples += batch[0].tolist()
            if not resumes and number == 1:
                position, state = current._position, loader.state_dict()
                break
    assert sorted(samples) == list(range(SIZE))


def test_a_loader_around_batches_has_no_processes_of_its_own(monkeypatch):
    loader = DataLoader(session.batches(NUMBERS, BATCH, 0), batch_size=None, num_workers=1)
    with pytest.raises(ConfigError, match="num_workers: expected 0 of a DataLoader around it"):
        list(loader)


def test_epochs_differ_in_their_order_and_other_data_keep_theirs(monkeypatch):
    one, two, held_out = (batches_of(0, 1, monkeypatch, NUMBERS, epoch) for epoch in (1, 2, None))
    assert one != two
    assert one == batches_of(0, 1, monkeypatch, NUMBERS, 1)
    assert one != batches_of(0, 1, monkeypatch, NUMBERS, 1, seed=1)
    assert [sample for samples, _ in held_out for sample in samples] == list(range(SIZE))


def test_augmentation_is_the_samples_own_and_the_loops_draws_are_left_alone(monkeypatch):
    expected = {
        tuple(row) for samples, _ in batches_of(0, 1, monkeypatch, Noisy(), 0) for row in samples
    }
    assert len({row[1:] for row in expected}) == SIZE
    for state in (random.seed, numpy.random.seed, torch.manual_seed):
        state(7)
    drawn = random.random(), numpy.random.rand(), torch.rand(()).item()
    for state in (random.seed, numpy.random.seed, torch.manual_seed):
        state(7)
    found = {
        tuple(row)
        for rank in range(2)
        for samples, _ in batches_of(rank, 2, monkeypatch, Noisy(), 0, num_workers=rank)
        for row in samples
    }
    assert found == expected
    assert (random.random(), numpy.random.rand(), torch.rand(()).item()) == drawn


def test_a_batch_that_is_too_small_is_refused(monkeypatch):
    with pytest.raises(
        ConfigError, match="global_batch_size: expected at least 7, a sample for each rank, got 6"
    ):
        batches_of(0, 7, monkeypatch)
    with pytest.raises(
        ConfigError, match="num_workers: expected at most 1 for an iterable data set, .*, got 2"
    ):
        batches_of(0, 1, monkeypatch, Stream(), 0, num_workers=2)


def test_only_one_data_set_is_tracked_at_a_time_and_none_may_change_its_length(monkeypatch):
    current, _ = session_of()
    monkeypatch.setattr(session, "_current", current)
    for _ in session.batches(NUMBERS, BATCH, 0):
        assert len(list(session.batches(NUMBERS, BATCH))) == 4
        with pytest.raises(
            ConfigError, match="epoch: expected None for all but one data set at a time"
        ):
            next(iter(session.batches(NUMBERS, BATCH, 0)))
        break
    resume_at({"epoch": 1, "num_samples": 12, "length": SIZE}, monkeypatch)
    assert list(session.batches(NUMBERS, BATCH, 0)) == []
    assert len(list(session.batches(NUMBERS, BATCH, 1))) == 2
    assert len(list(session.batches(NUMBERS, BATCH, 2))) == 4
    done = {"epoch": 1, "num_samples": SIZE, "length": SIZE}  # saved after an epoch's last batch
    resume_at(done, monkeypatch)
    assert list(session.batches(NUMBERS, BATCH, 1)) == []
    resume_at(done, monkeypatch)
    with pytest.raises(
        ConfigError,
        match=(
            r"dataset: expected 23 samples, with which .* was "
            r"written, got 22"
        ),
    ):
        next(iter(session.batches(torch.arange(22), BATCH, 1)))


def test_another_order_than_the_checkpoints_is_refused(monkeypatch):
    current, _ = session_of()
    monkeypatch.setattr(session, "_current", current)
    for _ in session.batches(NUMBERS, BATCH, 1, seed=3, shuffle=False):
        pass
    current._resumed = current._position
    with pytest.raises(
        ConfigError,
        match=(
            r"batches: shuffle: expected False, with which the "
            r"checkpoint was written"
        ),
    ):
        next(iter(session.batches(NUMBERS, BATCH, 2, seed=3)))
    with pytest.raises(
        ConfigError,
        match=(
            r"batches: seed: expected 3, with which the checkpoint "
            r"was written, got 0"
        ),
    ):
        next(iter(session.batches(NUMBERS, BATCH, 2, shuffle=False)))
    rest = session.batches(NUMBERS, BATCH, 2, seed=3, shuffle=False)
    assert [sample for batch, _ in rest for sample in batch[0].tolist()] == list(range(SIZE))


@pytest.mark.parametrize("num_done", [2, 4, 5])
def test_a_loop_over_epochs_begins_at_the_checkpoints(num_done, monkeypatch):
    """Four batches are an epoch. A save after its loop has what the epoch does besides, one in the
    loop has not.
    """
    assert list(session.epochs(3)) == [0, 1, 2]
    current, _ = session_of()
    monkeypatch.setattr(session, "_current", current)
    assert list(session.epochs(3)) == [0, 1, 2]
    for number, _ in enumerate(session.batches(NUMBERS, BATCH, 1), 1):
        if number == num_done:
            break
    resume_at(current._position, monkeypatch)
    assert list(session.epochs(3)) == ([2] if num_done == 5 else [1, 2])
    left = [len(list(session.batches(NUMBERS, BATCH, epoch))) for epoch in session.epochs(3)]
    assert sum(left) == 8 - min(num_done, 4)


class ByRank(IterableDataset):
    """Gives each rank its own part, as is right for a DataLoader."""

    def __iter__(self):
        yield from range(int(os.environ["RANK"]), SIZE, int(os.environ["WORLD_SIZE"]))


class OwnDraws(Noisy):
    """Draws from a generator of its own too, which nobody can seed."""

    def __init__(self):
        self.generator = numpy.random.default_rng()

    def __getitem__(self, index):
        return {"own": torch.tensor(self.generator.random()), "other": super().__getitem__(index)}


class OwnStream(IterableDataset):
    def __iter__(self):
        data = OwnDraws()
        yield from (data[index] for index in range(SIZE))


def numbers_of_rank(rank):
    return Subset(NUMBERS, range(rank, SIZE - 1 + rank, 2))


@pytest.mark.parametrize("comes_first", [0, 1])
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda rank: NUMBERS, None),
        (lambda rank: Noisy(), None),
        (lambda rank: OwnDraws(), None),
        (lambda rank: OwnStream(), None),
        (lambda rank: Stream(), None),
        (lambda rank: NoisyStream(), None),
        (lambda rank: iter(range(SIZE)), None),
        (
            lambda rank: [(torch.tensor(number), {"name": str(number)}) for number in range(SIZE)],
            None,
        ),
        (
            numbers_of_rank,
            (
                r"dataset: sample \d+: expected the same on all ranks, as on rank 0, got another "
                r"one "
                r"on rank 1"
            ),
        ),
        (
            lambda rank: ByRank(),
            (
                r"dataset: sample 0: .*, got another one on rank 1: every rank reads the whole "
                r"data "
                r"set"
            ),
        ),
        (
            lambda rank: iter(range(rank, SIZE, 2)),
            (
                r"dataset: sample 0: expected the same .* "
                r"another one on rank 1"
            ),
        ),
        (
            lambda rank: torch.arange(SIZE - rank),
            (
                r"dataset: number of samples: expected 23 on .* "
                r"got 22 on rank 1"
            ),
        ),
        (
            lambda rank: random.Random(rank).sample(range(SIZE), SIZE),
            (
                r"dataset: sample \d+: "
                r"expected the same"
            ),
        ),
        (
            lambda rank: [str(number + rank) for number in range(SIZE)],
            (
                r"dataset: sample \d+: "
                r"expected the same"
            ),
        ),
    ],
)
def test_ranks_compare_the_data_set_before_the_first_batch(make, problem, comes_first, monkeypatch):
    num_workers = 1 if make(0).__class__ is OwnDraws else 0
    store = HashStore()
    for rank in (comes_first, 1 - comes_first):
        current, _ = session_of(rank, 2, store)
        monkeypatch.setattr(session, "_current", current)
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        for epoch in range(2 if not hasattr(make(rank), "__next__") else 1):
            batches = iter(
                session.batches(make(rank), BATCH, epoch, num_workers=num_workers, collate_fn=list)
            )
            if problem is None or rank == comes_first:
                assert len(list(batches)) >= 2
                continue
            with pytest.raises(ConfigError, match=problem) as caught:
                next(batches)
            assert "\n" not in str(caught.value)
            break


@pytest.mark.parametrize("options", [{"seed": 1}, {"shuffle": False}, {"global_batch_size": 8}])
def test_ranks_compare_how_they_call(options, monkeypatch):
    store = HashStore()
    for rank in range(2):
        current, _ = session_of(rank, 2, store)
        monkeypatch.setattr(session, "_current", current)
        call = {"global_batch_size": BATCH, **(options if rank else {})}
        batches = iter(session.batches(NUMBERS, epoch=3, **call))
        if rank == 0:
            next(batches)
        else:
            with pytest.raises(
                ConfigError,
                match=(
                    rf"batches: {next(iter(options))}: expected .* "
                    r"got .* on rank 1"
                ),
            ):
                next(batches)


def test_the_comparison_leaves_no_trace_in_the_data_set(monkeypatch):
    class Counting(Noisy):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            return super().__getitem__(index)

    resume_at({}, monkeypatch)
    data = Counting()
    next(iter(session.batches(data, BATCH, 0)))
    assert data.reads == BATCH


def test_a_data_set_of_numbers_without_order_is_another_one_after_a_restart(monkeypatch):
    current = resume_at({}, monkeypatch)
    for _ in session.batches(NUMBERS, BATCH, 0):
        break
    for numbers, problem in (
        (NUMBERS, None),
        (TensorDataset(torch.arange(SIZE).flip(0)), "dataset: sample 0: expected"),
    ):
        resume_at(copy.deepcopy(current._position), monkeypatch)
        if problem is None:
            assert len(list(session.batches(numbers, BATCH, 0))) == 3
            continue
        with pytest.raises(
            ConfigError,
            match=f"{problem} the same, with which the checkpoint was written, got another",
        ):
            next(iter(session.batches(numbers, BATCH, 0)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_masked_loss_is_weighed_by_tokens_as_the_page_says(world_size, monkeypatch):
    page = (Path(__file__).parents[1] / "docs/your-own-function.md").read_text()
    scope = {}
    exec(
        next(each for each in page.split("```") if "def token_loss" in each).removeprefix("python"),
        scope,
    )
    draws = torch.Generator().manual_seed(0)
    inputs, targets = (
        torch.randn(7, 5, 3, generator=draws),
        torch.randint(4, (7, 5), generator=draws),
    )
    for row in range(7):
        targets[row, : row % 4] = -100
    data, weights = TensorDataset(inputs, targets), torch.randn(3, 4, generator=draws)
    for number in range(3):
        shares = []
        for rank in range(world_size):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(world_size))
            shares.append(list(session.batches(data, 3))[number])
        samples = [(x, y) for (x, y), weight in shares if weight]
        whole = torch.cat([x for x, _ in samples]), torch.cat([y for _, y in samples])
        total = (whole[1] != -100).sum()
        reduce = functools.partial(lambda total, tensor: tensor.copy_(total), total)
        scope["dist"] = SimpleNamespace(all_reduce=reduce, get_world_size=lambda: world_size)
        own = weights.clone().requires_grad_()
        for (x, y), weight in shares:
            # as DDP: the mean over the ranks
            (scope["token_loss"](x @ own, y, weight) / world_size).backward()
        plain = weights.clone().requires_grad_()
        torch.nn.functional.cross_entropy(
            (whole[0] @ plain).flatten(0, 1), whole[1].flatten()
        ).backward()
        torch.testing.assert_close(own.grad, plain.grad)


class Once(IterableDataset):
    def __init__(self):
        self.samples = iter(range(SIZE))

    def __iter__(self):
        yield from self.samples


@pytest.mark.parametrize("in_run", [True, False])
@pytest.mark.parametrize("num_done", [2, 9])
@pytest.mark.parametrize(
    "make", [Once, lambda: (number for number in range(SIZE)), lambda: map(int, range(SIZE))]
)
def test_a_generator_that_was_made_once_is_refused_in_its_second_epoch(
    make, num_done, in_run, monkeypatch
):
    if in_run:
        resume_at({}, monkeypatch)
    data = make()
    assert len(list(itertools.islice(session.batches(data, BATCH, 0), num_done))) == min(
        num_done, 4
    )
    if num_done == 2 and (make is Once or not in_run):
        return  # what it has left cannot be told from an epoch
    with pytest.raises(
        ConfigError, match="dataset: expected an iterable that begins anew in each epoch"
    ):
        list(session.batches(data, BATCH, 1))


OTHERS = TensorDataset(torch.arange(17))


class Killed(Exception):
    pass


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "sets",
    [
        [NUMBERS],
        [NUMBERS, OTHERS],
        [Stream(), OTHERS],
        [OTHERS, Stream(), NUMBERS],
        [NUMBERS, NUMBERS],
        [torch.arange(3), NUMBERS, torch.arange(6)],
    ],
)
def test_data_sets_one_after_the_other_lose_and_double_nothing_wherever_it_is_killed(
    sets, seed, monkeypatch
):
    """It saves now and then, in the loops and between them, and is killed there too, before and
    after a save.
    """
    draws, seen, position = random.Random(seed), Counter(), {}
    saves, kills = draws.uniform(0.1, 0.7), draws.uniform(0.05, 0.2)
    while True:
        current, new = resume_at(copy.deepcopy(position), monkeypatch), Counter()

        def pause(may_save, current=current, new=new):
            nonlocal position
            if draws.random() < kills:
                raise Killed
            if may_save and draws.random() < saves:
                position = copy.deepcopy(current._position)
                seen.update(new)
                new.clear()
                if draws.random() < kills:
                    raise Killed

        try:
            for epoch in session.epochs(3):
                for number, dataset in enumerate(sets):
                    for batch, _ in session.batches(dataset, BATCH, epoch):
                        samples = batch[0] if isinstance(batch, (tuple, list)) else batch
                        new.update((epoch, number, sample) for sample in samples.tolist())
                        pause(may_save=True)
                    pause(may_save=epoch > 0 or len(sets) == 1)
            break
        except Killed:
            continue
    seen.update(new)
    sizes = [SIZE if isinstance(each, Stream) else len(each) for each in sets]
    whole = [(number, sample) for number, size in enumerate(sizes) for sample in range(size)]
    assert seen == Counter((epoch, *each) for epoch in range(3) for each in whole)


def test_a_data_set_that_a_loop_has_left_is_left_after_a_restart_too(monkeypatch):
    current = resume_at({}, monkeypatch)
    for _ in session.batches(NUMBERS, BATCH, 0):
        break
    for _ in session.batches(OTHERS, BATCH, 0):
        break
    resume_at(copy.deepcopy(current._position), monkeypatch)
    assert list(session.batches(NUMBERS, BATCH, 0)) == []
    assert len(list(session.batches(OTHERS, BATCH, 0))) == 2
    resume_at(copy.deepcopy(current._position), monkeypatch)
    assert list(session.batches(NUMBERS, BATCH, 0)) == []
    with pytest.raises(
        ConfigError,
        match="dataset: expected 17 samples, with which the checkpoint was written, got 23",
    ):
        list(session.batches(NUMBERS, BATCH, 0))


class Tens(IterableDataset):
    def __iter__(self):
        yield from range(100, 110)


def train(directory, dies_at):
    """Two epochs of two data sets; the last rank is killed after the step `dies_at`, with a
    checkpoint two before.
    """
    dist.init_process_group("gloo")
    state = session.load() or {"step": 0, "sum": 0.0}
    step, total = state["step"], torch.tensor(state["sum"], dtype=torch.float64)
    log = Path(directory, f"{os.getpid()}")
    for epoch in session.epochs(2):
        # forked beside gloo's threads
        numbers = session.batches(NUMBERS, BATCH, epoch, num_workers=1)
        for batch, weight in itertools.chain(numbers, session.batches(Tens(), BATCH, epoch)):
            batch = batch if isinstance(batch, (tuple, list)) else [batch]
            gradient = weight * batch[0].double().mean()  # as DDP's: the mean over the ranks
            dist.all_reduce(gradient)
            total += gradient / dist.get_world_size()
            step += 1
            with log.open("a") as file:
                file.write(json.dumps([epoch, step, batch[0].tolist() if weight else []]) + "\n")
            if step % 5 == 0:
                session.save({"step": step, "sum": total.item()}, step)
            if step == dies_at and not state["step"]:
                session.current().wait()  # on rank 0, which writes
                dist.barrier()
                if dist.get_rank() == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
    return total.item()


@pytest.mark.long
def test_a_restart_at_another_number_of_ranks_loses_and_doubles_no_sample(tmp_path):
    for name in ("whole", "log"):
        (tmp_path / name).mkdir()
    expected = flyte_ddp.run(train, str(tmp_path / "whole"), 0)
    options = {"checkpoints": str(tmp_path / "checkpoints")}
    with pytest.raises(RankFailure, match="SIGKILL"):
        flyte_ddp.run(train, str(tmp_path / "log"), 7, nproc_per_node=2, max_restarts=0, **options)
    before = lines_of(tmp_path / "log")
    (tmp_path / "log").rename(tmp_path / "before")
    (tmp_path / "log").mkdir()
    total = flyte_ddp.run(train, str(tmp_path / "log"), 7, nproc_per_node=3, **options)
    after = lines_of(tmp_path / "log")
    assert min(step for _, step, _ in after) == 6
    counts = Counter(
        (epoch, sample) for epoch, step, samples in before if step <= 5 for sample in samples
    )
    counts += Counter((epoch, sample) for epoch, _, samples in after for sample in samples)
    numbers = [*range(SIZE), *range(100, 110)]
    assert counts == Counter((epoch, sample) for epoch in range(2) for sample in numbers)
    assert total == pytest.approx(expected, rel=1e-12)


def lines_of(directory):
    return [
        json.loads(line) for file in directory.iterdir() for line in file.read_text().splitlines()
    ]


def count_without_looking(directory):
    """Each sample is noted once it is trained on. It saves now and then, and never asks whether it
    has to stop.
    """
    dist.init_process_group("gloo")
    done = (session.load() or {"done": 0})["done"]
    for epoch in range(40):
        for batch, weight in session.batches(NUMBERS, BATCH, epoch):
            time.sleep(0.1 if Path(directory, "slow").exists() else 0)
            dist.barrier()
            done += 1
            with Path(directory, f"{os.getpid()}.log").open("a") as file:
                file.write(json.dumps([epoch, done, batch[0].tolist() if weight else []]) + "\n")
            session.report(step=done)
            if dist.get_rank() == 0 and done % 3 == 0:
                session.save({"done": done}, done)
    return done


@pytest.mark.long
def test_a_function_that_does_not_look_loses_no_step_to_a_worker_that_leaves_and_to_growth(
    start_worker, scheduler, tmp_path, monkeypatch
):
    fork_functions(monkeypatch)
    (tmp_path / "slow").touch()
    nannies = [start_worker(scheduler, f"node-{index}") for index in range(2)]
    config = ClusterConfig(
        "existing", scheduler_address=scheduler, min_nodes=1, node_timeout=30, grow_delay=1
    )
    config = dataclasses.replace(config, max_restarts=0, grow_interval=0)
    run = new_run(tmp_path)

    class Grown:
        def handle(self, event):
            if isinstance(event, events.RunStarted) and len(events_of(run, events.RunStarted)) == 3:
                (tmp_path / "slow").unlink()

        def close(self, error):
            pass

    faults = [
        At(4, lambda: nannies[1].send_signal(signal.SIGTERM)),
        At(10, lambda: start_worker(scheduler, "node-2")),
    ]
    program = Program(
        "count", cloudpickle.dumps(_Call(count_without_looking, (str(tmp_path),))), ("tests",)
    )
    with open_cluster(config, "test") as client:
        job = Job(program, str(tmp_path / "checkpoints"), time.time())
        run.result = driver.run(
            job, DaskPlace(client, config), None, [run, *faults, Grown()], run.relay
        )
    assert [event.num_nodes for event in events_of(run, events.RunStarted)] == [2, 1, 2]
    ends = [event.step for event in events_of(run, events.AttemptEnded)]
    assert [event.step for event in events_of(run, events.CheckpointLoaded)] == [0, *ends]
    counts = Counter(
        (epoch, sample) for epoch, _, samples in logged(tmp_path) for sample in samples
    )
    assert counts == Counter((epoch, sample) for epoch in range(40) for sample in range(SIZE))


def logged(directory):
    return [
        json.loads(line)
        for file in directory.glob("*.log")
        for line in file.read_text().splitlines()
    ]
