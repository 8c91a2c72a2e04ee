"""The studies, sweep and scaling: check all trials at once, and train them on one cluster."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile
from flytekit.types.structured import StructuredDataset

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import log_failures
from flyte_ddp.events import EpochFinished, Event, Listener, list_accuracies, list_metrics
from flyte_ddp.flyte.frame import HISTORY, Frame
from flyte_ddp.flyte.inputs import (
    ClusterInput,
    OptionalCluster,
    OptionalOverrides,
    TrainingOverrides,
    given,
    make_overrides,
)
from flyte_ddp.flyte.origin import describe_origin
from flyte_ddp.flyte.task import (
    check_cluster,
    check_config,
    check_files,
    open_task_frame,
    task_body,
)
from flyte_ddp.observers.formats import format_count
from flyte_ddp.observers.reports.run_card import run_card
from flyte_ddp.recipes import config_of
from flyte_ddp.studies.report import StudyReport
from flyte_ddp.studies.results import (
    OUTCOME,
    TrialLines,
    TrialRun,
    build_table,
    choose_best,
    describe_kept,
)
from flyte_ddp.studies.scaling import build_scaling_table, by_world_size, estimate
from flyte_ddp.studies.search import Search, build_trials, expand_grid, expand_world_sizes


class CheckedStudy(NamedTuple):
    """The inputs of a study's training task."""

    config: TrainingOverrides  # that all trials share
    # what each trial varies, by name; see `flyte_ddp.studies.search.build_trials`
    trials: list[dict]  # type: ignore[type-arg]


class SweepOutputs(NamedTuple):
    """The outputs of a sweep. The best trial is that by `config.monitor`, after the epoch whose
    weights it keeps.
    """

    # a row for every epoch of every trial, see `flyte_ddp.studies.results.build_table`
    results: StructuredDataset
    csv: FlyteFile  # the same as a CSV file
    best_config: TrainingOverrides  # of the best trial, in the form of --config
    # of the best trial after each epoch, in [0, 1]; none if the recipe has no accuracy
    best_accuracies: list[float]
    best_metrics: dict[str, list[float]]  # of the best trial, by name, after each epoch
    best_model_state: PythonPickledFile  # its state dict, on the CPU
    report: FlyteFile  # the HTML page that the Deck shows too
    best_export: FlyteDirectory  # its weights as safetensors, and its run card: docs/outputs.md
    history: FlyteFile  # every event of every trial, as JSON lines, one trial after the other


class ScalingOutputs(NamedTuple):
    table: StructuredDataset  # a row for every trial: `flyte_ddp.studies.scaling.Row`
    csv: FlyteFile  # the same as a CSV file
    history: FlyteFile  # every event of every trial, as JSON lines, one trial after the other
    report: FlyteFile  # the HTML page that the Deck shows too


@task_body
def check_sweep(
    recipe: str,
    config: OptionalOverrides,
    grid: Any,
    num_models: int,
    seed: int,
    sampler: str,
    stop_early: str,
    cluster: OptionalCluster,
) -> CheckedStudy:
    """Check every trial of the sweep before anything is prepared or started for the first."""
    choices = expand_grid(grid, num_models, seed, sampler)
    Search(stop_early, sampler, grid, seed)
    return _check(recipe, config, choices, cluster)


@task_body
def check_scaling(
    recipe: str,
    config: OptionalOverrides,
    world_sizes: list[int],
    learning_rates: list[float],
    batch_sizes_per_rank: list[int],
    sample_sizes: list[int],
    target_loss: float,
    repeats: int,
    cluster: OptionalCluster,
) -> CheckedStudy:
    """Check every trial of the study before anything is prepared or started for the first."""
    choices = expand_world_sizes(
        config_of(recipe, given(config)),
        world_sizes,
        learning_rates,
        batch_sizes_per_rank,
        sample_sizes,
        target_loss,
        repeats,
    )
    return _check(recipe, config, choices, cluster)


def _check(
    recipe: str, config: OptionalOverrides, choices: list[dict[str, Any]], cluster: OptionalCluster
) -> CheckedStudy:
    from flyte_ddp.studies.runner import check_trials

    # the state with its checksum, which Flyte's cache of the training compares
    state = check_config(config_of(recipe, given(config))).initial_model_state
    base = {**given(config), **({"initial_model_state": state} if state else {})}
    trials = build_trials(recipe, base, choices)
    check_trials(trials, cluster or ClusterInput())
    return CheckedStudy(make_overrides(base), choices)


@task_body
def train_sweep(
    recipe: str,
    config: TrainingOverrides,
    trials: list[dict[str, Any]],
    data: FlyteDirectory,
    cluster: ClusterConfig,
    stop_early: str = "none",
    checkpoints: str = "",
    output: str = "",
    grid: Any = None,
    seed: int = 0,
    sampler: str = "random",
) -> SweepOutputs:
    """Train one model, a trial, for each configuration, each on a worker of a Dask cluster, and
    compare them.

    With the sampler tpe the first trials are those given, and later ones are suggested from the
    results in their place. A retry of this task skips the trials that are done and continues the
    others from their checkpoints.
    """
    report, search = StudyReport(recipe), Search(stop_early, sampler, grid, seed)
    return _train(  # type: ignore[no-any-return]
        report, config, trials, data, cluster, checkpoints, output, search
    )


