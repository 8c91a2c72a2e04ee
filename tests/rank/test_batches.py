"""The batches of a user's own loop: each sample once, the same at any number of ranks, also after a
restart.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import json
import os
import random
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

from flyte_ddp import events, session
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.launch.run import FunctionCall
from flyte_ddp.rank.position import START
from tests.support.dask_runs import At, events_of
from tests.support.errors import raises_one_line
from tests.support.gang import session_of
from tests.support.runs import new_run

SIZE, BATCH = 23, 6
NUMBERS = TensorDataset(torch.arange(SIZE))
OTHERS = TensorDataset(torch.arange(17))


class Killed(Exception):
    pass


class Noisy:
    """A data set that draws from every generator, as augmentation does."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor([index, *draw()])


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(SIZE)


class Shards(IterableDataset):
    """Numbers that each epoch reads in an order of its own, each with draws of its own."""

    numbers = range(SIZE)

    def set_epoch(self, epoch):
        self.numbers = random.Random(epoch).sample(range(SIZE), SIZE)

    def __iter__(self):
        for number in self.numbers:
            yield torch.tensor([number, *draw()])


def draw():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


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
    current.position.resume({**START, **copy.deepcopy(position)})
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
    resume_at(first.position.current, monkeypatch)  # saved after the first of two data sets
    seen = [len(batches_of(0, 1, monkeypatch, NUMBERS, 0)) for _ in range(2 * visits_the_first)]
    seen += [len(batches_of(0, 1, monkeypatch, NUMBERS, 1)) for _ in range(2)]
    assert seen == ([0, 4, 4, 4] if visits_the_first else [4, 4])
    told = [
        line for line in caplog.messages if "epoch 1 has more data sets than epoch 0 had" in line
    ]
    assert len(told) == (not visits_the_first)  # `session.epochs` begins at the second


def seed_all():
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(7)


def leaves_draws_alone(action):
    """Return whether `action` draws no random numbers of this process. A library's thread that an
    earlier test has left may draw a time to wait, so there are three tries.
    """
    seed_all()
    expected = draw()
    for _ in range(3):
        seed_all()
        action()
        if draw() == expected:
            return True
    return False


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_goes_on_in_mid_epoch_at_another_number_of_ranks_with_its_epochs_draws(
    num_workers, monkeypatch
):
    def read(rank, world_size, epoch, resumes=False, **options):
        resume_at({**AT_12, "sets": [{}]} if resumes else {}, monkeypatch)
        given = Shards(), epoch
        seen = batches_of(rank, world_size, monkeypatch, *given, num_workers=num_workers, **options)
        return [samples for samples, _ in seen]

    whole = [sample for samples in read(0, 1, 2) for sample in samples]
    assert whole not in (sum(read(0, 1, 3), []), sum(read(0, 1, 2, seed=1), []))

    def read_rest():
        ranks = [read(rank, 2, 2, resumes=True) for rank in range(2)]
        rest = [each for parts in zip(*ranks, strict=True) for samples in parts for each in samples]
        assert rest == whole[12:]

    assert leaves_draws_alone(read_rest)


AT_12 = {"epoch": 2, "num_samples": 12, "is_over": False, "num_sets": 0}


def test_a_stream_that_ends_before_the_checkpoint_is_refused(monkeypatch):
    for size, expected in ((12, None), (11, "at least the 12 samples that .* had done, got 11")):
        resume_at({**AT_12, "sets": [{}]}, monkeypatch)
        data = type("Short", (Stream,), {"__iter__": lambda self, size=size: iter(range(size))})()
        if expected is None:
            assert list(session.batches(data, BATCH, 2)) == []
            continue
        with pytest.raises(ConfigError, match=f"dataset: expected {expected}"):
            list(session.batches(data, BATCH, 2))


