"""The pods of tasks: the options of @task for the driver's pod and the ranks' pods of
`Distributed`, and ports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flytekit import PodTemplate, Resources
from flytekit.core.resources import ResourceSpec

from flyte_ddp.launch.agent.devices import REQUESTED_VARIABLE

SHARED_MEMORY = "/dev/shm"
PRIMARY_CONTAINER = "primary"  # flytekit completes it with the task's image, command and resources
# of the pod that waits for the ranks of other pods
DRIVER_RESOURCES = Resources(cpu="1", mem="2Gi")
FOR_RANKS = ("accelerator", "pod_template", "pod_template_name", "secret_requests")


def fit_own_pod(options: dict[str, Any], increase_shared_mem: bool) -> dict[str, Any]:
    """Return the options of a task whose ranks run in its own pod.

    With `increase_shared_mem` they have all of the pod's memory as shared memory, as Elastic does
    it, unless the task or its pod template has some already.
    """
    options = dict(options)
    spec = getattr(options.get("pod_template"), "pod_spec", None)
    containers = (spec and spec.containers) or []
    mounts = [mount.mount_path for each in containers for mount in each.volume_mounts or []]
    if increase_shared_mem and not options.get("shared_memory") and SHARED_MEMORY not in mounts:
        options["shared_memory"] = True
    gpus = describe_pods(options).get("gpus_per_node", 0)
    if gpus:  # a pod that cannot see its GPUs must not train without them in silence
        options["environment"] = {
            REQUESTED_VARIABLE: str(gpus),
            **(options.get("environment") or {}),
        }
    return options


def fit_driver_pod(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a task whose ranks run in other pods, and the names of those that would
    be for these.
    """
    sizes = ("requests", "limits", "resources")
    driver = {
        name: value
        for name, value in options.items()
        if name not in (*sizes, "accelerator", "shared_memory")
    }
    driver |= {"requests": DRIVER_RESOURCES, "limits": DRIVER_RESOURCES}
    return driver, [name for name in FOR_RANKS if options.get(name)]


def describe_pods(options: dict[str, Any]) -> dict[str, Any]:
    """Return what the sizes among a task's options mean for a cluster: gpus_per_node, worker_cpus,
    worker_memory.

    Also shared_memory, if the task names its size.
    """
    if options.get("resources") is not None:
        spec = ResourceSpec.from_multiple_resource(options["resources"])
        requests, limits = spec.requests, spec.limits
    else:
        requests, limits = (options.get(name) or Resources() for name in ("requests", "limits"))

    def either(name: str) -> Any:
        value = getattr(limits, name)
        return getattr(requests, name) if value is None else value

    pods: dict[str, Any] = {}
    if gpus := int(either("gpu") or 0):
        pods["gpus_per_node"] = gpus
    if (cpus := either("cpu")) is not None:
        text = str(cpus)
        pods["worker_cpus"] = float(text[:-1]) / 1000 if text.endswith("m") else float(text)
    if (memory := either("mem")) is not None:
        pods["worker_memory"] = str(memory)
    if isinstance(shared := options.get("shared_memory"), str):
        pods["shared_memory"] = shared
    return pods


def pod_with(grace: int, ports: Mapping[str, int]) -> PodTemplate:
    """Return the template of a task's pod that is killed `grace` seconds after SIGTERM and declares
    named `ports`.
    """
    from kubernetes.client import V1Container, V1ContainerPort, V1PodSpec

    declared = [V1ContainerPort(name=name, container_port=number) for name, number in ports.items()]
    container = V1Container(name=PRIMARY_CONTAINER, ports=declared or None)
    return PodTemplate(
        V1PodSpec(containers=[container], termination_grace_period_seconds=grace), PRIMARY_CONTAINER
    )
