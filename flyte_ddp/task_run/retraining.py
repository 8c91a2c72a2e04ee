"""Decide to train a challenger, and decide to promote it, in tasks of either Flyte."""

from __future__ import annotations

import dataclasses
import datetime
from dataclasses import dataclass
from pathlib import Path

from flyte_ddp.config import TrainingConfig
from flyte_ddp.promotion.champion import CARD, LAST_RUN, ChampionStore
from flyte_ddp.promotion.policy import (
    Challenge,
    PromotionCriteria,
    PromotionResult,
    RetrainingResult,
    judge,
    plan,
)
from flyte_ddp.promotion.report import RetrainingReport
from flyte_ddp.storage import read_file, redact_url
from flyte_ddp.storage.state_dict_file import pin_state
from flyte_ddp.task_run.execution import Execution
from flyte_ddp.task_run.origin import code_version


@dataclass(frozen=True)
class Retraining:
    """The facts that all tasks of a retraining share."""

    recipe: str
    champion: str  # URL of the champion and its predecessors
    parent: str  # the version in use; "" for none
    criteria: PromotionCriteria
    kickoff_time: str  # UTC, ISO 8601
    outcome: str  # "" if there is something to train
    reason: str

    def challenge(self, execution: Execution, config: TrainingConfig, directory: Path) -> Challenge:
        """Return the challenge of a model with this config, trained on the data in `directory`."""
        return Challenge(
            recipe=self.recipe,
            config=config,
            directory=directory,
            kickoff_time=self.kickoff_time,
            code_version=code_version(),
            execution=execution.name,
        )


def open_champions(execution: Execution, recipe: str, champion: str) -> ChampionStore:
    """Return the versions of a champion.

    Args:
        champion: URL; "" for the place that all runs of a project and domain share.

    Raises:
        ConfigError: `champion` is "" in a local run.
        StorageUnavailable, StorageDenied: the place cannot be used.
    """
    store = ChampionStore(champion or execution.default_champion(recipe))
    store.storage.check_access()
    return store


def plan_retraining(
    execution: Execution,
    store: ChampionStore,
    criteria: PromotionCriteria,
    kickoff_time: datetime.datetime | None,
    recipe: str,
    config: TrainingConfig,
    directory: Path,
) -> tuple[Retraining, TrainingConfig]:
    """Decide if there is a challenger to train. Return the decision, and the config of the
    challenger with its initial weights.

    A challenger that does not start from a champion starts from the weights of its config.

    Args:
        kickoff_time: time of the data; None or the start of 1970 for now.
        directory: the prepared data.

    Raises:
        DataError, ConfigError: as `flyte_ddp.promotion.policy.plan`.
    """
    kickoff, parent = format_kickoff(kickoff_time), store.in_use().version
    retraining = Retraining(recipe, store.url, parent, criteria, kickoff, outcome="", reason="")
    planned = plan(store, retraining.challenge(execution, config, directory), criteria)
    start = planned.initial_state or config.initial_model_state
    return (
        dataclasses.replace(retraining, outcome=planned.outcome, reason=planned.reason),
        dataclasses.replace(config, initial_model_state=pin_state(start)),
    )


def judge_challenger(
    retraining: Retraining, challenge: Challenge, export: str, state: bytes
) -> PromotionResult:
    """Measure challenger and champion, and promote the challenger if it is better.

    Args:
        export: URL of the challenger's files, with the run card, which a promoted version keeps.
        state: contents of a file with the challenger's state dict.
    """
    store, card = ChampionStore(retraining.champion), read_file(f"{export}/{CARD}", "export")
    return judge(store, dataclasses.replace(challenge, card=card), retraining.criteria, state)


def record_outcome(
    execution: Execution, retraining: Retraining, result: PromotionResult | None
) -> tuple[PromotionResult, str, RetrainingReport]:
    """Record the end of a retraining beside the champion, and print it.

    Args:
        result: None if nothing was trained.

    Returns:
        The result, the version in use, "" for none, and the report.
    """
    is_trained = result is not None
    if result is None:
        result = PromotionResult(RetrainingResult(retraining.outcome), retraining.reason)
    store, outcome = ChampionStore(retraining.champion), result.outcome.value
    store.record(LAST_RUN, outcome, execution.name)
    in_use = store.in_use().version
    print(f"{outcome}: {result.reason}")  # noqa: T201
    print(f"champion  {in_use or 'none'} in {redact_url(store.url)}")  # noqa: T201
    links = {"Execution": execution.url}
    page = RetrainingReport(store, retraining.recipe, result, is_trained, links=links)
    page.close(None)
    return result, in_use, page


def format_kickoff(kickoff_time: datetime.datetime | None) -> str:
    """Return the time of a retraining's data, in UTC by ISO 8601. None and the start of 1970 mean
    now: Flyte's scheduler cannot fill in an optional input, and Flyte 2.0.43 gives 1970 to a task
    with a pod template.
    """
    if kickoff_time is None or not kickoff_time.timestamp():
        kickoff_time = datetime.datetime.now()
    return kickoff_time.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
