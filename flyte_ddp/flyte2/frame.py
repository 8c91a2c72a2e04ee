"""The frame of every task of Flyte 2 that trains: its thread, its place, its observers, its errors.

The SDK calls a function beside the main thread, where no signal arrives. A plugin's task is
executed on it: so each task is of a plugin here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

import flyte.errors
import flyte.report
from flyte.extend import AsyncFunctionTaskTemplate, TaskPluginRegistry

from flyte_ddp.cluster.admission import check_allowed
from flyte_ddp.cluster.config import ClusterConfig, cluster_config
from flyte_ddp.cluster.kubernetes.api import own_namespace
from flyte_ddp.config.source_code import extend_path, find_project
from flyte_ddp.errors import ConfigError, TrainingStopped, log_failures
from flyte_ddp.events import Listener
from flyte_ddp.flyte.origin import describe_origin
from flyte_ddp.flyte.outcome import Retry, judge_failure
from flyte_ddp.flyte.settings import SETTINGS, check_settings
from flyte_ddp.launch.protocol.signals import TimeLimit
from flyte_ddp.observers.command_line import keep_first_start, keep_run_id
from flyte_ddp.observers.history import HistoryFile
from flyte_ddp.observers.mlflow import KEY_VARIABLES
from flyte_ddp.observers.reports.page import Page
from flyte_ddp.observers.reports.publisher import PagePublisher
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.trackers import make_tracker
from flyte_ddp.storage import (
    Storage,
    check_places,
    limit_urls,
    redact_errors,
    storage_environment,
    write_file,
)

HISTORY = "history.jsonl"
P = ParamSpec("P")
T = TypeVar("T")
KEYS = ("WANDB_API_KEY", *KEY_VARIABLES)
# exceptions of the SDK that a function raises for another attempt
RETRIED = ("RuntimeSystemError", "RuntimeUnknownError", "RuntimeUserError")


@dataclass(frozen=True)
class OnMainThread:
    """The plugin of tasks that call a function once, on the main thread."""


@dataclass(kw_only=True)
class MainThreadTask(AsyncFunctionTaskTemplate):  # type: ignore[misc]
    """The task of `OnMainThread`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if inspect.iscoroutinefunction(self.func):
            raise ConfigError(
                f"{self.name}: expected a function that is not async, got one: it runs on the main "
                "thread"
            )

    async def execute(self, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return self.call(*args, **kwargs)
        return await asyncio.to_thread(self.call, *args, **kwargs)  # in a local run

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises errors as `flyte_errors`."""
        with flyte_errors():
            return self.func(*args, **kwargs)


TaskPluginRegistry.register(OnMainThread, MainThreadTask)


@contextlib.contextmanager
def flyte_errors() -> Iterator[None]:
    """Turn the library's errors into those of Flyte 2. Others pass unchanged.

    A preempted pod ends without an error: Flyte counts its end as the system's, and makes it anew
    within the same attempt. An error file of it would be read again after the success of the next.

    Raises:
        NonRecoverableError: another attempt would fail in the same way.
        RuntimeUserError: another attempt may succeed.
    """
    try:
        with redact_errors():
            if find_project():
                check_settings()
            extend_path()
            yield
    except Exception as error:
        is_preempted = isinstance(error, TrainingStopped) and error.reason == signal.SIGTERM.name
        if is_preempted and not is_local():
            sys.stdout.write(f"{error}\n")
            sys.stdout.flush()
            os._exit(128 + signal.SIGTERM)
        outcome = judge_failure(error, *RETRIED)
        if outcome is None:
            raise
        if outcome.kind is Retry.MAY_SUCCEED:
            translated = flyte.errors.RuntimeUserError(type(error).__name__, outcome.text)
        else:
            translated = flyte.errors.NonRecoverableError(outcome.text, type(error).__name__)
    else:
        return
    raise translated from None


def is_local() -> bool:
    """Return whether the current task runs on the user's machine. Raises ConfigError outside of
    tasks.
    """
    context = flyte.ctx()
    if not context:
        raise ConfigError("task: expected a call in a task of Flyte 2, got one outside of any")
    return bool(context.mode == "local")


def limited(function: Callable[P, T]) -> Callable[P, T]:
    """Let a call of `function` open what `limited_urls` does, by the settings."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with limited_urls(SETTINGS.allowed.urls, SETTINGS.tensorboard_logdir):
            return function(*args, **kwargs)

    return call


def limited_urls(allowed: Sequence[str], *own: str) -> contextlib.AbstractContextManager[None]:
    """Let the block, and the ranks that it starts, open the action's own places and allowed ones
    alone. A local run may open any.
    """
    if is_local():
        return contextlib.nullcontext()
    return limit_urls(allowed, [flyte.ctx().run_base_dir, default_champions(), *own])


def default_champions() -> str:
    """Return a place at the bucket's top: a lifecycle rule for outputs must not delete the model in
    use.
    """
    action, parts = flyte.ctx().action, urlsplit(flyte.ctx().run_base_dir)
    return f"{parts.scheme}://{parts.netloc}/champions/{action.project}/{action.domain}"


def project_tracking() -> tuple[str, ...]:
    """Return what records the runs of the project's recipes; nothing without a project."""
    return SETTINGS.tracking_place if find_project() else ()


def run_id() -> str:
    """Return the name that all attempts of the current action share, and no other action."""
    action = flyte.ctx().action
    return f"{action.run_name}-{action.name}"


def current_execution() -> str:
    """Return the name of the current action for records that outlive it; "" in a local run."""
    return "" if is_local() else run_id()


@dataclass
class Frame:
    run_id: str  # the same for all attempts: a retry takes a killed pod's place over at once
    storage: Storage  # of the checkpoints, which all attempts of the action share
    directory: Path  # of the pod's own files
    publisher: PagePublisher
    listeners: list[Listener]

    def __post_init__(self) -> None:
        # names a cluster: that of a killed pod of the same attempt may not be gone yet
        self.pod_id = f"{self.run_id}-{os.urandom(4).hex()}"

    @property
    def outputs(self) -> str:
        return self.storage.join("outputs")

    def upload(self, name: str) -> str:
        """Copy a file of the directory to where the outputs are; return its URL."""
        write_file(f"{self.outputs}/{name}", (self.directory / name).read_bytes(), "outputs")
        return f"{self.outputs}/{name}"


@contextlib.contextmanager
def open_frame(
    report: Page | None,
    checkpoints: str = "",
    max_hours: float = 0,
    tracking: Sequence[str] = (),
    hides_keys: bool = True,
) -> Iterator[Frame]:
    """Open the frame of the current task. Its report is shown while it runs.

    Args:
        report: None for a task that shows none.
        checkpoints: URL that the user gave; "" for the action's own.
        max_hours: of the action, all attempts and pods together; 0 is no limit.
        tracking: see `make_tracker`; empty where nothing records the run.
        hides_keys: the ranks' environment has no keys of the tracker.

    Raises:
        ConfigError: a place that is not allowed; a task that does not run on the main thread.
    """
    local, context = is_local(), flyte.ctx()
    if not local:
        check_places([("checkpoints", checkpoints)], SETTINGS.allowed.urls)
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "env: expected a task of flyte_ddp.flyte2.environment, which runs on the main "
                "thread, where a preemption arrives, got one beside it"
            )
    own = f"{context.run_base_dir.rstrip('/')}/{context.action.name}/flyte-ddp"
    os.environ.update(storage_environment())
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flyte-ddp-")))
        keys = {name: os.environ[name] for name in KEYS if name in os.environ}
        if hides_keys:
            stack.callback(os.environ.update, keys)
            for name in keys:
                del os.environ[name]
        storage = Storage(checkpoints or own)
        publisher = PagePublisher(report or Report(), publish if report else None)
        frame = Frame(run_id(), storage, directory, publisher, [HistoryFile(directory / HISTORY)])
        limit = TimeLimit(0, 0)
        try:
            storage.check_access()
            if max_hours:
                begun_at = keep_first_start(storage, frame.run_id, time.time())
                limit = TimeLimit(max_hours, begun_at, f". Its checkpoints are in {storage.url}")
                stack.callback(limit.cancel)
            if isinstance(report, Report):
                if tracking:
                    report.tracker = _make_tracker(frame, tracking, keys, local)
                    frame.listeners.append(report.tracker)
                frame.listeners.append(report)
            frame.listeners.append(publisher)
            yield frame
        except BaseException as error:
            reason = limit.explain(error)
            _close(frame, report, reason)
            if reason is not error:
                raise reason from None
            raise
        _close(frame, report, None)


def _make_tracker(
    frame: Frame, tracking: Sequence[str], keys: Mapping[str, str], local: bool
) -> Any:
    return make_tracker(
        tracking,
        keep_run_id(frame.storage, frame.run_id),
        frame.directory,
        frame.storage,
        is_local=local,
        origin=describe_origin(current_execution()),
        history=f"{frame.outputs}/{HISTORY}",
        keys=keys,
    )


def publish(html: str) -> None:
    flyte.report.replace(html)
    flyte.report.flush()


def _close(frame: Frame, report: Page | None, error: BaseException | None) -> None:
    if report and (not report.closed_at or error is not None):
        report.close(error)
    frame.publisher.close(error)
    with log_failures("history"):
        if (frame.directory / HISTORY).is_file():
            frame.upload(HISTORY)


def check_cluster(cluster: Mapping[str, Any] | None) -> ClusterConfig | None:
    """Return the cluster that a run names, if it is allowed. Raises ConfigError."""
    if cluster is None:
        return None
    config = cluster_config(cluster)
    check_allowed(config, SETTINGS.allowed, own_namespace())
    return config
