"""The rules of promotion: if a challenger is worth training, and if it becomes the champion.

Every case ends in one `RetrainingResult` with its reason in words. The reason of a refusal includes
what to do. This module knows no Flyte: the caller trains the challenger between `plan` and `judge`.
It imports no torch at the top.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import Checked
from flyte_ddp.config.fields import field as limited
from flyte_ddp.errors import ChampionChanged, ChampionError, ConfigError, NoChampion, NonFiniteLoss
from flyte_ddp.process.invocation import find_flyte_ddp_command
from flyte_ddp.promotion.champion import LAST_CHALLENGE, ChampionStore, Manifest
from flyte_ddp.recipes import Recipe, get_recipe, list_class_names
from flyte_ddp.recipes.prepare import describe_data
from flyte_ddp.storage import redact_url, redact_values
from flyte_ddp.storage.recorded_config import RecordedConfig, hash_hidden
from flyte_ddp.storage.state_dict_file import from_bytes, identify_state, is_same_state

if TYPE_CHECKING:
    from flyte_ddp.promotion.comparison import Measurement

FROM_CHAMPION, FROM_SCRATCH = "champion", "scratch"


class RetrainingResult(str, Enum):
    """The result of a retraining. Only the first puts a new champion in use."""

    # The challenger is better than the champion by the margin, or there was no champion.
    PROMOTED = "promoted"
    NOT_BETTER = "not_better"
    # Nothing to train: data, code, config and champion are the same as the last time.
    UNCHANGED = "unchanged"
    HELD = "held"  # a rollback keeps its version in use until someone releases it
    # The next retraining ends in the same way until a person corrects something: too little data, a
    # model of another kind than the champion, weights or a loss that are not finite.
    REFUSED = "refused"


@dataclass(frozen=True)
class PromotionCriteria(Checked):
    """Conditions for training a challenger and for promoting it. Raises ConfigError for a value out
    of bounds.
    """

    # the challenger's first weights
    start_from: str = limited(FROM_CHAMPION, choices=(FROM_CHAMPION, FROM_SCRATCH))
    # The challenger's monitored figure must be better by this share of the champion's figure, with
    # 97.5 % confidence.
    margin: float = limited(0.01, minimum=0)
    # smallest number of training samples, and of held-out samples
    min_samples: int = limited(1, minimum=1)
    # smallest number of samples as a share of the champion's number
    min_share: float = limited(0.5, minimum=0, maximum=1)


@dataclass(frozen=True)
class Challenge:
    """A challenger's origin: recipe, config, data, and the other facts of its manifest."""

    recipe: str
    # For `plan`, `initial_model_state` is the start of a challenger that does not start from the
    # champion.
    config: TrainingConfig
    directory: Path  # directory of the prepared data
    kickoff_time: str  # UTC, ISO 8601
    code_version: str
    execution: str  # name shared by all attempts of the task that judges; "" in a local run
    card: bytes = b""  # the run card of the challenger; a promoted version keeps it


@dataclass(frozen=True)
class Plan:
    """The decision to train a challenger or not, and from which weights."""

    outcome: str  # "" if there is something to train
    reason: str
    initial_state: str = ""  # URL of a state dict; "" for fresh weights


@dataclass(frozen=True)
class PromotionResult:
    """The result of a challenge, with its reason."""

    outcome: RetrainingResult
    reason: str
    # test_loss and metrics of the challenger; empty if not measured
    challenger: Mapping[str, float] = field(default_factory=dict)
    # test_loss and metrics of the champion before it, on the same data; empty if not measured
    champion: Mapping[str, float] = field(default_factory=dict)
    # 95 % confidence interval of how much better the challenger is; empty without a comparison
    advantage: tuple[float, ...] = ()

    @property
    def figures(self) -> dict[str, float]:
        """All measured figures, such as challenger_test_loss and advantage_low, by name."""
        bounds = ("advantage_low", "advantage_high")
        challenger = {f"challenger_{name}": value for name, value in self.challenger.items()}
        champion = {f"champion_{name}": value for name, value in self.champion.items()}
        return {**challenger, **champion, **dict(zip(bounds, self.advantage, strict=False))}


