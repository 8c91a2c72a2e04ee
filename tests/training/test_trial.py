"""A recipe's own optimizer and schedule are tried before the run: what they save has to come back,
and a schedule needs a rate for each step.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    StepLR,
)

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, StopRequested
from flyte_ddp.rank.sharding import find_changed_value, load_optimizer
from flyte_ddp.training.optim import Schedule, open_optimizer
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.trial import check_resuming, check_schedule
from flyte_ddp.world import ALONE
from tests.support.own_optimizers import FreeSgd, Slow
from tests.support.recipes import Restarting
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

OWN = TrainingConfig(optimizer="own")


class Counting(SGD):
    """Its steps grow with a counter of its own."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            group["weight_decay"] = 0.1 * self.count
        return super().step(closure)

    def state_dict(self):
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.count = state["count"]


class Forgetful(Counting):
    def load_state_dict(self, state):
        SGD.load_state_dict(self, state)


class Silent(Counting):
    """Saves nothing of its counter, which also comes back with no step."""

    def state_dict(self):
        return SGD.state_dict(self)

    def load_state_dict(self, state):
        SGD.load_state_dict(self, state)


class Hooked(SGD):
    """A hook adds a counter to what is saved, and another one takes it back."""

    count = 0

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr, momentum=0.9)
        self.register_state_dict_post_hook(lambda own, state: {**state, "count": own.count})
        self.register_load_state_dict_pre_hook(self.take)
        self.register_step_post_hook(self.add)

    @staticmethod
    def add(own, arguments, options):
        own.count += 1

    @staticmethod
    def take(own, state):
        own.count = state["count"]


class Unloadable(Slow):
    def load_state_dict(self, state):
        Optimizer.load_state_dict(self, state)


class Stale(Slow):
    """After a load it no longer shares its groups with the optimizer inside."""

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.slow = [each.clone() for each in state["slow"]]
        self.count = state["count"]


class Thing(SGD):
    def state_dict(self):
        return {**super().state_dict(), "thing": object()}


def recipe_with(optimizer=None, schedule=None):
    recipe = Restarting()
    if optimizer:
        recipe.optimizer = lambda model, config: optimizer(list(model.parameters()), lr=0.1)
    if schedule:
        recipe.schedule = lambda optimizer, config, num_steps: schedule(optimizer, num_steps)
    return recipe


GOOD = [Counting, Hooked, Slow, FreeSgd, Adam, torch.optim.Adagrad]


@pytest.mark.parametrize("kind", GOOD)
def test_an_optimizer_that_comes_back_is_left_as_it_was(kind):
    recipe, model = recipe_with(kind), torch.nn.Linear(2, 2)
    optimizer = open_optimizer(recipe, model, OWN)
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    draws = torch.get_rng_state()
    check_resuming(model, Parallelism(recipe, OWN, ALONE), num_steps=9)
    after = [model.state_dict(), optimizer.state_dict()]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), draws)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Forgetful, r"brings back, got another value of state_dict\(\)\['count'\] after a save"),
        (Silent, "whose next step after a load is the one without it, got another one of weight"),
        (Stale, "whose next step after a load .* its groups have to stay those in param_groups"),
        (Unloadable, "that loads what its state_dict.. returns, got AttributeError: .*_optimizer_"),
        (Thing, r"save: optimizer\['thing'\]: expected tensors, numbers, .* got a object"),
    ],
)
def test_an_optimizer_that_does_not_come_back_is_one_line_before_the_run(kind, expected):
    recipe, model = recipe_with(kind), torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match=expected) as caught:
        check_resuming(model, Parallelism(recipe, OWN, ALONE), num_steps=9)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [Counting, Hooked, Slow, FreeSgd])
