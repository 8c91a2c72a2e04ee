"""What would keep a Dask cluster from ever coming up, found before anything is created and any GPU is asked for.

Each finding is a sentence that ends in its remedy. What this process may not look at is not a finding: it is left out.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.api import api_message, call, is_in_pod
from flyte_ddp.cluster.kubernetes.manifest import GROUP, PLURAL, POLICY_GROUP, POLICY_PLURAL, VERSION
from flyte_ddp.errors import PreflightError

# Whatever kube.py does, as (verb, API group, resource, subresource). deploy/rbac.yaml grants these, a test compares.
NEEDED_EVERYWHERE = [
    ("create", GROUP, PLURAL, ""),
    ("get", GROUP, PLURAL, ""),
    ("delete", GROUP, PLURAL, ""),
    ("get", "", "pods", ""),
    ("list", "", "pods", ""),
    ("get", "", "pods", "log"),
    ("list", "", "events", ""),
    ("create", POLICY_GROUP, POLICY_PLURAL, ""),
]
NEEDED_OUTSIDE = [("get", "", "services", ""), ("create", "", "pods", "portforward")]

# Conditions of a node that pass, which Kubernetes expresses as taints too.
PASSING_TAINTS = "node.kubernetes.io/"
OPERATOR_LABELS = "app.kubernetes.io/name=dask-kubernetes-operator"  # as its Helm chart and deploy/ set them

logger = logging.getLogger(__name__)


def preflight(config: ClusterConfig, spec: Mapping[str, Any], namespace: str) -> None:
    """Check that `spec`, a DaskCluster, could come up in `namespace`.

    Raises:
        PreflightError: it could not.
    """
    findings = list(_findings(config, spec["spec"], namespace))
    if findings:
        raise PreflightError(findings)


def _findings(config: ClusterConfig, spec: Mapping[str, Any], namespace: str) -> Iterator[str]:
    unreachable = _check_reachable()
    if unreachable:
        yield unreachable
        return  # everything else would fail for the same reason
    workers = [each for each in spec["worker"]["spec"]["containers"] if each["name"] == "worker"]
    if not all(each.get("image") for each in workers):
        yield (
            "no image is set, and none can be taken from this process's own pod; set `image` in the cluster's "
            "configuration to one that is built from this project's Dockerfile"
        )
    yield from _check_operator()
    namespace_missing = _check_namespace(namespace)
    if namespace_missing:
        yield namespace_missing
        return
    yield from _check_permissions(namespace)
    yield from _check_quotas(spec, namespace)
    yield from _check_nodes(config, spec)


def _check_reachable() -> str:
    from kubernetes.client import ApiException
    from kubernetes.config import ConfigException
    from urllib3.exceptions import HTTPError

    try:
        call("VersionApi", "get_code")
    except (ApiException, ConfigException, HTTPError, OSError) as error:
        return (
            f"no Kubernetes API server can be reached ({type(error).__name__}: {error}); set KUBECONFIG to a valid "
            "kubeconfig, or run in a pod whose service account's token is mounted"
        )
    return ""


def _check_operator() -> Iterator[str]:
    from kubernetes.client import ApiException

    try:
        call("CustomObjectsApi", "get_api_resources", GROUP, VERSION)
    except ApiException as error:
        if error.status != 404:
            raise
        yield (
            f"the Dask operator is not installed: this Kubernetes cluster does not know {PLURAL}.{GROUP}; "
            "install it as deploy/README.md says"
        )
        return
    with _as_far_as_visible("whether the Dask operator runs"):
        pods = call("CoreV1Api", "list_pod_for_all_namespaces", label_selector=OPERATOR_LABELS).items
        # None at all may mean that it was installed under other labels.
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
        logger.debug("preflight: whether namespace %s exists is not visible: %s", namespace, api_message(error))
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
    needs = _needs(spec)
    with _as_far_as_visible(f"the quotas of namespace {namespace}"):
        for quota in call("CoreV1Api", "list_namespaced_resource_quota", namespace).items:
            if quota.spec.scopes or quota.spec.scope_selector:
                continue  # it may not be about these pods
            for resource, limit in (quota.spec.hard or {}).items():
                need = needs.get(resource)
                if need is not None and need > parse_quantity(limit):
                    yield (
                        f"quota {quota.metadata.name} of namespace {namespace} allows {resource} up to {limit}, and "
                        f"this run needs {_short(need)}; ask for fewer or smaller nodes, or have the quota raised"
                    )


def _check_nodes(config: ClusterConfig, spec: Mapping[str, Any]) -> Iterator[str]:
    if config.kubernetes.autoscaled_nodes:
        return
    with _as_far_as_visible("the nodes"):
        nodes = call("CoreV1Api", "list_node").items
        for role in ("worker", "scheduler"):
            pod = spec[role]["spec"]
            reasons = [_why_not(pod, node) for node in nodes]
            if all(reasons):
                counts = "; ".join(f"{reasons.count(reason)} {reason}" for reason in sorted(set(reasons)))
                request = ", ".join(f"{_short(amount)} {resource}" for resource, amount in requests_of(pod).items())
                yield (
                    f"no node could ever run a {role} pod, which requests {request} (of {len(nodes)} nodes: {counts}); "
                    "ask for less, correct node_selector or tolerations, or set autoscaled_nodes where nodes are made "
                    "on demand"
                )


def _why_not(pod: Mapping[str, Any], node: Any) -> str:
    """Why the pod can never run on the node, in words that follow a number of nodes; "" where it can."""
    labels = node.metadata.labels or {}
    for key, value in pod.get("nodeSelector", {}).items():
        if labels.get(key) != value:
            return f"without the label {key}={value}"
    for taint in node.spec.taints or []:
        if taint.effect == "PreferNoSchedule" or taint.key.startswith(PASSING_TAINTS):
            continue
        if not any(tolerates(toleration, taint) for toleration in pod.get("tolerations", [])):
            return f"with the taint {taint.key}={taint.value or ''}:{taint.effect}, which is not tolerated"
    for resource, amount in requests_of(pod).items():
        has = parse_quantity((node.status.allocatable or {}).get(resource, "0"))
        if amount > has:
            return f"with {_short(has)} {resource} at most"
    return ""


def tolerates(toleration: Mapping[str, Any], taint: Any) -> bool:
    """Whether the toleration, as a pod's specification has it, covers the taint of a node."""
    if toleration.get("effect") and toleration["effect"] != taint.effect:
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint.key:
        return False
    return toleration.get("operator", "Equal") == "Exists" or (toleration.get("value") or "") == (taint.value or "")


