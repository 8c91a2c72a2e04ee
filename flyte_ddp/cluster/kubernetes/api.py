"""Requests to the API server, and the state of a cluster's pods by its answers. Creates nothing.

The client `kubernetes` sends all requests, because it takes a timeout for each. kr8s, a dependency
of dask-kubernetes, forwards the scheduler's port to a driver outside the cluster. The client
`kubernetes` offers only sockets for that.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.cluster.config import FILLER, ClusterConfig
from flyte_ddp.cluster.kubernetes.manifest import (
    CLUSTER,
    COMPONENT,
    GROUP,
    KUEUE,
    KUEUE_VERSION,
    PLURAL,
    VERSION,
    Driver,
    cluster_name,
)
from flyte_ddp.cluster.kubernetes.resources import sum_requests
from flyte_ddp.config.waits import ANSWER_TIMEOUT, BEAT_INTERVAL
from flyte_ddp.errors import OUT_OF_MEMORY, ClusterError, abbreviate
from flyte_ddp.project.admission import IMAGE_VARIABLE

REQUEST_TIMEOUT = 10.0  # seconds for one request to the API server, which may ask a webhook
# seconds for an API server or an operator that restarts, and for each node to know a new Service
API_PATIENCE = 60.0
POLL_INTERVAL = 0.25  # seconds between two requests while something starts or ends
AWAY = (429, 500, 502, 503, 504)  # HTTP statuses that say nothing about the request itself
# directory that is mounted into every pod that may use the API
POD_IDENTITY = Path("/var/run/secrets/kubernetes.io/serviceaccount")

logger = logging.getLogger(__name__)


class ApiRefused(ClusterError):
    """The API server refuses a request, or this process has no access to an API server. The text
    is the server's message.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status  # HTTP status; 0 without access


@dataclass(frozen=True)
class PodEnd:
    # reason in the pod's status, such as OOMKilled or Error; "" if no container has ended
    reason: str = ""
    log: str = ""  # last lines of a worker's container and its successor; "" without a pod

    @property
    def is_out_of_memory(self) -> bool:
        """Return whether the kernel killed the container for exceeding its memory limit."""
        return self.reason == OUT_OF_MEMORY

    def __str__(self) -> str:
        text = f"its container ended ({self.reason})"
        if self.is_out_of_memory:
            text += ": it exceeded its memory limit; raise kubernetes.worker_memory"
        return text


def call(
    api: str,
    method: str,
    *args: Any,
    patience: float = API_PATIENCE,
    ignored: Sequence[int] = (),
    **kwargs: Any,
) -> Any:
    """Send one request. Repeat it every second for `patience` seconds while the API server is away.

    Args:
        ignored: HTTP statuses for which None is returned.

    Raises:
        ClusterError: the API server did not answer within that time.
        ApiRefused: the server refuses, or this process has no access to a server.
    """
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException
    from urllib3.exceptions import HTTPError

    deadline, has_warned = time.monotonic() + patience, False
    while True:
        try:
            return getattr(_api(api), method)(*args, _request_timeout=REQUEST_TIMEOUT, **kwargs)
        except ApiException as error:
            if error.status in ignored:
                return None
            if error.status not in AWAY:
                raise ApiRefused(_describe(error), error.status) from error
            failure: Exception = error
        except ConfigException as error:
            raise ApiRefused(str(error)) from error
        except (HTTPError, OSError) as error:
            failure = error
        if time.monotonic() + BEAT_INTERVAL > deadline:
            raise ClusterError(
                f"the Kubernetes API server does not answer: {_describe(failure)}"
            ) from failure
        if not has_warned:
            logger.warning(
                "the Kubernetes API server does not answer (%s); trying again for %g s",
                _describe(failure),
                patience,
            )
        has_warned = True
        time.sleep(BEAT_INTERVAL)


def find(api: str, method: str, *args: Any, patience: float = API_PATIENCE) -> Any:
    """Send one request as `call` does. Return None if the API server has no such object."""
    return call(api, method, *args, patience=patience, ignored=(404,))


