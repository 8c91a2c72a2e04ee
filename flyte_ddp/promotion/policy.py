"""The rules of promotion: if a challenger is worth training, and if it becomes the champion.

Every case ends in one `Outcome` with its reason in words. Knows no Flyte: the training of the challenger lies between
`plan` and `judge`. Imports no torch at the top.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import field as limited
from flyte_ddp.config.fields import validate
from flyte_ddp.errors import ChampionChanged, ConfigError, CorruptChampion, MissingChampion, NoChampion, NonFiniteLoss
from flyte_ddp.promotion.champion import ChampionStore, Manifest
from flyte_ddp.recipes import Recipe, get_recipe, list_class_names
from flyte_ddp.recipes.prepare import describe_data
from flyte_ddp.storage import redact_url, redact_values
from flyte_ddp.storage.weights import from_bytes, is_same_state, split_pin

if TYPE_CHECKING:
    from flyte_ddp.rank.comparison import Measurement

FROM_CHAMPION, FROM_SCRATCH = "champion", "scratch"


class Outcome(str, Enum):
    """The result of a retraining. The first four put a new champion in use; with the others the old one stays."""

    PROMOTED = "promoted"  # better than the champion by the margin
    PROMOTED_FIRST = "promoted_first"  # there was no champion
    PROMOTED_OVER_MISSING = "promoted_over_missing"  # files of the champion are missing, so it cannot be used
    PROMOTED_OVER_CORRUPT = "promoted_over_corrupt"  # its checksum is wrong, so it cannot be used
    NOT_BETTER = "not_better"
    HELD = "held"  # a rollback keeps its version in use until someone releases it
    NOT_FINITE = "not_finite"  # the challenger's weights or its loss are NaN or infinite
    UNCHANGED = "unchanged"  # nothing to train: the same data, code, config and champion as the last time
    TOO_LITTLE_DATA = "too_little_data"  # nothing is trained, because something is wrong with the data
    INCOMPATIBLE = "incompatible"  # nothing is trained, because the champion is a model of another kind


REPLACEMENTS = (Outcome.PROMOTED_OVER_MISSING, Outcome.PROMOTED_OVER_CORRUPT)  # of what nothing was compared with
PROMOTIONS = (Outcome.PROMOTED, Outcome.PROMOTED_FIRST, *REPLACEMENTS)

# The next retraining ends in the same way until a person corrects something.
NEEDS_ATTENTION = (Outcome.NOT_FINITE, Outcome.TOO_LITTLE_DATA, Outcome.INCOMPATIBLE)


@dataclass(frozen=True)
class PromotionCriteria:
    """Conditions for training a challenger and for promoting it. Raises ConfigError for a value out of bounds."""

    start_from: str = limited(FROM_CHAMPION, choices=(FROM_CHAMPION, FROM_SCRATCH))  # the challenger's first weights
    # share of the champion's monitored figure by which the challenger's must be better, with 97.5 % confidence
    margin: float = limited(0.01, minimum=0)
    min_samples: int = limited(1, minimum=1)  # training samples, and held-out samples, without which nothing is trained
    min_share: float = limited(0.5, minimum=0, maximum=1)  # the same, as a share of the champion's samples
    # an outcome that replaces a champion without a comparison, because its files are missing or damaged; "": none
    allow: str = limited(
        "",
        pattern="|".join(["", *(outcome.value for outcome in REPLACEMENTS)]),
        example=" or ".join(outcome.value for outcome in REPLACEMENTS),
    )

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class Challenge:
    """A challenger's origin: recipe, config and data, and what else its manifest records."""

    recipe: str
    config: TrainingConfig
    directory: Path  # of the prepared data
    kickoff_time: str  # UTC, ISO 8601
    code_version: str
    execution: str  # the same for all attempts of the task that judges; "" in a local run
    # URL of the weights that its training starts from, as of `pin_state`; "" for fresh ones. In `plan` those that were
    # given for a challenger that does not start from the champion.
    initial_state: str = ""
    card: bytes = b""  # the run card of the challenger; a promoted version keeps it


@dataclass(frozen=True)
class Plan:
    """The decision to train a challenger or not, and from which weights."""

    train: bool
    outcome: str  # "" if there is something to train
    reason: str
    initial_state: str = ""  # URL of a state dict; "" for fresh weights