def requests_of(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """What the pod's containers request together, by resource; a limit without a request counts as one."""
    total: dict[str, Decimal] = {}
    for container in pod["containers"]:
        resources = container.get("resources", {})
        for resource, amount in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
            total[resource] = total.get(resource, Decimal(0)) + parse_quantity(str(amount))
    return total


def parse_quantity(text: str) -> Decimal:
    """Return a Kubernetes quantity, such as 500m, 2 or 8Gi, as a number of cores, bytes or things."""
    from kubernetes.utils import parse_quantity

    return Decimal(parse_quantity(text))


def _needs(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """What the whole cluster takes, by the names that quotas use."""
    num_workers = spec["worker"]["replicas"]
    needs: dict[str, Decimal] = {"pods": Decimal(num_workers + 1)}
    for count, role in ((num_workers, "worker"), (1, "scheduler")):
        for resource, amount in requests_of(spec[role]["spec"]).items():
            names = [f"requests.{resource}", f"limits.{resource}"]
            if resource in ("cpu", "memory"):
                names.append(resource)
            for name in names:
                needs[name] = needs.get(name, Decimal(0)) + count * amount
    return needs


def _short(amount: Decimal) -> str:
    """A number that a person can read: bytes in Gi, everything else as it is."""
    if amount >= 1 << 20:
        return f"{float(amount / (1 << 30)):.4g}Gi"
    return f"{float(amount):g}"


@contextlib.contextmanager
def _as_far_as_visible(what: str) -> Iterator[None]:
    """Leave out a check of what this process may not see."""
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        if error.status != 403:
            raise
        logger.debug("preflight: %s: not visible to this process", what)
