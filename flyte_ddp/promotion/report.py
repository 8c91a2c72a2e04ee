"""The report of a retraining."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from flyte_ddp.observers.formats import format_figure
from flyte_ddp.observers.reports.page import Page, Table, cell, shorten
from flyte_ddp.promotion.champion import ChampionStore, Manifest
from flyte_ddp.promotion.policy import PromotionResult
from flyte_ddp.storage import redact_url

MAX_VERSIONS = 20  # that are listed
MAX_TEXT = 80  # characters
ORIGIN: dict[str, tuple[str, Callable[[Any], str]]] = {  # of a version's manifest, by its head
    "trained on": ("num_train_samples", "{:,}".format),
    "data": ("data", lambda text: shorten(text, MAX_TEXT)),
    "fingerprint": ("data_fingerprint", lambda text: text[:8]),
    "code": ("code_version", lambda text: text[:10]),
    "kickoff, UTC": ("kickoff_time", lambda text: text[:16].replace("T", " ")),
}
WRAPPED = ("data", "kickoff_time")  # texts that may take several lines


class RetrainingReport(Page):
    """The report of a retraining: its outcome, the champion and the versions before it."""

    def __init__(
        self, store: ChampionStore, recipe: str, result: PromotionResult, execution_url: str
    ) -> None:
        super().__init__(links={"Execution": execution_url} if execution_url else {})
        self.store = store
        self.recipe = recipe
        self.result = result

    @property
    def title(self) -> str:
        return f"Retraining {self.recipe}"

    def content(self) -> dict[str, Any]:
        in_use = self.store.in_use().version
        measured = {"challenger": self.result.challenger, "champion before": self.result.champion}
        figures: list[tuple[str, Mapping[str, float], Manifest | None]]
        figures = [(who, metrics, None) for who, metrics in measured.items() if metrics]
        versions = reversed(self.store.versions(MAX_VERSIONS))
        figures += [(each.version, each.metrics, each) for each in versions]
        names = dict.fromkeys(name for _, metrics, _ in figures for name in metrics)
        rows = [
            (
                who == in_use,
                {
                    "version": cell(who),
                    **{
                        name.replace("_", " "): cell(
                            metrics.get(name), functools.partial(format_figure, name)
                        )
                        for name in names
                    },
                    **{
                        head: cell(
                            form(getattr(manifest, name)) if manifest else None,
                            kind="words" if name in WRAPPED else "",
                        )
                        for head, (name, form) in ORIGIN.items()
                    },
                },
            )
            for who, metrics, manifest in figures
        ]
        place = redact_url(self.store.url)
        note = f"both on the same held-out data; versions in {place}, as promoted; green: in use"
        return {
            "lead": f"{self.result.outcome.value}: {self.result.reason}",
            "table": Table("Challenger and champion", note, rows) if rows else {},
        }