def explain(config: ClusterConfig, run_name: str) -> str:
    """Return sentences about the pods that are not ready or could not be created, with the reasons.

    For other kinds of cluster the result is "".
    """
    if config.resolved_kind != "kubernetes":
        return ""
    name, namespace = cluster_name(run_name), target_namespace(config)
    try:
        pods = [pod for pod in pods_of(name, namespace) if not is_ready(pod)]
        events = call("CoreV1Api", "list_namespaced_event", namespace, patience=0).items
    except ClusterError as error:
        return f"The reason why its pods are not ready is unknown: {error}."
    events = sorted(events, key=lambda event: event.metadata.resource_version.zfill(20))
    warnings = {each.involved_object.name: each.message or each.reason for each in events}
    verdicts = {}
    if config.kubernetes.queue:
        verdicts = queue_verdicts(namespace)
    waiting: dict[str, list[str]] = {}
    for pod in pods:
        reason = verdicts.get(pod.metadata.name) or _pending_reason(pod, warnings)
        waiting.setdefault(reason, []).append(pod.metadata.name)
    parts = []
    for reason, names in waiting.items():
        parts.append(f"{abbreviate(names, 1)}: {reason.rstrip('.')}.")
    refusals = []
    for event in events:
        owner = event.involved_object
        is_refusal = (event.reason, owner.kind) == ("FailedCreate", "ReplicaSet")
        if is_refusal and owner.name.startswith(f"{name}-"):
            refusals.append(f"A pod could not be created: {event.message}.")
    return " ".join([*parts, *refusals[-1:]])


def count_waiting(config: ClusterConfig, run_name: str) -> int:
    """Return the number of pods that wait for room and are not needed for a start; 0 if it is not
    known.

    Kueue has not admitted them. A filler does not need pods either that fit on no node now.
    """
    has_further = config.kubernetes.queue or config.preset == FILLER
    if config.resolved_kind != "kubernetes" or not has_further:
        return 0
    try:
        pods = pods_of(cluster_name(run_name), target_namespace(config))
    except ClusterError:
        return 0
    # Kueue deletes pods that it does not admit, and others replace them.
    return sum(
        _waits_for_room(pod, config.preset == FILLER)
        for pod in pods
        if pod.metadata.deletion_timestamp is None
    )


def _waits_for_room(pod: Any, is_filler: bool) -> bool:
    if pod.spec.scheduling_gates:
        return True
    reasons = [
        each.reason
        for each in pod.status.conditions or []
        if each.type == "PodScheduled" and each.status != "True"
    ]
    return is_filler and "Unschedulable" in reasons


def pod_end(config: ClusterConfig, name: str, began_at: float, num_lines: int = 0) -> PodEnd:
    """Return how the container of a lost worker or an earlier attempt ended, with its last lines.

    This takes a moment, because the kubelet reports a container's end later than Dask notices it.

    Args:
        config: the cluster's config. For kinds other than kubernetes nothing is known.
        name: the name of the pod, which is also the worker's name.
        began_at: start of the attempt, in seconds since the epoch. A container that ended earlier,
            for example because there was no scheduler yet, is not the lost container.
        num_lines: number of lines of a worker's log to return.
    """
    if config.resolved_kind != "kubernetes":
        return PodEnd()
    deadline = time.monotonic() + ANSWER_TIMEOUT
    try:
        namespace = target_namespace(config)
        while True:
            pod = find("CoreV1Api", "read_namespaced_pod", name, namespace, patience=0)
            reason = ""
            if pod:
                reason = _end_reason(pod, began_at)
            # A deleted pod's container reports no end.
            is_deleted = not pod or pod.metadata.deletion_timestamp is not None
            if reason or is_deleted or time.monotonic() > deadline:
                lines = ""
                if pod:
                    lines = _last_lines(pod, namespace, num_lines)
                return PodEnd(reason, lines)
            time.sleep(POLL_INTERVAL)
    except Exception as error:  # any error is possible; a diagnosis must not hide the failure
        logger.debug("how pod %s ended is unknown: %s", name, error)
    return PodEnd()


