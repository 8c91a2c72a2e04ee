"""The report of a study: of a sweep, and of a scaling study with what it measures besides.

A script of a few lines sorts its table. On pages that forbid scripts the table is in the order of the trials.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from flyte_ddp.observers.reports.drawing import Panel, format_figure
from flyte_ddp.observers.reports.page import NOTHING, Page, duration, row, shorten, tile
from flyte_ddp.studies.plots import metric_panels, name_metric, parameter_panels, scaling_panels
from flyte_ddp.studies.results import DONE, FAILED, RUNNING, STOPPED_EARLY, WAITING, TrialRun, find_best
from flyte_ddp.studies.scaling import Estimate, Study, by_world_size, estimate, started_of
from flyte_ddp.studies.search import BATCH_SIZE_PER_RANK, format_value

MAX_METRICS = 4  # of a trial, in the table and in tiles
MAX_ERROR = 300  # characters of a trial's error in the table
MAX_DETAILS = 6_000  # characters of a trial's traceback
MAX_FAILURES = 20  # trials whose tracebacks are shown

SCALING_COLUMNS = (  # head, field of `Row`, format
    ("batch per rank", "batch_size_per_rank", "{:,}"),
    ("step", "step_seconds", "{:.4g} s"),
    ("samples/s", "samples_per_second", "{:,.0f}"),
    ("speed-up", "speed_up", "{:.2f}"),
    ("efficiency", "efficiency", "{:.0%}"),
    ("to loss {target_loss:.4g}", "seconds_to_target", "{:,.1f} s"),
    ("waiting", "wait_share", "{:.0%}"),
    ("hidden", "overlap_share", "{:.0%}"),
    ("{device_unit}-hours", "device_hours", "{:.3g}"),
)

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
.training-report .trials :is(td.interrupted, td.stopped-early) { color: var(--warn); }
.training-report .trials :is(th, td):nth-child(2), .training-report .trials th.note { text-align: left; }
.training-report .trials.scroll { max-height: 40rem; }
.training-report h2 + .panels { margin-top: 0; }
.training-report .charts > h2 { margin: 1.4rem 0 .6rem; }
"""

TEMPLATE = """
{%- block body %}
{%- if best %}
<div class="grid"><section class="card"><h2>The best: {{ best }} <small>by {{ metric }} after the epoch whose weights
are kept, among the trials that finished; use it as --config</small></h2>
<pre>{{ best_config }}</pre></section></div>
{%- endif %}
{%- for heading, meaning, drawn in charts %}
<div class="charts"><h2>{{ heading }} <small>{{ meaning }}</small></h2>
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
{%- if measured_how %}
<div class="grid"><section class="card"><h2>How it was measured</h2>{{ pairs(measured_how, true) }}</section></div>
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


class StudyReport(Page):
    """The report of a study. `target_loss` is of a scaling study, 0 for one that all trials reach; None for a sweep."""

    template = TEMPLATE
    style = STYLE
    progress_label = "trials done"

    def __init__(self, recipe: str, runs: Sequence[TrialRun] = (), target_loss: float | None = None) -> None:
        super().__init__()
        self.recipe = recipe
        self.runs = list(runs)  # the study's trials, added when they are known
        self.target_loss = target_loss
        self.is_scaling = target_loss is not None

    @property
    def title(self) -> str:
        return f"{'Scaling' if self.is_scaling else 'Sweep'} of {self.recipe}"

    @property
    def study(self) -> Study:
        """The comparison of a scaling study's finished trials; an empty one for a sweep."""
        return Study([run.snapshot() for run in self.runs] if self.is_scaling else [], self.target_loss or 0.0)

    def content(self) -> dict[str, Any]:
        runs, study = [run.snapshot() for run in self.runs], self.study
        best = find_best(runs)
        num_done = sum(run.status in DONE for run in runs)
        failures = [(str(run.trial), shorten(run.details, MAX_DETAILS)) for run in runs if run.details]
        return {
            "lead": self._lead(runs),
            "percent_done": 100 * num_done // max(1, len(runs)),
            "tiles": [*_scaling_tiles(study), *self._tiles(runs, best, num_done)],
            "best": best and str(best.trial),
            "metric": best and best.metric.replace("_", " "),
            "best_config": best and json.dumps(best.trial.overrides),
            "charts": self._charts(runs, study),
            "table": _table(runs, best, study) if runs else {},
            "measured_how": _facts(runs, study),
            "failures": failures[:MAX_FAILURES],
        }

    def _lead(self, runs: Sequence[TrialRun]) -> str:
        if not runs:
            return "Waiting for the cluster."
        data = [f"{run.state.started.data}: " for run in runs if run.state.started]
        lead = f"{data[0] if data else ''}{len(runs)} trials over {', '.join(runs[0].trial.values)}"
        if self.is_scaling and BATCH_SIZE_PER_RANK not in runs[0].trial.values:
            lead += f", all with the same global batch of {runs[0].trial.config.global_batch_size:,} samples"
        return f"{lead}."

    def _tiles(self, runs: Sequence[TrialRun], best: TrialRun | None, num_done: int) -> list[dict[str, str]]:
        counts = {
            status: sum(run.status == status for run in runs) for status in (RUNNING, WAITING, STOPPED_EARLY, FAILED)
        }
        others = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        spent = sum(run.elapsed[-1] for run in runs if run.epochs)
        shown = [tile("Best trial", NOTHING, "")]
        if best and best.kept:
            note = f"trial {best.trial.number}, epoch {best.kept.epoch}"
            values = best.kept.figures().values
            names = [best.metric, *(name for name in best.kept.metrics if name != best.metric)][:MAX_METRICS]
            shown = [tile(f"Best {name_metric(names[0]).lower()}", format_figure(names[0], values[names[0]]), note)]
            shown += [
                tile(f"Its {name.replace('_', ' ')}", format_figure(name, values[name]), "") for name in names[1:]
            ]
        return [
            tile("Trials done", f"{num_done} / {len(runs)}", others or "all finished"),
            *shown,
            tile("Wall time", duration(self.seconds()), "so far" if self.status == "running" else "of this attempt"),
            tile("Time of the trials", duration(spent), "training and evaluation, sum of all trials"),
        ]

    def _charts(self, runs: Sequence[TrialRun], study: Study) -> list[tuple[str, str, list[Any]]]:
        """Return (heading, note, pictures) of each chart, or why there are none."""
        try:
            charts = _charts(runs, study)
        except Exception as error:
            return [("Plots", self._note(error), [])]
        return [(heading, note, self.draw(panels.copy)) for heading, note, panels in charts if panels]


