"""The task that trains on one node: the spawn launcher with Flyte's context around it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import flytekit
from flytekit import task
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.file import FlyteFile, PythonPickledFile

from tasks.execution import Execution, current_execution, share_storage_credentials, wandb_link
from tasks.inputs import InputError, TrainingOverrides, given
from tasks.outputs import TrainingOutputs
from tasks.prepare import PreparedData
from tasks.report import DeckPublisher, Report
from tasks.resources import SECRETS, TRAINING_CACHE, TRAINING_TASK, WANDB_ENVIRONMENT, WANDB_SECRET
from training import events
from training.config import ConfigError, resolve
from training.launch import spawn
from training.launch.rank import Job
from training.recipes import get_recipe
from training.storage import Storage
from training.tracking import History, ProgressBar, Wandb

RUN_ID = "wandb-run-id"  # beside the checkpoints, so that whoever goes on from them continues the same W&B run

# What an attempt can die of that the next one may not: a killed or stuck rank, or storage that was out of reach.
RECOVERABLE_KINDS = ("signal", "exit", "stall")
RECOVERABLE_CAUSES = ("CheckpointError:",)
# What only a rank can find out, and only the user can mend: one line says it, and no traceback helps.
USER_CAUSES = ("ConfigError:", "DataError:", "NonFiniteLoss:")


@task(
    **TRAINING_TASK,
    cache=TRAINING_CACHE,
    secret_requests=SECRETS,
    environment=WANDB_ENVIRONMENT,
    enable_deck=True,
    deck_fields=(),
)
@wandb_link
def train_on_one_node(
    recipe: str,
    config: TrainingOverrides,
    data: PreparedData,
    num_processes: int = 0,
    checkpoints: str = "",
    model_artifact: str = "",
) -> TrainingOutputs:
    """Train `recipe` with one DistributedDataParallel process per GPU, or `num_processes` on a machine without."""
    launched_at = time.time()
    context = flytekit.current_context()
    share_storage_credentials()
    execution = current_execution(context)
    directory = Path(context.working_directory)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        resolved = resolve(get_recipe(recipe).defaults, given(config))
        job = Job(recipe, resolved, checkpoints or execution.checkpoints, launched_at)
        spawn.check(job, num_processes or spawn.default_num_processes())
        watchers = Watchers(job, execution, directory, model_artifact)
        with flyte_errors():
            result = spawn.train(
                job,
                data=lambda: data.download() or data.path,
                num_processes=num_processes,
                listeners=watchers.listeners,
                relay=watchers.bar.write,
            )
    except ConfigError as error:
        raise InputError(str(error)) from error
    return watchers.outputs(result)


class Watchers:
    """Everything that a person sees of a run, wherever its ranks are."""

    def __init__(self, job: Job, execution: Execution, directory: Path, model_artifact: str) -> None:
        self.directory = directory
        self.bar = ProgressBar()
        self.report = Report()
        self.wandb = Wandb(
            project=os.environ.get("WANDB_PROJECT", WANDB_ENVIRONMENT["WANDB_PROJECT"]),
            entity=os.environ.get("WANDB_ENTITY"),
            run_id=_run_id(job.checkpoints, execution),
            notes=execution.url,
            directory=str(directory),
            api_key=_wandb_key(),
            log_model=bool(model_artifact),
        )
        self.history_file = directory / "history.jsonl"
        self.listeners: list[events.Listener] = [
            self.bar,
            History(self.history_file),
            self.wandb,
            self.report,
            DeckPublisher(self.report),
        ]

    def outputs(self, result: spawn.Result) -> TrainingOutputs:
        """The task's outputs, with the way to them on the terminal."""
        state_file = self.directory / "model_state.pt"
        with fsspec.open(result.finished.model_state_url, "rb") as source:
            state_file.write_bytes(source.read())
        report_file = self.directory / "report.html"
        report_file.write_text(self.report.render(), encoding="utf-8")
        accuracies = [epoch.accuracy for epoch in result.epochs]
        self.bar.write("accuracy per epoch  " + "  ".join(f"{100 * accuracy:.2f} %" for accuracy in accuracies))
        self.bar.write(f"model state         {state_file}")
        self.bar.write(f"report              {report_file}")
        return TrainingOutputs(
            epoch_accuracies=accuracies,
            model_state=PythonPickledFile(str(state_file)),
            report=FlyteFile(str(report_file)),
            history=FlyteFile(str(self.history_file)),
        )


@contextlib.contextmanager
def flyte_errors() -> Iterator[None]:
    """Tell Flyte which failures are worth another attempt: one goes on from the last checkpoint."""
    try:
        yield
    except spawn.TrainingStopped as error:
        if str(error).startswith("SIGINT"):
            raise KeyboardInterrupt(str(error)) from error
        raise FlyteRecoverableException(str(error)) from error
    except spawn.RankFailure as error:
        if error.cause.startswith(USER_CAUSES):
            raise InputError(error.cause.partition(": ")[2]) from error
        if error.kind in RECOVERABLE_KINDS or error.cause.startswith(RECOVERABLE_CAUSES):
            raise FlyteRecoverableException(str(error)) from error
        raise


def _run_id(checkpoints: str, execution: Execution) -> str:
    """The id of the W&B run: the one that an earlier attempt left beside its checkpoints, else a new one."""
    storage = Storage(checkpoints)
    try:
        return storage.read(RUN_ID).decode()
    except FileNotFoundError:
        run_id = execution.run_id or f"run-{os.urandom(4).hex()}"
        storage.write(RUN_ID, run_id.encode())
        return run_id


def _wandb_key() -> str | None:
    """W&B's key from the Flyte secret, which in a local run is WANDB_API_KEY; None where there is none."""
    try:
        return flytekit.current_context().secrets.get(WANDB_SECRET.group, WANDB_SECRET.key)
    except ValueError:
        return None
