"""The tasks of a scaling study: check it, and train at one world size after the other on one cluster."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

import flytekit
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.file import FlyteFile
from flytekit.types.structured import StructuredDataset

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import Event, Listener, RunFinished
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.weights_and_biases import Wandb
from flyte_ddp.rank.job import Job
from flyte_ddp.recipes import config_of
from flyte_ddp.scaling.plots import ranks
from flyte_ddp.scaling.study import ScalingRun, Study, validate_study
from flyte_ddp.storage import Storage
from tasks.flyte_context import Execution, current_execution, share_storage_credentials
from tasks.inputs import ClusterInput, InputError, OptionalCluster, OptionalOverrides, TrainingOverrides, given
from tasks.prepare import PreparedData
from tasks.report import DeckPublisher
from tasks.resources import DRIVER_TASK, SMALL_TASK, WANDB_ENVIRONMENT
from tasks.scaling_report import ScalingReport
from tasks.train import WATCHED, flyte_errors
from tasks.watchers import LineHandler, launchers_logs, wandb_key, wandb_run_id

# Not cached, unlike a training: what was measured is true of the machines of that day.
UNCACHED = {name: value for name, value in WATCHED.items() if name != "cache"}


class ScalingOutputs(NamedTuple):
    """What a scaling study hands back."""

    table: StructuredDataset  # a row for every world size and learning rate, measured or projected: `build_table`
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
    projected_world_sizes: list[int],
    cluster: OptionalCluster,
) -> TrainingOverrides:
    """ModelCheck every run of the study before anything is prepared or started for the first; returns `config`."""
    try:
        _checked(
            recipe, config, world_sizes, learning_rates, target_loss, projected_world_sizes, cluster or ClusterInput()
        )
    except ConfigError as error:
        raise InputError(str(error)) from error
    return config or TrainingOverrides()


@task(**DRIVER_TASK, **UNCACHED)
def train_at_world_sizes(
    recipe: str,
    config: TrainingOverrides,
    data: PreparedData,
    world_sizes: list[int],
    learning_rates: list[float],
    target_loss: float,
    projected_world_sizes: list[int],
    cluster: ClusterInput,
    checkpoints: str = "",
) -> ScalingOutputs:
    """Train `recipe` at every world size with every learning rate, and compare what it took.

    A retry of this task goes on with the run that was under way; those before it are not repeated.
    """
    from flyte_ddp.cluster.connect import open_cluster
    from flyte_ddp.errors import ClusterError, GangLost
    from flyte_ddp.scaling.runner import resize_cluster, train_at_sizes

    context = flytekit.current_context()
    share_storage_credentials()
    execution = current_execution(context)
    directory = Path(context.working_directory)
    directory.mkdir(parents=True, exist_ok=True)
    name = execution.attempt_id or f"{recipe.rpartition('.')[2]}-scaling-{os.urandom(4).hex()}"
    try:
        resolved = _checked(recipe, config, world_sizes, learning_rates, target_loss, projected_world_sizes, cluster)
        rates = learning_rates or [resolved.learning_rate]
        storage = Storage(checkpoints or execution.checkpoints)
        storage.check_access("checkpoints")
        data.download()
        report = ScalingReport(
            recipe, len(world_sizes) * len(rates), projected_world_sizes, target_loss, cluster.resolved_kind
        )
        watchers = _Watchers(report, storage, execution, directory)
        with flyte_errors(), watchers, launchers_logs(LineHandler(watchers.bar.write)):
            with open_cluster(resize_cluster(cluster, max(world_sizes)), name) as client:
                histories = train_at_sizes(
                    recipe,
                    resolved,
                    world_sizes,
                    rates,
                    projected_world_sizes,
                    storage.url,
                    data.path,
                    client,
                    cluster,
                    make_listeners=watchers.make_listeners,
                    relay=watchers.bar.write,
                    run_name=name,
                )
    except ConfigError as error:
        raise InputError(str(error)) from error
    except (ClusterError, GangLost) as error:
        raise FlyteRecoverableException(str(error)) from error
    return watchers.outputs(histories)


def build_table(study: Study) -> list[dict[str, object]]:
    """The study's rows as a table has them: the fields of `flyte_ddp.scaling.study.Row`, with the device in a name."""
    rows = []
    for row in study.rows():
        values = dataclasses.asdict(row)
        values[f"{study.device_unit.lower()}_hours"] = values.pop("device_hours")
        values["kind"] = "projected" if values.pop("is_projected") else "measured"
        rows.append(values)
    return rows


