"""Checks of a Kubernetes cluster before a run creates anything there. The preflight and the doctor
use the same list of checks.

A check yields a finding for each problem. The text of a finding ends with the remedy. Without RBAC
permission a check raises the API server's refusal, and `run_checks` notes that the check was
skipped. An API server that does not answer raises ClusterError.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.metadata import version
from typing import Any

from flyte_ddp.cluster.config import FILLER, ClusterConfig
from flyte_ddp.cluster.kubernetes.api import API_PATIENCE, ApiRefused, call, find, is_in_pod
from flyte_ddp.cluster.kubernetes.manifest import (
    GROUP,
    KUEUE,
    KUEUE_VERSION,
    MANAGED_BY,
    PLURAL,
    POLICY_GROUP,
    POLICY_PLURAL,
    QUEUE_PRIORITY,
    VERSION,
    WORKER_GROUPS,
)
from flyte_ddp.cluster.kubernetes.resources import (
    add,
    describe,
    quantities,
    quantity,
    short,
    sum_requests,
)
from flyte_ddp.errors import ConfigError
from flyte_ddp.project.admission import Allowed, check_allowed

# All requests of this folder, as (verb, API group, resource, subresource). The file
# deploy/rbac.yaml grants them.
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
NEEDED_OUTSIDE = [
    ("list", "", "services", ""),
    ("get", "", "pods", "portforward"),  # a WebSocket uses this before Kubernetes 1.35
    ("create", "", "pods", "portforward"),
]
NEEDED_FOR_QUEUES = [
    ("create", GROUP, WORKER_GROUPS, ""),
    ("list", KUEUE, "workloads", ""),
    ("list", KUEUE, "localqueues", ""),
]
KINDS = {PLURAL, WORKER_GROUPS}

GOOD, WARNING, BAD, UNKNOWN = "ok", "warning", "FAILED", "unknown"
STARTING, NODES = "starting", "nodes"
# beginning of the taints by which Kubernetes marks a node's temporary conditions
TEMPORARY_TAINTS = "node.kubernetes.io/"
# the operator's name in its upstream image, and in the labels of its Helm chart and of deploy/
OPERATOR_NAME = "dask-kubernetes-operator"
OPERATOR_MODULE = "dask_kubernetes"  # module that the operator's container runs
INSTALLED_VERSION = "app.kubernetes.io/version"  # a label that deploy/operator/ sets
UPGRADE = "upgrade it with its CRDs as deploy/RUNBOOK.md describes (Upgrades)"
PSA = "pod-security.kubernetes.io/enforce"
# names and purposes of the policies in deploy/networkpolicy.yaml
POLICIES = {
    "flyte-ddp": "everybody away until a run's own is there",
    "flyte-ddp-tenant": "other namespaces away from the pods of tasks",
}
# name of the cluster that the doctor pretends to create, and of its secret; policies compare them
DOCTOR_NAME = "ddp-doctor-00000000"
ENDED = ("Succeeded", "Failed")  # phases of a pod
# placeholder for a task's image that this process does not know
UNKNOWN_IMAGE = "unknown.invalid/image"


@dataclass(frozen=True)
class Finding:
    """The result of a check, with the remedy of a problem."""

    text: str
    level: str = BAD  # BAD, GOOD, WARNING or UNKNOWN
    # STARTING if the operator may be there in a minute; NODES if other nodes may be there at
    # Flyte's next attempt
    passes: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}"


@dataclass(frozen=True)
class Setup:
    """The cluster to check, and the known facts about the tasks that start it."""

    config: ClusterConfig
    spec: Mapping[str, Any]  # the DaskCluster's specification
    namespace: str
    # service account of the tasks, for the check of rights; "" for this process's own account
    account: str = ""
    # requests of the driver's pod; empty if the pod is not in `namespace`
    driver: Mapping[str, Decimal] = field(default_factory=dict)
    # table of settings.toml; None if it is unknown or the task itself checks it
    allowed: Allowed | None = None


Check = Callable[[Setup], Iterator[Finding]]


def run_checks(setup: Setup) -> tuple[list[Finding], list[str]]:
    """Return the findings of all checks, and the names of the checks that lack RBAC permission.

    Raises:
        PreflightError: a resource in the pods is not a quantity.
        ClusterError: the API server does not answer.
    """
    findings: list[Finding] = []
    unseen: list[str] = []
    for what, check in CHECKS:
        found: list[Finding] = []
        try:
            found.extend(check(setup))  # keeps findings that came before an exception
            found = found or [Finding(what, GOOD)]
        except ApiRefused as error:
            if error.status != 403:
                raise
            unseen.append(what)
        findings += found
        if check in (_check_access, _check_namespace) and BAD in {each.level for each in found}:
            break  # everything else would fail for the same reason
    return findings, unseen


def _check_access(setup: Setup) -> Iterator[Finding]:
    patience = API_PATIENCE
    if setup.account:
        patience = 0  # a person waits for the doctor
    try:
        call("VersionApi", "get_code", patience=patience)
    # The server refuses, has no valid certificate, or is unknown.
    except ApiRefused as error:
        yield Finding(
            f"this process has no access to a Kubernetes API server ({error}); set KUBECONFIG to "
            "a valid kubeconfig, or run in a pod whose service account's token is mounted"
        )


def _check_config(setup: Setup) -> Iterator[Finding]:
    pods = setup.config.kubernetes
    if not pods.image:
        yield Finding(
            "no image is set, and this process runs in no pod whose image could be used; set "
            "`kubernetes.image` in the cluster's configuration to an image built from this "
            "project's Dockerfile"
        )
    if setup.allowed is not None:
        try:
            check_allowed(setup.config, setup.allowed, setup.namespace)
        except ConfigError as error:
            yield Finding(
                f"the tasks would refuse this cluster: {error}; add the value there and "
                "register again"
            )


def _check_kinds(setup: Setup) -> Iterator[Finding]:
    known = find("CustomObjectsApi", "get_api_resources", GROUP, VERSION)
    missing = set(KINDS)
    if known:
        missing -= {each.name for each in known.resources}
    if missing:
        yield Finding(
            "the Dask operator is not installed, or too old: this Kubernetes cluster does not know "
            f"{', '.join(sorted(missing))} of {GROUP}; install it as in deploy/README.md, or "
            f"{UPGRADE}"
        )


def _check_operator(setup: Setup) -> Iterator[Finding]:
    """Find the operator's Deployment by its image and command. Its labels may differ."""
    deployments = call("AppsV1Api", "list_deployment_for_all_namespaces").items
    operators = [each for each in deployments if _is_operator(each.spec.template)]
    if not operators:
        yield Finding(
            "the Dask operator does not run: no Deployment of any namespace runs it, so nothing "
            "makes pods of a DaskCluster; install it as in deploy/README.md",
            passes=STARTING,
        )
    for operator in operators:
        name, namespace = operator.metadata.name, operator.metadata.namespace
        pod, pinned = operator.spec.template, version("dask-kubernetes")
        image = pod.spec.containers[0].image
        installed = (pod.metadata.labels or {}).get(INSTALLED_VERSION)
        if f"dask/{OPERATOR_NAME}" in image:
            installed = image.rpartition(":")[2] or installed
        if not operator.status.available_replicas:
            remedy = f"scale deployment {name} --replicas=1"
            if operator.spec.replicas:
                remedy = f"describe deployment {name}"
            yield Finding(
                f"the Dask operator does not run: {name} has no available pod of "
                f"{operator.spec.replicas}, so nothing makes pods of a DaskCluster; find out why, "
                f"or start it: kubectl --namespace {namespace} {remedy}",
                passes=STARTING,
            )
        elif installed != pinned:
            level = UNKNOWN
            if installed:
                level = WARNING
            yield Finding(
                f"the operator {image} in namespace {namespace} has version "
                f"{installed or 'unknown'}, and this package pins {pinned}; {UPGRADE}",
                level,
            )


