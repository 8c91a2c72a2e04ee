"""Inspection for reports never ends a run."""

from __future__ import annotations

import logging

import torch
from torch import nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import EpochFinished, HistogramsTaken, PredictionsMade, RunFinished
from flyte_ddp.recipes import Recipe
from flyte_ddp.training.inspection import describe_layers, take_histograms
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import ALONE
from tests.support.runs import new_run
from tests.support.trainers import new_trainer


class Odd(nn.Module):
    """Has layers that return no tensor, and parameters that cannot be drawn as a histogram
    unchanged.
    """

    class Nothing(nn.Module):
        def forward(self, inputs):
            return None

    class Pair(nn.Module):
        def forward(self, inputs):
            return {"first": [], "second": (inputs,)}

    def __init__(self):
        super().__init__()
        self.nothing, self.pair = self.Nothing(), self.Pair()
        self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf, 2.0]))
        self.infinite = nn.Parameter(torch.full((3,), torch.inf))
        self.empty = nn.Parameter(torch.zeros(0))
        self.constant = nn.Parameter(torch.full((5,), 3.0))
        self.huge = nn.Parameter(torch.tensor([-3e38, 3e38]))
        self.weight = nn.Parameter(torch.linspace(-1, 1, 129))

    def forward(self, inputs):
        self.nothing(inputs)
        return self.pair(inputs)["second"][0]


def test_layers_without_tensors_have_no_shape_and_histograms_count_the_finite_values(monkeypatch):
    # This function has no deterministic kernel for floats on GPUs.
    monkeypatch.setattr(torch, "histc", None)
    layers = describe_layers(Odd(), torch.zeros(1, 4))
    histograms = take_histograms(Odd(), Parallelism(Recipe(), TrainingConfig(), ALONE))

    shapes = {layer.name: layer.output_shape for layer in layers}
    assert shapes == {"nothing": [], "pair": [1, 4]}
    num_values = {name: sum(histogram.counts) for name, histogram in histograms.items()}
    expected = {"mask": 2, "constant": 5, "huge": 2, "weight": 129}  # There are no gradients.
    assert num_values == {f"parameters/{name}": count for name, count in expected.items()}
    weight, constant = histograms["parameters/weight"], histograms["parameters/constant"]
    assert len(weight.edges) == len(weight.counts) + 1 == 65
    assert (weight.edges[0], weight.edges[-1]) == (-1, 1)
    assert weight.counts == [2] * 63 + [3]
    assert constant.edges[0] < 3 < constant.edges[-1]


def test_an_error_in_inspection_is_logged_and_the_run_continues(tmp_path, monkeypatch, caplog):
    def broken(*arguments):
        raise ZeroDivisionError("broken on purpose")

    monkeypatch.setattr("flyte_ddp.training.inspection.take_histograms", broken)
    trainer = new_trainer(new_run(tmp_path), epochs=1, memory_interval=0)
    trainer.parallelism.recipe.figures = trainer.parallelism.recipe.generate_sample = broken
    with caplog.at_level(logging.WARNING):
        trainer.fit()

    kinds = [type(event) for event in trainer.session.process.link.events]
    assert EpochFinished in kinds
    assert HistogramsTaken not in kinds
    assert [record.getMessage() for record in caplog.records] == [
        f"the {figure} cannot be shown: ZeroDivisionError: broken on purpose"
        for figure in ("figures", "sample", "histograms")
    ]


def test_predictions_are_shown_after_epochs_where_that_is_asked_for(tmp_path):
    trainer = new_trainer(new_run(tmp_path), epochs=3, prediction_interval=1)
    trainer.fit()
    made = [
        event for event in trainer.session.process.link.events if isinstance(event, PredictionsMade)
    ]
    assert [each.epoch for each in made] == [1, 2]  # the end of the run shows the kept model's
    numbers = [each.sample for each in made[0].predictions]
    assert numbers == list(range(len(trainer.test)))


def test_a_run_without_showable_layers_and_predictions_succeeds(tmp_path):
    run = new_run(tmp_path, "Unshown").train(num_processes=1, epochs=1)

    assert isinstance(run.events[-1], RunFinished)
    assert run.started.layers == []
    assert not any(isinstance(event, PredictionsMade) for event in run.events)
    assert "the predictions cannot be shown: KeyError: 'no such class'" in "".join(run.lines)
