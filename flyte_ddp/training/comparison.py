"""The comparison of two models on the same held-out samples, with an interval for their difference.

The held-out samples are one draw of those that there could be. The paired bootstrap repeats the
draw: it takes as many samples with replacement, the same for both models, and computes the
difference anew (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 8 and 13).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import EpochFinished
from flyte_ddp.rank.nested import map_tensors
from flyte_ddp.recipes import Recipe
from flyte_ddp.training.contract import open_datasets
from flyte_ddp.training.evaluation import evaluate_state
from flyte_ddp.training.metrics import HeldOutMetrics, read_figures, read_value

NUM_DRAWS = 1000
CONFIDENCE = 0.95
MAX_BLOCKS = 100  # of samples, for a metric of torchmetrics, which has no value for each sample
# five are all better by chance, of equal models, in one case of 32, which is more than 2.5 %
MIN_PARTS = 6


class Measurement:
    """A model's figures on the held-out data, and what the monitored one is made of. On the GPU if
    there is one.

    Raises:
        ConfigError: the state is not one of the recipe's model.
        NonFiniteLoss: the loss is NaN or infinite.
    """

    def __init__(
        self, recipe: Recipe, config: TrainingConfig, state: Mapping[str, Any], directory: Path
    ) -> None:
        self.config = config
        self._recipe = recipe
        self._metrics = HeldOutMetrics(recipe, torch.device("cpu"))
        name = config.monitor.metric
        functions = {"test_loss": recipe.losses, **self._metrics.functions}
        # A metric of torchmetrics may have several values, such as f1_cat and f1_dog.
        nearest = (key for key in self._metrics.objects if f"{name}_".startswith(f"{key}_"))
        self._metric_name = "" if name in functions else max(nearest, key=len, default="")
        self._metric = self._metrics.objects.get(self._metric_name)
        self._functions = {name: functions[name]} if name in functions else functions
        # Of each sample: its sums over the targets, by function, and their number. Or of each block
        # of samples what adds it to the metric: a state to merge, or what the metric is made of.
        self._rows: list[Tensor] = []
        self._blocks: list[Callable[[], object]] = []
        # A wrapper of torchmetrics has its state in the metrics that it wraps.
        modules = self._metric.modules() if self._metric is not None else ()
        self._parts: list[Any] = [each for each in modules if getattr(each, "metric_state", None)]
        self._can_merge = bool(self._parts) and all(map(_can_merge, self._parts))
        if self._metric is not None:
            num_samples = len(open_datasets(recipe, directory, config)[1])  # type: ignore[arg-type]
            size = min(config.evaluation_batch_size, math.ceil(num_samples / MAX_BLOCKS))
            config = dataclasses.replace(config, evaluation_batch_size=size)
        result = evaluate_state(recipe, config, state, directory, self._add)
        # test_loss and the recipe's metrics, by name, and the monitored figure if it follows from
        # these.
        self.values = self._with_figures({"test_loss": result.loss, **result.metrics})

    @property
    def score(self) -> float:
        """The monitored figure, so that less is better; infinite if it is NaN."""
        return self.config.monitor.score(self.values)

    @property
    def num_parts(self) -> int:
        """Samples, or blocks of them, that can be drawn."""
        return len(self._blocks) or sum(map(len, self._rows))

    def score_draws(self) -> Iterator[float]:
        """Yield the score of each draw of parts, infinite where the figure has no value. All models
        get the same draws.

        One draw at a time: all of them take 8 kB for each part.
        """
        size, generator = self.num_parts, torch.Generator().manual_seed(0)
        rows = torch.cat(self._rows) if self._rows else torch.empty(0)
        for _ in range(NUM_DRAWS):
            draw = torch.randint(size, (size,), generator=generator)
            if self._blocks:
                yield self._score_blocks(draw.tolist())
                continue
            sums = rows[draw].sum(0)
            values = dict(zip(self._functions, (sums[:-1] / sums[-1]).tolist(), strict=True))
            yield self.config.monitor.score(self._with_figures(values))

    def _add(self, outputs: Any, targets: Any) -> None:
        outputs, targets = map_tensors(Tensor.cpu, outputs), map_tensors(Tensor.cpu, targets)
        if self._metric is not None:
            predicted = self._recipe.metric_outputs(outputs)
            if not self._can_merge:
                self._blocks.append(partial(self._metric.update, predicted, targets))
                return
            self._metric.reset()
            self._metric.update(predicted, targets)
            states = [copy.deepcopy(part.metric_state) for part in self._parts]
            self._blocks.append(partial(self._merge, states))
            return
        columns = [function(outputs, targets).double() for function in self._functions.values()]
        counts = self._recipe.num_targets(targets)
        counts = torch.ones_like(columns[0]) if counts is None else counts.double()
        self._rows.append(torch.stack([*columns, counts], dim=1))

    def _merge(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.merge_state(state)

    def _score_blocks(self, draw: list[int]) -> float:
        assert self._metric is not None
        self._metric.reset()
        for number in draw:
            self._blocks[number]()
        try:
            value = self._metric.compute()
        except (ValueError, RuntimeError):  # of a draw without any sample of a class, for example
            return math.inf
        return self.config.monitor.score(read_value(self._metric_name, value))

    def _with_figures(self, values: dict[str, float]) -> dict[str, float]:
        """Add the monitored one of the recipe's figures, such as a perplexity; they follow from
        loss and metrics.
        """
        name = self.config.monitor.metric
        if name in values or self._metric is not None:
            return values
        nan = math.nan
        epoch = EpochFinished(1, 0, nan, values["test_loss"], nan, nan, nan, nan, metrics=values)
        return {**values, name: read_figures(self._recipe, epoch).get(name, nan)}


def _can_merge(metric: Any) -> bool:
    """Return whether the states of a metric of torchmetrics add up: a mean, for example, would need
    their weights.
    """
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    reductions = set(metric._reductions.values())
    known = reductions <= {dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum}
    return known and metric.full_state_update is False and not metric.dist_sync_on_step


def compare(challenger: Measurement, champion: Measurement) -> tuple[float, float]:
    """Return the interval that has the challenger's advantage with `CONFIDENCE`, in units of the
    monitored figure.

    The advantage is positive where the challenger is better. It may be anything, from -inf to inf,
    where there are too few samples for an interval, or too many draws of them for which the figure
    has no value.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of draws, such as one that has a class in it only once
        scores = list(zip(champion.score_draws(), challenger.score_draws(), strict=True))
    differences = torch.tensor([theirs - ours for theirs, ours in scores], dtype=torch.float64)
    known = differences[differences.isfinite()]
    tail = (1 - CONFIDENCE) / 2
    if challenger.num_parts < MIN_PARTS or len(known) < (1 - tail) * NUM_DRAWS:
        return -math.inf, math.inf
    # A draw without a value counts as the worst for the end of the interval that it could move.
    padding = NUM_DRAWS - len(known)
    low = torch.quantile(torch.cat([known, known.min().expand(padding)]), tail)
    high = torch.quantile(torch.cat([known, known.max().expand(padding)]), 1 - tail)
    return float(low), float(high)
