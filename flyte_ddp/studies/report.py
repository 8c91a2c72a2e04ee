"""The report of a study: of a sweep, and of a scaling study with what it measures besides."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.events import EpochFinished
from flyte_ddp.observers.formats import duration, format_count, format_figure, format_value
from flyte_ddp.observers.reports.page import NOTHING, Card, Page, Table, Tile, cell, shorten
from flyte_ddp.storage import redact_values
from flyte_ddp.studies.plots import metric_panels, name_metric, scaling_panels
from flyte_ddp.studies.results import (
    DONE,
    FAILED,
    RUNNING,
    STOPPED_EARLY,
    WAITING,
    TrialRun,
    counted_figures,
    figures_of,
    find_best,
    place_of,
)
from flyte_ddp.studies.scaling import Estimate, Study, by_world_size, estimate
from flyte_ddp.studies.search import BATCH_SIZE_PER_RANK

MAX_METRICS = 4  # metrics of a trial, in the table and in tiles
MAX_ERROR = 300  # characters of a trial's error in the table
MAX_DETAILS = 6_000  # characters of a trial's traceback
MAX_FAILURES = 20  # tracebacks of trials on the page

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


@dataclass(eq=False)
class StudyReport(Page):
    """The report of a study of a recipe or a function. `target_loss` is of a scaling study, 0 for
    one that all trials reach; None for a sweep.
    """

    progress_label = "trials done"

    recipe: str
    # the study's trials, added when they are known
    runs: list[TrialRun] = field(default_factory=list)
    target_loss: float | None = None

    @property
    def is_scaling(self) -> bool:
        return self.target_loss is not None

    @property
    def title(self) -> str:
        return f"{'Scaling' if self.is_scaling else 'Sweep'} of {self.recipe}"

    @property
    def study(self) -> Study:
        """The comparison of a scaling study's finished trials; an empty one for a sweep."""
        return Study(
            [run.snapshot() for run in self.runs] if self.is_scaling else [],
            self.target_loss or 0.0,
        )

    def content(self) -> dict[str, Any]:
        runs, study = [run.snapshot() for run in self.runs], self.study
        best = find_best(runs)
        num_done = sum(run.status in DONE for run in runs)
        failures = [
            (str(run.trial), shorten(run.details, MAX_DETAILS)) for run in runs if run.details
        ][:MAX_FAILURES]
        note = (
            "after the epoch whose weights are kept, among the trials that finished; use it as "
            "--config"
            if best and best.epochs
            else "in its best report, among the trials that finished"
        )
        charts = [metric_panels(runs), ("Scaling", *scaling_panels(study))]
        return {
            "lead": self._lead(runs),
            "percent_done": 100 * num_done // max(1, len(runs)),
            "tiles": [*_scaling_tiles(study), *self._tiles(runs, best, num_done)],
            "first_cards": [
                Card(
                    f"The best: {best.trial}",
                    note,
                    format_value(redact_values(best.trial.overrides)),
                )
            ]
            if best
            else [],
            "charts": [
                (title, note, self.draw(panels)) for title, note, panels in charts if panels
            ],
            "tables": [_table(runs, best, study)] if runs else [],
            "cards": [Card("Failures", "", "", failures)] if failures else [],
        }

    def _lead(self, runs: Sequence[TrialRun]) -> str:
        if not runs:
            return "Waiting for the cluster."
        lead = f"{len(runs)} trials over {', '.join(runs[0].trial.values)}"
        for each in [run.state.started for run in runs]:
            if each and each.data:
                threads = format_count(each.num_threads, "thread")
                lead = f"{each.data}; {each.device}, {threads} a rank: {lead}"
                break
        if self.is_scaling and BATCH_SIZE_PER_RANK not in runs[0].trial.values:
            lead += (
                ", all with the same global batch of "
                f"{runs[0].trial.config.global_batch_size:,} samples"
            )
        return f"{lead}."

    def _tiles(self, runs: Sequence[TrialRun], best: TrialRun | None, num_done: int) -> list[Tile]:
        counts = Counter(run.status for run in runs)
        unfinished = (RUNNING, WAITING, STOPPED_EARLY, FAILED)
        others = ", ".join(f"{counts[each]} {each}" for each in unfinished if counts[each])
        spent = sum(run.seconds for run in runs)
        shown = [Tile("Best trial", NOTHING, "")]
        if best and best.kept:
            note = f"trial {best.trial.number}, {place_of(best.kept)}"
            values = figures_of(best.kept)
            shown = [
                Tile(
                    f"Best {name_metric(best).lower()}",
                    format_figure(best.metric, values.get(best.metric, math.nan)),
                    note,
                ),
                *(
                    Tile(f"Its {name.replace('_', ' ')}", format_figure(name, values[name]), "")
                    for name in list(values)[: 2 + MAX_METRICS]
                    if name not in (best.metric, "train_loss")
                ),
            ]
        return [
            Tile("Trials done", f"{num_done} / {len(runs)}", others or "all finished"),
            *shown,
            Tile(
                "Wall time",
                duration(self.seconds()),
                "so far" if self.status == "running" else "of this attempt",
            ),
            Tile("Time of the trials", duration(spent), "sum of all trials"),
        ]


