"""A recipe's metrics over the held-out samples, exact at any number of ranks.

The metrics of torchmetrics merge their states over the ranks before they compute a value. Where
their own way needs the same number of tensors on each rank, the states are merged here, on rank 0;
and where a metric has no states that are known, rank 0 sees the batches of all ranks. They are
known here by what they do, because importing torchmetrics takes two seconds of processor time,
which only a recipe that uses it pays.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import expect_known, plain_number
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import EpochFinished
from flyte_ddp.process.tracebacks import frames_of_user
from flyte_ddp.rank.nested import map_tensors
from flyte_ddp.recipes import Recipe
from flyte_ddp.world import World

# A metric's states may all come from other ranks or batches, so this warning is wrong here.
# warnings.catch_warnings at each call would let the process show all its warnings again.
warnings.filterwarnings("ignore", "The ``compute`` method of metric")

# Names of an epoch's figures, which no metric may have.
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
    # functions that return a value for each sample, by name
    functions: dict[str, Any] = field(default_factory=dict)
    # metrics of torchmetrics by name, on the rank's device
    objects: dict[str, Any] = field(default_factory=dict)
    # this rank's arguments of `update`, for each metric without states that torchmetrics knows
    batches: dict[str, list[Any]] = field(default_factory=dict)
    num_batches: int = 0  # number of this rank's batches

    def __post_init__(self, device: torch.device) -> None:
        found: Any = self.recipe.metrics()
        if not isinstance(found, (Mapping, nn.ModuleDict)):  # a MetricCollection is a ModuleDict
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
        self.num_batches += 1
        if self.objects:
            predicted = self.recipe.metric_outputs(outputs)
            for name, metric in self.objects.items():
                if is_merged_by_batches(metric) and has_other_ranks():
                    self.batches.setdefault(name, []).append(_on_cpu([predicted, targets]))
                else:
                    metric.update(predicted, targets)

    def compute(self, world: World, num_samples: int, num_targets: float) -> dict[str, float]:
        """Return the metrics over the samples of all ranks. Every rank calls it.

        Args:
            num_samples: the number of samples of all ranks. With fewer samples than ranks, the last
                ranks have none.

        Raises:
            ConfigError: a metric is no single number.
        """
        totals: Sequence[float] = []
        if self.sums:
            totals = world.all_reduce(*self.sums.values())
        values = {name: total / num_targets for name, total in zip(self.sums, totals, strict=True)}
        for name, metric in self.objects.items():
            # A state without samples may have another shape or type.
            is_own = num_samples < world.world_size or not _is_merged_by_library(metric)
            if world.world_size == 1 or not is_own:
                values.update(self._compute(name, num_samples))
                continue
            self._gather(name, world)
            found: dict[str, float] = {}
            if world.is_first:
                found = self._compute(name, num_samples)
            values.update(world.broadcast_object(found))
        return values

    def _gather(self, name: str, world: World) -> None:
        """Give the metric of rank 0 the batches or states of all ranks. Every rank calls it."""
        metric = self.objects[name]
        parts = _parts_of(metric)
        own = self.batches.get(name) or _on_cpu([part.metric_state for part in parts])
        every: list[Any] = [None] * world.world_size
        if not self.num_batches:
            own = None
        dist.all_gather_object(every, own)
        if not world.is_first:
            return
        known = [each for each in every if each is not None]
        every = map_tensors(lambda each: each.to(world.device), known)
        if is_merged_by_batches(metric):
            for batches in every:
                for predicted, targets in batches:
                    metric.update(predicted, targets)
        else:
            for part, *states in zip(parts, *every, strict=True):
                _merge(part, states)
        for part in parts:
            part.distributed_available_fn = lambda: False  # prevents a second merge

    def _compute(self, name: str, num_samples: int) -> dict[str, float]:
        """Return the value of a metric of torchmetrics. Raises as `compute`."""
        try:
            return read_value(name, self.objects[name].compute())
        except ValueError as error:
            # For example, one sample has no R2. (The error of a lost peer is a RuntimeError.)
            if isinstance(error, ConfigError) or frames_of_user(error):
                raise
            raise ConfigError(
                f"{type(self.recipe).__name__}.metrics: {name}: expected a value of "
                f"{num_samples} held-out samples: {error}"
            ) from error


def _parts_of(metric: Any) -> list[Any]:
    """Return a metric of torchmetrics and the metrics that it wraps."""
    return [part for part in metric.modules() if hasattr(part, "metric_state")]


def has_other_ranks() -> bool:
    """Return whether this process is one of several ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


