"""Recipes for other tasks than classification: their metrics are exact, and the best model is the
one they decide.
"""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import mean_absolute_error, r2_score
from torch import nn
from torch.utils.data import TensorDataset
from torchmetrics import (
    MeanAbsoluteError,
    Metric,
    MetricCollection,
    R2Score,
    SpearmanCorrCoef,
)
from torchmetrics.classification import BinaryAUROC
from torchmetrics.wrappers import MinMaxMetric

from flyte_ddp import MultiLabel, Regression
from flyte_ddp.config import Monitor
from flyte_ddp.errors import ConfigError, RankFailure
from flyte_ddp.events import CheckpointWritten, Prediction, PredictionsMade, Reported
from flyte_ddp.observers.reports.predictions import prediction_panels
from flyte_ddp.promotion.comparison import Measurement, compare
from flyte_ddp.recipes import config_of
from flyte_ddp.training import contract
from flyte_ddp.training.metrics import HeldOutMetrics
from flyte_ddp.world import ALONE
from tests.support.gang import run_gang
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

HERE = "tests.training.test_task_metrics."
NUM_TRAIN = 64


def noise(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


class _Made:
    """Data that are made up: the first `NUM_TRAIN` samples train, `num_test` others are held
    out.
    """

    defaults = {
        "epochs": 2,
        "global_batch_size": 12,
        "learning_rate": 0.05,
        "evaluation_batch_size": 5,
    }
    num_test = 23

    def prepare(self, source, directory):
        return "made up"

    def datasets(self, directory):
        inputs, targets = self.samples(NUM_TRAIN + self.num_test)
        first = slice(NUM_TRAIN), slice(NUM_TRAIN, None)
        return tuple(TensorDataset(inputs[part], targets[part]) for part in first)


class Numbers(_Made, Regression):
    def samples(self, count):
        inputs = noise(count, 4)
        return inputs, torch.stack([inputs.sum(1), inputs[:, 0] * inputs[:, 1]], dim=1)

    def model(self):
        return nn.Linear(4, 2)

    def metrics(self):
        return {
            **super().metrics(),
            "worst": lambda outputs, targets: (outputs - targets).abs().sum(1),
        }


class FewNumbers(Numbers):
    """Of three ranks one has no held-out sample."""

    num_test = 2


class ManyFigures(Numbers):
    """With a metric of several values, and a figure that follows from the loss."""

    num_test = 400

    def metrics(self):
        return {
            "errors": MetricCollection([MeanAbsoluteError(), R2Score()]),
            "range": MinMaxMetric(R2Score()),
        }

    def figures(self, epoch):
        return {"rmse": epoch.test_loss**0.5}


class Labels(_Made, MultiLabel):
    class_names = ("warm", "wet", "windy")

    def samples(self, count):
        inputs = noise(count, 3)
        return inputs, (inputs > 0.5).long()

    def model(self):
        return nn.Linear(3, 3)


class Ranked(Labels):
    """Adds a metric that keeps all samples. One of three ranks has no sample."""

    num_test = 2

    def samples(self, count):
        inputs, targets = super().samples(count)
        targets[-1], targets[-2] = torch.tensor([1, 0, 1]), torch.tensor([0, 0, 1])
        return inputs, targets

    def metrics(self):
        return {"auroc": BinaryAUROC()}


def plain(recipe, state):
    """Loss and metrics of all held-out samples at once, in this process."""
    _, test = recipe.datasets(None)
    inputs, targets = test.tensors
    model = recipe.model()
    model.load_state_dict(state)
    model.eval()
    with torch.no_grad():
        outputs = model(inputs)
    loss = torch.nn.functional
    if isinstance(recipe, Regression):
        r2 = R2Score()
        r2.update(outputs, targets)
        error = (outputs - targets).abs().mean()
        return loss.mse_loss(outputs, targets), {"mae": error, "r2": r2.compute(), "worst": error}
    auroc = BinaryAUROC()
    auroc.update(outputs.sigmoid(), targets)
    error = loss.binary_cross_entropy_with_logits(outputs, targets.float())
    return error, {"auroc": auroc.compute()}


@pytest.mark.parametrize("kind", [FewNumbers, Ranked])
def test_metrics_are_those_of_one_process_at_any_number_of_ranks(kind, tmp_path):
    run = new_run(tmp_path, HERE + kind.__name__).train(3, model_state="last")
    loss, metrics = plain(kind(), run.state())
    last = run.result.epochs[-1]
    assert last.test_loss == pytest.approx(float(loss), rel=1e-5)
    assert last.metrics == {
        name: pytest.approx(float(value), rel=1e-5) for name, value in metrics.items()
    }


@pytest.mark.parametrize("shape", [(), (1,), (2,), (3, 2), (2, 2, 2)])
def test_regression_measures_targets_of_any_shape(shape):
    outputs, targets = noise(20, *shape), noise(20, *shape, seed=1)
    metrics = HeldOutMetrics(Regression(), torch.device("cpu"))
    for part in (slice(0, 7), slice(7, 20)):
        metrics.update(outputs[part], targets[part])
    found = metrics.compute(ALONE, num_samples=20, num_targets=20 * targets[0].numel())
    columns = [each.reshape(20, -1).numpy() for each in (targets, outputs)]
    assert found["r2"] == pytest.approx(r2_score(*columns), abs=1e-5)
    assert found["mae"] == pytest.approx(mean_absolute_error(*columns), abs=1e-6)


def best_of(epochs, monitor):
    return min(epochs, key=lambda epoch: monitor.score(epoch.figures().values))


@pytest.mark.parametrize(
    ("world_size", "parallel"), [(1, "ddp"), pytest.param(2, "fsdp", marks=pytest.mark.long)]
)
def test_the_model_state_is_that_of_the_best_epoch_by_the_monitor(world_size, parallel, tmp_path):
    config = {
        "epochs": 4,
        "optimizer": "sgd",
        "schedule": "constant",
        "parallel": parallel,
        "checkpoints_to_keep": 1,
    }
    monitor = {"metric": "mae", "mode": "max"}  # the wrong way round: the first epoch is the best
    run = new_run(tmp_path, HERE + "Numbers").train(world_size, monitor=monitor, **config)
    epochs, finished = run.result.epochs, run.result.finished
    best = best_of(epochs, Monitor("mae", "max"))
    assert best is not epochs[-1]
    assert (finished.best_epoch, finished.model_state_epoch) == (best.epoch, best.epoch)
    assert finished.best == {"mae": best.metrics["mae"], "test_loss": best.test_loss}
    assert run.result.best == best
    written = [event for event in run.events if isinstance(event, CheckpointWritten)]
    assert [event.step for event in written if event.best][-1] == best.step
    loss, metrics = plain(Numbers(), run.state())
    assert float(loss) == pytest.approx(best.test_loss, rel=1e-5)
    assert float(metrics["mae"]) == pytest.approx(best.metrics["mae"], rel=1e-5)
    predictions = next(event for event in run.events if isinstance(event, PredictionsMade))
    assert predictions.epoch == best.epoch


def test_a_best_checkpoint_that_is_damaged_leaves_the_last_epoch_with_a_warning(tmp_path, caplog):
    config = {"epochs": 3, "monitor": {"metric": "mae", "mode": "max"}}
    trainer = new_trainer(new_run(tmp_path, HERE + "Numbers"), **config)
    trainer.fit()
    (tmp_path / "checkpoints" / f"step-{trainer.state.best.step:010d}.json").write_text("{}")
    assert trainer.checkpoints.load_model_state().epoch == 3
    assert "the model state is that of epoch 3, and not of the best: " in caplog.text


class Seen(Metric):
    """Counts samples in a state of its own kind."""

    num_seen = 0

    def update(self, outputs, targets):
        self.num_seen += len(targets)

    def compute(self):
        return torch.tensor(float(self.num_seen))


class Listed(Metric):
    """Keeps batches in lists that are not reduced, and in one that is, by a function of its own."""

    def __init__(self):
        super().__init__()
        self.add_state("batches", [], dist_reduce_fx=None)
        self.add_state("sizes", [], dist_reduce_fx=lambda sizes: torch.stack(sizes).sum())
        self.add_state("largest", torch.tensor(-9.0), dist_reduce_fx="max")

    def update(self, outputs, targets):
        self.batches.append(targets)
        self.sizes.append(torch.tensor(float(len(targets))))
        self.largest = torch.maximum(self.largest, targets.max())

    def compute(self):
        sizes = self.sizes if isinstance(self.sizes, torch.Tensor) else sum(self.sizes)
        return {
            "median": torch.cat(self.batches).median(),
            "sizes": sizes,
            "largest": self.largest,
        }


class Mixed(Listed):
    """Has a known state, and one that is not."""

    def update(self, outputs, targets):
        super().update(outputs, targets)
        self.width = outputs.shape[1]  # follows from the data, and is no state
        self.num_seen = getattr(self, "num_seen", 0) + len(targets)


class Odd(Regression):
    def metrics(self):
        return {
            "seen": Seen(),
            "listed": Listed(),
            "mae": MeanAbsoluteError(),
            "spearman": SpearmanCorrCoef(),
        }

    def metric_outputs(self, outputs):
        return outputs.flatten()


def odd_metrics(world, store, num_samples, batch_size):
    """The metrics of samples that the ranks share as an evaluation does."""
    outputs, targets = noise(num_samples, 1), noise(num_samples, seed=1)
    metrics = HeldOutMetrics(Odd(), torch.device("cpu"))
    for index in (
        torch.arange(num_samples).tensor_split(world.world_size)[world.rank].split(batch_size)
    ):
        if len(index):
            metrics.update(outputs[index], targets[index])
    return metrics.compute(world, num_samples, num_samples)


@pytest.mark.parametrize(("num_samples", "batch_size"), [(13, 4), (16, 2), (2, 4)])
def test_metrics_with_states_of_any_kind_are_exact_on_three_ranks(num_samples, batch_size):
    expected = odd_metrics(ALONE, None, num_samples, 100)
    assert expected["seen"] == num_samples
    for found in run_gang(3, odd_metrics, num_samples, batch_size):
        assert found == pytest.approx(expected, rel=1e-5)


def test_a_metric_that_only_a_part_of_can_be_merged_is_one_line_before_the_first_step(monkeypatch):
    given = {"outputs": noise(4, 2), "targets": noise(4)}
    for kind in (Seen, Listed, SpearmanCorrCoef, BinaryAUROC):
        monkeypatch.setattr(contract, "has_other_ranks", lambda: True)
        metric = kind()
        outputs = given["targets"] if kind in (SpearmanCorrCoef, BinaryAUROC) else given["outputs"]
        targets = (given["targets"] > 0.5).int() if kind is BinaryAUROC else given["targets"]
        metric.update(outputs, targets)
        contract.check_state("metrics", metric, {"outputs": outputs, "targets": targets})
    mixed = Mixed()
    mixed.update(**given)
    with pytest.raises(ConfigError, match="^metrics: mixed: expected .*add_state.* got num_seen"):
        contract.check_state("metrics: mixed", mixed, given)
    monkeypatch.undo()
    contract.check_state("metrics: mixed", mixed, given)  # alone


class Grown(Numbers):
    """Its one metric has states of the kinds that `add_state` makes and does not make."""

    def metrics(self):
        return {"own": Seen(), "mixed": Mixed()}


class GrownAlone(Numbers):
    def metrics(self):
        return {"own": Seen()}


@pytest.mark.long
def test_more_ranks_at_a_resume_count_all_samples_or_refuse_a_metric(tmp_path):
    expected = "Grown.metrics: mixed: expected states made by add_state alone.* got num_seen"
    run = new_run(tmp_path / "mixed", HERE + "Grown").train(1, epochs=1)
    assert run.result.epochs[-1].metrics["own"] == Numbers.num_test
    with pytest.raises(RankFailure, match=expected):
        run.train(3, epochs=2)
    assert not any(isinstance(each, Reported) and each.epoch > 1 for each in run.events)
    run = new_run(tmp_path / "own", HERE + "GrownAlone").train(1, epochs=1)
    run.train(3, epochs=2)
    assert [each.metrics["own"] for each in run.result.epochs] == [Numbers.num_test] * 2


def test_a_metric_without_a_value_of_so_few_samples_is_one_line():
    metrics = HeldOutMetrics(Numbers(), torch.device("cpu"))
    metrics.update(torch.zeros(1, 2), torch.zeros(1, 2))
    expected = (
        "^Numbers.metrics: r2: expected a value of 1 held-out samples: Needs at least two "
        "samples to calculate"
    )
    with pytest.raises(ConfigError, match=expected):
        metrics.compute(ALONE, num_samples=1, num_targets=2)


def test_a_monitor_that_the_recipe_has_not_is_one_line_before_the_first_step(tmp_path):
    run = new_run(tmp_path, HERE + "Numbers")
    with pytest.raises(RankFailure) as caught:
        run.train(1, monitor={"metric": "maee", "mode": "min"})
    expected = (
        "ConfigError: monitor.metric: expected a known metric (did you mean mae?), got 'maee'"
    )
    assert caught.value.cause == expected
    assert not [event for event in run.events if isinstance(event, Reported)]


def measurement(kind, scale, monitor=None):
    """A model with perfect weights, except for noise of `scale`."""
    state = {"weight": torch.tensor([[1.0] * 4, [0.0] * 4]), "bias": torch.tensor([0.0, 0.25])}
    spoiled = {name: value + scale * noise(*value.shape) for name, value in state.items()}
    config = config_of(HERE + kind.__name__, {"monitor": monitor} if monitor else {})
    return Measurement(kind(), config, spoiled, None)


@pytest.mark.parametrize(
    ("name", "mode", "num_parts"),
    [
        ("test_loss", "min", 400),
        ("errors_R2Score", "max", 100),  # This metric is computed in blocks.
        ("range_raw", "max", 100),
        ("rmse", "min", 400),
    ],
)
def test_a_loss_one_of_several_values_and_a_figure_may_decide(name, mode, num_parts):
    monitor = {"metric": name, "mode": mode}
    better, worse = (measurement(ManyFigures, scale, monitor) for scale in (0.05, 0.1))
    assert better.num_parts == num_parts
    low, high = compare(better, worse)
    assert 0 < low < worse.score - better.score < high
    if name == "test_loss":
        assert compare(worse, better) == (pytest.approx(-high), pytest.approx(-low))
        assert compare(better, better) == (0, 0)


@pytest.mark.parametrize(
    ("predictions", "expected"),
    [
        (
            [
                Prediction("1", "1.5", {}, numbers=[1.0, 1.5], error=0.5),
                Prediction("2", "2", {}, numbers=[2.0, 2.0], error=0),
            ],
            "Predicted over true numbers of 2 held-out samples: mean absolute error 0.25",
        ),
        (
            [Prediction(truth, guess, {}) for truth, guess in ("aa", "aa", "ab", "bb")],
            "Confusion matrix of 4 held-out samples: 1 wrong; most often a for b, 1 times",
        ),
        ([Prediction("a", "a", {})], None),
        ([Prediction(str(index), "0", {}) for index in range(30)], None),
        ([], None),
    ],
)
def test_predictions_are_drawn_as_numbers_or_a_confusion_matrix(predictions, expected):
    panels = prediction_panels(predictions)
    assert [panel.summary for panel in panels] == ([expected] if expected else [])
