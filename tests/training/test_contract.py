"""A recipe that breaks its contract is refused with one line before the first step, and samples may
have any shape.
"""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from flyte_ddp import MultiLabel, Recipe, Regression, Segmentation
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, DataError, RankFailure
from flyte_ddp.events import Reported
from flyte_ddp.rank.data import open_samples
from flyte_ddp.rank.nested import collate
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.training.contract import check_contract, open_datasets, open_model
from flyte_ddp.training.optim import build_optimizer
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import ALONE
from tests.support import mistakes
from tests.support.mistakes import Line, Masks
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

PLACE = r"tests/support/mistakes\.py:\d+: "


def f1_score(*arguments, **options):
    from torchmetrics.classification import MulticlassF1Score  # takes seconds

    return MulticlassF1Score(*arguments, **options)


def collection():
    from torchmetrics import MeanAbsoluteError, MetricCollection, R2Score

    return MetricCollection([MeanAbsoluteError(), R2Score()])


class Transpose(nn.Module):
    def forward(self, batch):
        return batch.transpose(0, 1)


def forgetful(self):
    model = Line.model(self)
    model.register_parameter("forgotten", nn.Parameter(torch.zeros(1)))
    return model


WIDE = {"model": lambda self: nn.Linear(1, 1)}
AVERAGED = {**WIDE, "losses": lambda self, outputs, targets: ((outputs - targets) ** 2).mean(1)}
TOKENS = torch.arange(320).view(-1, 8) % 5
FLAT_TOKENS = {  # outputs (B x T, V) of targets (B, T)
    "samples": lambda self: (TOKENS, TOKENS.roll(1, dims=1)),
    "model": lambda self: nn.Sequential(nn.Embedding(5, 5), nn.Flatten(0, 1)),
    "losses": lambda self, outputs, targets: (
        functional.cross_entropy(outputs, targets.flatten(), reduction="none")
        .view(targets.shape)
        .sum(1)
    ),
    "num_targets": lambda self, targets: torch.full((len(targets),), targets.shape[1]),
    "num_correct": lambda self, outputs, targets: (
        outputs.argmax(1).view(targets.shape) == targets
    ).sum(1),
}
DATA = {name: vars(Line)[name] for name in ("defaults", "prepare", "samples", "datasets")}
LABELS = {**DATA, "samples": lambda self: (Line.samples(self)[0], torch.arange(40) % 2)}

