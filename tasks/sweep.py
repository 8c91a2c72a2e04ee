"""The tasks of a sweep: check all of its models at once, and train them side by side on one cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import flytekit
import fsspec
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.file import FlyteFile, PythonPickledFile
from flytekit.types.structured import StructuredDataset

from flyte_ddp.errors import ConfigError
from flyte_ddp.events import EpochFinished, Event, RunStarted
from flyte_ddp.launch.supervisor import print_line
from flyte_ddp.observers import figures
from flyte_ddp.observers.weights_and_biases import Wandb
from flyte_ddp.storage import Storage
from flyte_ddp.sweep.results import FINISHED, STOPPED_EARLY, TrialRun, build_table, find_best
from flyte_ddp.sweep.search import EarlyStopping, Trial, build_trials
from tasks.flyte_context import Execution, current_execution, share_storage_credentials
from tasks.inputs import ClusterInput, InputError, OptionalCluster, OptionalOverrides, TrainingOverrides, given
from tasks.prepare import PreparedData
from tasks.report import DeckPublisher
from tasks.resources import DRIVER_TASK, SMALL_TASK, WANDB_ENVIRONMENT
from tasks.sweep_report import SweepReport
from tasks.train import WATCHED, flyte_errors
from tasks.watchers import launchers_logs, wandb_key, wandb_run_id


class SweepOutputs(NamedTuple):
    """Outputs of a sweep. The best trial has the lowest loss on the held-out data after its last epoch."""

    results: StructuredDataset  # a row for every epoch of every trial, see `flyte_ddp.sweep.results.build_table`
    csv: FlyteFile  # the same as a CSV file
    best_config: TrainingOverrides  # of the best trial, in the form of --config
    best_accuracies: list[float]  # of the best trial after each epoch, in [0, 1]
    best_model_state: PythonPickledFile  # its state dict after the last epoch, on the CPU
    report: FlyteFile  # the HTML page that the Deck shows too


@task(**SMALL_TASK)
def check_sweep(
    recipe: str,
    config: OptionalOverrides,
    grid: dict,
    num_models: int,
    seed: int,
    stop_early: str,
    cluster: OptionalCluster,
) -> TrainingOverrides:
    """Check every model of the sweep before anything is prepared or started for the first; returns `config`."""
    from flyte_ddp.sweep.runner import check_trials

    try:
        EarlyStopping(stop_early)
        check_trials(recipe, build_trials(recipe, given(config), grid, num_models, seed), cluster or ClusterInput())
    except ConfigError as error:
        raise InputError(str(error)) from error
    return config or TrainingOverrides()


@task(**DRIVER_TASK, **WATCHED)
def train_sweep(
    recipe: str,
    config: TrainingOverrides,
    grid: dict,
    data: PreparedData,
    cluster: ClusterInput,
    num_models: int = 0,
    seed: int = 0,
    stop_early: str = "none",
    checkpoints: str = "",
) -> SweepOutputs:
    """Train one model for each configuration, each on a worker of a Dask cluster, and compare them.

    A retry of this task trains neither the models that are done already, nor again what the checkpoints of the others
    have.
    """
    from flyte_ddp.cluster.connect import open_cluster
    from flyte_ddp.errors import ClusterError, SweepFailed
    from flyte_ddp.sweep.runner import train_trials

    context = flytekit.current_context()
    share_storage_credentials()
    execution = current_execution(context)
    directory = Path(context.working_directory)
    directory.mkdir(parents=True, exist_ok=True)
    name = execution.attempt_id or f"{recipe.rpartition('.')[2]}-sweep-{os.urandom(4).hex()}"
    try:
        trials = build_trials(recipe, given(config), grid, num_models, seed)
        storage = Storage(checkpoints or execution.checkpoints)
        storage.check_access("checkpoints")
        data.download()
        with flyte_errors(), _Watchers(recipe, trials, storage, execution, directory) as watchers:
            with open_cluster(cluster, name) as client:
                train_trials(
                    recipe,
                    trials,
                    storage.url,
                    data.path,
                    client,
                    cluster,
                    stop_early=stop_early,
                    observers=[watchers.observe],
                    make_listeners=watchers.make_listeners,
                    run_name=name,
                )
    except ConfigError as error:
        raise InputError(str(error)) from error
    except ClusterError as error:
        raise FlyteRecoverableException(str(error)) from error
    except SweepFailed as error:
        raise (FlyteRecoverableException if error.may_succeed else InputError)(str(error)) from error
    return watchers.outputs()


class _Watchers:
    """What people see of a sweep: a line on the terminal for what happens to a model, the report, a group in W&B."""

    def __init__(
        self, recipe: str, trials: list[Trial], storage: Storage, execution: Execution, directory: Path
    ) -> None:
        self.num_models = len(trials)
        self.execution = execution
        self.directory = directory
        self.group = wandb_run_id(storage.url, execution)
        self.api_key = wandb_key()
        self.report = SweepReport(recipe)
        self.publisher = DeckPublisher(self.report)
        self.started: set[int] = set()
        self._said: set[bool] = set()
        self._saying = threading.Lock()

    def observe(self, run: TrialRun, event: Event | None) -> None:
        """Observer of the trials; see `flyte_ddp.sweep.runner.train_trials`."""
        number = run.trial.number
        if len(self.report.runs) < self.num_models:  # before it starts the first, a sweep tells of all
            self.report.runs.append(run)
        if isinstance(event, RunStarted):
            again = f" again, after epoch {len(run.epochs)}" if number in self.started or run.epochs else ""
            self.started.add(number)
            self._say(run, f"started{again}")
        elif event is None:
            self._say_end(run)
        if isinstance(event, EpochFinished):
            self.publisher.handle(event)

    def make_listeners(self, run: TrialRun) -> list[Wandb]:
        return [
            _ModelWandb(
                run,
                project=os.environ.get("WANDB_PROJECT", WANDB_ENVIRONMENT["WANDB_PROJECT"]),
                entity=os.environ.get("WANDB_ENTITY"),
                run_id=f"{self.group}-{run.key}",
                name=str(run.trial),
                group=self.group,
                notes=self.execution.url,
                directory=str(self.directory),
                api_key=self.api_key,
                config={"sweep": dict(run.trial.values)},
                say=self._say_of_wandb,
            )
        ]

    def outputs(self) -> SweepOutputs:
        """The task's outputs, with the way to them on the terminal."""
        best = find_best(self.report.runs)
        assert best is not None  # a sweep without one has failed
        state_file = self.directory / "best_model_state.pt"
        with fsspec.open(best.model_state_url, "rb") as source:
            state_file.write_bytes(source.read())
        report_file = self.directory / "report.html"
        report_file.write_text(self.report.render(), encoding="utf-8")
        csv_file = self.directory / "results.csv"
        table = build_table(self.report.runs)
        table.to_csv(csv_file, index=False)
        print_line(f"the best is {best.trial}: {_result(best)}")
        for name, file in (("its model state", state_file), ("results", csv_file), ("report", report_file)):
            print_line(f"{name:<16} {file}")
        return SweepOutputs(
            results=StructuredDataset(dataframe=table),
            csv=FlyteFile(str(csv_file)),
            best_config=TrainingOverrides(**best.trial.overrides),
            best_accuracies=[epoch.accuracy for epoch in best.epochs],
            best_model_state=PythonPickledFile(str(state_file)),
            report=FlyteFile(str(report_file)),
        )

    def __enter__(self) -> _Watchers:
        self._logging = _models_logs()
        self._logging.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._logging.__exit__(None, None, None)
        self.report.close(error)
        self.publisher.close(error)

    def _say(self, run: TrialRun, what: str) -> None:
        trial = str(run.trial).replace(f"trial {run.trial.number}", f"trial {run.trial.number}/{self.num_models}", 1)
        print_line(f"{trial} {what}")

    def _say_end(self, run: TrialRun) -> None:
        earlier = "" if run.trial.number in self.started else " in an earlier attempt"
        if run.status == FINISHED:
            self._say(run, f"finished{earlier}: {_result(run)}")
        elif run.status == STOPPED_EARLY:
            self._say(run, f"stopped early{earlier}, after epoch {len(run.epochs)}: {_result(run)}")
        elif run.error:
            self._say(run, f"failed: {run.error}")

    def _say_of_wandb(self, line: str) -> None:
        """Say the first line of W&B's, and the first of a failure: the other models' are like it."""
        with self._saying:
            is_failure = line.startswith("W&B failed")
            if is_failure not in self._said:
                self._said.add(is_failure)
                print_line(f"{line} (and so for all trials of group {self.group})")
                self.report.notes.append(f"W&B group {self.group}. Of its first run: {line}")


class _ModelWandb(Wandb):
    """Shows one model in W&B, where one that is stopped early has not failed."""

    def __init__(self, run: TrialRun, **identity: Any) -> None:
        super().__init__(**identity)
        self._model_run = run

    def close(self, error: BaseException | None) -> None:
        super().close(None if self._model_run.status == STOPPED_EARLY else error)


def _result(run: TrialRun) -> str:
    last = run.epochs[-1]
    return f"test loss {last.test_loss:.4f}, accuracy {figures.percent(last.accuracy)}, {run.elapsed[-1]:.1f} s"


def _models_logs() -> contextlib.AbstractContextManager[None]:
    """Show what the launchers log, a cluster that starts or a model that restarts, with the model it is about."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    return launchers_logs(handler)


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        thread = record.threadName or ""  # `train_trials` names the thread of a trial
        return f"[{thread}] {record.getMessage()}" if thread.startswith("trial ") else record.getMessage()