def is_merged_by_batches(metric: Any) -> bool:
    """Return whether torchmetrics knows no state of a metric (`add_state`), or does not show how it
    reduces the states.
    """
    parts = _parts_of(metric)
    has_states = any(part.metric_state for part in parts)
    return not (has_states and all(hasattr(part, "_reductions") for part in parts))


def _is_merged_by_library(metric: Any) -> bool:
    """Return whether torchmetrics gathers equally many tensors on ranks with unequal numbers of
    batches. It does so if it concatenates all lists first.
    """
    if is_merged_by_batches(metric):
        return False
    for part in _parts_of(metric):
        for name, reduce in part._reductions.items():
            is_joined = getattr(reduce, "__name__", "") == "dim_zero_cat"
            if isinstance(part._defaults[name], list) and not is_joined:
                return False
    return True


def can_merge(metric: Any) -> bool:
    """Return whether the states of a metric of torchmetrics add up. The states of a mean, for
    example, would need weights. False if torchmetrics does not show how it reduces states.
    """
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    reductions = set(getattr(metric, "_reductions", {"": None}).values())
    known = reductions <= {dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum}
    return known and metric.full_state_update is False and not metric.dist_sync_on_step


def _merge(part: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Give a metric the states of all ranks, reduced as torchmetrics does it."""
    for name, reduce in part._reductions.items():
        values = [state[name] for state in states]
        merged: Any
        if all(isinstance(value, Tensor) for value in values):
            merged = torch.stack(values)
        else:
            merged = []
            for value in values:
                if isinstance(value, list):
                    merged += value
                else:
                    merged.append(value)
        if reduce is not None and len(merged):
            merged = reduce(merged)
        setattr(part, name, merged)


# Attributes by which torchmetrics itself notes an update.
_OF_LIBRARY = (
    "_update_count",
    "_computed",
    "_forward_cache",
    "_is_synced",
    "_cache",
    "_to_sync",
    "_should_unsync",
    "_defaults",
    "_modules",
)


def own_state(metric: Any) -> dict[str, bytes]:
    """Return the contents of the numbers and collections of a metric that torchmetrics does not
    know as its state, by the names of their attributes.
    """
    found = {}
    for part in _parts_of(metric):
        for name, value in vars(part).items():
            is_known = name in part.metric_state or name in _OF_LIBRARY
            if is_known or callable(value) or isinstance(value, (bool, str, type(None))):
                continue
            try:
                found[name] = pickle.dumps(value)
            except Exception:  # any error is possible: the value may be the user's
                continue
    return found


def _on_cpu(value: Any) -> Any:
    return map_tensors(lambda each: each.detach().cpu(), value)


def _flatten(metrics: Any) -> dict[Any, Any]:
    """Return the metrics of a dict. The metrics of a torchmetrics.MetricCollection in it get both
    names.
    """
    found: dict[Any, Any] = {}
    for name, metric in metrics.items():
        if isinstance(metric, nn.ModuleDict):
            found.update({f"{name}_{key}": each for key, each in metric.items()})
        else:
            found[name] = metric
    return found


def read_value(name: str, value: Any) -> dict[str, float]:
    """Return the value of a metric as a number by its name. A dict gives several numbers.

    Raises:
        ConfigError: a value is no single number.
    """
    if isinstance(value, Mapping):
        numbers = {}
        for key, each in value.items():
            for number in read_value(key, each).values():
                numbers[f"{name}_{key}"] = number
        return numbers
    try:
        return {name: float(value)}
    except (TypeError, ValueError, RuntimeError):  # a tensor with several raises RuntimeError
        got = f"a {type(value).__name__}"
        if isinstance(value, Tensor):
            got = f"shape {tuple(value.shape)}"
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
        raise ConfigError(f"monitor.metric: {expect_known('metric', names, got)}")
