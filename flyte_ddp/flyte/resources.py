"""The options of @task for the tasks of a project, from its settings, and other facts that are
registered with a task.

Local runs request no resources.
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

from flyte_ddp.cluster.config import GRACE_VARIABLE
from flyte_ddp.code.source_code import COMMIT_VARIABLE, compute_library_digest
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.pods import make_pod_spec
from flyte_ddp.observers.metrics import PORT_NAME, PORT_VARIABLE
from flyte_ddp.process.devices import REQUESTED_VARIABLE
from flyte_ddp.project.admission import IMAGE_VARIABLE
from flyte_ddp.project.settings import SETTINGS, Size, check_settings
from flyte_ddp.task_run.origin import code_version

# Flyte's local cache remembers outputs for longer than their temporary directory exists: a second
# `pyflyte run` would return at once, with paths of deleted files. Set the variable to "true" to use
# that cache.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")

LIBRARY_VARIABLE = "FLYTE_DDP_LIBRARY"  # variable of every task with the registered versions
TRACKING = SETTINGS.tracking_place
# secrets by the variable of the key
KEY_SECRETS = {
    "WANDB_API_KEY": Secret(group="wandb", key="api_key"),
    "MLFLOW_TRACKING_TOKEN": Secret(group="mlflow", key="token"),
}
# Only W&B's mode online needs the key. Flyte mounts secrets as optional: a task without its secret
# starts, and records offline.
SECRETS: list[Secret] = []
if SETTINGS.tracking == "wandb" and SETTINGS.wandb_mode == "online":
    SECRETS = [KEY_SECRETS["WANDB_API_KEY"]]
elif SETTINGS.tracking == "mlflow":
    SECRETS = [KEY_SECRETS["MLFLOW_TRACKING_TOKEN"]]
WANDB_ENVIRONMENT = SETTINGS.wandb_environment


def pod(size: Size, gpus: int = 0, trains: bool = False, deck: bool = False) -> dict[str, Any]:
    """Return the options of @task by which a task gets its pod.

    Args:
        size: requests and limits, with CPUs and memory once for each GPU, and the timeout.
        gpus: GPUs of the pod; the pod fails if it finds fewer.
        trains: the task trains or drives a training. It has a Deck, the tracker's secret and
            variables, and time for a final checkpoint, and it serves its figures.
        deck: the task has a Deck with the report. flytekit's own tabs, which repeat source and
            inputs, are left out.

    Example:
        @task(**flyte.pod(flyte.SETTINGS.training, gpus=flyte.SETTINGS.gpus, trains=True))
        def train(recipe: str, data: flyte.PreparedData) -> flyte.TrainingOutputs:
            config = TrainingConfig(epochs=3)
            return flyte.train_on_one_node(recipe=recipe, config=config, data=data)
    """
    share = max(1, gpus)
    environment = {LIBRARY_VARIABLE: library_version(), **SETTINGS.tracking_environment}
    num_gpus = None
    if gpus:
        num_gpus = environment[REQUESTED_VARIABLE] = str(gpus)
    # Requests and limits are alike: with `resources=` alone Flyte sets no limits, and Kubernetes
    # may then evict the pod in favour of others.
    asked = Resources(
        cpu=str(size.cpus * share),
        mem=f"{size.memory_gib * share}Gi",
        ephemeral_storage=f"{size.disk_gib}Gi",
        gpu=num_gpus,
    )
    versions = {"flyte-ddp/settings": SETTINGS.digest}
    commit = os.environ.get(COMMIT_VARIABLE)
    if commit:
        environment[COMMIT_VARIABLE] = versions["flyte-ddp/commit"] = commit
    template = RegisteredPod(annotations=versions)
    # The timeout limits an attempt, including its wait for a node. Zero is no limit.
    options: dict[str, Any] = {
        "requests": asked,
        "limits": asked,
        "timeout": timedelta(hours=size.timeout_hours),
        "environment": environment,
        "pod_template": template,
        "container_image": SETTINGS.image or None,
    }
    if size.shared_memory_gib:
        # Ranks and loader processes pass tensors through /dev/shm. By default a container has only
        # 64 MB of it.
        options["shared_memory"] = f"{size.shared_memory_gib}Gi"
    if gpus and SETTINGS.gpu_type:
        options["accelerator"] = GPUAccelerator(SETTINGS.gpu_type)
    if trains:
        grace, port = SETTINGS.termination_grace, SETTINGS.metrics_port
        environment |= {**WANDB_ENVIRONMENT, GRACE_VARIABLE: str(grace)}
        ports = {}
        if port:  # The pod declares the port of the figures for the PodMonitor.
            environment[PORT_VARIABLE] = str(port)
            ports[PORT_NAME] = port
        template.pod_spec = make_pod_spec(grace, ports)
        options["secret_requests"] = SECRETS
    if trains or deck:
        options |= {"enable_deck": True, "deck_fields": ()}
    return options


class RegisteredPod(PodTemplate):  # type: ignore[misc]
    """The pod of a task. Flyte's version includes its hash. A registration with bad settings fails
    when it computes this hash.
    """

    def version_hash(self) -> str:
        check_settings()
        return str(super().version_hash())


@functools.cache
def library_version() -> str:
    """Return the versions of this package and of torch, which a task's pod compares with its own.

    The version of this package is a hash of its files, because a checkout keeps one version number
    for a long time.
    """
    return f"flyte_ddp {compute_library_digest()[:8]}, torch {version('torch')}"


def check_library() -> None:
    """Raise ConfigError in a pod whose image has another library than the registration."""
    registered = os.environ.get(LIBRARY_VARIABLE, library_version())
    if registered != library_version():
        raise ConfigError(
            f"image: expected {registered}, as registered, got {library_version()} in "
            f"{os.environ.get(IMAGE_VARIABLE, 'this environment')}: build and push it again, or "
            "register again"
        )


# The version covers all recipes, because a recipe may import others by computed names. A miss costs
# less than a wrong hit.
TRAINING_CACHE = Cache(version=code_version(SETTINGS.recipes), ignored_inputs=("checkpoints",))


class wandb_link(ClassDecorator):  # type: ignore[misc]
    """Links the task in Flyte's console to its W&B run, if registration knows the run's entity.

    `flytekitplugins.wandb.wandb_init` links the task too, but it also starts the run itself: only
    with a key, never offline, and under an id that changes with every attempt. A failure of W&B
    then ends the task. Its link types include the attempt in the id, so this link has a name of its
    own. The console needs the template in deploy/README.md.
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
