from __future__ import annotations

import argparse
import functools
import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from flyte_ddp.launch.arguments import MAX_LENGTH, name_arguments
from flyte_ddp.launch.run import function_program


@dataclass
class Options:
    rates: list[float]
    place: Path = Path("data")
    inner: argparse.Namespace = field(default_factory=lambda: argparse.Namespace(width=3))


def train(learning_rate, epochs=3, *rest, schedule="cosine", **more):
    """A function with parameters of all kinds."""


DEFAULTS = {"epochs": 3, "rest": [], "schedule": "cosine"}


@pytest.mark.parametrize(
    ("arguments", "keywords", "expected"),
    [
        ((0.1,), {}, {"learning_rate": 0.1, "epochs": 3, "rest": [], "schedule": "cosine"}),
        (
            (0.1, 5, "a", "b"),
            {"seed": 7},
            {
                "learning_rate": 0.1,
                "epochs": 5,
                "rest": ["a", "b"],
                "schedule": "cosine",
                "seed": 7,
            },
        ),
        (
            (Options([0.1, 0.2]), None),
            {"schedule": ("linear", True)},
            {
                "learning_rate": {"rates": [0.1, 0.2], "place": "data", "inner": {"width": 3}},
                "epochs": None,
                "rest": [],
                "schedule": ["linear", True],
            },
        ),
        # What JSON does not have, or what is long, is left out.
        (
            (torch.zeros(3), [0] * (MAX_LENGTH + 1), {"data": b"x"}),
            {"schedule": Options, "text": "x" * MAX_LENGTH},
            {},
        ),
        ((), {}, DEFAULTS),
        ((), {"learning_rate": 1, "other": 2}, {"learning_rate": 1, "other": 2, **DEFAULTS}),
        ((1, 2), {"epochs": 3}, {}),  # The call will fail.
    ],
)
def test_plain_arguments_have_the_names_of_their_parameters(arguments, keywords, expected):
    assert name_arguments(train, arguments, keywords) == expected


def test_an_argument_that_contains_itself_is_left_out():
    endless = []
    endless.append(endless)
    assert name_arguments(train, (endless, 1), {"schedule": 2}) == {
        "epochs": 1,
        "rest": [],
        "schedule": 2,
    }


def test_a_figure_that_is_not_finite_stays_what_it_is():
    assert math.isnan(name_arguments(train, (math.nan,), {})["learning_rate"])


def test_the_arguments_of_partials_are_named_too():
    program = function_program(functools.partial(train, 0.5, seed=1), (4,), {})
    assert program.named_arguments == {
        "learning_rate": 0.5,
        "epochs": 4,
        "rest": [],
        "schedule": "cosine",
        "seed": 1,
    }


def test_a_builtin_without_a_signature_has_no_names():
    assert name_arguments(max, (1, 2), {}) == {}
