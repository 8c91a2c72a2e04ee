"""Train one model in a task, and return typed outputs."""

from __future__ import annotations

from flytekit.types.directory import FlyteDirectory

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import list_accuracies, list_metrics
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
    open_task_run,
    task_body,
)
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.task_run.files import HISTORY
from flyte_ddp.task_run.training import say_figures, train


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
            recipe,
            checked,
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
