"""A recipe's own optimizer, schedule, averaged weights, batches and hooks train as in a plain loop,
and resume exactly.
"""

from __future__ import annotations

import dataclasses
import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from examples.recipes.pulses import Pulses
from flyte_ddp.config import Monitor, TrainingConfig
from flyte_ddp.errors import ConfigError, StopRequested
from flyte_ddp.events import AttemptStarted, Reported
from flyte_ddp.rank.data import open_samples
from flyte_ddp.rank.plan import epoch_order
from flyte_ddp.recipes import config_of
from flyte_ddp.training.average import WeightAverage
from flyte_ddp.training.contract import check_contract
from flyte_ddp.training.ddp import DdpParallelism
from flyte_ddp.training.evaluation import evaluate
from flyte_ddp.training.optim import Schedule, count_state_bytes, open_optimizer
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import ALONE, process_group
from tests.support.recipes import Dropping, Restarting, Tiny
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

DECAY = 0.7  # share that the average keeps from the 21st step on; less before
OWN = TrainingConfig(optimizer="own", schedule="own", epochs=3)


def by_factor(recipe):
    """The recipe with a schedule that is a function."""
    recipe.schedule = lambda optimizer, config, num_steps: lambda step: 1 / (1 + step)
    return recipe


def plain_loop(num_epochs=3):
    """Return the state of the example's training in one process, without any code of ours but the
    order of the samples; of its averaged weights, the rates of its steps, and the losses of its
    evaluations.
    """
    recipe, rates, losses = Pulses(), [], []
    config = config_of("examples.recipes.pulses.Pulses", {})
    train, held_out = recipe.datasets(None)
    labels = torch.tensor([label for _, label in train])
    weights = torch.tensor([1 / int((labels == label).sum()) for label in labels])
    torch.manual_seed(0)
    model, average = recipe.model(), recipe.model()
    average.load_state_dict(model.state_dict())
    optimizer = recipe.optimizer(model, config)
    scheduler = recipe.schedule(optimizer, config, 11 * num_epochs)
    for epoch in range(1, num_epochs + 1):
        for batch in epoch_order(325, 0, epoch, weights.double()).split(30):
            optimizer.zero_grad()
            inputs, targets = recipe.collate([train[index] for index in batch], training=True)
            cross_entropy(model(inputs), targets).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            decay = min(0.9, len(rates) / (9 + len(rates)))
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.mul_(decay).add_(value, alpha=1 - decay)
                if len(rates) % 11 in (0, 6):
                    inputs, targets = recipe.collate(held_out, training=False)
                    losses.append(float(cross_entropy(average(inputs), targets)))
    return dict(average.state_dict()), rates, losses


@pytest.mark.parametrize(
    ("parallel", "num_ranks"),
    [
        ("ddp", 2),
        pytest.param("fsdp", 2, marks=pytest.mark.long),
        pytest.param("ddp", 1, marks=pytest.mark.long),
    ],
)
def test_the_example_with_all_methods_ends_as_a_plain_loop_also_after_a_kill(
    tmp_path, monkeypatch, parallel, num_ranks
):
    options = {"parallel": parallel, "epochs": 3, "log_interval": 1, "model_state": "last"}
    name = "tests.support.example_with_faults.Pulses"
    run = new_run(tmp_path / "whole", name).train(num_ranks, **options)
    assert not [line for line in run.lines if "FutureWarning" in line]
    state, rates, losses = plain_loop()
    torch.testing.assert_close(run.state(), state, rtol=1e-4, atol=1e-5)
    assert [epoch.test_loss for epoch in run.result.epochs] == pytest.approx(losses, rel=1e-4)
    steps = [event for event in run.events if isinstance(event, Reported)]
    assert [event.values["learning_rate"] for event in steps] == pytest.approx(rates)

    monkeypatch.setenv("FAULT", f"kill {num_ranks - 1} 20")
    killed = new_run(tmp_path / "killed", name).train(num_ranks, max_restarts=3, **options)
    assert sum(isinstance(event, AttemptStarted) for event in killed.events) > 1
    torch.testing.assert_close(killed.state(), run.state(), rtol=0, atol=0)


