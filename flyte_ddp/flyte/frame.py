"""The frame of every task that trains: its execution, its observers, W&B's key, and its errors.

A task opens a frame with its report, trains inside it, and returns its outputs from it. Whatever
happens inside, the report ends as finished, failed or interrupted, and an error leaves in the form
that Flyte expects.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import flytekit
from flytekit import Secret
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.errors import (
    RankFailure,
    TrainingStopped,
    log_failures,
)
from flyte_ddp.events import Listener, RunFinished, RunState
from flyte_ddp.flyte.deck import DeckPublisher
from flyte_ddp.flyte.failures import flyte_errors
from flyte_ddp.flyte.flyte_context import Execution, current_execution
from flyte_ddp.flyte.outputs import keep_values
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import TimeLimit
from flyte_ddp.observers.command_line import keep_first_start, keep_run_id, resume_command
from flyte_ddp.observers.history import HistoryFile
from flyte_ddp.observers.metrics import MetricsServer, RunFigures, requested_port
from flyte_ddp.observers.mlflow import KEY_VARIABLES as MLFLOW_VARIABLES
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.recorder import Recorder
from flyte_ddp.observers.reports.page import Page
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.reports.run_card import CARD_JSON, card_files
from flyte_ddp.observers.trackers import make_tracker
from flyte_ddp.storage import Storage, fetch_file, file_below, redact_url, write_file

HISTORY = "history.jsonl"
EXPORT = "export"  # the output's name, a directory
OUTPUTS = "outputs.json"  # the outputs that are no files, in the directory of the outputs
WANDB_SECRET = Secret(group="wandb", key="api_key")
MLFLOW_SECRET = Secret(group="mlflow", key="token")
# In a local run, and in a pod in which Flyte passes secrets as variables.
KEY_VARIABLES = (
    "WANDB_API_KEY",
    "_FSEC_WANDB_API_KEY",
    "_FSEC_MLFLOW_TOKEN",
    "MLFLOW_TOKEN",
    *MLFLOW_VARIABLES,
)


@dataclass
class Frame:
    report: Page
    execution: Execution
    directory: Path  # of the task's own files, in the pod
    storage: Storage  # of the checkpoints
    name: str  # of this attempt
    # of W&B and MLflow, by their variables; the ranks' environment has none
    keys: Mapping[str, str]
    # what records the runs, and where: see `open_frame`
    tracking: tuple[str, ...]
    opened_at: float  # seconds since the epoch
    output_directory: Path | None = None  # of a local run's outputs; None for the task's own
    bar: ProgressBar = field(default_factory=ProgressBar)

    def __post_init__(self) -> None:
        self.publisher = DeckPublisher(self.report)
        self.receivers: list[Callable[[str], None]] = [self.bar.write]  # of lines for people
        self._metrics = MetricsServer(port) if (port := requested_port()) else None
        self._time_limit = TimeLimit(0, self.opened_at)

    @property
    def is_local(self) -> bool:
        """True if the task runs in the user's own process and not in a pod of Flyte."""
        return not self.execution.run_id

    def say(self, line: str) -> None:
        """Print a line for people, above the progress bar if there is one. Any thread may call
        this.
        """
        for receive in self.receivers:
            receive(line)

    def limit_time(self, max_hours: float) -> None:
        """End the task as SIGTERM does after `max_hours`; 0: never. Raises ConfigError if earlier
        attempts took it.
        """
        if max_hours:
            hint = f". Its checkpoints are in {redact_url(self.storage.url)}"
            begun_at = self.opened_at
            if not self.is_local:
                begun_at = keep_first_start(self.storage, self.execution.run_id, begun_at)
            self._time_limit = TimeLimit(max_hours, begun_at, hint)

    def run(
        self,
        report: Report,
        program: Program,
        place: driver.Place,
        data: Callable[[], str] | None = None,
        relay: Callable[[str], None] | None = None,
        labels: Mapping[str, str] = MappingProxyType({}),
        earlier_failure: RankFailure | None = None,
        origin: Mapping[str, str] = MappingProxyType({}),
        checkpoints: str | None = None,
        is_kept: bool = True,
        results: str = "",
    ) -> RunState:
        """Run the one program of this task, shown by all observers. Arguments and errors as of
        `driver.run`.

        Args:
            report: of the frame.
            labels: of the figures for Prometheus.
            origin: see `run_card`; for the card that MLflow gets.
            checkpoints: their URL; "" keeps none; by default the frame's.
            is_kept: see `Job`.
            results: directory or URL for the files that ranks submit.
        """
        listeners: list[Listener] = [self.bar, HistoryFile(self.directory / HISTORY)]
        if self.tracking:
            history = self.output_url(HISTORY) or str(self.directory / HISTORY)
            report.tracker = self.tracker(self.run_id(), origin=origin, history=history)
            listeners.append(report.tracker)
        listeners += [report, self.publisher, *self.figures(**labels)]
        url = self.storage.url if checkpoints is None else checkpoints
        job = Job(program, url, self.opened_at, run=self.execution.run_id, is_kept=is_kept)
        try:
            return driver.run(
                job,
                place,
                data,
                listeners,
                relay or self.say,
                earlier_failure=earlier_failure,
                results=results or None,
            )
        except BaseException:
            self.keep_history(report)  # an attempt that fails has no outputs
            raise

    def run_id(self) -> str:
        """Return the id by which a tracker knows this run in all of its attempts."""
        return keep_run_id(self.storage, self.execution.run_id or f"run-{os.urandom(4).hex()}")

    def tracker(self, run_id: str, **options: Any) -> Recorder:
        """Return the tracker of a run. The `options` are those of `make_tracker`."""
        own = {"is_local": self.is_local, "notes": self.execution.url, "keys": self.keys}
        options = {**own, "say": self.say, **options}
        return make_tracker(self.tracking, run_id, self.directory, self.storage, **options)

    def figures(self, **labels: str) -> list[RunFigures]:
        """Return the listener that serves one more run of this task to Prometheus; none if no port
        was asked for.
        """
        if self._metrics is None:
            return []
        return [self._metrics.follow(self.execution.attempt, **labels, run=self.execution.run_id)]

    def output(self, name: str) -> FlyteFile:
        """Return file `name` of the task's directory as an output, in a pod with a URL that is
        known already.
        """
        with log_failures(name):
            if self.output_directory:
                return FlyteFile(shutil.copy(self.directory / name, self.output_directory / name))
        return FlyteFile(str(self.directory / name), remote_path=self.output_url(name))

    def model_state(self, name: str, url: str) -> PythonPickledFile:
        """Return the state dict at `url`, as `output`."""
        file = (self.output_directory or self.directory) / name
        fetch_file(url, file)
        return PythonPickledFile(str(file), remote_path=self.output_url(name))

    def exported(self, finished: RunFinished, card: Mapping[str, Any]) -> FlyteDirectory:
        """Return the files that other programs load, with the run card, as `output`."""
        directory = (self.output_directory or self.directory) / EXPORT
        # the files of the run before, with the same --output
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            card_before = json.loads((directory / CARD_JSON).read_text(encoding="utf-8"))
            for name in card_before["model"]["files"]:
                file_below(directory, name, CARD_JSON).unlink()
        directory.mkdir(parents=True, exist_ok=True)  # if nothing was exported
        with log_failures(EXPORT):
            for name in finished.exported:
                file = file_below(directory, name, EXPORT)
                file.parent.mkdir(parents=True, exist_ok=True)
                fetch_file(f"{finished.export_url}/{name}", file)
        with log_failures(CARD_JSON):
            for name, contents in card_files(card).items():
                (directory / name).write_bytes(contents)
        if finished.not_exported:
            self.say(f"not exported: {finished.not_exported}")
        return FlyteDirectory(str(directory), remote_directory=self.output_url(EXPORT))

    def saved_report(self) -> FlyteFile:
        """Complete the report, write it to a file and return it, as `output`."""
        self.report.close(None)
        self.report.write(self.directory / "report.html")
        return self.output("report.html")

    def keep_history(self, report: Report) -> None:
        """Put the history where the task's outputs are, and name it in the report: for a task that
        does not return it.

        Does not raise: the run has ended, and the task's own outputs are what counts.
        """
        file = self.directory / HISTORY
        if file.is_file():
            with log_failures("history"):
                if url := self.output_url(HISTORY):
                    write_file(url, file.read_bytes())
                report.outputs["history"] = url or str(file)

    def say_outputs(self, outputs: Any) -> None:
        """Print where the files among the outputs are: their URLs in a pod, their paths in a local
        run. Keep the others beside them.
        """
        keep_values(self.output_directory, OUTPUTS, outputs)
        for name, file in outputs._asdict().items():
            if isinstance(file, (FlyteFile, FlyteDirectory)):
                url = getattr(file, "remote_directory", None) or getattr(file, "remote_path", None)
                place = url or str(file.path).removeprefix(f"{os.getcwd()}/")
                self.say(f"{name.replace('_', ' '):<20}{place}")
        if not self.is_local:
            page = self.execution.url or "Flyte's console"
            self.say(f'the report is also in {page}: click this task, then "Flyte Deck"')

    def say_how_to_resume(self, stopped: TrainingStopped) -> None:
        """Print how a local run has stopped, and the command of `pyflyte run` that resumes it."""
        command = click.get_current_context(silent=True)
        if stopped.reason == signal.SIGINT.name:  # of which click prints nothing but "Aborted"
            self.say(str(stopped))
        if command is not None and "checkpoints" in command.params:
            self.say(
                "to resume: "
                f"{resume_command('' if command.params['checkpoints'] else self.storage.url)}"
            )

    def close(self, error: BaseException | None) -> None:
        """Complete the report. Only the first call, and the first with an error, changes it."""
        self._time_limit.cancel()
        if self._metrics is not None:
            self._metrics.close()
        if not self.report.closed_at or (error is not None and self.report.error is None):
            self.report.close(error)
        self.publisher.close(error)  # with what the task has added since the run's end
        if error is not None and self.output_directory:  # else the task saves it with its outputs
            self.report.write(self.output_directory / "report.html")

    def output_url(self, name: str) -> str | None:
        """Return the URL that an output will have, in a pod; None in a local run."""
        if self.is_local:
            return None
        return f"{flytekit.current_context().raw_output_prefix.rstrip('/')}/{name}"


