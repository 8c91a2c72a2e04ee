"""Train the trials of a sweep or a scaling study in a task, on one cluster."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import log_failures
from flyte_ddp.events import EpochFinished, Event, Listener
from flyte_ddp.observers.formats import format_count
from flyte_ddp.observers.reports.run_card import run_card
from flyte_ddp.studies.report import StudyReport
from flyte_ddp.studies.results import (
    OUTCOME,
    TrialLines,
    TrialRun,
    choose_best,
    describe_kept,
)
from flyte_ddp.studies.scaling import by_world_size, estimate
from flyte_ddp.studies.search import Search, Trial
from flyte_ddp.task_run.files import HISTORY
from flyte_ddp.task_run.origin import describe_origin
from flyte_ddp.task_run.run import TaskRun
from flyte_ddp.task_run.training import Trained


def train_trials(
    run: TaskRun,
    report: StudyReport,
    trials: Sequence[Trial],
    data: str,
    cluster: ClusterConfig,
    search: Search | None = None,
) -> None:
    """Train the trials, each on nodes of `cluster`. Trials of a scaling study are timed, one after
    another.

    A retry of the task skips the trials that are done and continues the others from their
    checkpoints.

    Args:
        report: the report to which the trials are added.
        data: the directory of the prepared data.
    """
    from flyte_ddp.cluster import connect
    from flyte_ddp.studies.runner import TrialRunner

    observer = _Observer(run, report)
    with connect.open_cluster(cluster, run.name) as client:
        runner = TrialRunner(
            run.storage.url,
            data,
            client,
            cluster,
            observe=observer.observe,
            make_listeners=observer.make_listeners,
            relay=run.say,
            run_name=run.name,
            run=run.execution.run_id,
            runs=report.runs,
            one_at_a_time=report.is_scaling,
            search=search or Search(),
        )
        runner.train(trials)


@dataclass(eq=False)
class _Observer:
    """Shows a study: a line for each start and end of a trial, the report, and one group in W&B."""

    run: TaskRun
    report: StudyReport

    def __post_init__(self) -> None:
        self.group = self.run.run_id()
        self.lines = TrialLines(self.run.say, self.report.runs)

    def observe(self, trial: TrialRun, event: Event | None) -> None:
        """Handle an event of a trial; see `flyte_ddp.studies.runner.TrialRunner`."""
        self.lines.observe(trial, event)
        if event is not None and (self.report.is_scaling or isinstance(event, EpochFinished)):
            self.run.publisher.handle(event)

    def make_listeners(self, trial: TrialRun) -> list[Listener]:
        """Return the listeners of one trial: the tracker, the listener for Prometheus if a port was
        asked for, and the progress bar of a scaling study.
        """
        listeners: list[Listener] = []
        if self.report.is_scaling:
            listeners.append(self.run.bar)
        listeners += self.run.figures(recipe=self.report.recipe, trial=str(trial.trial.number))
        if self.run.tracking:
            origin = describe_origin(self.run.execution.name)
            say = functools.partial(self.lines.tell, trial)
            tracker = self.run.tracker(
                f"{self.group}-{trial.key}",
                origin=origin,
                history=f"{trial.url}/{OUTCOME}",
                name=str(trial.trial),
                group=self.group,
                config={"sweep": trial.trial.shown},
                say=say,
            )
            listeners.append(tracker)
        return listeners


def best_of(run: TaskRun, report: StudyReport) -> tuple[TrialRun, Trained]:
    """Return the best trial of a sweep and its training, and print its name."""
    best = choose_best(report.runs)
    assert best.state.finished is not None
    run.say(f"the best is {best.trial}: {describe_kept(best)}")
    card = run_card(best.state, **describe_origin(run.execution.name))
    return best, Trained(best.state, best.state.finished, card)


def say_scaling(run: TaskRun, report: StudyReport) -> None:
    """Print the results of a scaling study."""
    study = report.study
    for values, rows in study.series.items():
        for world_size, repeats in by_world_size(rows).items():
            name = format_count(world_size, "rank")
            if values:
                name += f", {study.describe(values)}"
            speed = estimate([row.samples_per_second for row in repeats])
            speed_up = estimate([row.speed_up for row in repeats])
            efficiency = estimate([100 * row.efficiency for row in repeats])
            run.say(
                f"{name}: {speed:,.0f} samples/s, speed-up {speed_up:.2f}, "
                f"efficiency {efficiency:.0f} %"
            )


def save_history(run: TaskRun, report: StudyReport) -> None:
    """Write every event of every trial to `HISTORY`, one trial after another."""
    with open(run.files.directory / HISTORY, "wb") as history:
        with log_failures("history"):
            history.writelines(trial.history() for trial in report.runs)
