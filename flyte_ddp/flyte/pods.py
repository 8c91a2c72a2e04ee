"""Set the options of @task that describe pods.

The ranks of `Distributed` run in the task's own pod, or in the pods of a Dask cluster. With a
cluster, the task's pod is the driver's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flytekit import Resources
from flytekit.core.resources import ResourceSpec

from flyte_ddp.process.devices import REQUESTED_VARIABLE
from flyte_ddp.task_run.distributed import describe_sizes

SHARED_MEMORY = "/dev/shm"
# name of the container that flytekit completes with the task's image, command and resources
PRIMARY_CONTAINER = "primary"
# requests and limits of a driver's pod, which only waits for the ranks in a cluster's pods
DRIVER_RESOURCES = Resources(cpu="1", mem="2Gi")
# Options of @task that a driver's pod does not get: they are meant for the ranks.
NOT_FOR_DRIVER = ("requests", "limits", "resources", "accelerator", "shared_memory")
# A cluster's pods get only the sizes of a task: CPUs, memory and GPUs. These options of @task are
# lost, and a log line warns of them.
NOT_FOR_RANKS = ("accelerator", "pod_template", "pod_template_name", "secret_requests")


def make_rank_options(options: dict[str, Any], increase_shared_mem: bool) -> dict[str, Any]:
    """Return the options of a task whose ranks run in its own pod. A pod with GPUs gets their
    number in `REQUESTED_VARIABLE`.

    With `increase_shared_mem` the ranks get all of the pod's memory as shared memory, as with
    Elastic, unless the task or its pod template sets the shared memory.
    """
    options = dict(options)
    spec = getattr(options.get("pod_template"), "pod_spec", None)
    containers = (spec and spec.containers) or []
    mounts = [mount.mount_path for each in containers for mount in each.volume_mounts or []]
    if increase_shared_mem and not options.get("shared_memory") and SHARED_MEMORY not in mounts:
        options["shared_memory"] = True
    gpus = read_pod_sizes(options).get("gpus_per_node", 0)
    if gpus:
        # The ranks count their GPUs. With fewer than this number they fail, because they would
        # train on CPUs.
        environment = options.get("environment") or {}
        options["environment"] = {REQUESTED_VARIABLE: str(gpus), **environment}
    return options


def make_driver_options(options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the options of a task with ranks in a cluster's pods, and the names of the given
    options that do not reach the ranks' pods.
    """
    driver = {name: value for name, value in options.items() if name not in NOT_FOR_DRIVER}
    driver |= {"requests": DRIVER_RESOURCES, "limits": DRIVER_RESOURCES}
    return driver, [name for name in NOT_FOR_RANKS if options.get(name)]


def read_pod_sizes(options: dict[str, Any]) -> dict[str, Any]:
    """Return the sizes among a task's options as fields of a cluster: `gpus_per_node`,
    `worker_cpus` and `worker_memory`; `shared_memory` as well, if the task sets its size.
    """
    if options.get("resources") is not None:
        spec = ResourceSpec.from_multiple_resource(options["resources"])
        requests, limits = spec.requests, spec.limits
    else:
        requests, limits = (options.get(name) or Resources() for name in ("requests", "limits"))

    def limit_or_request(name: str) -> Any:
        value = getattr(limits, name)
        if value is None:
            value = getattr(requests, name)
        return value

    memory, shared = limit_or_request("mem"), options.get("shared_memory")
    if memory is not None:
        memory = str(memory)
    if not isinstance(shared, str):
        shared = None
    gpus = int(limit_or_request("gpu") or 0)
    return describe_sizes(limit_or_request("cpu"), memory, gpus, shared)


def make_pod_spec(grace_seconds: int, ports: Mapping[str, int]) -> Any:
    """Return the V1PodSpec of a task's pod. The pod declares `ports` (number by name), and
    Kubernetes kills it `grace_seconds` after SIGTERM.
    """
    from kubernetes.client import V1Container, V1ContainerPort, V1PodSpec

    declared = [V1ContainerPort(name=name, container_port=number) for name, number in ports.items()]
    container = V1Container(name=PRIMARY_CONTAINER, ports=declared or None)
    return V1PodSpec(containers=[container], termination_grace_period_seconds=grace_seconds)
