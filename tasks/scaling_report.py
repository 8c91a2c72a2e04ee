"""The report of a scaling study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flyte_ddp.events import Event, RunStarted
from flyte_ddp.observers.figures import percent
from flyte_ddp.observers.page import NOTHING, Page, draw, row, tile
from flyte_ddp.studies.scaling import Row, ScalingRun, Study
from flyte_ddp.studies.scaling_plots import scaling_panels

TEMPLATE = """
{%- block body %}
{%- if drawn %}{{ panels(drawn) }}{% endif %}
{%- if rows %}
<div class="grid"><section class="card"><h2>World sizes <small>at equal global batch size</small></h2>
{{- numbers(heads, rows) }}</section></div>
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
    progress_label = "runs done"

    def __init__(self, recipe: str, num_runs: int, target_loss: float) -> None:
        super().__init__()
        self.recipe = recipe
        self.num_runs = num_runs
        self.target_loss = target_loss
        self.runs: list[ScalingRun] = []
        self._started: RunStarted | None = None  # the latest

    @property
    def title(self) -> str:
        return f"Scaling of {self.recipe}"

    @property
    def study(self) -> Study:
        """The study of the finished runs."""
        return Study(list(self.runs), self.target_loss)

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
            "rows": [{"cells": _cells(each)} for each in rows],
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
        return [
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
                " the mean of all ranks, from DDP's own timers",
            ),
            ("Hidden", "all-reduce during the backward pass, which takes no extra time"),
        ]


def _tiles(study: Study, rows: Sequence[Row]) -> list[dict[str, str]]:
    if not rows:
        return []
    largest = max(rows, key=lambda each: each.world_size)
    ranks = f"{largest.world_size} ranks"
    losses: dict[float, list[float]] = {}
    for run in study.runs:
        losses.setdefault(run.learning_rate, []).append(run.best_loss)
    spread = max(max(each) / min(each) - 1 if min(each) > 0 else 0.0 for each in losses.values())
    return [
        tile("Speed-up", f"{largest.speed_up:.2f} x", f"{ranks} over {min(each.world_size for each in rows)}"),
        tile("Efficiency", _percent(largest.efficiency), f"of the ideal, {ranks}"),
        tile("Waiting for gradients", _percent(largest.wait_share), f"of a step, {ranks}"),
        tile("Best test loss", f"{min(map(min, losses.values())):.4g}", f"world sizes differ by {100 * spread:.2g} %"),
    ]


def _heads(study: Study) -> list[str]:
    return [
        "ranks",
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
        f"{row.learning_rate:g}",
        f"{row.batch_size_per_rank:,}",
        f"{row.epochs}",
        f"{row.final_test_loss:.4g}",
        percent(row.best_accuracy),
        _milliseconds(row.step_seconds),
        f"{row.samples_per_second:,.0f}",
        f"{row.speed_up:.2f}",
        _percent(row.efficiency),
        NOTHING if row.seconds_to_target is None else f"{row.seconds_to_target:,.1f} s",
        _percent(row.wait_share),
        _percent(row.overlap_share),
        f"{row.device_hours:.3g}",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.2f} ms"
