"""Tell the pods of runs on a node that they have to go: the runs save their state, and go on elsewhere.

For an operator, or a cloud's hook before it takes a machine away. Other pods stay: `kubectl drain` moves those too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from flyte_ddp.cluster.kubernetes.api import call, find
from flyte_ddp.cluster.kubernetes.manifest import MANAGED_BY
from flyte_ddp.errors import ClusterError, ConfigError

MIN_GRACE = 10  # seconds in which a small checkpoint is written
EVICTION_TIMEOUT = 30.0  # seconds, besides a pod's grace, for it to be gone; and for a disruption budget to allow it
POLL_INTERVAL = 0.5
TOO_MANY_REQUESTS = 429  # a disruption budget does not allow the eviction now


def drain(node: str) -> Iterator[str]:
    """Let no new pods onto `node`, evict the workers and schedulers of runs there, and wait until they have left.

    Returns:
        What happens, one line each, as it happens.

    Raises:
        ConfigError: there is no such node.
        ClusterError: the API server refuses, or a pod did not leave in time.
    """
    if find("CoreV1Api", "read_node", node) is None:
        names = sorted(each.metadata.name for each in call("CoreV1Api", "list_node").items)
        raise ConfigError(f"node: expected one of {', '.join(names)}, got {node!r}")
    pods = [pod for component in ("worker", "scheduler") for pod in _pods_on(node, component)]
    if not pods:
        yield f"{node} has no pod of a run: nothing to do"
        return
    call("CoreV1Api", "patch_node", node, {"spec": {"unschedulable": True}})
    yield f"{node} takes no new pods; to undo that: kubectl uncordon {node}"
    begun = time.monotonic()
    for pod in pods:
        yield from _evict(pod)
    for pod in pods:
        grace = pod.spec.termination_grace_period_seconds or 0
        while _is_there(pod):
            if time.monotonic() > begun + grace + EVICTION_TIMEOUT:
                raise ClusterError(f"{_name(pod)} has not left within {grace + EVICTION_TIMEOUT:.0f} s")
            time.sleep(POLL_INTERVAL)
        yield f"{_name(pod)} has left after {time.monotonic() - begun:.0f} s"


def _evict(pod: Any) -> Iterator[str]:
    name, namespace = pod.metadata.name, pod.metadata.namespace
    grace = pod.spec.termination_grace_period_seconds or 0
    if pod.metadata.deletion_timestamp:
        yield f"{_name(pod)} leaves already: it is not told again, because a second SIGTERM would end it at once"
        return
    if grace < MIN_GRACE:
        yield f"{_name(pod)}: expected a grace of at least {MIN_GRACE} s for a last checkpoint, got {grace} s"
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name, "namespace": namespace}}
    deadline = time.monotonic() + EVICTION_TIMEOUT
    while (
        call("CoreV1Api", "create_namespaced_pod_eviction", name, namespace, eviction, ignored=(404, TOO_MANY_REQUESTS))
        is None
        and _is_there(pod)
        and time.monotonic() < deadline
    ):
        time.sleep(POLL_INTERVAL)
    yield f"{_name(pod)} is told to go, and has {grace} s"


def _pods_on(node: str, component: str) -> list[Any]:
    labels = {**MANAGED_BY, "dask.org/component": component}
    selector = ",".join(f"{key}={value}" for key, value in labels.items())
    found = call(
        "CoreV1Api", "list_pod_for_all_namespaces", field_selector=f"spec.nodeName={node}", label_selector=selector
    )
    return [pod for pod in found.items if pod.status.phase not in ("Succeeded", "Failed")]


def _is_there(pod: Any) -> bool:
    now = find("CoreV1Api", "read_namespaced_pod", pod.metadata.name, pod.metadata.namespace)
    return now is not None and now.metadata.uid == pod.metadata.uid


def _name(pod: Any) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
