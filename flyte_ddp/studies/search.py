"""The trials of a study: what a sweep or a scaling study trains, and which trials to stop early.
Knows no cluster.

Optuna samples, learns from results and prunes, through its ask-and-tell interface and in memory:
the trials' own records hold the results, so no study is stored. It takes half a second to import:
only functions import it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import threading
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.extras import require
from flyte_ddp.config.fields import Limits, check, check_names
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import EpochFinished, Event, Reported
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.observers.formats import shown_value
from flyte_ddp.project.admission import places_of_config
from flyte_ddp.recipes import config_of, pin_initial_state
from flyte_ddp.storage import check_places, redact_values
from flyte_ddp.storage.state_dict_file import identify_state

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

STOP_EARLY = ("none", "median", "halving")
SAMPLERS = ("random", "tpe")
MAX_TRIALS = 1000
# fields that no grid may vary
SHARED = ("initial_model_state", "model_artifact")
OPTION_PREFIX = "recipe_options."  # begins the name of a recipe's option in a grid

# Names in a scaling study's choices that are no fields of a config.
WORLD_SIZE = "world_size"
SEED = "seed"  # trials that differ only in this are one experiment
BATCH_SIZE_PER_RANK = "batch_size_per_rank"  # samples per rank and optimizer step
NO_FIELDS = (WORLD_SIZE, BATCH_SIZE_PER_RANK)

# The median of fewer finished trials, or of a first epoch, is mostly noise.
MIN_MEDIAN_TRIALS = 2
MIN_MEDIAN_EPOCH = 2
REDUCTION_FACTOR = 2  # successive halving keeps one trial in this many, at epochs 1, 2, 4, 8, ...
NUM_RANDOM = 10  # trials before the first that TPE suggests

Values = Mapping[str, Any]  # values of a trial by their names


@dataclass(frozen=True)
class Trial:
    """One model of a study: a configuration to train, in a scaling study at a world size."""

    number: int  # from 1, in starting order
    values: Values  # values that the study varies, by name
    # differences from the recipe's defaults, in the form of `--config`
    overrides: Values = field(repr=False)
    config: TrainingConfig = field(repr=False)
    world_size: int = 0  # ranks; 0: all of one node
    recipe: str = ""
    # kind of the events with the figures that count
    counted: ClassVar[type[Event]] = EpochFinished

    @property
    def num_epochs(self) -> int:
        """The number of counted events of a whole run; 0 if that is not known."""
        return self.config.epochs

    def program(self) -> Program:
        """Return what the trial runs. Raises ConfigError as `recipe_program`."""
        return recipe_program(self.recipe, self.config)

    def identity(self, data_version: Sequence[str]) -> list[Any]:
        """Return what the trial's result depends on: it is reused only if nothing differs."""
        state = identify_state(self.config.initial_model_state)
        config = {**dataclasses.asdict(self.config), "initial_model_state": state}
        return [self.recipe, config, self.world_size, data_version]

    def with_values(self, values: Values) -> Trial:
        """Return the trial with other values. Raises ConfigError as `build_trials`."""
        (trial,) = build_trials(self.recipe, self.overrides, [values])
        return dataclasses.replace(trial, number=self.number)

    def reports_of(self, value: bytes, reports: Sequence[Reported]) -> Sequence[Reported]:
        """Return what counts as reports of the value that a function has returned."""
        return ()

    @property
    def shown(self) -> Values:
        """The values as people may see them, without secrets."""
        return dict(redact_values(dict(self.values)))

    def __str__(self) -> str:
        values = ", ".join(f"{name} {shown_value(value)}" for name, value in self.shown.items())
        return f"trial {self.number} ({values})"


