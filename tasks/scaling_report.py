"""The report of a scaling study. Every row says whether it is measured or projected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flyte_ddp.events import Event, RunStarted
from flyte_ddp.observers.figures import percent
from flyte_ddp.observers.page import NOTHING, Page, draw, row, tile
from flyte_ddp.scaling.plots import scaling_panels
from flyte_ddp.scaling.study import Row, ScalingRun, Study

CHECK_HEADS = [
    "ranks",
    "computation, timed alone",
    "all-reduce, by the model",
    "predicted step",
    "measured step",
    "error",
]

STYLE = """
.training-report tr.projected td { color: var(--soft); font-style: italic; }
"""

TEMPLATE = """
{%- block body %}
{%- if drawn %}{{ panels(drawn) }}{% endif %}
{%- if rows %}
<div class="grid"><section class="card"><h2>World sizes <small>at equal global batch size</small></h2>
{{- numbers(heads, rows) }}</section></div>
{%- endif %}
{%- if checks %}
<div class="grid"><section class="card"><h2>Check of the time model <small>against steps of the trainings, which it was
not fitted to</small></h2>{{ numbers(check_heads, checks) }}</section></div>
{%- endif %}
{%- if measured_how %}
<div class="grid"><section class="card"><h2>How it was measured</h2>{{ pairs(measured_how, true) }}</section></div>
{%- endif %}
{%- endblock %}
"""


class ScalingReport(Page):
    """The report of a scaling study.

    Attributes:
        runs: the finished runs, in any order. They are added when they finish.
    """

    template = TEMPLATE
    style = STYLE
    progress_label = "runs done"

    def __init__(
        self, recipe: str, num_runs: int, projected_world_sizes: Sequence[int], target_loss: float, kind: str
    ) -> None:
        super().__init__()
        self.recipe = recipe
        self.num_runs = num_runs
        self.projected_world_sizes = projected_world_sizes
        self.target_loss = target_loss
        self.kind = kind  # of the cluster
        self.runs: list[ScalingRun] = []
        self._started: RunStarted | None = None  # the latest

    @property
    def title(self) -> str:
        return f"Scaling of {self.recipe}"

    @property
    def study(self) -> Study:
        """The study of the finished runs."""
        return Study(list(self.runs), self.projected_world_sizes, self.target_loss)

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._started = event

    def content(self) -> dict[str, Any]:
        study = self.study
        rows = study.rows()
        return {
            "lead": self._lead(),
            "percent_done": 100 * len(self.runs) // max(1, self.num_runs),
            "tiles": _tiles(study, rows),
            "drawn": draw(scaling_panels(study)),
            "heads": _heads(study),
            "rows": [{"kind": "projected" if each.is_projected else "", "cells": _cells(each)} for each in rows],
            "check_heads": CHECK_HEADS,
            "checks": [{"cells": cells} for cells in _checks(study)],
            "measured_how": [row(name, value) for name, value in self._facts(study)],
        }

    def _lead(self) -> str:
        if self._started is None:
            return "Waiting for the ranks of the first run to start."
        batch = self._started.config["global_batch_size"]
        lead = f"{self._started.data}. Every run has the same global batch of {batch:,} samples per step."
        if self.closed_at:
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
            (
                f"{study.device_unit}-hours",
                f"{study.device_unit}s times hours of training, without evaluation",
            ),
            ("Step time", "the median of the epochs' durations, divided by the steps of an epoch"),
            (
                "Waiting",
                "time that a rank waits for gradients after its own backward pass, including the wait for slower ranks;"
                " the mean of all ranks, from DDP's own timers. A projection contains the all-reduce only",
            ),
            ("Hidden", "all-reduce during the backward pass, which takes no extra time"),
        ]
        if study.model is None:
            return [*facts, ("Projections", "none: no run with two or more ranks has been timed yet")]
        facts += [
            ("Time model", "step(n) = compute(B / n) + 2 (n - 1) latency + 2 (n - 1) / n * bytes / bandwidth"),
            ("Source", "ring all-reduce: Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009)"),
            ("Latency, fitted", f"{1e6 * study.model.latency:,.1f} µs per message"),
            ("Bandwidth, fitted", _bandwidth(study.model.seconds_per_byte)),
            ("Gradients", f"{study.model.num_bytes / 2**20:,.2f} MiB"),
            (
                "Not in the model",
                "all-reduce that is hidden by the backward pass; effects of smaller batches on a CPU's"
                " caches beyond the timed ones; a network that is slower or busier than the measured one",
            ),
        ]
        if self.kind == "local":
            facts.append(("Network", "inside one machine: between machines expect less than projected"))
        return facts


def _tiles(study: Study, rows: Sequence[Row]) -> list[dict[str, str]]:
    measured = [each for each in rows if not each.is_projected]
    if not measured:
        return []
    largest = max(measured, key=lambda each: each.world_size)
    ranks = f"{largest.world_size} ranks"
    losses: dict[float, list[float]] = {}
    for run in study.runs:
        losses.setdefault(run.learning_rate, []).append(run.best_loss)
    spread = max(max(each) / min(each) - 1 if min(each) > 0 else 0.0 for each in losses.values())
    tiles = [
        tile("Speed-up", f"{largest.speed_up:.2f} x", f"{ranks} over {min(each.world_size for each in measured)}"),
        tile("Efficiency", _percent(largest.efficiency), f"of the ideal, {ranks}"),
        tile("Waiting for gradients", _percent(largest.wait_share), f"of a step, {ranks}"),
        tile("Best test loss", f"{min(map(min, losses.values())):.4g}", f"world sizes differ by {100 * spread:.2g} %"),
    ]
    if study.checks:
        off = max(study.checks, key=lambda check: abs(check.error))
        tiles.append(
            tile(
                "Error of the time model", f"{100 * off.error:+.0f} %", f"of the predicted step, {off.world_size} ranks"
            )
        )
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
        NOTHING if row.best_accuracy is None else percent(row.best_accuracy),
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
    return f"{1 / seconds_per_byte / 1e6:,.0f} MB/s" if seconds_per_byte else "too high to distinguish from the latency"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