@pytest.mark.parametrize("stop_after", [5, 11])
def test_a_stop_keeps_trained_and_averaged_weights_apart_also_within_an_evaluation(
    tmp_path, stop_after
):
    config = {"ema_decay": DECAY, "model_state": "best", "learning_rate": 1.0}
    whole = new_trainer(new_run(tmp_path / "whole", "Normed"), **config)
    whole.fit()
    run = new_run(tmp_path / "stopped", "Normed")
    with pytest.raises(StopRequested):
        new_trainer(run, stop_after=stop_after, **config).fit()
    resumed = new_trainer(run, **config)
    resumed.checkpoints.resume()
    assert resumed.state.progress.step == min(stop_after, 9)
    resumed.fit()
    trained = [resumed.state.model.state_dict(), whole.state.model.state_dict()]
    torch.testing.assert_close(*trained, rtol=0, atol=0)
    for each in (resumed, whole):
        each.checkpoints.load_model_state()
    torch.testing.assert_close(
        resumed.state.model.state_dict(), whole.state.model.state_dict(), rtol=0, atol=0
    )
    best = whole.evaluate()
    assert best.loss == pytest.approx(min(each.test_loss for each in whole.state.progress.epochs))


def test_floating_point_buffers_are_averaged_as_weights_are():
    model = torch.nn.BatchNorm1d(2)
    average = WeightAverage(model, 0.9)
    model.running_mean.fill_(1.0)
    model.num_batches_tracked.fill_(7)
    average.update(step=0)  # The average keeps a tenth of its own values.
    with average.in_place():
        assert model.running_mean.tolist() == pytest.approx([0.9, 0.9])
        assert model.num_batches_tracked == 7
    assert model.running_mean.tolist() == [1, 1]


def averaged(steps, kind=torch.nn.Buffer, decay=0.9):
    """Return a module with one value, and its average after it had the values of `steps`."""
    module = torch.nn.Module()
    module.value = kind(torch.as_tensor(steps[0]).clone())
    average = WeightAverage(module, decay)
    for number, value in enumerate(steps[1:]):
        module.value.data.copy_(torch.as_tensor(value))
        average.update(step=number)
    return module, average.values["value"]


VALUES = st.sampled_from([0.0, 1.0, -2.5, -math.inf, math.inf, math.nan])


@settings(deadline=None, derandomize=True, max_examples=50)
@given(st.lists(st.tuples(VALUES, VALUES, VALUES), min_size=3, max_size=8), st.booleans())
def test_an_average_is_finite_where_weights_and_buffers_are(steps, is_buffer):
    kind = torch.nn.Buffer if is_buffer else torch.nn.Parameter
    module, average = averaged(steps, kind)
    value = module.value.detach()
    assert torch.equal(average.isfinite(), value.isfinite())
    bad = ~value.isfinite()
    torch.testing.assert_close(average[bad], value[bad], equal_nan=True, rtol=0, atol=0)
    if is_buffer:
        same = value == torch.tensor(steps[-2])
        assert torch.equal(average[same], value[same])


def test_a_weight_is_averaged_also_where_it_stays():
    _, average = averaged([0.0, 1.0, 1.0], torch.nn.Parameter)
    assert float(average) == pytest.approx(1 - 0.1 * 2 / 11)


@pytest.mark.parametrize(
    ("given_type", "expected"),
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.complex64, torch.complex64),
        (torch.complex128, torch.complex128),
        (torch.float8_e4m3fn, torch.float32),
    ],
)
def test_an_average_has_at_least_the_precision_of_its_weights(given_type, expected):
    steps = [torch.zeros(2).to(given_type), torch.ones(2).to(given_type)]
    _, average = averaged(steps)
    assert average.dtype == expected
    torch.testing.assert_close(average.abs().float(), torch.full((2,), 0.9))
    if expected == torch.float64:
        assert float(average[0]) == pytest.approx(0.9, abs=1e-15)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_complex_weights_are_trained_averaged_and_resumed(tmp_path, optimizer):
    name = "tests.support.own_optimizers.Complex"
    options = {"optimizer": optimizer, "ema_decay": DECAY, "epochs": 2}
    whole = new_trainer(new_run(tmp_path / "whole", name), **options)
    whole.fit()
    run = new_run(tmp_path / "stopped", name)
    with pytest.raises(StopRequested):
        new_trainer(run, stop_after=3, **options).fit()
    resumed = new_trainer(run, **options)
    resumed.checkpoints.resume()
    resumed.fit()
    torch.testing.assert_close(
        resumed.state.average.values, whole.state.average.values, rtol=0, atol=0
    )
    assert not torch.equal(whole.state.average.values["filter"], whole.state.model.filter)
    whole.checkpoints.load_model_state()
    torch.testing.assert_close(whole.state.model.filter.data, whole.state.average.values["filter"])
    assert whole.state.model.filter.imag.abs().max() > 0


