"""The report of a sweep.

A script of a few lines sorts its table. On pages that forbid scripts the table is in the order of the trials.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from flyte_ddp.observers import figures
from flyte_ddp.observers.figures import percent
from flyte_ddp.observers.page import NOTHING, Page, draw, duration, shortened, tile
from flyte_ddp.studies.results import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    STOPPED_EARLY,
    WAITING,
    TrialRun,
    find_best,
)
from flyte_ddp.studies.search import format_value
from flyte_ddp.studies.sweep_plots import sweep_panels

MAX_ERROR = 300  # characters of a trial's error in the table
MAX_DETAILS = 6_000  # characters of a trial's traceback
MAX_FAILURES = 20  # trials whose tracebacks are shown

CLASSES = {  # of the style sheet
    FINISHED: "finished",
    RUNNING: "running",
    FAILED: "failed",
    STOPPED_EARLY: "interrupted",
    INTERRUPTED: "interrupted",
}

STYLE = """
.training-report .trials th button {
  font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
}
.training-report .trials th[aria-sort] button { color: var(--ink); font-weight: 650; }
.training-report .trials th[aria-sort="ascending"] button::after { content: " \\25b2"; }
.training-report .trials th[aria-sort="descending"] button::after { content: " \\25bc"; }
.training-report .trials td.note { white-space: normal; min-width: 16rem; text-align: left; color: var(--bad); }
.training-report .trials td.finished { color: var(--good); } .training-report .trials td.failed { color: var(--bad); }
.training-report .trials td.running { color: var(--wait); }
.training-report .trials td.interrupted { color: var(--warn); }
.training-report .trials :is(th, td):nth-child(2), .training-report .trials th.note { text-align: left; }
.training-report .trials.scroll { max-height: 40rem; }
.training-report h2 + .panels { margin-top: 0; }
.training-report .charts > h2 { margin: 1.4rem 0 .6rem; }
"""

TEMPLATE = """
{%- block body %}
{%- if best %}
<div class="grid"><section class="card"><h2>The best: {{ best.name }} <small>{{ best.note }}</small></h2>
<pre>{{ best.config }}</pre></section></div>
{%- endif %}
{%- for heading, meaning, drawn in charts %}
<div class="charts"><h2>{{ heading }} <small>{{ meaning }}; a star marks the best trial, a cross
one that failed or was stopped early</small></h2>
{{ panels(drawn) }}</div>
{%- endfor %}
{%- if table %}
<div class="grid"><section class="card"><h2>Trials <small>click a column's head to sort</small></h2>
<div class="scroll trials"><table class="numbers"><thead><tr>
{%- for head in table.heads %}<th scope="col"><button type="button">{{ head }}</button></th>{% endfor %}
{%- if table.has_notes %}<th scope="col" class="note"><button type="button">error</button></th>{% endif %}</tr>
</thead><tbody>
{%- for row in table.rows %}
<tr{% if row.best %} class="best"{% endif %}>
{%- for cell in row.cells %}<td data-key="{{ cell.key }}" class="{{ cell.class }}">{{ cell.text }}</td>{% endfor %}
{%- if table.has_notes %}<td data-key="{{ row.note }}" class="note">{{ row.note }}</td>{% endif %}</tr>
{%- endfor %}
</tbody></table></div></section></div>
{%- endif %}
{%- if failures %}
<div class="grid"><section class="card error"><h2>Failures</h2>
{%- for name, text in failures %}<details><summary>{{ name }}</summary><pre>{{ text }}</pre></details>{% endfor %}
</section></div>
{%- endif %}
{%- endblock %}
{% block script %}
<script>
for (const table of document.querySelectorAll(".training-report .trials table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const falls = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(each => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", falls ? "descending" : "ascending");
    const key = row => row.cells[column].dataset.key;
    const compare = (a, b) => isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b;
    const rows = [...table.tBodies[0].rows].sort((a, b) =>
      (key(a) === "") - (key(b) === "") || (falls ? compare(key(b), key(a)) : compare(key(a), key(b))));
    table.tBodies[0].append(...rows);
  }));
}
</script>
{% endblock %}
"""


class SweepReport(Page):
    """The report of a sweep.

    Attributes:
        runs: the sweep's trials. They are added when they are known.
    """

    template = TEMPLATE
    style = STYLE
    progress_label = "trials done"

    def __init__(self, recipe: str, runs: Sequence[TrialRun] = ()) -> None:
        super().__init__()
        self.recipe = recipe
        self.runs = list(runs)

    @property
    def title(self) -> str:
        return f"Sweep of {self.recipe}"

    def content(self) -> dict[str, Any]:
        runs = [run.snapshot() for run in self.runs]
        best = find_best(runs)
        num_done = sum(run.status in (FINISHED, STOPPED_EARLY, FAILED) for run in runs)
        lead = f"{len(runs)} trials over {', '.join(runs[0].trial.values)}" if runs else "Waiting for the cluster."
        failures = [(str(run.trial), shortened(run.details, MAX_DETAILS)) for run in runs if run.details]
        return {
            "lead": lead,
            "percent_done": 100 * num_done // max(1, len(runs)),
            "tiles": self._tiles(runs, best, num_done),
            "best": _best(best) if best else None,
            "charts": _charts(*sweep_panels(runs)),
            "table": _table(runs, best),
            "failures": failures[:MAX_FAILURES],
        }

    def _tiles(self, runs: Sequence[TrialRun], best: TrialRun | None, num_done: int) -> list[dict[str, str]]:
        counts = {
            status: sum(run.status == status for run in runs) for status in (RUNNING, WAITING, STOPPED_EARLY, FAILED)
        }
        others = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        spent = sum(run.elapsed[-1] for run in runs if run.elapsed)
        loss, trial = (f"{best.last_loss:.4g}", f"trial {best.trial.number}") if best else (NOTHING, "")
        accuracy = percent(best.epochs[-1].accuracy) if best else NOTHING
        return [
            tile("Trials done", f"{num_done} / {len(runs)}", others or "all finished"),
            tile("Lowest test loss", loss, trial),
            tile("Its accuracy", accuracy, "after its last epoch"),
            tile("Wall time", duration(self.seconds()), "so far" if self.status == "running" else "of this attempt"),
            tile("Time of the trials", duration(spent), "training and evaluation, sum of all trials"),
        ]


def _charts(
    meaning: str, over_epochs: list[figures.Panel], over_time: list[figures.Panel]
) -> list[tuple[str, str, list[Any]]]:
    """Return (heading, meaning of the colors, pictures) of each chart."""
    charts = [("Test loss over epochs", over_epochs), ("Test loss over elapsed time", over_time)]
    if len(over_epochs) == 1:
        charts = [("Test loss over epochs and over elapsed time", over_epochs + over_time)]
    return [(heading, meaning, draw(panels)) for heading, panels in charts if panels]


def _best(best: TrialRun) -> dict[str, str]:
    return {
        "name": str(best.trial),
        "config": json.dumps(best.trial.overrides),
        "note": "lowest test loss after the last epoch among the trials that finished; use it as --config",
    }


def _table(runs: Sequence[TrialRun], best: TrialRun | None) -> dict[str, Any]:
    """Return the table of trials. Each cell has a text and a key to sort by."""
    if not runs:
        return {}
    names = list(runs[0].trial.values)
    rows = []
    for run in runs:
        last = run.epochs[-1] if run.epochs else None
        note = shortened(run.error, MAX_ERROR)
        cells = [
            _cell(run.trial.number),
            {"text": run.status, "key": run.status, "class": CLASSES.get(run.status, "")},
            *(_cell(run.trial.values[name]) for name in names),
            _cell(len(run.epochs), f"{len(run.epochs)} / {run.trial.config.epochs}"),
            _cell(last and last.train_loss),
            _cell(last and last.test_loss),
            _cell(last and last.accuracy, percent(last.accuracy) if last else ""),
            _cell(run.elapsed[-1] if run.elapsed else None, duration(run.elapsed[-1]) if run.elapsed else ""),
        ]
        rows.append({"best": run is best, "cells": cells, "note": note})
    heads = ["trial", "status", *names, "epochs", "train loss", "test loss", "accuracy", "time"]
    return {"heads": heads, "rows": rows, "has_notes": any(row["note"] for row in rows)}


def _cell(value: Any, text: str | None = None) -> dict[str, Any]:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return {"text": "" if value is None else str(value), "key": "", "class": ""}
    return {"text": format_value(value) if text is None else text, "key": value, "class": ""}
