"""The frame of every task that trains: its execution, its observers, W&B's key, and its errors.

A task opens a frame with its report, trains inside it, and returns its outputs from it. Whatever happens inside, the
report ends as finished, failed or interrupted, and an error leaves in the form that Flyte expects.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flytekit
from flytekit.types.file import FlyteFile, PythonPickledFile

from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.flytekit_plugin.deck import DeckPublisher
from flyte_ddp.flytekit_plugin.failures import flyte_errors
from flyte_ddp.flytekit_plugin.flyte_context import Execution, current_execution, share_storage_credentials
from flyte_ddp.observers.launcher_log import launcher_log
from flyte_ddp.observers.metrics import MetricsServer, RunFigures, requested_port
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.reports.page import Page
from flyte_ddp.observers.weights_and_biases import Wandb
from flyte_ddp.storage import Storage, fetch_file, redact_url
from tasks.cluster import check_urls
from tasks.resources import SECRETS, WANDB_ENVIRONMENT, WANDB_SECRET

# Arguments of @task for a task with a frame.
FRAMED: dict[str, Any] = {
    "secret_requests": SECRETS,
    "enable_deck": True,
    "deck_fields": (),  # the report alone: flytekit's own tabs repeat the source and the inputs
}
RUN_ID = "wandb-run-id"  # a file beside the checkpoints, so that every attempt continues the same W&B run
FIRST_START = "first-start.json"  # likewise, so that `max_hours` counts all attempts
# In a local run, and in a pod in which Flyte passes secrets as variables.
KEY_VARIABLES = ("WANDB_API_KEY", "_FSEC_WANDB_API_KEY")


@dataclass
class Frame:
    """An open frame. `report` and `publisher` are listeners, to be given to a launcher in this order."""

    report: Page
    execution: Execution
    directory: Path  # of the task's own files, in the pod
    storage: Storage  # of the checkpoints
    name: str  # of this attempt
    wandb_key: str | None
    opened_at: float  # seconds since the epoch
    bar: ProgressBar = field(default_factory=ProgressBar)

    def __post_init__(self) -> None:
        self.publisher = DeckPublisher(self.report)
        self._metrics = MetricsServer(port) if (port := requested_port()) else None
        self._time_limit: threading.Timer | None = None
        self._time_is_up = ""  # the beginning of the error when the limit is reached

    @property
    def is_local(self) -> bool:
        """True if the task runs in the user's own process and not in a pod of Flyte."""
        return not self.execution.run_id

    def say(self, line: str) -> None:
        """Print a line for people, above the progress bar if there is one. Any thread may call this."""
        self.bar.write(line)

    def limit_time(self, max_hours: float) -> None:
        """End the task `max_hours` after the start of its first attempt as SIGTERM does; 0 is no limit.

        Raises:
            ConfigError: earlier attempts have taken that long.
        """
        if not max_hours:
            return
        message = f"max_hours: the run has taken {max_hours:g} h, all attempts together, which is its limit"
        remaining = self._first_start() + 3600 * max_hours - time.time()
        if remaining <= 0:
            raise ConfigError(f"{message}. Its checkpoints are in {redact_url(self.storage.url)}")

        def stop() -> None:
            self._time_is_up = message
            os.kill(os.getpid(), signal.SIGTERM)

        self._time_limit = threading.Timer(remaining, stop)
        self._time_limit.daemon = True
        self._time_limit.start()

    def _first_start(self) -> float:
        """Return when the first attempt of this execution started, in seconds since the epoch."""
        if self.is_local:
            return self.opened_at
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            noted = json.loads(self.storage.read(FIRST_START))
            if noted["run"] == self.execution.run_id:
                return float(noted["time"])
        note = {"run": self.execution.run_id, "time": self.opened_at}
        self.storage.write(FIRST_START, json.dumps(note).encode())
        return self.opened_at

    def explain(self, error: BaseException) -> BaseException:
        """Return `error`, or a ConfigError with its text if the time limit caused it: a retry would end likewise."""
        if not self._time_is_up or not isinstance(error, (TrainingStopped, SystemExit)):
            return error
        rest = (
            str(error).removeprefix(f"{error.reason}: ")
            if isinstance(error, TrainingStopped)
            else "nothing was running yet"
        )
        return ConfigError(f"{self._time_is_up}: {rest}")

    def wandb_run_id(self) -> str:
        """Return the id of the W&B run: the one that an earlier attempt wrote beside its checkpoints, or a new one."""
        try:
            return self.storage.read(RUN_ID).decode()
        except FileNotFoundError:
            run_id = self.execution.run_id or f"run-{os.urandom(4).hex()}"
            self.storage.write(RUN_ID, run_id.encode())
            return run_id

    def wandb(self, run_id: str, kind: Callable[..., Wandb] = Wandb, **options: Any) -> Wandb:
        """Return a W&B observer with the settings that all runs of this task share."""
        settings = {
            "project": os.environ.get("WANDB_PROJECT", WANDB_ENVIRONMENT["WANDB_PROJECT"]),
            "entity": os.environ.get("WANDB_ENTITY"),
            "run_id": run_id,
            "notes": self.execution.url,
            "directory": str(self.directory),
            "api_key": self.wandb_key,
            # A pod's directory is lost with the pod. A local run's stays where it is.
            "offline_url": "" if self.is_local else self.storage.join("wandb"),
            "say": self.say,
        }
        return kind(**{**settings, **options})

    def figures(self, **labels: str) -> list[RunFigures]:
        """Return the listener that serves one more run of this task to Prometheus; none if no port was asked for."""
        if self._metrics is None:
            return []
        return [self._metrics.follow(self.execution.attempt, **labels, run=self.execution.run_id)]

    def output(self, name: str) -> FlyteFile:
        """Return file `name` in the task's directory as an output, in a pod with a URL that is known already."""
        return FlyteFile(str(self.directory / name), remote_path=self._output_url(name))

    def model_state(self, name: str, url: str) -> PythonPickledFile:
        """Return the state dict at `url`, as `output`."""
        fetch_file(url, self.directory / name)
        return PythonPickledFile(str(self.directory / name), remote_path=self._output_url(name))

    def saved_report(self) -> FlyteFile:
        """Write the report to a file and return it, as `output`."""
        (self.directory / "report.html").write_text(self.report.render(), encoding="utf-8")
        return self.output("report.html")

    def say_outputs(self, **outputs: FlyteFile) -> None:
        """Print where the outputs are: their URLs in a pod, their paths in a local run."""
        for name, file in outputs.items():
            self.say(f"{name.replace('_', ' '):<20}{file.remote_path or file.path}")
        if not self.is_local:
            page = self.execution.url or "Flyte's console"
            self.say(f'the report is also in {page}: click this task, then "Flyte Deck"')

    def close(self, error: BaseException | None) -> None:
        """Complete the report. Only the first call, and the first with an error, changes it."""
        if self._time_limit is not None:
            self._time_limit.cancel()
        if self._metrics is not None:
            self._metrics.close()
        if not self.report.closed_at or (error is not None and self.report.error is None):
            self.report.close(error)
            self.publisher.close(error)

    def _output_url(self, name: str) -> str | None:
        if self.is_local:
            return None
        return f"{flytekit.current_context().raw_output_prefix.rstrip('/')}/{name}"