@dataclass(frozen=True)
class CurrentModel:
    """The current champion; no state and no manifest if there is none yet."""

    pointer: bytes  # contents of `champion.json`
    state: Mapping[str, Any] | None = None
    manifest: Manifest | None = None

    @property
    def version(self) -> str:
        if self.manifest is None:
            return ""
        return self.manifest.version


def plan(store: ChampionStore, challenge: Challenge, criteria: PromotionCriteria) -> Plan:
    """Decide, before anything expensive, if there is something to train.

    Raises:
        DataError: the recipe cannot read its data.
        ConfigError: the champion cannot be used.
    """
    since = store.in_use().held_since
    if since:
        return Plan(RetrainingResult.HELD.value, _describe_hold(since))
    current = _load_current(store)
    manifest = current.manifest
    recipe, num_train, num_test = _open(challenge)
    problem = _describe_mismatch(challenge, recipe, current)
    if problem:
        return Plan(RetrainingResult.REFUSED.value, problem)
    champion_train, champion_test = 0, 0
    if manifest:
        champion_train, champion_test = manifest.num_train_samples, manifest.num_test_samples
    for what, count, of_champion in (
        ("training", num_train, champion_train),
        ("held-out", num_test, champion_test),
    ):
        if count < max(criteria.min_samples, criteria.min_share * of_champion):
            reason = (
                f"there are {count:,} {what} samples, of at least {criteria.min_samples:,} "
                f"(min_samples) and {criteria.min_share:g} (min_share) of the champion's "
                f"{of_champion:,}; correct the data or lower these"
            )
            return Plan(RetrainingResult.REFUSED.value, reason)
    starts_alike = manifest is not None and (
        criteria.start_from == FROM_CHAMPION
        or is_same_state(manifest.initial_state, redact_url(challenge.config.initial_model_state))
    )
    config = _own_config(challenge)
    if starts_alike and _is_in(_origin(challenge), config, vars(manifest)):
        return Plan(
            RetrainingResult.UNCHANGED.value,
            "data, recipe, config and code are those that the champion was trained with",
        )
    last = store.last(LAST_CHALLENGE)
    identity = _identity(challenge, criteria, current.version)
    if last.get("outcome") != RetrainingResult.HELD and _is_in(identity, config, last):
        return Plan(
            RetrainingResult.UNCHANGED.value,
            "data, recipe, config, code and champion are those of the last challenge, which ended "
            f"at {last['ended_at']}: {last['outcome']}",
        )
    if manifest is None:
        return Plan("", "there is no champion yet")
    if criteria.start_from == FROM_SCRATCH:
        return Plan("", "from fresh weights")
    return Plan("", f"from the weights of {current.version}", store.state_url(manifest))


def judge(
    store: ChampionStore, challenge: Challenge, criteria: PromotionCriteria, state: bytes
) -> PromotionResult:
    """Measure challenger and champion on the same held-out data, and promote the challenger if it
    is better.

    Better means better by the margin, in the figure that the config monitors, by default the
    held-out loss. The lower end of the interval of a paired comparison counts, so that chance
    promotes nothing. If another version is put in use meanwhile, the challenger is compared with
    the new version. If an earlier attempt of the same task has promoted this state already, the
    result and the record describe that promotion.

    Args:
        state: contents of a file with the challenger's state dict.

    Raises:
        ConfigError: as `plan`.
    """
    challenger = from_bytes(state)
    measured = _measure(challenge, challenger)
    values: Mapping[str, float] = {}
    if measured:
        values = measured.values
    while True:
        current = _load_current(store)
        version = current.version
        manifest = current.manifest
        if manifest and _has_promoted(manifest, challenge, state):
            # The earlier attempt may have written no record. Without a record, a lost champion
            # would look as if it never existed.
            reason, version = "an earlier attempt of this task promoted it", manifest.parent
            result = PromotionResult(
                RetrainingResult.PROMOTED,
                reason,
                values,
                manifest.parent_metrics,
                tuple(manifest.advantage),
            )
        else:
            result = _compare(challenge, criteria, challenger, measured, current)
            since = store.in_use(current.pointer).held_since
            if result.outcome == RetrainingResult.PROMOTED and since:
                result = dataclasses.replace(
                    result, outcome=RetrainingResult.HELD, reason=_describe_hold(since)
                )
            if result.outcome == RetrainingResult.PROMOTED:
                try:
                    store.promote(
                        state, _manifest(challenge, result), current.pointer, challenge.card
                    )
                except ChampionChanged:
                    continue
        store.record(
            LAST_CHALLENGE,
            **_identity(challenge, criteria, version),
            **_record(_own_config(challenge)),
            **dataclasses.asdict(result),
            had_champion=(version or store.in_use().version) != "",
            execution=challenge.execution,
            kickoff_time=challenge.kickoff_time,
        )
        if challenge.card:
            # An attempt that is repeated replaces the night of the one before.
            kickoff, digest = challenge.kickoff_time, hashlib.sha256(state).hexdigest()
            store.keep_night(f"{kickoff.replace(':', '')}-{digest[:8]}", challenge.card)
        return result