def build_trials(recipe: str, base: Values, choices: Sequence[Values]) -> list[Trial]:
    """Return a validated trial for each of `choices`, without duplicates.

    Args:
        base: `TrainingConfig` fields shared by all trials, where they differ from the recipe's
            defaults.
        choices: from `expand_grid` or `expand_world_sizes`. What only some of them vary has its
            shared value elsewhere.

    Raises:
        ConfigError: an unknown recipe or option, an invalid value, a missing package, or a place
            that this task may not open.
    """
    require_packages()
    names = list(dict.fromkeys(name for choice in choices for name in choice))
    trials: dict[str, Trial] = {}  # keys say what a trial is
    for choice in choices:
        world_size = int(choice.get(WORLD_SIZE, 0))
        fields = {name: value for name, value in choice.items() if name not in NO_FIELDS}
        if BATCH_SIZE_PER_RANK in choice:
            fields["global_batch_size"] = choice[BATCH_SIZE_PER_RANK] * world_size
        config = config_of(recipe, _merge_overrides(base, fields))
        check_places(places_of_config(config))  # before the state is read for its checksum
        config = pin_initial_state(config)
        # The config's own values: 64 and 64.0 are the same batch size.
        overrides = _merge_overrides(base, {name: _read_value(config, name) for name in fields})
        values = {
            name: int(choice[name]) if name in NO_FIELDS else _read_value(config, name)
            for name in names
        }
        key = json.dumps([dataclasses.asdict(config), world_size], sort_keys=True)
        trial = Trial(len(trials) + 1, values, overrides, config, world_size, recipe)
        trials.setdefault(key, trial)
    if len({trial.config.monitor for trial in trials.values()}) > 1:
        raise ConfigError("monitor: expected the same for all trials, because it compares them")
    return list(trials.values())


def expand_grid(
    grid: Any, num_models: int = 0, seed: int = 0, sampler: str = "random"
) -> list[dict[str, Any]]:
    """Return the choices that a sweep's `grid` describes, each a value by name.

    Args:
        grid: a list of the choices themselves; or by the name of a field, or by "recipe_options."
            and the name of a recipe's option: a list of values, or where choices are sampled also a
            range {"low": ..., "high": ...}, both ends included, with "log": true for a logarithmic
            one or "step" for a stepped one. Whole numbers are drawn for a field of that type, and
            for an option with whole bounds.
        num_models: 0 for every combination; otherwise so many are drawn at random, or fewer where
            there are not as many different ones.
        seed: of the sampling. The same seed samples the same choices.
        sampler: see `Search`. "tpe" learns from models that were drawn, so it needs `num_models`.

    Raises:
        ConfigError: the grid is malformed, or names an unknown field.
    """
    objects = grid if isinstance(grid, list) else [grid]
    if not objects or not all(isinstance(each, Mapping) and each for each in objects):
        examples = (
            '{"learning_rate": [0.001, 0.01]}, or a list such as [{"learning_rate": 0.1, '
            '"momentum": 0.9}]'
        )
        raise ConfigError(f"grid: expected a JSON object such as {examples}, got {grid!r}")
    names = [name for each in objects for name in each if not name.startswith(OPTION_PREFIX)]
    check_names(TrainingConfig, dict.fromkeys(names), "grid")
    for name in SHARED:
        if name in names:
            raise ConfigError(f"grid: expected no {name}, which all models share (config)")
    if sampler == "tpe":
        check("num_models", num_models, int, Limits(minimum=1, maximum=MAX_TRIALS))
    return [dict(each) for each in expand(grid, num_models, seed)]


def expand(
    grid: Any, num_models: int = 0, seed: int = 0, name_of_number: str = "num_models"
) -> Sequence[Any]:
    """Return the choices of a grid as `expand_grid`, with any names. The choices of a list stay as
    they are.
    """
    check(name_of_number, num_models, int, Limits(minimum=0, maximum=MAX_TRIALS))
    check("seed", seed, int, Limits(minimum=0, maximum=(1 << 32) - 1))
    is_list = isinstance(grid, list)
    if is_list and num_models:
        raise ConfigError(f"{name_of_number}: expected 0 with a list of models, got {num_models}")
    for name, values in () if is_list else grid.items():
        if not (
            (values and isinstance(values, (list, tuple)))
            or (num_models and isinstance(values, Mapping))
        ):
            expected = (
                f'a list of choices, or with {name_of_number} a range such as {{"low": 0.001, '
                '"high": 0.1, "log": true}'
            )
            raise ConfigError(f"grid.{name}: expected {expected}, got {values!r}")
    num_combinations = len(grid) if is_list else math.prod(map(len, grid.values()))
    if not num_models and num_combinations > MAX_TRIALS:
        raise ConfigError(
            f"grid: expected at most {MAX_TRIALS:,} models, got {num_combinations:,}; "
            f"{name_of_number} samples from a grid"
        )
    if is_list:
        return grid  # type: ignore[no-any-return]
    return _draw(grid, num_models, seed) if num_models else _combine(grid)


