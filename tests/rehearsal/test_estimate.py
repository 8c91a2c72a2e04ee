"""The estimate of a run: exact where arithmetic tells it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flyte_ddp.__main__ import main
from flyte_ddp.recipes import Recipe, config_of
from flyte_ddp.rehearsal.estimate import estimate

WIDTH = 256
FLOAT = 4


class Wide(Recipe):
    """Linear layers with known sizes of state and activations."""

    def datasets(self, directory):
        data = TensorDataset(torch.ones(100, WIDTH), torch.zeros(100, dtype=torch.long))
        return data, data

    def model(self):
        pair = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))  # noqa: E731
        return nn.Sequential(pair(), pair(), nn.Linear(WIDTH, 10))

    def blocks(self, model):
        return list(model)[:2]


def made(num_ranks=1, **overrides):
    config = config_of("digits", {"optimizer": "adamw", "global_batch_size": 16, **overrides})
    return estimate(Wide(), config, None, num_ranks)


def test_what_arithmetic_tells_is_exact():
    one = made()
    weights = FLOAT * one.num_parameters
    assert one.num_parameters == 4 * (WIDTH * WIDTH + WIDTH) + 10 * WIDTH + 10
    # each weight also has a step counter
    assert one.state_bytes == pytest.approx(4 * weights, rel=1e-3)
    assert made(optimizer="sgd").state_bytes == 3 * weights
    frozen = made(frozen_layers=["0"])
    assert one.state_bytes - frozen.state_bytes == pytest.approx(
        3 * FLOAT * 2 * (WIDTH * WIDTH + WIDTH), rel=1e-3
    )
    # Each layer's input stays until the backward pass, and the loss has some numbers of its own.
    assert one.activation_bytes == pytest.approx(5 * 16 * WIDTH * FLOAT, rel=0.05)
    split = made(num_ranks=8, parallel="fsdp")
    assert split.state_bytes == one.state_bytes / 8
    assert split.activation_bytes > 6 * FLOAT * WIDTH * WIDTH, "two blocks and the gradient of one"
    assert (one.batch_size, split.batch_size, made(2, gradient_accumulation=3).batch_size) == (
        16,
        2,
        3,
    )
    assert made(activation_checkpointing=True).activation_bytes < 0.7 * one.activation_bytes
    assert one.epoch_seconds > 0


def test_the_command_prints_one_line_that_ends_with_whether_the_rank_fits(capsys):
    command = ["estimate", "--recipe", "digits", "--gpus", "8"]
    assert main([*command, "--gpu-memory", "80"]) == main([*command, "--gpu-memory", "0.001"]) == 0
    fitting, too_large = capsys.readouterr().out.splitlines()
    number = r"[\d.e-]+"
    for line, end in [(fitting, "fits into 80 GiB"), (too_large, "does not fit into 0.001 GiB")]:
        assert re.fullmatch(
            rf"151,306 parameters, 4 samples in a forward pass: {number} GiB a rank \(state "
            rf"{number}, "
            rf"activations {number}\), {number} s an epoch on (cpu|cuda); {end}",
            line,
        )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--recipe", "digit"], "error: recipe: expected"),
        (
            ["--recipe", "digits", "--gpus", "0"],
            "error: --gpus: expected a whole number of at least 1, got 0",
        ),
        (
            ["--recipe", "digits", "--config", '{"epoch": 1}'],
            "error: config: expected a known field (did you mean epochs?)",
        ),
        (
            ["--recipe", "digits"],
            "error: recipe: expected one whose step runs on this machine, got LookupError: no such",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, expected, capsys, monkeypatch):
    def losses(self, outputs, targets):
        raise LookupError("no such\nclass")

    monkeypatch.setattr("flyte_ddp.recipes.digits.Digits.losses", losses)
    assert main(["estimate", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(expected)
    assert error.count("\n") == 1