def test_options_of_ddp_are_those_of_the_config():
    config = TrainingConfig(broadcast_buffers=False, find_unused_parameters=True)
    with process_group(ALONE, "gloo", HashStore(), timeout=60):
        replica = DdpParallelism(Tiny(), config, ALONE).replicate(torch.nn.BatchNorm1d(2))
    assert (replica.broadcast_buffers, replica.find_unused_parameters) == (False, True)


def test_averages_begin_with_the_initial_state(tmp_path):
    state = {name: each + 1 for name, each in Tiny().model().state_dict().items()}
    torch.save(state, tmp_path / "state.pt")
    trainer = new_trainer(new_run(tmp_path), str(tmp_path / "state.pt"), ema_decay=DECAY)
    trainer.checkpoints.resume()
    torch.testing.assert_close(trainer.state.average.values, state, rtol=0, atol=0)


def test_a_model_without_a_copy_is_not_refused_for_its_memory():
    model = torch.nn.Linear(2, 2)
    model.lock = threading.Lock()
    assert count_state_bytes(Tiny(), model, TrainingConfig()) == 0


def test_a_run_with_averaged_weights_does_not_go_on_from_a_state_without(tmp_path):
    run = new_run(tmp_path)
    with pytest.raises(StopRequested):
        new_trainer(run, stop_after=2).fit()
    with pytest.raises(ConfigError, match=r"^ema_decay: expected 0.0, with which .* got 0.9"):
        new_trainer(run, ema_decay=0.9).checkpoints.resume()


class Padded(Tiny):
    """Sequences of one to four numbers, padded to the longest of their micro-batch."""

    def datasets(self, directory):
        drawn = torch.arange(1.0, 41.0)
        pairs = [(drawn[at : at + 1 + at % 4], int(at % 3)) for at in range(36)]
        return pairs, pairs[:7]

    def collate(self, samples, training):
        inputs, targets = zip(*samples, strict=True)
        padded = pad_sequence(inputs, batch_first=True)
        features = torch.stack([padded.sum(1), (padded > 0).sum(1), padded.amax(1)], dim=1)
        return features / 40, torch.tensor([[target, target] for target in targets])


class Mixed(Padded):
    def collate(self, samples, training):
        inputs, targets = super().collate(samples, training)
        return (inputs + inputs.flip(0) if training else inputs), targets


class Short(Padded):
    def collate(self, samples, training):
        return super().collate(samples[1:], training)


def test_a_recipes_own_collate_is_given_each_micro_batch_and_held_out_samples_apart(caplog):
    config = TrainingConfig(global_batch_size=8)
    for kind, is_mixed in ((Padded, False), (Mixed, True)):
        caplog.clear()
        recipe = kind()
        train, held_out = open_samples(recipe.datasets(None), recipe, config, ALONE)
        model = torch.nn.Linear(3, 3)
        check_contract(model, train, Parallelism(recipe, config, ALONE), held_out)
        assert ("it mixes the samples of a batch" in caplog.text) is is_mixed
        part = torch.arange(7)
        (trained,), (tested,) = train.batches([part], epoch=1), held_out.batches([part], epoch=0)
        assert torch.equal(trained[0], tested[0]) is not is_mixed
        assert trained[0].shape == (7, 3)
        evaluation = evaluate(model, held_out, Parallelism(recipe, config, ALONE))
        assert math.isfinite(evaluation.loss)


def test_one_rank_says_for_all_that_a_collate_mixes_samples(caplog):
    recipe, config = Mixed(), TrainingConfig(global_batch_size=8)
    (train,) = open_samples([recipe.datasets(None)[0]], recipe, config, ALONE)
    second = Parallelism(recipe, config, dataclasses.replace(ALONE, rank=1))
    check_contract(torch.nn.Linear(3, 3), train, second)
    assert "it mixes the samples" not in caplog.text


def test_one_sample_is_no_mixture():
    recipe, config = Mixed(), TrainingConfig(global_batch_size=1)
    (train,) = open_samples([recipe.datasets(None)[0][:1]], recipe, config, ALONE)
    check_contract(torch.nn.Linear(3, 3), train, Parallelism(recipe, config, ALONE))


