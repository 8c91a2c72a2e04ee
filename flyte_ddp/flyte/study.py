"""The studies, sweep and scaling: check all trials at once, and train them on one cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile
from flytekit.types.structured import StructuredDataset

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.events import list_accuracies, list_metrics
from flyte_ddp.flyte.inputs import (
    ClusterInput,
    OptionalCluster,
    OptionalOverrides,
    TrainingOverrides,
    given,
    make_overrides,
)
from flyte_ddp.flyte.outputs import (
    output_export,
    output_file,
    output_model_state,
    output_report,
    say_outputs,
)
from flyte_ddp.flyte.task import (
    check_cluster,
    check_config,
    check_files,
    open_task_run,
    task_body,
)
from flyte_ddp.recipes import config_of
from flyte_ddp.studies.report import StudyReport
from flyte_ddp.studies.results import build_table
from flyte_ddp.studies.scaling import build_scaling_table
from flyte_ddp.studies.search import Search, build_trials, expand_grid, expand_world_sizes
from flyte_ddp.task_run import study
from flyte_ddp.task_run.files import HISTORY
from flyte_ddp.task_run.run import TaskRun


class CheckedStudy(NamedTuple):
    """The inputs of a study's training task."""

    config: TrainingOverrides  # config that all trials share
    # choices of each trial, by name; see `flyte_ddp.studies.search.build_trials`
    trials: list[dict]  # type: ignore[type-arg]


class SweepOutputs(NamedTuple):
    """The outputs of a sweep. `config.monitor` decides which trial is best, measured after the
    epoch from which the trial keeps its weights.
    """

    # a row for every epoch of every trial, see `flyte_ddp.studies.results.build_table`
    results: StructuredDataset
    csv: FlyteFile  # `results` as a CSV file
    best_config: TrainingOverrides  # config of the best trial, in the form of --config
    # accuracy of the best trial after each epoch, in [0, 1]; empty without an accuracy
    best_accuracies: list[float]
    best_metrics: dict[str, list[float]]  # metrics of the best trial after each epoch, by name
    best_model_state: PythonPickledFile  # state dict of the best trial, on the CPU
    report: FlyteFile  # the HTML page that the Deck shows too
    # best trial's weights as safetensors, and its run card: docs/outputs.md
    best_export: FlyteDirectory
    history: FlyteFile  # every event of every trial, as JSON lines, one trial after another


class ScalingOutputs(NamedTuple):
    table: StructuredDataset  # a row for every trial: `flyte_ddp.studies.scaling.Row`
    csv: FlyteFile  # `table` as a CSV file
    history: FlyteFile  # every event of every trial, as JSON lines, one trial after another
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
    """Check every trial of the sweep before anything is prepared or started for the first trial."""
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
    """Check every trial of the study before anything is prepared or started for the first trial."""
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

    base = {**given(config)}
    # The state has a checksum, because Flyte's cache of the training compares it.
    state = check_config(config_of(recipe, given(config))).initial_model_state
    if state:
        base["initial_model_state"] = state
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
    """Train one model, a trial, for each configuration on the workers of a Dask cluster, and
    compare the trials.

    With the sampler tpe only the first of the given trials are trained. Later trials are suggested
    from their results. A retry of this task skips the trials that are done and continues the others
    from their checkpoints.
    """
    report, search = StudyReport(recipe), Search(stop_early, sampler, grid, seed)
    with _trained(report, config, trials, data, cluster, checkpoints, output, search) as run:
        results, csv = _save_table(run, build_table(report.runs))
        best, trained = study.best_of(run, report)
        state_url = trained.finished.model_state_url
        outputs = SweepOutputs(
            results=results,
            csv=csv,
            best_config=make_overrides(best.trial.overrides),
            best_accuracies=list_accuracies(best.epochs),
            best_metrics=list_metrics(best.epochs),
            best_model_state=output_model_state(run, "best_model_state.pt", state_url),
            report=output_report(run),
            best_export=output_export(run, trained),
            history=output_file(run, HISTORY),
        )
        say_outputs(run, outputs)
        return outputs


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
    """Train a trial at every world size with every combination of the other choices, one trial at a
    time, and compare the trials.

    A retry of this task continues the interrupted trial; finished trials are not repeated.
    """
    report = StudyReport(recipe, target_loss=target_loss)
    with _trained(report, config, trials, data, cluster, checkpoints, output) as run:
        table, csv = _save_table(run, build_scaling_table(report.study))
        study.say_scaling(run, report)
        outputs = ScalingOutputs(table, csv, output_file(run, HISTORY), output_report(run))
        say_outputs(run, outputs)
        return outputs


@contextlib.contextmanager
def _trained(
    report: StudyReport,
    config: TrainingOverrides,
    choices: Sequence[Mapping[str, Any]],
    data: FlyteDirectory,
    cluster: ClusterConfig,
    checkpoints: str,
    output: str,
    search: Search | None = None,
) -> Iterator[TaskRun]:
    """Train the trials, and yield the run of the current task for its outputs."""
    recipe = report.recipe
    purpose = "sweep"
    if report.is_scaling:
        purpose = "scaling"
    name = f"{recipe.rpartition('.')[2]}-{purpose}"
    with open_task_run(report, name, checkpoints, output) as run:
        run.limit_time(check_config(config_of(recipe, given(config))).max_hours)
        trials = build_trials(recipe, given(config), choices)
        check_files(data=data)
        data.download()
        if report.is_scaling:
            from flyte_ddp.studies.runner import resize_cluster

            cluster = resize_cluster(cluster, max(trial.world_size for trial in trials))
        check_cluster(cluster)
        study.train_trials(run, report, trials, data.path, cluster, search)
        study.save_history(run, report)
        yield run


def _save_table(run: TaskRun, table: Any) -> tuple[StructuredDataset, FlyteFile]:
    table.to_csv(run.files.directory / "results.csv", index=False)
    return StructuredDataset(dataframe=table), output_file(run, "results.csv")
