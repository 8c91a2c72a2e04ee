"""Half precision: sums stay in single precision, and fp16's scaled losses resume exactly."""

from __future__ import annotations

import pytest
import torch

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import NonFiniteLoss
from flyte_ddp.events import AttemptStarted
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.passes import forward
from flyte_ddp.world import ALONE
from tests.support.recipes import Tiny
from tests.support.runs import new_run
from tests.support.trainers import new_trainer


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_losses_and_metrics_are_sums_in_single_precision(precision):
    parallelism = Parallelism(Tiny(), TrainingConfig(precision=precision), ALONE)
    model = torch.nn.Linear(8, 3)
    outputs = forward(model, parallelism, torch.randn(4, 8))
    assert outputs.dtype == torch.float32
    assert torch.equal(outputs, outputs.to(parallelism.half).float())  # computed in half


def test_a_step_whose_gradient_overflows_is_left_out_and_the_others_are_those_of_fp32(tmp_path):
    whole = new_trainer(new_run(tmp_path / "whole"), precision="fp16")
    taken = []
    whole.state.optimizer.register_step_post_hook(
        lambda *given: taken.append(whole.state.progress.step)
    )
    whole.state.scaler._init_scale = 2.0**24  # The scale is too large for the first steps.
    whole.fit()
    assert taken[0] > 0
    assert whole.state.scaler.get_scale() == 2.0 ** (24 - (27 - len(taken)))

    plain = new_trainer(new_run(tmp_path / "plain"))
    plain.fit()
    losses = [each.test_loss for each in whole.state.progress.epochs]
    expected = [each.test_loss for each in plain.state.progress.epochs]
    assert losses == pytest.approx(expected, rel=0.2)


def test_a_gradient_in_fp16_is_clipped_by_its_norm_before_it_was_scaled(tmp_path):
    states = []
    for precision in ("fp16", "fp32"):
        trainer = new_trainer(
            new_run(tmp_path / precision), precision=precision, gradient_clip_norm=0.1, epochs=1
        )
        trainer.state.scaler._init_scale = 2.0**10  # No step overflows at this scale.
        trainer.fit()
        states.append(trainer.state.model.state_dict())
    torch.testing.assert_close(*states, rtol=0.01, atol=0.002)


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (
            "Skipping",
            {"optimizer": "adamw", "find_unused_parameters": True, "broadcast_buffers": False},
        ),
        pytest.param("Tiny", {"parallel": "fsdp"}, marks=pytest.mark.long),
    ],
)
def test_a_killed_run_in_fp16_ends_with_the_same_weights(tmp_path, monkeypatch, recipe, options):
    options |= {"precision": "fp16", "gradient_clip_norm": 1.0, "evaluation_interval": 4}
    whole = new_run(tmp_path / "whole", recipe).train(2, **options)
    assert not [line for line in whole.lines if "FutureWarning" in line]
    monkeypatch.setenv("FAULT", "kill 1 20")
    killed = new_run(tmp_path / "killed", recipe).train(2, max_restarts=3, **options)
    assert sum(isinstance(event, AttemptStarted) for event in killed.events) > 1
    torch.testing.assert_close(killed.state(), whole.state(), rtol=0, atol=0)
    assert [each.step for each in killed.result.epochs] == [4, 8, 9, 13, 17, 18, 22, 26, 27]
    assert [each.test_loss for each in killed.result.epochs] == [
        each.test_loss for each in whole.result.epochs
    ]


def test_gradients_that_always_overflow_end_the_training_in_one_line(tmp_path):
    trainer = new_trainer(new_run(tmp_path), precision="fp16")
    parameter = next(trainer.state.model.parameters())
    parameter.register_hook(lambda gradient: gradient * float("nan"))
    message = "^precision: every gradient overflows in fp16 up to step 27: bf16 or fp32 may help"
    with pytest.raises(NonFiniteLoss, match=message):
        trainer.fit()
