"""The tasks of a scaling study: check it, and train at one world size after the other on one cluster."""

from __future__ import annotations

import dataclasses
import os
from typing import NamedTuple

from flytekit import task
from flytekit.types.file import FlyteFile
from flytekit.types.structured import StructuredDataset

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import Event, Listener, RunFinished
from flyte_ddp.flytekit_plugin.failures import flyte_errors
from flyte_ddp.launch.process.job import Job
from flyte_ddp.recipes import config_of
from flyte_ddp.studies.scaling import ScalingRun, Study, validate_study
from flyte_ddp.studies.scaling_plots import ranks
from tasks.cluster import open_task_cluster
from tasks.frame import FRAMED, Frame, open_frame
from tasks.inputs import ClusterInput, OptionalCluster, OptionalOverrides, TrainingOverrides, given
from tasks.prepare import PreparedData
from tasks.resources import DRIVER_TASK, SMALL_TASK
from tasks.scaling_report import ScalingReport


class ScalingOutputs(NamedTuple):
    """The outputs of a scaling study."""

    table: StructuredDataset  # a row for every world size and learning rate: `build_table`
    csv: FlyteFile  # the same as a CSV file
    history: FlyteFile  # every event of every run, as JSON lines; each run begins with its RunStarted
    report: FlyteFile  # the HTML page that the Deck shows too


@task(**SMALL_TASK)
def check_scaling(
    recipe: str,
    config: OptionalOverrides,
    world_sizes: list[int],
    learning_rates: list[float],
    target_loss: float,
    cluster: OptionalCluster,
) -> TrainingOverrides:
    """Check every run of the study before anything is prepared or started for the first; returns `config`."""
    with flyte_errors():
        _check(recipe, config, world_sizes, learning_rates, target_loss, cluster or ClusterInput())
    return config or TrainingOverrides()


# Not cached: the measurements are true only for the machines and the network of that day.
@task(**DRIVER_TASK, **FRAMED)
def train_at_world_sizes(
    recipe: str,
    config: TrainingOverrides,
    data: PreparedData,
    world_sizes: list[int],
    learning_rates: list[float],
    target_loss: float,
    cluster: ClusterInput,
    checkpoints: str = "",
) -> ScalingOutputs:
    """Train `recipe` at every world size with every learning rate, and compare the runs.

    A retry of this task continues the interrupted run; finished runs are not repeated.
    """
    from flyte_ddp.studies.scaling_runner import resize_cluster, train_at_sizes

    num_runs = len(world_sizes) * max(1, len(learning_rates))
    report = ScalingReport(recipe, num_runs, target_loss)
    with open_frame(report, recipe, checkpoints, "scaling") as frame:
        resolved = _check(recipe, config, world_sizes, learning_rates, target_loss, cluster)
        frame.limit_time(resolved.max_hours)
        data.download()
        observer = _Observer(frame, report)
        with open_task_cluster(resize_cluster(cluster, max(world_sizes)), frame.name) as client:
            histories = train_at_sizes(
                recipe,
                resolved,
                world_sizes,
                learning_rates or [resolved.learning_rate],
                frame.storage.url,
                data.path,
                client,
                cluster,
                make_listeners=observer.make_listeners,
                relay=frame.say,
                run_name=frame.name,
                run=frame.execution.run_id,
            )
        frame.close(None)
        return observer.outputs(histories)


def build_table(study: Study) -> list[dict[str, object]]:
    """Return the rows of the table: the fields of `flyte_ddp.studies.scaling.Row`, with the device in a name."""
    rows = []
    for row in study.rows():
        values = dataclasses.asdict(row)
        values[f"{study.device_unit.lower()}_hours"] = values.pop("device_hours")
        rows.append(values)
    return rows


def _check(
    recipe: str,
    config: OptionalOverrides,
    world_sizes: list[int],
    learning_rates: list[float],
    target_loss: float,
    cluster: ClusterInput,
) -> TrainingConfig:
    """Return the config that all runs share except the learning rate. Raise ConfigError if a run is impossible."""
    from flyte_ddp.studies.scaling_runner import validate_runs

    resolved = config_of(recipe, given(config))
    validate_study(resolved, world_sizes, learning_rates, target_loss)
    validate_runs(recipe, resolved, world_sizes, cluster)
    return resolved


class _Observer:
    """Shows a study: each run on the terminal and in W&B, as one group there, and the report of all runs."""

    def __init__(self, frame: Frame, report: ScalingReport) -> None:
        self.frame = frame
        self.report = report
        self.group = frame.wandb_run_id()

    def make_listeners(self, job: Job, config: TrainingConfig, world_size: int) -> list[Listener]:
        """Return the listeners of one run."""
        run_id = f"{self.group}-{os.path.basename(job.checkpoints)}".replace(".", "-")
        name = f"{ranks(world_size)}, rate {config.learning_rate:g}"
        wandb = self.frame.wandb(run_id, name=name, group=self.group)
        figures = self.frame.figures(recipe=self.report.recipe, trial=os.path.basename(job.checkpoints))
        return [self.frame.bar, wandb, *figures, _ReportListener(self.report), self.frame.publisher]

    def outputs(self, histories: list[str]) -> ScalingOutputs:
        """Return the task's outputs, and print the results and where the outputs are."""
        import pandas

        study = self.report.study
        table = pandas.DataFrame(build_table(study))
        table.to_csv(self.frame.directory / "scaling.csv", index=False)
        (self.frame.directory / "history.jsonl").write_text("".join(histories))
        for row in study.rows():
            self.frame.say(
                f"{ranks(row.world_size)}, rate {row.learning_rate:g}: {row.samples_per_second:,.0f} samples/s, "
                f"speed-up {row.speed_up:.2f}, efficiency {100 * row.efficiency:.0f} %"
            )
        outputs = ScalingOutputs(
            table=StructuredDataset(dataframe=table),
            csv=self.frame.output("scaling.csv"),
            history=self.frame.output("history.jsonl"),
            report=self.frame.saved_report(),
        )
        self.frame.say_outputs(scaling=outputs.csv, history=outputs.history, report=outputs.report)
        return outputs


class _ReportListener:
    """A listener of one run that adds it to the report when it has finished."""

    def __init__(self, report: ScalingReport) -> None:
        self.report = report
        self.events: list[Event] = []

    def handle(self, event: Event) -> None:
        self.events.append(event)
        self.report.handle(event)
        if isinstance(event, RunFinished) and (run := ScalingRun.of(self.events)):
            self.report.runs.append(run)

    def close(self, error: BaseException | None) -> None:
        pass
