"""Prepare the data of a recipe, once, before any GPU is requested, and train one model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import flytekit
from flytekit import HashMethod
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import list_accuracies, list_metrics
from flyte_ddp.flyte.flyte_context import is_flyte_task
from flyte_ddp.flyte.inputs import (
    ClusterInput,
    OptionalCluster,
    OptionalOverrides,
    OptionalSource,
    given,
    location,
)
from flyte_ddp.flyte.outputs import (
    TrainingOutputs,
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
    check_urls,
    open_task_run,
    task_body,
)
from flyte_ddp.launch.agent.rank_start import start_server
from flyte_ddp.launch.recipe_program import recipe_program, slow_imports
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.recipes import BUILTIN, config_of, get_recipe
from flyte_ddp.recipes.prepare import describe_data, prepare_data
from flyte_ddp.task_run.files import HISTORY
from flyte_ddp.task_run.training import say_figures, train


def _contents_hash(directory: FlyteDirectory) -> str:
    """Return the key of a training task's cache: the data and the recipe's code, but not the data's
    place.
    """
    note = describe_data(directory.path)
    return f"{note['fingerprint']}-{note['recipe_version']}"


PreparedData = Annotated[FlyteDirectory, HashMethod(_contents_hash)]


class Prepared(NamedTuple):
    """The inputs of the tasks that follow, resolved and checked."""

    data: PreparedData
    # The initial model state in the config has a checksum, because the training's cache compares
    # it too.
    config: TrainingConfig
    cluster: ClusterInput


@task_body
def prepare(
    recipe: str,
    config: OptionalOverrides = None,
    source: OptionalSource = None,
    cluster: OptionalCluster = None,
    trains_here: bool = False,
) -> Prepared:
    """Check and resolve the inputs, and prepare the data of `recipe`: `source` or the recipe's own
    data.

    With `trains_here` in a local run, the ranks are processes of this machine. Then their modules
    are imported meanwhile.

    Example:
        @task(**flyte.pod(flyte.SETTINGS.small), retries=2)
        def prepare(recipe: str, source: flyte.OptionalSource = None) -> flyte.Prepared:
            return flyte.prepare(recipe=recipe, source=source)
    """
    if trains_here and not is_flyte_task():
        built_in = None
        if recipe in BUILTIN:  # The import of any other recipe may itself take seconds.
            built_in = get_recipe(recipe)
        start_server(slow_imports(given(config), built_in))
    resolved = check_config(config_of(recipe, given(config)))
    check_cluster(cluster)
    check_urls(data=location(source))
    directory = Path(flytekit.current_context().working_directory, "data")
    directory.mkdir(parents=True)
    prepare_data(get_recipe(recipe, resolved.recipe_options), location(source), directory)
    return Prepared(FlyteDirectory(str(directory)), resolved, cluster or ClusterInput())


@task_body
def train_on_one_node(
    recipe: str,
    config: TrainingConfig,
    data: FlyteDirectory,
    num_processes: int = 0,
    checkpoints: str = "",
    output: str = "",
    parent_champion: str = "",
) -> TrainingOutputs:
    """Train `recipe` with one DistributedDataParallel process per GPU, or with `num_processes` on a
    machine without GPUs.

    `output` is the directory of a local run's outputs. `parent_champion` is the version that this
    model is to replace, for its card.

    Example:
        @task(**flyte.pod(flyte.SETTINGS.training, trains=True), retries=3)
        def train(config: TrainingConfig, data: flyte.PreparedData) -> flyte.TrainingOutputs:
            return flyte.train_on_one_node(
                recipe="digits", config=config, data=data, num_processes=2
            )
    """
    return _train(
        recipe, config, data, checkpoints, output, parent_champion, num_processes=num_processes
    )


@task_body
def train_on_cluster(
    recipe: str,
    config: TrainingConfig,
    data: FlyteDirectory,
    cluster: ClusterConfig,
    checkpoints: str = "",
    output: str = "",
    parent_champion: str = "",
) -> TrainingOutputs:
    """Train `recipe` across the nodes of a new Dask cluster, which is deleted afterwards.

    The task is the driver: it needs no GPU, and the ranks run in the cluster's worker pods.
    `output` and `parent_champion` are the same as in `train_on_one_node`.

    Example:
        @task(**flyte.pod(flyte.SETTINGS.driver, trains=True), retries=3)
        def train(
            config: TrainingConfig, data: flyte.PreparedData, cluster: flyte.ClusterInput
        ) -> flyte.TrainingOutputs:
            return flyte.train_on_cluster(
                recipe="digits", config=config, data=data, cluster=cluster
            )
    """
    return _train(recipe, config, data, checkpoints, output, parent_champion, cluster=cluster)


def _train(
    recipe: str,
    config: TrainingConfig,
    data: FlyteDirectory,
    checkpoints: str,
    output: str,
    parent_champion: str,
    num_processes: int = 0,
    cluster: ClusterConfig | None = None,
) -> TrainingOutputs:
    """Train here or on `cluster`; return the task's outputs, and print their places."""
    report = Report()
    with open_task_run(report, recipe, checkpoints, output) as run:
        run.limit_time(config.max_hours)
        checked = check_config(config)
        check_files(data=data)
        check_cluster(cluster)
        trained = train(
            run,
            recipe_program(recipe, checked),
            lambda: data.download() or data.path,
            cluster,
            num_processes,
            parent_champion,
        )
        epochs = trained.state.epochs
        state_url = trained.finished.model_state_url
        outputs = TrainingOutputs(
            epoch_accuracies=list_accuracies(epochs),
            epoch_metrics=list_metrics(epochs),
            model_state=output_model_state(run, "model_state.pt", state_url),
            report=output_report(run),
            history=output_file(run, HISTORY),
            export=output_export(run, trained),
        )
        say_figures(run, trained.state)
        say_outputs(run, outputs)
        return outputs