@task_body
def train_at_world_sizes(
    recipe: str,
    config: TrainingOverrides,
    trials: list[dict[str, Any]],
    data: FlyteDirectory,
    cluster: ClusterConfig,
    target_loss: float = 0.0,
    checkpoints: str = "",
    output: str = "",
) -> ScalingOutputs:
    """Train a trial at every world size with every combination of the other choices, one at a time,
    and compare them.

    A retry of this task continues the interrupted trial; finished trials are not repeated.
    """
    report = StudyReport(recipe, target_loss=target_loss)
    return _train(  # type: ignore[no-any-return]
        report, config, trials, data, cluster, checkpoints, output
    )


def _train(
    report: StudyReport,
    config: TrainingOverrides,
    choices: Sequence[Mapping[str, Any]],
    data: FlyteDirectory,
    cluster: ClusterConfig,
    checkpoints: str,
    output: str,
    search: Search | None = None,
) -> Any:
    """Train the trials, and return the outputs of the current task. Without a `search` they are
    timed, one after another.
    """
    from flyte_ddp.cluster import connect
    from flyte_ddp.studies.runner import TrialRunner, resize_cluster

    recipe = report.recipe
    purpose = "scaling" if report.is_scaling else "sweep"
    with open_task_frame(
        report, f"{recipe.rpartition('.')[2]}-{purpose}", checkpoints, output
    ) as frame:
        frame.limit_time(check_config(config_of(recipe, given(config))).max_hours)
        trials = build_trials(recipe, given(config), choices)
        check_files(data=data)
        data.download()
        observer = _Observer(frame, report)
        if report.is_scaling:
            cluster = resize_cluster(cluster, max(trial.world_size for trial in trials))
        check_cluster(cluster)
        with connect.open_cluster(cluster, frame.name) as client:
            TrialRunner(
                frame.storage.url,
                data.path,
                client,
                cluster,
                observe=observer.observe,
                make_listeners=observer.make_listeners,
                relay=frame.say,
                run_name=frame.name,
                run=frame.execution.run_id,
                runs=report.runs,
                one_at_a_time=report.is_scaling,
                search=search or Search(),
            ).train(trials)
        return observer.scaling_outputs() if report.is_scaling else observer.sweep_outputs()


@dataclass(eq=False)
class _Observer:
    """Shows a study: a line for each start and end of a trial, the report, and one group in W&B."""

    frame: Frame
    report: StudyReport

    def __post_init__(self) -> None:
        self.group = self.frame.run_id()
        self.lines = TrialLines(self.frame.say, self.report.runs)

    def observe(self, run: TrialRun, event: Event | None) -> None:
        """Take note of what happened to a trial; see `flyte_ddp.studies.runner.TrialRunner`."""
        self.lines.observe(run, event)
        if event is not None and (self.report.is_scaling or isinstance(event, EpochFinished)):
            self.frame.publisher.handle(event)

    def make_listeners(self, run: TrialRun) -> list[Listener]:
        """Return the listeners of one trial: W&B, Prometheus' if a port was asked for, the bar for
        one at a time.
        """
        return [
            *([self.frame.bar] if self.report.is_scaling else []),
            *self.frame.figures(recipe=self.report.recipe, trial=str(run.trial.number)),
            self.frame.tracker(
                f"{self.group}-{run.key}",
                origin=describe_origin(self.frame.execution.run_id),
                history=f"{run.url}/{OUTCOME}",
                name=str(run.trial),
                group=self.group,
                config={"sweep": run.trial.shown},
                say=functools.partial(self.lines.tell, run),
            ),
        ]

    def sweep_outputs(self) -> SweepOutputs:
        """Return the outputs of a sweep, and print where they are."""
        best = choose_best(self.report.runs)
        assert best.state.finished is not None
        results, csv = self._save_table(build_table(self.report.runs))
        finished = best.state.finished
        card = run_card(best.state, **describe_origin(self.frame.execution.run_id))
        outputs = SweepOutputs(
            results=results,
            csv=csv,
            best_config=make_overrides(best.trial.overrides),
            best_accuracies=list_accuracies(best.epochs),
            best_metrics=list_metrics(best.epochs),
            best_model_state=self.frame.model_state(
                "best_model_state.pt", finished.model_state_url
            ),
            report=self.frame.saved_report(),
            best_export=self.frame.exported(finished, card),
            history=self._save_history(),
        )
        self.frame.say(f"the best is {best.trial}: {describe_kept(best)}")
        self.frame.say_outputs(outputs)
        return outputs

    def scaling_outputs(self) -> ScalingOutputs:
        """Return the outputs of a scaling study, and print the results and where the outputs
        are.
        """
        study = self.report.study
        table, csv = self._save_table(build_scaling_table(study))
        for values, rows in study.series.items():
            for world_size, repeats in by_world_size(rows).items():
                name = ", ".join(
                    [
                        format_count(world_size, "rank"),
                        *([study.describe(values)] if values else []),
                    ]
                )
                self.frame.say(
                    f"{name}: {estimate([row.samples_per_second for row in repeats]):,.0f} "
                    "samples/s, "
                    f"speed-up {estimate([row.speed_up for row in repeats]):.2f}, "
                    f"efficiency {estimate([100 * row.efficiency for row in repeats]):.0f} %"
                )
        outputs = ScalingOutputs(table, csv, self._save_history(), self.frame.saved_report())
        self.frame.say_outputs(outputs)
        return outputs

    def _save_table(self, table: Any) -> tuple[StructuredDataset, FlyteFile]:
        table.to_csv(self.frame.directory / "results.csv", index=False)
        return StructuredDataset(dataframe=table), self.frame.output("results.csv")

    def _save_history(self) -> FlyteFile:
        with open(self.frame.directory / HISTORY, "wb") as history:
            with log_failures("history"):
                history.writelines(run.history() for run in self.report.runs)
        return self.frame.output(HISTORY)
