"""The loop trains what a plain loop in one process would, however many ranks share the work."""

from __future__ import annotations

import math
import shutil
import time
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch

from flyte_ddp.checkpoints.store import CheckpointStore
from flyte_ddp.config import Monitor, TrainingConfig, resolve
from flyte_ddp.errors import ConfigError, NonFiniteLoss, RankFailure, StopRequested
from flyte_ddp.events import (
    AttemptStarted,
    CheckpointLoaded,
    CheckpointSaved,
    EpochFinished,
    HistogramsTaken,
    PredictionsMade,
    Reported,
    RunFinished,
    RunStarted,
    find_best,
    split_steps,
)
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.rank.plan import epoch_order
from flyte_ddp.recipes import Recipe, get_recipe
from flyte_ddp.training.optim import learning_rate_factor
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import ALONE
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

CLIP = 0.5  # small enough to clip some steps of the run that uses it
ADAM = {"optimizer": "adam", "precision": "bf16", "learning_rate": 0.01, "weight_decay": 0.01}


def _measure(recipe, model, inputs, targets):
    """Return (summed loss, correct targets, targets) of all samples at once."""
    with torch.no_grad():
        outputs = model(inputs)
    counts = recipe.num_targets(targets)
    return (
        float(recipe.plain_losses(outputs, targets).sum()),
        int(recipe.num_correct(outputs, targets).sum()),
        len(targets) if counts is None else int(counts.sum()),
    )


def _assert_same(run, clip):
    """Compare a run with a plain loop in one process."""
    recipe = get_recipe(run.recipe)
    config = resolve(recipe.defaults, {})
    train, test = (part.tensors for part in recipe.datasets(run.data()))
    torch.manual_seed(config.seed)
    model = recipe.model()
    rate = {"lr": config.learning_rate, "momentum": config.momentum}
    optimizer = torch.optim.SGD(model.parameters(), **rate)
    for epoch in run.result.epochs:
        total = num_targets = 0
        for batch in epoch_order(len(train[0]), config.seed, epoch.epoch).split(
            config.global_batch_size
        ):
            inputs, targets = (part[batch] for part in train)
            loss, _, count = _measure(recipe, model, inputs, targets)
            total, num_targets = total + loss, num_targets + count
            optimizer.zero_grad()
            (recipe.plain_losses(model(inputs), targets).sum() / count).backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        test_loss, num_correct, num_test = _measure(recipe, model, *test)
        assert epoch.train_loss == pytest.approx(total / num_targets, rel=1e-4)
        assert epoch.test_loss == pytest.approx(test_loss / num_test, rel=1e-4)
        assert epoch.metrics["accuracy"] == pytest.approx(num_correct / num_test)
    torch.testing.assert_close(run.state(), dict(model.state_dict()), rtol=1e-4, atol=1e-5)


# Tiny: 97 samples in batches of 12 leave one for the last batch, fewer than there are ranks.
# Sequences: 103 leave 7, in shares of 3, 2 and 2. The share of 3 takes two micro-batches.
@pytest.mark.parametrize(
    ("recipe", "num_ranks", "config"),
    [
        ("Tiny", 2, {}),
        ("Sequences", 3, {"gradient_accumulation": 2, "gradient_clip_norm": CLIP}),
    ],
)
def test_any_number_of_ranks_gives_the_weights_and_losses_of_a_plain_loop(
    finished_run, recipe, num_ranks, config
):
    run = finished_run(recipe, num_ranks, **config)

    if config:
        norms = [event.values["gradient_norm"] for event in run.events if type(event) is Reported]
        assert max(norms) > CLIP
    _assert_same(run, config.get("gradient_clip_norm", 0.0))


def test_a_run_emits_its_events_in_order(finished_run):
    run = finished_run("Tiny", 2)
    kinds = [type(event) for event in run.events]
    steps = [event for event in run.events if isinstance(event, Reported)]
    epochs = run.result.epochs

    assert kinds[:3] == [AttemptStarted, RunStarted, CheckpointLoaded]
    assert kinds[-1] is RunFinished
    assert (kinds.count(PredictionsMade), kinds.count(HistogramsTaken)) == (1, 3)
    assert [(event.step, event.epoch) for event in steps] == [(n, n / 9) for n in range(1, 28)]
    assert [(event.epoch, event.step) for event in epochs] == [(1, 9), (2, 18), (3, 27)]
    assert (run.started.world_size, run.started.backend) == (2, "gloo")
    assert [layer.kind for layer in run.started.layers] == ["Linear", "Tanh", "Linear"]
    assert run.started.num_parameters == sum(value.numel() for value in run.state().values())
    assert run.events[-1].model_state_epoch == 3  # The recipe asks for this epoch.
    for epoch in epochs:
        phases = epoch.rank_phase_seconds
        assert list(phases) == ["data", "forward", "backward"]
        sums = map(sum, zip(*phases.values(), strict=True))
        assert list(sums) == epoch.rank_step_seconds
        assert min(map(min, phases.values())) > 0
    shares = split_steps(epochs)
    assert list(shares) == [*phases, "stragglers", "exchange"]
    assert sum(shares.values()) == pytest.approx(1)
    assert run.started.versions["torch"] == version("torch")


