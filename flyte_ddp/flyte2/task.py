"""The common part of all tasks of Flyte 2: their thread, place and errors, and the run.

The SDK calls a function beside the main thread, where no signal arrives. It executes a plugin's
task on the main thread, so each task here belongs to a plugin.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import flyte.errors
import flyte.report
from flyte.extend import AsyncFunctionTaskTemplate, TaskPluginRegistry

from flyte_ddp.cluster.config import ClusterConfig, cluster_config
from flyte_ddp.cluster.kubernetes.api import own_namespace
from flyte_ddp.code.source_code import extend_path, find_project
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.observers.reports.page import Page
from flyte_ddp.project.admission import check_allowed
from flyte_ddp.project.settings import SETTINGS, check_settings
from flyte_ddp.storage import (
    check_places,
    limit_urls,
    redact_errors,
    storage_environment,
)
from flyte_ddp.task_run.execution import Execution, champions_of
from flyte_ddp.task_run.files import TaskFiles
from flyte_ddp.task_run.outcome import Retry, judge_failure
from flyte_ddp.task_run.run import TaskRun, open_run

P = ParamSpec("P")
T = TypeVar("T")
# exceptions of the SDK that a function raises to request another attempt
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
        # A local run is not on the main thread.
        return await asyncio.to_thread(self.call, *args, **kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Raises errors as `flyte_errors`."""
        with flyte_errors():
            return self.func(*args, **kwargs)


TaskPluginRegistry.register(OnMainThread, MainThreadTask)


@contextlib.contextmanager
def flyte_errors() -> Iterator[None]:
    """Turn the library's errors into errors of Flyte 2. Other errors pass unchanged.

    A preempted pod ends without an error: Flyte counts its end as the system's, and makes a new pod
    within the same attempt. An error file of the first pod would be read again after the new pod's
    success.

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
        if outcome.retry is Retry.MAY_SUCCEED:
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
    """Let a call of `function` open only the places that `limited_urls` and the settings allow."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with limited_urls(SETTINGS.allowed.urls, SETTINGS.tensorboard_logdir):
            return function(*args, **kwargs)

    return call


def limited_urls(allowed: Sequence[str], *own: str) -> contextlib.AbstractContextManager[None]:
    """Let the block, and the ranks that it starts, open only the action's own places and allowed
    places. A local run may open any place.
    """
    if is_local():
        return contextlib.nullcontext()
    return limit_urls(allowed, [flyte.ctx().run_base_dir, current_execution().champions, *own])


def current_execution() -> Execution:
    """Return the place of the current action. Raises ConfigError outside of tasks."""
    local, context = is_local(), flyte.ctx()
    action = context.action
    run_id = f"{action.run_name}-{action.name}"
    base, champions = context.run_base_dir.rstrip("/"), ""
    if not local:
        champions = champions_of(base, action.project, action.domain)
    return Execution(
        checkpoints=f"{base}/{action.name}/flyte-ddp",
        run_id=run_id,
        is_local=local,
        champions=champions,
        # A cluster gets this name. The cluster of a killed pod of the same attempt may still exist.
        attempt_id=f"{run_id}-{os.urandom(4).hex()}",
        attempt=context.attempt_number,
    )


@contextlib.contextmanager
def open_task_run(
    report: Page,
    checkpoints: str = "",
    max_hours: float = 0,
    tracking: tuple[str, ...] | None = None,
    hides_keys: bool = True,
) -> Iterator[TaskRun]:
    """Open the run of the current task. Its report is shown while it runs.

    Args:
        checkpoints: the user's URL; "" for the action's own.
        max_hours: time limit of the action, for all attempts and pods together; 0 is no limit.
        tracking: see `make_tracker`; empty for a run without a tracker; None for the project's.
        hides_keys: keep the tracker's keys out of the ranks' environment.

    Raises:
        ConfigError: a place is not allowed, or the task does not run on the main thread.
    """
    execution = current_execution()
    check_places([("checkpoints", checkpoints)])
    if not execution.is_local:
        check_thread()
    os.environ.update(storage_environment())
    if tracking is None:
        tracking = ()
        if find_project():
            tracking = SETTINGS.tracking_place
    place = checkpoints or execution.checkpoints
    outputs = f"{place.rstrip('/')}/outputs"
    with (
        tempfile.TemporaryDirectory(prefix="flyte-ddp-") as directory,
        open_run(
            report,
            execution,
            TaskFiles(Path(directory), outputs),
            name="",
            checkpoints=checkpoints,
            hides_keys=hides_keys,
            tracking=tracking,
            publish=publish,
        ) as run,
    ):
        run.limit_time(max_hours)
        yield run


def check_thread() -> None:
    """Raise ConfigError for a task that runs beside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise ConfigError(
            "env: expected a task of flyte_ddp.flyte2.environment, which runs on the main "
            "thread, where a preemption arrives, got one beside it"
        )


def publish(html: str) -> None:
    """Show HTML as the report of the current action."""
    flyte.report.replace(html)
    flyte.report.flush()


def check_cluster(cluster: Mapping[str, Any] | None) -> ClusterConfig | None:
    """Return the cluster of a run. Raises ConfigError if it is not allowed."""
    if cluster is None:
        return None
    config = cluster_config(cluster)
    check_allowed(config, SETTINGS.allowed, own_namespace())
    return config
