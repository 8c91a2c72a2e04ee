"""The report of a sweep: one HTML document without anything outside it, as a file and, while it goes on, as a Deck.

It looks like the report of a run, whose style sheet it has. Everything that comes from outside is escaped. A script
of a few lines sorts the table; without it, as where a page forbids scripts, it is in the order of the models.
"""

from __future__ import annotations

import datetime
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from flyte_ddp.errors import TrainingStopped
from flyte_ddp.observers import figures
from flyte_ddp.sweep.plots import sweep_panels
from flyte_ddp.sweep.results import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    RUNNING,
    STOPPED_EARLY,
    WAITING,
    TrialRun,
    find_best,
)
from flyte_ddp.sweep.search import format_value
from tasks.report_template import PAGE, STYLE

MOST_ERROR = 300  # characters of a model's in the table
MOST_DETAILS = 6_000  # of a model's traceback
MOST_FAILURES = 20  # models whose tracebacks are shown

CLASSES = {
    FINISHED: "finished",
    RUNNING: "running",
    FAILED: "failed",
    STOPPED_EARLY: "interrupted",
    INTERRUPTED: "interrupted",
}


class SweepReport:
    """Renders what is known of a sweep at any time.

    Attributes:
        runs: the sweep's models; to be added when they are known.
        notes: lines for people, such as where W&B's runs are.
        error: what ended the sweep, if something did.
    """

    def __init__(self, recipe: str, runs: Sequence[TrialRun] = ()) -> None:
        self.recipe = recipe
        self.runs = list(runs)
        self.notes: list[str] = []
        self.error: BaseException | None = None
        self._opened_at = time.time()
        self._closed_at = 0.0

    def close(self, error: BaseException | None) -> None:
        self.error, self._closed_at = error, time.time()

    def render(self) -> str:
        """The report as a whole document that needs nothing from elsewhere."""
        page = Environment(autoescape=True).from_string(PAGE)
        return page.render(title=f"Sweep of {self.recipe}", fragment=Markup(self.render_fragment()))

    def render_fragment(self) -> str:
        """The report as a piece of HTML with its own style, to put into somebody else's page."""
        runs = [run.snapshot() for run in self.runs]
        best = find_best(runs)
        num_done = sum(run.status in (FINISHED, STOPPED_EARLY, FAILED) for run in runs)
        return (
            Environment(autoescape=True)
            .from_string(FRAGMENT)
            .render(
                style=Markup(STYLE + SWEEP_STYLE),
                script=Markup(SCRIPT),
                title=f"Sweep of {self.recipe}",
                status=self._status(),
                lead=f"{len(runs)} models over {', '.join(runs[0].trial.values)}"
                if runs
                else "Waiting for the cluster.",
                notes=self.notes,
                percent_done=100 * num_done // max(1, len(runs)),
                error=_shortened(str(self.error), MOST_DETAILS) if self.error else "",
                tiles=self._tiles(runs, best, num_done),
                best=_best(best) if best else None,
                charts=_charts(*sweep_panels(runs)),
                table=_table(runs, best),
                failures=[(str(run.trial), _shortened(run.details, MOST_DETAILS)) for run in runs if run.details][
                    :MOST_FAILURES
                ],
                footer=self._footer(),
            )
        )

    def _status(self) -> str:
        if isinstance(self.error, (TrainingStopped, KeyboardInterrupt, SystemExit)):
            return "interrupted"
        if self.error is not None:
            return "failed"
        return "finished" if self._closed_at else "running"

    def _tiles(self, runs: Sequence[TrialRun], best: TrialRun | None, num_done: int) -> list[tuple[str, str, str]]:
        seconds = (self._closed_at or time.time()) - self._opened_at
        counts = {
            status: sum(run.status == status for run in runs) for status in (RUNNING, WAITING, STOPPED_EARLY, FAILED)
        }
        told = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        spent = sum(run.elapsed[-1] for run in runs if run.elapsed)
        return [
            ("Models done", f"{num_done} / {len(runs)}", told or "all to their end"),
            (
                "Lowest test loss",
                f"{best.last_loss:.4g}" if best else "-",
                f"model {best.trial.number}" if best else "",
            ),
            ("Its accuracy", figures.percent(best.epochs[-1].accuracy) if best else "-", "after its last epoch"),
            ("Wall time", _duration(seconds), "so far" if self._status() == "running" else "of this attempt"),
            ("Time of the models", _duration(spent), "training and evaluation, summed up"),
        ]

    def _footer(self) -> str:
        at = datetime.datetime.fromtimestamp(self._closed_at or time.time(), datetime.timezone.utc)
        return f"{'Ended' if self._closed_at else 'As of'} {at:%Y-%m-%d %H:%M:%S} UTC"


