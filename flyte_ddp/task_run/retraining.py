"""Decide to train a challenger, and decide to promote it, in tasks."""

from __future__ import annotations

import datetime

from flyte_ddp.promotion.champion import LAST_RUN, ChampionStore
from flyte_ddp.promotion.policy import PromotionResult
from flyte_ddp.promotion.report import RetrainingReport
from flyte_ddp.storage import redact_url
from flyte_ddp.task_run.execution import Execution


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


def format_kickoff(kickoff_time: datetime.datetime | None) -> str:
    """Return the time of a retraining's data, in UTC by ISO 8601. None means now."""
    begun = kickoff_time or datetime.datetime.now()
    return begun.astimezone(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def record_outcome(
    store: ChampionStore, recipe: str, result: PromotionResult, execution: Execution
) -> RetrainingReport:
    """Record the end of a retraining beside the champion; print it, and return the report."""
    outcome = result.outcome.value
    store.record(LAST_RUN, outcome, execution.name)
    in_use = store.in_use().version or "none"
    print(f"{outcome}: {result.reason}")  # noqa: T201
    print(f"champion  {in_use} in {redact_url(store.url)}")  # noqa: T201
    page = RetrainingReport(store, recipe, result, links={"Execution": execution.url})
    page.close(None)
    return page
