"""The frame and the cluster of a task, by the settings of the registered version: what they allow,
W&B's project.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from flytekit.core.utils import ClassDecorator

from flyte_ddp.cluster import admission
from flyte_ddp.cluster.admission import IMAGE_VARIABLE
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.flytekit_plugin.failures import flyte_errors
from flyte_ddp.flytekit_plugin.flyte_context import is_flyte_task
from flyte_ddp.flytekit_plugin.frame import Frame, make_output_directory, open_frame
from flyte_ddp.observers.reports.page import Page
from flyte_ddp.storage.weights import TORCHVISION, pin_state, split_pin
from tasks.resources import MLFLOW, SECRETS, SETTINGS, WANDB_ENVIRONMENT, WANDB_MODE, code_version

# Arguments of @task for a Deck with the report alone: flytekit's own tabs repeat the source and the
# inputs.
WITH_DECK: dict[str, Any] = {"enable_deck": True, "deck_fields": ()}
FRAMED = {"secret_requests": SECRETS, **WITH_DECK}  # for a task with a frame


@contextlib.contextmanager
def open_task_frame(report: Page, name: str, checkpoints: str, output: str = "") -> Iterator[Frame]:
    """Check the URL of the checkpoints, and open the frame of the current task as `open_frame`
    does.
    """
    with flyte_errors():
        check_urls(checkpoints=checkpoints)
        check_output(output)
    with open_frame(
        report, name, checkpoints, WANDB_ENVIRONMENT["WANDB_PROJECT"], output=output, mlflow=MLFLOW
    ) as frame:
        yield frame


def check_output(output: str) -> None:
    """Raise ConfigError for a directory of outputs that takes no files, or in a run on Flyte."""
    if not output:
        return
    if is_flyte_task():
        raise ConfigError(
            "output: expected none in a run on Flyte, which keeps the outputs "
            f"itself, got {output!r}"
        )
    make_output_directory(output)


def describe_origin(frame: Frame) -> dict[str, str]:
    """Return what the run card of a task has besides the run's events."""
    image = os.environ.get(IMAGE_VARIABLE, "")
    return {"code_version": code_version(), "image": image, "execution": frame.execution.run_id}


def open_task_cluster(config: ClusterConfig, run_name: str) -> AbstractContextManager[Any]:
    """Check the cluster, then open it as `flyte_ddp.cluster.connect.open_cluster` does."""
    from flyte_ddp.cluster import connect

    check_cluster(config)
    return connect.open_cluster(config, run_name)


def check_cluster(config: ClusterConfig | None) -> None:
    """Compare `config` with the table `allowed` of settings.toml. Raises ConfigError for what is
    not allowed.
    """
    from flyte_ddp.cluster.kubernetes import api

    if config is not None:
        admission.check_allowed(config, SETTINGS.allowed, api.own_namespace())


def check_urls(**urls: str) -> None:
    """Compare a launch's URLs with the table `allowed`; a local run may name any file. Raises
    ConfigError.
    """
    if is_flyte_task():
        admission.check_urls(urls, SETTINGS.allowed)


def check_options(options: Mapping[str, Any]) -> None:
    """Check the URLs and paths among a recipe's options as `check_urls`."""
    check_urls(**admission.list_places(options, "recipe_options"))


def check_initial_state(url: str) -> str:
    """Check where a run's first weights are as `check_urls`, and return it with their checksum: see
    `pin_state`.
    """
    if not url.startswith(TORCHVISION):
        check_urls(initial_model_state=split_pin(url)[0])
    return pin_state(url)


class wandb_link(ClassDecorator):
    """Links the task in Flyte's console to its W&B run, where registration knows the entity that
    the run belongs to.

    `flytekitplugins.wandb.wandb_init` does that too, but it also starts the run itself: only with a
    key, never offline, under an id that changes with every attempt, and a failure of W&B ends the
    task. Its link types take the attempt for part of the id, so ours has a name of its own; the
    console needs the template in deploy/README.md.
    """

    def execute(self, *args: object, **kwargs: object) -> object:
        return self.task_function(*args, **kwargs)

    def get_extra_config(self) -> dict[str, str]:
        entity = WANDB_ENVIRONMENT.get("WANDB_ENTITY")
        if MLFLOW or WANDB_MODE != "online" or not entity:
            return {}
        return {
            self.LINK_TYPE_KEY: "wandb-run",
            "host": WANDB_ENVIRONMENT.get("WANDB_BASE_URL", "https://wandb.ai").replace(
                "//api.", "//"
            ),
            "entity": entity,
            "project": WANDB_ENVIRONMENT["WANDB_PROJECT"],
        }