def _has_promoted(manifest: Manifest, challenge: Challenge, state: bytes) -> bool:
    """Return whether an attempt of the challenge's task has promoted this state."""
    is_same_task = manifest.execution == challenge.execution != ""
    return is_same_task and manifest.sha256 == hashlib.sha256(state).hexdigest()


def _compare(
    challenge: Challenge,
    criteria: PromotionCriteria,
    challenger: Mapping[str, Any],
    measured: Measurement | None,
    current: CurrentModel,
) -> PromotionResult:
    from flyte_ddp.promotion.comparison import MIN_PARTS, compare

    recipe, _, _ = _open(challenge)
    metric = challenge.config.monitor.metric
    name = metric.removeprefix("test_").replace("_", " ")
    if measured is None or math.isinf(measured.score) or not _is_finite(recipe, challenger):
        reason = f"the challenger's weights, or its {name} on the held-out data, are not finite"
        return PromotionResult(
            RetrainingResult.REFUSED, f"{reason}; lower the learning rate or correct the data"
        )
    if current.state is None:
        return PromotionResult(
            RetrainingResult.PROMOTED, "there is no champion yet", measured.values
        )
    problem = _describe_mismatch(challenge, recipe, current)
    if problem:
        return PromotionResult(RetrainingResult.REFUSED, problem, measured.values)
    champion = _measure(challenge, current.state)
    if champion is None or math.isinf(champion.score):
        reason = f"the champion's {name} on the same held-out data is not finite"
        return PromotionResult(RetrainingResult.PROMOTED, reason, measured.values)
    low, high = compare(measured, champion)
    needed = criteria.margin * abs(champion.score)
    figures = (
        f"on the same held-out data the challenger's {name} is {measured.values[metric]:.6g} and "
        f"the champion's {champion.values[metric]:.6g}"
    )
    if math.isinf(low):
        reason = (
            f"{figures}, which may be chance: {measured.num_parts} parts of the data give no "
            f"interval (at least {MIN_PARTS} are needed, a figure without each of them, and "
            "no few of them that decide alone)"
        )
        return PromotionResult(
            RetrainingResult.NOT_BETTER, reason, measured.values, champion.values
        )
    reason = (
        f"{figures}, so with 95 % confidence it is better by {low:.6g} to {high:.6g}; a promotion "
        f"needs more than {needed:.6g} (margin {criteria.margin:g})"
    )
    outcome = RetrainingResult.NOT_BETTER
    if low > needed:
        outcome = RetrainingResult.PROMOTED
    return PromotionResult(outcome, reason, measured.values, champion.values, (low, high))


def _describe_hold(since: str) -> str:
    return (
        f"a rollback at {since} keeps its version in use; release it by "
        f"{find_flyte_ddp_command()} promotion release URL"
    )


def _load_current(store: ChampionStore) -> CurrentModel:
    try:
        return store.read_newest(lambda pointer: CurrentModel(pointer, *store.load(pointer)))
    except NoChampion:
        return CurrentModel(b"")
    except ChampionError as error:
        raise ConfigError(
            f"champion: expected one that can be used, got: {error}. Restore its files, put "
            "another version in use by "
            f"{find_flyte_ddp_command()} promotion rollback URL VERSION, or name another place"
        ) from error


