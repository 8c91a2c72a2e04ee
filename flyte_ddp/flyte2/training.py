"""Train a recipe, or a sweep of it, in a task of Flyte 2."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from flyte.io import Dir, File

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import list_accuracies, list_metrics
from flyte_ddp.flyte2.task import (
    check_cluster,
    limited,
    open_task_run,
)
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.train import open_data
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.reports.run_card import write_card
from flyte_ddp.process.devices import check_requested_gpus
from flyte_ddp.project.admission import places_of_config
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.storage import check_places
from flyte_ddp.studies.report import StudyReport
from flyte_ddp.studies.results import build_table
from flyte_ddp.studies.runner import check_trials
from flyte_ddp.studies.search import Search, build_trials, expand_grid
from flyte_ddp.task_run import study
from flyte_ddp.task_run.files import HISTORY
from flyte_ddp.task_run.run import TaskRun
from flyte_ddp.task_run.training import Trained, say_figures
from flyte_ddp.task_run.training import train as train_recipe


class TrainingOutputs(NamedTuple):
    """The outputs of a training: the same as in `flyte_ddp.flyte`, without the report, which the
    task shows.

    Flyte 2 returns outputs in the order of their names, so a class of outputs lists them in this
    order.

    Example:
        outputs = flyte2.train("digits", {"epochs": 3})
        print(outputs.epoch_accuracies)
        print(outputs.epoch_metrics["test_loss"])
    """

    epoch_accuracies: list[float]
    epoch_metrics: dict[str, list[float]]
    export: Dir
    history: File
    model_state: File


class SweepOutputs(NamedTuple):
    """The outputs of a sweep. `config.monitor` decides which trial is best.

    The names of new outputs sort last, because users may take outputs by their numbers.

    Example:
        outputs = flyte2.sweep("digits", {"learning_rate": [0.01, 0.001]})
        print(outputs.best_config)
        print(outputs.best_metrics["test_loss"])
    """

    best_accuracies: list[float]
    best_config: str  # config of the best trial as JSON
    best_metrics: dict[str, list[float]]  # metrics of the best trial after each epoch, by name
    best_model_state: File
    results: File  # a CSV file, a row for every epoch of every trial
    run_export: Dir  # the best trial's weights as safetensors, and its run card: docs/outputs.md
    run_history: File  # every event of every trial, as JSON lines, one trial after another


def check_inputs(recipe: str, config: Mapping[str, Any] | None, data: str) -> TrainingConfig:
    """Return the config of a run. Raises ConfigError for a bad config, and for places that are not
    allowed.
    """
    if config is None:
        config = {}
    resolved = config_of(recipe, config)
    check_places([("data", data), *places_of_config(resolved)])
    return resolved


@limited
def train(
    recipe: str,
    config: Mapping[str, Any] | None = None,
    data: str = "",
    num_processes: int = 0,
    cluster: Mapping[str, Any] | None = None,
    checkpoints: str = "",
) -> TrainingOutputs:
    """Train `recipe` with one process per GPU, with `num_processes` on a machine without GPUs, or
    on the nodes of a new Dask `cluster`.

    Args:
        config: hyperparameters that differ from the recipe's.
        data: URL of your data; "" for the recipe's own data.
        checkpoints: URL; by default a place that all attempts of the action share.

    Raises:
        ConfigError, DataError, RankFailure, ...: as `flyte_ddp.train`.

    Example:
        @env.task(retries=3, report=True)
        def train(epochs: int, data: str = "") -> flyte2.TrainingOutputs:
            return flyte2.train("digits", {"epochs": epochs}, data, num_processes=2)
    """
    check_requested_gpus()
    resolved, nodes = check_inputs(recipe, config, data), check_cluster(cluster)
    report = Report()
    with open_task_run(report, checkpoints, resolved.max_hours) as run:
        with open_inputs(recipe, resolved, data) as prepare:
            trained = run_training(run, recipe, resolved, prepare, nodes, num_processes)
        epochs, finished = trained.state.epochs, trained.finished
        return TrainingOutputs(
            epoch_accuracies=list_accuracies(epochs),
            epoch_metrics=list_metrics(epochs),
            model_state=File.from_existing_remote(finished.model_state_url),
            history=File.from_existing_remote(run.files.upload(HISTORY)),
            export=Dir.from_existing_remote(finished.export_url),
        )


def open_inputs(
    recipe: str, config: TrainingConfig, data: str
) -> AbstractContextManager[Callable[[], str]]:
    """Return the data of a recipe with its config, as `open_data`."""
    return open_data(get_recipe(recipe, config.recipe_options), data)


def run_training(
    run: TaskRun,
    recipe: str,
    config: TrainingConfig,
    prepare: Callable[[], str],
    cluster: ClusterConfig | None,
    num_processes: int,
    parent_champion: str = "",
) -> Trained:
    """Train in the run of the current task. The data are prepared while the ranks start, but before
    a cluster starts.
    """
    if cluster:
        prepare()
    trained = train_recipe(
        run, recipe_program(recipe, config), prepare, cluster, num_processes, parent_champion
    )
    write_card(trained.finished.export_url, trained.card)
    say_figures(run, trained.state)
    return trained


@limited
def sweep(
    recipe: str,
    grid: dict[str, Any],
    config: Mapping[str, Any] | None = None,
    data: str = "",
    num_models: int = 0,
    seed: int = 0,
    sampler: str = "random",
    stop_early: str = "none",
    cluster: Mapping[str, Any] | None = None,
    checkpoints: str = "",
) -> SweepOutputs:
    """Train one model, a trial, for each configuration of `grid`, and compare them. The arguments
    are the same as in the workflow `sweep_wf` and in `train`.

    Example:
        @env.task(retries=3, report=True)
        def sweep() -> flyte2.SweepOutputs:
            grid = {"learning_rate": [0.01, 0.003], "global_batch_size": [32, 64]}
            return flyte2.sweep("digits", grid, {"epochs": 3})
    """
    if cluster is None:
        cluster = {}
    nodes = check_cluster(cluster) or ClusterConfig()
    resolved = check_inputs(recipe, config, data)
    trials = build_trials(recipe, config or {}, expand_grid(grid, num_models, seed, sampler))
    search = Search(stop_early, sampler, grid, seed)
    check_trials(trials, nodes)
    report = StudyReport(recipe)
    with open_task_run(report, checkpoints, resolved.max_hours) as run:
        with open_inputs(recipe, resolved, data) as prepare:
            study.train_trials(run, report, trials, prepare(), nodes, search)
        study.save_history(run, report)
        build_table(report.runs).to_csv(run.files.directory / "results.csv", index=False)
        best, trained = study.best_of(run, report)
        finished = trained.finished
        write_card(finished.export_url, trained.card)
        results = File.from_existing_remote(run.files.upload("results.csv"))
        history = File.from_existing_remote(run.files.upload(HISTORY))
        return SweepOutputs(
            best_accuracies=list_accuracies(best.epochs),
            best_config=json.dumps(dict(best.trial.overrides)),
            best_metrics=list_metrics(best.epochs),
            best_model_state=File.from_existing_remote(finished.model_state_url),
            results=results,
            run_export=Dir.from_existing_remote(finished.export_url),
            run_history=history,
        )
