"""The common part of all task functions: errors, checks against the project's settings, the run."""

from __future__ import annotations

import contextlib
import functools
import inspect
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import click
import flytekit

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.code.source_code import extend_path
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, TrainingStopped
from flyte_ddp.flyte.deck import open_deck
from flyte_ddp.flyte.failures import flyte_errors
from flyte_ddp.flyte.flyte_context import (
    current_execution,
    is_flyte_task,
    list_own_places,
    store_of_outputs,
)
from flyte_ddp.flyte.inputs import location
from flyte_ddp.flyte.outputs import open_output_directory
from flyte_ddp.flyte.resources import KEY_SECRETS, TRACKING, check_library
from flyte_ddp.launch.run_observers import resume_command
from flyte_ddp.observers.reports.page import Page
from flyte_ddp.project import admission
from flyte_ddp.project.settings import SETTINGS, check_settings
from flyte_ddp.recipes import pin_initial_state
from flyte_ddp.storage import check_place, check_places, limit_urls
from flyte_ddp.task_run.files import TaskFiles
from flyte_ddp.task_run.run import TaskRun, open_run

P = ParamSpec("P")
T = TypeVar("T")


def task_body(function: Callable[P, T]) -> Callable[P, T]:
    """Let tasks call `function`: check the settings and the arguments, and raise errors as
    `flyte_errors` does.

    A task may have been declared for another version of this package. Then the error names the
    argument that `function` does not take.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        with flyte_errors():
            check_settings()
            check_library()
            extend_path()
            try:
                inspect.signature(function).bind(*args, **kwargs)
            except TypeError as error:
                raise ConfigError(
                    f"{function.__name__}: {error}; the task that calls it was declared for "
                    "another version of flyte_ddp"
                ) from None
            with limited_urls(SETTINGS.allowed.urls, SETTINGS.tensorboard_logdir):
                return function(*args, **kwargs)

    return call


@contextlib.contextmanager
def open_task_run(
    report: Page,
    name: str,
    checkpoints: str = "",
    output: str = "",
    tracking: tuple[str, ...] | None = None,
    hides_keys: bool = True,
    has_outputs: bool = True,
) -> Iterator[TaskRun]:
    """Check the places that the user gave, and open the run of the current task.

    Args:
        name: name of the attempt in a local run, because Flyte gives none.
        checkpoints: the user's URL; "" for the execution's own.
        output: directory of a local run's outputs; "" for a new directory.
        tracking: see `make_tracker`; empty for runs without a tracker; None for the project's.
        hides_keys: keep the keys of W&B and MLflow out of the environment, which the ranks inherit.
        has_outputs: the outputs are files, so a local run has a directory for them.

    Raises:
        UserError, RecoverableError, TaskFailed, KeyboardInterrupt: see `flyte_errors`.
    """
    with flyte_errors():
        check_urls(checkpoints=checkpoints)
        directory, outputs = None, ""
        if has_outputs:
            directory = open_output_directory(output, name)
        context, execution = flytekit.current_context(), current_execution()
        if not execution.is_local:
            outputs = context.raw_output_prefix.rstrip("/")
        if tracking is None:
            tracking = TRACKING
        files = TaskFiles(Path(context.working_directory), outputs, directory)
        opened = open_run(
            report,
            execution,
            files,
            name=name.rpartition(".")[2],
            checkpoints=checkpoints,
            secrets=_read_secrets(),
            hides_keys=hides_keys,
            tracking=tracking,
            publish=open_deck(),
        )
        with opened as run:
            try:
                yield run
            except TrainingStopped as stopped:
                if execution.is_local:
                    _say_how_to_resume(run, stopped)
                raise


def _read_secrets() -> dict[str, str]:
    """Return the keys of trackers among Flyte's secrets, by their variables."""
    found = {}
    for name, secret in KEY_SECRETS.items():
        with contextlib.suppress(ValueError):  # Flyte may have no such secret.
            found[name] = flytekit.current_context().secrets.get(secret.group, secret.key)
    return found


def _say_how_to_resume(run: TaskRun, stopped: TrainingStopped) -> None:
    """Print how a local run has stopped, and the command of `pyflyte run` that resumes it."""
    command = click.get_current_context(silent=True)
    if stopped.reason == signal.SIGINT.name:  # click prints only "Aborted".
        run.say(str(stopped))
    if command is not None and "checkpoints" in command.params:
        checkpoints = run.storage.url
        if command.params["checkpoints"]:
            checkpoints = ""
        run.say(f"to resume: {resume_command(checkpoints)}")


def check_cluster(config: ClusterConfig | None) -> None:
    """Compare `config` with the table `allowed` of settings.toml. Raises ConfigError for a value
    that is not allowed.
    """
    from flyte_ddp.cluster.kubernetes import api

    if config is not None:
        admission.check_allowed(config, SETTINGS.allowed, api.own_namespace())


def limited_urls(allowed: Sequence[str], *own: str) -> AbstractContextManager[None]:
    """Let the block, and the ranks that it starts, open only the task's own places and allowed
    places. A local run may open any place.

    Args:
        own: more places of the task, for example from its registration.
    """
    if not is_flyte_task():
        return nullcontext()
    return limit_urls(allowed, [*list_own_places(), *own])


def check_urls(**urls: str) -> None:
    """Compare a launch's URLs with the table `allowed`; a local run may name any file. Raises
    ConfigError.
    """
    check_places(urls.items())


def check_files(**files: Any) -> None:
    """Check the files and directories that a task gets from earlier tasks. Raises ConfigError
    unless they are at Flyte's place for outputs or at an allowed place.
    """
    if is_flyte_task():
        for name, file in files.items():
            check_place(location(file), name, store_of_outputs())


def check_config(config: TrainingConfig) -> TrainingConfig:
    """Check the URLs and paths of a config, including its recipe's options, as `check_urls`. Return
    it with the checksum of its initial model state.
    """
    check_places(admission.places_of_config(config))
    return pin_initial_state(config)
