"""Whether a challenger is worth training, and whether it becomes the champion.

Both questions have an answer for everything that a night may bring, one of `Outcome`, with the reason in words. Knows
no Flyte: who trains the challenger, and where, lies between `plan` and `judge`. Imports no torch before it is asked.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ChampionChanged, ConfigError, CorruptChampion, MissingChampion, NoChampion
from flyte_ddp.prepare import describe_data
from flyte_ddp.promotion.champion import ChampionStore, Manifest
from flyte_ddp.recipes import get_recipe

FROM_CHAMPION, FROM_SCRATCH = "champion", "scratch"


class Outcome(str, Enum):
    """How a retraining ended. With the first four there is a new champion, with the others the old one stays."""

    PROMOTED = "promoted"  # better than the champion by the margin
    PROMOTED_FIRST = "promoted_first"  # there was no champion
    PROMOTED_OVER_MISSING = "promoted_over_missing"  # files of the champion are gone, so nobody could use it
    PROMOTED_OVER_CORRUPT = "promoted_over_corrupt"  # its checksum is wrong, so nobody would use it
    NOT_BETTER = "not_better"
    NOT_FINITE = "not_finite"  # the challenger's weights or its loss are NaN or infinite
    UNCHANGED = "unchanged"  # nothing to train: the same data, code, config and champion as the last time
    TOO_LITTLE_DATA = "too_little_data"  # nothing is trained, because something is wrong with the data
    INCOMPATIBLE = "incompatible"  # nothing is trained, because the champion is a model of another kind


PROMOTIONS = (
    Outcome.PROMOTED,
    Outcome.PROMOTED_FIRST,
    Outcome.PROMOTED_OVER_MISSING,
    Outcome.PROMOTED_OVER_CORRUPT,
)


@dataclass(frozen=True)
class Terms:
    """Under which a challenger is trained, and wins.

    Raises:
        ConfigError: a value outside the range given beside its field.
    """

    start_from: str = FROM_CHAMPION  # the challenger's first weights: champion or scratch
    margin: float = 0.01  # share of the champion's held-out loss by which the challenger's must be lower, >= 0
    min_samples: int = 1  # training samples, and held-out samples, without which nothing is trained, >= 1
    min_share: float = 0.5  # likewise, as a share of what the champion had, in [0, 1]

    def __post_init__(self) -> None:
        for name, holds, accepted in (
            ("start_from", self.start_from in (FROM_CHAMPION, FROM_SCRATCH), f"{FROM_CHAMPION} or {FROM_SCRATCH}"),
            ("margin", 0 <= self.margin < math.inf, "a finite number of at least 0"),
            ("min_samples", self.min_samples >= 1, "a whole number of at least 1"),
            ("min_share", 0 <= self.min_share <= 1, "a number from 0 to 1"),
        ):
            if not holds:
                raise ConfigError(f"{name}: {getattr(self, name)!r} is out of range; accepted is {accepted}")


@dataclass(frozen=True)
class Challenge:
    """What is trained on what, and what the manifest of the result has to say of its origin."""

    recipe: str
    config: TrainingConfig
    directory: Path  # of the prepared data
    kickoff_time: str  # UTC, ISO 8601
    code_version: str
    execution: str  # the same for all attempts of the task that judges; "" where nothing names it


@dataclass(frozen=True)
class Plan:
    """Whether to train, and from which weights; where not, why not."""

    train: bool
    outcome: str  # "" where there is something to train
    reason: str
    initial_state: str = ""  # URL of a state dict; "" for fresh weights


@dataclass(frozen=True)
class Verdict:
    """How a challenge ended."""

    outcome: Outcome
    reason: str
    challenger: Mapping[str, float] = field(default_factory=dict)  # test_loss and accuracy, where they were measured
    champion: Mapping[str, float] = field(default_factory=dict)  # those of the champion before it, on the same data


@dataclass(frozen=True)
class _Holder:
    """The version in use as a challenger meets it: with a state, or with the outcome for whoever replaces it."""

    version: str
    state: Mapping[str, Any] | None
    manifest: Manifest | None
    outcome: Outcome
    reason: str


def plan(store: ChampionStore, challenge: Challenge, terms: Terms) -> Plan:
    """Decide before anything expensive whether there is something to train.

    Raises:
        DataError: the recipe cannot read its data.
    """
    num_train, num_test = _num_samples(challenge)
    if min(num_train, num_test) < terms.min_samples:
        return _nothing(
            Outcome.TOO_LITTLE_DATA,
            f"there are {num_train:,} training and {num_test:,} held-out samples, and min_samples is "
            f"{terms.min_samples:,}",
        )
    holder = _holder(store, store.pointer())
    if holder.state is None or holder.manifest is None:
        return _plan_for_new(store, challenge, terms, holder)
    if problem := _incompatibility(challenge, holder):
        return _nothing(Outcome.INCOMPATIBLE, problem)
    held = holder.manifest
    if num_train < terms.min_share * held.num_train_samples or num_test < terms.min_share * held.num_test_samples:
        return _nothing(
            Outcome.TOO_LITTLE_DATA,
            f"there are {num_train:,} training and {num_test:,} held-out samples, less than {terms.min_share:g} of the "
            f"champion's {held.num_train_samples:,} and {held.num_test_samples:,} (min_share)",
        )
    origin = _origin(challenge)
    if {name: getattr(held, name) for name in origin} == origin:
        return _nothing(Outcome.UNCHANGED, "data, recipe, config and code are those that the champion was trained with")
    return _plan_for_new(store, challenge, terms, holder)


def judge(store: ChampionStore, challenge: Challenge, terms: Terms, state: bytes) -> Verdict:
    """Measure challenger and champion on the same held-out data, and promote the challenger if it is better.

    Better is a loss lower by the margin: every recipe has a loss, and unlike an accuracy it does not jump. Where
    another champion comes in between, the challenger is measured against that one. An attempt of a task whose earlier
    attempt has promoted this very state finds it in use, and says so.

    Args:
        state: the challenger, a file with a state dict.
    """
    import torch

    challenger = torch.load(io.BytesIO(state), map_location="cpu", weights_only=True)
    measured = _metrics(challenge, challenger)
    while True:
        pointer = store.pointer()
        holder = _holder(store, pointer)
        if (held := holder.manifest) and _was_promoted(challenge, held, state):
            outcome = Outcome.PROMOTED if held.parent else Outcome.PROMOTED_FIRST
            return Verdict(outcome, "an earlier attempt of this task promoted it", measured)
        verdict = _verdict(challenge, terms, challenger, measured, holder)
        if verdict.outcome in PROMOTIONS:
            try:
                store.promote(state, _manifest(challenge, verdict), pointer)
            except ChampionChanged:
                continue
        store.note_challenge(
            {
                **_identity(challenge, terms, holder),
                **dataclasses.asdict(verdict),
                "execution": challenge.execution,
                "kickoff_time": challenge.kickoff_time,
                "ended_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
        )
        return verdict


def _verdict(
    challenge: Challenge,
    terms: Terms,
    challenger: Mapping[str, Any],
    measured: Mapping[str, float],
    holder: _Holder,
) -> Verdict:
    if problem := _not_finite(challenge, challenger):
        return Verdict(Outcome.NOT_FINITE, problem)
    if not measured:
        return Verdict(Outcome.NOT_FINITE, "the challenger's loss on the held-out data is not finite")
    if holder.state is None:
        return Verdict(holder.outcome, holder.reason, measured)
    if problem := _incompatibility(challenge, holder):
        return Verdict(Outcome.INCOMPATIBLE, problem, measured)
    held = _metrics(challenge, holder.state)
    if not held:
        reason = "the champion's loss on the same held-out data is not finite"
        return Verdict(Outcome.PROMOTED, reason, measured)
    needed = held["test_loss"] - terms.margin * abs(held["test_loss"])
    is_better = measured["test_loss"] < needed
    reason = (
        f"on the same held-out data the challenger's loss is {measured['test_loss']:.6g} and the champion's "
        f"{held['test_loss']:.6g}; below {needed:.6g} it is better (margin {terms.margin:g})"
    )
    return Verdict(Outcome.PROMOTED if is_better else Outcome.NOT_BETTER, reason, measured, held)


def _plan_for_new(store: ChampionStore, challenge: Challenge, terms: Terms, holder: _Holder) -> Plan:
    """Train, unless the very same challenge has been judged already: it would end the same way."""
    last = store.last_challenge()
    identity = _identity(challenge, terms, holder)
    if {name: last.get(name) for name in identity} == identity:
        return _nothing(
            Outcome.UNCHANGED,
            f"data, recipe, config, code and champion are those of the last challenge, which ended at "
            f"{last['ended_at']}: {last['outcome']}",
        )
    if holder.state is None or terms.start_from == FROM_SCRATCH:
        return Plan(True, "", holder.reason if holder.state is None else "from fresh weights")
    return Plan(True, "", f"from the weights of {holder.version}", store.state_url(holder.version))


def _nothing(outcome: Outcome, reason: str) -> Plan:
    return Plan(False, outcome.value, reason)


def _holder(store: ChampionStore, pointer: bytes) -> _Holder:
    version = store.version_in_use(pointer)
    try:
        state, manifest = store.load(pointer)
    except NoChampion:
        return _Holder(version, None, None, Outcome.PROMOTED_FIRST, "there is no champion yet")
    except MissingChampion as error:
        return _Holder(version, None, None, Outcome.PROMOTED_OVER_MISSING, f"nobody can use the champion: {error}")
    except CorruptChampion as error:
        return _Holder(version, None, None, Outcome.PROMOTED_OVER_CORRUPT, f"nobody can use the champion: {error}")
    return _Holder(version, state, manifest, Outcome.PROMOTED, "")


def _incompatibility(challenge: Challenge, holder: _Holder) -> str:
    """Why the champion cannot be measured with the challenge's recipe, "" where it can.

    Such a champion is not replaced: whoever serves it expects a model of its kind. That is for a person to decide.
    """
    from flyte_ddp.rank.initial_state import mismatch

    assert holder.state is not None
    assert holder.manifest is not None
    problem = f"it is of recipe {holder.manifest.recipe!r}" if holder.manifest.recipe != challenge.recipe else ""
    problem = problem or mismatch(_model(challenge).state_dict(), holder.state)
    if not problem:
        return ""
    return (
        f"the champion {holder.version} does not fit recipe {challenge.recipe!r} with this config: {problem}; give a "
        "model of another kind a place of its own (champion)"
    )


def _was_promoted(challenge: Challenge, held: Manifest, state: bytes) -> bool:
    """Whether an earlier attempt of the same task made `state` the champion, and then was kept from telling."""
    return (
        challenge.execution != ""
        and held.execution == challenge.execution
        and held.sha256 == hashlib.sha256(state).hexdigest()
    )


def _metrics(challenge: Challenge, state: Mapping[str, Any]) -> dict[str, float]:
    """Loss and accuracy of `state` on the held-out data; empty where the loss is not finite."""
    from flyte_ddp.errors import NonFiniteLoss
    from flyte_ddp.rank.evaluation import evaluate_state

    recipe = get_recipe(challenge.recipe, challenge.config.recipe_options)
    try:
        loss, accuracy = evaluate_state(recipe, challenge.config, state, challenge.directory)
    except NonFiniteLoss:
        return {}
    return {"test_loss": loss, "accuracy": accuracy}


def _not_finite(challenge: Challenge, state: Mapping[str, Any]) -> str:
    """Which tensors of `state` are spoiled, in words. A buffer may be infinite, as masks of attention are."""
    import torch

    parameters = {name for name, _ in _model(challenge).named_parameters()}
    spoiled = [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and not (torch.isfinite(value).all() if name in parameters else not torch.isnan(value).any())
    ]
    return f"the challenger's weights are not finite: {', '.join(spoiled[:5])}" if spoiled else ""


def _model(challenge: Challenge) -> Any:
    recipe = get_recipe(challenge.recipe, challenge.config.recipe_options)
    recipe.datasets(challenge.directory)  # from which it may learn how many classes its model has to tell apart
    return recipe.model()


def _num_samples(challenge: Challenge) -> tuple[int, int]:
    recipe = get_recipe(challenge.recipe, challenge.config.recipe_options)
    train, test = recipe.datasets(challenge.directory)
    return len(train), len(test)  # type: ignore[arg-type]


def _origin(challenge: Challenge) -> dict[str, Any]:
    """All that decides what training makes of the same first weights, by the names that a manifest has for it."""
    note = describe_data(challenge.directory)
    return {
        "recipe": challenge.recipe,
        "recipe_version": note["recipe_version"],
        "config": json.loads(json.dumps(dataclasses.asdict(challenge.config))),  # as it is read back
        "data_fingerprint": note["fingerprint"],
        "code_version": challenge.code_version,
    }


def _identity(challenge: Challenge, terms: Terms, holder: _Holder) -> dict[str, Any]:
    """All that decides how a challenge ends."""
    against = {"version": holder.version, "outcome": holder.outcome.value}
    return {**_origin(challenge), "against": against, "start_from": terms.start_from, "margin": terms.margin}


def _manifest(challenge: Challenge, verdict: Verdict) -> Manifest:
    num_train, num_test = _num_samples(challenge)
    return Manifest(
        **_origin(challenge),
        version="",
        parent="",
        created_at="",
        kickoff_time=challenge.kickoff_time,
        data=describe_data(challenge.directory)["description"],
        num_train_samples=num_train,
        num_test_samples=num_test,
        metrics=dict(verdict.challenger),
        parent_metrics=dict(verdict.champion),
        execution=challenge.execution,
    )