def test_a_run_resumes_exactly_with_what_an_optimizer_adds_to_its_state(
    tmp_path, monkeypatch, kind
):
    monkeypatch.setattr(
        Restarting, "optimizer", lambda self, model, config: kind(model.parameters(), lr=0.1)
    )
    whole = new_trainer(new_run(tmp_path / "whole", "Restarting"), epochs=2)
    whole.fit()
    run = new_run(tmp_path / "stopped", "Restarting")
    with pytest.raises(StopRequested):
        new_trainer(run, stop_after=17, epochs=2).fit()
    resumed = new_trainer(run, epochs=2)
    resumed.checkpoints.resume()
    assert 9 < resumed.state.progress.step < 18
    resumed.fit()
    trained = [each.state.model.state_dict() for each in (resumed, whole)]
    torch.testing.assert_close(*trained, rtol=0, atol=0)
    saved = [each.state.optimizer.state_dict() for each in (resumed, whole)]
    torch.testing.assert_close(*saved, rtol=0, atol=0)


@pytest.mark.long
def test_a_split_model_resumes_exactly_with_an_optimizer_around_another_one(tmp_path):
    options = {"parallel": "fsdp", "optimizer": "own"}
    whole = new_run(tmp_path / "whole", "tests.support.own_optimizers.LookAhead")
    whole.train(2, epochs=2, **options)
    resumed = new_run(tmp_path / "resumed", whole.recipe)
    for epochs in (1, 2):
        resumed.train(2, epochs=epochs, **options)
    torch.testing.assert_close(resumed.state(), whole.state(), rtol=0, atol=0)


def test_a_state_of_an_optimizer_within_keeps_the_kernels_of_this_machine():
    model = torch.nn.Linear(2, 2)
    first = Slow(model.parameters(), lr=0.1, fused=True)
    second = Slow(model.parameters(), lr=0.2, fused=False)
    load_optimizer(second, first.state_dict())
    assert [second.param_groups[0][name] for name in ("fused", "lr")] == [False, 0.1]


def evaluated_weights(trainer):
    """Return the weights of each evaluation, and those in between."""
    seen, evaluate = [], trainer.evaluate

    def note():
        found = evaluate()
        seen.append(copy.deepcopy(trainer.state.model.state_dict()))
        return found

    trainer.evaluate = note
    return seen


# The run stops in a step, and in the first evaluation.
@pytest.mark.parametrize("stop_after", [5, 10])
def test_schedule_free_weights_are_evaluated_and_returned_and_others_trained(tmp_path, stop_after):
    options = {"epochs": 3, "model_state": "best", "learning_rate": 1.0}
    name = "tests.support.own_optimizers.ScheduleFree"
    whole = new_trainer(new_run(tmp_path / "whole", name), **options)
    seen = evaluated_weights(whole)
    whole.fit()
    trained = copy.deepcopy(whole.state.model.state_dict())
    group = whole.state.optimizer.param_groups[0]
    for key, parameter in whole.state.model.named_parameters():
        z = whole.state.optimizer.state[parameter]["z"]
        average = seen[-1][key]
        torch.testing.assert_close(trained[key], average.lerp(z, 1 - group["beta"]))
        assert not torch.equal(trained[key], average)
    assert whole.checkpoints.load_model_state() is whole.state.best
    kept = seen[whole.state.progress.epochs.index(whole.state.best)]
    torch.testing.assert_close(dict(whole.state.model.state_dict()), dict(kept), rtol=0, atol=0)

    run = new_run(tmp_path / "stopped", name)
    with pytest.raises(StopRequested):
        new_trainer(run, stop_after=stop_after, **options).fit()
    resumed = new_trainer(run, **options)
    resumed.checkpoints.resume()
    resumed.fit()
    torch.testing.assert_close(resumed.state.model.state_dict(), trained, rtol=0, atol=0)
    assert [each.test_loss for each in resumed.state.progress.epochs] == [
        each.test_loss for each in whole.state.progress.epochs
    ]


def one_cycle(optimizer, num_steps):
    return OneCycleLR(optimizer, 0.1, total_steps=num_steps, cycle_momentum=False)


def no_rates(optimizer, num_steps):
    rates = [1.0] * (num_steps - 1)
    return lambda step: rates[step]


