"""The optimizer and its learning rates. Knows nothing of ranks."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flyte_ddp.checkpoints.state import is_split
from flyte_ddp.config import OWN, TrainingConfig
from flyte_ddp.config.fields import suggest
from flyte_ddp.errors import ConfigError, in_one_line
from flyte_ddp.events import EpochFinished
from flyte_ddp.rank.nested import describe_kind, tensors_in
from flyte_ddp.recipes import Recipe, locate

T = TypeVar("T")

OF_FUNCTIONS = ": a function or a script trains several (docs/recipes.md, Where a recipe ends)"
# Optimizers of torch that need whole matrices. Under fsdp a rank has parts of them.
OF_WHOLE_MATRICES = ("Adafactor", "Muon")


def open_optimizer(recipe: Recipe, model: nn.Module, config: TrainingConfig) -> Optimizer:
    """Return the optimizer of the trained parameters of `model`: the recipe's own, or the
    configured one.

    Raises:
        ConfigError: a trained parameter is in no group, or what the recipe returned is no such
            optimizer.
    """
    if config.optimizer != OWN:
        return build_optimizer(model, config, recipe.optimizer_groups(model))
    place = locate(recipe, "optimizer")
    own = recipe.optimizer(model, config)
    optimizer = check_kind(own, Optimizer, f"{place}: expected an optimizer of torch's")
    name = type(optimizer).__name__
    _check_parameters(model, optimizer.param_groups, place)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure and closure.default is closure.empty:
        raise ConfigError(
            f"{place}: expected an optimizer that steps without a closure, got {name}"
        )
    if name in OF_WHOLE_MATRICES and any(map(is_split, model.parameters())):
        raise ConfigError(
            f'{place}: expected with "parallel": "fsdp" an optimizer that treats each value by '
            f"itself, got {name}, which needs whole matrices"
        )
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]
    return optimizer


def has_modes(optimizer: Optimizer | None) -> bool:
    """Return whether an optimizer evaluates other weights than it trains, and switches between them
    by `train()` and `eval()`, as schedule-free ones do.
    """
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def check_kind(found: Any, kind: type[T], expected: str) -> T:
    """Return the value `found` of a recipe's method. Raises ConfigError, which begins with
    `expected`, if the value is of another kind.
    """
    if isinstance(found, kind):
        return found
    several = ""
    if isinstance(found, (tuple, list, dict)):
        several = OF_FUNCTIONS
    raise ConfigError(f"{expected}, got {describe_kind(found)}{several}")


def count_state_bytes(recipe: Recipe, model: nn.Module, config: TrainingConfig) -> int:
    """Return the bytes of the optimizer's state, measured by a step of a model without contents.
    Return 0 if the model cannot be copied, as with a lock, or if the optimizer's step fails.
    """
    tensors = (*model.parameters(), *model.buffers())
    empty: dict[int, Any] = {}
    for each in tensors:
        empty[id(each)] = value = each.detach().to("meta")
        if isinstance(each, nn.Parameter):
            empty[id(each)] = nn.Parameter(value, each.requires_grad)
    try:
        optimizer = open_optimizer(recipe, copy.deepcopy(model, empty), config)
        for group in optimizer.param_groups:
            group["fused"] = False  # fused kernels need a device
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        optimizer.step()
    except (
        Exception
    ):  # any error is possible: it is only an estimate, and what is wrong shows in the training
        return 0
    return sum(each.nbytes for each in tensors_in(list(optimizer.state.values())))


def build_optimizer(
    model: nn.Module,
    config: TrainingConfig,
    groups: Sequence[Mapping[str, Any]],
) -> Optimizer:
    """Return the configured optimizer of the trained parameters of `model`, fused into one kernel
    per step.

    Args:
        groups: what `Recipe.optimizer_groups` returns.

    Raises:
        ConfigError: a trained parameter is in no group, or a group has a setting that is none.
    """
    for group in groups:
        _check_group(group)
    trained = []
    for group in groups:
        parameters = [each for each in group["params"] if each.requires_grad]
        trained.append({**group, "params": parameters})
    _check_parameters(model, trained, "optimizer_groups")
    rate, decay = config.learning_rate, config.weight_decay
    # torch's fused kernels take no complex numbers
    is_real = not any(each.is_complex() for group in trained for each in group["params"])
    if config.optimizer == "sgd":
        # torch 2.15's fused kernel for SGD takes no split tensors. It begins with a momentum of
        # random memory where the first step is one that a scaler leaves out.
        is_whole = not any(map(is_split, model.parameters()))
        is_fused = is_whole and is_real and config.precision != "fp16"
        return torch.optim.SGD(
            trained, lr=rate, momentum=config.momentum, weight_decay=decay, fused=is_fused
        )
    optimizer: Callable[..., Optimizer] = torch.optim.AdamW
    if config.optimizer == "adam":
        optimizer = torch.optim.Adam
    return optimizer(trained, lr=rate, weight_decay=decay, fused=is_real)


def _check_parameters(model: nn.Module, groups: Sequence[Mapping[str, Any]], place: str) -> None:
    """Check that `groups` have every trained parameter of the model, and no others."""
    grouped = {id(each): each for group in groups for each in group["params"]}
    for name, parameter in model.named_parameters():
        if grouped.pop(id(parameter), None) is None and parameter.requires_grad:
            raise ConfigError(
                f"{place}: expected every trained parameter of the model, got none with {name}"
            )
    for other in grouped.values():
        raise ConfigError(
            f"{place}: expected parameters of the model it was given, got one of shape "
            f"{tuple(other.shape)} that is none of them"
        )


def _check_group(group: Any) -> None:
    if (
        not isinstance(group, Mapping)
        or "params" not in group
        or isinstance(group["params"], torch.Tensor)
    ):
        raise ConfigError(
            "optimizer_groups: expected dicts with a list of parameters as params, "
            f"got {group!r:.80}"
        )
    settings = {
        *inspect.signature(torch.optim.SGD).parameters,
        *inspect.signature(torch.optim.AdamW).parameters,
        "name",
    }
    for name in group:
        if name not in settings:  # torch would keep it, and go by the default
            raise ConfigError(
                "optimizer_groups: expected settings of torch.optim in a group, got "
                f"{name!r}{suggest(name, settings)}"
            )


class Schedule:
    """The learning rates of an optimizer's groups, from step to step: the recipe's own, or the
    configured ones.
    """

    def __init__(
        self, recipe: Recipe, optimizer: Optimizer, config: TrainingConfig, num_steps: int
    ) -> None:
        self.monitor, self.optimizer, self.num_steps = config.monitor, optimizer, num_steps
        # the groups' first rates, for a factor; a scheduler of torch changes the groups' own rates
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._place = "schedule"
        self._scheduler: LRScheduler | None = None
        self._factor: Callable[[int], float] = lambda step: learning_rate_factor(
            config, step, num_steps
        )
        if config.schedule == OWN:
            self._place = locate(recipe, "schedule")
            found: Any = recipe.schedule(optimizer, config, num_steps)
            if isinstance(found, LRScheduler):
                self._scheduler = found
                self._check_scheduler(found)
            elif callable(found):
                self._factor = found
            else:
                raise ConfigError(
                    f"{self._place}: expected a scheduler of torch's, or a function of the step, "
                    f"got {found!r:.80}"
                )

    def _check_scheduler(self, found: LRScheduler) -> None:
        name = type(found).__name__
        if isinstance(found, ReduceLROnPlateau) and found.mode != self.monitor.mode:
            raise ConfigError(
                f"{self._place}: expected a ReduceLROnPlateau of mode {self.monitor.mode!r}, as "
                f"{self.monitor.metric} is monitored, got {found.mode!r}"
            )
        # An inner optimizer may have the same groups.
        ours = {id(group) for group in self.optimizer.param_groups}
        theirs = {id(group) for group in found.optimizer.param_groups}
        if not ours & theirs:
            raise ConfigError(
                f"{self._place}: expected a scheduler of the optimizer that it is given, got a "
                f"{name} of another one, whose rates change nothing"
            )

    @property
    def has_scheduler(self) -> bool:
        """True for a scheduler of torch, which has a state; a function of the step has none."""
        return self._scheduler is not None

    def try_steps(self, first: int) -> None:
        """Try the rates of all steps from `first` on. A scheduler goes on to its last step by that.

        Raises:
            ConfigError: a step has none; one line.
        """
        for step in range(first, self.num_steps):
            try:
                self._rates_at(step)
                self.end_step()
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"{self._place}: expected learning rates for all {self.num_steps} steps of the "
                    f"run, got {in_one_line(error)} at step {step}"
                ) from error

    def begin_step(self, step: int) -> float:
        """Set the rates of optimizer step `step`, from 0; return the rate of the first group.

        Raises:
            ConfigError: a rate is no finite number of at least 0.
        """
        rates = self._rates_at(step)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return float(rates[0])

    def end_step(self) -> None:
        """Let a scheduler know that the optimizer has taken a step."""
        if self._scheduler and not isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step()

    def end_evaluation(self, finished: EpochFinished) -> None:
        """Let a ReduceLROnPlateau know the figure that the config monitors."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.step(finished.figures().values[self.monitor.metric])

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state for a checkpoint. A function of the step has none."""
        if not self._scheduler:
            return {}
        return self._scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint's state. Load the optimizer first.

        Raises:
            ConfigError: the checkpoint has no state of a schedule.
        """
        if self._scheduler and not state:
            raise ConfigError(
                f"{self._place}: expected a function of the step, as in the run of the checkpoint, "
                f"got a {type(self._scheduler).__name__}: another schedule needs another place for "
                "the checkpoints"
            )
        if self._scheduler:
            self._scheduler.load_state_dict(state)

    def _rates_at(self, step: int) -> list[Any]:
        if self._scheduler:
            rates = [group["lr"] for group in self.optimizer.param_groups]
        else:
            factor = self._factor(step)
            rates = [rate * factor for rate in self._rates]
        for rate in rates:
            if not 0 <= rate < math.inf:
                raise ConfigError(
                    f"{self._place}: expected finite learning rates of at least 0, got "
                    f"{float(rate)} at step {step}"
                )
        return rates


def learning_rate_factor(config: TrainingConfig, step: int, num_steps: int) -> float:
    """Return the factor, in [0, 1], of each group's own rate at optimizer step `step` (from 0) of
    `num_steps`.

    The factor depends on the step alone, so a schedule has nothing to restore and fits any change
    of the run's length. one_cycle takes its shape from Smith, "Super-Convergence" (2018), with
    torch's defaults: from 1/25 up over the first 30 %, then down to 1/250,000, both along a cosine.
    """
    if config.schedule == "one_cycle":
        rise = max(1.0, 0.3 * num_steps)
        if step < rise:
            return _cosine(1 / 25, 1.0, step / rise)
        return _cosine(1.0, 1 / 250_000, (step - rise) / max(1.0, num_steps - rise))
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    return _cosine(1.0, 0.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))


def _cosine(start: float, end: float, fraction: float) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, fraction))) / 2