def test_the_loss_of_an_epoch_is_the_mean_of_its_ranks_by_their_targets(finished_run):
    run = finished_run("Tiny", 2)
    # Rank 0 has six samples of each full batch and the odd one of all 97.
    for epoch in run.result.epochs:
        assert epoch.train_loss == pytest.approx(
            (49 * epoch.rank_losses[0] + 48 * epoch.rank_losses[1]) / 97
        )


def test_a_loss_that_is_not_a_number_stops_the_run_at_once_and_names_the_step(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("FAULT", "nan 1 14")
    run = new_run(tmp_path)

    with pytest.raises(RankFailure, match=r"the loss is nan at step 14 \(epoch 2\)"):
        run.train()

    assert run.last_step == 13
    assert [event.epoch for event in run.events if isinstance(event, EpochFinished)] == [1]


def test_weights_that_overflow_in_the_last_step_fail_the_run(tmp_path):
    config = {"learning_rate": 1e60, "epochs": 1, "global_batch_size": 97}
    with pytest.raises(NonFiniteLoss, match=r"held-out data is .*epoch 1"):
        new_trainer(new_run(tmp_path), **config).fit()


def test_checkpoints_are_written_by_the_clock_at_logged_steps(tmp_path, monkeypatch):
    run = new_run(tmp_path)
    trainer = new_trainer(
        run, epochs=1, log_interval=4, checkpoint_minutes=50, global_batch_size=8, memory_interval=0
    )
    clock = {"monotonic": lambda: 600.0 * trainer.state.progress.step}  # ten minutes a step
    names = ("time", "perf_counter")
    monkeypatch.setattr(
        "flyte_ddp.training.checkpointer.time",
        SimpleNamespace(**clock, **{name: getattr(time, name) for name in names}),
    )
    trainer.checkpoints.saved_at = 0.0
    steps, write = [], trainer.session.saver.write

    def note(state, step, *rest):
        steps.append(step)
        return write(state, step, *rest)

    monkeypatch.setattr(trainer.session.saver, "write", note)
    trainer.fit()
    # The step is the first logged one (1, 4, 8, ...) that is 50 minutes after the last checkpoint.
    assert trainer.state.schedule.num_steps == 13
    assert [step for step in steps if step < trainer.state.schedule.num_steps] == [8]


def test_no_checkpoint_is_written_of_weights_that_another_rank_has_spoiled(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULT", "infinite-gradient 1 14")
    run = new_run(tmp_path)

    with pytest.raises(RankFailure, match=r"NonFiniteLoss: .*norm.* step 14 \(epoch 2\)"):
        run.train(checkpoint_interval=1)

    # log_interval is 1: the loss of step 14 is reported, the checkpoint is not written
    assert run.last_step == 14
    assert max(event.step for event in run.events if isinstance(event, CheckpointSaved)) == 13
    state, _, skipped = CheckpointStore(str(run.checkpoints), 2).load_latest()
    assert skipped == []
    if state:  # On a busy machine all of them may have been on their way to the store.
        assert state["progress"]["step"] <= 13
        assert all(torch.isfinite(value).all() for value in state["model"].values())


def test_a_stop_during_an_evaluation_keeps_the_epoch_and_the_resumed_run_ends_in_the_same_weights(
    tmp_path,
):
    run, num_steps = new_run(tmp_path), 9
    run.data()
    # In the first epoch's evaluation:
    stopped = new_trainer(run, stop_after=num_steps + 2, epochs=2)
    with pytest.raises(StopRequested):
        stopped.fit()
    assert (stopped.state.progress.step, stopped.state.progress.epochs) == (num_steps, [])

    resumed = new_trainer(run, epochs=2)
    resumed.checkpoints.resume()
    assert (resumed.state.progress.step, resumed.state.progress.batch) == (num_steps, num_steps)
    resumed.fit()

    undisturbed = new_trainer(new_run(tmp_path / "undisturbed"), epochs=2)
    undisturbed.fit()
    for ours, theirs in zip(
        resumed.state.progress.epochs, undisturbed.state.progress.epochs, strict=True
    ):
        assert (ours.train_loss, ours.test_loss) == (theirs.train_loss, theirs.test_loss)
        assert ours.metrics["accuracy"] == theirs.metrics["accuracy"]
    expected = undisturbed.state.model.state_dict()
    torch.testing.assert_close(resumed.state.model.state_dict(), expected, rtol=0, atol=0)


def test_a_long_evaluation_saves_what_was_trained_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr("flyte_ddp.training.trainer.LONG_EVALUATION", 0.0)
    trainer = new_trainer(new_run(tmp_path), epochs=1)
    trainer.fit()

    saved = [
        event for event in trainer.session.process.link.events if isinstance(event, CheckpointSaved)
    ]
    assert [(event.step, event.best) for event in saved] == [(9, False), (9, True)]


def test_the_best_of_equally_accurate_epochs_has_the_lowest_held_out_loss():
    def epoch(number, accuracy, loss):
        return EpochFinished(
            number, number, 1.0, loss, 0.1, 1.0, 1.0, 1.0, metrics={"accuracy": accuracy}
        )

    epochs = [epoch(1, 0.5, 0.1), epoch(2, 0.9, 0.4), epoch(3, 0.9, 0.2), epoch(4, 0.9, 0.2)]

    assert find_best(epochs, Monitor("accuracy", "max")) is epochs[2]
    assert find_best(epochs, Monitor("accuracy", "min")) is epochs[0]
    assert find_best(epochs, Monitor()) is epochs[0]
    assert find_best([], Monitor()) is None
    # A figure that is NaN or missing is worse than any.
    assert find_best([epoch(1, math.nan, 0.1), epochs[1]], Monitor("accuracy", "max")) is epochs[1]
    assert find_best([epoch(1, math.nan, 0.1), epochs[1]], Monitor("mae", "min")).epoch == 1


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine", "constant"])
def test_the_schedule_scales_each_groups_own_rate_as_torchs_does_also_after_a_resume(
    schedule, tmp_path
):
    config = {
        "optimizer": "sgd",
        "global_batch_size": 20,
        "learning_rate": 0.1,
        "momentum": 0.9,
        "schedule": schedule,
    }
    config |= {
        "epochs": 3,
        "gradient_accumulation": 2,
        "warmup_steps": 0 if schedule == "one_cycle" else 2,
    }
    run = new_run(tmp_path, "tests.support.mistakes.TwoRates")
    with pytest.raises(StopRequested):
        new_trainer(run, stop_after=2, **config).fit()
    resumed = new_trainer(run, **config)
    resumed.checkpoints.resume()
    assert resumed.state.progress.step == 2
    resumed.fit()

    recipe, config = resumed.parallelism.recipe, resumed.parallelism.config
    torch.manual_seed(config.seed)
    model = recipe.model()
    options = {"lr": config.learning_rate, "momentum": config.momentum, "fused": True}
    optimizer = torch.optim.SGD(recipe.optimizer_groups(model), **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(config, step, 6)
    )
    inputs, targets = recipe.samples()
    for epoch in (1, 2, 3):
        for batch in epoch_order(40, config.seed, epoch).split(20):
            optimizer.zero_grad()
            for part in batch.tensor_split(2):
                (recipe.losses(model(inputs[part]), targets[part]).sum() * (1 / 20)).backward()
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(resumed.state.model.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_a_finished_run_accepts_the_same_number_of_epochs_and_refuses_fewer(tmp_path):
    run = new_run(tmp_path)
    new_trainer(run, epochs=2).fit()

    again = new_trainer(run, epochs=2)
    again.checkpoints.resume()
    assert len(again.fit().epochs) == 2
    expected = "^epochs: expected at least 2, got 1: .*json was written in epoch 2"
    with pytest.raises(ConfigError, match=expected):
        new_trainer(run, epochs=1).checkpoints.resume()


@pytest.mark.parametrize(
    ("recipe", "num_batches"), [("NormedWithOneLeft", 8), ("NormedByBatch", 0)]
)
def test_one_sample_is_normalized_by_running_statistics_or_to_the_bias(
    tmp_path, recipe, num_batches
):
    trainer = new_trainer(new_run(tmp_path, recipe), epochs=1)
    norm = trainer.state.model[1]

    assert len(trainer.fit().epochs) == 1
    assert all(torch.isfinite(value).all() for value in trainer.state.model.state_dict().values())
    if num_batches:  # There are 9 batches, and the last one has no variance.
        assert norm.num_batches_tracked == num_batches
        return
    for mode in (True, False):
        found = norm.train(mode)(torch.randn(1, 16))
        torch.testing.assert_close(found, norm.bias[None], rtol=0, atol=1e-3)


def test_weights_with_one_input_channel_get_the_strides_that_choose_the_channels_last_kernels():
    placed = Parallelism(Recipe(), TrainingConfig(), ALONE).place(torch.nn.Conv2d(1, 4, 3))

    assert (
        placed.weight.stride()
        == torch.nn.Conv2d(1, 4, 3).to(memory_format=torch.channels_last).weight.stride()
    )
    assert placed.weight.is_leaf
    assert (
        Parallelism(Recipe(), TrainingConfig(), ALONE)
        .place(torch.nn.Conv3d(1, 4, 3))
        .weight.is_contiguous()
    )


def test_ranks_whose_gpu_runs_out_of_memory_restart_with_smaller_micro_batches_where_the_user_allows_it(  # noqa: E501
    tmp_path, monkeypatch, finished_run, caplog
):
    undisturbed = finished_run("Tiny", 2)
    monkeypatch.setenv("FAULT", "cuda-oom 1 14")
    run = new_run(tmp_path).train(2, grow_accumulation_on_oom=True, checkpoint_interval=2)

    started = [event for event in run.events if isinstance(event, RunStarted)]
    assert [event.config["gradient_accumulation"] for event in started] == [1, 2]
    assert [event.config["global_batch_size"] for event in started] == [12, 12]
    assert [event.step for event in run.events if isinstance(event, CheckpointLoaded)][1] >= 8
    assert " with gradient_accumulation 2: rank 1 failed" in caplog.text
    torch.testing.assert_close(run.state(), undisturbed.state())


def test_other_errors_and_batches_that_cannot_be_split_further_are_not_restarted():
    program = recipe_program(
        "digits", TrainingConfig(grow_accumulation_on_oom=True, global_batch_size=12)
    )
    oom = RankFailure("rank 0 failed", 0, "exception", "OutOfMemoryError: CUDA out of memory")

    assert type(torch.cuda.OutOfMemoryError("")).__name__ == oom.error_name
    assert program.with_smaller_batches(oom, 2).needs.batch.num_parts == 2
    assert program.with_smaller_batches(oom, 4) is None
    assert program.with_smaller_batches(RankFailure("", 0, "signal", "SIGKILL"), 2) is None
    assert (
        recipe_program("digits", TrainingConfig(global_batch_size=12)).with_smaller_batches(oom, 2)
        is None
    )


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_the_other_optimizers_train_also_in_bfloat16(tmp_path, optimizer):
    trainer = new_trainer(new_run(tmp_path), **{**ADAM, "optimizer": optimizer})
    epochs = trainer.fit().epochs

    assert epochs[-1].train_loss < epochs[0].train_loss
    assert all(value.dtype == torch.float32 for value in trainer.state.model.state_dict().values())


@pytest.mark.parametrize(
    ("config", "num_steps", "expected"),
    [
        ({"schedule": "one_cycle"}, 100, {0: 1 / 25, 30: 1.0, 100: 1 / 250_000}),
        (
            {"schedule": "cosine", "warmup_steps": 4},
            104,
            {0: 0.2, 1: 0.4, 4: 1.0, 54: 0.5, 79: (1 + math.cos(0.75 * math.pi)) / 2, 104: 0.0},
        ),
        ({"schedule": "constant", "warmup_steps": 1}, 10, {0: 0.5, 1: 1.0, 3: 1.0}),
    ],
)
def test_a_schedule_rises_and_falls_by_the_step_alone(config, num_steps, expected):
    config = TrainingConfig(**config)
    found = [learning_rate_factor(config, step, num_steps) for step in range(num_steps + 1)]
    peak = found.index(max(found))

    assert {step: found[step] for step in expected} == pytest.approx(expected)
    assert (found[: peak + 1], found[peak:]) == (
        sorted(found[: peak + 1]),
        sorted(found[peak:], reverse=True),
    )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_a_compiled_model_gives_the_weights_of_one_that_is_not(finished_run):
    compiled, plain = finished_run("Tiny", 2, compile=True), finished_run("Tiny", 2)

    torch.testing.assert_close(compiled.state(), plain.state(), rtol=1e-4, atol=1e-5)
