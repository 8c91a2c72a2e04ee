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
# name of the container that flytekit completes with the task's image, command and resources
PRIMARY_CONTAINER = "primary"
# requests and limits of a driver's pod, which waits for the ranks in other pods
DRIVER_RESOURCES = Resources(cpu="1", mem="2Gi")
FOR_RANKS = ("accelerator", "pod_template", "pod_template_name", "secret_requests")


def fit_own_pod(options: dict[str, Any], increase_shared_mem: bool) -> dict[str, Any]:
    """Return the options of a task whose ranks run in its own pod.

    With `increase_shared_mem` the ranks get all of the pod's memory as shared memory, as with
    Elastic. A task or a pod template with shared memory of its own stays as it is.
    """
    options = dict(options)
    spec = getattr(options.get("pod_template"), "pod_spec", None)
    containers = (spec and spec.containers) or []
    mounts = [mount.mount_path for each in containers for mount in each.volume_mounts or []]
    if increase_shared_mem and not options.get("shared_memory") and SHARED_MEMORY not in mounts:
        options["shared_memory"] = True
    gpus = describe_pods(options).get("gpus_per_node", 0)
    if gpus:  # A pod that cannot see its GPUs must not train without them in silence.
        own = options.get("environment") or {}
        options["environment"] = {REQUESTED_VARIABLE: str(gpus), **own}
    return options


def fit_driver_pod(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a task with ranks in other pods, and the names of the options that do
    not reach these pods.
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
    """Return a task's sizes as fields of a cluster: gpus_per_node, worker_cpus and worker_memory;
    shared_memory as well, if the task names its size.
    """
    if options.get("resources") is not None:
        spec = ResourceSpec.from_multiple_resource(options["resources"])
        requests, limits = spec.requests, spec.limits
    else:
        requests, limits = (options.get(name) or Resources() for name in ("requests", "limits"))

    def either(name: str) -> Any:
        value = getattr(limits, name)
        if value is None:
            value = getattr(requests, name)
        return value

    pods: dict[str, Any] = {}
    gpus, cpus, memory = int(either("gpu") or 0), either("cpu"), either("mem")
    shared = options.get("shared_memory")
    if gpus:
        pods["gpus_per_node"] = gpus
    if cpus is not None and str(cpus).endswith("m"):
        pods["worker_cpus"] = float(str(cpus)[:-1]) / 1000
    elif cpus is not None:
        pods["worker_cpus"] = float(str(cpus))
    if memory is not None:
        pods["worker_memory"] = str(memory)
    if isinstance(shared, str):
        pods["shared_memory"] = shared
    return pods


def pod_with(grace: int, ports: Mapping[str, int]) -> PodTemplate:
    """Return the template of a task's pod. The pod declares the named `ports`, and is killed
    `grace` seconds after SIGTERM.
    """
    from kubernetes.client import V1Container, V1ContainerPort, V1PodSpec

    declared = [V1ContainerPort(name=name, container_port=number) for name, number in ports.items()]
    container = V1Container(name=PRIMARY_CONTAINER, ports=declared or None)
    return PodTemplate(
        V1PodSpec(containers=[container], termination_grace_period_seconds=grace), PRIMARY_CONTAINER
    )
