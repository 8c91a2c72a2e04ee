"""The report of a scaling study: one HTML document without anything outside it, as a file and as a Deck.

It looks like the report of a run, whose style sheet it has. What comes from outside is escaped, and what is projected
is said to be, in every row.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence

from jinja2 import Environment
from markupsafe import Markup

from flyte_ddp.errors import TrainingStopped
from flyte_ddp.events import Event, RunStarted
from flyte_ddp.observers import figures
from flyte_ddp.scaling.plots import scaling_panels
from flyte_ddp.scaling.study import Row, ScalingRun, Study
from tasks.report_template import PAGE, STYLE

MOST_ERROR = 6_000  # characters
NOTHING = "-"


class ScalingReport:
    """Renders what is known of a study at any time.

    Attributes:
        runs: those that have finished, in any order.
        notes: lines for people, such as where W&B's runs are.
    """

    def __init__(
        self, recipe: str, num_runs: int, projected_world_sizes: Sequence[int], target_loss: float, kind: str
    ) -> None:
        self.recipe = recipe
        self.num_runs = num_runs
        self.projected_world_sizes = projected_world_sizes
        self.target_loss = target_loss
        self.kind = kind  # of the cluster
        self.runs: list[ScalingRun] = []
        self.notes: list[str] = []
        self._started: RunStarted | None = None  # the latest
        self._error: BaseException | None = None
        self._closed_at = 0.0

    @property
    def study(self) -> Study:
        """What the finished runs say."""
        return Study(list(self.runs), self.projected_world_sizes, self.target_loss)

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._started = event

    def close(self, error: BaseException | None) -> None:
        self._error, self._closed_at = error, time.time()

    def render(self) -> str:
        """The report as a whole document that needs nothing from elsewhere."""
        page = Environment(autoescape=True).from_string(PAGE)
        return page.render(title=self._title(), fragment=Markup(self.render_fragment()))

    def render_fragment(self) -> str:
        """The report as a piece of HTML with its own style, to put into somebody else's page."""
        study = self.study
        rows = study.rows()
        return (
            Environment(autoescape=True)
            .from_string(FRAGMENT)
            .render(
                style=Markup(STYLE + SCALING_STYLE),
                title=self._title(),
                status=self._status(),
                lead=self._lead(),
                notes=self.notes,
                percent_done=100 * len(self.runs) // max(1, self.num_runs),
                error=str(self._error)[:MOST_ERROR] if self._error else "",
                tiles=_tiles(study, rows),
                panels=[Markup(figures.to_svg(panel)) for panel in scaling_panels(study)],
                heads=_heads(study),
                rows=[{"projected": row.is_projected, "cells": _cells(row)} for row in rows],
                checks=_checks(study),
                facts=self._facts(study),
                footer=self._footer(),
            )
        )

    def _title(self) -> str:
        return f"Scaling of {self.recipe}"

    def _status(self) -> str:
        if isinstance(self._error, (TrainingStopped, KeyboardInterrupt, SystemExit)):
            return "interrupted"
        if self._error is not None:
            return "failed"
        return "finished" if self._closed_at else "running"

    def _lead(self) -> str:
        if self._started is None:
            return "Waiting for the ranks of the first run to start."
        batch = self._started.config["global_batch_size"]
        lead = f"{self._started.data}. Every run has the same global batch of {batch:,} samples per step."
        if self._closed_at:
            return lead
        return f"{lead} {len(self.runs)} of {self.num_runs} runs are done; {self._started.world_size} ranks train now."

    def _facts(self, study: Study) -> list[tuple[str, str]]:
        if not study.runs:
            return []
        started = study.runs[0].started
        facts = [
            ("Device of each rank", started.device),
            ("CPU threads of each rank, the same in every run", f"{started.num_threads}"),
            ("Backend", next((run.started.backend for run in study.runs if run.world_size > 1), started.backend)),
            ("Epochs", f"{started.config['epochs']}"),
            ("Optimizer steps per epoch", f"{study.runs[0].steps_per_epoch:,.0f}"),
            (f"{study.device_unit}-hours", f"{study.device_unit}s times hours of training, without start, evaluation"),
            ("A step's time", "of the epoch in the middle, through its steps"),
            (
                "Waiting",
                "for gradients after a rank's own backward pass, also where a slower rank is the cause: the mean"
                " of all ranks, by DDP's own timers; projected is the all-reduce alone",
            ),
            ("Hidden", "exchange of gradients during the backward pass, which costs no time of its own"),
        ]
        if study.model is None:
            return [*facts, ("Projections", "none: no run with two or more ranks has been timed yet")]
        facts += [
            ("Time model", "step(n) = compute(B / n) + 2 (n - 1) latency + 2 (n - 1) / n * bytes / bandwidth"),
            ("Source", "ring all-reduce: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009)"),
            ("Latency, fit_time_model", f"{1e6 * study.model.latency:,.1f} µs per message"),
            ("Bandwidth, fit_time_model", _bandwidth(study.model.seconds_per_byte)),
            ("Gradients", f"{study.model.num_bytes / 2**20:,.2f} MiB"),
            (
                "Left out of the model",
                "exchange that hides behind the backward pass; what fewer samples do to a CPU's"
                " caches beyond what was timed; a slower or busier network than the measured one",
            ),
        ]
        if self.kind == "local":
            facts.append(("Network", "that of one machine with itself: between machines expect less than projected"))
        return facts

    def _footer(self) -> str:
        at = datetime.datetime.fromtimestamp(self._closed_at or time.time(), datetime.timezone.utc)
        return f"{'Ended' if self._closed_at else 'As of'} {at:%Y-%m-%d %H:%M:%S} UTC"


