"""The tasks that train one model: a launcher inside the frame of a task."""

from __future__ import annotations

from flytekit import task

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import OUT_OF_MEMORY, RankFailure
from flyte_ddp.events import Listener
from flyte_ddp.launch import driver
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.launch.process.job import Job
from flyte_ddp.launch.process.programs import recipe_program
from flyte_ddp.observers.history import HistoryFile
from flyte_ddp.observers.reports.run import Report
from tasks.cluster import check_urls, open_task_cluster
from tasks.frame import FRAMED, Frame, open_frame
from tasks.inputs import ClusterInput
from tasks.outputs import TrainingOutputs
from tasks.prepare import PreparedData
from tasks.resources import DRIVER_TASK, TRAINING_CACHE, TRAINING_TASK
from tasks.wandb_link import ReportLink, wandb_link


@task(cache=TRAINING_CACHE, **TRAINING_TASK, **FRAMED)
@wandb_link
def train_on_one_node(
    recipe: str,
    config: TrainingConfig,
    data: PreparedData,
    num_processes: int = 0,
    checkpoints: str = "",
    model_artifact: str = "",
    initial_state: str = "",
) -> TrainingOutputs:
    """Train `recipe` with one DistributedDataParallel process per GPU, or `num_processes` on a machine without.

    `initial_state` is the URL of a state dict to start from; by default the weights are fresh.
    """
    with open_frame(Report(), recipe, checkpoints) as frame:
        run = _Run(frame, recipe, config, initial_state, model_artifact)
        place = LocalPlace(num_processes, ClusterConfig.max_restarts)
        return run.train(place, data, pod_failure(frame.execution.previous_pod))


@task(cache=TRAINING_CACHE, **DRIVER_TASK, **FRAMED)
@wandb_link
def train_on_cluster(
    recipe: str,
    config: TrainingConfig,
    data: PreparedData,
    cluster: ClusterInput,
    checkpoints: str = "",
    model_artifact: str = "",
    initial_state: str = "",
) -> TrainingOutputs:
    """Train `recipe` across the nodes of a Dask cluster that is started for it and taken down afterwards.

    This task is the driver: it requests no GPU, and the ranks run in the cluster's worker pods. `initial_state` is the
    URL of a state dict to start from, which every rank reads; by default the weights are fresh.
    """
    from flyte_ddp.launch.dask.place import DaskPlace, check

    with open_frame(Report(), recipe, checkpoints) as frame:
        run = _Run(frame, recipe, config, initial_state, model_artifact)
        check(run.job, cluster)  # before pods are started for it
        with open_task_cluster(cluster, frame.name) as client:
            return run.train(DaskPlace(client, cluster, frame.name), data)


def pod_failure(pod: str) -> RankFailure | None:
    """Return the failure of the attempt before this one, if its pod was killed for its memory.

    Kubernetes kills all of a container (cgroup v2), so only the next attempt can see it.

    Args:
        pod: its name; "" for the first attempt.
    """
    if not pod:
        return None
    from flyte_ddp.cluster.kubernetes.api import pod_end

    if pod_end(pod) != OUT_OF_MEMORY:
        return None
    return RankFailure(f"The pod of the attempt before, {pod}, ended with {OUT_OF_MEMORY}", -1, "signal", OUT_OF_MEMORY)


class _Run:
    """The one run of a training task: its job, its listeners and its outputs."""

    def __init__(
        self, frame: Frame, recipe: str, config: TrainingConfig, initial_state: str, model_artifact: str
    ) -> None:
        self.frame = frame
        check_urls(initial_state=initial_state)
        frame.limit_time(config.max_hours)
        program = recipe_program(recipe, config, initial_state)
        self.job = Job(program, frame.storage.url, frame.opened_at, run=frame.execution.run_id)
        wandb = frame.wandb(frame.wandb_run_id(), model_artifact=model_artifact)
        self.listeners: list[Listener] = [
            frame.bar,
            HistoryFile(frame.directory / "history.jsonl"),
            wandb,
            frame.report,
            ReportLink(wandb, frame.report),
            frame.publisher,
            *frame.figures(recipe=recipe),
        ]

    def train(
        self, place: driver.Place, data: PreparedData, earlier_failure: RankFailure | None = None
    ) -> TrainingOutputs:
        """Train at `place`; return the task's outputs, and print where they are."""
        result = driver.run(
            self.job,
            place,
            lambda: data.download() or data.path,
            self.listeners,
            self.frame.say,
            earlier_failure=earlier_failure,
        )
        assert result.finished is not None  # else it has raised
        accuracies = [epoch.accuracy for epoch in result.epochs]
        outputs = TrainingOutputs(
            epoch_accuracies=accuracies,
            model_state=self.frame.model_state("model_state.pt", result.finished.model_state_url),
            report=self.frame.saved_report(),
            history=self.frame.output("history.jsonl"),
        )
        self.frame.say("accuracy per epoch  " + "  ".join(f"{100 * accuracy:.2f} %" for accuracy in accuracies))
        self.frame.say_outputs(model_state=outputs.model_state, report=outputs.report, history=outputs.history)
        return outputs