# Recipes by their names: the base class, what differs from it, and the message.
MISTAKES = {
    "Broadcast": (
        *(Line, WIDE),
        r"model: expected outputs of the targets' shape \(8,\), got \(8, 1\), which broadcast to "
        r"\(8, 8\)",
    ),
    "BroadcastAndAveraged": (
        *(Line, AVERAGED),
        r"model: expected outputs of the targets' shape \(8,\), got \(8, 1\)",
    ),
    # The outputs and targets agree in batches of one, (1, 1) and (1,), but not in the evaluation's
    # larger ones.
    "BroadcastOfOne": (
        *(Line, {**AVERAGED, "defaults": {**Line.defaults, "global_batch_size": 1}}),
        r"model: expected outputs of the targets' shape \(2,\), got \(2, 1\), which broadcast to ",
    ),
    "OtherInputs": (
        *(Line, {"model": lambda self: nn.Linear(2, 1)}),
        r"model: expected a model of the samples' inputs, got RuntimeError of inputs \(8, 1\): .* "
        r"shapes cannot",
    ),
    "PlainNumber": (
        *(Line, {"losses": lambda self, *given: float(functional.mse_loss(*given))}),
        r"losses: expected one loss for each sample, shape \(8,\), got a float",
    ),
    "NotDifferentiable": (
        *(Line, {"losses": lambda self, outputs, targets: (outputs > targets).long()}),
        r"losses: expected floating-point losses, got torch\.int64",
    ),
    "Detached": (
        *(Line, {"losses": lambda self, *given: Line().losses(*given).detach()}),
        r"losses: expected losses with a gradient, got some without: do not detach",
    ),
    "DefaultLosses": (
        *(Line, {"losses": Recipe.losses}),
        r"losses: expected one loss .*, got shape \(\): the default is for classes \(B,\)",
    ),
    "DefaultNumCorrect": (
        *(Line, {"num_correct": Recipe.num_correct}),
        r"num_correct: expected a method of the recipe's own, because .*, got \w+ of outputs",
    ),
    "CountsAll": (
        *(Line, {"num_correct": lambda self, outputs, targets: torch.full_like(targets, 13.64)}),
        r"num_correct: expected at most 1 for a sample, .*, got 13\.64; .* needs num_targets",
    ),
    "WrongNumTargets": (
        *(Line, {"num_targets": lambda self, targets: torch.tensor(len(targets))}),
        r"num_targets: expected the number of each sample's targets, shape \(8,\), got shape \(\)",
    ),
    "OneArgument": (
        *(Line, {"losses": lambda self, outputs: outputs}),
        r"losses: expected a method with the parameters \(outputs, targets\), got \(outputs\)",
    ),
    "NoMethod": (
        *(Line, {"num_correct": 0.5}),
        r"num_correct: expected a method with the parameters \(outputs, targets\), got 0\.5",
    ),
    "OtherName": (
        *(Recipe, {"prepare": Line.prepare, "model": Line.model, "dataset": Line.datasets}),
        r"datasets: expected a method of this name, got none \(did you mean dataset\?\)",
    ),
    "Unused": (
        *(Line, {"model": forgetful}),
        r"model: expected a gradient for every parameter, got none for forgotten: use them in the "
        r"forward pass",
    ),
    "NoModel": (
        *(Line, {"model": lambda self: nn.Linear}),
        r"model: expected an nn\.Module, got the class Linear",
    ),
    "SparseGradients": (
        Line,
        {
            **FLAT_TOKENS,
            "model": lambda self: nn.Sequential(nn.Embedding(5, 5, sparse=True), nn.Flatten(0, 1)),
        },
        r"model: expected dense gradients, which optimizers here take, got sparse .*0\.weight: "
        r".*sparse",
    ),
    "FiguresOfText": (
        *(Line, {"figures": lambda self, epoch: {"verdict": "good"}}),
        r"figures: verdict: expected a number, got 'good'",
    ),
    "MetricsOfText": (
        *(Line, {"metrics": lambda self: {"mae": "MeanAbsoluteError"}}),
        r"metrics: mae: expected a torchmetrics.Metric, or a function .*, got 'MeanAbsoluteError'",
    ),
    "MetricsWithoutNames": (
        *(Line, {"metrics": lambda self: [self.num_correct]}),
        r"metrics: expected a dict of metrics by name, got a list",
    ),
    "MetricOverAll": (
        *(Line, {"metrics": lambda self: {"mae": functional.l1_loss}}),
        r"metrics: expected mae of each sample, shape \(8,\), got shape \(\): do not sum over the "
        r"samples",
    ),
    "AccuracyInPercent": (
        *(Line, {"metrics": lambda self: {"accuracy": lambda *given: torch.full((8,), 100)}}),
        r"metrics: accuracy: expected at most 1 for a sample, the number of its targets, got 100;",
    ),
    "MetricOfOtherShapes": (
        *(Line, {"metrics": lambda self: {"f1": f1_score(3)}}),
        r"metrics: expected f1 of outputs and targets, got \w+ of outputs \(8,\), targets \(8,\): ",
    ),
    "MetricForEachClass": (
        Line,
        {
            **LABELS,
            "metric_outputs": lambda self, outputs: torch.stack([outputs, 1 - outputs], dim=1),
            "losses": lambda self, *given: functional.mse_loss(*given, reduction="none"),
            "metrics": lambda self: {"f1": f1_score(2, average=None)},
        },
        r"metrics: f1: expected one number, got shape \(2,\): take a mean, or one metric each",
    ),
    "ReservedName": (
        *(Line, {"metrics": lambda self: {"test_loss": self.num_correct}}),
        r"metrics: expected another name than those of losses and times, got 'test_loss'",
    ),
    "OneDataset": (
        *(Line, {"datasets": lambda self, directory: TensorDataset(*self.samples())}),
        r"datasets: expected a pair of data sets, for training and held out, got a TensorDataset",
    ),
    "Empty": (
        *(Line, {"datasets": lambda self, directory: ([(torch.ones(1), 1.0)], [])}),
        r"datasets: expected a pair of data sets, .* got none for the held-out data",
    ),
    "DictSamples": (
        *(Line, {"datasets": lambda self, directory: ([{"x": 1.0, "y": 1.0}] * 40,) * 2}),
        r"datasets: expected \(input, target\) pairs as samples, got a dict",
    ),
    "Streamed": (
        *(Line, {"datasets": lambda self, directory: (iter(()), [1])}),
        r"datasets: expected .* each with __len__ .*, got a tuple_iterator without",
    ),
    "WideRegression": (
        *(Regression, {**DATA, "model": lambda self: nn.Linear(1, 2)}),
        r"losses: .* that of Regression is for numbers, .*, got \w+ of outputs \(8, 2\), targets",
    ),
    "LabelsOfOneColumn": (
        *(MultiLabel, {**LABELS, "model": lambda self: nn.Linear(1, 2)}),
        r"losses: .* that of MultiLabel is for labels .*, got \w+ of outputs \(8, 2\), targets",
    ),
    "UnnamedClasses": (
        *(Segmentation, {**DATA, "samples": Masks.samples, "model": Masks.model}),
        r"metrics: class_names: expected the names of all classes, at least two, got \[\]",
    ),
    "DefaultsOfClasses": (
        Masks,
        {name: getattr(Recipe, name) for name in ("losses", "num_correct", "num_targets")},
        r"losses: expected one loss for each sample, shape \(8,\), got shape \(8, 6, 6\): the "
        r"default is",
    ),
    "MasksWithoutCounts": (
        *(Masks, {"num_targets": Recipe.num_targets}),
        r"num_correct: expected at most 1 for a sample, the number of its targets",
    ),
}
CORRECT = {
    "SqueezedInLosses": {  # losses and metrics see outputs and targets alike
        **WIDE,
        "losses": lambda self, outputs, targets: Line().losses(outputs.squeeze(1), targets),
        "num_correct": lambda self, outputs, targets: Line().num_correct(
            outputs.squeeze(1), targets
        ),
    },
    "FlatTokens": FLAT_TOKENS,
    "TimeFirst": {  # outputs (T, B, V), with T = B in the check
        **FLAT_TOKENS,
        "model": lambda self: nn.Sequential(nn.Embedding(5, 5), Transpose()),
        "losses": lambda self, outputs, targets: functional.cross_entropy(
            outputs.permute(1, 2, 0), targets, reduction="none"
        ).sum(1),
        "num_correct": lambda self, outputs, targets: (targets == outputs.argmax(2).T).sum(1),
    },
    "MetricsInACollection": {"metrics": lambda self: collection()},
}


