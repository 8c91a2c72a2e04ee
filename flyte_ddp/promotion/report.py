"""The report of a retraining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyte_ddp.errors import ChampionError
from flyte_ddp.observers.formats import format_figure
from flyte_ddp.observers.reports.page import Page, row, section, tile
from flyte_ddp.promotion.champion import ChampionStore
from flyte_ddp.promotion.policy import PromotionResult
from flyte_ddp.storage import redact_url

MAX_VERSIONS = 20  # that are listed


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
        try:
            manifest: Mapping[str, Any] = vars(self.store.manifest())
        except ChampionError as error:
            manifest = {"champion": error}
        facts = [
            row(name.replace("_", " "), f"{value:,}" if isinstance(value, int) else str(value))
            for name, value in manifest.items()
            if value != "" and not isinstance(value, dict)
        ]
        versions = [
            row(
                each.version,
                ", ".join(_format_metric(name, value) for name, value in each.metrics.items()),
                each.data,
                marked=each.version == manifest.get("version"),
            )
            for each in reversed(self.store.versions(MAX_VERSIONS))
        ]
        return {
            "lead": f"{self.result.outcome.value}: {self.result.reason}",
            "tiles": [
                tile(who, _format_metric(name, value), note)
                for who, values, note in (
                    ("Challenger", self.result.challenger, "on the held-out data"),
                    ("Champion before", self.result.champion, "on the same data"),
                )
                for name, value in values.items()
            ],
            "sections": [
                section(
                    "The champion now", facts, redact_url(self.store.url), has_long_values=True
                ),
                section("Versions", versions, "the newest first; bold: in use"),
            ],
        }


def _format_metric(name: str, value: float) -> str:
    return f"{name.removeprefix('test_').replace('_', ' ')} {format_figure(name, value)}"
