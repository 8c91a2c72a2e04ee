"""The environments of a project's tasks, and the schedule of its retraining, by settings.toml."""

from __future__ import annotations

import os
from typing import Any

import flyte

from flyte_ddp.cluster.admission import IMAGE_VARIABLE
from flyte_ddp.cluster.config import GRACE_VARIABLE
from flyte_ddp.config.source_code import find_project
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte2.distributed import Distributed
from flyte_ddp.flyte2.task import OnMainThread
from flyte_ddp.launch.agent.devices import REQUESTED_VARIABLE
from flyte_ddp.task_run.settings import SETTINGS, VARIABLES, Size

OVERRIDES = ("SANDBOX", *VARIABLES)  # of the settings


def environment(
    name: str,
    size: Size,
    config: Any = None,
    gpus: int = 0,
    **options: Any,
) -> flyte.TaskEnvironment:
    """Return the environment of tasks: image, resources, secrets and service account are those of
    the settings.

    Args:
        size: of each pod, with CPUs and memory once for each GPU.
        config: `Distributed` for functions that run in every rank.
        gpus: of each pod, which fails where it finds fewer.
        options: of `flyte.TaskEnvironment`, over these.

    Raises:
        ConfigError: the `config` of another door.
    """
    config = config or OnMainThread()
    if not isinstance(config, (Distributed, OnMainThread)):
        kind = f"{type(config).__module__}.{type(config).__name__}"
        raise ConfigError(f"config: expected flyte_ddp.flyte2.Distributed, got {kind}")
    share = max(1, gpus)
    # a task of it that calls another one describes that by the settings in its own pod
    overrides = {name: os.environ[name] for name in OVERRIDES if name in os.environ}
    environment_variables = {
        **overrides,
        **SETTINGS.tracking_environment,
        **SETTINGS.wandb_environment,
        GRACE_VARIABLE: str(SETTINGS.termination_grace),
        **({REQUESTED_VARIABLE: str(gpus)} if gpus else {}),
    }
    kind = SETTINGS.gpu_type
    grace = flyte.PodTemplate().with_termination_grace_period(SETTINGS.termination_grace)
    image = options.get("image", SETTINGS.image or "auto")
    if isinstance(image, str) and image != "auto":
        environment_variables[IMAGE_VARIABLE] = image
    given = {
        "image": image,
        "resources": flyte.Resources(
            cpu=size.cpus * share,
            memory=f"{size.memory_gib * share}Gi",
            disk=f"{size.disk_gib}Gi",
            gpu=(flyte.GPU(kind, gpus) if kind else gpus) if gpus else None,
            shm=f"{size.shared_memory_gib}Gi" if size.shared_memory_gib else None,
        ),
        "env_vars": environment_variables,
        "secrets": _secrets(),
        "service_account": SETTINGS.service_account,
        # Flyte 2.0.43 does not tell a task with a template when its run began
        "pod_template": grace if options.get("plugin_config", config) else None,
        "plugin_config": config,
    }
    return flyte.TaskEnvironment(name, **{**given, **options})


def _secrets() -> list[flyte.Secret]:
    """Return the secret of the project's tracker. A task of Flyte 2 does not start without it."""
    if not find_project():
        return []
    if SETTINGS.tracking == "mlflow":
        return [flyte.Secret("token", group="mlflow", as_env_var="MLFLOW_TRACKING_TOKEN")]
    if SETTINGS.tracking == "wandb" and SETTINGS.wandb_mode == "online":
        return [flyte.Secret("api_key", group="wandb", as_env_var="WANDB_API_KEY")]
    return []


def schedule(name: str = "retrain") -> tuple[flyte.Trigger, ...]:
    """Return the trigger of a retraining, by the schedule and the inputs in the settings; none
    without a schedule. Deploying does not activate it.

    No input is `flyte.TriggerTime`: with one, Flyte 2.0.43 leaves out all others. The run's start
    is that time.
    """
    if not SETTINGS.schedule:
        return ()
    cron, inputs = flyte.Cron(SETTINGS.schedule), dict(SETTINGS.retrain_inputs)
    return (flyte.Trigger(name, cron, inputs=inputs, auto_activate=False),)