def _is_operator(pod: Any) -> bool:
    labels = pod.metadata.labels or {}
    if labels.get("app.kubernetes.io/name") == OPERATOR_NAME:
        return True
    for container in pod.spec.containers:
        words = [*(container.command or []), *(container.args or [])]
        if OPERATOR_NAME in (container.image or "") or OPERATOR_MODULE in " ".join(words):
            return True
    return False


def _check_namespace(setup: Setup) -> Iterator[Finding]:
    namespace = find("CoreV1Api", "read_namespace", setup.namespace)
    if namespace is None:
        yield Finding(
            f"namespace {setup.namespace} does not exist; create it with kubectl create namespace "
            f"{setup.namespace}, or name another in the cluster's configuration"
        )
    elif (namespace.metadata.labels or {}).get(PSA, "privileged") == "privileged":
        yield Finding(
            f"namespace {setup.namespace} lets privileged pods in; refuse them: "
            f"kubectl label --overwrite namespace {setup.namespace} {PSA}=baseline",
            WARNING,
        )


def _check_rights(setup: Setup) -> Iterator[Finding]:
    account, namespace = setup.account, setup.namespace
    method, user = "create_self_subject_access_review", {}
    needed = NEEDED_EVERYWHERE
    if account:
        method = "create_subject_access_review"
        user = {"user": f"system:serviceaccount:{namespace}:{account}"}
    elif not is_in_pod():
        needed = NEEDED_EVERYWHERE + NEEDED_OUTSIDE
    if setup.config.kubernetes.queue:
        needed = needed + NEEDED_FOR_QUEUES
    missing = []
    for verb, group, resource, subresource in needed:
        right = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
        review = {"spec": {**user, "resourceAttributes": {"namespace": namespace, **right}}}
        if not call("AuthorizationV1Api", method, review).status.allowed:
            what = "/".join(filter(None, (resource, subresource)))
            missing.append(f"{verb} {'.'.join(filter(None, (what, group)))}")
    who = "the kubeconfig's user"
    if is_in_pod():
        who = "this pod's service account"
    remedy = "have deploy/rbac.yaml applied to that namespace and bound to it"
    if account:
        who = f"service account {account}"
        names = f"s/NAMESPACE/{namespace}/g; s/flyte-ddp/{account}/g"
        remedy = f"apply it: sed '{names}' deploy/rbac.yaml | kubectl apply -f -"
    if missing:
        yield Finding(f"{who} may not {', '.join(missing)} in namespace {namespace}; {remedy}")


