"""The report of a retraining."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from flyte_ddp.observers.formats import format_figure
from flyte_ddp.observers.reports.page import Page, cell, shorten
from flyte_ddp.promotion.champion import ChampionStore, Manifest
from flyte_ddp.promotion.policy import PromotionResult
from flyte_ddp.storage import redact_url

MAX_VERSIONS = 20  # that are listed
MAX_DATA = 40  # characters
ORIGIN = ("trained on", "data", "fingerprint", "code", "kickoff")


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
        rows: list[tuple[str, Mapping[str, float], Manifest | None]]
        rows = [(who, metrics, None) for who, metrics in measured.items() if metrics]
        versions = reversed(self.store.versions(MAX_VERSIONS))
        rows += [(each.version, each.metrics, each) for each in versions]
        names = list(dict.fromkeys(name for _, metrics, _ in rows for name in metrics))
        cells = [
            [
                cell(who),
                *(
                    cell(metrics.get(name), functools.partial(format_figure, name))
                    for name in names
                ),
                *_origin(manifest),
            ]
            for who, metrics, manifest in rows
        ]
        note = f"versions in {redact_url(self.store.url)}, as they were promoted; green: in use"
        return {
            "lead": f"{self.result.outcome.value}: {self.result.reason}",
            "table": {
                "title": "Challenger and champion",
                "note": f"both on the same held-out data; {note}",
                "heads": ["", *(name.replace("_", " ") for name in names), *ORIGIN],
                "rows": [
                    {"best": who == in_use, "cells": each}
                    for (who, _, _), each in zip(rows, cells, strict=True)
                ],
            },
        }


def _origin(manifest: Manifest | None) -> list[dict[str, Any]]:
    """Return the cells of `ORIGIN`."""
    if manifest is None:
        return [cell(None) for _ in ORIGIN]
    return [
        cell(manifest.num_train_samples, "{:,}".format),
        cell(shorten(manifest.data, MAX_DATA)),
        cell(manifest.data_fingerprint[:12]),
        cell(manifest.code_version),
        cell(manifest.kickoff_time),
    ]
