"""What the tasks ask Kubernetes for: constants, chosen by one profile switch that is read at registration.

`SANDBOX=1` is a small CPU cluster, such as `flytectl demo`. Without it, training tasks ask for `GPUS` (default 1) GPUs
of type `GPU_TYPE` (default: any), with memory and cores in proportion. Local runs ask for nothing.
"""

from __future__ import annotations

import hashlib
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flytekit import Cache, Resources, Secret
from flytekit.extras.accelerators import GPUAccelerator

import flyte_ddp

# Flyte's local cache remembers outputs for longer than the temporary directory they lie in: a second `pyflyte run`
# would return at once, with paths of files that are gone. Set it to "true" to have that cache all the same.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")


def _switch(name: str) -> bool:
    value = os.environ.get(name, "").lower()
    if value not in ("", "0", "1", "false", "true"):
        raise ValueError(f"{name}: {value!r} is not a switch; accepted are 0, 1, false and true")
    return value in ("1", "true")


def _count(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdigit() or int(value) < 1:
        raise ValueError(f"{name}: {value!r} is not a count; accepted is a whole number of at least 1")
    return int(value)


SANDBOX = _switch("SANDBOX")
NUM_GPUS = 0 if SANDBOX else _count("GPUS", 1)
GPU_TYPE = "" if SANDBOX else os.environ.get("GPU_TYPE", "")  # as node labels call it, such as nvidia-tesla-a100


# A rank takes about 1 GB before its data and model: torch itself.
def _compute(num_gpus: int) -> dict[str, str]:
    if SANDBOX:
        return {"cpu": "2", "mem": "4Gi", "ephemeral_storage": "4Gi"}
    return {
        "cpu": str(4 * num_gpus),
        "mem": f"{16 * num_gpus}Gi",
        "ephemeral_storage": "50Gi",
        "gpu": str(num_gpus),
    }


_training = _compute(NUM_GPUS)
_small = {"cpu": "1", "mem": "2Gi", "ephemeral_storage": "4Gi" if SANDBOX else "20Gi"}

# Requests and limits are given apart and alike: with `resources=` alone Flyte sets no limits, and Kubernetes may then
# evict the pod in favour of others.
SMALL_TASK: dict[str, Any] = {"requests": Resources(**_small), "limits": Resources(**_small)}
TRAINING_TASK: dict[str, Any] = {
    "requests": Resources(**_training),
    "limits": Resources(**_training),
    # Ranks and loader processes pass tensors through /dev/shm, which a container otherwise has 64 MB of.
    "shared_memory": "1Gi" if SANDBOX else "8Gi",
    "retries": 3,
    "interruptible": True,  # a preempted attempt goes on from its checkpoint
    **({"accelerator": GPUAccelerator(GPU_TYPE)} if GPU_TYPE else {}),
}

# Measuring a model on held-out data: one process, so one GPU, however many train.
EVALUATION_TASK: dict[str, Any] = {
    **TRAINING_TASK,
    "requests": Resources(**_compute(1)),
    "limits": Resources(**_compute(1)),
}

# The driver of a cluster trains nothing itself; its memory is for the data on its way and the model state.
_driver = {**_small, "mem": "2Gi" if SANDBOX else "8Gi"}
DRIVER_TASK: dict[str, Any] = {
    "requests": Resources(**_driver),
    "limits": Resources(**_driver),
    "retries": 3,
    "interruptible": False,  # its loss ends the whole gang
}

# W&B's own variables, read at registration and passed on to the tasks. Without a key there is no secret to mount, and a
# pod that asks for a missing one never starts: register with WANDB_MODE=offline (the sandbox's default) where none is.
WANDB_MODE = os.environ.get("WANDB_MODE", "offline" if SANDBOX else "online")
WANDB_ENVIRONMENT = {
    "WANDB_MODE": WANDB_MODE,
    "WANDB_PROJECT": os.environ.get("WANDB_PROJECT", "flyte-ddp"),
    **{name: os.environ[name] for name in ("WANDB_ENTITY", "WANDB_BASE_URL") if name in os.environ},
}
WANDB_SECRET = Secret(group="wandb", key="api_key")
SECRETS = [WANDB_SECRET] if WANDB_MODE == "online" else []


def code_version() -> str:
    """A hash of all that decides what training does with given inputs: this package's code and torch's version.

    A recipe from outside the package is not in it; its code's hash travels with the prepared data instead.
    """
    digest = hashlib.sha256(version("torch").encode())
    root = Path(flyte_ddp.__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:16]


TRAINING_CACHE = Cache(version=code_version(), ignored_inputs=("checkpoints",))
