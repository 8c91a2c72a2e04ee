"""The resources that tasks request: constants, from settings.toml and the environment variables
that it names.

Local runs ask for nothing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from datetime import timedelta
from importlib.metadata import version
from typing import Any

from flytekit import Cache, Resources
from flytekit.extras.accelerators import GPUAccelerator

from flyte_ddp.cluster.config import GRACE_VARIABLE
from flyte_ddp.config.source_code import compute_digest, recipe_packages
from flyte_ddp.flytekit_plugin.frame import MLFLOW_SECRET, WANDB_SECRET
from flyte_ddp.flytekit_plugin.pods import pod_with
from flyte_ddp.launch.devices import REQUESTED_VARIABLE
from flyte_ddp.observers.metrics import PORT_NAME, PORT_VARIABLE
from tasks.settings import Size, load_settings, shipped_code
from tasks.shipping import CODE_VARIABLE

# Flyte's local cache remembers outputs for longer than the temporary directory they lie in: a
# second `pyflyte run` would return at once, with paths of files that are gone. Set it to "true" to
# use that cache.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")

SETTINGS = load_settings()


def _resources(size: Size, num_gpus: int = 0) -> dict[str, Any]:
    """Return requests and limits of `size`, its CPUs and memory once for each GPU, and its timeout.

    Both are given, and alike: with `resources=` alone Flyte sets no limits, and Kubernetes may then
    evict the pod in favour of others.
    """
    share = max(1, num_gpus)
    asked = Resources(
        cpu=str(size.cpus * share),
        mem=f"{size.memory_gib * share}Gi",
        ephemeral_storage=f"{size.disk_gib}Gi",
        gpu=str(num_gpus) if num_gpus else None,
    )
    # Of an attempt, its waiting for a node included. Zero is no limit.
    return {"requests": asked, "limits": asked, "timeout": timedelta(hours=size.timeout_hours)}


# W&B's own variables, for the tasks that record a run. Only the mode online needs the key. Flyte
# mounts secrets as optional: a task whose secret is missing starts, and records offline.
WANDB_MODE = SETTINGS.wandb_mode
WANDB_ENVIRONMENT = {
    "WANDB_MODE": WANDB_MODE,
    "WANDB_PROJECT": SETTINGS.wandb_project,
    **({"WANDB_ENTITY": SETTINGS.wandb_entity} if SETTINGS.wandb_entity else {}),
    **({"WANDB_BASE_URL": SETTINGS.wandb_base_url} if SETTINGS.wandb_base_url else {}),
}
MLFLOW = (
    (SETTINGS.mlflow_url, SETTINGS.mlflow_experiment) if SETTINGS.tracking == "mlflow" else None
)
_CODE = {CODE_VARIABLE: shipped_code()}
if MLFLOW:
    WANDB_ENVIRONMENT["WANDB_MODE"] = "disabled"
    # Also for the tasks that record nothing, because each of them reads the settings.
    _CODE |= {
        "TRACKING": "mlflow",
        "MLFLOW_TRACKING_URI": MLFLOW[0],
        "MLFLOW_EXPERIMENT_NAME": MLFLOW[1],
    }
SECRETS = [MLFLOW_SECRET] if MLFLOW else [WANDB_SECRET] if WANDB_MODE == "online" else []


def _state_num_gpus(num_gpus: int) -> dict[str, str]:
    """Return the variable by which a task knows its GPUs, so that it does not train without them in
    silence.
    """
    return {REQUESTED_VARIABLE: str(num_gpus)} if num_gpus else {}


def training_pod(grace: int, port: int, **environment: str) -> dict[str, Any]:
    """Return the options of a task that trains by which its pod has time for a last checkpoint, and
    serves its figures.

    Args:
        grace: seconds from SIGTERM until the pod is killed, as its ranks know too.
        port: of the figures, which the pod declares for the PodMonitor; 0 is none.
        environment: other variables.
    """
    ports = {PORT_NAME: port} if port else {}
    serving = {PORT_VARIABLE: str(port)} if port else {}
    return {
        "environment": {**environment, **serving, GRACE_VARIABLE: str(grace)},
        "pod_template": pod_with(grace, ports),
    }


_PODS = (SETTINGS.termination_grace, SETTINGS.metrics_port)
SMALL_TASK: dict[str, Any] = {**_resources(SETTINGS.small), "environment": _CODE}
TRAINING_TASK: dict[str, Any] = {
    **_resources(SETTINGS.training, SETTINGS.gpus),
    **training_pod(*_PODS, **_CODE, **WANDB_ENVIRONMENT, **_state_num_gpus(SETTINGS.gpus)),
    # Ranks and loader processes pass tensors through /dev/shm, which a container otherwise has 64
    # MB of.
    "shared_memory": f"{SETTINGS.training.shared_memory_gib}Gi",
    "retries": 3,
    "interruptible": True,  # a preempted attempt resumes from its checkpoint
    **({"accelerator": GPUAccelerator(SETTINGS.gpu_type)} if SETTINGS.gpu_type else {}),
}

# Measuring a model on held-out data: one process, so one GPU, however many train.
EVALUATION_TASK: dict[str, Any] = {
    **TRAINING_TASK,
    **_resources(SETTINGS.training, min(1, SETTINGS.gpus)),
    "timeout": SMALL_TASK["timeout"],
    "environment": {**_CODE, **_state_num_gpus(min(1, SETTINGS.gpus))},
    "pod_template": None,
}

DRIVER_TASK: dict[str, Any] = {
    **_resources(SETTINGS.driver),
    **training_pod(*_PODS, **_CODE, **WANDB_ENVIRONMENT),
    "retries": 3,
    "interruptible": False,  # its loss ends the whole gang
}


def code_version(packages: Iterable[str] = ()) -> str:
    """Return a hash of the code that decides what training does: the library, `packages` and
    torch's version.

    A hash of the recipe's own files travels with the prepared data.
    """
    code = compute_digest(["flyte_ddp", *packages])
    return hashlib.sha256((version("torch") + code).encode()).hexdigest()[:16]


# All recipes, because one may import others by computed names: a miss costs less than a wrong hit.
TRAINING_CACHE = Cache(version=code_version(recipe_packages()), ignored_inputs=("checkpoints",))