def _charts(runs: Sequence[TrialRun], study: Study) -> list[tuple[str, str, list[Panel]]]:
    """Return (heading, note, panels) of each chart."""
    meaning, over_epochs, over_time = metric_panels(runs)
    metric = name_metric(runs[0].metric) if runs else ""
    meaning += "; a star marks the best trial, a cross one that failed or was stopped early"
    charts = [(f"{metric} over epochs", meaning, over_epochs), (f"{metric} over elapsed time", meaning, over_time)]
    if len(over_epochs) == 1:
        charts = [(f"{metric} over epochs and over elapsed time", meaning, over_epochs + over_time)]
    if not study.rows:
        note = "of each trial, after the epoch whose weights are kept; the colors are those above"
        charts.append((f"{metric} by hyperparameter", note, parameter_panels(runs)))
    charts.append(("Scaling", *scaling_panels(study)))
    return charts


def _scaling_tiles(study: Study) -> list[dict[str, str]]:
    if not study.rows:
        return []
    sizes = by_world_size(next(iter(study.series.values())))
    smallest, largest = min(sizes), max(sizes)
    ranks = f"{largest} ranks"

    def mean(name: str) -> Estimate:
        return estimate([getattr(each, name) for each in sizes[largest]])

    return [
        tile("Speed-up", f"{mean('speed_up'):.2f} x", f"{ranks} over {smallest}"),
        tile("Efficiency", f"{mean('efficiency'):.0%}", f"of the ideal, {ranks}"),
        tile("Waiting for gradients", f"{mean('wait_share'):.0%}", f"of a step, {ranks}"),
    ]


def _facts(runs: Sequence[TrialRun], study: Study) -> list[dict[str, Any]]:
    """Return how a scaling study was measured; nothing without finished trials."""
    started = [started_of(run) for run in runs if study.rows and run.state.started]
    if not started:
        return []
    repeats = any(len(each) > 1 for rows in study.series.values() for each in by_world_size(rows).values())
    return [
        row("Device of each rank", started[0].device),
        row("CPU threads of each rank, the same in every trial", f"{started[0].num_threads}"),
        *([row("Repeats", "means with their 95 % confidence intervals, by Student's t")] if repeats else []),
        row("Backend", next((each.backend for each in started if each.world_size > 1), started[0].backend)),
        row(f"{study.device_unit}-hours", f"{study.device_unit}s times hours of training, without evaluation"),
        row("Step time", "the median of the epochs' durations, divided by the steps of an epoch"),
        row(
            "Waiting",
            "time that a rank waits for gradients after its own backward pass, including the wait for slower ranks;"
            " the mean of all ranks, from DDP's own timers",
        ),
        row("Hidden", "all-reduce during the backward pass, which takes no extra time"),
    ]


def _table(runs: Sequence[TrialRun], best: TrialRun | None, study: Study) -> dict[str, Any]:
    """Return the table of trials. Each cell has a text and a key to sort by."""
    measured = {each.trial: each for each in study.rows}
    rows, metrics = [], dict.fromkeys(name for run in runs for epoch in run.epochs for name in epoch.metrics)
    for run in runs:
        last, elapsed = (run.epochs[-1], run.elapsed[-1]) if run.epochs else (None, None)
        cells = {
            "trial": _cell(run.trial.number),
            "status": {"text": run.status, "key": run.status, "class": run.status.replace(" ", "-")},
            **{name: _cell(value) for name, value in run.trial.values.items()},
            "epochs": _cell(len(run.epochs), f"{{}} / {run.trial.config.epochs}".format),
            "train loss": _cell(last and last.train_loss),
            "test loss": _cell(last and last.test_loss),
            **{
                name.replace("_", " "): _cell(last and last.metrics.get(name), functools.partial(format_figure, name))
                for name in list(metrics)[:MAX_METRICS]
            },
            "time": _cell(elapsed, duration),
        }
        for head, name, form in SCALING_COLUMNS if study.rows else ():
            value = getattr(measured.get(run.trial.number), name, None)
            cells[head.format_map(vars(study))] = _cell(value, form.format)
        rows.append({"best": run is best, "cells": list(cells.values()), "note": shorten(run.error, MAX_ERROR)})
    return {"heads": list(cells), "rows": rows, "has_notes": any(row["note"] for row in rows)}


def _cell(value: Any, form: Callable[[Any], str] = format_value) -> dict[str, Any]:
    """Return a cell for a value; an empty one for None."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return {"text": "" if value is None else str(value), "key": "", "class": ""}
    return {"text": form(value), "key": value, "class": ""}
