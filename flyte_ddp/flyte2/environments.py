"""The environments of a project's tasks, and the schedule of its retraining, from settings.toml."""

from __future__ import annotations

import os
from typing import Any

import flyte

from flyte_ddp.cluster.config import GRACE_VARIABLE
from flyte_ddp.code.source_code import find_project
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte2.distributed import Distributed, make_driver_template
from flyte_ddp.flyte2.task import OnMainThread
from flyte_ddp.process.devices import REQUESTED_VARIABLE
from flyte_ddp.project.admission import IMAGE_VARIABLE
from flyte_ddp.project.settings import SETTINGS, VARIABLES, Size

OVERRIDES = ("SANDBOX", *VARIABLES)  # variables that override settings


def environment(
    name: str,
    size: Size,
    config: Any = None,
    gpus: int = 0,
    **options: Any,
) -> flyte.TaskEnvironment:
    """Return the environment of tasks, with image, resources, secrets and service account from the
    settings.

    Args:
        size: size of each pod, with CPUs and memory once for each GPU.
        config: `Distributed` for functions that run in every rank.
        gpus: GPUs of each pod; a pod fails if it finds fewer.
        options: arguments of `flyte.TaskEnvironment` that override the settings.

    Raises:
        ConfigError: `config` is meant for flytekit.

    Example:
        size = flyte2.SETTINGS.training
        env = flyte2.environment("training", size, gpus=flyte2.SETTINGS.gpus)

        @env.task(retries=3, report=True)
        def train(recipe: str) -> flyte2.TrainingOutputs:
            return flyte2.train(recipe)
    """
    config = config or OnMainThread()
    if not isinstance(config, (Distributed, OnMainThread)):
        kind = f"{type(config).__module__}.{type(config).__name__}"
        raise ConfigError(f"config: expected flyte_ddp.flyte2.Distributed, got {kind}")
    share = max(1, gpus)
    # A task that calls another task describes it by the settings in the caller's pod.
    overrides = {name: os.environ[name] for name in OVERRIDES if name in os.environ}
    environment_variables = {
        **overrides,
        **SETTINGS.tracking_environment,
        **SETTINGS.wandb_environment,
        GRACE_VARIABLE: str(SETTINGS.termination_grace),
    }
    device = shared_memory = template = None
    if gpus:
        environment_variables[REQUESTED_VARIABLE] = str(gpus)
        device = gpus
        if SETTINGS.gpu_type:
            device = flyte.GPU(SETTINGS.gpu_type, gpus)
    if size.shared_memory_gib:
        shared_memory = f"{size.shared_memory_gib}Gi"
    # Flyte 2.0.43 does not give a task with a template the start of its run.
    if options.get("plugin_config", config):
        template = make_driver_template()
    image = options.get("image", SETTINGS.image or "auto")
    if isinstance(image, str) and image != "auto":
        environment_variables[IMAGE_VARIABLE] = image
    resources = flyte.Resources(
        cpu=size.cpus * share,
        memory=f"{size.memory_gib * share}Gi",
        disk=f"{size.disk_gib}Gi",
        gpu=device,
        shm=shared_memory,
    )
    given = {
        "image": image,
        "resources": resources,
        "env_vars": environment_variables,
        "secrets": _secrets(),
        "service_account": SETTINGS.service_account,
        "pod_template": template,
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
    """Return the trigger of a retraining, with the schedule and the inputs in the settings; empty
    without a schedule. A deployment does not activate the trigger.

    No input is `flyte.TriggerTime`: with such an input, Flyte 2.0.43 leaves out all others. The
    run's start is the same time.

    Example:
        @planning.task(retries=2, report=True, triggers=flyte2.schedule())
        def retrain(recipe: str = "digits", champion: str = "") -> flyte2.RetrainingOutputs:
            retraining = flyte2.plan_retraining(None, champion, recipe)
            if retraining.outcome:
                return flyte2.keep_champion(retraining)
            return challenge(retraining)
    """
    if not SETTINGS.schedule:
        return ()
    cron, inputs = flyte.Cron(SETTINGS.schedule), dict(SETTINGS.retrain_inputs)
    return (flyte.Trigger(name, cron, inputs=inputs, auto_activate=False),)
