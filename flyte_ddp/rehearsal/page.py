"""The HTML page of a rehearsal: the table, the causes, and the loss of each run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flyte_ddp.observers.reports.drawing import PALETTE, Line, Panel
from flyte_ddp.observers.reports.page import Card, Page, Table, cell
from flyte_ddp.rehearsal.forecast import describe_forecast
from flyte_ddp.rehearsal.runs import TITLES
from flyte_ddp.rehearsal.verdict import Row, Verdict


@dataclass(eq=False)
class RehearsalPage(Page):
    """The page of one rehearsal.

    Args:
        cells: the columns of a row by their heads.
    """

    program: str
    verdict: Verdict
    cells: Callable[[Row], Mapping[str, str]]

    @property
    def title(self) -> str:
        return f"Rehearsal of {self.program}"

    def content(self) -> dict[str, Any]:
        rows, shown = self.verdict.rows, []
        for row in rows:
            cells = {head: cell(text) for head, text in self.cells(row).items()}
            shown.append((False, cells))
        causes = [Card(each.name, each.where, each.text) for each in self.verdict.causes]
        if self.verdict.forecast:
            first, *costs = describe_forecast(self.verdict.forecast, TITLES)
            causes.append(Card(first, "", "\n".join(costs)))
        problems = [
            Card(TITLES[row.run.name], "", "\n".join(row.notes)) for row in rows if row.notes
        ]
        return {
            "lead": "right" if self.verdict.is_right else "wrong",
            "percent_done": 100,
            "tiles": [],
            "tables": [Table("Faults", "beside the undisturbed run", shown)],
            "first_cards": causes,
            "cards": problems,
            "charts": [
                (
                    "Loss",
                    "of the steps that count",
                    self.draw(map(_panel, rows, rows[:1] * len(rows))),
                )
            ],
        }


def _panel(row: Row, clean: Row) -> Panel:
    lines = []
    for run, name, color in zip(
        (clean.run, row.run), ("undisturbed", "with it"), PALETTE, strict=False
    ):
        losses = [step.loss for step in run.steps]
        lines.append(Line(list(enumerate(losses, 1)), name, color))
    title = TITLES[row.run.name]
    summary = f"Loss by step: {title}, and undisturbed"
    return Panel(row.run.name, title, summary, lines, "step", has_whole_x=True)
