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

from flyte_ddp.events.intervals import MIN_DIFFERENCES, find_bounds
from flyte_ddp.promotion.champion import ChampionStore
from flyte_ddp.promotion.comparison import Measurement, compare
from flyte_ddp.promotion.policy import Challenge, PromotionCriteria, RetrainingResult, judge
from flyte_ddp.recipes import Recipe, config_of
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.training.metrics import can_merge, is_merged_by_batches


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
    """The model weighs two numbers. The first one is related to the target, and the second one is
    not.
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


NAME = f"{__name__}.Numbers"
MONITORS = {
    "figure": {"metric": "figure", "mode": "max"},
    "test_loss": {"metric": "test_loss", "mode": "min"},
}


def measure(recipe, *weights, monitored="figure"):
    config = config_of(NAME, {"monitor": MONITORS[monitored]})
    return Measurement(recipe, config, {"weight": torch.tensor([weights])}, None)


def plain_interval(recipe, figure, *models):
    """The interval by leaving out each sample, measured at once by `figure` of predictions and
    targets.
    """
    inputs, targets = recipe.datasets(None)[1].tensors
    predictions = [inputs @ torch.tensor(weights) for weights in models]
    count, advantages = len(targets), []
    for left_out in (None, *range(count)):
        kept = [number for number in range(count) if number != left_out]
        ours, theirs = (float(figure(each[kept], targets[kept])) for each in predictions)
        advantages.append(ours - theirs)
    whole, *remainders = advantages
    return find_bounds([count * whole - (count - 1) * each for each in remainders])


def correlation(predictions, targets):
    return np.corrcoef(predictions.numpy(), targets.numpy())[0, 1]


def share(predictions, targets):
    return ((predictions - targets).abs() < 0.5).float().mean()


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
def test_an_interval_is_that_of_leaving_out_each_sample(kind, figure):
    recipe, models = Numbers(kind), ((0.9, 0.1), (0.3, -0.8))
    better, worse = (measure(recipe, *weights) for weights in models)
    assert better.num_parts == 30
    expected = plain_interval(recipe, figure, *models)
    assert expected[1] - expected[0] > 0.1
    assert compare(better, worse) == pytest.approx(expected, abs=1e-3)


def challenge(tmp_path, **options):
    (directory := tmp_path / "data").mkdir(exist_ok=True)
    monitored = options.pop("monitored", "figure")
    config = config_of(NAME, {"recipe_options": options, "monitor": MONITORS[monitored]})
    prepare_data(Numbers(), "", directory)
    return Challenge(NAME, config, directory, "2026-01-02T03:04:05Z", "c1", "")


def state_file(*weights):
    torch.save({"weight": torch.tensor([weights])}, buffer := io.BytesIO())
    return buffer.getvalue()


NOISE = ((0.0, 1.0), (0.0, -1.0))  # Chance makes one of the two better.
REAL = ((0.0, 1.0), (1.0, 0.0))


@pytest.mark.parametrize(
    ("options", "models", "outcome", "reason"),
    [
        (
            {"kind": "PearsonCorrCoef"},
            NOISE,
            RetrainingResult.NOT_BETTER,
            "so with 95 % confidence it is better by -",
        ),
        (
            {"kind": "PearsonCorrCoef"},
            REAL,
            RetrainingResult.PROMOTED,
            "so with 95 % confidence it is better by 0.",
        ),
        (
            {"size": 29, "monitored": "test_loss"},
            REAL,
            RetrainingResult.NOT_BETTER,
            "29 parts of the data give no interval (at least 30 are needed",
        ),
        (
            {"kind": "Rare", "size": 37},
            REAL,
            RetrainingResult.NOT_BETTER,
            "a figure without each of them",
        ),
        (
            {"size": 30, "monitored": "test_loss"},
            REAL,
            RetrainingResult.PROMOTED,
            "so with 95 % confidence it is better by",
        ),
    ],
    ids=["noise", "real", "too-few", "no-value", "enough"],
)
def test_chance_promotes_nothing(options, models, outcome, reason, tmp_path):
    store, given = ChampionStore(str(tmp_path / "champion")), challenge(tmp_path, **options)
    measured = [measure(Numbers(**given.config.recipe_options), *weights) for weights in models]
    champion, challenger = sorted(range(2), key=lambda number: -measured[number].score)
    judge(store, given, PromotionCriteria(), state_file(*models[champion]))
    result = judge(store, given, PromotionCriteria(), state_file(*models[challenger]))
    assert (result.outcome, len(store.versions())) == (
        outcome,
        1 + (outcome == RetrainingResult.PROMOTED),
    )
    assert reason in result.reason
    if "no interval" in result.reason:
        assert result.advantage == ()
    else:
        assert result.advantage[1] - result.advantage[0] > 0.1
    json.dumps(store.last("last_challenge.json"), allow_nan=False)


class Scored:
    """A measurement with these scores: the score of all samples, and the score without each
    sample.
    """

    def __init__(self, scores):
        self.scores = scores

    def score_parts(self):
        return iter(self.scores)


@pytest.mark.parametrize("undefined", [math.inf, math.nan])
def test_a_figure_without_a_value_gives_no_interval(undefined):
    even = [0.5, *(0.5 + 0.001 * each for each in range(40))]
    low, high = compare(Scored([0.0] * 41), Scored(even))
    assert low < high < math.inf
    even[7] = undefined
    for pair in ((Scored([0.0] * 41), Scored(even)), (Scored(even), Scored([0.0] * 41))):
        assert compare(*pair) == (-math.inf, math.inf)


# Differences of equal models: the long tail is on the side where the challenger is worse.
SHAPES = {
    "normal": lambda draw, size: draw.normal(size=size),
    "skewed": lambda draw, size: 1 - draw.exponential(size=size),
    "accuracy": lambda draw, size: draw.choice([-1.0, 0.0, 1.0], p=[0.05, 0.9, 0.05], size=size),
    "long-tailed": lambda draw, size: np.exp(1.5**2 / 2) - draw.lognormal(sigma=1.5, size=size),
    "longer-tailed": lambda draw, size: np.exp(2) - draw.lognormal(sigma=2, size=size),
    "pareto": lambda draw, size: 1 / 1.5 - draw.pareto(2.5, size=size),
    "tails on both sides": lambda draw, size: draw.standard_t(2, size=size),
}


@pytest.mark.parametrize("size", [6, 20, 30, 100])
@pytest.mark.parametrize("shape", SHAPES)
def test_equal_models_are_rarely_promoted(shape, size):
    draw = np.random.default_rng(0)
    samples = SHAPES[shape](draw, (2000, size)).tolist()
    promoted = sum(find_bounds(row)[0] > 0 for row in samples)
    assert promoted <= 70
    if size < MIN_DIFFERENCES:
        assert promoted == 0


@pytest.mark.parametrize("shape", ["normal", "accuracy", "tails on both sides"])
def test_a_better_model_is_promoted(shape):
    samples = SHAPES[shape](np.random.default_rng(0), (200, 100))
    samples += 5 * samples.std(axis=1, keepdims=True) / 10
    assert sum(find_bounds(row)[0] > 0 for row in samples.tolist()) > 150


def test_the_ends_of_an_interval():
    """Symmetric differences have Student's interval. Equal differences have an interval of no
    width.
    """
    even = [-1.0, 1.0] * 20
    half_width = 2.0227 * np.std(even, ddof=1) / 40**0.5
    assert find_bounds(even) == pytest.approx((-half_width, half_width), abs=1e-4)
    assert find_bounds([0.1] * 40) == pytest.approx((0.1, 0.1))
    assert find_bounds([0.0] * 40) == (0, 0)
    # A single sample on which the challenger is far worse decides.
    low, high = find_bounds([1.0] * 39 + [-30.0])
    assert low == -math.inf
    assert math.isfinite(high)
    # A sample on which it is far better gives a finite interval.
    assert all(map(math.isfinite, find_bounds([-1.0] * 39 + [30.0])))
    skewed = [(number / 10) ** 3 for number in range(40)]
    low, high = find_bounds(skewed)
    assert high - np.mean(skewed) > np.mean(skewed) - low  # farther on the side of the tail
    mirrored = find_bounds([-each for each in skewed])
    assert mirrored == pytest.approx((-high, -low))


def test_groups_of_samples_are_left_out_of_many(monkeypatch):
    """The figures are computed anew for each group, which would take minutes for each sample."""
    monkeypatch.setattr("flyte_ddp.promotion.comparison.MAX_GROUPS", 50)
    recipe = Numbers(size=430)
    better, worse = (
        measure(recipe, *weights, monitored="test_loss") for weights in ((0.9, 0.1), (0.3, -0.8))
    )
    assert better.num_parts == 50
    assert len(list(better.score_parts())) == 51
    low, high = compare(better, worse)
    assert 0 < low < worse.score - better.score < high


def test_states_are_merged_if_torchmetrics_shows_how_it_reduces_them():
    assert can_merge(MergedClose())
    assert not can_merge(MeanClose())
    hidden = MergedClose()
    assert not is_merged_by_batches(hidden)
    del hidden._reductions
    assert not can_merge(hidden)
    assert is_merged_by_batches(hidden)