def _check_quotas(setup: Setup) -> Iterator[Finding]:
    """Compare the run with the whole of each quota, because other runs will return their share."""
    who = "this run"
    if setup.driver:
        who = "this run with its driver"
    needs = add([_sum_gang(setup), setup.driver])
    needs[f"count/{PLURAL}.{GROUP}"] = Decimal(1)
    for quota in call("CoreV1Api", "list_namespaced_resource_quota", setup.namespace).items:
        # A quota with scopes may not apply to these pods.
        if quota.spec.scopes or quota.spec.scope_selector:
            continue
        for resource, limit in (quota.spec.hard or {}).items():
            # The requests and limits of a run's pods are equal.
            amount = needs.get(re.sub(r"^(requests|limits)\.", "", resource), Decimal(0))
            if amount > quantity(limit):
                yield Finding(
                    f"quota {quota.metadata.name} of namespace {setup.namespace} allows "
                    f"{resource} up to {limit}, and {who} needs {short(amount)}; request less, or "
                    "have the quota raised"
                )


def _sum_gang(setup: Setup) -> dict[str, Decimal]:
    """Return the requests of the scheduler and the smallest number of workers, by resource."""
    scheduler, worker = (sum_requests(setup.spec[role]["spec"]) for role in ("scheduler", "worker"))
    return add([scheduler, *[worker] * setup.config.enough_nodes])


