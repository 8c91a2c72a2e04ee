"""The report of a retraining."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyte_ddp.observers.formats import format_figure
from flyte_ddp.observers.reports.compared_run import read_nights
from flyte_ddp.observers.reports.comparison import compare_runs
from flyte_ddp.observers.reports.page import Page, Table, cell, shorten
from flyte_ddp.promotion.champion import ChampionStore, Manifest
from flyte_ddp.promotion.policy import PromotionResult
from flyte_ddp.storage import redact_url

MAX_VERSIONS = 20  # number of versions that the table lists
MAX_TEXT = 80  # characters


@dataclass(eq=False)
class RetrainingReport(Page):
    """The report of a retraining: its outcome, the champion and the versions before it."""

    store: ChampionStore
    recipe: str
    result: PromotionResult
    is_trained: bool = False  # there is a night to compare with the nights before

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
        rows = []
        for who, metrics, manifest in figures:
            row = {"version": cell(who)}
            for name in names:
                form = functools.partial(format_figure, name)
                row[name.replace("_", " ")] = cell(metrics.get(name), form)
            rows.append((who == in_use, {**row, **_describe_origin(manifest)}))
        place = redact_url(self.store.url)
        note = f"both on the same held-out data; versions in {place}, as promoted; green: in use"
        tables = [Table("Challenger and champion", note, rows)] if rows else []
        lead = f"{self.result.outcome.value}: {self.result.reason}"
        return {"lead": lead, **self._compare_nights(tables)}

    def _compare_nights(self, tables: list[Table]) -> dict[str, Any]:
        """Return the parts of the page that compare this night with the nights before, and
        `tables` before theirs.
        """
        if not self.is_trained:
            return {"tables": tables}
        try:
            comparison = compare_runs(read_nights(self.store.storage))
        except ValueError as error:  # this may be the first night
            return {"tables": tables, "notices": [f"Not compared with other nights: {error}"]}
        return {
            "tables": [*tables, *comparison.list_tables()],
            "notices": comparison.list_notices(),
            "charts": [("Nights", "", self.draw(comparison.list_panels()))],
        }


def _describe_origin(manifest: Manifest | None) -> dict[str, Any]:
    """Return the cells about a version's training; empty cells for a model without a manifest."""
    samples = data = fingerprint = code = kickoff = None
    if manifest:
        samples = f"{manifest.num_train_samples:,}"
        data = shorten(manifest.data, MAX_TEXT)
        fingerprint = manifest.data_fingerprint[:8]
        code = manifest.code_version[:10]
        kickoff = manifest.kickoff_time[:16].replace("T", " ")
    return {
        "trained on": cell(samples),
        "data": cell(data, kind="words"),
        "fingerprint": cell(fingerprint),
        "code": cell(code),
        "kickoff, UTC": cell(kickoff, kind="words"),
    }