@contextlib.contextmanager
def open_frame(report: Page, recipe: str, checkpoints: str, purpose: str = "") -> Iterator[Frame]:
    """Open the frame of the current task.

    Args:
        checkpoints: URL that the user gave; "" for the execution's own.
        purpose: part of the attempt's name in a local run, where Flyte gives none.

    Raises:
        UserError, RecoverableError, TaskFailed, KeyboardInterrupt: see `flyte_errors`.
    """
    opened_at = time.time()
    context = flytekit.current_context()
    share_storage_credentials()
    execution = current_execution(context)
    directory = Path(context.working_directory)
    directory.mkdir(parents=True, exist_ok=True)
    local_name = "-".join([recipe.rpartition(".")[2], *([purpose] if purpose else []), os.urandom(4).hex()])
    with flyte_errors(), _wandb_key() as key:
        check_urls(checkpoints=checkpoints)
        storage = Storage(checkpoints or execution.checkpoints)
        frame = Frame(report, execution, directory, storage, execution.attempt_id or local_name, key, opened_at)
        try:
            storage.check_access("checkpoints")  # the W&B run's id is the first file there
            with launcher_log(frame.say):
                yield frame
        except BaseException as error:
            reason = frame.explain(error)
            frame.close(reason)
            if reason is not error:
                raise reason from None  # it has the text of `error`
            raise
        frame.close(None)


@contextlib.contextmanager
def _wandb_key() -> Iterator[str | None]:
    """Give W&B's key, and keep it out of the environment for the block, because the ranks inherit that."""
    try:
        key = flytekit.current_context().secrets.get(WANDB_SECRET.group, WANDB_SECRET.key)
    except ValueError:
        key = os.environ.get("WANDB_API_KEY")
    removed = {name: os.environ.pop(name) for name in KEY_VARIABLES if name in os.environ}
    try:
        yield key
    finally:
        os.environ.update(removed)
