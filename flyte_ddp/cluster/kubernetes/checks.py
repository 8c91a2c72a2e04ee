"""Checks of a Kubernetes cluster for a run, before anything is created: one list, for the preflight
and the doctor.

Each check yields findings, whose text ends in the remedy; where it yields none, nothing is wrong. A
check that this process has no right to make raises the API server's refusal, which `run_checks`
collects. An API server that does not answer is no finding: ClusterError.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.metadata import version
from typing import Any

from flyte_ddp.cluster.admission import Allowed, check_allowed
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.api import API_PATIENCE, ApiRefused, call, find, is_in_pod
from flyte_ddp.cluster.kubernetes.manifest import (
    GROUP,
    MANAGED_BY,
    PLURAL,
    POLICY_GROUP,
    POLICY_PLURAL,
    VERSION,
    merge_pod,
)
from flyte_ddp.cluster.kubernetes.resources import (
    describe,
    quantities,
    quantity,
    short,
    sum_needs,
    sum_requests,
)
from flyte_ddp.errors import ConfigError

# All requests of this folder, as (verb, API group, resource, subresource), which deploy/rbac.yaml
# grants.
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
    ("get", "", "pods", "portforward"),  # by a WebSocket before Kubernetes 1.35
    ("create", "", "pods", "portforward"),
]
NEEDED_KINDS = {PLURAL, "daskworkergroups"}
KINDS = {*NEEDED_KINDS, "daskjobs", "daskautoscalers"}  # that the operator watches

GOOD, WARNING, BAD, UNKNOWN = "ok", "warning", "FAILED", "unknown"
STARTING, NODES = "starting", "nodes"
# conditions of a node that pass, which Kubernetes expresses as taints too
TEMPORARY_TAINTS = "node.kubernetes.io/"
# in its image upstream, and by the labels of its Helm chart and of deploy/
OPERATOR_NAME = "dask-kubernetes-operator"
OPERATOR_MODULE = "dask_kubernetes"  # that its container runs, whatever its labels are
INSTALLED_VERSION = "app.kubernetes.io/version"  # a label that deploy/operator/install.sh sets
UPGRADE = "upgrade it with its CRDs as deploy/RUNBOOK.md describes (Upgrades)"
PSA = "pod-security.kubernetes.io/enforce"
TEMPLATE_SETTING = re.compile(r"""default-pod-template-name["']?:\s*["']?([a-z0-9][-a-z0-9.]*)""")
# stands for the image of a task's pod that this process does not know
UNKNOWN_IMAGE = "unknown.invalid/image"


@dataclass(frozen=True)
class Finding:
    """The result of a check, with its remedy if it is not good."""

    text: str
    level: str = BAD  # or GOOD, WARNING, UNKNOWN
    # STARTING: the operator may be there in a minute; NODES: they may be others when Flyte tries
    # again
    passes: str = ""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}"


@dataclass(frozen=True)
class Setup:
    """The cluster of a run that is checked, and what is known of the tasks that start it."""

    config: ClusterConfig
    spec: Mapping[str, Any]  # of the DaskCluster
    namespace: str
    # the service account of tasks whose rights are checked; "": this process's own
    account: str = ""
    # requests of the driver's pod; None where it is not in `namespace`
    driver: Mapping[str, Decimal] | None = None
    # requests of tasks' pods by class; for doctor
    tasks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # the table of settings.toml; None: not known, or checked by the task itself
    allowed: Allowed | None = None
    # that Flyte's default-pod-template-name names; "": as a ConfigMap of Flyte's says
    pod_template: str = ""


Check = Callable[[Setup], Iterator[Finding]]


def run_checks(setup: Setup) -> tuple[list[Finding], list[str]]:
    """Return the findings of all checks, and the names of those that this process has no right to
    make.

    Raises:
        PreflightError: a quantity that is none.
        ClusterError: the API server does not answer.
    """
    findings: list[Finding] = []
    unseen: list[str] = []
    for what, check in CHECKS:
        num_before = len(findings)
        try:
            findings.extend(check(setup))  # keeps what was found before an exception
        except ApiRefused as error:
            if error.status != 403:
                raise
            unseen.append(what)
        else:
            findings += [Finding(what, GOOD)] * (len(findings) == num_before)
        if check in (_check_access, _check_namespace) and any(
            each.level == BAD for each in findings[num_before:]
        ):
            break  # everything else would fail for the same reason
    return findings, unseen


