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
from flyte_ddp.events import EpochFinished
from flyte_ddp.rank.evaluation import evaluate_state
from flyte_ddp.rank.metrics import HeldOutMetrics, read_figures, read_value
from flyte_ddp.rank.nested import map_tensors
from flyte_ddp.recipes import Recipe

NUM_DRAWS = 1000
CONFIDENCE = 0.95
MAX_BLOCKS = 100  # of samples, for a metric of torchmetrics, which has no value for each sample


class Measurement:
    """A model's figures on the held-out data, and what the monitored one is made of. On the GPU if there is one.

    Raises:
        ConfigError: the state is not one of the recipe's model.
        NonFiniteLoss: the loss is NaN or infinite.
    """

    def __init__(self, recipe: Recipe, config: TrainingConfig, state: Mapping[str, Any], directory: Path) -> None:
        self.config = config
        self._recipe = recipe
        self._metrics = HeldOutMetrics(recipe, torch.device("cpu"))
        name = config.monitor.metric
        functions = {"test_loss": recipe.losses, **self._metrics.functions}
        # A metric of torchmetrics may have several values, such as f1_cat and f1_dog.
        nearest = (key for key in self._metrics.objects if f"{name}_".startswith(f"{key}_"))
        self._metric_name = "" if name in functions else max(nearest, key=len, default="")
        self._metric = self._metrics.objects.get(self._metric_name)
        # Of each sample: its sums over the targets by name, and their number. Or of each block of samples: the
        # metric's state.
        self._functions = {name: functions[name]} if name in functions else functions
        self._sums: dict[str, list[Tensor]] = {each: [] for each in self._functions}
        self._counts: list[Tensor] = []
        self._states: list[list[dict[str, Any]]] = []
        # A wrapper of torchmetrics has its state in the metrics that it wraps.
        modules = self._metric.modules() if self._metric is not None else ()
        self._parts: list[Any] = [each for each in modules if getattr(each, "metric_state", None)]
        if self._metric is not None:
            num_samples = len(recipe.datasets(directory)[1])  # type: ignore[arg-type]
            size = min(config.evaluation_batch_size, math.ceil(num_samples / MAX_BLOCKS))
            config = dataclasses.replace(config, evaluation_batch_size=size)
        result = evaluate_state(recipe, config, state, directory, self._add)
        # test_loss and the recipe's metrics, by name, and the monitored figure if it follows from these.
        self.values = self._with_figures({"test_loss": result.loss, **result.metrics})

    @property
    def score(self) -> float:
        """The monitored figure, so that less is better; infinite if it is NaN."""
        return self.config.monitor.score(self.values)

    @property
    def num_parts(self) -> int:
        """Samples, or blocks of them, that can be drawn."""
        return len(self._states) or sum(map(len, self._counts))

    def score_draws(self, draws: Tensor) -> Tensor:
        """Return the scores of `draws`, (D, N) numbers of parts: (D,), in double precision.

        Raises:
            RuntimeError: the metric cannot be merged of parts.
        """
        if self._states:
            scores = [self._score_blocks(draw) for draw in draws.tolist()]
            return torch.tensor(scores, dtype=torch.float64)
        sums, counts = {name: torch.cat(parts) for name, parts in self._sums.items()}, torch.cat(self._counts)
        values = ({name: float(each[draw].sum() / counts[draw].sum()) for name, each in sums.items()} for draw in draws)
        scores = [self.config.monitor.score(self._with_figures(each)) for each in values]
        return torch.tensor(scores, dtype=torch.float64)

    def _add(self, outputs: Any, targets: Any) -> None:
        outputs, targets = map_tensors(Tensor.cpu, outputs), map_tensors(Tensor.cpu, targets)
        if self._metric is not None:
            self._metric.reset()
            self._metric.update(self._metrics.predict(outputs), targets)
            self._states.append([copy.deepcopy(part.metric_state) for part in self._parts])
            return
        for name, function in self._functions.items():
            self._sums[name].append(function(outputs, targets).double())
        counts = self._recipe.num_targets(targets)
        num_samples = len(next(iter(self._sums.values()))[-1])
        self._counts.append(torch.ones(num_samples).double() if counts is None else counts.double())

    def _score_blocks(self, draw: list[int]) -> float:
        assert self._metric is not None
        self._metric.reset()
        for number in draw:
            for part, state in zip(self._parts, self._states[number], strict=True):
                part.merge_state(state)
        return self.config.monitor.score(read_value(self._metric_name, self._metric.compute()))

    def _with_figures(self, values: dict[str, float]) -> dict[str, float]:
        """Add the monitored one of the recipe's figures, such as a perplexity; they follow from loss and metrics."""
        name = self.config.monitor.metric
        if name in values or self._metric is not None:
            return values
        nan = math.nan
        epoch = EpochFinished(1, 0, nan, values["test_loss"], nan, nan, nan, nan, metrics=values)
        return {**values, name: read_figures(self._recipe, epoch).get(name, nan)}


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
