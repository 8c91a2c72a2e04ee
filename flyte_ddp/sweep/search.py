"""Which configurations a sweep trains, and which of its models are not worth going on with. Knows no cluster.

Random sampling and the rules for stopping early are Optuna's, by its ask-and-tell interface and in memory: what it
draws is decided by the seed alone, and what has happened is in the models' own records, not in a study of its. A grid
needs no library. Imports optuna, which takes half a second, inside functions.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import threading
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes import config_of

if TYPE_CHECKING:
    import optuna

STOP_EARLY = ("none", "median", "halving")
MOST_MODELS = 1000
OPTION = "recipe_options."  # begins the name of a recipe's option in a grid

# A median of fewer models that were trained to their end, or of a first epoch, says little.
MEDIAN_OF = 2
MEDIAN_FROM_EPOCH = 2
KEPT_SHARE = 2  # successive halving keeps one of this many, at epochs 1, 2, 4, 8, ...


@dataclass(frozen=True)
class Model:
    """One of a sweep's models."""

    number: int  # from 1, in the order in which they are started
    values: Mapping[str, Any]  # of the swept hyperparameters, by their name in the grid
    overrides: Mapping[str, Any]  # all that distinguishes it from the recipe's defaults, as a user gives it for one run
    config: TrainingConfig

    def __str__(self) -> str:
        return f"model {self.number} ({', '.join(f'{name} {shown(value)}' for name, value in self.values.items())})"


def models_of(
    recipe: str, base: Mapping[str, Any], grid: Mapping[str, Any], num_models: int = 0, seed: int = 0
) -> list[Model]:
    """The models that a grid stands for, all of them checked, without duplicates.

    Args:
        base: fields of `TrainingConfig` that all models share, where they differ from the recipe's defaults.
        grid: by the name of a field, or by "recipe_options." and the name of a recipe's option: a list of choices, or
            where models are sampled also a range {"low": ..., "high": ...}, both ends included, with "log": true for a
            logarithmic one or "step" for a stepped one. What is drawn for a field that is a whole number is one; for an
            option, if the bounds are.
        num_models: 0 for every combination of choices; otherwise so many are drawn at random, or fewer where there
            are not as many different ones.
        seed: of the drawing. The same seed draws the same models.

    Raises:
        ConfigError: what is no grid, an unknown recipe, field or option, or a value that some model cannot have.
    """
    _check(grid, num_models, seed)
    candidates = _drawn(grid, num_models, seed) if num_models else _combinations(grid)
    models: list[Model] = []
    seen = set()
    for candidate in candidates:
        config = config_of(recipe, _overrides(base, candidate))
        key = json.dumps(dataclasses.asdict(config), sort_keys=True)
        if key not in seen:
            seen.add(key)
            # As the config has them: 64 and 64.0 are one batch size.
            values = {name: _value_in(config, name) for name in grid}
            models.append(Model(len(models) + 1, values, _overrides(base, values), config))
        if num_models and len(models) == num_models:
            break
    return models


def shown(value: Any) -> str:
    """`value` as a user would write it, short enough for a label."""
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


class EarlyStopping:
    """Decides, by the held-out loss after each of its epochs, whether a model is worth going on with.

    "median" stops a model whose best loss so far is worse than the median of those that were trained to their end were
    at that epoch. "halving" is asynchronous successive halving (Li et al., "A System for Massively Parallel
    Hyperparameter Tuning", 2020): after epochs 1, 2, 4, ... a model goes on if it is among the better half of those
    that have come as far. Nobody waits for others, so with several workers it depends on their pace who is stopped.
    Any thread may call this.

    Args:
        rule: one of `STOP_EARLY`.

    Raises:
        ConfigError: it is none of them.
    """

    def __init__(self, rule: str) -> None:
        if rule not in STOP_EARLY:
            raise ConfigError(f"stop_early: {rule!r} is unknown; accepted are {', '.join(STOP_EARLY)}")
        self._study: optuna.Study | None = None
        self._trials: dict[int, optuna.Trial] = {}  # by the number of the model
        self._last_epochs: dict[int, int] = {}
        self._lock = threading.Lock()
        if rule != "none":
            import optuna

            optuna.logging.set_verbosity(optuna.logging.ERROR)
            pruner = (
                optuna.pruners.MedianPruner(n_startup_trials=MEDIAN_OF, n_warmup_steps=MEDIAN_FROM_EPOCH)
                if rule == "median"
                else optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=KEPT_SHARE)
            )
            self._study = optuna.create_study(pruner=pruner)

    def should_stop(self, number: int, epoch: int, loss: float) -> bool:
        """Take note of the loss of model `number` after `epoch`, unless that is known, and say whether to stop it."""
        if self._study is None:
            return False
        with self._lock:
            if number not in self._trials:
                self._trials[number] = self._study.ask()
                self._last_epochs[number] = 0
            if epoch <= self._last_epochs[number]:
                return False
            self._last_epochs[number] = epoch
            self._trials[number].report(loss, epoch)
            return self._trials[number].should_prune()

    def finish(self, number: int, loss: float) -> None:
        """Take note that model `number` was trained to its end, so that others are compared with it."""
        if self._study is not None:
            with self._lock:
                self._study.tell(self._trials.pop(number), loss)