def test_torchdatas_loader_goes_on_where_the_session_was_saved(monkeypatch):
    StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    samples, position, state = [], {}, None
    for has_state in (None, False, True):
        current = resume_at(position, monkeypatch)
        loader = StatefulDataLoader(session.batches(NUMBERS, BATCH, 4), batch_size=None)
        assert len(loader) == 4
        if has_state:
            loader.load_state_dict(state)
        for number, (batch, _) in enumerate(loader):
            samples.append(batch[0].tolist())
            if has_state is None and number == 1:
                position, state = current.position.current, loader.state_dict()
                break
    assert sorted(sum(samples[:4], [])) == list(range(SIZE))
    assert samples[2:4] == samples[4:]


def test_augmentation_is_the_samples_own_and_the_loops_draws_are_left_alone(monkeypatch):
    def rows(rank, world_size, **options):
        seen = batches_of(rank, world_size, monkeypatch, Noisy(), 0, **options)
        return {tuple(row) for samples, _ in seen for row in samples}

    expected = rows(0, 1)
    assert len({row[1:] for row in expected}) == SIZE

    def read_by_two():
        assert rows(0, 2) | rows(1, 2, num_workers=1) == expected

    assert leaves_draws_alone(read_by_two)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            {"world_size": 7},
            "global_batch_size: expected at least 7, a sample for each rank",
        ),
        (
            {"dataset": Stream(), "num_workers": 2},
            "num_workers: expected at most 1 for an iterable data set, .*, got 2",
        ),
    ],
)
def test_a_call_that_cannot_be_is_refused(call, expected, monkeypatch):
    with pytest.raises(ConfigError, match=expected):
        batches_of(0, call.pop("world_size", 1), monkeypatch, **call)


def test_only_one_data_set_is_tracked_at_a_time(monkeypatch):
    resume_at({}, monkeypatch)
    for _ in session.batches(NUMBERS, BATCH, 0):
        assert len(list(session.batches(NUMBERS, BATCH))) == 4
        with pytest.raises(ConfigError, match="epoch: expected None for all but one data set"):
            next(iter(session.batches(NUMBERS, BATCH, 0)))
        break
    outer = iter(session.batches(NUMBERS, BATCH, 1))
    next(outer)
    assert len(list(session.batches(NUMBERS, BATCH, 2))) == 4
    with pytest.raises(ConfigError, match="epoch: expected None for all but one data set"):
        next(outer)


@pytest.mark.parametrize("make", [DataLoader, "torchdata"])
def test_a_loader_that_keeps_its_iterator_may_be_left_for_the_next_epoch(make, monkeypatch):
    if make == "torchdata":
        make = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    current, kept = resume_at({}, monkeypatch), []
    for epoch in range(2):
        kept.append(make(session.batches(NUMBERS, BATCH, epoch), batch_size=None))
        leave_by_break(kept[-1])
    assert current.position.current["epoch"] == 1
    kept.clear()
    assert list(resume_at(save_here(current), monkeypatch).position.epochs(3)) == [2]


@pytest.mark.parametrize(
    ("dataset", "options", "expected"),
    [
        (NUMBERS, {"shuffle": True}, "shuffle: expected False"),
        (NUMBERS, {"seed": 0}, "seed: expected 3"),
        (torch.arange(22), {}, "dataset: number of samples: expected 23"),
        (TensorDataset(torch.arange(SIZE).flip(0)), {}, "dataset: sample 0: expected the same"),
        (NUMBERS, {}, None),
    ],
)
def test_other_data_or_another_order_than_the_checkpoints_are_refused(
    dataset, options, expected, monkeypatch
):
    call = {"seed": 3, "shuffle": False}
    current = resume_at({}, monkeypatch)
    for _ in session.batches(NUMBERS, BATCH, 1, **call):
        saved = current.position.to_save
        break
    resume_at(saved, monkeypatch)
    if expected is None:
        assert len(list(session.batches(dataset, BATCH, 1, **call))) == 3
        return
    with pytest.raises(ConfigError, match=f"{expected}, with which the checkpoint was written"):
        next(iter(session.batches(dataset, BATCH, 1, **{**call, **options})))


class Damaged(Noisy):
    """Numbers, some of them unreadable."""

    UNREADABLE = object()

    def __getitem__(self, index):
        return torch.tensor(index) if index % 3 else self.UNREADABLE


