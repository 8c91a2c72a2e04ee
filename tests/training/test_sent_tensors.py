"""What the ranks send each other of a model: one line names what cannot be sent, or differs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.distributed import HashStore

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.training.buffer_shapes import KEY, BufferShapes, has_own_buffers
from flyte_ddp.training.contract import open_model
from flyte_ddp.training.ddp import DdpParallelism
from flyte_ddp.training.evaluation import share_buffers
from flyte_ddp.training.fsdp import FsdpParallelism
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import ALONE, RankNotes, World, process_group
from tests.support.gang import run_gang
from tests.support.recipes import Tiny


@pytest.fixture
def group():
    with process_group(ALONE, "gloo", HashStore(), timeout=60):
        yield


def with_buffer(buffer):
    model = nn.Linear(2, 2)
    model.register_buffer("table", buffer)
    return model


EXPANDED = torch.zeros(1).expand(3)


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [
        *((torch.zeros(3).to(each), f"table, of {each}: give it another type")
          for each in (torch.uint16, torch.int16, torch.uint64, torch.float8_e4m3fn)),
        (EXPANDED, "table, an expanded one: add .clone()"),
        *((torch.zeros(3).to(each), "")
          for each in (torch.bool, torch.uint8, torch.float64, torch.bfloat16, torch.complex64)),
        (torch.zeros(2, 3).t(), ""),
        (torch.zeros(0), ""),
    ],
)  # fmt: skip
def test_ddp_names_a_buffer_that_cannot_be_sent(group, buffer, expected):
    parallelism = DdpParallelism(Tiny(), TrainingConfig(), ALONE)
    with contextlib.ExitStack() as stack:
        if expected:
            caught = stack.enter_context(pytest.raises(ConfigError))
        parallelism.replicate(with_buffer(buffer))
    if expected:
        assert str(caught.value).endswith(f"that the ranks can send each other, got {expected}")
        assert "Tiny.model: expected" in str(caught.value)


def scaled(shape):
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.zeros(shape))
    return model


@pytest.mark.parametrize(
    ("model", "precision", "expected"),
    [
        (scaled(()), "fp32", r"that can be split, got scale, a scalar: give it the shape \(1,\)$"),
        (scaled((0, 3)), "fp32", "that can be split, got scale, an empty one$"),
        (with_buffer(EXPANDED), "fp32", "send each other, got table, an expanded one: add .clone"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)),
            "bf16",
            'precision: expected "fp32" with .* where a BatchNorm1d such as 1 needs .* got "bf16"$',
        ),
    ],
)
def test_fsdp_names_what_it_cannot_split_or_compute(model, precision, expected):
    config = TrainingConfig(parallel="fsdp", precision=precision)
    with pytest.raises(ConfigError, match=expected) as caught:
        FsdpParallelism(Tiny(), config, ALONE).shard(model)
    assert "\n" not in str(caught.value)


class Forked(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, inputs, skips=False):
        return self.first(inputs) if skips else self.second(self.first(inputs))


@pytest.mark.parametrize(
    ("accumulates", "named"),
    [(False, "second.weight, second.bias"), (True, "some of them in its last micro-batch")],
)
def test_a_layer_that_a_rank_leaves_out_is_named_before_the_ranks_meet_again(
    group, accumulates, named
):
    model = Forked()
    parallelism = DdpParallelism(Tiny(), TrainingConfig(), ALONE)
    replica = parallelism.replicate(model)
    replica(torch.ones(1, 2)).sum().backward()
    parallelism.check_gradients(replica, step=0)
    model.zero_grad()
    if accumulates:
        with parallelism.sync(replica, is_last=False):
            replica(torch.ones(1, 2)).sum().backward()
    replica(torch.ones(1, 2), skips=True).sum().backward()
    expected = f"every step, got none for {named} on rank 0 in step 5: .*find_unused_parameters"
    with pytest.raises(ConfigError, match=expected):
        parallelism.check_gradients(replica, step=4)


def test_a_layer_may_be_left_out_where_the_config_allows_it(group):
    config = TrainingConfig(find_unused_parameters=True)
    parallelism = DdpParallelism(Tiny(), config, ALONE)
    replica = parallelism.replicate(Forked())
    for step, skips in enumerate((True, False, True)):
        replica(torch.ones(1, 2), skips=skips).sum().backward()
        parallelism.check_gradients(replica, step)


def shapes_of(num_ranks=2):
    store, models = HashStore(), [with_buffer(torch.zeros(2)) for _ in range(num_ranks)]
    ranks = (World(rank, num_ranks, torch.device("cpu")) for rank in range(num_ranks))
    pairs = zip(models, ranks, strict=True)
    return models, [
        BufferShapes(model, RankNotes(store, KEY, world), "place") for model, world in pairs
    ]


def grow(model, size):
    model.table = torch.zeros(size)


def test_a_mask_that_grows_on_one_rank_alone_is_named_on_all():
    models, shapes = shapes_of()
    for sizes in ((2, 2), (4, 4), (4, 7)):
        for each in shapes:
            each.compare()
        for model, size, each in zip(models, sizes, shapes, strict=True):
            grow(model, size)
            each.note()
    expected = (
        r"^place: expected buffers of one shape .* got table of \[4\] on rank 0 and \[7\] on "
    )
    for each in shapes:
        with pytest.raises(ConfigError, match=expected + "rank 1: .* broadcast_buffers: false$"):
            each.compare()


def test_a_rank_that_is_ahead_is_compared_at_its_own_pass():
    models, shapes = shapes_of()
    for size in range(3, 8):
        shapes[0].compare()  # a pass before the other rank's
        grow(models[0], size)
        shapes[0].note()
        shapes[1].compare()
        grow(models[1], size)
        shapes[1].note()


def test_only_buffers_of_other_modules_than_torchs_are_watched():
    assert not has_own_buffers(nn.Sequential(nn.BatchNorm1d(2)))
    assert has_own_buffers(nn.Sequential(Masked()))


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.zeros(2))


def share(world, store):
    model = with_buffer(torch.full((3,), world.rank, dtype=torch.uint16))
    model.register_buffer("mask", torch.full((2 + world.rank,), float(world.rank)))
    share_buffers(model, world)
    return model.table.tolist(), model.mask.tolist()


def test_buffers_of_any_type_are_shared_and_others_shapes_stay():
    assert run_gang(2, share) == [([0, 0, 0], [0, 0]), ([0, 0, 0], [1, 1, 1])]


@pytest.mark.parametrize("layer", [nn.LazyLinear(2), nn.LazyBatchNorm1d()])
def test_a_layer_of_unknown_size_is_one_line(layer):
    recipe = Tiny()
    recipe.model = lambda: nn.Sequential(nn.Linear(2, 2), layer)
    expected = f"of known sizes, got 1, a {type(layer).__name__}: give its sizes, or let"
    with pytest.raises(ConfigError, match=expected):
        open_model(Parallelism(recipe, TrainingConfig(), ALONE))
