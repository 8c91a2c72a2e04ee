"""Train one model in a task: a launcher inside the task's frame."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from flytekit.types.directory import FlyteDirectory

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import OUT_OF_MEMORY, FailureKind, RankFailure
from flyte_ddp.events import list_accuracies, list_metrics
from flyte_ddp.flyte.frame import HISTORY
from flyte_ddp.flyte.origin import describe_origin
from flyte_ddp.flyte.outputs import TrainingOutputs
from flyte_ddp.flyte.task import (
    check_cluster,
    check_config,
    check_files,
    open_task_frame,
    task_body,
)
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import Gang
from flyte_ddp.observers.formats import format_figure
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.reports.run_card import run_card


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
    """Train `recipe` with one DistributedDataParallel process per GPU, or `num_processes` on a
    machine without.

    `output` is the directory of a local run's outputs. `parent_champion` is the version that this
    model is to replace, for its card.
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
    """Train `recipe` across the nodes of a Dask cluster that is started for it and taken down
    afterwards.

    The task is the driver: it needs no GPU, and the ranks run in the cluster's worker pods.
    `output` and `parent_champion` are as of `train_on_one_node`.
    """
    return _train(recipe, config, data, checkpoints, output, parent_champion, cluster=cluster)


def pod_failure(pod: str) -> RankFailure | None:
    """Return the failure of the attempt before this one, if its pod was killed for its memory.

    Kubernetes kills all of a container (cgroup v2), so only the next attempt can see it.

    Args:
        pod: its name; "" where there was none.
    """
    from flyte_ddp.cluster.kubernetes.api import pod_end

    if not pod or not pod_end(ClusterConfig(kind="kubernetes"), pod, began_at=0.0).is_out_of_memory:
        return None
    return RankFailure(
        f"The pod of the attempt before, {pod}, ended with {OUT_OF_MEMORY}",
        -1,
        FailureKind.SIGNAL,
        OUT_OF_MEMORY,
    )


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
    """Train here or on `cluster`; return the task's outputs, and print where they are."""
    report, failure = Report(), None
    with open_task_frame(report, recipe, checkpoints, output) as frame:
        frame.limit_time(config.max_hours)
        program = recipe_program(recipe, check_config(config))
        check_files(data=data)
        origin = {**describe_origin(frame.execution.run_id), "parent_champion": parent_champion}
        check_cluster(cluster)
        opened: AbstractContextManager[driver.Place]
        if cluster:
            opened = Gang(cluster.num_nodes, cluster=cluster).open_place(program, frame.name)
        else:
            opened = nullcontext(LocalPlace(num_processes, ClusterConfig.max_restarts))
            failure = pod_failure(frame.execution.previous_pod)
        with opened as place:
            result = frame.run(
                report,
                program,
                place,
                lambda: data.download() or data.path,
                labels={"recipe": program.name},
                earlier_failure=failure,
                origin=origin,
            )
        assert result.finished is not None  # else it has raised
        metrics = list_metrics(result.epochs)
        outputs = TrainingOutputs(
            epoch_accuracies=list_accuracies(result.epochs),
            epoch_metrics=metrics,
            model_state=frame.model_state("model_state.pt", result.finished.model_state_url),
            report=frame.saved_report(),
            history=frame.output(HISTORY),
            export=frame.exported(result.finished, run_card(result, **origin)),
        )
        shown = result.monitor.metric
        if shown == "test_loss":  # a metric says more
            shown = next((name for name in metrics if name != shown), shown)
        values = "  ".join(format_figure(shown, value) for value in metrics[shown])
        frame.say(f"{shown.replace('_', ' ')} per epoch  {values}")
        frame.say_outputs(outputs)
        return outputs
