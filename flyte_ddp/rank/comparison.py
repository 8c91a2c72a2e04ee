"""The comparison of two models on the same held-out samples, with an interval for their difference.

The held-out samples are one draw of those that there could be. The paired bootstrap repeats the draw: it takes as many
samples with replacement, the same for both models, and computes the difference anew (Efron and Tibshirani, "An
Introduction to the Bootstrap", 1993, chapters 8 and 13).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.config import TrainingConfig
from flyte_ddp.rank.evaluation import evaluate_state
from flyte_ddp.rank.metrics import HeldOutMetrics, compute_value
from flyte_ddp.rank.nested import map_tensors
from flyte_ddp.recipes import Recipe

NUM_DRAWS = 1000
CONFIDENCE = 0.95
MAX_BLOCKS = 100  # of samples, for a metric of torchmetrics, which has no value for each sample


class Measurement:
    """A model's figures on the held-out data, and what the monitored one is made of. On the GPU if there is one.

    Attributes:
        values: test_loss and the recipe's metrics, by name.

    Raises:
        ConfigError: the state is not one of the recipe's model.
        NonFiniteLoss: the loss is NaN or infinite.
    """

    def __init__(self, recipe: Recipe, config: TrainingConfig, state: Mapping[str, Any], directory: Path) -> None:
        self.config = config
        self._recipe = recipe
        self._metrics = HeldOutMetrics(recipe, torch.device("cpu"))
        self._metric = self._metrics.objects.get(config.monitor.metric)
        # Of each sample: its sum over the targets, and their number. Or of each block of samples: the metric's state.
        self._sums: list[Tensor] = []
        self._counts: list[Tensor] = []
        self._states: list[dict[str, Any]] = []
        if self._metric is not None:
            num_samples = len(recipe.datasets(directory)[1])  # type: ignore[arg-type]
            size = min(config.evaluation_batch_size, math.ceil(num_samples / MAX_BLOCKS))
            config = dataclasses.replace(config, evaluation_batch_size=size)
        result = evaluate_state(recipe, config, state, directory, self._add)
        self.values = {"test_loss": result.loss, **result.metrics}

    @property
    def score(self) -> float:
        """The monitored figure, so that less is better; infinite if it is NaN."""
        return self.config.monitor.score(self.values)

    @property
    def num_parts(self) -> int:
        """Samples, or blocks of them, that can be drawn."""
        return len(self._states) or sum(map(len, self._sums))

    def score_draws(self, draws: Tensor) -> Tensor:
        """Return the scores of `draws`, (D, N) numbers of parts: (D,), in double precision.

        Raises:
            RuntimeError: the metric cannot be merged of parts.
        """
        if self._states:
            scores = [self._score_blocks(draw) for draw in draws.tolist()]
            return torch.tensor(scores, dtype=torch.float64)
        sums, counts = torch.cat(self._sums), torch.cat(self._counts)
        values = [float(sums[draw].sum() / counts[draw].sum()) for draw in draws]
        return torch.tensor([self._score(value) for value in values], dtype=torch.float64)

    def _add(self, outputs: Any, targets: Any) -> None:
        name = self.config.monitor.metric
        outputs, targets = map_tensors(Tensor.cpu, outputs), map_tensors(Tensor.cpu, targets)
        if self._metric is not None:
            self._metric.reset()
            self._metric.update(self._metrics.predict(outputs), targets)
            self._states.append(copy.deepcopy(self._metric.metric_state))
        elif function := {"test_loss": self._recipe.losses, **self._metrics.functions}.get(name):
            sums = function(outputs, targets).double()
            counts = self._recipe.num_targets(targets)
            self._sums.append(sums)
            self._counts.append(torch.ones_like(sums) if counts is None else counts.double())

    def _score_blocks(self, draw: list[int]) -> float:
        assert self._metric is not None
        self._metric.reset()
        for number in draw:
            self._metric.merge_state(self._states[number])
        return self.config.monitor.score(compute_value(self.config.monitor.metric, self._metric))

    def _score(self, value: float) -> float:
        return self.config.monitor.score({self.config.monitor.metric: value})


def compare(challenger: Measurement, champion: Measurement) -> tuple[float, float]:
    """Return the interval that has the challenger's advantage with `CONFIDENCE`, in units of the monitored figure.

    The advantage is positive where the challenger is better. The interval is a point where the metric has no value for
    a part of the samples.
    """
    advantage = champion.score - challenger.score
    size = challenger.num_parts
    draws = torch.randint(size, (NUM_DRAWS, size), generator=torch.Generator().manual_seed(0))
    try:
        differences = champion.score_draws(draws) - challenger.score_draws(draws)
    except RuntimeError:  # of torchmetrics: a state that only grows with the order of the samples
        return advantage, advantage
    edges = torch.tensor([(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], dtype=torch.float64)
    low, high = torch.nanquantile(differences, edges).tolist()
    return low, high
