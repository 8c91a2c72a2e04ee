"""A bad step is found before its update, and the samples behind it are named."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed import HashStore
from torch.optim.lr_scheduler import StepLR

from flyte_ddp.checkpoints.peers import Peers
from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.errors import NonFiniteLoss, RankFailure
from flyte_ddp.events import AttemptStarted, BadSample, StepFoundBad, parse_history, to_line
from flyte_ddp.rank.plan import epoch_order
from flyte_ddp.world import World
from tests.support.gang import session_of
from tests.support.recipe_with_bad_sample import Planted
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

RECIPE = "tests.support.recipe_with_bad_sample.Planted"
# kinds of bad samples, with the config that detects them
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
    assert run.last_step < bad.step  # the bad step was not taken
    assert parse_history(to_line(bad).encode(), "")[0].samples[0].index == 29


def test_a_loss_far_above_the_median_is_bad_and_the_losses_are_in_the_checkpoint(tmp_path):
    config = {"recipe_options": planted(29, "huge"), "learning_rate": 0.001}
    trainer = new_trainer(new_run(tmp_path, RECIPE), spike_factor=20.0, **config)
    with pytest.raises(NonFiniteLoss, match=r"x the median .* samples: 29 \(file-29.png\)"):
        trainer.fit()
    # the window has the losses of all steps so far, the bad one's included
    assert len(trainer.state.progress.to_dict()["losses"]) == trainer.state.progress.step + 1
    new_trainer(new_run(tmp_path / "off", RECIPE), epochs=1, **config).fit()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "num_ranks", "parallel"),
    [
        ("pixel", 1, "ddp"),
        ("pixel", 3, "fsdp"),
        ("label", 2, "fsdp"),
        ("label", 3, "ddp"),
        ("huge", 1, "fsdp"),
        ("huge", 2, "ddp"),
    ],
)
def test_planted_samples_are_named_at_any_number_of_ranks(tmp_path, kind, num_ranks, parallel):
    # A sample of the first epoch's last batch, so that there are losses to compare with.
    bad = int(epoch_order(36, 0, 1)[-num_ranks])
    run = new_run(tmp_path, RECIPE)
    with pytest.raises(RankFailure, match=rf"samples: {bad} \(file-{bad}.png\)"):
        run.train(num_ranks, parallel=parallel, recipe_options=planted(bad, kind), **KINDS[kind])


def test_each_rank_keeps_its_part_of_the_state_before_a_bad_step_also_after_a_checkpoint(tmp_path):
    met = HashStore()
    first, second = (Peers(World(rank, 2, torch.device("cpu")), met) for rank in range(2))
    first.announce(3, "step-0000000003-4f1c88a2")  # a checkpoint that both have saved
    store = CheckpointStore(str(tmp_path), 2, peers=second)
    store.save_bad({"weight": torch.ones(2)}, 5, lambda: None)
    assert [each.name for each in tmp_path.iterdir()] == ["bad-step-0000000005-00001.pt"]


def test_a_function_learns_which_samples_its_step_had(tmp_path):
    class Samples(list):
        def key(self, index):
            return f"row {index}"

    session, link = session_of()
    from flyte_ddp.rank.batches import Batches, EpochBatches

    batches = EpochBatches(Samples(range(10)), 4, 0, 0, 0, None)
    given = Batches(batches, lambda each: session.position.track(each, 0))
    for step, (batch, _) in enumerate(given, 1):
        session.reporter.report(step, None, {"loss": math.nan if step > 1 else 1.0})
        if step == 2:
            expected = [BadSample(each, f"row {each}", None) for each in batch.tolist()]
    (bad,) = (each for each in link.events if isinstance(each, StepFoundBad))
    assert (bad.step, bad.samples) == (2, expected)


def states_of(run):
    state, _, _ = CheckpointStore(str(run.checkpoints), 2).load_latest()
    return state


def test_a_skipped_step_leaves_nothing_behind(tmp_path, monkeypatch):
    # The schedule also advances after a step that is left out.
    def lower(self, optimizer, config, num_steps):
        return StepLR(optimizer, 1, gamma=0.8)

    monkeypatch.setattr(Planted, "schedule", lower)
    config = {"recipe_options": planted(29, "pixel", mixes=True), "ema_decay": 0.9}
    skipping = new_trainer(new_run(tmp_path / "one", RECIPE), on_bad_step="skip", **config)
    skipping.fit()
    assert [epoch for epoch, _ in skipping.state.progress.left_out] == [1, 2, 3]
    without = new_trainer(new_run(tmp_path / "two", RECIPE), **config)
    without.state.progress.left_out = skipping.state.progress.left_out
    without.fit()
    for name, value in without.state.model.state_dict().items():
        assert value.equal(skipping.state.model.state_dict()[name]), name
    assert all(
        each.equal(skipping.state.average.values[n])
        for n, each in without.state.average.values.items()
    )


def test_a_gradient_that_is_not_finite_is_skipped_too_and_so_many_steps_at_most(tmp_path):
    trainer = new_trainer(new_run(tmp_path, RECIPE), on_bad_step="skip", max_bad_steps=2)
    next(trainer.state.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteLoss, match="norm is .* at step 3 .*max_bad_steps: 2 were met"):
        trainer.fit()


@pytest.mark.parametrize("parallel", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_a_killed_run_leaves_out_the_batches_that_an_undisturbed_one_leaves_out(
    tmp_path, monkeypatch, parallel
):
    # met in the fourth batch of the first epoch, after the state of step 2
    bad = int(epoch_order(36, 0, 1)[3 * 6])
    config = {
        "recipe_options": planted(bad, "pixel"),
        "on_bad_step": "rewind",
        "global_batch_size": 6,
        "memory_interval": 2,
        "parallel": parallel,
    }
    whole = new_run(tmp_path / "whole", RECIPE).train(2, **config)
    lists = states_of(whole)["progress"]
    assert lists["left_out"][:2] == [[1, 2], [1, 3]]
    assert lists["rewinds"][0] == [1, 2]
    monkeypatch.setenv("FAULT", "kill 1 10")
    killed = new_run(tmp_path / "killed", RECIPE).train(2, max_restarts=3, **config)
    assert sum(isinstance(each, AttemptStarted) for each in killed.events) > 1
    assert states_of(killed)["progress"]["left_out"] == lists["left_out"]
    torch.testing.assert_close(killed.state(), whole.state(), rtol=0, atol=0)


def test_a_run_without_a_state_and_one_that_went_back_too_often_stop(tmp_path):
    config = {"recipe_options": planted(29, "pixel"), "on_bad_step": "rewind"}
    with pytest.raises(NonFiniteLoss, match="on_bad_step: there is no state to go back to"):
        new_trainer(new_run(tmp_path / "new", RECIPE), **config).fit()
    trainer = new_trainer(new_run(tmp_path, RECIPE), global_batch_size=6, **config)
    trainer.parallelism.recipe.plain_losses = lambda outputs, targets: outputs.sum(1) * math.nan
    trainer.checkpoints.save(best=False)
    with pytest.raises(NonFiniteLoss, match="the run went back to step 0 3 times before"):
        trainer.fit()
    assert trainer.state.progress.left_out == [[1, 0], [1, 1], [1, 2]]