def _charts(
    meaning: str, over_epochs: list[figures.Panel], over_time: list[figures.Panel]
) -> list[tuple[str, str, list[Markup]]]:
    """Headings, what the colours below them mean, and the pictures."""
    sections = [("Test loss over epochs", over_epochs), ("Test loss over elapsed time", over_time)]
    if len(over_epochs) == 1:
        sections = [("Test loss over epochs and over elapsed time", over_epochs + over_time)]
    return [(head, meaning, [Markup(figures.to_svg(panel)) for panel in panels]) for head, panels in sections if panels]


def _best(best: TrialRun) -> dict[str, str]:
    return {
        "name": str(best.trial),
        "config": json.dumps(best.trial.overrides),
        "note": "lowest test loss after the last epoch, of the models that were trained to their end; as --config",
    }


def _table(runs: Sequence[TrialRun], best: TrialRun | None) -> dict[str, Any]:
    """A row per model; each cell has its text and what to sort by."""
    if not runs:
        return {}
    names = list(runs[0].trial.values)
    rows = []
    for run in runs:
        last = run.epochs[-1] if run.epochs else None
        note = _shortened(run.error, MOST_ERROR)
        cells = [
            _cell(run.trial.number),
            {"text": run.status, "key": run.status, "class": CLASSES.get(run.status, "")},
            *(_cell(run.trial.values[name]) for name in names),
            _cell(len(run.epochs), f"{len(run.epochs)} / {run.trial.config.epochs}"),
            _cell(last and last.train_loss),
            _cell(last and last.test_loss),
            _cell(last and last.accuracy, figures.percent(last.accuracy) if last else ""),
            _cell(run.elapsed[-1] if run.elapsed else None, _duration(run.elapsed[-1]) if run.elapsed else ""),
        ]
        rows.append({"best": run is best, "cells": cells, "note": note})
    heads = ["model", "status", *names, "epochs", "train loss", "test loss", "accuracy", "time"]
    return {"heads": heads, "rows": rows, "has_notes": any(row["note"] for row in rows)}


def _cell(value: Any, text: str | None = None) -> dict[str, Any]:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return {"text": "" if value is None else str(value), "key": "", "class": ""}
    return {"text": format_value(value) if text is None else text, "key": value, "class": ""}


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 1:
        return f"{seconds:.1f} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} […] {text[-most // 2 :]}"


SWEEP_STYLE = """
.training-report .models th button {
  font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer;
}
.training-report .models th[aria-sort] button { color: var(--ink); font-weight: 650; }
.training-report .models th[aria-sort="ascending"] button::after { content: " \\25b2"; }
.training-report .models th[aria-sort="descending"] button::after { content: " \\25bc"; }
.training-report .models td.note { white-space: normal; min-width: 16rem; text-align: left; color: var(--bad); }
.training-report .models td.finished { color: var(--good); } .training-report .models td.failed { color: var(--bad); }
.training-report .models td.running { color: var(--wait); }
.training-report .models td.interrupted { color: var(--warn); }
.training-report .models :is(th, td):nth-child(2), .training-report .models th.note { text-align: left; }
.training-report .models.scroll { max-height: 40rem; }
.training-report h2 + .panels { margin-top: 0; }
.training-report .charts > h2 { margin: 1.4rem 0 .6rem; }
"""

SCRIPT = """
for (const table of document.querySelectorAll(".training-report .models table")) {
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
"""

FRAGMENT = """
<style>{{ style }}</style>
<div class="training-report"><div class="inner">
<header><h1>{{ title }}</h1><span class="status {{ status }}">{{ status }}</span></header>
<p class="lead">{{ lead }}</p>
{%- for note in notes %}<p class="lead">{{ note }}</p>{% endfor %}
{%- if status == "running" %}
<div class="bar" role="progressbar" aria-label="models done" aria-valuemin="0" aria-valuemax="100"
 aria-valuenow="{{ percent_done }}"><div style="width: {{ percent_done }}%"></div></div>
{%- endif %}
{%- if error %}
<div class="grid"><section class="card error {{ status }}-error"><h2>The sweep ended</h2><pre>{{ error }}</pre>
</section></div>
{%- endif %}
<div class="grid tiles">
{%- for name, value, note in tiles %}
<div class="card"><div class="tile-name">{{ name }}</div><div class="tile-value">{{ value }}</div>
<div class="tile-note">{{ note }}</div></div>
{%- endfor %}
</div>
{%- if best %}
<div class="grid"><section class="card"><h2>The best: {{ best.name }} <small>{{ best.note }}</small></h2>
<pre>{{ best.config }}</pre></section></div>
{%- endif %}
{%- for heading, meaning, panels in charts %}
<div class="charts"><h2>{{ heading }} <small>{{ meaning }}; a star is the best model, a cross one that failed or was
stopped early</small></h2>
<div class="grid panels">{% for panel in panels %}<div class="card">{{ panel }}</div>{% endfor %}</div></div>
{%- endfor %}
{%- if table %}
<div class="grid"><section class="card"><h2>Models <small>a click on a head sorts</small></h2>
<div class="scroll models"><table class="numbers"><thead><tr>
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
<footer>{{ footer }}</footer>
</div></div>
<script>{{ script }}</script>
"""