@dataclass(frozen=True)
class PromotionResult:
    """The result of a challenge, with its reason."""

    outcome: Outcome
    reason: str
    challenger: Mapping[str, float] = field(default_factory=dict)  # test_loss and metrics; empty if not measured
    champion: Mapping[str, float] = field(default_factory=dict)  # those of the champion before it, on the same data
    # 95 % confidence interval of how much better the challenger is; empty without a comparison
    advantage: tuple[float, ...] = ()


@dataclass(frozen=True)
class CurrentModel:
    """The current champion, or why it cannot be used."""

    version: str
    state: Mapping[str, Any] | None
    manifest: Manifest | None
    outcome: Outcome  # of a challenger that replaces it
    reason: str  # why it cannot be used; "" if it can
    pointer: bytes = b""  # that names it


def plan(store: ChampionStore, challenge: Challenge, criteria: PromotionCriteria) -> Plan:
    """Decide, before anything expensive, if there is something to train.

    Raises:
        DataError: the recipe cannot read its data.
        ConfigError: the champion cannot be used, and `criteria.allow` does not name what would replace it.
    """
    if since := store.held():
        return _skip(Outcome.HELD, _describe_hold(since))
    num_train, num_test, _ = _describe_samples(challenge)
    if min(num_train, num_test) < criteria.min_samples:
        return _skip(
            Outcome.TOO_LITTLE_DATA,
            f"there are {num_train:,} training and {num_test:,} held-out samples, and min_samples is "
            f"{criteria.min_samples:,}",
        )
    current = _load_current(store, criteria)
    if current.state is None or current.manifest is None:
        return _plan_training(store, challenge, criteria, current)
    if problem := _describe_mismatch(challenge, current):
        return _skip(Outcome.INCOMPATIBLE, problem)
    manifest = current.manifest
    if (
        num_train < criteria.min_share * manifest.num_train_samples
        or num_test < criteria.min_share * manifest.num_test_samples
    ):
        return _skip(
            Outcome.TOO_LITTLE_DATA,
            f"there are {num_train:,} training and {num_test:,} held-out samples, less than {criteria.min_share:g} of "
            f"the champion's {manifest.num_train_samples:,} and {manifest.num_test_samples:,} (min_share)",
        )
    origin = _origin(challenge)
    given = redact_url(challenge.initial_state)
    starts_alike = criteria.start_from == FROM_CHAMPION or is_same_state(manifest.initial_state, given)
    if starts_alike and {name: getattr(manifest, name) for name in origin} == origin:
        return _skip(Outcome.UNCHANGED, "data, recipe, config and code are those that the champion was trained with")
    return _plan_training(store, challenge, criteria, current)


