"""`python -m flyte_ddp doctor`: compare a Kubernetes cluster with what deploy/README.md sets up. Changes nothing.

For a person with a kubeconfig of wide rights. A check without the rights that it needs says so and is not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from importlib.metadata import version
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.api import api_message, call, target_namespace
from flyte_ddp.cluster.kubernetes.manifest import GROUP, PLURAL, VERSION, cluster_spec
from flyte_ddp.cluster.kubernetes.preflight import (
    NEEDED_EVERYWHERE,
    OPERATOR_LABELS,
    check_access,
    exceeded_quotas,
    find_obstacles,
    needs_of,
    quantity,
    requests_of,
)

GOOD, WARNING, BAD, UNKNOWN = "ok", "warning", "FAILED", "unknown"
KINDS = {PLURAL, "daskworkergroups", "daskjobs", "daskautoscalers"}  # that the operator watches
UPSTREAM_IMAGE = "dask/dask-kubernetes-operator"
# Parts of the names of DaemonSets that enforce NetworkPolicies.
ENFORCERS = ("antrea", "aws-node", "azure-npm", "calico", "canal", "cilium", "kube-router", "ovn", "weave")
PSA = "pod-security.kubernetes.io/enforce"
INSTALLED_VERSION = "app.kubernetes.io/version"  # a label that deploy/operator/install.sh sets


@dataclass(frozen=True)
class Finding:
    """The result of a check, with its remedy if it is not good."""

    level: str  # GOOD, WARNING, BAD or UNKNOWN
    text: str

    def __str__(self) -> str:
        return f"{self.level:<8} {self.text}"


def diagnose(
    config: ClusterConfig, service_account: str, tasks: Mapping[str, Mapping[str, str]] | None = None
) -> Iterator[Finding]:
    """Check the cluster that the kubeconfig names, for runs with this config whose tasks have `service_account`.

    Args:
        tasks: what the pods of tasks request, as {class: {resource: quantity}}.

    Raises:
        ClusterError: the API server does not answer.
    """
    from kubernetes.client import ApiException

    if no_access := check_access():
        yield Finding(BAD, no_access)
        return
    namespace = target_namespace(config)
    if not config.kubernetes.image:  # the doctor runs in no pod whose image a run would take
        config = dataclasses.replace(config, kubernetes=dataclasses.replace(config.kubernetes, image="doctor"))
    spec = cluster_spec(config, "ddp-doctor-00000000")["spec"]
    obstacles = list(find_obstacles(config, spec, namespace))
    yield from (Finding(BAD, text) for text in obstacles)
    if not obstacles:
        yield Finding(GOOD, f"a run of {config.num_nodes} nodes could start in namespace {namespace}")
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("the operator's kinds", _check_kinds),
        ("the operator's version", _check_operator),
        (f"the rights of {service_account}", lambda: _check_rights(namespace, service_account)),
        ("service accounts and secrets", lambda: _check_references(config, namespace, service_account)),
        ("limit ranges", lambda: _check_limit_ranges(spec, tasks or {}, namespace)),
        ("the quota of tasks", lambda: _check_tasks(tasks or {}, namespace)),
        ("Pod Security", lambda: _check_pod_security(namespace)),
        ("network policies", lambda: _check_policies(namespace)),
    ]
    for what, check in checks:
        try:
            yield from check()
        except ApiException as error:
            if error.status not in (403, 404):
                raise
            yield Finding(UNKNOWN, f"{what}: {api_message(error)}")


def _check_kinds() -> Iterator[Finding]:
    served = {each.name for each in call("CustomObjectsApi", "get_api_resources", GROUP, VERSION).resources}
    missing = sorted(KINDS - served)
    if missing:
        yield Finding(BAD, f"the API server does not know {', '.join(missing)} of {GROUP}; {_upgrade()}")
    else:
        yield Finding(GOOD, "the operator's CRDs are there")


def _check_operator() -> Iterator[Finding]:
    pinned = version("dask-kubernetes")
    pods = call("CoreV1Api", "list_pod_for_all_namespaces", label_selector=OPERATOR_LABELS).items
    for pod in pods:
        image = pod.spec.containers[0].image
        installed = (pod.metadata.labels or {}).get(INSTALLED_VERSION, "")
        if UPSTREAM_IMAGE in image:
            installed = image.rpartition(":")[2]
        where = f"{image} in namespace {pod.metadata.namespace}"
        if not installed:
            yield Finding(
                UNKNOWN, f"the version of the operator {where}; install.sh labels the pod of one that it makes"
            )
        elif installed != pinned:
            yield Finding(BAD, f"the operator has version {installed}, and this package pins {pinned}; {_upgrade()}")
        else:
            yield Finding(GOOD, f"the operator has the pinned version {pinned}: {where}")
    if not pods:
        yield Finding(UNKNOWN, f"no pod has the operator's label {OPERATOR_LABELS}")


def _check_rights(namespace: str, service_account: str) -> Iterator[Finding]:
    missing = []
    for verb, group, resource, subresource in NEEDED_EVERYWHERE:
        attributes = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{namespace}:{service_account}",
                "resourceAttributes": {"namespace": namespace, **attributes},
            },
        }
        if not call("AuthorizationV1Api", "create_subject_access_review", review).status.allowed:
            missing.append(f"{verb} {resource}" + (f"/{subresource}" if subresource else ""))
    if missing:
        yield Finding(
            BAD,
            f"service account {service_account} may not {', '.join(missing)}; apply it: "
            f"sed s/NAMESPACE/{namespace}/g deploy/rbac.yaml | kubectl apply -f -",
        )
    else:
        yield Finding(GOOD, f"service account {service_account} has the rights of deploy/rbac.yaml")


def _check_references(config: ClusterConfig, namespace: str, service_account: str) -> Iterator[Finding]:
    from kubernetes.client import ApiException

    pods = config.kubernetes
    secrets = {*pods.image_pull_secrets, *pods.env_from_secrets}
    missing = []
    for name in sorted({service_account, pods.service_account or "default"}):
        try:
            account = call("CoreV1Api", "read_namespaced_service_account", name, namespace)
            secrets |= {each.name for each in account.image_pull_secrets or []}
        except ApiException as error:
            if error.status != 404:
                raise
            missing.append(f"service account {name}")
    for name in sorted(secrets):
        try:
            call("CoreV1Api", "read_namespaced_secret", name, namespace)
        except ApiException as error:
            if error.status != 404:
                raise
            missing.append(f"secret {name}")
    if missing:
        yield Finding(
            BAD, f"namespace {namespace} has no {', no '.join(missing)}; see deploy/README.md, Rights and Secrets"
        )
    else:
        yield Finding(GOOD, "all service accounts and secrets that are named are there")


def _check_limit_ranges(
    spec: Mapping[str, Any], tasks: Mapping[str, Mapping[str, str]], namespace: str
) -> Iterator[Finding]:
    requests = {f"a {role}": requests_of(spec[role]["spec"]) for role in ("worker", "scheduler")}
    requests |= {f"a task ({name})": _quantities(task) for name, task in tasks.items()}
    problems = []
    for limit_range in call("CoreV1Api", "list_namespaced_limit_range", namespace).items:
        for item in limit_range.spec.limits:
            for pod, each in requests.items():
                for resource, amount in each.items():
                    largest = (item.max or {}).get(resource)
                    if item.type in ("Pod", "Container") and largest is not None and amount > quantity(largest):
                        problems.append(f"{limit_range.metadata.name} allows {largest} {resource}, {pod} requests more")
    if problems:
        yield Finding(BAD, f"limit range: {'; '.join(problems)}; request less, or have it raised")
    else:
        yield Finding(
            GOOD, f"no limit range of {namespace} is in the way; `make register` asks Flyte for its own limits"
        )


def _check_tasks(tasks: Mapping[str, Mapping[str, str]], namespace: str) -> Iterator[Finding]:
    if not tasks:
        yield Finding(
            UNKNOWN, 'the tasks\' own pods were not checked; pass --tasks "$(python -m tasks requests --json)"'
        )
        return
    problems = [
        excess.format(who=f"a task ({name})")
        for name, task in tasks.items()
        for excess in exceeded_quotas(needs_of([(1, _quantities(task))]), namespace)
    ]
    if problems:
        yield Finding(BAD, f"{'; '.join(problems)}; request less in settings.toml, or have the quota raised")
    else:
        yield Finding(GOOD, f"no quota of {namespace} is too small for a task")


def _quantities(requests: Mapping[str, str]) -> dict[str, Decimal]:
    return {resource: quantity(amount) for resource, amount in requests.items()}


def _check_pod_security(namespace: str) -> Iterator[Finding]:
    labels = call("CoreV1Api", "read_namespace", namespace).metadata.labels or {}
    templates = {each.metadata.name for each in call("CoreV1Api", "list_namespaced_pod_template", namespace).items}
    level = labels.get(PSA, "")
    if level in ("", "privileged"):
        yield Finding(
            WARNING,
            f"namespace {namespace} lets privileged pods in; refuse them (Kubernetes 1.25): "
            f"kubectl label --overwrite namespace {namespace} {PSA}=baseline",
        )
    elif level == "restricted" and "flyte-ddp" not in templates:
        yield Finding(
            BAD,
            f"namespace {namespace} is restricted, so tasks need the pod template; apply it: "
            f"kubectl --namespace {namespace} apply -f deploy/pod-template.yaml",
        )
    else:
        yield Finding(GOOD, f"namespace {namespace} enforces the Pod Security level {level}")


def _check_policies(namespace: str) -> Iterator[Finding]:
    policies = {
        each.metadata.name for each in call("NetworkingV1Api", "list_namespaced_network_policy", namespace).items
    }
    if "flyte-ddp" not in policies:
        yield Finding(
            WARNING,
            f"namespace {namespace} lacks the policy that keeps everybody away until a run's own is there; apply it: "
            f"kubectl --namespace {namespace} apply -f deploy/networkpolicy.yaml",
        )
    names = {each.metadata.name for each in call("AppsV1Api", "list_daemon_set_for_all_namespaces").items}
    found = sorted(name for name in names if any(part in name for part in ENFORCERS))
    if found:
        yield Finding(GOOD, f"{', '.join(found)} can enforce NetworkPolicies")
    else:
        yield Finding(
            UNKNOWN,
            f"no DaemonSet is known to enforce NetworkPolicies ({', '.join(ENFORCERS)}); the log of a run's driver "
            "warns if none does",
        )


def _upgrade() -> str:
    return "upgrade it with its CRDs as deploy/RUNBOOK.md describes (Upgrades)"
