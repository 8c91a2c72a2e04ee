"""Train a recipe, or a sweep of it, in a task of Flyte 2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flyte.io import Dir, File

from flyte_ddp.cluster import connect
from flyte_ddp.cluster.admission import places_of_config
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import EpochFinished, Event, list_accuracies, list_metrics
from flyte_ddp.flyte.origin import describe_origin
from flyte_ddp.flyte.settings import SETTINGS
from flyte_ddp.flyte2.frame import (
    HISTORY,
    Frame,
    check_cluster,
    current_execution,
    is_local,
    limited,
    open_frame,
    project_tracking,
)
from flyte_ddp.launch import train as training
from flyte_ddp.launch.agent.devices import check_requested_gpus
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.streams import print_line
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.storage import check_places
from flyte_ddp.studies.report import StudyReport
from flyte_ddp.studies.results import TrialLines, TrialRun, build_table, choose_best
from flyte_ddp.studies.runner import TrialRunner, check_trials
from flyte_ddp.studies.search import Search, build_trials, expand_grid


class TrainingOutputs(NamedTuple):
    """The outputs of a training: those of flytekit's door but for the report, which is the
    task's.

    Flyte 2 returns outputs in the order of their names, so a class of outputs has them in it.
    """

    epoch_accuracies: list[float]
    epoch_metrics: dict[str, list[float]]
    export: Dir
    history: File
    model_state: File


class SweepOutputs(NamedTuple):
    """The outputs of a sweep; the best trial is that by `config.monitor`."""

    best_accuracies: list[float]
    best_config: str  # as JSON
    best_metrics: dict[str, list[float]]  # of the best trial, by name, after each epoch
    best_model_state: File
    results: File  # a CSV file, a row for every epoch of every trial


def check_inputs(recipe: str, config: Mapping[str, Any] | None, data: str) -> TrainingConfig:
    """Return the config of a run. Raises ConfigError for a bad one, and for places that are not
    allowed.
    """
    resolved = config_of(recipe, {} if config is None else config)
    if not is_local():
        check_places([("data", data), *places_of_config(resolved)], SETTINGS.allowed.urls)
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
    """Train `recipe` with one process per GPU, or `num_processes` on a machine without; or on the
    nodes of a Dask `cluster` that is started for it.

    Args:
        config: hyperparameters that differ from the recipe's.
        data: URL of the data, for recipes that read data of yours.
        checkpoints: URL; by default a place that all attempts of the action share.

    Raises:
        ConfigError, DataError, RankFailure, ...: as `flyte_ddp.train`.
    """
    check_requested_gpus()
    resolved, nodes = check_inputs(recipe, config, data), check_cluster(cluster)
    with open_frame(Report(), checkpoints, resolved.max_hours, project_tracking()) as frame:
        trained = run_training(frame, recipe, config, data, num_processes, nodes)
    return list_outputs(frame, trained)


def run_training(
    frame: Frame,
    recipe: str,
    config: Mapping[str, Any] | None,
    data: str,
    num_processes: int,
    cluster: ClusterConfig | None,
    prepared: str = "",
) -> training.Trained:
    return training.train(
        recipe,
        config,
        data=data,
        prepared=prepared,
        nnodes=cluster.num_nodes if cluster else 1,
        nproc_per_node=num_processes or "auto",
        cluster=cluster,
        checkpoints=frame.storage.url,
        run_id=frame.run_id,
        listeners=frame.listeners,
        origin=describe_origin(current_execution()),
    )


def list_outputs(frame: Frame, trained: training.Trained) -> TrainingOutputs:
    return TrainingOutputs(
        epoch_accuracies=list_accuracies(trained.epochs),
        epoch_metrics=list_metrics(trained.epochs),
        model_state=File.from_existing_remote(trained.model_state_url),
        history=File.from_existing_remote(f"{frame.outputs}/{HISTORY}"),
        export=Dir.from_existing_remote(trained.export_url),
    )


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
    """Train one model, a trial, for each configuration of `grid`, and compare them. Arguments as of
    the workflow of the same name and of `train`.
    """
    nodes = check_cluster({} if cluster is None else cluster) or ClusterConfig()
    resolved = check_inputs(recipe, config, data)
    trials = build_trials(recipe, config or {}, expand_grid(grid, num_models, seed, sampler))
    search = Search(stop_early, sampler, grid, seed)
    check_trials(trials, nodes)
    report = StudyReport(recipe)
    with open_frame(report, checkpoints, resolved.max_hours) as frame:
        lines = TrialLines(print_line, report.runs)

        def observe(run: TrialRun, event: Event | None) -> None:
            lines.observe(run, event)
            if isinstance(event, EpochFinished):
                frame.publisher.handle(event)

        directory = frame.directory / "data"
        directory.mkdir()
        prepare_data(get_recipe(recipe, resolved.recipe_options), data, Path(directory))
        with connect.open_cluster(nodes, frame.pod_id) as client:
            runner = TrialRunner(
                *(frame.storage.url, str(directory), client, nodes),
                search=search,
                observe=observe,
                run_name=frame.pod_id,
                run=frame.run_id,
                runs=report.runs,
            )
            runner.train(trials)
        best = choose_best(report.runs)
        assert best.state.finished is not None
        build_table(report.runs).to_csv(frame.directory / "results.csv", index=False)
        return SweepOutputs(
            results=File.from_existing_remote(frame.upload("results.csv")),
            best_config=json.dumps(dict(best.trial.overrides)),
            best_accuracies=list_accuracies(best.epochs),
            best_metrics=list_metrics(best.epochs),
            best_model_state=File.from_existing_remote(best.state.finished.model_state_url),
        )