def check(base=Line, name="Line", **attributes):
    """Check a recipe as a rank that is alone does."""
    kind = type(name, (base,), {"__module__": mistakes.__name__, **attributes})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mistakes, name, kind, raising=False)
        dotted = f"{mistakes.__name__}.{name}"
        recipe, config = get_recipe(dotted), config_of(dotted, {})
    train, _ = open_datasets(recipe, None, config)
    (samples,) = open_samples([train], recipe, config, ALONE)
    parallelism = Parallelism(recipe, config, ALONE)
    check_contract(open_model(parallelism), samples, parallelism)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_broken_contract_is_one_line(name):
    base, attributes, expected = MISTAKES[name]
    with pytest.raises((ConfigError, DataError)) as caught:
        check(base, name, **attributes)
    message = str(caught.value)
    assert re.match(rf"(tests/\S*\.py:\d+: )?{name}\.{expected}", message), message
    assert "\n" not in message


@pytest.mark.parametrize("name", CORRECT)
def test_correct_recipes_of_other_shapes_pass(name):
    check(Line, name, **CORRECT[name])


# By a name that a recipe defines and nothing reads: the name that is meant.
OTHER_NAMES = {
    name: meant
    for meant, names in {
        "optimizer": ("configure_optimizers",),
        "optimizer_groups": ("optimizer_group", "optimizer_grups"),
        "losses": ("loss", "training_step", "Losses", "lossses"),
        "metrics": ("metric", "validation_step", "compute_metrics"),
        "class_names": ("class_name", "classNames"),
        "defaults": ("default",),
        "num_targets": ("num_target",),
        "collate": ("collate_fn",),
        "datasets": ("dataset", "train_dataloader"),
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
    assert get_recipe("tests.training.test_contract.Named", {"loss": "l2"}).loss == "l2"


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
    ],
)
def test_a_group_of_the_optimizer_that_torch_would_misread_is_refused(groups, expected):
    with pytest.raises(ConfigError, match=rf"^optimizer_groups: (expected )?{expected}"):
        build_optimizer(nn.Linear(1, 1), TrainingConfig(), groups)