def test_a_collate_that_drops_samples_is_refused_before_the_first_step():
    recipe, config = Short(), TrainingConfig(global_batch_size=8)
    (train,) = open_samples([recipe.datasets(None)[0]], recipe, config, ALONE)
    expected = r"Short.collate: expected tensors .* the batch, 8, .*, got shape \(7, 3\)$"
    with pytest.raises(ConfigError, match=expected):
        check_contract(torch.nn.Linear(3, 3), train, Parallelism(recipe, config, ALONE))


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
def test_hooks_get_the_figures_and_neither_their_draws_nor_their_errors_change_the_training(
    tmp_path, monkeypatch, caplog, kind
):
    plain = new_trainer(new_run(tmp_path / "plain", "Dropping"), log_interval=4)
    plain.fit()
    seen = []

    def take(self, event):
        torch.rand(7)
        seen.append(event)
        raise kind("their server is away")

    monkeypatch.setattr(Dropping, "on_step", take)
    monkeypatch.setattr(Dropping, "on_epoch", take)
    hooked = new_trainer(new_run(tmp_path / "hooked", "Dropping"), log_interval=4)
    hooked.fit()
    assert [each.step for each in seen if isinstance(each, Reported)] == [1, 4, 8, 12, 16, 20, 24]
    assert [each for each in seen if not isinstance(each, Reported)] == hooked.state.progress.epochs
    assert set(seen[0].values) > {"loss", "learning_rate", "gradient_norm"}
    for hook in ("on_step", "on_epoch"):
        line = f"result of {hook} cannot be shown: {kind.__name__}: their server is away"
        assert caplog.text.count(line) == 1
    torch.testing.assert_close(
        hooked.state.model.state_dict(), plain.state.model.state_dict(), rtol=0, atol=0
    )


def test_a_plateau_of_the_monitored_figure_lowers_the_rate_also_after_a_resume(
    tmp_path, monkeypatch
):
    def lower(self, optimizer, config, num_steps):
        return ReduceLROnPlateau(optimizer, "min", factor=0.5, patience=1, threshold=2)

    monkeypatch.setattr(Restarting, "schedule", lower)
    with pytest.raises(StopRequested):
        new_trainer(new_run(tmp_path, "Restarting"), stop_after=20, epochs=5).fit()
    trainer = new_trainer(new_run(tmp_path, "Restarting"), epochs=5)
    trainer.checkpoints.resume()
    trainer.fit()
    assert [epoch.learning_rate for epoch in trainer.state.progress.epochs] == pytest.approx(
        [0.1, 0.1, 0.05, 0.05, 0.025]  # The schedule also holds after the stop in the second epoch.
    )


def test_a_factor_scales_each_groups_own_rate():
    recipe, model = by_factor(Restarting()), torch.nn.Linear(2, 2)
    optimizer = open_optimizer(recipe, model, OWN)
    schedule = Schedule(recipe, optimizer, OWN, num_steps=10)
    rates = []
    for step in range(2):
        schedule.begin_step(step)
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert rates == [[0.001, 0.002], [0.0005, 0.001]]
    assert schedule.state_dict() == {}


@pytest.mark.parametrize(
    ("recipe", "given", "expected"),
    [
        (
            "Restarting",
            {"optimizer": "sgd"},
            r"optimizer: expected none beside .*recipes.py:\d+: Restarting.optimizer, "
            "which takes its place, got 'sgd'",
        ),
        ("Restarting", {"warmup_steps": 3}, r"warmup_steps: expected 0 beside .*schedule, .*got 3"),
        ("Tiny", {"schedule": "own"}, "schedule: expected a recipe with a method schedule, got "),
    ],
)
def test_a_choice_beside_a_method_of_its_name_is_refused_before_the_run(recipe, given, expected):
    with pytest.raises(ConfigError, match=f"^{expected}"):
        config_of(f"tests.support.recipes.{recipe}", given)


class Muon(torch.optim.SGD):
    pass


MODEL = torch.nn.Linear(2, 2)
SPLIT = "flyte_ddp.training.optim.is_split"


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: None, "an optimizer of torch's, got a NoneType$"),
        (lambda: [None], "an optimizer of torch's, got .*: a function or a script trains several"),
        (lambda: torch.optim.Adam(torch.nn.Linear(3, 3).parameters()), "every trained parameter"),
        (
            lambda: torch.optim.Adam([*MODEL.parameters(), torch.zeros(5, requires_grad=True)]),
            r"parameters of the model it was given, got one of shape \(5,\)",
        ),
        (lambda: torch.optim.LBFGS(MODEL.parameters()), "steps without a closure, got LBFGS"),
        (lambda: Muon(MODEL.parameters()), "treats each value by itself, got Muon"),
    ],
)
def test_an_optimizer_that_cannot_train_the_model_is_refused_in_one_line(
    monkeypatch, make, expected
):
    monkeypatch.setattr(SPLIT, lambda value: True)
    recipe = Restarting()
    recipe.optimizer = lambda model, config: make()
    with pytest.raises(ConfigError, match=f"Restarting.optimizer: expected .*{expected}"):
        open_optimizer(recipe, MODEL, OWN)


