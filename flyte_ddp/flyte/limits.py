"""Check before a registration that Flyte's platform limits allow the tasks' requests.

Flyte checks each task's limits when it is registered, one after the other: a registration that is
refused ends halfway, and its version cannot be used again.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from flytekit import Resources

from flyte_ddp.flyte.resources import pod
from flyte_ddp.flyte.settings import SETTINGS, SettingsError

CLASSES = {
    "training": pod(SETTINGS.training, SETTINGS.gpus),
    "evaluation": pod(SETTINGS.training, min(1, SETTINGS.gpus)),
    "driver": pod(SETTINGS.driver),
    "small": pod(SETTINGS.small),
}
POD_RESOURCES = {
    "cpu": "cpu",
    "memory": "mem",
    "ephemeral-storage": "ephemeral_storage",
    "nvidia.com/gpu": "gpu",
}
# a task that is registered first, requests the most of each resource and is never started
PROBE = "flyte_ddp.limits"


def describe_requests() -> str:
    """Return a line for each class of tasks: what an attempt requests, which is its limit too, and
    its timeout.
    """
    lines = []
    for name, arguments in CLASSES.items():
        asked = arguments["limits"]
        gpus = f", {asked.gpu} GPU" if asked.gpu else ""
        hours = arguments["timeout"].total_seconds() / 3600
        timeout = f"timeout {hours:g} h" if hours else "no timeout"
        lines.append(
            f"{name:<12}{asked.cpu} CPU, {asked.mem} memory, {asked.ephemeral_storage} "
            f"disk{gpus}, {timeout}"
        )
    return "\n".join(lines)


def requests_of_pods() -> dict[str, dict[str, str]]:
    """Return what a pod of each class of tasks requests, by the names that Kubernetes gives
    resources.
    """
    return {
        name: {
            resource: str(value)
            for resource, attribute in POD_RESOURCES.items()
            if (value := getattr(arguments["limits"], attribute))
        }
        for name, arguments in CLASSES.items()
    }


def check_limits(project: str, domain: str, version: str, image: str) -> None:
    """Ask Flyte to accept one task that requests the most of each resource. Raises SettingsError if
    it does not.
    """
    from flytekit import ContainerTask
    from flytekit.configuration import ImageConfig, SerializationSettings
    from flytekit.exceptions.user import FlyteEntityAlreadyExistsException
    from flytekit.tools.translator import get_serializable_task

    most = Resources(**{attribute: _largest(attribute) for attribute in POD_RESOURCES.values()})
    probe = ContainerTask(PROBE, image, ["true"], requests=most, limits=most)
    settings = SerializationSettings(ImageConfig.auto(img_name=image), project, domain, version)
    task = get_serializable_task(OrderedDict(), settings, probe)
    remedy = (
        f". Nothing was registered in {project}-{domain}: request less in settings.toml, or "
        "configure Flyte as "
        "deploy/README.md describes (task_resources)"
    )
    # An earlier registration of this version may have got as far as this.
    with (
        open_flyte("what the tasks request", remedy) as client,
        contextlib.suppress(FlyteEntityAlreadyExistsException),
    ):
        client.create_task(task.template.id, task)


def _largest(attribute: str) -> str | None:
    values = [
        str(value) for each in CLASSES.values() if (value := getattr(each["limits"], attribute))
    ]
    return max(values, key=lambda value: int(value.removesuffix("Gi")), default=None)


@contextlib.contextmanager
def open_flyte(what: str, remedy: str = "") -> Iterator[Any]:
    """Yield a client of Flyte's API. Where that refuses `what`, or is away, raise a SettingsError
    with the `remedy`.
    """
    from flytekit.clients.friendly import SynchronousFlyteClient
    from flytekit.configuration import Config
    from flytekit.exceptions.system import FlyteSystemException
    from flytekit.exceptions.user import FlyteUserException

    try:
        yield SynchronousFlyteClient(Config.auto().platform)
    except (FlyteSystemException, FlyteUserException) as error:
        details = getattr(error.__cause__ or error, "details", None)  # without gRPC's frame
        message = str(details() if callable(details) else error).strip().rstrip(".")
        if isinstance(error, FlyteUserException):
            raise SettingsError(f"Flyte refuses {what}: {message}{remedy}") from error
        raise SettingsError(
            f"Flyte does not answer ({message}); name it in ~/.flyte/config.yaml or FLYTECTL_CONFIG"
        ) from error
