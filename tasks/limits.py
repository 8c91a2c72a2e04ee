"""Check before a registration that Flyte's platform limits allow the tasks' requests.

Flyte checks each task's limits when it is registered, one after the other: a registration that is refused ends halfway,
and its version cannot be used again.
"""

from __future__ import annotations

from typing import Any

from tasks.resources import DRIVER_TASK, EVALUATION_TASK, SMALL_TASK, TRAINING_TASK
from tasks.settings import SettingsError

CLASSES = {"training": TRAINING_TASK, "evaluation": EVALUATION_TASK, "driver": DRIVER_TASK, "small": SMALL_TASK}
RESOURCES = {"CPU": "cpu", "MEMORY": "mem", "EPHEMERAL_STORAGE": "ephemeral_storage", "GPU": "gpu"}
POD_RESOURCES = {"cpu": "cpu", "memory": "mem", "ephemeral-storage": "ephemeral_storage", "nvidia.com/gpu": "gpu"}
PROBE = "flyte_ddp.limits"  # a task that is registered first, requests the most of each resource and is never started


def describe_requests() -> str:
    """Return a line for each class of tasks: what an attempt requests, which is its limit too, and its timeout."""
    lines = []
    for name, arguments in CLASSES.items():
        asked = arguments["limits"]
        gpus = f", {asked.gpu} GPU" if asked.gpu else ""
        hours = arguments["timeout"].total_seconds() / 3600
        timeout = f"timeout {hours:g} h" if hours else "no timeout"
        retries = arguments.get("retries", "0 to 2")
        lines.append(
            f"{name:<12}{asked.cpu} CPU, {asked.mem} memory, {asked.ephemeral_storage} disk{gpus}, {timeout}, "
            f"retries {retries}"
        )
    return "\n".join(lines)


def requests_of_pods() -> dict[str, dict[str, str]]:
    """Return what a pod of each class of tasks requests, by the names that Kubernetes gives resources."""
    return {
        name: {
            resource: str(value)
            for resource, attribute in POD_RESOURCES.items()
            if (value := getattr(arguments["limits"], attribute))
        }
        for name, arguments in CLASSES.items()
    }


def check_limits(project: str, domain: str, version: str, image: str) -> None:
    """Ask Flyte to accept one task that requests the most of each resource.

    Raises:
        SettingsError: Flyte refuses it, or cannot be reached. Nothing else was registered.
    """
    from flyteidl.admin import task_pb2
    from flyteidl.core import identifier_pb2, interface_pb2, tasks_pb2
    from flytekit.clients.raw import RawSynchronousFlyteClient
    from flytekit.configuration import Config
    from flytekit.exceptions.system import FlyteSystemException
    from flytekit.exceptions.user import FlyteEntityAlreadyExistsException, FlyteUserException

    most = [
        tasks_pb2.Resources.ResourceEntry(name=tasks_pb2.Resources.ResourceName.Value(name), value=value)
        for name, attribute in RESOURCES.items()
        if (value := _largest(attribute))
    ]
    identifier = identifier_pb2.Identifier(
        resource_type=identifier_pb2.TASK, project=project, domain=domain, name=PROBE, version=version
    )
    runtime = tasks_pb2.RuntimeMetadata(type=tasks_pb2.RuntimeMetadata.FLYTE_SDK, version="0", flavor="python")
    template = tasks_pb2.TaskTemplate(
        id=identifier,
        type="python-task",
        metadata=tasks_pb2.TaskMetadata(runtime=runtime),
        interface=interface_pb2.TypedInterface(),
        container=tasks_pb2.Container(
            image=image, args=["true"], resources=tasks_pb2.Resources(requests=most, limits=most)
        ),
    )
    request = task_pb2.TaskCreateRequest(id=identifier, spec=task_pb2.TaskSpec(template=template))
    try:
        RawSynchronousFlyteClient(Config.auto().platform).create_task(request)
    except FlyteEntityAlreadyExistsException:
        return  # an earlier registration of this version got as far as this
    except FlyteSystemException as error:
        raise SettingsError(
            f"Flyte does not answer ({flyte_message(error)}); name it in ~/.flyte/config.yaml or FLYTECTL_CONFIG"
        ) from error
    except FlyteUserException as error:
        raise SettingsError(
            f"Flyte refuses what the tasks request: {flyte_message(error)}. Nothing was registered in "
            f"{project}-{domain}: request less in settings.toml, or configure Flyte as deploy/README.md describes "
            "(task_resources)"
        ) from error


def _largest(attribute: str) -> str:
    values = [str(value) for each in CLASSES.values() if (value := getattr(each["limits"], attribute))]
    return max(values, key=lambda value: int(value.removesuffix("Gi")), default="")


def flyte_message(error: Any) -> str:
    """Return what Flyte said, without gRPC's frame."""
    cause = error.__cause__ or error
    details = getattr(cause, "details", None)
    return str(details() if callable(details) else error).strip().rstrip(".")