def _describe_mismatch(challenge: Challenge, recipe: Recipe, current: CurrentModel) -> str:
    """Describe why the champion cannot be measured with the challenge's recipe; "" if it can, or
    there is no champion.

    Such a champion is not replaced automatically, because a serving process expects a model of its
    kind.
    """
    from flyte_ddp.training.initial_state import mismatch

    if current.manifest is None:
        return ""
    if current.manifest.recipe != challenge.recipe:
        problem = f"it is of recipe {current.manifest.recipe!r}"
    else:
        expected = recipe.model().state_dict()
        problem = mismatch(expected, current.state, list_class_names(recipe))
    if not problem:
        return ""
    return (
        f"the champion {current.version} does not fit recipe {challenge.recipe!r} with this "
        f"config: {problem}; give a model of another kind a place of its own (champion)"
    )


def _measure(challenge: Challenge, state: Mapping[str, Any]) -> Measurement | None:
    """Measure `state` on the held-out data; None if its loss is not finite."""
    from flyte_ddp.promotion.comparison import Measurement

    recipe = get_recipe(challenge.recipe, challenge.config.recipe_options)
    try:
        return Measurement(recipe, challenge.config, state, challenge.directory)
    except NonFiniteLoss:
        return None


def _is_finite(recipe: Recipe, state: Mapping[str, Any]) -> bool:
    """Return whether a model is finite. A buffer may be infinite, for example an attention mask."""
    import torch

    parameters = {name for name, _ in recipe.model().named_parameters()}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        if torch.isnan(value).any():
            return False
        if name in parameters and torch.isinf(value).any():
            return False
    return True


def _open(challenge: Challenge) -> tuple[Recipe, int, int]:
    """Return the recipe, with the classes of its data, and the numbers of training and of held-out
    samples.
    """
    from flyte_ddp.training.contract import open_datasets

    recipe = get_recipe(challenge.recipe, challenge.config.recipe_options)
    train, test = open_datasets(recipe, challenge.directory, challenge.config)
    num_train = len(train)  # type: ignore[arg-type]
    return recipe, min(num_train, challenge.config.sample_size or num_train), len(test)  # type: ignore[arg-type]


def _own_config(challenge: Challenge) -> dict[str, Any]:
    """Return the part of the config that decides the result of a training from given weights, as
    JSON values.
    """
    given = dataclasses.replace(challenge.config, initial_model_state="", model_artifact="")
    return dict(json.loads(json.dumps(dataclasses.asdict(given))))


def _record(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config in the form of a manifest: shown values, and hashes of hidden values."""
    return {"config": redact_values(config), "hidden": hash_hidden(config)}


def _is_in(facts: Mapping[str, Any], config: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Return whether a record has these facts and this config."""
    if {name: record.get(name) for name in facts} != facts:
        return False
    return RecordedConfig(record["config"], record.get("hidden")).is_all(config)


def _origin(challenge: Challenge) -> dict[str, Any]:
    """Return the facts that, with the config, decide the result of a training from given weights,
    by the manifest's names.
    """
    note = describe_data(challenge.directory)
    return {
        "recipe": challenge.recipe,
        "recipe_version": note["recipe_version"],
        "data_fingerprint": note["fingerprint"],
        "code_version": challenge.code_version,
    }


def _identity(challenge: Challenge, criteria: PromotionCriteria, against: str) -> dict[str, Any]:
    """Return the facts that, with the config, decide how a challenge ends. `against` is the version
    in use; "" for none.
    """
    initial_state = ""
    if not against or criteria.start_from == FROM_SCRATCH:
        initial_state = identify_state(challenge.config.initial_model_state)
    return {
        **_origin(challenge),
        "against": against,
        "start_from": criteria.start_from,
        "initial_state": initial_state,
        "margin": criteria.margin,
    }


def _manifest(challenge: Challenge, result: PromotionResult) -> Manifest:
    recipe, num_train, num_test = _open(challenge)
    initial_state = redact_url(challenge.config.initial_model_state)
    return Manifest(
        **_origin(challenge),
        **_record(_own_config(challenge)),
        version="",
        parent="",
        created_at="",
        kickoff_time=challenge.kickoff_time,
        data=describe_data(challenge.directory)["description"],
        num_train_samples=num_train,
        num_test_samples=num_test,
        initial_state=initial_state,
        class_names=list_class_names(recipe),
        metrics=dict(result.challenger),
        parent_metrics=dict(result.champion),
        advantage=list(result.advantage),
        execution=challenge.execution,
    )