def another_optimizers(optimizer, num_steps):
    return StepLR(SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1), 3)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (no_rates, "rates for all 1050 steps of the run, got IndexError: .* at step 1049$"),
        (
            lambda optimizer, num_steps: OneCycleLR(optimizer, 0.1, total_steps=num_steps - 1),
            "rates for all 1050 steps of the run, got ValueError: Tried to step .* at step 1049$",
        ),
        (
            lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 500 - step),
            r"finite learning rates of at least 0, got -0\.1 at step 501",
        ),
        (another_optimizers, "of the optimizer that it is given, got a StepLR of another one"),
    ],
)
def test_a_schedule_that_does_not_last_is_one_line_before_the_run(make, expected):
    recipe, model = recipe_with(SGD, make), torch.nn.Linear(2, 2)
    config = TrainingConfig(optimizer="own", schedule="own")
    optimizer = open_optimizer(recipe, model, config)

    def check():
        schedule = Schedule(recipe, optimizer, config, num_steps=1050)
        check_schedule(model, Parallelism(recipe, config, ALONE), optimizer, schedule, 0)

    with pytest.raises(ConfigError, match=f"Restarting.schedule: expected .*{expected}") as caught:
        check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make",
    [
        one_cycle,
        lambda optimizer, num_steps: StepLR(getattr(optimizer, "inner", optimizer), 3),
        lambda optimizer, num_steps: ReduceLROnPlateau(optimizer),
        lambda optimizer, num_steps: lambda step: 1 - step / num_steps,
    ],
)
@pytest.mark.parametrize("kind", [SGD, Slow])
def test_a_schedule_that_lasts_is_left_as_it_was(make, kind):
    recipe, model = recipe_with(kind, make), torch.nn.Linear(2, 2)
    config = TrainingConfig(optimizer="own", schedule="own")
    optimizer = open_optimizer(recipe, model, config)
    schedule = Schedule(recipe, optimizer, config, num_steps=50)
    before = copy.deepcopy([schedule.state_dict(), optimizer.state_dict()])
    parallelism = Parallelism(recipe, config, ALONE)
    check_schedule(model, parallelism, optimizer, schedule, 0)
    check_resuming(model, parallelism, 50)
    after = [schedule.state_dict(), optimizer.state_dict()]
    assert not find_changed_value(after, before)


@pytest.mark.parametrize(
    ("make", "fits"),
    [
        (one_cycle, False),
        (lambda optimizer, num_steps: CosineAnnealingLR(optimizer, num_steps), False),
        (lambda optimizer, num_steps: StepLR(optimizer, 5), True),
        (lambda optimizer, num_steps: LambdaLR(optimizer, lambda step: 1 / (1 + step)), True),
        (lambda optimizer, num_steps: lambda step: max(0, 1 - step / num_steps), True),
    ],
)
@pytest.mark.parametrize("epochs", [2, 4])
def test_other_epochs_at_a_resume_need_a_schedule_that_fits_any_length(
    tmp_path, monkeypatch, make, fits, epochs
):
    monkeypatch.setattr(
        Restarting,
        "schedule",
        lambda self, optimizer, config, num_steps: make(optimizer, num_steps),
    )
    run = new_run(tmp_path, "Restarting")
    with pytest.raises(StopRequested):
        new_trainer(run, stop_after=5, epochs=3).fit()
    resumed = new_trainer(run, epochs=epochs)
    if not fits:
        expected = f"^epochs: expected 3, with which .* got {epochs}: .*Restarting.schedule made a"
        with pytest.raises(ConfigError, match=expected):
            resumed.checkpoints.resume()
        return
    resumed.checkpoints.resume()
    resumed.fit()
    assert len(resumed.state.progress.epochs) == epochs


def test_a_scheduler_does_not_go_on_from_the_checkpoint_of_a_function(tmp_path, monkeypatch):
    monkeypatch.setattr(Restarting, "schedule", lambda *_: lambda step: 1.0)
    run = new_run(tmp_path, "Restarting")
    with pytest.raises(StopRequested):
        new_trainer(run, stop_after=3).fit()
    monkeypatch.setattr(Restarting, "schedule", lambda self, optimizer, *_: StepLR(optimizer, 3))
    with pytest.raises(ConfigError, match="expected a function of the step, as in the run of the"):
        new_trainer(run).checkpoints.resume()
