"""Checks for obstacles that would keep a Dask cluster from ever starting, before anything is created.

Each finding is a sentence that ends in its remedy. Checks without RBAC permission are skipped. An API server that does
not answer is no finding: `call` waits for it, and raises ClusterError in the end.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.api import api_message, call, is_in_pod
from flyte_ddp.cluster.kubernetes.manifest import GROUP, PLURAL, POLICY_GROUP, POLICY_PLURAL, VERSION
from flyte_ddp.errors import PreflightError

# All requests of this folder, as (verb, API group, resource, subresource), which deploy/rbac.yaml grants.
NEEDED_EVERYWHERE = [
    ("create", GROUP, PLURAL, ""),
    ("get", GROUP, PLURAL, ""),
    ("delete", GROUP, PLURAL, ""),
    ("get", "", "pods", ""),
    ("list", "", "pods", ""),
    ("get", "", "pods", "log"),
    ("list", "", "events", ""),
    ("create", POLICY_GROUP, POLICY_PLURAL, ""),
    ("create", "", "secrets", ""),
]
NEEDED_OUTSIDE = [("get", "", "services", ""), ("create", "", "pods", "portforward")]

# Conditions of a node that pass, which Kubernetes expresses as taints too.
TEMPORARY_TAINTS = "node.kubernetes.io/"
OPERATOR_LABELS = "app.kubernetes.io/name=dask-kubernetes-operator"  # as its Helm chart and deploy/ set them

logger = logging.getLogger(__name__)


def preflight(config: ClusterConfig, spec: Mapping[str, Any], namespace: str) -> None:
    """Check that `spec`, a DaskCluster, can start in `namespace`.

    Raises:
        PreflightError: it cannot, with each finding.
        ClusterError: the API server does not answer.
    """
    findings = list(find_obstacles(config, spec["spec"], namespace))
    if findings:
        raise PreflightError(findings)


def find_obstacles(config: ClusterConfig, spec: Mapping[str, Any], namespace: str) -> Iterator[str]:
    """Yield a sentence for each obstacle to a DaskCluster with this `spec`."""
    no_access = check_access()
    if no_access:
        yield no_access
        return  # everything else would fail for the same reason
    workers = [each for each in spec["worker"]["spec"]["containers"] if each["name"] == "worker"]
    if not all(each.get("image") for each in workers):
        yield (
            "no image is set, and this process runs in no pod whose image could be used; set `kubernetes.image` in the "
            "cluster's configuration to an image built from this project's Dockerfile"
        )
    yield from _check_sizes(config)
    yield from _check_operator()
    namespace_missing = _check_namespace(namespace)
    if namespace_missing:
        yield namespace_missing
        return
    yield from _check_permissions(namespace)
    yield from _check_quotas(spec, namespace)
    yield from _check_nodes(config, spec)


def check_access() -> str:
    """Return why the API server cannot be used; "" if it can."""
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        call("VersionApi", "get_code")
    except (ApiException, ConfigException, HTTPError) as error:  # it refuses, has no valid certificate, or is not named
        return (
            f"this process has no access to a Kubernetes API server ({api_message(error)}); set KUBECONFIG to a valid "
            "kubeconfig, or run in a pod whose service account's token is mounted"
        )
    return ""


def _check_sizes(config: ClusterConfig) -> Iterator[str]:
    pods = config.kubernetes
    if quantity(pods.shared_memory) > quantity(pods.worker_memory):
        yield (
            f"shared_memory ({pods.shared_memory}) is a part of worker_memory, which is {pods.worker_memory} only; "
            "raise worker_memory or lower shared_memory"
        )


def _check_operator() -> Iterator[str]:
    from kubernetes.client import ApiException

    try:
        call("CustomObjectsApi", "get_api_resources", GROUP, VERSION)
    except ApiException as error:
        if error.status != 404:
            raise
        yield (
            f"the Dask operator is not installed: this Kubernetes cluster does not know {PLURAL}.{GROUP}; "
            "install it as in deploy/README.md"
        )
        return
    with _skip_if_forbidden("the pods of the Dask operator"):
        pods = call("CoreV1Api", "list_pod_for_all_namespaces", label_selector=OPERATOR_LABELS).items
        # No pods may mean that the operator has other labels.
        if pods and not any(pod.status.phase == "Running" for pod in pods):
            where = f"{pods[0].metadata.namespace}/{pods[0].metadata.name}"
            yield (
                f"the Dask operator is installed but not running (pod {where} is {pods[0].status.phase}); find out why "
                f"with: kubectl --namespace {pods[0].metadata.namespace} describe pod {pods[0].metadata.name}"
            )


def _check_namespace(namespace: str) -> str:
    from kubernetes.client import ApiException

    try:
        call("CoreV1Api", "read_namespace", namespace)
    except ApiException as error:
        if error.status == 404:
            return (
                f"namespace {namespace} does not exist; create it with kubectl create namespace {namespace}, or name "
                "another in the cluster's configuration"
            )
        logger.debug("preflight: no permission to see whether namespace %s exists: %s", namespace, api_message(error))
    return ""


def _check_permissions(namespace: str) -> Iterator[str]:
    for verb, group, resource, subresource in NEEDED_EVERYWHERE + ([] if is_in_pod() else NEEDED_OUTSIDE):
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {
                "resourceAttributes": {
                    "namespace": namespace,
                    "verb": verb,
                    "group": group,
                    "resource": resource,
                    "subresource": subresource,
                }
            },
        }
        if not call("AuthorizationV1Api", "create_self_subject_access_review", review).status.allowed:
            what = resource + (f"/{subresource}" if subresource else "") + (f".{group}" if group else "")
            who = "this pod's service account" if is_in_pod() else "the kubeconfig's user"
            yield (
                f"{who} may not {verb} {what} in namespace {namespace}; have deploy/rbac.yaml applied to that "
                "namespace and bound to it"
            )


def _check_quotas(spec: Mapping[str, Any], namespace: str) -> Iterator[str]:
    pods = [(1, spec["scheduler"]), (spec["worker"]["replicas"], spec["worker"])]
    needs = needs_of([(count, requests_of(each["spec"])) for count, each in pods])
    with _skip_if_forbidden(f"the quotas of namespace {namespace}"):
        for excess in exceeded_quotas(needs, namespace):
            yield excess.format(who="this run") + "; ask for fewer or smaller nodes, or have the quota raised"


def exceeded_quotas(needs: Mapping[str, Decimal], namespace: str) -> Iterator[str]:
    """Yield a sentence, with a gap `{who}`, for each quota that could never grant `needs` (see `needs_of`)."""
    for quota in call("CoreV1Api", "list_namespaced_resource_quota", namespace).items:
        if quota.spec.scopes or quota.spec.scope_selector:
            continue  # it may not be about these pods
        for resource, limit in (quota.spec.hard or {}).items():
            need = needs.get(resource)
            if need is not None and need > quantity(limit):
                yield (
                    f"quota {quota.metadata.name} of namespace {namespace} allows {resource} up to {limit}, and "
                    f"{{who}} needs {_short(need)}"
                )


def _check_nodes(config: ClusterConfig, spec: Mapping[str, Any]) -> Iterator[str]:
    if config.kubernetes.autoscaled_nodes:
        return
    with _skip_if_forbidden("the nodes"):
        nodes = call("CoreV1Api", "list_node").items
        for role in ("worker", "scheduler"):
            pod = spec[role]["spec"]
            reasons = [_why_not(pod, node) for node in nodes]
            if all(reasons):
                counts = "; ".join(f"{reasons.count(reason)} {reason}" for reason in sorted(set(reasons)))
                request = ", ".join(f"{_short(amount)} {resource}" for resource, amount in requests_of(pod).items())
                remedy = "scheduler_pod_template" if role == "scheduler" else "node_selector or tolerations"
                yield (
                    f"no node could ever run a {role} pod, which requests {request} (of {len(nodes)} nodes: {counts}); "
                    f"request less, correct {remedy}, or set autoscaled_nodes where nodes are made "
                    "on demand"
                )


def _why_not(pod: Mapping[str, Any], node: Any) -> str:
    """Return why the pod can never run on the node, as a phrase after a number of nodes; "" if it can."""
    labels = node.metadata.labels or {}
    for key, value in pod.get("nodeSelector", {}).items():
        if labels.get(key) != value:
            return f"without the label {key}={value}"
    for taint in node.spec.taints or []:
        if taint.effect == "PreferNoSchedule" or taint.key.startswith(TEMPORARY_TAINTS):
            continue
        if not any(tolerates(toleration, taint) for toleration in pod.get("tolerations", [])):
            return f"with the taint {taint.key}={taint.value or ''}:{taint.effect}, which is not tolerated"
    for resource, amount in requests_of(pod).items():
        has = quantity((node.status.allocatable or {}).get(resource, "0"))
        if amount > has:
            return f"with {_short(has)} {resource} at most"
    return ""


def tolerates(toleration: Mapping[str, Any], taint: Any) -> bool:
    """Return whether the toleration, as in a pod's specification, covers the taint of a node."""
    if toleration.get("effect") and toleration["effect"] != taint.effect:
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint.key:
        return False
    return toleration.get("operator", "Equal") == "Exists" or (toleration.get("value") or "") == (taint.value or "")


