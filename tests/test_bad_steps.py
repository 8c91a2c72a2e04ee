"""A bad step is found before its update, and the samples behind it are named."""

from __future__ import annotations

import math

import pytest

from flyte_ddp.errors import NonFiniteLoss, RankFailure
from flyte_ddp.events import BadSample, StepFoundBad, from_dict, to_dict
from flyte_ddp.rank.data import epoch_order
from tests.support.gang import session_of
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

RECIPE = "tests.support.planted.Planted"
# what is planted, and how much of a step's loss says so
KINDS = {"pixel": {}, "label": {}, "huge": {"spike_factor": 20.0}}


def planted(bad, kind, mixes=False):
    return {"bad": bad, "kind": kind, "mixes": mixes}


def bad_steps(run):
    return [each for each in run.events if isinstance(each, StepFoundBad)]


@pytest.mark.parametrize(("kind", "mixes"), [("pixel", True), ("label", False)])
def test_the_sample_behind_nan_is_named_by_its_key_on_all_ranks(tmp_path, kind, mixes):
    run = new_run(tmp_path, RECIPE)
    with pytest.raises(RankFailure, match=r"NonFiniteLoss: the loss is nan .* 29 \(file-29.png\)"):
        run.train(2, recipe_options=planted(29, kind, mixes))
    (bad,) = bad_steps(run)
    assert bad.samples[0].key == "file-29.png"
    assert run.last_step < bad.step  # it was not taken
    assert from_dict(to_dict(bad)).samples[0].index == 29


def test_a_loss_far_above_the_median_is_bad_and_the_losses_are_in_the_checkpoint(tmp_path):
    config = {"recipe_options": planted(29, "huge"), "learning_rate": 0.001}
    trainer = new_trainer(new_run(tmp_path, RECIPE), spike_factor=20.0, **config)
    with pytest.raises(NonFiniteLoss, match=r"x the median .* samples: 29 \(file-29.png\)"):
        trainer.fit()
    # the window has the losses of all steps so far, the bad one's included
    assert len(trainer.progress.to_dict()["losses"]) == trainer.progress.step + 1
    new_trainer(new_run(tmp_path / "off", RECIPE), epochs=1, **config).fit()


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_planted_samples_are_named_at_any_number_of_ranks(tmp_path, parallel, num_ranks, kind):
    # of the last batch of the first epoch, so that there are losses to compare with
    bad = int(epoch_order(36, 0, 1)[-num_ranks])
    run = new_run(tmp_path, RECIPE)
    with pytest.raises(RankFailure, match=rf"samples: {bad} \(file-{bad}.png\)"):
        run.train(num_ranks, parallel=parallel, recipe_options=planted(bad, kind), **KINDS[kind])


def test_a_function_learns_which_samples_its_step_had(tmp_path):
    class Samples(list):
        def key(self, index):
            return f"row {index}"

    session, link = session_of()
    from flyte_ddp.rank.batches import Batches, EpochBatches

    batches = EpochBatches(Samples(range(10)), 4, 0, 0, 0, None)
    given = Batches(batches, lambda each: session.track(each, 0))
    for step, (batch, _) in enumerate(given, 1):
        session.report(step, None, {"loss": math.nan if step > 1 else 1.0})
        if step == 2:
            expected = [BadSample(each, f"row {each}", None) for each in batch.tolist()]
    (bad,) = (each for each in link.events if isinstance(each, StepFoundBad))
    assert (bad.step, bad.samples) == (2, expected)
