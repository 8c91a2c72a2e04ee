"""The run of a task that trains: its observers, its report, its trackers' keys, and its time limit.

A task opens a run with its report, trains inside it, and makes its outputs from the run. Whatever
happens inside, the report ends as finished, failed or interrupted.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from flyte_ddp.events import Listener, NodesAwaited, RunState
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.control.inside import show_waits
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import TimeLimit
from flyte_ddp.launch.run import Gang
from flyte_ddp.launch.run_observers import keep_first_start, keep_run_id
from flyte_ddp.observers.history import HistoryFile
from flyte_ddp.observers.metrics import MetricsServer, RunFigures, requested_port
from flyte_ddp.observers.progress_bar import ProgressBar
from flyte_ddp.observers.recorder import Recorder
from flyte_ddp.observers.reports.page import Page
from flyte_ddp.observers.reports.publisher import PagePublisher
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.trackers import make_tracker
from flyte_ddp.storage import Storage, redact_url
from flyte_ddp.task_run.execution import Execution
from flyte_ddp.task_run.files import HISTORY, TaskFiles
from flyte_ddp.task_run.process import launcher_log, tracker_keys


@dataclass
class WaitReporter:
    """Shows what the start of a cluster waits for: each time in the log, a new reason also as an
    event.
    """

    say: Callable[[str], None]
    history: HistoryFile
    page: Report
    publisher: PagePublisher
    _reason: str = ""

    def report(self, reason: str) -> None:
        self.say(reason)
        if reason != self._reason:
            self._reason = reason
            event = NodesAwaited(reason, at=time.time())
            self.history.handle(event)
            self.page.handle(event, RunState(awaited=event))
            self.publisher.handle(event)


@dataclass
class TaskRun:
    """The run of the current task."""

    report: Page
    execution: Execution
    files: TaskFiles
    storage: Storage  # place of the checkpoints
    name: str  # name of this attempt, unique in a namespace
    # Keys of W&B and MLflow, by their variables. The ranks' environment has none.
    keys: Mapping[str, str]
    tracking: tuple[str, ...]  # name and place of the tracker, see `make_tracker`
    publish: Callable[[str], None] | None = None  # function that shows HTML in Flyte's console
    opened_at: float = field(default_factory=time.time)
    bar: ProgressBar = field(default_factory=ProgressBar)

    def __post_init__(self) -> None:
        self.publisher = PagePublisher(self.report, self.publish)
        # functions that print or store the lines for people
        self.receivers: list[Callable[[str], None]] = [self.bar.write]
        self._metrics: MetricsServer | None = None
        port = requested_port()
        if port:
            self._metrics = MetricsServer(port)
        self._time_limit = TimeLimit(0, self.opened_at)

    def say(self, line: str) -> None:
        """Print a line for people, above the progress bar if there is one. Any thread may call
        this.
        """
        for receive in self.receivers:
            receive(line)

    def limit_time(self, max_hours: float) -> None:
        """End the task as SIGTERM does after `max_hours`; 0 means never. Raises ConfigError if
        earlier attempts have used up the time.
        """
        if max_hours:
            hint = f". Its checkpoints are in {redact_url(self.storage.url)}"
            begun_at = self.opened_at
            if self.execution.run_id:
                begun_at = keep_first_start(self.storage, self.execution.run_id, begun_at)
            self._time_limit = TimeLimit(max_hours, begun_at, hint)

    def run(
        self,
        program: Program,
        gang: Gang,
        data: Callable[[], str] | None = None,
        relay: Callable[[str], None] | None = None,
        labels: Mapping[str, str] = MappingProxyType({}),
        origin: Mapping[str, str] = MappingProxyType({}),
        results: str = "",
        **fields: Any,
    ) -> RunState:
        """Run the program of this task in `gang`, with all observers. Other arguments and errors
        are the same as in `driver.run`.

        Args:
            labels: labels of the figures for Prometheus.
            origin: fields of the card that MLflow gets, see `run_card`.
            results: directory or URL for the files that ranks submit.
            fields: further fields of `Job`; the checkpoints are by default at the task's own place.
        """
        report = self.report
        assert isinstance(report, Report)
        history_file = self.files.directory / HISTORY
        fields = {"checkpoints": self.storage.url, "run": self.execution.run_id, **fields}
        job = Job(program, launched_at=self.opened_at, **fields)
        writer = HistoryFile(history_file)
        waits = WaitReporter(self.say, writer, report, self.publisher)
        if not self.execution.is_local:
            self.say(f"to look into this run: flyte-ddp status {redact_url(job.checkpoints)}")
        show = show_waits(job, waits.report)
        with gang.open_place(program, self.name, show, job.checkpoints) as place:
            listeners: list[Listener] = [self.bar, writer]
            if self.tracking:
                history = self.files.url(HISTORY) or str(history_file)
                report.tracker = self.tracker(self.run_id(), origin=origin, history=history)
                listeners.append(report.tracker)
            listeners += [report, self.publisher, *self.figures(**labels)]
            try:
                return driver.run(
                    job, place, data, listeners, relay or self.say, results=results or None
                )
            except BaseException:
                self.files.keep_history(report)  # A failed attempt has no outputs.
                raise

    def run_id(self) -> str:
        """Return the id by which a tracker knows this run in all of its attempts."""
        return keep_run_id(self.storage, self.execution.run_id or f"run-{os.urandom(4).hex()}")

    def tracker(self, run_id: str, **options: Any) -> Recorder:
        """Return the tracker of a run. The `options` go to `make_tracker`."""
        own = {
            "is_local": self.execution.is_local,
            "notes": self.execution.url,
            "keys": self.keys,
            "say": self.say,
        }
        return make_tracker(
            self.tracking, run_id, self.files.directory, self.storage, **{**own, **options}
        )

    def figures(self, **labels: str) -> list[RunFigures]:
        """Return the listener that serves one more run of this task to Prometheus; none if no port
        was asked for.
        """
        if self._metrics is None:
            return []
        return [self._metrics.follow(self.execution.attempt, **labels, run=self.execution.run_id)]

    def close(self, error: BaseException | None) -> None:
        """Complete the report. Only the first call, and the first with an error, change it."""
        self._time_limit.cancel()
        if self._metrics is not None:
            self._metrics.close()
        if not self.report.closed_at or (error is not None and self.report.error is None):
            self.report.close(error)
        self.publisher.close(error)  # The task may have added to the report since the run's end.
        local = self.files.output_directory
        if error is not None and local:  # Otherwise the task saves the report with its outputs.
            self.report.write(local / "report.html")


@contextlib.contextmanager
def open_run(
    report: Page,
    execution: Execution,
    files: TaskFiles,
    *,
    name: str,
    checkpoints: str = "",
    secrets: Mapping[str, str] = MappingProxyType({}),
    hides_keys: bool = True,
    **options: Any,
) -> Iterator[TaskRun]:
    """Open the run of the current task.

    Args:
        name: beginning of the attempt's name if Flyte gives none.
        checkpoints: the user's URL; "" for the execution's own.
        secrets: keys of trackers that are not in the environment, by their variables.
        hides_keys: keep the keys out of the environment, which the ranks inherit.
        options: further fields of `TaskRun`.

    Raises:
        StorageUnavailable, StorageDenied: the place of the checkpoints cannot be used.
    """
    files.directory.mkdir(parents=True, exist_ok=True)
    attempt = execution.attempt_id or f"{name}-{os.urandom(4).hex()}"
    with tracker_keys(hides_keys) as keys:
        storage = Storage(checkpoints or execution.checkpoints)
        run = TaskRun(report, execution, files, storage, attempt, {**keys, **secrets}, **options)
        try:
            storage.check_access()  # The file with the W&B run's id comes first.
            with launcher_log(run.say):
                yield run
        except BaseException as error:
            reason = run._time_limit.convert_error(error)
            run.close(reason)
            if reason is not error:
                raise reason from None  # The text of `reason` includes the text of `error`.
            raise
        run.close(None)
