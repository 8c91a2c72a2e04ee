"""The errors, the checks by the project's settings and the frame that the functions of tasks
share.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, TypeVar

from flyte_ddp.cluster import admission
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.source_code import extend_path
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.failures import flyte_errors
from flyte_ddp.flyte.flyte_context import is_flyte_task, list_own_places, store_of_outputs
from flyte_ddp.flyte.frame import Frame, open_frame
from flyte_ddp.flyte.inputs import location
from flyte_ddp.flyte.outputs import open_output_directory
from flyte_ddp.flyte.resources import (
    TRACKING,
    check_library,
)
from flyte_ddp.flyte.settings import SETTINGS, check_settings
from flyte_ddp.observers.reports.page import Page
from flyte_ddp.recipes import pin_initial_state
from flyte_ddp.storage import check_place, check_places, limit_urls

P = ParamSpec("P")
T = TypeVar("T")


def task_body(function: Callable[P, T]) -> Callable[P, T]:
    """Let tasks call `function`: check the settings and the arguments, and raise errors as
    `flyte_errors` does.

    A task may have been declared for another version of this package: an argument that `function`
    does not take is named.
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


def open_task_frame(
    report: Page, name: str, checkpoints: str, output: str = ""
) -> AbstractContextManager[Frame]:
    """Check the places that the user gave, and open the frame of the current task as `open_frame`
    does.
    """
    check_urls(checkpoints=checkpoints)
    directory = open_output_directory(output, name)
    return open_frame(report, name, checkpoints, TRACKING, output_directory=directory)


def check_cluster(config: ClusterConfig | None) -> None:
    """Compare `config` with the table `allowed` of settings.toml. Raises ConfigError for what is
    not allowed.
    """
    from flyte_ddp.cluster.kubernetes import api

    if config is not None:
        admission.check_allowed(config, SETTINGS.allowed, api.own_namespace())


def limited_urls(allowed: Sequence[str], *own: str) -> AbstractContextManager[None]:
    """Let the block, and the ranks that it starts, open the task's own places and allowed ones
    alone. A local run may open any.

    Args:
        own: more places of the task, such as one that its registration names.
    """
    if not is_flyte_task():
        return nullcontext()
    return limit_urls(allowed, [*list_own_places(), *own])


def check_urls(**urls: str) -> None:
    """Compare a launch's URLs with the table `allowed`; a local run may name any file. Raises
    ConfigError.
    """
    _check_places(urls.items())


def check_files(**files: Any) -> None:
    """Compare files and directories that a task gets from earlier ones: they lie where Flyte keeps
    outputs, or where `allowed` says. Raises ConfigError.
    """
    if is_flyte_task():
        for name, file in files.items():
            check_place(location(file), name, store_of_outputs())


def check_config_places(config: TrainingConfig) -> None:
    """Check the URLs and paths of a config, also among its recipe's options, as `check_urls`."""
    _check_places(admission.places_of_config(config))


def check_config(config: TrainingConfig) -> TrainingConfig:
    """Check a config as `check_config_places`. Return it with the checksum of its initial model
    state.
    """
    check_config_places(config)
    return pin_initial_state(config)


def _check_places(places: Iterable[tuple[str, str]]) -> None:
    if is_flyte_task():
        check_places(places, SETTINGS.allowed.urls)
