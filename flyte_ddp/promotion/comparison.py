"""The comparison of two models on the same held-out samples, with an interval for their difference.

The held-out samples are one draw of all possible samples. Each sample, or each of several equal
groups, is left out once, for both models. The change of the figures is this part's own difference
(the jackknife; Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 11). The
interval is the confidence interval of the mean of these differences.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import EpochFinished
from flyte_ddp.events.intervals import MIN_DIFFERENCES, find_bounds
from flyte_ddp.rank.nested import map_tensors
from flyte_ddp.recipes import Recipe
from flyte_ddp.training.contract import open_datasets
from flyte_ddp.training.evaluation import evaluate_state
from flyte_ddp.training.metrics import HeldOutMetrics, can_merge, read_figures, read_value

MIN_PARTS = MIN_DIFFERENCES  # a comparison needs so many parts
MAX_BLOCKS = 100  # blocks of samples, for metrics of torchmetrics: they have no value per sample
MAX_GROUPS = 1000  # groups of samples; each group costs a call of the recipe's figures


class Measurement:
    """A model's figures on the held-out data, and the parts of the monitored figure. Computed on
    the GPU if there is one.

    Raises:
        ConfigError: the state does not fit the recipe's model.
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
        if name in functions:
            self._metric_name, self._functions = "", {name: functions[name]}
        else:
            self._metric_name, self._functions = max(nearest, key=len, default=""), functions
        self._metric = self._metrics.objects.get(self._metric_name)
        # For functions, a row for each sample: the sums over its targets, and their number. For a
        # metric, a call for each block of samples that adds the block to the metric.
        self._rows: list[Tensor] = []
        self._blocks: list[Callable[[], object]] = []
        # A wrapper of torchmetrics has its state in the metrics that it wraps.
        modules: Iterable[Any] = ()
        if self._metric is not None:
            modules = self._metric.modules()
        self._parts: list[Any] = [each for each in modules if getattr(each, "metric_state", None)]
        self._can_merge = bool(self._parts) and all(map(can_merge, self._parts))
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
        """Samples, or groups of them, that can be left out."""
        return len(self._blocks) or min(sum(map(len, self._rows)), MAX_GROUPS)

    def score_parts(self) -> Iterator[float]:
        """Yield the score of all parts, and then without each of them, infinite where the figure
        has no value. The parts of all models are the same samples.
        """
        if self._blocks:
            yield self._score_blocks(self._blocks)
            for number in range(len(self._blocks)):
                yield self._score_blocks([*self._blocks[:number], *self._blocks[number + 1 :]])
            return
        rows = torch.cat(self._rows)
        # Neighbours may be alike, such as samples of the same class.
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        whole = rows.sum(0)
        # Nothing is left out first.
        for group in (order[:0], *order.tensor_split(self.num_parts)):
            sums = whole - rows[group].sum(0)
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
        if counts is None:
            counts = torch.ones_like(columns[0])
        counts = counts.double()
        self._rows.append(torch.stack([*columns, counts], dim=1))

    def _merge(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self._parts, states, strict=True):
            part.merge_state(state)

    def _score_blocks(self, blocks: Sequence[Callable[[], object]]) -> float:
        assert self._metric is not None
        self._metric.reset()
        for add in blocks:
            add()
        try:
            value = self._metric.compute()
        except (ValueError, RuntimeError):  # the blocks may have no sample of a class, for example
            return math.inf
        return self.config.monitor.score(read_value(self._metric_name, value))

    def _with_figures(self, values: dict[str, float]) -> dict[str, float]:
        """Add the monitored figure if it is one of the recipe's, such as a perplexity. The recipe
        computes its figures from loss and metrics.
        """
        name = self.config.monitor.metric
        if name in values or self._metric is not None:
            return values
        nan = math.nan
        epoch = EpochFinished(1, 0, nan, values["test_loss"], nan, nan, nan, nan, metrics=values)
        return {**values, name: read_figures(self._recipe, epoch).get(name, nan)}


def compare(challenger: Measurement, champion: Measurement) -> tuple[float, float]:
    """Return the 95 % confidence interval of the challenger's advantage, in units of the monitored
    figure.

    The advantage is positive if the challenger is better. The interval is (-inf, inf) if there are
    too few parts, or if the figure has no value without one of the parts. The lower end is -inf if
    a few parts decide alone on which the challenger is worse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a class may be missing in all other parts, for example
        pairs = zip(champion.score_parts(), challenger.score_parts(), strict=True)
        advantage, *remainders = [theirs - ours for theirs, ours in pairs]
    count = len(remainders)
    return find_bounds([count * advantage - (count - 1) * each for each in remainders])
