"""A comparison is an interval of what would be measured on other draws of the held-out samples,
never chance alone.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import Metric, PearsonCorrCoef

from flyte_ddp.promotion.champion import ChampionStore
from flyte_ddp.promotion.policy import Challenge, Outcome, PromotionCriteria, judge
from flyte_ddp.recipes import Recipe, config_of
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.training.comparison import NUM_DRAWS, Measurement, compare

pytestmark = pytest.mark.usefixtures("server_with_metrics")


class Close(Metric):
    """A metric as torchmetrics' page shows one: it does not say if parts of it can be merged."""

    def __init__(self):
        super().__init__()
        self.add_state("close", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, preds, target):
        self.close += ((preds - target).abs() < 0.5).float().sum()
        self.total += len(target)

    def compute(self):
        return self.close / self.total


class MergedClose(Close):
    full_state_update = False


class MeanClose(Metric):
    """With a mean for a state, which cannot be merged without the number of its samples."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("mean", default=torch.tensor(0.0), dist_reduce_fx="mean")
        self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds, target):
        value = ((preds - target).abs() < 0.5).float().mean()
        self.mean = (self.mean * self.count + value * len(target)) / (self.count + len(target))
        self.count += len(target)

    def compute(self):
        return self.mean


class Unregistered(Metric):
    """With plain attributes in the place of states."""

    def update(self, preds, target):
        self.values = [*getattr(self, "values", []), *((preds - target).abs() < 0.5).tolist()]

    def compute(self):
        return sum(self.values) / len(self.values)

    def reset(self):
        super().reset()
        self.values = []


class Rare(Close):
    """Without a value where few samples are far off, as some metrics have none without a sample of
    a class.
    """

    def compute(self):
        if self.close > 0.55 * self.total:
            raise ValueError("expected more samples that are far off")
        return super().compute()


KINDS = {
    kind.__name__: kind
    for kind in (PearsonCorrCoef, Close, MergedClose, MeanClose, Unregistered, Rare)
}


@dataclass
class Numbers(Recipe):
    """The model weighs two numbers, of which the first tells something of the target, and the
    second nothing.
    """

    kind: str = "Close"
    size: int = 30

    def prepare(self, source, directory):
        return "made up"

    def datasets(self, directory):
        draw = torch.Generator().manual_seed(0)
        inputs = torch.randn(self.size, 2, generator=draw)
        return [
            TensorDataset(inputs, inputs[:, 0] + 0.7 * torch.randn(self.size, generator=draw))
        ] * 2

    def model(self):
        return nn.Linear(2, 1, bias=False)

    def losses(self, outputs, targets):
        return (outputs[:, 0] - targets).square()

    def metrics(self):
        return {"figure": KINDS[self.kind]()}

    def metric_outputs(self, outputs):
        return outputs[:, 0]


@pytest.fixture
def fewer_draws(monkeypatch):
    """A tenth of the draws, which take a tenth of the time."""
    monkeypatch.setattr("flyte_ddp.training.comparison.NUM_DRAWS", NUM_DRAWS // 10)


NAME = f"{__name__}.Numbers"
MONITORS = {
    "figure": {"metric": "figure", "mode": "max"},
    "test_loss": {"metric": "test_loss", "mode": "min"},
}


def measure(recipe, *weights, monitored="figure"):
    config = config_of(NAME, {"monitor": MONITORS[monitored]})
    return Measurement(recipe, config, {"weight": torch.tensor([weights])}, None)


def plain_interval(recipe, figure, *models):
    """The same draws, each measured at once by `figure` of predictions and targets."""
    inputs, targets = recipe.datasets(None)[1].tensors
    predictions = [inputs @ torch.tensor(weights) for weights in models]
    draw, differences = torch.Generator().manual_seed(0), []
    for _ in range(NUM_DRAWS // 10):
        index = torch.randint(len(targets), (len(targets),), generator=draw)
        ours, theirs = (float(figure(each[index], targets[index])) for each in predictions)
        differences.append(ours - theirs)
    return tuple(np.quantile(differences, [0.025, 0.975]))


def correlation(predictions, targets):
    return np.corrcoef(predictions.numpy(), targets.numpy())[0, 1]


def share(predictions, targets):
    return ((predictions - targets).abs() < 0.5).float().mean()


@pytest.mark.usefixtures("fewer_draws")
@pytest.mark.parametrize(
    ("kind", "figure"),
    [
        ("PearsonCorrCoef", correlation),
        ("Close", share),
        ("MergedClose", share),
        ("MeanClose", share),
        ("Unregistered", share),
    ],
)
def test_an_interval_is_that_of_the_drawn_samples(kind, figure):
    recipe, models = Numbers(kind), ((0.9, 0.1), (0.3, -0.8))
    better, worse = (measure(recipe, *weights) for weights in models)
    assert better.num_parts == 30
    expected = plain_interval(recipe, figure, *models)
    assert expected[1] - expected[0] > 0.1
    assert compare(better, worse) == pytest.approx(expected, abs=1e-5)


def challenge(tmp_path, **options):
    (directory := tmp_path / "data").mkdir(exist_ok=True)
    monitored = options.pop("monitored", "figure")
    config = config_of(NAME, {"recipe_options": options, "monitor": MONITORS[monitored]})
    prepare_data(Numbers(), "", directory)
    return Challenge(NAME, config, directory, "2026-01-02T03:04:05Z", "c1", "")


def state_file(*weights):
    torch.save({"weight": torch.tensor([weights])}, buffer := io.BytesIO())
    return buffer.getvalue()


NOISE = ((0.0, 1.0), (0.0, -1.0))  # of which one is the better by chance
REAL = ((0.0, 1.0), (1.0, 0.0))


@pytest.mark.usefixtures("fewer_draws")
@pytest.mark.parametrize(
    ("options", "models", "outcome", "reason"),
    [
        (
            {"kind": "PearsonCorrCoef"},
            NOISE,
            Outcome.NOT_BETTER,
            "so with 95 % confidence it is better by -",
        ),
        (
            {"kind": "PearsonCorrCoef"},
            REAL,
            Outcome.PROMOTED,
            "so with 95 % confidence it is better by 0.",
        ),
        (
            {"size": 5, "monitored": "test_loss"},
            REAL,
            Outcome.NOT_BETTER,
            "5 parts of the data give no interval",
        ),
        (
            {"kind": "Rare", "size": 8},
            REAL,
            Outcome.NOT_BETTER,
            "or too many draws of them have no value)",
        ),
        (
            {"size": 12, "monitored": "test_loss"},
            REAL,
            Outcome.PROMOTED,
            "so with 95 % confidence it is better by",
        ),
    ],
    ids=["noise", "real", "five", "no-value", "enough"],
)
def test_chance_promotes_nothing(options, models, outcome, reason, tmp_path):
    store, given = ChampionStore(str(tmp_path / "champion")), challenge(tmp_path, **options)
    measured = [measure(Numbers(**given.config.recipe_options), *weights) for weights in models]
    champion, challenger = sorted(range(2), key=lambda number: -measured[number].score)
    judge(store, given, PromotionCriteria(), state_file(*models[champion]))
    result = judge(store, given, PromotionCriteria(), state_file(*models[challenger]))
    assert (result.outcome, len(store.versions())) == (outcome, 1 + (outcome == Outcome.PROMOTED))
    assert reason in result.reason
    if "no interval" in reason or "no value" in reason:
        assert result.advantage == ()
    else:
        assert result.advantage[1] - result.advantage[0] > 0.1
    json.dumps(store.last("last_challenge.json"), allow_nan=False)


def test_a_few_draws_without_a_value_count_as_the_worst():
    class Drawn:
        num_parts = 30

        def __init__(self, scores):
            self.scores = scores

        def score_draws(self):
            return iter(self.scores)

    even = [0.001 * each for each in range(NUM_DRAWS)]
    low, high = compare(Drawn([0.0] * NUM_DRAWS), Drawn(even))
    assert (low, high) == pytest.approx((0.024975, 0.974025))
    few = [math.inf if number % 50 == 0 else each for number, each in enumerate(even)]
    some = compare(Drawn([0.0] * NUM_DRAWS), Drawn(few))
    assert some[0] < low
    assert some[1] > high
    for undefined in (math.inf, math.nan):
        many = [undefined if number % 20 == 0 else each for number, each in enumerate(even)]
        assert compare(Drawn([0.0] * NUM_DRAWS), Drawn(many)) == (-math.inf, math.inf)
        assert compare(Drawn(many), Drawn([0.0] * NUM_DRAWS)) == (-math.inf, math.inf)