@pytest.mark.parametrize("num_workers", [0, 1])
def test_samples_that_cannot_be_read_are_compared_as_what_they_are(num_workers, monkeypatch):
    current = resume_at({}, monkeypatch)
    for _ in range(2):
        seen = batches_of(0, 1, monkeypatch, Damaged(), 1, num_workers=num_workers)
        assert sorted(sum((samples for samples, _ in seen), [])) == [
            number for number in range(SIZE) if number % 3
        ]
        current = resume_at({**current.position.to_save, "epoch": 0}, monkeypatch)


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


TEXTS = [(torch.tensor(number), {"name": str(number)}) for number in range(SIZE)]
SAME = (
    r"dataset: sample \d+: expected the same on all ranks, as on rank 0, got another one on rank 1"
)


@pytest.mark.parametrize("comes_first", [0, 1])
@pytest.mark.parametrize(
    ("make", "options", "problem"),
    [
        *((lambda rank, data=data: data, {}, None) for data in (NUMBERS, Noisy(), TEXTS, Shards())),
        (lambda rank: OwnDraws(), {"num_workers": 1}, None),
        (lambda rank: OwnStream(), {}, None),
        (lambda rank: Subset(NUMBERS, range(rank, SIZE - 1 + rank, 2)), {}, SAME),
        (lambda rank: iter(range(rank, SIZE, 2)), {}, f"{SAME}: every rank reads the whole data"),
        (
            lambda rank: torch.arange(SIZE - rank),
            {},
            "dataset: number of samples: expected 23 on .* got 22 on rank 1",
        ),
        (lambda rank: [str(number + rank) for number in range(SIZE)], {}, SAME),
        (lambda rank: NUMBERS, {"seed": 1}, "seed: expected .* got .* on rank 1"),
        (lambda rank: NUMBERS, {"shuffle": False}, "shuffle: expected .* got .* on rank 1"),
        (lambda rank: NUMBERS, {"global_batch_size": 8}, "global_batch_size: .* on rank 1"),
    ],
)
def test_ranks_compare_data_and_call_before_the_first_batch(
    make, options, problem, comes_first, monkeypatch
):
    store = HashStore()
    for rank in (comes_first, 1 - comes_first):
        monkeypatch.setattr(session, "_current", session_of(rank, 2, store)[0])
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        call = {"global_batch_size": BATCH, "collate_fn": list, **(options if rank else {})}
        batches = iter(session.batches(make(rank), epoch=3, **call))
        if problem is None or rank == comes_first:
            assert len(list(batches)) >= 2
            continue
        with raises_one_line(ConfigError, match=f"batches: {problem}"):
            next(batches)


@pytest.mark.parametrize(("in_run", "num_done"), [(True, 2), (True, 9), (False, 9)])
def test_a_generator_that_was_made_once_is_refused_in_its_second_epoch(
    num_done, in_run, monkeypatch
):
    if in_run:
        resume_at({}, monkeypatch)
    data = (number for number in range(SIZE))
    seen = list(itertools.islice(session.batches(data, BATCH, 0), num_done))
    assert len(seen) == min(num_done, 4)
    with pytest.raises(ConfigError, match="expected an iterable that begins anew in each epoch"):
        list(session.batches(data, BATCH, 1))


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


@pytest.mark.parametrize("num_done", [2, 4, 5])
def test_a_loop_over_epochs_begins_at_the_checkpoints(num_done, monkeypatch):
    """Four batches are an epoch. A save after its loop has what the epoch does besides, one in the
    loop has not.
    """
    assert list(session.epochs(3)) == [0, 1, 2]
    current = resume_at({}, monkeypatch)
    for number, _ in enumerate(session.batches(NUMBERS, BATCH, 1), 1):
        if number == num_done:
            saved = current.position.to_save
            break
    else:
        saved = current.position.to_save
    resume_at(saved, monkeypatch)
    assert list(session.epochs(3)) == ([2] if num_done == 5 else [1, 2])
    left = [len(list(session.batches(NUMBERS, BATCH, epoch))) for epoch in session.epochs(3)]
    assert sum(left) == 8 - min(num_done, 4)


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


