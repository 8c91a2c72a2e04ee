"""What Kubernetes says: who this process is there, what a cluster's pods wait for, what they wrote. Creates nothing."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.manifest import GROUP, PLURAL, VERSION, Driver, as_cluster_name

REQUEST_TIMEOUT = 10.0  # seconds, of one request to the API server
POD_IDENTITY = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # mounted into every pod that may use the API

logger = logging.getLogger(__name__)


def explain(config: ClusterConfig, run_name: str) -> str:
    """What the cluster's pods that are not ready wait for, and what could not be made of it, in sentences."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    name, namespace = as_cluster_name(run_name), target_namespace(config)
    try:
        pods = [pod for pod in pods_of(name, namespace) if not is_ready(pod)]
        events = call("CoreV1Api", "list_namespaced_event", namespace).items
    except (ApiException, HTTPError) as error:
        return f"What its pods wait for is unknown: {error}."
    warnings: dict[str, str] = {}
    for event in sorted(events, key=lambda event: event.metadata.resource_version.zfill(20)):
        if event.involved_object.name.startswith(f"{name}-"):
            warnings[event.involved_object.name] = event.message or event.reason
            if event.reason == "FailedCreate" and event.involved_object.kind == "ReplicaSet":
                warnings[""] = event.message
    sentences: dict[str, list[str]] = {}
    for pod in pods:
        sentences.setdefault(_waits_for(pod, warnings), []).append(pod.metadata.name)
    parts = [f"{_listed(names)}: {reason.rstrip('.')}." for reason, names in sentences.items()]
    if "" in warnings:
        parts.append(f"A pod could not be created: {warnings['']}.")
    return " ".join(parts)


def worker_log(config: ClusterConfig, worker_name: str, num_lines: int) -> str:
    """The last lines that the worker's pods wrote, of a container that has died before its successor's."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    namespace = target_namespace(config)
    name = worker_name.rpartition("-default-worker-")[0]  # as the operator calls the workers of a cluster
    logs = []
    with contextlib.suppress(ApiException, HTTPError):  # the API server, or the pod's node, is out of reach
        pods = [pod for pod in pods_of(name, namespace, "worker") if pod.metadata.name.startswith(f"{worker_name}-")]
        for pod, previous in itertools.product(pods, (True, False)):
            with contextlib.suppress(ApiException):  # there is no previous container, or none has started yet
                logs.append(
                    call(
                        "CoreV1Api",
                        "read_namespaced_pod_log",
                        pod.metadata.name,
                        namespace,
                        container="worker",
                        previous=previous,
                        tail_lines=num_lines,
                    )
                )
    return "".join(logs)


def is_in_pod() -> bool:
    """Whether this process runs in a pod that may use the API."""
    return (POD_IDENTITY / "token").exists() and "KUBERNETES_SERVICE_HOST" in os.environ


def target_namespace(config: ClusterConfig) -> str:
    """Where the cluster is, or would be, made."""
    if config.kubernetes.namespace:
        return config.kubernetes.namespace
    if is_in_pod():
        return (POD_IDENTITY / "namespace").read_text().strip()
    from kubernetes.config import ConfigException, list_kube_config_contexts

    try:
        _, context = list_kube_config_contexts()
    except ConfigException:
        return "default"  # preflight says that there is no kubeconfig
    return str(context["context"].get("namespace") or "default")


def driver_pod() -> Driver | None:
    """The pod that this process runs in; None outside Kubernetes, or where the pod cannot be read."""
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    if not is_in_pod():
        return None
    namespace = (POD_IDENTITY / "namespace").read_text().strip()
    try:
        pod = call("CoreV1Api", "read_namespaced_pod", socket.gethostname(), namespace)
    except (ApiException, HTTPError) as error:
        logger.warning(
            "this process's own pod cannot be read (%s): if it is killed, its Dask cluster goes by idle_timeout only",
            api_message(error),
        )
        return None
    return Driver(
        pod.metadata.name, pod.metadata.uid, namespace, pod.spec.containers[0].image, pod.metadata.labels or {}
    )


def api_message(error: Exception) -> str:
    """What the API server had to say, where it is a kubernetes.client.ApiException, or what happened to the request."""
    try:
        return str(json.loads(getattr(error, "body", ""))["message"])
    except (TypeError, ValueError, KeyError):
        return str(error)


def _waits_for(pod: Any, events: Mapping[str, str]) -> str:
    for status in [*(pod.status.init_container_statuses or []), *(pod.status.container_statuses or [])]:
        waiting, ended = status.state.waiting, status.last_state.terminated
        if ended is not None and not status.ready:
            reason = f"its container ended with code {ended.exit_code} ({ended.reason})"
            return f"{reason} and is started again" if waiting is None else f"{reason}: {waiting.message}"
        if waiting is not None and waiting.message:
            return f"{waiting.reason}: {waiting.message}"
    for condition in pod.status.conditions or []:
        if condition.type == "PodScheduled" and condition.status != "True":
            return f"cannot be placed on a node: {condition.message}"
    last_event = events.get(pod.metadata.name)
    return f"{pod.status.phase}, last event: {last_event}" if last_event else f"{pod.status.phase}"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def pods_of(name: str, namespace: str, component: str = "") -> list[Any]:
    selector = f"dask.org/cluster-name={name}" + (f",dask.org/component={component}" if component else "")
    return list(call("CoreV1Api", "list_namespaced_pod", namespace, label_selector=selector).items)


def is_ready(pod: Any) -> bool:
    conditions = pod.status.conditions or []
    return pod.metadata.deletion_timestamp is None and any(
        condition.type == "Ready" and condition.status == "True" for condition in conditions
    )


def read_cluster(name: str, namespace: str) -> dict[str, Any] | None:
    from kubernetes.client import ApiException

    try:
        cluster: dict[str, Any] = call(
            "CustomObjectsApi", "get_namespaced_custom_object", GROUP, VERSION, namespace, PLURAL, name
        )
    except ApiException as error:
        if error.status == 404:
            return None
        raise
    return cluster


def call(api: str, method: str, *args: Any, **kwargs: Any) -> Any:
    """One request to the API server, with a time limit."""
    return getattr(_api(api), method)(*args, _request_timeout=REQUEST_TIMEOUT, **kwargs)


@functools.cache
def _api(name: str) -> Any:
    from kubernetes import client, config
    from urllib3 import Retry

    config.load_config()
    configuration = client.Configuration.get_default_copy()
    configuration.retries = Retry(connect=3, read=0)  # by default, what has timed out is asked three times more
    return getattr(client, name)(client.ApiClient(configuration))