def expand_world_sizes(
    config: TrainingConfig,
    world_sizes: Sequence[int],
    learning_rates: Sequence[float] = (),
    batch_sizes_per_rank: Sequence[int] = (),
    sample_sizes: Sequence[int] = (),
    target_loss: float = 0.0,
    repeats: int = 1,
) -> list[dict[str, Any]]:
    """Return the choices of a scaling study: every world size, the largest first, with every
    combination of the others.

    Args:
        config: that the trials share but for their choices.
        learning_rates, batch_sizes_per_rank, sample_sizes: an empty list is not varied.
        target_loss: held-out loss to which the time is measured.
        repeats: of every combination, each with another seed: the config's, and those after it.

    Raises:
        ConfigError: names the input, the expected values and the value given.
    """
    if config.parallel != "ddp":  # no rank of a split model can step alone
        raise ConfigError(
            f"config.parallel: expected ddp in a scaling study, got {config.parallel!r}"
        )
    if len(world_sizes) < 2:
        raise ConfigError(f"world_sizes: expected two or more, got {list(world_sizes)}")
    check("target_loss", target_loss, float, Limits(minimum=0))
    check("repeats", repeats, int, Limits(minimum=1))
    # First, so that the repeats of a trial are far from each other in time.
    grid: dict[str, Sequence[Any]] = (
        {SEED: range(config.seed, config.seed + repeats)} if repeats > 1 else {}
    )
    for name, values, choice in (
        ("learning_rates", learning_rates, "learning_rate"),
        ("batch_sizes_per_rank", batch_sizes_per_rank, BATCH_SIZE_PER_RANK),
        ("sample_sizes", sample_sizes, "sample_size"),
        ("world_sizes", sorted(world_sizes, reverse=True), WORLD_SIZE),
    ):
        if len(set(values)) < len(values) or not all(0 < value < math.inf for value in values):
            raise ConfigError(
                f"{name}: expected different finite numbers above 0, got {list(values)}"
            )
        if values:
            grid[choice] = values
    return _combine(grid)


@dataclass(eq=False)
class Search:
    """An Optuna study in memory: stops trials that fall behind, and may suggest better ones.
    Thread-safe.

    Scores are lower for better models. "median" stops a trial if its best score is worse than
    the median of the finished trials at the same epoch. "halving" is asynchronous successive
    halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning", 2020): after epochs
    1, 2, 4, ... a trial continues if it is in the better half of the trials at this epoch.
    No trial waits for another, so with several workers the outcome depends on their speed. So does
    what "tpe" suggests, a tree-structured Parzen estimator of the results so far; trials that run
    count as bad ones until they end, so that workers do not crowd.

    Raises:
        ConfigError: an unknown rule or sampler.
    """

    stop_early: str = "none"  # a value of `STOP_EARLY`
    sampler: str = "random"  # or "tpe"; "random" trials are drawn beforehand: see `expand_grid`
    grid: Any = None  # the grid that "tpe" samples from
    seed: int = 0  # seed of "tpe"

    note = ""  # name of the file with what was trained in place of a drawn trial

    def __post_init__(self) -> None:
        self._distributions: dict[str, BaseDistribution] = {}
        self._trials: dict[int, optuna.Trial] = {}  # running trials
        # number of results of each trial, and the epoch or step of the last one
        self._reached: dict[int, tuple[int, float]] = {}
        self._lock = threading.Lock()
        check("stop_early", self.stop_early, str, Limits(choices=STOP_EARLY))
        check("sampler", self.sampler, str, Limits(choices=SAMPLERS))
        self._optuna = load_optuna()
        if self.sampler == "tpe":
            origin = json.dumps([self.grid, self.seed], sort_keys=True).encode()
            self.note = f"tpe-{hashlib.sha256(origin).hexdigest()[:16]}.json"
            self._distributions = _distributions(self.grid)
        pruners = self._optuna.pruners
        pruner = {
            "none": pruners.NopPruner(),
            "median": pruners.MedianPruner(MIN_MEDIAN_TRIALS, MIN_MEDIAN_EPOCH),
            "halving": pruners.SuccessiveHalvingPruner(1, REDUCTION_FACTOR),
        }[self.stop_early]
        estimator = self._optuna.samplers.TPESampler(
            n_startup_trials=NUM_RANDOM, seed=self.seed, constant_liar=True
        )
        self._study: optuna.Study = self._optuna.create_study(sampler=estimator, pruner=pruner)

    def start(self, trial: Trial, replace: Callable[[Values], Trial | None] | None = None) -> Trial:
        """Enter `trial`, or another one in its place, and return it.

        Args:
            replace: returns the trial of suggested values, None if it is of no use; without it
                nothing is suggested.
        """
        with self._lock:
            self._reached[trial.number] = 0, 0.0
            if replace and self._distributions and trial.number > NUM_RANDOM:
                asked = self._study.ask(self._distributions)
                suggested = replace(asked.params)
                if suggested:
                    self._trials[trial.number] = asked
                    return suggested
                self._study.tell(asked, state=self._optuna.trial.TrialState.FAIL)
            if self._distributions:
                self._study.enqueue_trial(dict(trial.values))
            self._trials[trial.number] = self._study.ask(self._distributions)
            return trial

    def should_stop(self, number: int, place: float, score: float) -> bool:
        """Record the score of trial `number` at an epoch or step, once, and return True if the
        trial should stop. Trials are compared after as many results.
        """
        with self._lock:
            count, last = self._reached[number]
            if place <= last:
                return False
            self._reached[number] = count + 1, place
            # A median over infinite scores is infinite or NaN, which stops nothing. NaN is left out
            # of it.
            self._trials[number].report(score if math.isfinite(score) else math.nan, count + 1)
            return self._trials[number].should_prune()

    def finish(self, number: int, outcome: str, score: float) -> None:
        """Tell the study how trial `number` ended: COMPLETE, with its score, PRUNED or FAIL."""
        value = None
        if outcome == "COMPLETE":
            value = math.inf
            if math.isfinite(score):
                value = score
        with self._lock:
            self._study.tell(
                self._trials.pop(number), value, state=self._optuna.trial.TrialState[outcome]
            )