def requests_of(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the sum of the containers' requests, by resource; a limit without a request counts as one."""
    total: dict[str, Decimal] = {}
    for container in pod["containers"]:
        resources = container.get("resources", {})
        for resource, amount in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
            total[resource] = total.get(resource, Decimal(0)) + quantity(amount)
    return total


def quantity(amount: object) -> Decimal:
    """Return a Kubernetes quantity, such as 500m, 2 or 8Gi, as a number of cores, bytes or devices.

    Raises:
        PreflightError: `amount` is not a quantity; only `pod_template` can hold such a thing.
    """
    from kubernetes.utils import parse_quantity  # imports a second of client, which the requests need anyway

    try:
        return Decimal(parse_quantity(str(amount)))
    except ValueError as error:
        raise PreflightError([f"{error}; correct the resources in `pod_template`"]) from error


def needs_of(pods: Iterable[tuple[int, Mapping[str, Decimal]]]) -> dict[str, Decimal]:
    """Return the resources of all pods, given as (count, requests), by the names that quotas use."""
    needs: dict[str, Decimal] = {"pods": Decimal(0)}
    for count, requests in pods:
        needs["pods"] += count
        for resource, amount in requests.items():
            names = [f"requests.{resource}", f"limits.{resource}"]
            if resource in ("cpu", "memory"):
                names.append(resource)
            for name in names:
                needs[name] = needs.get(name, Decimal(0)) + count * amount
    return needs


def _short(amount: Decimal) -> str:
    """Format a number for people: bytes in Gi, everything else as it is."""
    if amount >= 1 << 20:
        return f"{float(amount / (1 << 30)):.4g}Gi"
    return f"{float(amount):g}"


@contextlib.contextmanager
def _skip_if_forbidden(what: str) -> Iterator[None]:
    """Skip the checks in the block if this process has no permission for them."""
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        if error.status != 403:
            raise
        logger.debug("preflight: no permission to see %s", what)