def is_in_pod() -> bool:
    """Return whether this process runs in a pod that may use the API."""
    return (POD_IDENTITY / "token").exists() and "KUBERNETES_SERVICE_HOST" in os.environ


def own_namespace() -> str:
    """Return the namespace of the pod that this process runs in; "" outside Kubernetes."""
    if not is_in_pod():
        return ""
    return (POD_IDENTITY / "namespace").read_text(encoding="utf-8").strip()


def target_namespace(config: ClusterConfig) -> str:
    """Return the namespace for the cluster."""
    return config.kubernetes.namespace or own_namespace() or context_namespace() or "default"


def context_namespace() -> str:
    """Return the namespace of the kubeconfig's context; "" if the context has no namespace."""
    from kubernetes.config import ConfigException, list_kube_config_contexts

    with contextlib.suppress(ConfigException):  # preflight reports that there is no kubeconfig
        return str(list_kube_config_contexts()[1]["context"].get("namespace") or "")
    return ""


def driver_pod() -> Driver | None:
    """Return the pod that this process runs in. Return None outside Kubernetes, or if the pod
    cannot be read.
    """
    from kubernetes.client import ApiClient

    namespace = own_namespace()
    if not namespace:
        return None
    try:
        pod = call("CoreV1Api", "read_namespaced_pod", socket.gethostname(), namespace)
    except ApiRefused as error:
        logger.warning(
            "this process's own pod cannot be read (%s): if it is killed, its Dask cluster goes by "
            "idle_timeout only",
            error,
        )
        return None
    meta, spec = pod.metadata, ApiClient().sanitize_for_serialization(pod.spec)
    return Driver(
        meta.name, meta.uid, namespace, own_image(pod), meta.labels or {}, sum_requests(spec)
    )


def own_image(pod: Any) -> str:
    """Return the image of the container that this process runs in. The pod may have sidecars.

    The container has the task's registered image, or Flyte marks it, or it has the pod's name.
    """
    image = os.environ.get(IMAGE_VARIABLE)
    name = (pod.metadata.annotations or {}).get("primary_container_name", pod.metadata.name)
    own = max(pod.spec.containers, key=lambda each: (each.image == image, each.name == name))
    return str(own.image)


def _describe(error: Exception) -> str:
    """Return the API server's message in a kubernetes.client.ApiException, or describe another
    failure of the request.
    """
    with contextlib.suppress(TypeError, ValueError, KeyError):
        return str(json.loads(getattr(error, "body", ""))["message"])
    status = getattr(error, "status", 0)
    if status:
        return f"HTTP {status} {getattr(error, 'reason', '')}"
    cause = getattr(error, "reason", None)  # urllib3's MaxRetryError has one
    if isinstance(cause, Exception):
        return repr(cause)
    return repr(error)


def pods_of(name: str, namespace: str) -> list[Any]:
    request = ("CoreV1Api", "list_namespaced_pod", namespace)
    return list(call(*request, label_selector=f"{CLUSTER}={name}", patience=0).items)


def locate_nodes(workers: Sequence[str], namespace: str) -> list[tuple[dict[str, str], float]]:
    """Return the labels of each worker's node, and when its pod started, in seconds since the
    epoch.

    Args:
        namespace: of pods with the names of the workers; "" if this pod, or this machine outside
            Kubernetes, counts as the node of each worker.

    Raises:
        ClusterError: the pods and nodes cannot be read.
    """
    host = socket.gethostname()
    if not namespace:
        workers, namespace = [host] * len(workers), own_namespace()
    if not namespace:
        return [({"kubernetes.io/hostname": host}, 0.0)] * len(workers)
    nodes = call("CoreV1Api", "list_node", patience=0).items
    labels = {node.metadata.name: node.metadata.labels for node in nodes}
    if len(set(workers)) == 1:
        pods = [call("CoreV1Api", "read_namespaced_pod", workers[0], namespace, patience=0)]
    else:
        # A request for each of a thousand pods would take many seconds.
        request = ("CoreV1Api", "list_namespaced_pod", namespace)
        pods = call(*request, label_selector=f"{COMPONENT}=worker", patience=0).items
    by_name = {pod.metadata.name: pod for pod in pods}
    found = []
    for name in workers:
        if name not in by_name:
            raise ClusterError(f"there is no pod {name}")
        pod = by_name[name]
        found.append((labels.get(pod.spec.node_name, {}), pod.status.start_time.timestamp()))
    return found


