"""Everything that a person sees of a run, wherever its ranks are, and what is left of it when it has ended."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import flytekit
import fsspec
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp import events
from flyte_ddp.launch.spawn import Result
from flyte_ddp.observers.history import HistoryFile
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.weights_and_biases import Wandb
from flyte_ddp.rank.job import Job
from flyte_ddp.storage import Storage
from tasks.flyte_context import Execution
from tasks.outputs import TrainingOutputs
from tasks.report import DeckPublisher, Report
from tasks.resources import WANDB_ENVIRONMENT, WANDB_SECRET

RUN_ID = "wandb-run-id"  # beside the checkpoints, so that whoever goes on from them continues the same W&B run


class Watchers:
    """The listeners of one run. Their files lie below `directory`, a task's own."""

    def __init__(self, job: Job, execution: Execution, directory: Path, model_artifact: str) -> None:
        self.directory = directory
        self.bar = ProgressBar()
        self.report = Report()
        self.wandb = Wandb(
            project=os.environ.get("WANDB_PROJECT", WANDB_ENVIRONMENT["WANDB_PROJECT"]),
            entity=os.environ.get("WANDB_ENTITY"),
            run_id=wandb_run_id(job.checkpoints, execution),
            notes=execution.url,
            directory=str(directory),
            api_key=wandb_key(),
            model_artifact=model_artifact,
            say=self.bar.write,
        )
        self.history_file = directory / "history.jsonl"
        self.listeners: list[events.Listener] = [
            self.bar,
            HistoryFile(self.history_file),
            self.wandb,
            self.report,
            _Link(self.wandb, self.report),
            DeckPublisher(self.report),
        ]

    def outputs(self, result: Result) -> TrainingOutputs:
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

    def saying_what_is_logged(self) -> contextlib.AbstractContextManager[None]:
        """Show what the launchers log (a cluster that starts, a gang that restarts) above the bar, not through it."""
        return launchers_logs(LineHandler(self.bar.write))


@contextlib.contextmanager
def launchers_logs(handler: logging.Handler) -> Iterator[None]:
    """Give what the launchers log to `handler`, and to nobody else, for the length of the block."""
    logger = logging.getLogger("flyte_ddp")
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


class LineHandler(logging.Handler):
    """Says every record, as a line."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self.say = say

    def emit(self, record: logging.LogRecord) -> None:
        self.say(self.format(record))


class _Link:
    """Puts the W&B run's address into the report, once W&B has told it."""

    def __init__(self, wandb: Wandb, report: Report) -> None:
        self.wandb = wandb
        self.report = report

    def handle(self, event: events.Event) -> None:
        if self.wandb.url:
            self.report.links["W&B run"] = self.wandb.url

    def close(self, error: BaseException | None) -> None:
        pass


def wandb_run_id(checkpoints: str, execution: Execution) -> str:
    """The id of the W&B run: the one that an earlier attempt left beside its checkpoints, else a new one."""
    storage = Storage(checkpoints)
    try:
        return storage.read(RUN_ID).decode()
    except FileNotFoundError:
        run_id = execution.run_id or f"run-{os.urandom(4).hex()}"
        storage.write(RUN_ID, run_id.encode())
        return run_id


def wandb_key() -> str | None:
    """W&B's key from the Flyte secret, which in a local run is WANDB_API_KEY; None where there is none."""
    try:
        return flytekit.current_context().secrets.get(WANDB_SECRET.group, WANDB_SECRET.key)
    except ValueError:
        return None
