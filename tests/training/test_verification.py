"""Which rank computes wrongly, by what all ranks computed."""

from __future__ import annotations

import pytest
import torch

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.training.verification import CHUNK, differ, find_wrong, summarize
from tests.support.errors import raises_one_line

RIGHT = torch.randn(3 * CHUNK + 5, generator=torch.Generator().manual_seed(0))


def flip(gradient, bit, place=300):
    flipped = gradient.clone()
    flipped[place : place + 1].view(torch.int32).bitwise_xor_(1 << bit)
    return flipped


def answers(*gradients):
    return torch.stack([summarize(each) for each in gradients])


OTHER, ROUNDED = flip(RIGHT, 30), RIGHT * (1 + 1e-4)


@pytest.mark.parametrize(
    ("first", "again", "expected"),
    [
        pytest.param([RIGHT, ROUNDED], [ROUNDED, RIGHT], [], id="rounding"),
        pytest.param([RIGHT, OTHER], [RIGHT, RIGHT], [1], id="of two, once"),
        pytest.param([RIGHT, OTHER], [RIGHT, OTHER], [], id="of two, always: not known"),
        pytest.param([OTHER, RIGHT, RIGHT], [OTHER, RIGHT, RIGHT], [0], id="of three, always"),
        pytest.param([RIGHT, RIGHT, OTHER], [RIGHT, RIGHT, RIGHT], [2], id="of three, once"),
        pytest.param(
            [OTHER, RIGHT, OTHER, RIGHT, RIGHT],
            [RIGHT, RIGHT, OTHER, RIGHT, RIGHT],
            [0, 2],
            id="two of five",
        ),
    ],
)
def test_a_rank_that_differs_from_itself_or_from_most_is_wrong(first, again, expected):
    assert find_wrong(answers(*first), answers(*again)) == expected


@pytest.mark.parametrize("bit", range(23, 31))
def test_a_flipped_bit_of_the_exponent_is_seen(bit):
    expected = answers(RIGHT, RIGHT)
    found = answers(RIGHT, flip(RIGHT, bit, place=int(RIGHT.abs().argmax())))
    assert differ(found, expected).tolist() == [False, True]


def test_gradients_that_are_not_finite_on_all_ranks_are_equal():
    broken = RIGHT.clone()
    broken[3], broken[400] = torch.nan, -torch.inf
    assert not differ(answers(broken, broken), answers(broken, broken)).any()
    assert differ(answers(broken), answers(RIGHT)).all()


def test_ranks_that_hold_parts_of_the_model_are_not_compared():
    expected = "verify_interval: expected 0 with parallel: fsdp, got 8"
    with raises_one_line(ConfigError, match=expected):
        TrainingConfig(parallel="fsdp", verify_interval=8)