@contextlib.contextmanager
def open_frame(
    report: Page,
    name: str,
    checkpoints: str = "",
    tracking: tuple[str, ...] = (),
    hides_key: bool = True,
    output_directory: Path | None = None,
) -> Iterator[Frame]:
    """Open the frame of the current task.

    Args:
        name: of the attempt in a local run, where Flyte gives none.
        checkpoints: URL that the user gave; "" for the execution's own.
        tracking: ("wandb", project), ("mlflow", server, experiment) or ("tensorboard", directory
            or URL, "" for one beside the checkpoints); empty for runs that none of them records.
        hides_key: keep the keys of W&B and MLflow out of the environment, which the ranks inherit.
        output_directory: of a local run's outputs; None leaves them in the task's own.

    Raises:
        UserError, RecoverableError, TaskFailed, KeyboardInterrupt: see `flyte_errors`.
    """
    opened_at = time.time()
    context = flytekit.current_context()
    execution = current_execution()
    directory = Path(context.working_directory)
    directory.mkdir(parents=True, exist_ok=True)
    attempt = execution.attempt_id or f"{name.rpartition('.')[2]}-{os.urandom(4).hex()}"
    with flyte_errors(), _keys(hides_key) as keys:
        storage = Storage(checkpoints or execution.checkpoints)
        frame = Frame(
            report,
            execution,
            directory,
            storage,
            attempt,
            keys,
            tracking,
            opened_at,
            output_directory,
        )
        try:
            storage.check_access()  # the W&B run's id is the first file there
            with _launcher_log(frame.say):
                yield frame
        except BaseException as error:
            reason = frame._time_limit.explain(error)
            frame.close(reason)
            if isinstance(reason, TrainingStopped) and frame.is_local:
                frame.say_how_to_resume(reason)
            if reason is not error:
                raise reason from None  # it has the text of `error`
            raise
        frame.close(None)