def _checked(
    recipe: str,
    config: OptionalOverrides,
    world_sizes: list[int],
    learning_rates: list[float],
    target_loss: float,
    projected_world_sizes: list[int],
    cluster: ClusterInput,
) -> TrainingConfig:
    """The config that all runs share, but for their learning rates; ConfigError where one of them cannot be run."""
    from flyte_ddp.scaling.runner import validate_runs

    resolved = config_of(recipe, given(config))
    validate_study(resolved, world_sizes, projected_world_sizes, learning_rates, target_loss)
    validate_runs(recipe, resolved, world_sizes, cluster)
    return resolved


class _Watchers:
    """What people see of a study: each run on the terminal and in W&B, one group, and the report of them all."""

    def __init__(self, report: ScalingReport, storage: Storage, execution: Execution, directory: Path) -> None:
        self.report = report
        self.execution = execution
        self.directory = directory
        self.group = wandb_run_id(storage.url, execution)
        self.api_key = wandb_key()
        self.bar = ProgressBar()
        self.publisher = DeckPublisher(report)

    def make_listeners(self, job: Job, world_size: int) -> list[Listener]:
        name = f"{ranks(world_size)}, rate {job.config.learning_rate:g}"
        wandb = Wandb(
            project=os.environ.get("WANDB_PROJECT", WANDB_ENVIRONMENT["WANDB_PROJECT"]),
            entity=os.environ.get("WANDB_ENTITY"),
            run_id=f"{self.group}-{os.path.basename(job.checkpoints)}".replace(".", "-"),
            name=name,
            group=self.group,
            notes=self.execution.url,
            directory=str(self.directory),
            api_key=self.api_key,
            say=self.bar.write,
        )
        # The publisher is told last: it shows what the report has heard.
        return [self.bar, wandb, _IntoReport(self.report), self.publisher]

    def outputs(self, histories: list[str]) -> ScalingOutputs:
        """The task's outputs, with the way to them on the terminal."""
        import pandas

        study = self.report.study
        rows = build_table(study)
        table = pandas.DataFrame(rows)
        files = {name: self.directory / name for name in ("scaling.csv", "history.jsonl", "report.html")}
        table.to_csv(files["scaling.csv"], index=False)
        files["history.jsonl"].write_text("".join(histories))
        files["report.html"].write_text(self.report.render(), encoding="utf-8")
        for row in study.rows():
            self.bar.write(
                f"{ranks(row.world_size)}, rate {row.learning_rate:g}: {row.samples_per_second:,.0f} samples/s, "
                f"speed-up {row.speed_up:.2f}, efficiency {100 * row.efficiency:.0f} %"
                f"{' (projected)' if row.is_projected else ''}"
            )
        for check in study.checks:
            self.bar.write(
                f"time model at {ranks(check.world_size)}: {1e3 * check.predicted_seconds:.2f} ms a step predicted, "
                f"{1e3 * check.measured_seconds:.2f} ms measured, error {100 * check.error:+.1f} %"
            )
        for name, file in files.items():
            self.bar.write(f"{name.partition('.')[0]:<8} {file}")
        return ScalingOutputs(
            table=StructuredDataset(dataframe=table),
            csv=FlyteFile(str(files["scaling.csv"])),
            history=FlyteFile(str(files["history.jsonl"])),
            report=FlyteFile(str(files["report.html"])),
        )

    def __enter__(self) -> _Watchers:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.report.close(error)
        self.publisher.close(error)


class _IntoReport:
    """The listener that puts a run into the report when it has finished."""

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