def _check_queue(setup: Setup) -> Iterator[Finding]:
    """Find what keeps Kueue from ever admitting the scheduler and `min_nodes` workers."""
    queue, namespace = setup.config.kubernetes.queue, setup.namespace
    if not queue:
        yield Finding("the queue: kubernetes.queue names none, so Kueue holds no pod back", GOOD)
        return
    kueue = ("CustomObjectsApi", "list_namespaced_custom_object", KUEUE, KUEUE_VERSION)
    found = find(*kueue, namespace, "localqueues")
    if found is None:
        yield Finding(
            f"kubernetes.queue: expected '' on a cluster without Kueue, got {queue!r}: it does not "
            f"know {KUEUE}/{KUEUE_VERSION}; install Kueue as in docs/clusters.md"
        )
        return
    queues = {each["metadata"]["name"]: each for each in found["items"]}
    if queue not in queues:
        names = ", ".join(sorted(queues)) or "it has none"
        yield Finding(
            f"kubernetes.queue: expected a LocalQueue of namespace {namespace} ({names}), got "
            f"{queue!r}"
        )
        return
    for condition in queues[queue].get("status", {}).get("conditions", []):
        if condition["type"] == "Active" and condition["status"] == "False":
            yield Finding(f"queue {queue} admits nothing: {condition['message']}")
    name = queues[queue]["spec"]["clusterQueue"]
    get = ("get_cluster_custom_object", KUEUE, KUEUE_VERSION, "clusterqueues", name)
    cluster_queue = find("CustomObjectsApi", *get)
    if cluster_queue is not None:
        yield from _list_shortages(setup, cluster_queue)