def _check_access(setup: Setup) -> Iterator[Finding]:
    try:
        # a person waits for the doctor
        call("VersionApi", "get_code", patience=0 if setup.account else API_PATIENCE)
    except ApiRefused as error:  # it refuses, has no valid certificate, or is not named
        yield Finding(
            f"this process has no access to a Kubernetes API server ({error}); set KUBECONFIG to "
            "a valid "
            "kubeconfig, or run in a pod whose service account's token is mounted"
        )


def _check_config(setup: Setup) -> Iterator[Finding]:
    if not _worker_image(setup):
        yield Finding(
            "no image is set, and this process runs in no pod whose image could be used; set "
            "`kubernetes.image` in the "
            "cluster's configuration to an image built from this project's Dockerfile"
        )
    pods = setup.config.kubernetes
    if quantity(pods.shared_memory) > quantity(pods.worker_memory):
        yield Finding(
            f"shared_memory ({pods.shared_memory}) is a part of worker_memory, which is "
            f"{pods.worker_memory} only; "
            "raise worker_memory or lower shared_memory"
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
    missing = sorted(KINDS - {each.name for each in known.resources}) if known else []
    if known is None:
        yield Finding(
            "the Dask operator is not installed: this Kubernetes cluster does not know "
            f"{PLURAL}.{GROUP}; "
            "install it as in deploy/README.md"
        )
    elif missing:
        level = BAD if NEEDED_KINDS & set(missing) else WARNING
        yield Finding(
            f"the API server does not know {', '.join(missing)} of {GROUP}; {UPGRADE}", level
        )


def _check_operator(setup: Setup) -> Iterator[Finding]:
    """Find the operator's Deployment by what it runs: its labels may be others."""
    deployments = call("AppsV1Api", "list_deployment_for_all_namespaces").items
    operators = [each for each in deployments if _is_operator(each)]
    if not operators:
        yield Finding(
            "the Dask operator does not run: no Deployment of any namespace runs it, so nothing "
            "makes pods of a "
            "DaskCluster; install it as in deploy/README.md",
            passes=STARTING,
        )
    for operator in operators:
        where = f"--namespace {operator.metadata.namespace}"
        name = f"deployment {operator.metadata.name}"
        if operator.spec.replicas == 0:
            yield Finding(
                "the Dask operator does not run: it is scaled to 0, so nothing makes pods of a "
                "DaskCluster; start it: "
                f"kubectl {where} scale {name} --replicas=1",
                passes=STARTING,
            )
        elif not (operator.status and operator.status.available_replicas):
            yield Finding(
                f"the Dask operator is installed but not running ({operator.metadata.namespace}/"
                f"{operator.metadata.name} has no available pod); find out why with: kubectl "
                f"{where} describe {name}",
                passes=STARTING,
            )
        else:
            yield _compare_version(operator)


def _is_operator(deployment: Any) -> bool:
    pod = deployment.spec.template
    if (pod.metadata.labels or {}).get("app.kubernetes.io/name") == OPERATOR_NAME:
        return True
    return any(
        OPERATOR_NAME in (each.image or "")
        or OPERATOR_MODULE in " ".join([*(each.command or []), *(each.args or [])])
        for each in pod.spec.containers
    )


def _compare_version(operator: Any) -> Finding:
    pinned = version("dask-kubernetes")
    image = operator.spec.template.spec.containers[0].image
    installed = (operator.spec.template.metadata.labels or {}).get(INSTALLED_VERSION, "")
    if f"dask/{OPERATOR_NAME}" in image:
        installed = image.rpartition(":")[2]
    where = f"{image} in namespace {operator.metadata.namespace}"
    if not installed:
        return Finding(
            (
                f"the version of the operator {where}; install.sh labels the pod of one "
                "that it makes"
            ),
            UNKNOWN,
        )
    if installed != pinned:
        return Finding(
            (
                f"the operator has version {installed}, and this package pins {pinned}: {where}; "
                f"{UPGRADE}"
            ),
            WARNING,
        )
    return Finding(f"the operator has the pinned version {pinned}: {where}", GOOD)


def _check_namespace(setup: Setup) -> Iterator[Finding]:
    namespace = find("CoreV1Api", "read_namespace", setup.namespace)
    if namespace is None:
        yield Finding(
            f"namespace {setup.namespace} does not exist; create it with kubectl create namespace "
            f"{setup.namespace}, "
            "or name another in the cluster's configuration"
        )
    elif (namespace.metadata.labels or {}).get(PSA, "privileged") == "privileged":
        yield Finding(
            f"namespace {setup.namespace} lets privileged pods in; refuse them: "
            f"kubectl label --overwrite namespace {setup.namespace} {PSA}=baseline",
            WARNING,
        )


def _check_rights(setup: Setup) -> Iterator[Finding]:
    account, namespace = setup.account, setup.namespace
    kind = "SubjectAccessReview" if account else "SelfSubjectAccessReview"
    user = {"user": f"system:serviceaccount:{namespace}:{account}"} if account else {}
    method = "create_subject_access_review" if account else "create_self_subject_access_review"
    missing = []
    for verb, group, resource, subresource in NEEDED_EVERYWHERE + (
        [] if account or is_in_pod() else NEEDED_OUTSIDE
    ):
        attributes = {
            "verb": verb,
            "group": group,
            "resource": resource,
            "subresource": subresource,
        }
        spec = {**user, "resourceAttributes": {"namespace": namespace, **attributes}}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
        if not call("AuthorizationV1Api", method, review).status.allowed:
            what = (
                resource
                + (f"/{subresource}" if subresource else "")
                + (f".{group}" if group else "")
            )
            missing.append(f"{verb} {what}")
    if not missing:
        return
    if account:
        names = "" if account == "flyte-ddp" else f"; s/flyte-ddp/{account}/g"
        who = f"service account {account}"
        remedy = (
            f"apply it: sed 's/NAMESPACE/{namespace}/g{names}' deploy/rbac.yaml | kubectl "
            "apply -f -"
        )
    else:
        who = "this pod's service account" if is_in_pod() else "the kubeconfig's user"
        remedy = "have deploy/rbac.yaml applied to that namespace and bound to it"
    yield Finding(f"{who} may not {', '.join(missing)} in namespace {namespace}; {remedy}")


def _check_references(setup: Setup) -> Iterator[Finding]:
    pods = setup.config.kubernetes
    specs = [setup.spec[role]["spec"] for role in ("scheduler", "worker")]
    secrets = {
        *pods.env_from_secrets,
        *(each["name"] for spec in specs for each in spec.get("imagePullSecrets", [])),
    }
    missing = []
    for name in sorted({setup.account, pods.service_account or "default"} - {""}):
        account = find("CoreV1Api", "read_namespaced_service_account", name, setup.namespace)
        if account is None:
            missing.append(f"service account {name}")
        else:
            secrets |= {each.name for each in account.image_pull_secrets or []}
    missing += [
        f"secret {name}"
        for name in sorted(secrets)
        if find("CoreV1Api", "read_namespaced_secret", name, setup.namespace) is None
    ]
    if missing:
        yield Finding(
            f"namespace {setup.namespace} has no {', no '.join(missing)}; see "
            "deploy/README.md, "
            "Rights and Secrets"
        )


def _check_quotas(setup: Setup) -> Iterator[Finding]:
    """Compare with the whole of each quota, because what other runs have used of it comes back."""
    who, remedy = "this run", "ask for fewer or smaller nodes"
    pods: list[tuple[int, Mapping[str, Decimal]]]
    pods = [
        (1, _requests(setup, "scheduler")),
        (setup.config.enough_nodes, _requests(setup, "worker")),
    ]
    if setup.driver is not None:
        who, pods = "this run with its driver", [*pods, (1, setup.driver)]
    needs = {who: ({**sum_needs(pods), f"count/{PLURAL}.{GROUP}": Decimal(1)}, remedy)}
    for name, task in setup.tasks.items():
        needs[f"a task ({name})"] = (
            sum_needs([(1, quantities(task))]),
            "request less in settings.toml",
        )
    for quota in call("CoreV1Api", "list_namespaced_resource_quota", setup.namespace).items:
        if quota.spec.scopes or quota.spec.scope_selector:
            continue  # it may not be about these pods
        for resource, limit in (quota.spec.hard or {}).items():
            for who, (need, remedy) in needs.items():
                if need.get(resource, Decimal(0)) > quantity(limit):
                    yield Finding(
                        f"quota {quota.metadata.name} of namespace {setup.namespace} allows "
                        f"{resource} up to {limit}, "
                        f"and {who} needs {short(need[resource])}; {remedy}, or have the quota "
                        "raised"
                    )


def _requests(setup: Setup, role: str) -> dict[str, Decimal]:
    """Return what a pod of the scheduler or a worker requests."""
    return sum_requests(setup.spec[role]["spec"])


def _check_nodes(setup: Setup) -> Iterator[Finding]:
    if setup.config.kubernetes.autoscaled_nodes:
        yield Finding("whether the pods fit on nodes: they are made on demand", UNKNOWN)
        return
    nodes = call("CoreV1Api", "list_node").items
    fits = True
    for role, template in (("worker", "pod_template"), ("scheduler", "scheduler_pod_template")):
        reasons = [_find_obstacle(setup.spec[role]["spec"], node) for node in nodes]
        if all(reasons):
            fits = False
            counts = "; ".join(
                f"{reasons.count(reason)} {reason}" for reason in sorted(set(reasons))
            )
            yield Finding(
                f"no node could ever run a {role} pod, which requests "
                f"{describe(_requests(setup, role))} (of "
                f"{len(nodes)} nodes: {counts}); request less, correct {template}, or set "
                "autoscaled_nodes where nodes "
                "are made on demand",
                passes=NODES,
            )
    if fits and (problem := _find_lack_of_room(setup, nodes)):
        remedy = "request less, add nodes, or set autoscaled_nodes where nodes are made on demand"
        yield Finding(f"{problem}; {remedy}", passes=NODES)


def _find_lack_of_room(setup: Setup, nodes: list[Any]) -> str:
    """Return how the nodes are too small for all pods together, even while nothing else runs on
    them; "" if not.
    """
    count, request = setup.config.enough_nodes, _requests(setup, "worker")
    room = [quantities(node.status.allocatable or {}) for node in nodes]
    amounts = [(resource, amount) for resource, amount in request.items() if amount]
    places = sum(
        min(
            (int(has.get(resource, Decimal(0)) / amount) for resource, amount in amounts),
            default=count,
        )
        for has, node in zip(room, nodes, strict=True)
        if not _find_obstacle(setup.spec["worker"]["spec"], node)
    )
    what = f"{count} workers of {describe(request)}"
    if places < count:
        return (
            f"the nodes that may run workers have room for {places} of {what}, while nothing "
            "else runs on them"
        )
    total = sum_needs(
        [(count, request), (1, _requests(setup, "scheduler")), (1, setup.driver or {})]
    )
    lacking = []
    for resource in sorted(
        name.removeprefix("requests.") for name in total if name.startswith("requests.")
    ):
        need, has = (
            total[f"requests.{resource}"],
            sum((each.get(resource, Decimal(0)) for each in room), Decimal(0)),
        )
        if need > has:
            lacking.append(f"{short(has)} {resource} of {short(need)}")
    if not lacking:
        return ""
    others = "a scheduler and the task's own pod" if setup.driver is not None else "and a scheduler"
    return f"the nodes are too small together for {what}, {others}: they have {', '.join(lacking)}"


def _find_obstacle(pod: Mapping[str, Any], node: Any) -> str:
    """Return why the pod can never run on the node, as a phrase after a number of nodes; "" if it
    can.
    """
    labels = node.metadata.labels or {}
    for key, value in pod.get("nodeSelector", {}).items():
        if labels.get(key) != value:
            return f"without the label {key}={value}"
    for taint in node.spec.taints or []:
        if taint.effect == "PreferNoSchedule" or taint.key.startswith(TEMPORARY_TAINTS):
            continue
        if not any(tolerates(toleration, taint) for toleration in pod.get("tolerations", [])):
            return (
                f"with the taint {taint.key}={taint.value or ''}:{taint.effect}, which is not "
                "tolerated"
            )
    has = quantities(node.status.allocatable or {})
    for resource, amount in sum_requests(pod).items():
        if amount > has.get(resource, Decimal(0)):
            return f"with {short(has.get(resource, Decimal(0)))} {resource} at most"
    return ""


def _worker_image(setup: Setup) -> str:
    containers = setup.spec["worker"]["spec"]["containers"]
    return next((each.get("image", "") for each in containers if each["name"] == "worker"), "")


def _check_admission(setup: Setup) -> Iterator[Finding]:
    """Let the API server judge the objects without creating them: Pod Security, limit ranges,
    policies, quotas.

    For the doctor alone: a run's own service account may create no pods, and its DaskCluster is
    judged at its creation.
    """
    if not setup.account:
        return
    spec, namespace = setup.spec, setup.namespace
    template, setting = _task_template(setup)
    pods = {f"a {role}'s pod": spec[role]["spec"] for role in ("scheduler", "worker")}
    for name, task in (setup.tasks or {"any": {}}).items():
        pods[f"a task's pod ({name})"] = _task_pod(setup.account, task, template)
    for what, pod in pods.items():
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"generateName": "ddp-doctor-"},
            "spec": pod,
        }
        if refusal := _dry_run("CoreV1Api", "create_namespaced_pod", namespace, body=body):
            remedy = "request more or less, or correct `pod_template`"
            if "violates PodSecurity" in refusal:
                remedy = setting if what.startswith("a task") else "correct `pod_template`"
            elif "quota" in refusal:
                remedy = "wait for other runs to end, or have the quota raised"
            yield Finding(f"the API server would refuse {what}: {refusal}; {remedy}")
    if _worker_image(setup) == UNKNOWN_IMAGE:
        yield Finding(
            (
                "whether policies admit the image: name it as kubernetes.image in --cluster, where "
                "the tasks name none"
            ),
            UNKNOWN,
        )
        return
    cluster = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "DaskCluster", "spec": spec}
    cluster["metadata"] = {"name": "ddp-doctor-00000000"}
    request = (
        "CustomObjectsApi",
        "create_namespaced_custom_object",
        GROUP,
        VERSION,
        namespace,
        PLURAL,
        cluster,
    )
    if refusal := _dry_run(*request):
        remedy = (
            "correct the cluster's configuration, or the lists in "
            "deploy/admission-policy.yaml and apply it"
        )
        yield Finding(f"the API server would refuse the DaskCluster: {refusal}; {remedy}")