@contextlib.contextmanager
def _keys(hides: bool) -> Iterator[dict[str, str]]:
    """Give the keys of W&B and MLflow by their variables, and keep them out of the environment for
    the block.
    """
    secrets = flytekit.current_context().secrets
    keys = {
        name: os.environ[name]
        for name in ("WANDB_API_KEY", *MLFLOW_VARIABLES)
        if name in os.environ
    }
    for name, secret in (("WANDB_API_KEY", WANDB_SECRET), ("MLFLOW_TRACKING_TOKEN", MLFLOW_SECRET)):
        with contextlib.suppress(ValueError):  # Flyte has no such secret
            keys[name] = secrets.get(secret.group, secret.key)
    removed = {name: os.environ.pop(name) for name in KEY_VARIABLES if hides and name in os.environ}
    try:
        yield keys
    finally:
        os.environ.update(removed)


@contextlib.contextmanager
def _launcher_log(say: Callable[[str], None]) -> Iterator[None]:
    """Pass the launchers' log records, such as of a restart, to `say` alone for the length of the
    block.
    """
    logger = logging.getLogger("flyte_ddp")
    handler = _LineHandler(say)
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


class _LineHandler(logging.Handler):
    """Prints each record as a line. In a sweep it begins with the trial, whose thread is named
    after it.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        thread = record.threadName or ""
        try:
            line = self.format(record)
            self._say(f"[{thread}] {line}" if thread.startswith("trial ") else line)
        except Exception:
            self.handleError(record)