def leave_by_break(batches):
    for number, _ in enumerate(batches):
        if number == 1:
            break


def leave_by_islice(batches):
    for _ in itertools.islice(batches, 2):
        pass


def leave_by_zip(batches):
    """Take a third batch, which is not trained on."""
    for _ in zip(batches, range(2), strict=False):
        pass


def leave_by_return(batches):
    for _ in batches:
        return


def leave_by_error(batches):
    with contextlib.suppress(Killed):
        for _ in batches:
            raise Killed


def leave_by_error_of_a_function(batches):
    def train():
        for _ in batches:
            raise Killed

    with contextlib.suppress(Killed):
        train()


def leave_by_next(batches):
    next(iter(batches))


LEAVINGS = [
    leave_by_break,
    leave_by_islice,
    leave_by_zip,
    leave_by_return,
    leave_by_error,
    leave_by_error_of_a_function,
    leave_by_next,
]


def save_here(current):
    """Return the position that a save would note, as a restart reads it."""
    return copy.deepcopy(current.position.to_save)


@pytest.mark.parametrize("leave", LEAVINGS)
@pytest.mark.parametrize("dataset", [NUMBERS, Stream()])
def test_a_loop_that_is_left_ends_its_epoch(leave, dataset, monkeypatch):
    current = resume_at({}, monkeypatch)
    for epoch in range(2):
        leave(session.batches(dataset, BATCH, epoch))
        resume_at(save_here(current), monkeypatch)
        assert list(session.epochs(4)) == list(range(epoch + 1, 4))
        assert len(list(session.batches(dataset, BATCH, epoch))) == 0
        assert len(list(session.batches(dataset, BATCH, epoch + 1))) == 4
        monkeypatch.setattr(session, "_current", current)


@pytest.mark.parametrize("leave", LEAVINGS)
def test_a_loop_that_is_left_after_another_data_set_ends_only_its_own(leave, monkeypatch):
    current = resume_at({}, monkeypatch)
    positions = []
    for epoch in range(2):
        leave(session.batches(NUMBERS, BATCH, epoch))
        positions.append(save_here(current))
        leave(session.batches(OTHERS, BATCH, epoch))
        positions.append(save_here(current))
    resume_at(positions[2], monkeypatch)
    assert list(session.epochs(3)) == [1, 2]
    assert len(list(session.batches(NUMBERS, BATCH, 1))) == 0
    assert len(list(session.batches(OTHERS, BATCH, 1))) == 3
    resume_at(positions[3], monkeypatch)
    assert list(session.epochs(3)) == [2]


@pytest.mark.parametrize("leave", LEAVINGS)
@pytest.mark.parametrize("was_asked", [True, False])
def test_a_loop_that_is_left_for_a_stop_goes_on_behind_its_last_batch(
    leave, was_asked, monkeypatch
):
    """The function asks by `stop_requested`, or handles the signal itself."""
    current = resume_at({}, monkeypatch)
    batches = iter(session.batches(NUMBERS, BATCH, 1))
    next(batches)
    if was_asked:
        current.process.link.stop_requested = True
        assert session.stop_requested
    else:
        current.stop.was_terminated = True
    leave(batches)
    num_done = current.position.current["num_samples"]
    del batches
    assert current.position.current["num_samples"] == num_done
    resume_at(save_here(current), monkeypatch)
    assert list(session.epochs(3)) == [1, 2]
    left = [len(batch[0]) for batch, _ in session.batches(NUMBERS, BATCH, 1)]
    assert sum(left) == SIZE - num_done


def test_a_stop_after_a_loop_was_left_does_not_open_its_epoch_again(monkeypatch):
    current = resume_at({}, monkeypatch)
    leave_by_break(session.batches(NUMBERS, BATCH, 1))
    current.process.link.stop_requested = True
    assert session.stop_requested
    resume_at(save_here(current), monkeypatch)
    assert list(session.epochs(3)) == [2]