def _scaling_tiles(study: Study) -> list[Tile]:
    if not study.rows:
        return []
    sizes = by_world_size(next(iter(study.series.values())))
    smallest, largest = min(sizes), max(sizes)
    ranks = f"{largest} ranks"

    def mean(name: str) -> Estimate:
        return estimate([getattr(each, name) for each in sizes[largest]])

    return [
        Tile("Speed-up", f"{mean('speed_up'):.2f} x", f"{ranks} over {smallest}"),
        Tile("Efficiency", f"{mean('efficiency'):.0%}", f"of the ideal, {ranks}"),
        Tile("Waiting for gradients", f"{mean('wait_share'):.0%}", f"of a step, {ranks}"),
    ]


def _table(runs: Sequence[TrialRun], best: TrialRun | None, study: Study) -> Table:
    """Return the table of trials."""
    measured = {each.trial: each for each in study.rows}
    is_recipe = runs[0].trial.counted is EpochFinished
    names = dict.fromkeys(["train_loss", "test_loss"] if is_recipe else [runs[0].metric])
    for run in runs:
        for each in run.results:
            names |= dict.fromkeys(figures_of(each))
    shown = list(names)[: 2 + MAX_METRICS]
    has_errors = any(run.error for run in runs)
    rows = []
    for run in runs:
        cells = {"trial": cell(run.trial.number), **_cells(run, shown, is_recipe)}
        if study.rows:
            row = measured.get(run.trial.number)
            for head, name, form in SCALING_COLUMNS:
                cells[head.format_map(vars(study))] = cell(getattr(row, name, None), form.format)
        if has_errors:
            cells["error"] = cell(shorten(run.error, MAX_ERROR), kind="note")
        rows.append((run is best, cells))
    note = "of a finished trial the figures that count; click a column's head to sort"
    return Table("Trials", note, rows)


def _cells(run: TrialRun, names: Sequence[str], is_recipe: bool) -> dict[str, dict[str, Any]]:
    """Return the cells of a trial: what it tried, how far it is, and its figures, as of
    `counted_figures`.
    """
    cells = {"status": cell(run.status, kind=run.status.replace(" ", "-"))}
    for name, value in run.trial.shown.items():
        cells[name] = cell(value, format_value)
    if is_recipe:
        num_epochs = run.epochs[-1].position if run.epochs else 0
        cells["epochs"] = cell(num_epochs, f"{{:g}} / {run.trial.num_epochs}".format)
    else:
        cells["reports"] = cell(len(run.results))
    figures = counted_figures(run)
    for name in names:
        form = functools.partial(format_figure, name)
        cells[name.replace("_", " ")] = cell(figures.get(name), form)
    cells["time"] = cell(run.seconds if figures else None, duration)
    return cells