def _combine(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _draw(grid: Values, num_models: int, seed: int) -> list[dict[str, Any]]:
    """Return `num_models` different random samples from the grid, or fewer if there are not as
    many.
    """
    optuna, distributions = load_optuna(), _distributions(grid)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed))
    drawn: dict[str, dict[str, Any]] = {}
    for _ in range(10 * num_models):
        if len(drawn) < num_models:
            params = study.ask(distributions).params
            drawn.setdefault(
                json.dumps(params, sort_keys=True), {name: params[name] for name in grid}
            )
    return list(drawn.values())


def _distributions(grid: Values) -> dict[str, BaseDistribution]:
    """Return what to sample: sorted by name, because a grid's own order may be lost on the way
    here.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    kinds = typing.get_type_hints(TrainingConfig)
    distributions: dict[str, BaseDistribution] = {}
    for name, values in sorted(grid.items()):
        if not isinstance(values, Mapping):
            distributions[name] = CategoricalDistribution(values)
            continue
        are_whole = all(isinstance(value, int) for value in values.values())
        number = kinds.get(name)
        if number not in (int, float):
            number = int if are_whole else float
        for key, value in values.items():
            check(f"grid.{name}.{key}", value, bool if key == "log" else number)
        try:
            distributions[name] = (IntDistribution if number is int else FloatDistribution)(
                **values
            )
        except (TypeError, ValueError, OverflowError) as error:
            expected = (
                'a range such as {"low": 0.001, "high": 0.1} with optional "log": true or "step"'
            )
            raise ConfigError(
                f"grid.{name}: expected {expected}, got {dict(values)!r}: {error}"
            ) from error
    return distributions


def require_packages() -> None:
    """Raise ConfigError if a package is missing that a study needs."""
    packages = ("pandas", "pyarrow", "matplotlib", "optuna")
    require("a sweep or a scaling study", *packages, extra="sweep")


def load_optuna() -> Any:
    require_packages()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", "All-NaN slice encountered")  # a trial has diverged
    # a stored study could not have such choices
    warnings.filterwarnings("ignore", "Choices for a categorical distribution")
    return optuna


def _merge_overrides(base: Values, values: Values) -> dict[str, Any]:
    overrides = dict(base)
    options = {}
    for name, value in values.items():
        if name.startswith(OPTION_PREFIX):
            options[name.removeprefix(OPTION_PREFIX)] = value
        else:
            overrides[name] = value
    if options:
        overrides["recipe_options"] = {**overrides.get("recipe_options", {}), **options}
    return overrides


def _read_value(config: TrainingConfig, name: str) -> Any:
    if name.startswith(OPTION_PREFIX):
        return config.recipe_options.get(name.removeprefix(OPTION_PREFIX))
    return getattr(config, name)