def _list_shortages(setup: Setup, cluster_queue: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare the gang with the whole of a ClusterQueue's quotas, as if nothing else ran."""
    limits: dict[str, Decimal] = {}
    spec = cluster_queue["spec"]
    for group in spec.get("resourceGroups", []):
        for each in (each for flavor in group["flavors"] for each in flavor["resources"]):
            limit = quantity(each["nominalQuota"])
            if spec.get("cohortName") and "borrowingLimit" not in each:
                limit = Decimal("Infinity")
            limit += quantity(each.get("borrowingLimit", 0))
            limits[each["name"]] = limits.get(each["name"], Decimal(0)) + limit
    name = cluster_queue["metadata"]["name"]
    for resource, amount in _sum_gang(setup).items():
        if resource not in limits and resource != "pods":
            yield Finding(
                f"ClusterQueue {name} has no quota of {resource}: it admits no pod that requests "
                "it, unless Kueue's configuration excludes it; add a quota",
                WARNING,
            )
        elif amount > limits.get(resource, amount):
            yield Finding(
                f"ClusterQueue {name} allows {resource} up to {short(limits[resource])}, and a "
                f"scheduler with {setup.config.enough_nodes} workers (min_nodes) needs "
                f"{short(amount)}; request less, lower min_nodes, or have the quota raised"
            )


def _check_priorities(setup: Setup) -> Iterator[Finding]:
    """Find priorities that do not exist, and a filler's that is not below the default, 0."""
    config = setup.config
    is_filler = config.preset == FILLER
    names = {setup.spec[role]["spec"].get("priorityClassName") for role in ("scheduler", "worker")}
    for name in sorted(filter(None, names)):
        found = find("SchedulingV1Api", "read_priority_class", name)
        if found is None:
            yield Finding(
                f"priorityClassName: expected a PriorityClass of this cluster, got {name!r}, "
                "without which no pod is made; create it (deploy/filler.yaml has one), or name "
                "another"
            )
        elif is_filler and found.value >= 0:
            yield Finding(
                f"PriorityClass {name}: expected a value below 0, so that a filler returns its "
                f"nodes to pods without a class, got {found.value}; create it as in "
                "deploy/filler.yaml"
            )
    name = config.kubernetes.labels.get(QUEUE_PRIORITY)
    get = ("get_cluster_custom_object", KUEUE, KUEUE_VERSION, "workloadpriorityclasses")
    if config.kubernetes.queue and name and find("CustomObjectsApi", *get, name) is None:
        yield Finding(
            f"the label {QUEUE_PRIORITY}: expected a WorkloadPriorityClass of this cluster, got "
            f"{name!r}; create it, or name another"
        )


def _check_nodes(setup: Setup) -> Iterator[Finding]:
    if setup.config.kubernetes.autoscaled_nodes:
        yield Finding("whether the pods fit on nodes: they are made on demand", UNKNOWN)
        return
    nodes = call("CoreV1Api", "list_node").items
    rooms = [quantities(node.status.allocatable or {}) for node in nodes]
    remedy = "request less, add nodes, or set autoscaled_nodes where nodes are made on demand"
    for role in ("scheduler", "worker"):
        pod = setup.spec[role]["spec"]
        reasons = [next(_list_obstacles(pod, node), "") for node in nodes]
        if all(reasons):
            counts = "; ".join(f"{n} {reason}" for reason, n in sorted(Counter(reasons).items()))
            yield Finding(
                f"no node could ever run a {role} pod, which requests "
                f"{describe(sum_requests(pod))} (of {len(nodes)} nodes: {counts}); {remedy}, or "
                "correct the pod's template",
                passes=NODES,
            )
            return
    num_workers, requests = setup.config.enough_nodes, sum_requests(pod)  # the last pod is a worker
    places = 0
    for room, reason in zip(rooms, reasons, strict=True):
        if not reason:
            places += min(int(room[each] / amount) for each, amount in requests.items() if amount)
    if places < num_workers:
        yield Finding(
            f"the nodes that may run workers have room for {places} of {num_workers} workers of "
            f"{describe(requests)}, while nothing else runs on them; {remedy}",
            passes=NODES,
        )


def _list_obstacles(pod: Mapping[str, Any], node: Any) -> Iterator[str]:
    """Yield the reasons why the pod can never run on the node, as phrases that follow a number of
    nodes.
    """
    labels, has = node.metadata.labels or {}, quantities(node.status.allocatable or {})
    for key, value in pod.get("nodeSelector", {}).items():
        if labels.get(key) != value:
            yield f"without the label {key}={value}"
    for taint in node.spec.taints or []:
        passes = taint.effect == "PreferNoSchedule" or taint.key.startswith(TEMPORARY_TAINTS)
        if not passes and not any(tolerates(each, taint) for each in pod.get("tolerations", [])):
            text = f"{taint.key}={taint.value or ''}:{taint.effect}"
            yield f"with the taint {text}, which is not tolerated"
    for resource, amount in sum_requests(pod).items():
        if amount > has.get(resource, Decimal(0)):
            yield f"with {short(has.get(resource, Decimal(0)))} {resource} at most"


def tolerates(toleration: Mapping[str, Any], taint: Any) -> bool:
    """Return whether the toleration, as in a pod's specification, covers the taint of a node."""
    exists = toleration.get("operator") == "Exists"
    key = toleration.get("key")
    has_effect = toleration.get("effect") in (None, "", taint.effect)
    has_key = key == taint.key or (exists and not key)
    has_value = exists or (toleration.get("value") or "") == (taint.value or "")
    return has_effect and has_key and has_value


def _check_admission(setup: Setup) -> Iterator[Finding]:
    """Ask the API server whether Pod Security, limit ranges, policies and quotas admit the objects.

    Nothing is created. Only the doctor makes this check: a run's own service account may create no
    pods, and its DaskCluster is checked when it is created.
    """
    if not setup.account:
        return
    create = ("CoreV1Api", "create_namespaced_pod", setup.namespace)
    meta = {"metadata": {"name": DOCTOR_NAME}}
    for role in ("scheduler", "worker"):
        body = {"apiVersion": "v1", "kind": "Pod", **meta, "spec": setup.spec[role]["spec"]}
        refusal = _dry_run(*create, body)
        if refusal:
            yield Finding(
                f"the API server would refuse a {role}'s pod: {refusal}; request more or less, "
                "correct `pod_template`, or wait for other runs to end"
            )
    body = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "DaskCluster", **meta, "spec": setup.spec}
    request = ("create_namespaced_custom_object", GROUP, VERSION, setup.namespace, PLURAL, body)
    # Policies may compare images, so a cluster with an unknown image cannot be checked.
    if setup.config.kubernetes.image == UNKNOWN_IMAGE:
        return
    refusal = _dry_run("CustomObjectsApi", *request)
    if refusal:
        yield Finding(
            f"the API server would refuse the DaskCluster: {refusal}; correct the cluster's "
            "configuration, or the lists in deploy/admission-policy.yaml and apply it"
        )