def _check(grid: Any, num_models: int, seed: int) -> None:
    example = '{"learning_rate": [0.001, 0.01]}'
    if not isinstance(grid, Mapping) or not grid:
        raise ConfigError(f"grid: {grid!r} has nothing to sweep over; accepted is a JSON object such as {example}")
    if not 0 <= num_models <= MOST_MODELS:
        raise ConfigError(f"num_models: {num_models} is out of range; accepted is a whole number up to {MOST_MODELS}")
    if not 0 <= seed < 1 << 32:
        raise ConfigError(f"seed: {seed} is out of range; accepted is a whole number from 0 to {(1 << 32) - 1}")
    known = [field.name for field in dataclasses.fields(TrainingConfig)]
    for name, values in grid.items():
        if name not in known and not name.startswith(OPTION):
            accepted = f"{', '.join(known)}, and {OPTION}NAME for an option of the recipe"
            raise ConfigError(f"grid: unknown field {name!r}; accepted are {accepted}")
        if isinstance(values, Mapping) and not num_models:
            raise ConfigError(f"grid.{name}: {values!r} is a range; accepted is a list, or a range with num_models")
        if not isinstance(values, Mapping) and not (isinstance(values, (list, tuple)) and values):
            accepted = 'a list of choices, or with num_models a range such as {"low": 0.001, "high": 0.1, "log": true}'
            raise ConfigError(f"grid.{name}: {values!r} is no choice; accepted is {accepted}")
    num_combinations = math.prod(len(values) for values in grid.values())
    if not num_models and num_combinations > MOST_MODELS:
        raise ConfigError(
            f"grid: it has {num_combinations:,} combinations; accepted are at most {MOST_MODELS:,}, or num_models"
        )


def _combinations(grid: Mapping[str, Sequence[Any]]) -> Iterable[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values, strict=True))


def _drawn(grid: Mapping[str, Any], num_models: int, seed: int) -> Iterable[dict[str, Any]]:
    """Draws from the grid, more than are wanted, because some may be equal."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    # In the order of their names: a grid's own order may get lost on the way here.
    distributions = {name: _distribution(name, grid[name]) for name in sorted(grid)}
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    for _ in range(10 * num_models):
        drawn = study.ask(distributions).params
        yield {name: grid[name][drawn[name]] if not isinstance(grid[name], Mapping) else drawn[name] for name in grid}


def _distribution(name: str, values: Any) -> optuna.distributions.BaseDistribution:
    """What to draw from: a number in a range, or the index of a choice."""
    from optuna.distributions import FloatDistribution, IntDistribution

    if not isinstance(values, Mapping):
        return IntDistribution(0, len(values) - 1)
    low, high, step, log = (typing.cast(Any, values.get(key)) for key in ("low", "high", "step", "log"))
    numbers = [low, high, *([] if step is None else [step])]
    kind: Any = typing.get_type_hints(TrainingConfig).get(name)
    problem = ""
    if unknown := set(values) - {"low", "high", "step", "log"}:
        problem = f"unknown {', '.join(sorted(unknown))}"
    elif not all(type(number) in (int, float) and math.isfinite(number) for number in numbers):
        problem = "low, high and step are finite numbers"
    elif log not in (None, False, True):
        problem = "log is true or false"
    elif kind in (bool, str):
        problem = "the field is not a number"
    else:
        is_whole = all(float(number).is_integer() for number in numbers)
        try:
            if kind is int and not is_whole:
                raise ValueError("the field is a whole number")
            if kind is int or (kind is None and all(isinstance(number, int) for number in numbers)):
                return IntDistribution(int(low), int(high), log=bool(log), step=int(step or 1))
            return FloatDistribution(float(low), float(high), log=bool(log), step=step)
        except (ValueError, OverflowError) as error:
            problem = str(error).rstrip(".")
    accepted = '{"low": 0.001, "high": 0.1} with "log": true or "step", and low below high'
    raise ConfigError(f"grid.{name}: {dict(values)!r} is no range: {problem}; accepted is one such as {accepted}")


def _overrides(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    overrides = {**base, **{name: value for name, value in values.items() if not name.startswith(OPTION)}}
    options = {name.removeprefix(OPTION): value for name, value in values.items() if name.startswith(OPTION)}
    if options:
        overrides["recipe_options"] = {**overrides.get("recipe_options", {}), **options}
    return overrides


def _value_in(config: TrainingConfig, name: str) -> Any:
    if name.startswith(OPTION):
        return config.recipe_options[name.removeprefix(OPTION)]
    return getattr(config, name)