@pytest.mark.parametrize(
    ("make", "mode", "expected"),
    [
        (lambda optimizer: 3, "min", "a scheduler of torch's, or a function of the step, got 3"),
        (lambda optimizer: lambda step: math.nan if step == 4 else 1, "min", "got nan at step 4"),
        (ReduceLROnPlateau, "max", "a ReduceLROnPlateau of mode 'max', as accuracy is monitored"),
        (lambda optimizer: LambdaLR(optimizer, lambda step: -1), "min", "got -0.001 at step 0"),
    ],
)
def test_a_schedule_without_rates_is_refused_before_the_first_step(make, mode, expected):
    recipe = Restarting()
    recipe.schedule = lambda optimizer, config, num_steps: make(optimizer)
    config = TrainingConfig(optimizer="own", schedule="own", monitor=Monitor("accuracy", mode))
    optimizer = open_optimizer(recipe, MODEL, config)
    with pytest.raises(ConfigError, match=f"Restarting.schedule: expected .*{expected}"):
        Schedule(recipe, optimizer, config, num_steps=9).try_steps(0)


@pytest.mark.parametrize(
    ("recipe", "optimizer", "num_tensors"),
    [(Tiny, "sgd", 1), (Tiny, "adamw", 2), (Restarting, "own", 1)],
)
def test_the_bytes_of_an_optimizers_state_are_measured_without_them(recipe, optimizer, num_tensors):
    model = torch.nn.Linear(1000, 1000, bias=False)
    config = TrainingConfig(optimizer=optimizer, momentum=0.9)
    found = count_state_bytes(recipe(), model, config)
    assert found == pytest.approx(num_tensors * 4_000_000, abs=8)
    assert model.weight.grad is None


def test_evaluations_within_an_epoch_count_as_those_at_its_end_also_after_a_stop(tmp_path):
    # nine steps an epoch: after 4, 8 and 9 of each
    config = {"evaluation_interval": 4, "learning_rate": 1.0, "model_state": "best", "epochs": 2}
    whole = new_trainer(new_run(tmp_path / "whole"), **config)
    whole.fit()
    epochs = whole.state.progress.epochs
    assert [each.step for each in epochs] == [4, 8, 9, 13, 17, 18]
    assert [each.position for each in epochs] == pytest.approx([4 / 9, 8 / 9, 1, 13 / 9, 17 / 9, 2])
    without = new_trainer(new_run(tmp_path / "without"), **{**config, "evaluation_interval": 0})
    without.fit()
    ends = [each.test_loss for each in without.state.progress.epochs]
    assert [each.test_loss for each in epochs if each.share == 1] == ends
    assert whole.state.best is min(epochs, key=lambda each: each.test_loss)
    seconds = [each.seconds * each.samples_per_second for each in epochs]
    assert seconds == pytest.approx([48, 48, 1, 48, 48, 1])

    # in a step, in an evaluation within an epoch, in a step after one
    for stop_after, step in ((3, 3), (6, 4), (10, 5)):
        run = new_run(tmp_path / f"stopped-{stop_after}")
        with pytest.raises(StopRequested):
            new_trainer(run, stop_after=stop_after, **config).fit()
        resumed = new_trainer(run, **config)
        resumed.checkpoints.resume()
        assert resumed.state.progress.step == step
        resumed.fit()
        assert [each.test_loss for each in resumed.state.progress.epochs] == [
            each.test_loss for each in epochs
        ]
        assert resumed.checkpoints.load_model_state().step == whole.state.best.step


def test_patience_counts_evaluations_and_ends_within_an_epoch(tmp_path):
    monitor = {"metric": "test_loss", "mode": "max"}  # The loss falls from the first evaluation on.
    config = {"evaluation_interval": 2, "patience": 2, "monitor": monitor, "model_state": "best"}
    trainer = new_trainer(new_run(tmp_path), **config)
    trainer.fit()
    assert [each.step for each in trainer.state.progress.epochs] == [2, 4, 6]
    resumed = new_trainer(new_run(tmp_path), **config)
    resumed.checkpoints.resume()
    assert resumed.state.is_done
    assert resumed.checkpoints.load_model_state().step == 2