def judge(store: ChampionStore, challenge: Challenge, criteria: PromotionCriteria, state: bytes) -> PromotionResult:
    """Measure challenger and champion on the same held-out data, and promote the challenger if it is better.

    Better means by the margin, in the figure that the config monitors, by default the held-out loss. The lower end of
    the interval of a paired comparison counts, so that chance promotes nothing. If another version is put in use
    meanwhile, the challenger is compared with that one. If an earlier attempt of the same task has promoted this state
    already, the result and the record are those of that promotion.

    Args:
        state: the challenger: the contents of a file with a state dict.

    Raises:
        ConfigError: as `plan`.
    """
    challenger = from_bytes(state)
    measured = _measure(challenge, challenger)
    values = measured.values if measured else {}
    while True:
        current = _load_current(store, criteria)
        if (manifest := current.manifest) and _is_promoted(challenge, manifest, state):
            # That attempt may have written no record. Without one, a lost champion would look as if it never existed.
            outcome = Outcome(manifest.outcome)
            reason = "an earlier attempt of this task promoted it"
            result = PromotionResult(outcome, reason, values, manifest.parent_metrics, tuple(manifest.advantage))
            current = CurrentModel(manifest.parent, None, None, outcome, "")
        else:
            result = _compare(challenge, criteria, challenger, measured, current)
            if result.outcome in PROMOTIONS and (since := store.held(current.pointer)):
                result = dataclasses.replace(result, outcome=Outcome.HELD, reason=_describe_hold(since))
            if result.outcome in PROMOTIONS:
                try:
                    store.promote(state, _manifest(challenge, result), current.pointer, challenge.card)
                except ChampionChanged:
                    continue
        store.record_challenge(
            {
                **_identity(challenge, criteria, current),
                **dataclasses.asdict(result),
                "had_champion": result.outcome in PROMOTIONS or (current.version or store.version_in_use()) != "",
                "execution": challenge.execution,
                "kickoff_time": challenge.kickoff_time,
                "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
        )
        return result


def _compare(
    challenge: Challenge,
    criteria: PromotionCriteria,
    challenger: Mapping[str, Any],
    measured: Measurement | None,
    current: CurrentModel,
) -> PromotionResult:
    from flyte_ddp.rank.comparison import compare

    if problem := _describe_not_finite(challenge, challenger):
        return PromotionResult(Outcome.NOT_FINITE, problem)
    metric = challenge.config.monitor.metric
    name = metric.removeprefix("test_").replace("_", " ")
    if measured is None or math.isinf(measured.score):
        return PromotionResult(Outcome.NOT_FINITE, f"the challenger's {name} on the held-out data is not finite")
    if current.state is None:
        return PromotionResult(current.outcome, current.reason, measured.values)
    if problem := _describe_mismatch(challenge, current):
        return PromotionResult(Outcome.INCOMPATIBLE, problem, measured.values)
    champion = _measure(challenge, current.state)
    if champion is None or math.isinf(champion.score):
        reason = f"the champion's {name} on the same held-out data is not finite"
        return PromotionResult(Outcome.PROMOTED, reason, measured.values)
    low, high = compare(measured, champion)
    needed = criteria.margin * abs(champion.score)
    figures = (
        f"on the same held-out data the challenger's {name} is {measured.values[metric]:.6g} and the champion's "
        f"{champion.values[metric]:.6g}"
    )
    if math.isinf(low):
        why = "they are too few, or too many draws of them have no value"
        reason = f"{figures}, which may be chance: {measured.num_parts} parts of the data give no interval ({why})"
        return PromotionResult(Outcome.NOT_BETTER, reason, measured.values, champion.values)
    reason = (
        f"{figures}, so with 95 % confidence it is better by {low:.6g} to {high:.6g}; by more than "
        f"{needed:.6g} it would be promoted (margin {criteria.margin:g})"
    )
    outcome = Outcome.PROMOTED if low > needed else Outcome.NOT_BETTER
    return PromotionResult(outcome, reason, measured.values, champion.values, (low, high))


def _plan_training(
    store: ChampionStore, challenge: Challenge, criteria: PromotionCriteria, current: CurrentModel
) -> Plan:
    """Plan a training, unless the same challenge was judged before and was not held: it would end the same way."""
    last = store.last_challenge()
    identity = _identity(challenge, criteria, current)
    if last.get("outcome") != Outcome.HELD and {name: last.get(name) for name in identity} == identity:
        return _skip(
            Outcome.UNCHANGED,
            f"data, recipe, config, code and champion are those of the last challenge, which ended at "
            f"{last['ended_at']}: {last['outcome']}",
        )
    if current.manifest is None or criteria.start_from == FROM_SCRATCH:
        return Plan(True, "", current.reason if current.manifest is None else "from fresh weights")
    return Plan(True, "", f"from the weights of {current.version}", store.state_url(current.manifest))


def _describe_hold(since: str) -> str:
    return f"a rollback at {since} keeps its version in use; release it with python -m flyte_ddp.promotion release"


def _skip(outcome: Outcome, reason: str) -> Plan:
    return Plan(False, outcome.value, reason)


def _load_current(store: ChampionStore, criteria: PromotionCriteria) -> CurrentModel:
    pointer = store.pointer()
    version = store.version_in_use(pointer)
    try:
        state, manifest = store.load(pointer)
    except NoChampion:
        return CurrentModel(version, None, None, Outcome.PROMOTED_FIRST, "there is no champion yet", pointer)
    except (MissingChampion, CorruptChampion) as error:
        if store.pointer() != pointer:  # such as the first one, which another retraining has promoted since the look
            return _load_current(store, criteria)
        is_missing = isinstance(error, MissingChampion)
        outcome = Outcome.PROMOTED_OVER_MISSING if is_missing else Outcome.PROMOTED_OVER_CORRUPT
        if outcome.value != criteria.allow:
            raise ConfigError(
                f"allow: expected {outcome.value}, got {criteria.allow!r}, and the champion cannot be used: {error}. "
                "Restore its files or roll back with `python -m flyte_ddp.promotion rollback`; only if neither is "
                "possible allow a model that was not compared with it"
            ) from error
        return CurrentModel(version, None, None, outcome, f"the champion cannot be used: {error}", pointer)
    return CurrentModel(version, state, manifest, Outcome.PROMOTED, "", pointer)


def _describe_mismatch(challenge: Challenge, current: CurrentModel) -> str:
    """Describe why the champion cannot be measured with the challenge's recipe; "" if it can.

    Such a champion is not replaced: a serving process expects a model of its kind. A person has to decide that.
    """
    from flyte_ddp.rank.initial_state import mismatch

    assert current.state is not None
    assert current.manifest is not None
    problem = f"it is of recipe {current.manifest.recipe!r}" if current.manifest.recipe != challenge.recipe else ""
    recipe, model = _build_model(challenge)
    problem = problem or mismatch(model.state_dict(), current.state, list_class_names(recipe))
    if not problem:
        return ""
    return (
        f"the champion {current.version} does not fit recipe {challenge.recipe!r} with this config: {problem}; give a "
        "model of another kind a place of its own (champion)"
    )


def _is_promoted(challenge: Challenge, manifest: Manifest, state: bytes) -> bool:
    """Return whether an earlier attempt of the same task made `state` the champion, and failed later."""
    return (
        challenge.execution != ""
        and manifest.execution == challenge.execution
        and manifest.sha256 == hashlib.sha256(state).hexdigest()
    )


def _measure(challenge: Challenge, state: Mapping[str, Any]) -> Measurement | None:
    """Measure `state` on the held-out data; None if its loss is not finite."""
    from flyte_ddp.rank.comparison import Measurement

    recipe = get_recipe(challenge.recipe, challenge.config.recipe_options)
    try:
        return Measurement(recipe, challenge.config, state, challenge.directory)
    except NonFiniteLoss:
        return None


def _describe_not_finite(challenge: Challenge, state: Mapping[str, Any]) -> str:
    """Name the tensors of `state` that are not finite. A buffer may be infinite, as masks of attention are."""
    import torch

    parameters = {name for name, _ in _build_model(challenge)[1].named_parameters()}
    spoiled = [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and not (torch.isfinite(value).all() if name in parameters else not torch.isnan(value).any())
    ]
    return f"the challenger's weights are not finite: {', '.join(spoiled[:5])}" if spoiled else ""


def _build_model(challenge: Challenge) -> tuple[Recipe, Any]:
    from flyte_ddp.rank.contract import open_datasets

    recipe = get_recipe(challenge.recipe, challenge.config.recipe_options)
    open_datasets(recipe, challenge.directory, challenge.config)  # sets, for some recipes, the classes
    return recipe, recipe.model()


def _describe_samples(challenge: Challenge) -> tuple[int, int, list[str]]:
    """Return the numbers of training and of held-out samples, and the names of their classes."""
    from flyte_ddp.rank.contract import open_datasets

    recipe = get_recipe(challenge.recipe, challenge.config.recipe_options)
    train, test = open_datasets(recipe, challenge.directory, challenge.config)
    num_train = len(train)  # type: ignore[arg-type]
    num_test = len(test)  # type: ignore[arg-type]
    return min(num_train, challenge.config.sample_size or num_train), num_test, list_class_names(recipe)


def _origin(challenge: Challenge) -> dict[str, Any]:
    """Return everything that decides the result of a training from given weights, by the manifest's names."""
    note = describe_data(challenge.directory)
    return {
        "recipe": challenge.recipe,
        "recipe_version": note["recipe_version"],
        "config": json.loads(json.dumps(redact_values(dataclasses.asdict(challenge.config)))),  # as it is read back
        "data_fingerprint": note["fingerprint"],
        "code_version": challenge.code_version,
    }


def _identity(challenge: Challenge, criteria: PromotionCriteria, current: CurrentModel) -> dict[str, Any]:
    """Return everything that decides how a challenge ends."""
    against = {"version": current.version, "outcome": current.outcome.value}
    url, sha256 = split_pin(challenge.initial_state)
    is_given = current.manifest is None or criteria.start_from == FROM_SCRATCH
    return {
        **_origin(challenge),
        "against": against,
        "start_from": criteria.start_from,
        "initial_state": (sha256 or redact_url(url)) if is_given else "",
        "margin": criteria.margin,
    }


def _manifest(challenge: Challenge, result: PromotionResult) -> Manifest:
    num_train, num_test, class_names = _describe_samples(challenge)
    return Manifest(
        **_origin(challenge),
        version="",
        parent="",
        created_at="",
        kickoff_time=challenge.kickoff_time,
        data=describe_data(challenge.directory)["description"],
        num_train_samples=num_train,
        num_test_samples=num_test,
        initial_state=redact_url(challenge.initial_state),
        class_names=class_names,
        metrics=dict(result.challenger),
        parent_metrics=dict(result.champion),
        advantage=list(result.advantage),
        execution=challenge.execution,
        outcome=result.outcome.value,
    )
