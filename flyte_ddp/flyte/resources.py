"""The options of @task for the tasks of a project, from its settings, and what else is registered
with a task.

Local runs ask for nothing.
"""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from importlib.metadata import version
from typing import Any

from flytekit import Cache, PodTemplate, Resources, Secret
from flytekit.core.utils import ClassDecorator
from flytekit.extras.accelerators import GPUAccelerator

from flyte_ddp.cluster.admission import IMAGE_VARIABLE
from flyte_ddp.cluster.config import GRACE_VARIABLE
from flyte_ddp.config.source_code import (
    COMMIT_VARIABLE,
    compute_digest_of_files,
    source_files,
)
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.pods import pod_with
from flyte_ddp.launch.agent.devices import REQUESTED_VARIABLE
from flyte_ddp.observers.metrics import PORT_NAME, PORT_VARIABLE
from flyte_ddp.task_run.origin import code_version
from flyte_ddp.task_run.settings import SETTINGS, Size, check_settings

# Flyte's local cache remembers outputs for longer than the temporary directory they lie in: a
# second `pyflyte run` would return at once, with paths of files that are gone. Set it to "true" to
# use that cache.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")

LIBRARY_VARIABLE = "FLYTE_DDP_LIBRARY"  # of every task: what it was registered with
TRACKING = SETTINGS.tracking_place
# Only W&B's mode online needs the key. Flyte mounts secrets as optional: a task whose secret is
# missing starts, and records offline.
KEY_SECRETS = {  # by the variable of the key
    "WANDB_API_KEY": Secret(group="wandb", key="api_key"),
    "MLFLOW_TRACKING_TOKEN": Secret(group="mlflow", key="token"),
}
SECRETS = {
    "wandb": [KEY_SECRETS["WANDB_API_KEY"]] if SETTINGS.wandb_mode == "online" else [],
    "mlflow": [KEY_SECRETS["MLFLOW_TRACKING_TOKEN"]],
}.get(SETTINGS.tracking, [])
WANDB_ENVIRONMENT = SETTINGS.wandb_environment


def pod(size: Size, gpus: int = 0, trains: bool = False, deck: bool = False) -> dict[str, Any]:
    """Return the options of @task by which a task gets its pod.

    Args:
        size: requests and limits, with CPUs and memory once for each GPU, and the timeout.
        gpus: of the pod, which fails where it finds fewer.
        trains: the task trains or drives a training: it has a Deck, the tracker's secret and
            variables, time for a last checkpoint, and serves its figures.
        deck: a Deck alone, with the report: flytekit's own tabs repeat the source and the inputs.
    """
    share = max(1, gpus)
    # Requests and limits are alike: with `resources=` alone Flyte sets no limits, and Kubernetes
    # may then evict the pod in favour of others.
    asked = Resources(
        cpu=str(size.cpus * share),
        mem=f"{size.memory_gib * share}Gi",
        ephemeral_storage=f"{size.disk_gib}Gi",
        gpu=str(gpus) if gpus else None,
    )
    environment = {
        LIBRARY_VARIABLE: library_version(),
        **SETTINGS.tracking_environment,
        **({REQUESTED_VARIABLE: str(gpus)} if gpus else {}),
    }
    versions = {"flyte-ddp/settings": SETTINGS.digest}
    if commit := os.environ.get(COMMIT_VARIABLE):
        environment[COMMIT_VARIABLE] = versions["flyte-ddp/commit"] = commit
    template = RegisteredPod(annotations=versions)
    # The timeout is that of an attempt, its waiting for a node included. Zero is no limit.
    options: dict[str, Any] = {
        "requests": asked,
        "limits": asked,
        "timeout": timedelta(hours=size.timeout_hours),
        "environment": environment,
        "pod_template": template,
        "container_image": SETTINGS.image or None,
    }
    if size.shared_memory_gib:
        # Ranks and loader processes pass tensors through /dev/shm, which a container otherwise has
        # 64 MB of.
        options["shared_memory"] = f"{size.shared_memory_gib}Gi"
    if gpus and SETTINGS.gpu_type:
        options["accelerator"] = GPUAccelerator(SETTINGS.gpu_type)
    if trains:
        grace, port = SETTINGS.termination_grace, SETTINGS.metrics_port
        # the pod declares the port of the figures for the PodMonitor
        serving = {PORT_VARIABLE: str(port)} if port else {}
        environment |= {**WANDB_ENVIRONMENT, **serving, GRACE_VARIABLE: str(grace)}
        template.pod_spec = pod_with(grace, {PORT_NAME: port} if port else {}).pod_spec
        options["secret_requests"] = SECRETS
    if trains or deck:
        options |= {"enable_deck": True, "deck_fields": ()}
    return options


class RegisteredPod(PodTemplate):  # type: ignore[misc]
    """The pod of a task. Flyte's version counts its hash, which a registration with bad settings
    does not get.
    """

    def version_hash(self) -> str:
        check_settings()
        return str(super().version_hash())


@functools.cache
def library_version() -> str:
    """Return the versions of this package and of torch, which a task's pod compares with its own.

    This package's is a hash of its files: a checkout has one version for a long time.
    """
    library = compute_digest_of_files(source_files(["flyte_ddp"]))
    return f"flyte_ddp {library[:8]}, torch {version('torch')}"


def check_library() -> None:
    """Raise ConfigError in a pod whose image has another library than the registration."""
    registered = os.environ.get(LIBRARY_VARIABLE, library_version())
    if registered != library_version():
        raise ConfigError(
            f"image: expected {registered}, as registered, got {library_version()} in "
            f"{os.environ.get(IMAGE_VARIABLE, 'this environment')}: build and push it again, or "
            "register again"
        )


# All recipes, because one may import others by computed names: a miss costs less than a wrong hit.
TRAINING_CACHE = Cache(version=code_version(SETTINGS.recipes), ignored_inputs=("checkpoints",))


class wandb_link(ClassDecorator):  # type: ignore[misc]
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
        if WANDB_ENVIRONMENT["WANDB_MODE"] != "online" or not entity:
            return {}
        return {
            self.LINK_TYPE_KEY: "wandb-run",
            "host": WANDB_ENVIRONMENT.get("WANDB_BASE_URL", "https://wandb.ai").replace(
                "//api.", "//"
            ),
            "entity": entity,
            "project": WANDB_ENVIRONMENT["WANDB_PROJECT"],
        }