def _dry_run(*request: Any, **body: Any) -> str:
    """Return the API server's refusal to create an object; "" if it would."""
    try:
        call(*request, **body, dry_run="All")
    except ApiRefused as error:
        if error.is_right_missing or error.status not in (400, 403, 404, 422):
            raise
        refusal = " ".join(str(error).split())
        # Other checks are about missing kinds and service accounts.
        return "" if error.status == 404 or "serviceaccount" in refusal else refusal
    return ""


def _task_pod(
    account: str, requests: Mapping[str, str], template: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the specification of a task's pod as Flyte makes it: one container, merged over its
    default template.
    """
    defaults = {each["name"]: each for each in template.get("containers", [])}.get("default", {})
    container = merge_pod(
        defaults, {"name": "task", "image": UNKNOWN_IMAGE, "args": ["pyflyte-execute"]}
    )
    if requests:
        container["resources"] = {"requests": dict(requests), "limits": dict(requests)}
    return {
        **template,
        "containers": [container],
        "restartPolicy": "Never",
        "serviceAccountName": account,
    }


def _task_template(setup: Setup) -> tuple[dict[str, Any], str]:
    """Return the pod specification that Flyte merges into its tasks, and how to make it one that is
    not refused.
    """
    from kubernetes.client import ApiClient

    name, apply = (
        setup.pod_template,
        f"kubectl --namespace {setup.namespace} apply -f deploy/pod-template.yaml",
    )
    if not name:
        maps = call("CoreV1Api", "list_config_map_for_all_namespaces").items
        texts = [text for each in maps for text in (each.data or {}).values()]
        name = next((found[1] for text in texts if (found := TEMPLATE_SETTING.search(text))), "")
    if not name:
        return {}, (
            "set Flyte's `plugins.k8s.default-pod-template-name: flyte-ddp` (deploy/README.md, "
            "section 5; without it "
            "the template does nothing), pass --pod-template flyte-ddp if no ConfigMap shows it, "
            f"and apply it: {apply}"
        )
    template = find("CoreV1Api", "read_namespaced_pod_template", name, setup.namespace)
    if template is not None:
        pod = ApiClient().sanitize_for_serialization(template.template.spec)
        return pod, f"correct the PodTemplate {name}, as in deploy/pod-template.yaml"
    return (
        {},
        (
            f"Flyte's default-pod-template-name is {name}, and the namespace has no PodTemplate of "
            f"that name: {apply}"
        ),
    )


def _check_policies(setup: Setup) -> Iterator[Finding]:
    if (
        find("NetworkingV1Api", "read_namespaced_network_policy", "flyte-ddp", setup.namespace)
        is None
    ):
        yield Finding(
            f"namespace {setup.namespace} lacks the policy that keeps everybody away until a "
            "run's own is there; apply "
            f"it: kubectl --namespace {setup.namespace} apply -f deploy/networkpolicy.yaml",
            WARNING,
        )


def _check_orphans(setup: Setup) -> Iterator[Finding]:
    """Look in all namespaces for clusters that outlived their driver. For the doctor: a run's
    account may list none.

    Kubernetes deletes a cluster with its driver's pod, and the operator one that is idle. Neither
    does while the operator is away and that pod stays, ended, or was none.
    """
    if not setup.account:
        return
    selector = ",".join(f"{key}={value}" for key, value in MANAGED_BY.items())
    request = ("list_cluster_custom_object", GROUP, VERSION, PLURAL)
    found = call("CustomObjectsApi", *request, label_selector=selector, ignored=(404,))
    for cluster in found["items"] if found else ():
        name, namespace = cluster["metadata"]["name"], cluster["metadata"]["namespace"]
        if reason := _why_orphaned(cluster["metadata"], namespace):
            delete = (
                f"kubectl --namespace {namespace} delete daskcluster {name} --cascade=foreground"
            )
            yield Finding(
                f"Dask cluster {name} of namespace {namespace} {reason}; delete it: {delete}",
                WARNING,
            )


def _why_orphaned(metadata: Mapping[str, Any], namespace: str) -> str:
    """Return why the cluster has no driver any more, as a phrase; "" where it may have one, or is
    being deleted.
    """
    owner = next(iter(metadata.get("ownerReferences", [])), None)
    if "deletionTimestamp" in metadata:
        return ""
    if owner is None:
        created = datetime.datetime.fromisoformat(
            metadata["creationTimestamp"].replace("Z", "+00:00")
        )
        age = datetime.datetime.now(datetime.timezone.utc) - created
        return f"has no driver's pod and has been there for {age.days * 24} h" if age.days else ""
    pod = find("CoreV1Api", "read_namespaced_pod", owner["name"], namespace)
    is_there = (
        pod is not None
        and pod.metadata.uid == owner["uid"]
        and pod.status.phase not in ("Succeeded", "Failed")
    )
    return "" if is_there else f"outlived its driver, pod {owner['name']}"


CHECKS: list[tuple[str, Check]] = [
    ("the API server", _check_access),
    ("the cluster's configuration", _check_config),
    ("the operator's kinds", _check_kinds),
    ("the operator", _check_operator),
    ("the namespace", _check_namespace),
    ("the rights of tasks", _check_rights),
    ("service accounts and secrets", _check_references),
    ("quotas", _check_quotas),
    ("nodes", _check_nodes),
    ("what the API server admits", _check_admission),
    ("network policies", _check_policies),
    ("clusters without a driver", _check_orphans),
]


def tolerates(toleration: Mapping[str, Any], taint: Any) -> bool:
    """Return whether the toleration, as in a pod's specification, covers the taint of a node."""
    if toleration.get("effect") and toleration["effect"] != taint.effect:
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint.key:
        return False
    return toleration.get("operator", "Equal") == "Exists" or (toleration.get("value") or "") == (
        taint.value or ""
    )
