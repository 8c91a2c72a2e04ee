"""A recipe that breaks its contract is refused with one line before the first step, and samples may
have any shape.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn

from flyte_ddp import MultiLabel, Recipe
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, DataError, RankFailure
from flyte_ddp.events import Reported
from flyte_ddp.rank.contract import check_contract, check_datasets, check_model
from flyte_ddp.rank.data import open_samples
from flyte_ddp.rank.nested import collate
from flyte_ddp.rank.optim import build_optimizer
from flyte_ddp.recipes import config_of, get_recipe, locate
from flyte_ddp.world import ALONE
from tests.support import mistakes
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

PLACE = r"tests/support/mistakes\.py:\d+: "

# By the class in tests/support/mistakes.py: the message, after its place in the recipe's file.
MISTAKES = {
    "Averaged": (
        r"losses: expected one loss for each sample, shape \(8,\), got shape \(\): use "
        r"reduction='none'"
    ),
    "Broadcast": (
        r"model: expected outputs of the targets' shape \(8,\), got \(8, 1\), which "
        r"broadcast to \(8, 8\)"
    ),
    "BroadcastAndAveraged": r"model: expected outputs of the targets' shape \(8,\), got \(8, 1\)",
    "BroadcastOfOne": (
        r"model: expected outputs of the targets' shape \(2,\), got \(2, 1\), which "
        r"broadcast to "
    ),
    "OtherInputs": (
        r"model: expected a model of the samples' inputs, here \(8, 1\), got "
        r"RuntimeError: .* shapes cannot"
    ),
    "PlainNumber": r"losses: expected one loss for each sample, shape \(8,\), got a float",
    "DefaultNumCorrect": (
        r"num_correct: expected a method of the recipe's own, because .*, got "
        r"outputs \(8,\), targets"
    ),
    "MetricsWithoutNames": r"metrics: expected a dict of metrics by name, got a list",
    "LabelsOfOneColumn": (
        r"losses: .* that of MultiLabel is for labels .*, got outputs \(8, 2\), "
        r"targets \(8,\): "
    ),
    "NotDifferentiable": r"losses: expected floating-point losses, got torch\.int64",
    "Detached": r"losses: expected losses with a gradient, got some without: do not detach",
    "DefaultLosses": (
        r"losses: expected one loss .*, got shape \(\): the default is for classes "
        r"\(B,\)"
    ),
    "CountsAll": (
        r"num_correct: expected at most 1 for a sample, .*, got 13\.64; .* needs "
        r"num_targets"
    ),
    "WrongNumTargets": (
        r"num_targets: expected the number of each sample's targets, shape \(8,\), "
        r"got shape \(\)"
    ),
    "OneArgument": (
        r"losses: expected a method with the parameters \(outputs, targets\), got "
        r"\(outputs\)"
    ),
    "NoMethod": (
        r"num_correct: expected a method with the parameters \(outputs, targets\), got "
        r"0\.5"
    ),
    "OtherName": r"datasets: expected a method of this name, got none \(did you mean dataset\?\)",
    "Unused": (
        r"model: expected a gradient for every parameter, got none for forgotten: use them "
        r"in the forward pass"
    ),
    "Lazy": (
        r"model: expected parameters with a shape, got none yet for 0\.weight.*0\.bias: .* "
        r"nn\.LazyLinear"
    ),
    "SparseGradients": (
        r"model: expected dense gradients, which optimizers here take, got sparse "
        r".*0\.weight: .*sparse"
    ),
    "FiguresOfText": r"figures: verdict: expected a number, got 'good'",
    "MetricsOfText": (
        r"metrics: mae: expected a torchmetrics.Metric, or a function .*, got "
        r"'MeanAbsoluteError'"
    ),
    "MetricOverAll": (
        r"metrics: expected mae of each sample, shape \(8,\), got shape \(\): do not "
        r"sum over the samples"
    ),
    "AccuracyInPercent": (
        r"metrics: accuracy: expected at most 1 for a sample, the number of its "
        r"targets, got 100$"
    ),
    "MetricOfOtherShapes": r"metrics: f1: \w+: .* \(outputs \(8,\), targets \(8,\)\)",
    "MetricForEachClass": (
        r"metrics: f1: expected one number, got shape \(2,\): take a mean, or "
        r"one metric each"
    ),
    "ReservedName": (
        r"metrics: expected another name than those of losses and times, got "
        r"'test_loss'"
    ),
    "OneDataset": (
        r"datasets: expected a pair of data sets, for training and held out, got a "
        r"TensorDataset"
    ),
    "Empty": r"datasets: expected a pair of data sets, .* got none for the held-out data",
    "DictSamples": r"datasets: expected \(input, target\) pairs as samples, got a dict",
    "Streamed": (
        r"datasets: expected .* each with __len__ and __getitem__, got a Stream without "
        r"them"
    ),
    "WideRegression": (
        r"losses: .* that of Regression is for numbers, .*, got outputs \(8, 2\), "
        r"targets \(8,\): "
    ),
    "UnnamedClasses": (
        r"metrics: class_names: expected the names of all classes, at least two, "
        r"got \[\]"
    ),
    "Segmentation": (
        r"losses: expected one loss for each sample, shape \(8,\), got shape \(8, 6, "
        r"6\): the default is"
    ),
    "SegmentationWithoutCounts": (
        r"num_correct: expected at most 1 for a sample, the number of "
        r"its targets"
    ),
}


def check(name):
    """Check the recipe as a rank that is alone does."""
    recipe, config = get_recipe(name), config_of(name, {})
    train, _ = check_datasets(recipe, recipe.datasets(None))
    (samples,) = open_samples([train], recipe, config, ALONE)
    check_contract(recipe, check_model(recipe, recipe.model()), samples, config, ALONE)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_broken_contract_is_one_line(name):
    with pytest.raises((ConfigError, DataError)) as caught:
        check(f"tests.support.mistakes.{name}")
    message = str(caught.value)
    assert re.match(rf"{PLACE}{name}\.{MISTAKES[name]}", message), message
    assert "\n" not in message


@pytest.mark.parametrize(
    "name", ["SqueezedInLosses", "FlatTokens", "TimeFirst", "MetricsInACollection"]
)
def test_correct_recipes_of_other_shapes_pass(name):
    check(f"tests.support.mistakes.{name}")


# By a name that a recipe defines and nothing reads: the name that is meant.
OTHER_NAMES = {
    name: meant
    for meant, names in {
        "optimizer_groups": ("optimizer_group", "configure_optimizers", "optimizer_grups"),
        "losses": ("loss", "training_step", "Losses", "lossses"),
        "metrics": ("metric", "validation_step", "compute_metrics"),
        "class_names": ("class_name", "classNames"),
        "defaults": ("default",),
        "num_targets": ("num_target",),
        "datasets": ("dataset", "train_dataloader", "collate_fn"),
        "model": ("forward",),
        "prepare": ("prepare_data",),
    }.items()
    for name in names
}


@pytest.mark.parametrize("name", OTHER_NAMES)
@pytest.mark.parametrize("value", [lambda self, *arguments: None, 0.5], ids=["method", "attribute"])
def test_a_name_that_nothing_reads_is_refused_if_it_is_nearly_one_of_recipes(
    name, value, monkeypatch
):
    class Misnamed(mistakes.Line):
        pass

    monkeypatch.setattr(mistakes, "Misnamed", Misnamed, raising=False)
    Misnamed.__module__ = mistakes.__name__
    get_recipe("tests.support.mistakes.Misnamed")
    setattr(Misnamed, name, value)
    with pytest.raises(
        ConfigError,
        match=(
            rf"{name}: .*, got '{name}', .*\(did you mean {OTHER_NAMES[name]}\?\); "
            r"[^\n]*$"
        ),
    ):
        get_recipe("tests.support.mistakes.Misnamed")


class Loader:
    def train_dataloader(self):
        return None


@dataclasses.dataclass(frozen=True)
class Named(mistakes.Line, Loader, nn.Module):
    """Names of one's own: of an option, of helpers that its code calls, of other bases, private
    ones, distant ones.
    """

    loss: str = "l1"
    metric: float = 0.5
    criterion = staticmethod(nn.functional.l1_loss)
    _default, num_train, class_weights, augment = 1, 2, 3, 4

    def losses(self, outputs, targets):
        return self.criterion(outputs, targets, reduction="none")

    def forward(self, inputs):
        return inputs

    def train_dataloader(self):
        return None

    def dataset(self, directory):
        return mistakes.Line().datasets(directory)

    def datasets(self, directory):
        return getattr(self, "dataset")(directory)  # noqa: B009


def test_a_name_of_ones_own_passes():
    assert get_recipe("tests.test_contract.Named", {"loss": "l2"}).loss == "l2"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([{"lr": 0.1}], r"dicts with a list of parameters as params, got {'lr': 0.1}"),
        ([torch.ones(2)], r"dicts with a list of parameters as params, got tensor"),
        (
            [{"params": [], "learning_rate": 0.1}],
            (
                r"settings of torch.optim in a group, got "
                r"'learning_rate'"
            ),
        ),
        (
            [{"params": [], "weight_decy": 0.1}],
            (
                r"settings of .* got 'weight_decy' \(did you mean "
                r"weight_decay\?\)"
            ),
        ),
        ([{"params": [], "lr": "0.1"}], r"lr: expected a finite number of at least 0, got '0.1'"),
        (
            [{"params": [], "lr": float("nan")}],
            (
                r"lr: expected a finite number of at least 0, got "
                r"nan"
            ),
        ),
        ([{"params": [], "lr": -0.1}], r"lr: expected a finite number of at least 0, got -0.1"),
    ],
)
def test_a_group_of_the_optimizer_that_torch_would_misread_is_refused(groups, expected):
    with pytest.raises(ConfigError, match=rf"^optimizer_groups: (expected )?{expected}"):
        build_optimizer(nn.Linear(1, 1), TrainingConfig(), groups)


def test_every_rank_checks_before_the_first_step(tmp_path):
    run = new_run(tmp_path, "tests.support.mistakes.Averaged")
    with pytest.raises(
        RankFailure, match=rf"ConfigError: {PLACE}Averaged\.losses: expected one loss for each"
    ) as caught:
        run.train()
    assert caught.value.is_user_error
    assert not [event for event in run.events if isinstance(event, Reported)]


def test_the_place_is_that_of_the_users_own_copy(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert locate(mistakes.Averaged(), "losses").startswith("tests/support/mistakes.py:")


def test_a_recipe_of_another_task_has_no_predictions_by_default():
    pair = {"left": torch.ones(2), "right": torch.ones(2)}
    assert Recipe().predictions(pair, {"score": torch.ones(2)}, torch.ones(2)) == []
    assert Recipe().predictions(torch.ones(2, 1), torch.ones(2, 1), torch.ones(2)) == []
    assert [each.guess for each in Recipe().predictions(pair, torch.eye(2), torch.arange(2))] == [
        "0",
        "1",
    ]
    assert [each.guess for each in MultiLabel().predictions(pair, torch.eye(2), torch.eye(2))] == [
        "0",
        "1",
    ]


@pytest.mark.parametrize(
    "samples", [[torch.ones(1), torch.ones(2)], [None, None], [{"a": 1}, {"b": 1}]]
)
def test_samples_that_make_no_batch_are_one_line(samples):
    with pytest.raises(
        DataError,
        match=(
            r"datasets: expected samples of tensors or numbers, each of the same "
            r"shape, got "
        ),
    ):
        collate([(sample, 1) for sample in samples])


def test_a_model_that_is_none_is_one_line():
    with pytest.raises(
        ConfigError,
        match=(
            r"Line\.model: expected an nn\.Module, got the class "
            r"Linear"
        ),
    ):
        check_model(mistakes.Line(), nn.Linear)


def test_data_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=(
            rf"{PLACE}PrepareWithoutReturn\.prepare: expected a line that "
            r"describes the data, got None"
        ),
    ):
        new_run(tmp_path / "none", "tests.support.mistakes.PrepareWithoutReturn").train()
    with pytest.raises(
        RankFailure,
        match="global_batch_size: expected at most 40, the number of training .*, got 64",
    ):
        new_run(tmp_path / "large", "tests.support.mistakes.Line").train(1, global_batch_size=64)


def test_the_check_changes_nothing():
    recipe, config = mistakes.Line(), config_of("tests.support.mistakes.Line", {})
    (train,) = open_samples([recipe.datasets(None)[0]], recipe, config, ALONE)
    model = nn.Sequential(nn.BatchNorm1d(1), nn.Dropout(0.5), recipe.model())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn = torch.random.get_rng_state()
    model.eval()
    check_contract(recipe, model, train, config, ALONE)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [each.grad for each in model.parameters()] == [None] * 4
    assert not model.training


def plain_loss(recipe, state):
    """The mean loss over all targets, by one process that has all samples at once."""
    images, masks = recipe.samples()
    model = recipe.model()
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        return float(recipe.losses(model(images), masks).sum() / (masks != -100).sum())


def test_targets_of_loaded_samples_count_as_those_in_memory(tmp_path):
    config = {"epochs": 3, "optimizer": "sgd", "learning_rate": 0.5, "global_batch_size": 12}
    whole = new_trainer(new_run(tmp_path / "whole", "tests.support.mistakes.Masks"), **config)
    epochs = whole.fit().epochs
    loaded = new_run(tmp_path / "loaded", "tests.support.mistakes.LoadedMasks").train(3, **config)
    for name, value in whole.model.state_dict().items():
        torch.testing.assert_close(loaded.state()[name], value)
    for one, other in zip(epochs, loaded.result.epochs, strict=True):
        assert other.train_loss == pytest.approx(one.train_loss, rel=1e-5)
        assert other.test_loss == pytest.approx(one.test_loss, rel=1e-5)
        assert other.metrics["accuracy"] == one.metrics["accuracy"]
    assert loaded.result.epochs[-1].test_loss == pytest.approx(
        plain_loss(mistakes.Masks(), loaded.state()), rel=1e-5
    )


def test_samples_may_be_dataclasses_and_targets_dicts(tmp_path):
    one = new_trainer(
        new_run(tmp_path / "one", "tests.support.mistakes.TwoInputs"), data_workers=1, epochs=2
    )
    first, second = one.fit().epochs
    assert second.test_loss < first.test_loss
    two = new_run(tmp_path / "two", "tests.support.mistakes.TwoInputs").train(2, epochs=2)
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(two.state()[name], value, rtol=1e-3, atol=1e-5)