def _tiles(study: Study, rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    measured = [row for row in rows if not row.is_projected]
    if not measured:
        return []
    largest = max(measured, key=lambda row: row.world_size)
    ranks = f"{largest.world_size} ranks"
    losses: dict[float, list[float]] = {}
    for run in study.runs:
        losses.setdefault(run.learning_rate, []).append(run.best_loss)
    spread = max(max(each) / min(each) - 1 if min(each) > 0 else 0.0 for each in losses.values())
    tiles = [
        ("Speed-up", f"{largest.speed_up:.2f} x", f"{ranks} over {min(row.world_size for row in measured)}"),
        ("Efficiency", _percent(largest.efficiency), f"of the ideal, {ranks}"),
        ("Waiting for gradients", _percent(largest.wait_share), f"of a step, {ranks}"),
        ("Best test loss", f"{min(map(min, losses.values())):.4g}", f"world sizes differ by {100 * spread:.2g} %"),
    ]
    if study.checks:
        off = max(study.checks, key=lambda check: abs(check.error))
        tiles.append(("Model's error", f"{100 * off.error:+.0f} %", f"predicted step, {off.world_size} ranks"))
    return tiles


def _heads(study: Study) -> list[str]:
    return [
        "ranks",
        "",
        "learning rate",
        "batch per rank",
        "epochs",
        "final test loss",
        "best accuracy",
        "step",
        "samples/s",
        "speed-up",
        "efficiency",
        f"to loss {study.target_loss:.4g}",
        "waiting",
        "hidden",
        f"{study.device_unit}-hours",
    ]


def _cells(row: Row) -> list[str]:
    return [
        f"{row.world_size}",
        "projected" if row.is_projected else "measured",
        f"{row.learning_rate:g}",
        f"{row.batch_size_per_rank:,}",
        f"{row.epochs}",
        NOTHING if row.final_test_loss is None else f"{row.final_test_loss:.4g}",
        NOTHING if row.best_accuracy is None else figures.percent(row.best_accuracy),
        _milliseconds(row.step_seconds),
        f"{row.samples_per_second:,.0f}",
        f"{row.speed_up:.2f}",
        _percent(row.efficiency),
        NOTHING if row.seconds_to_target is None else f"{row.seconds_to_target:,.1f} s",
        _percent(row.wait_share),
        _percent(row.overlap_share),
        f"{row.device_hours:.3g}",
    ]


def _checks(study: Study) -> list[list[str]]:
    return [
        [
            f"{check.world_size}",
            _milliseconds(check.compute_seconds),
            _milliseconds(check.all_reduce_seconds),
            _milliseconds(check.predicted_seconds),
            _milliseconds(check.measured_seconds),
            f"{100 * check.error:+.1f} %",
        ]
        for check in study.checks
    ]


def _bandwidth(seconds_per_byte: float) -> str:
    return f"{1 / seconds_per_byte / 1e6:,.0f} MB/s" if seconds_per_byte else "too fast to tell from the latency"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"


SCALING_STYLE = """
.training-report tr.projected td { color: var(--soft); font-style: italic; }
"""

FRAGMENT = """
<style>{{ style }}</style>
<div class="training-report"><div class="inner">
<header><h1>{{ title }}</h1><span class="status {{ status }}">{{ status }}</span></header>
<p class="lead">{{ lead }}</p>
{%- for note in notes %}<p class="lead">{{ note }}</p>{% endfor %}
{%- if status == "running" %}
<div class="bar" role="progressbar" aria-label="runs done" aria-valuemin="0" aria-valuemax="100"
 aria-valuenow="{{ percent_done }}"><div style="width: {{ percent_done }}%"></div></div>
{%- endif %}
{%- if error %}
<div class="grid"><section class="card error {{ status }}-error"><h2>The study ended</h2><pre>{{ error }}</pre>
</section></div>
{%- endif %}
{%- if tiles %}
<div class="grid tiles">
{%- for name, value, note in tiles %}
<div class="card"><div class="tile-name">{{ name }}</div><div class="tile-value">{{ value }}</div>
<div class="tile-note">{{ note }}</div></div>
{%- endfor %}
</div>
{%- endif %}
{%- if panels %}
<div class="grid panels">{% for panel in panels %}<div class="card">{{ panel }}</div>{% endfor %}</div>
{%- endif %}
{%- if rows %}
<div class="grid"><section class="card"><h2>World sizes <small>at equal global batch</small></h2>
<div class="scroll"><table class="numbers"><thead><tr>
{%- for head in heads %}<th scope="col">{{ head }}</th>{% endfor %}</tr></thead><tbody>
{%- for row in rows %}
<tr{% if row.projected %} class="projected"{% endif %}>{% for cell in row.cells %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody></table></div></section></div>
{%- endif %}
{%- if checks %}
<div class="grid"><section class="card"><h2>The time model, checked <small>against steps of the trainings, which it was
not fit_time_model to</small></h2>
<div class="scroll"><table class="numbers"><thead><tr><th scope="col">ranks</th>
<th scope="col">computation, timed alone</th><th scope="col">all-reduce, by the model</th>
<th scope="col">predicted step</th><th scope="col">measured step</th><th scope="col">error</th></tr></thead><tbody>
{%- for row in checks %}
<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{%- endfor %}
</tbody></table></div></section></div>
{%- endif %}
{%- if facts %}
<div class="grid"><section class="card"><h2>How it was measured</h2><table class="pairs long"><tbody>
{%- for name, value in facts %}
<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{%- endfor %}
</tbody></table></section></div>
{%- endif %}
<footer>{{ footer }}</footer>
</div></div>
"""