def _dry_run(*request: Any) -> str:
    """Return the API server's refusal to create an object; "" if the server would create it."""
    try:
        call(*request, dry_run="All")
    except ApiRefused as error:
        # Only RBAC's refusal has this text. Quotas, Pod Security and policies use the same status.
        if error.status == 403 and "cannot" in str(error) and "User " in str(error):
            raise
        # Another check reports missing kinds.
        if error.status != 404:
            return " ".join(str(error).split())
    return ""


def _check_policies(setup: Setup) -> Iterator[Finding]:
    read = ("NetworkingV1Api", "read_namespaced_network_policy")
    lacking = [
        purpose for name, purpose in POLICIES.items() if find(*read, name, setup.namespace) is None
    ]
    if lacking:
        yield Finding(
            f"nothing in namespace {setup.namespace} keeps {' and '.join(lacking)}; apply the "
            f"policies: kubectl --namespace {setup.namespace} apply -f deploy/networkpolicy.yaml",
            WARNING,
        )


def _check_orphans(setup: Setup) -> Iterator[Finding]:
    """Look in all namespaces for clusters that outlived their driver's pod.

    Only the doctor makes this check, because a run's account may not list clusters. Kubernetes
    deletes a cluster with its driver's pod, and the operator deletes an idle cluster. A cluster
    stays if the operator is away and the ended pod is not deleted.
    """
    if not setup.account:
        return
    selector = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
    request = ("list_cluster_custom_object", GROUP, VERSION, PLURAL)
    found = call("CustomObjectsApi", *request, label_selector=selector, ignored=(404,))
    if not found:
        return
    for cluster in found["items"]:
        name, namespace = cluster["metadata"]["name"], cluster["metadata"]["namespace"]
        for owner in cluster["metadata"].get("ownerReferences", []):
            pod = find("CoreV1Api", "read_namespaced_pod", owner["name"], namespace)
            is_there = pod and pod.metadata.uid == owner["uid"] and pod.status.phase not in ENDED
            if not is_there and "deletionTimestamp" not in cluster["metadata"]:
                yield Finding(
                    f"Dask cluster {name} of namespace {namespace} outlived its driver, pod "
                    f"{owner['name']}; delete it: kubectl --namespace {namespace} delete "
                    f"daskcluster {name} --cascade=foreground",
                    WARNING,
                )


CHECKS: list[tuple[str, Check]] = [
    ("the API server", _check_access),
    ("the cluster's configuration", _check_config),
    ("the operator's kinds", _check_kinds),
    ("the operator", _check_operator),
    ("the namespace", _check_namespace),
    ("the rights of tasks", _check_rights),
    ("quotas", _check_quotas),
    ("the queue", _check_queue),
    ("priorities", _check_priorities),
    ("nodes", _check_nodes),
    ("what the API server admits", _check_admission),
    ("network policies", _check_policies),
    ("clusters without a driver", _check_orphans),
]