def is_ready(pod: Any) -> bool:
    """Return whether the pod serves, and is not being deleted."""
    return pod.metadata.deletion_timestamp is None and any(
        each.type == "Ready" and each.status == "True" for each in pod.status.conditions or []
    )


def read_cluster(name: str, namespace: str, patience: float = API_PATIENCE) -> Any:
    request = ("get_namespaced_custom_object", GROUP, VERSION, namespace, PLURAL, name)
    return find("CustomObjectsApi", *request, patience=patience)


def queue_verdicts(namespace: str) -> dict[str, str]:
    """Return Kueue's own message about each pod that it has not admitted, by the pod's name."""
    request = ("list_namespaced_custom_object", KUEUE, KUEUE_VERSION, namespace, "workloads")
    found = call("CustomObjectsApi", *request, patience=0, ignored=(403, 404)) or {"items": []}
    verdicts: dict[str, str] = {}
    for workload in found["items"]:
        messages = {
            each["type"]: each["message"]
            for each in workload.get("status", {}).get("conditions", [])
            if each["status"] == "False"
        }
        message = messages.get("QuotaReserved") or messages.get("Admitted")
        if message:
            owners = workload["metadata"].get("ownerReferences", [])
            verdicts |= {each["name"]: f"waits in Kueue's queue: {message}" for each in owners}
    return verdicts


def _pending_reason(pod: Any, events: Mapping[str, str]) -> str:
    for status in [
        *(pod.status.init_container_statuses or []),
        *(pod.status.container_statuses or []),
    ]:
        waiting, ended = status.state.waiting, status.last_state.terminated
        if ended is not None and not status.ready:
            then = " and is started again"
            if waiting is not None:
                then = f": {waiting.message}"
            return f"its container ended with code {ended.exit_code} ({ended.reason}){then}"
        if waiting is not None and waiting.message:
            return f"{waiting.reason}: {waiting.message}"
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status != "True":
            return f"cannot be placed on a node: {condition.message}"
    return f"{pod.status.phase}, last event: {events.get(pod.metadata.name, 'none')}"


def _end_reason(pod: Any, began_at: float) -> str:
    """Return why a container of the pod failed after `began_at`; "" if no container failed."""
    oldest = datetime.datetime.fromtimestamp(int(began_at), datetime.timezone.utc)
    statuses = pod.status.container_statuses or []
    for status in sorted(statuses, key=lambda each: each.name != "worker"):  # sidecars come last
        ended, previous = status.state.terminated, status.last_state.terminated
        if not ended and previous and previous.finished_at >= oldest:
            ended = previous
        if ended and ended.exit_code:
            return str(ended.reason or f"exit code {ended.exit_code}")
    return ""


def _last_lines(pod: Any, namespace: str, num_lines: int) -> str:
    request = ("CoreV1Api", "read_namespaced_pod_log", pod.metadata.name, namespace)
    options: dict[str, Any] = {"container": "worker", "tail_lines": num_lines, "patience": 0}
    options["ignored"] = (400, 403, 404)  # the container does not exist yet, or no longer
    logs = [call(*request, previous=each, **options) for each in (True, False)]
    return "".join(filter(None, logs))  # the client returns None for an empty log


@functools.cache
def _api(name: str) -> Any:
    from kubernetes import client, config
    from urllib3 import Retry

    configuration = client.Configuration()
    # config.load_config is not used, because it prints a line about its choice.
    if is_in_pod():
        config.load_incluster_config(configuration)
    else:
        config.load_kube_config(client_configuration=configuration)
    # `call` repeats requests. urllib3 would log a warning for each try.
    configuration.retries = Retry(0, redirect=3)
    return getattr(client, name)(client.ApiClient(configuration))