def test_a_recipe_that_forgets_a_parameter_in_its_groups_is_refused():
    model = nn.Linear(2, 2)
    with pytest.raises(
        ConfigError,
        match="^optimizer_groups: expected every trained parameter .* got none with bias",
    ):
        build_optimizer(model, TrainingConfig(), [{"params": [model.weight]}])
    model.bias.requires_grad_(False)
    build_optimizer(model, TrainingConfig(), [{"params": [model.weight, model.bias]}])


def test_every_rank_checks_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # The reported place is in the user's own copy.
    run = new_run(tmp_path, "tests.support.mistakes.Averaged")
    with pytest.raises(
        RankFailure, match=rf"ConfigError: {PLACE}Averaged\.losses: expected one loss for each"
    ) as caught:
        run.train()
    assert caught.value.is_user_error
    assert not [event for event in run.events if isinstance(event, Reported)]


def test_a_recipe_of_another_task_has_no_predictions_by_default():
    pair = {"left": torch.ones(2), "right": torch.ones(2)}
    assert Recipe().report_samples(pair, {"score": torch.ones(2)}, torch.ones(2)) == []
    assert Recipe().report_samples(torch.ones(2, 1), torch.ones(2, 1), torch.ones(2)) == []
    assert [
        each.guess for each in Recipe().report_samples(pair, torch.eye(2), torch.arange(2))
    ] == [
        "0",
        "1",
    ]
    assert [
        each.guess for each in MultiLabel().report_samples(pair, torch.eye(2), torch.eye(2))
    ] == [
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


def test_targets_of_loaded_samples_count_as_those_in_memory(tmp_path):
    config = {"epochs": 3, "optimizer": "sgd", "learning_rate": 0.5, "global_batch_size": 12}
    whole = new_trainer(new_run(tmp_path / "whole", "tests.support.mistakes.Masks"), **config)
    epochs = whole.fit().epochs
    loaded = new_run(tmp_path / "loaded", "tests.support.mistakes.LoadedMasks").train(3, **config)
    torch.testing.assert_close(loaded.state(), dict(whole.state.model.state_dict()))
    for one, other in zip(epochs, loaded.result.epochs, strict=True):
        assert other.train_loss == pytest.approx(one.train_loss, rel=1e-5)
        assert other.test_loss == pytest.approx(one.test_loss, rel=1e-5)
        assert other.metrics["accuracy"] == one.metrics["accuracy"]


@pytest.mark.long
def test_samples_may_be_dataclasses_and_targets_dicts(tmp_path):
    one = new_trainer(
        new_run(tmp_path / "one", "tests.support.mistakes.TwoInputs"), data_workers=1, epochs=2
    )
    first, second = one.fit().epochs
    assert second.test_loss < first.test_loss
    two = new_run(tmp_path / "two", "tests.support.mistakes.TwoInputs").train(2, epochs=2)
    expected = dict(one.state.model.state_dict())
    torch.testing.assert_close(two.state(), expected, rtol=1e-3, atol=1e-5)