def test_a_save_that_handles_an_error_leaves_the_rest_of_the_epoch_to_a_restart(monkeypatch):
    current = resume_at({}, monkeypatch)
    try:
        for number, _ in enumerate(session.batches(NUMBERS, BATCH, 1)):
            if number == 1:
                raise Killed
    except Killed:
        saved = save_here(current)
    assert save_here(current)["is_over"]
    resume_at(saved, monkeypatch)
    assert len(list(session.batches(NUMBERS, BATCH, 1))) == 2
    try:
        raise Killed
    except Killed:  # The whole training runs inside this handler.
        leave_by_break(session.batches(NUMBERS, BATCH, 2))
        assert save_here(session.current())["is_over"]


@pytest.mark.parametrize("dataset", [NUMBERS, Stream()])
@pytest.mark.parametrize("leave", LEAVINGS)
@pytest.mark.parametrize("has_epochs", [True, False])
def test_a_loop_may_be_opened_again_after_a_look_at_its_first_batches(
    has_epochs, leave, dataset, monkeypatch
):
    position, seen = {}, []

    def train_one_batch(current):
        for epoch in session.epochs(3) if has_epochs else range(3):
            with contextlib.suppress(StopIteration):  # The look fails where no batch is left.
                leave(session.batches(dataset, BATCH, epoch))
            for batch, _ in session.batches(dataset, BATCH, epoch):
                seen.append((epoch, batch[0] if isinstance(batch, tuple) else batch))
                return save_here(current)
        return None

    for _ in range(12):
        position = train_one_batch(resume_at(position, monkeypatch))
    assert train_one_batch(resume_at(position, monkeypatch)) is None
    samples = Counter((epoch, number) for epoch, batch in seen for number in batch.tolist())
    assert samples == Counter((epoch, number) for epoch in range(3) for number in range(SIZE))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_masked_loss_is_weighed_by_tokens_as_the_page_says(world_size, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/your-own-function.md").read_text()
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
            # DDP takes the mean over the ranks too.
            (scope["token_loss"](x @ own, y, weight) / world_size).backward()
        plain = weights.clone().requires_grad_()
        torch.nn.functional.cross_entropy(
            (whole[0] @ plain).flatten(0, 1), whole[1].flatten()
        ).backward()
        torch.testing.assert_close(own.grad, plain.grad)


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
        current, new = resume_at(position, monkeypatch), Counter()

        def pause(may_save, current=current, new=new):
            nonlocal position
            if draws.random() < kills:
                raise Killed
            if may_save and draws.random() < saves:
                position = save_here(current)
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
                file.write(json.dumps([epoch, batch[0].tolist() if weight else []]) + "\n")
            session.report(step=done)
            if dist.get_rank() == 0 and done % 3 == 0:
                session.save({"done": done}, done)


@pytest.mark.long
def test_a_function_that_does_not_look_loses_no_step_to_a_stop(tmp_path, forked_functions):
    (tmp_path / "slow").touch()
    call = cloudpickle.dumps(FunctionCall(count_without_looking, (str(tmp_path),)))
    job = Job(Program("count", call, ("tests",)), str(tmp_path / "checkpoints"), time.time())
    stop, run = StopRequest(), new_run(tmp_path)
    leave = At(4, lambda: stop.set("SIGTERM"))
    with pytest.raises(TrainingStopped):
        driver.run(job, LocalPlace(2), None, [run, leave], run.relay, stop)
    (tmp_path / "slow").unlink()
    stopped = max(event.step for event in events_of(run, events.Reported))
    driver.run(job, LocalPlace(3), None, [run], run.relay)
    assert [event.step for event in events_of(run, events.CheckpointLoaded)] == [0, stopped]
    lines = [line for file in tmp_path.glob("*.log") for line in file.read_text().splitlines()]
    seen = Counter((epoch, each) for epoch, samples in map(json.loads, lines) for each in samples)
    assert seen == Counter((epoch, sample) for epoch in range(40) for sample in range(SIZE))
