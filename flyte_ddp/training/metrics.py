"""A recipe's metrics over the held-out samples, exact at any number of ranks.

The metrics of torchmetrics merge their states over the ranks before they compute a value. They are
known here by what they do, because importing torchmetrics takes two seconds of processor time,
which only a recipe that uses it pays.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import plain_number, suggest
from flyte_ddp.config.frames import frames_of_user
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import EpochFinished
from flyte_ddp.recipes import Recipe
from flyte_ddp.world import World

# The states of a metric may come from other ranks or batches alone. Not by warnings.catch_warnings
# at each call, after which every warning that the process has shown once is shown again.
warnings.filterwarnings("ignore", "The ``compute`` method of metric")

# Figures of an epoch that no metric may be called by.
RESERVED = (
    "loss",
    "train_loss",
    "test_loss",
    "learning_rate",
    "samples_per_second",
    "seconds",
    "num_unreadable",
)


@dataclass(eq=False)
class HeldOutMetrics:
    """The metrics of one evaluation.

    Raises:
        ConfigError: `Recipe.metrics` returns something else.
    """

    recipe: Recipe
    device: InitVar[torch.device]
    # that return a value for each sample, by name
    functions: dict[str, Any] = field(default_factory=dict)
    # of torchmetrics, by name, on the rank's device
    objects: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self, device: torch.device) -> None:
        found: Any = self.recipe.metrics()
        if not isinstance(found, (Mapping, nn.ModuleDict)):  # the latter for a MetricCollection
            raise ConfigError(f"expected a dict of metrics by name, got a {type(found).__name__}")
        for name, metric in _flatten(found).items():
            if not isinstance(name, str) or name in RESERVED:
                raise ConfigError(
                    f"expected another name than those of losses and times, got {name!r}"
                )
            if isinstance(metric, nn.Module) and hasattr(metric, "metric_state"):
                self.objects[name] = metric.to(device)
                self.objects[name].reset()
            elif callable(metric) and not isinstance(metric, (type, nn.Module)):
                self.functions[name] = metric
            else:
                what = "a torchmetrics.Metric, or a function of outputs and targets"
                raise ConfigError(f"{name}: expected {what}, got {metric!r}")
        self.sums = {
            name: torch.zeros((), dtype=torch.float64, device=device) for name in self.functions
        }

    def update(self, outputs: Any, targets: Any) -> None:
        """Add a batch."""
        for name, function in self.functions.items():
            self.sums[name] += function(outputs, targets).sum()
        if self.objects:
            predicted = self.recipe.metric_outputs(outputs)
            for metric in self.objects.values():
                metric.update(predicted, targets)

    def compute(self, world: World, num_samples: int, num_targets: float) -> dict[str, float]:
        """Return the metrics over the samples of all ranks. Every rank calls it.

        Args:
            num_samples: of all ranks, of which the last ones have none if there are fewer than
                ranks.

        Raises:
            ConfigError: a metric is no single number.
        """
        totals = world.all_reduce(*self.sums.values()) if self.sums else []
        values = {name: total / num_targets for name, total in zip(self.sums, totals, strict=True)}
        for name, metric in self.objects.items():
            if num_samples < world.world_size:
                # A state without samples may have another shape or type, with which the library's
                # own gather fails.
                for part in metric.modules():  # a wrapper has others
                    part.dist_sync_fn = functools.partial(
                        _gather_of_some, is_one=world.rank < num_samples
                    )
            try:
                value = metric.compute()
            except (
                ValueError
            ) as error:  # such as an R2 of one sample; one of a lost peer is a RuntimeError
                if frames_of_user(error):
                    raise
                reason = f"of {num_samples} held-out samples: {error}"
                raise ConfigError(
                    f"{type(self.recipe).__name__}.metrics: {name}: expected a value {reason}"
                ) from error
            values.update(read_value(name, value))
        return values


def _flatten(metrics: Any) -> dict[Any, Any]:
    """Return the metrics of a dict, with those of a torchmetrics.MetricCollection in it by both
    names.
    """
    found: dict[Any, Any] = {}
    for name, metric in metrics.items():
        if isinstance(metric, nn.ModuleDict):
            found.update({f"{name}_{key}": each for key, each in metric.items()})
        else:
            found[name] = metric
    return found


def _gather_of_some(tensor: Tensor, group: Any = None, *, is_one: bool) -> list[Tensor]:
    """Return the tensors of the ranks that have samples, in the place of
    `torchmetrics.Metric.dist_sync_fn`.
    """
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, tensor.cpu() if is_one else None, group)
    return [each.to(tensor.device) for each in found if each is not None]


def read_value(name: str, value: Any) -> dict[str, float]:
    """Return the value of a metric as a number by its name, or several of them if it is a dict.

    Raises:
        ConfigError: it has other values than single numbers.
    """
    if isinstance(value, Mapping):
        return {
            f"{name}_{key}": number
            for key, each in value.items()
            for number in read_value(key, each).values()
        }
    try:
        return {name: float(value)}
    except (TypeError, ValueError, RuntimeError):  # the last from a tensor with several
        got = (
            f"shape {tuple(value.shape)}"
            if isinstance(value, Tensor)
            else f"a {type(value).__name__}"
        )
        raise ConfigError(
            f"{name}: expected one number, got {got}: take a mean, or one metric each"
        ) from None


def read_figures(recipe: Recipe, epoch: EpochFinished) -> dict[str, float]:
    """Return the recipe's own figures of an epoch as Python's numbers; NumPy's and tensors with one
    number are fine.

    Raises:
        ConfigError: one of them is no number.
    """
    name = f"{type(recipe).__name__}.figures"
    found: Any = recipe.figures(epoch)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{name}: expected a dict of numbers, got {found!r}")
    return {str(key): plain_number(f"{name}: {key}", value) for key, value in found.items()}


def check_monitor(config: TrainingConfig, names: Sequence[str]) -> None:
    """Raise ConfigError if the config monitors none of these figures."""
    got = config.monitor.metric
    if got not in names:
        raise ConfigError(
            f"monitor.metric: expected one of {', '.join(names)}, got {got!r}{suggest(got, names)}"
        )
