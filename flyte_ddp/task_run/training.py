"""Train one model in a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import OUT_OF_MEMORY, FailureKind, RankFailure
from flyte_ddp.events import RunFinished, RunState, list_metrics
from flyte_ddp.launch.protocol.programs import Program
from flyte_ddp.launch.run import Gang
from flyte_ddp.observers.formats import format_figure
from flyte_ddp.observers.reports.run_card import run_card
from flyte_ddp.task_run.origin import describe_origin
from flyte_ddp.task_run.run import TaskRun


@dataclass(frozen=True)
class Trained:
    """The result of a training in a task."""

    state: RunState
    finished: RunFinished
    card: dict[str, Any]  # see `run_card`


def train(
    run: TaskRun,
    program: Program,
    data: Callable[[], str],
    cluster: ClusterConfig | None = None,
    num_processes: int = 0,
    parent_champion: str = "",
) -> Trained:
    """Train the recipe of `program` on the nodes of a new cluster, or on this task's machine.

    Args:
        data: function that returns the directory of the prepared data. It is called while the ranks
            start.
        num_processes: ranks on this machine; 0 is one for each GPU.
        parent_champion: the version that this model is to replace, for its card.
    """
    if cluster:
        gang, failure = Gang(cluster.num_nodes, cluster=cluster), None
    else:
        gang = Gang(1, num_processes or "auto", ClusterConfig.max_restarts)
        failure = pod_failure(run.execution.previous_pod)
    origin = {**describe_origin(run.execution.name), "parent_champion": parent_champion}
    labels = {"recipe": program.name}
    state = run.run(program, gang, data, labels=labels, origin=origin, earlier_failure=failure)
    assert state.finished is not None  # A run that does not finish raises.
    return Trained(state, state.finished, run_card(state, **origin))


def say_figures(run: TaskRun, state: RunState) -> None:
    """Print the figure by which the best epoch is chosen, after each epoch."""
    metrics = list_metrics(state.epochs)
    shown = state.monitor.metric
    if shown == "test_loss":  # People read a metric more easily.
        shown = next((name for name in metrics if name != shown), shown)
    values = "  ".join(format_figure(shown, value) for value in metrics[shown])
    run.say(f"{shown.replace('_', ' ')} per epoch  {values}")


def pod_failure(pod: str) -> RankFailure | None:
    """Return the failure of the previous attempt, if its pod was killed for its memory.

    Kubernetes kills a whole container (cgroup v2), so only the next attempt can detect it.

    Args:
        pod: name of the previous attempt's pod; "" if there was none.
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
