"""The objects that a run creates in Kubernetes: its DaskCluster, network policy and certificate.

All functions are pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from flyte_ddp.cluster.config import FILLER, GRACE_VARIABLE, ClusterConfig, dask_config
from flyte_ddp.process.devices import NODE_VARIABLE

GROUP, VERSION, PLURAL = "kubernetes.dask.org", "v1", "daskclusters"
POLICY_GROUP, POLICY_PLURAL = "networking.k8s.io", "networkpolicies"
CERTIFICATE_MOUNT = "/etc/flyte-ddp-tls"  # directory in scheduler and workers
MANAGED_BY = {"app.kubernetes.io/managed-by": "flyte-ddp"}
SAFE_TO_EVICT = "cluster-autoscaler.kubernetes.io/safe-to-evict"
# Annotations that keep an autoscaler from moving pods. An eviction costs no step, but a gang that
# needs all its nodes waits on the others until a new node is there.
KEEP_IN_PLACE = {SAFE_TO_EVICT: "false", "karpenter.sh/do-not-disrupt": "true"}
# A filler must not keep a node alive. Without the annotation its emptyDir volumes would.
MAY_MOVE = {SAFE_TO_EVICT: "true"}
WORKER_GROUPS = "daskworkergroups"
KUEUE, KUEUE_VERSION = "kueue.x-k8s.io", "v1beta2"
QUEUE_PRIORITY = f"{KUEUE}/priority-class"  # label that names a WorkloadPriorityClass
CLUSTER, COMPONENT = "dask.org/cluster-name", "dask.org/component"  # labels that the operator sets
SCHEDULER_PORT, DASHBOARD_PORT = 8786, 8787
PORTS = {"tcp-comm": SCHEDULER_PORT, "http-dashboard": DASHBOARD_PORT}
MAX_NAME_LENGTH = 53  # the operator appends "-scheduler", and a Service's name ends at 63

# The scheduler's own routes, and first a route by which the operator asks whether the scheduler is
# idle. Without it the operator sets an idle timeout inside the scheduler, which then closes itself
# while it works.
SCHEDULER_ROUTES = [
    "distributed.http.scheduler.api",
    "distributed.http.scheduler.prometheus",
    "distributed.http.scheduler.info",
    "distributed.http.scheduler.json",
    "distributed.http.health",
    "distributed.http.proxy",
    "distributed.http.statics",
]
Object = dict[str, Any]  # an object of Kubernetes, or a part of an object

# The keys by which lists in a pod's specification are merged; all others are merged by "name".
MERGE_KEYS = {"volumeMounts": "mountPath", "ports": "containerPort"}


@dataclass(frozen=True)
class Driver:
    """The pod that this process runs in."""

    name: str
    uid: str
    namespace: str
    image: str  # image of the container that this process runs in
    labels: Mapping[str, str] = field(default_factory=dict)
    # requests of all the pod's containers, by resource
    requests: Mapping[str, Decimal] = field(default_factory=dict)


def cluster_name(run_name: str) -> str:
    """Return a name for a run's cluster, a DNS-1035 label of at most 53 characters.

    The name follows from `run_name` alone. A name that this function returned stays as it is.

    Args:
        run_name: a name that is unique among the runs and attempts of a namespace. A Flyte
            execution may have several training tasks at once, so its own id is not enough.
    """
    if (
        re.fullmatch(r"ddp-([a-z0-9-]*-)?[0-9a-f]{8}", run_name)
        and len(run_name) <= MAX_NAME_LENGTH
    ):
        return run_name
    digest = hashlib.sha256(run_name.encode()).hexdigest()[:8]
    slug = re.sub(r"[^a-z0-9]+", "-", run_name.lower())
    return f"{f'ddp-{slug}'[: MAX_NAME_LENGTH - len(digest) - 1].rstrip('-')}-{digest}"


def cluster_spec(config: ClusterConfig, name: str, owner: Driver | None = None) -> Object:
    """Return the DaskCluster for the operator: one scheduler and the workers, a pod each.
    With a queue it has `min_nodes` workers, and `further_workers` returns the others.

    Args:
        owner: a pod in the cluster's namespace. Kubernetes deletes the cluster with this pod.
    """
    metadata: Object = {
        "name": name,
        # The operator copies labels and annotations to all its objects, and selects pods by labels.
        "labels": {**config.kubernetes.labels, "app.kubernetes.io/name": "flyte-ddp", **MANAGED_BY},
        "annotations": _annotations(config),
    }
    if owner is not None:
        metadata["ownerReferences"] = [
            {"apiVersion": "v1", "kind": "Pod", "name": owner.name, "uid": owner.uid}
        ]
    scheduler = _scheduler_pod(config, name)
    service = {
        "type": "ClusterIP",
        "selector": {CLUSTER: name, COMPONENT: "scheduler"},
        "ports": [
            {"name": port, "protocol": "TCP", "port": number, "targetPort": port}
            for port, number in PORTS.items()
        ],
    }
    worker = merge_pod(_worker_pod(config, name), config.kubernetes.pod_template)
    spec: Object = {
        "idleTimeout": round(config.kubernetes.idle_timeout),
        "scheduler": {
            "spec": merge_pod(scheduler, config.kubernetes.scheduler_pod_template),
            "service": service,
        },
        "worker": {"replicas": config.num_workers, "spec": worker},
    }
    if config.kubernetes.queue:
        spec["worker"]["replicas"] = config.enough_nodes
        # Not on the cluster: the operator would copy the group's name to further workers.
        spec["scheduler"]["metadata"] = spec["worker"]["metadata"] = _gang_metadata(config, name)
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "DaskCluster",
        "metadata": metadata,
        "spec": spec,
    }


def avoid_nodes(config: ClusterConfig, names: Sequence[str]) -> ClusterConfig:
    """Return the config of a cluster whose workers prefer all other Kubernetes nodes.

    They do not require other nodes: a run that has only slow ones trains there. A preference of
    the user's own `pod_template` replaces this one.
    """
    if not names:
        return config
    others = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(names)}
    preferred = [{"weight": 100, "preference": {"matchExpressions": [others]}}]
    own = {
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    }
    return config.with_pods(pod_template=merge_pod(own, config.kubernetes.pod_template))


def further_workers(config: ClusterConfig, cluster: Mapping[str, Any]) -> Object | None:
    """Return the DaskWorkerGroup of the workers beyond `min_nodes`, which Kueue admits one by one.
    Return None without a queue, or if there are no such workers.

    It must be created after the cluster's scheduler runs: its pods could otherwise take the room
    for which the scheduler and the first workers wait.

    Args:
        cluster: the DaskCluster in the API server. Kubernetes deletes the group with it.
    """
    num_further = config.num_workers - config.enough_nodes
    if not (config.kubernetes.queue and num_further):
        return None
    meta = cluster["metadata"]
    metadata = _owned_metadata(meta["name"], meta["uid"])
    metadata |= {
        "name": f"{meta['name']}-further",
        "labels": {**meta["labels"], CLUSTER: meta["name"], COMPONENT: "workergroup"},
        "annotations": _annotations(config),
    }
    worker = {
        "replicas": num_further,
        "metadata": {"labels": {f"{KUEUE}/queue-name": config.kubernetes.queue}},
        "spec": cluster["spec"]["worker"]["spec"],
    }
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "DaskWorkerGroup",
        "metadata": metadata,
        "spec": {"cluster": meta["name"], "worker": worker},
    }


def _annotations(config: ClusterConfig) -> dict[str, str]:
    """Return the annotations of all objects of a run, which say whether an autoscaler may move its
    pods.
    """
    own = KEEP_IN_PLACE
    if config.preset == FILLER:
        own = MAY_MOVE
    return {**own, **config.kubernetes.annotations}


def _gang_metadata(config: ClusterConfig, name: str) -> Object:
    """Return the metadata of the pods that Kueue admits together, when it has seen all of them."""
    return {
        "labels": {
            f"{KUEUE}/queue-name": config.kubernetes.queue,
            f"{KUEUE}/pod-group-name": name,
        },
        "annotations": {
            f"{KUEUE}/pod-group-total-count": str(config.enough_nodes + 1),
            # Otherwise a worker that ended without an error keeps its place in the group, and Kueue
            # deletes the pod that replaces it.
            f"{KUEUE}/pod-group-serving": "true",
        },
    }


def network_policy(
    name: str, uid: str, operator_namespace: str, driver: Driver | None = None
) -> Object:
    """Return the NetworkPolicy of a cluster's pods. It admits the cluster's own pods, the driver
    and the operator.

    The policy is needed because a Dask scheduler runs any code that a client sends. Kubernetes
    deletes the policy with the cluster.

    Args:
        uid: the uid of the DaskCluster called `name`.
        operator_namespace: the operator's namespace. The operator asks the scheduler whether it is
            idle.
        driver: the driver's pod, which the policy recognizes by its labels. Without labels, any pod
            in its namespace is admitted. None for a driver outside Kubernetes, which connects
            through a port that the API server forwards.
    """
    own = {CLUSTER: name}
    ports = [{"protocol": "TCP", "port": port} for port in PORTS.values()]
    callers: list[Object] = [_namespace_selector(operator_namespace)]
    if driver is not None:
        selector = {}
        if driver.labels:
            selector["matchLabels"] = dict(driver.labels)
        callers.append({"podSelector": selector, **_namespace_selector(driver.namespace)})
    selector_of_own = {"matchLabels": own}
    # The cluster's own pods reach each other on any port, because the ranks choose their ports.
    ingress = [{"from": [{"podSelector": selector_of_own}]}, {"from": callers, "ports": ports}]
    return {
        "apiVersion": f"{POLICY_GROUP}/v1",
        "kind": "NetworkPolicy",
        "metadata": _owned_metadata(name, uid),
        "spec": {"podSelector": selector_of_own, "policyTypes": ["Ingress"], "ingress": ingress},
    }


def certificate_secret(name: str, uid: str, certificate: str, key: str) -> Object:
    """Return the Secret with the run's certificate (PEM). Kubernetes deletes it with the
    DaskCluster that has this `uid`.
    """
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": "kubernetes.io/tls",
        "metadata": _owned_metadata(name, uid),
        "stringData": {"tls.crt": certificate, "tls.key": key},
    }


def _owned_metadata(name: str, uid: str) -> Object:
    """Return the metadata of an object that has the DaskCluster's name and is deleted with it."""
    return {
        "name": name,
        "labels": {"app.kubernetes.io/name": "flyte-ddp", **MANAGED_BY},
        "ownerReferences": [
            {"apiVersion": f"{GROUP}/{VERSION}", "kind": "DaskCluster", "name": name, "uid": uid}
        ],
    }


def _namespace_selector(namespace: str) -> Object:
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}


def scheduler_name(name: str) -> str:
    """Return the operator's name for the scheduler's Service and Deployment."""
    return f"{name}-scheduler"


def merge_pod(base: Mapping[str, Any], override: Mapping[str, Any]) -> Object:
    """Merge `override` over `base`: mappings by key, lists of named items by name. None removes a
    key. Other values replace the old ones.
    """
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping):
            if not isinstance(old, Mapping):
                old = {}
            merged[key] = merge_pod(old, value)
        elif isinstance(value, list) and isinstance(old, list):
            merged[key] = _merge_list(old, value, MERGE_KEYS.get(key, "name"))
        else:
            merged[key] = value
    return merged


def _merge_list(base: list[Any], override: list[Any], key: str) -> list[Any]:
    if not all(isinstance(each, Mapping) and key in each for each in [*base, *override]):
        return override
    merged = {each[key]: dict(each) for each in base}
    for each in override:
        merged[each[key]] = merge_pod(merged.get(each[key], {}), each)
    return list(merged.values())


def _worker_pod(config: ClusterConfig, name: str) -> Object:
    pods = config.kubernetes
    resources = _resources(pods.worker_cpus, pods.worker_memory)
    if config.gpus_per_node:
        resources[pods.gpu_resource] = str(config.gpus_per_node)
    variables = {}
    if pods.tls:
        # The operator would set a tcp:// address.
        variables["DASK_SCHEDULER_ADDRESS"] = f"tls://{scheduler_name(name)}:{SCHEDULER_PORT}"
    variables |= pods.env
    # Dask's memory limit is off: Dask would pause or kill a supervisor for the memory of its ranks.
    arguments = ["dask", "worker", "--name", "$(DASK_WORKER_NAME)", "--nthreads", "1"]
    pod = _pod(config, name, "worker", [*arguments, "--memory-limit", "0"], variables, resources)
    # The operator would name a worker after its Deployment. Dask does not accept a second worker
    # with a name before the first one has left, so a worker has its pod's name.
    own_name = {"fieldRef": {"fieldPath": "metadata.name"}}
    node = {"fieldRef": {"fieldPath": "spec.nodeName"}}
    container = {
        "name": "worker",
        "env": [
            {"name": "DASK_WORKER_NAME", "valueFrom": own_name},
            {"name": NODE_VARIABLE, "valueFrom": node},
        ],
        "envFrom": [{"secretRef": {"name": secret}} for secret in pods.env_from_secrets],
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    shared_memory = {"medium": "Memory", "sizeLimit": pods.shared_memory}
    # The loss of a node should cost only one worker. If there are few nodes, workers may share one.
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": {CLUSTER: name, COMPONENT: "worker"}},
    }
    own = {
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": shared_memory}],
        "topologySpreadConstraints": [spread],
    }
    return merge_pod(pod, own)


def _scheduler_pod(config: ClusterConfig, name: str) -> Object:
    """Return the scheduler's pod, which is small and has no GPU."""
    pods = config.kubernetes
    arguments = ["dask", "scheduler", "--host", "0.0.0.0"]
    if pods.tls:
        arguments += ["--protocol", "tls"]
    routes = _variables({"distributed.scheduler.http.routes": SCHEDULER_ROUTES})
    resources = _resources(pods.scheduler_cpus, pods.scheduler_memory)
    health = {"httpGet": {"port": "http-dashboard", "path": "/health"}}
    timing = {"initialDelaySeconds": 60, "periodSeconds": 20, "timeoutSeconds": 10}
    container = {
        "name": "scheduler",
        "ports": [
            {"name": port, "containerPort": number, "protocol": "TCP"}
            for port, number in PORTS.items()
        ],
        "readinessProbe": {**health, "periodSeconds": 1, "timeoutSeconds": 5},
        "livenessProbe": {**health, **timing},
    }
    pod = _pod(config, name, "scheduler", arguments, routes, resources)
    return merge_pod(pod, {"containers": [container]})


def _pod(
    config: ClusterConfig,
    name: str,
    role: str,
    arguments: list[str],
    variables: Mapping[str, str],
    resources: Mapping[str, str],
) -> Object:
    """Return the common part of a scheduler's and a worker's pod: one container, which may write
    only to /tmp.

    With TLS the container has the run's certificate. The certificate is its own authority, so only
    processes of the run have its key.

    Args:
        variables: environment of the container. They win over the settings of every gang.
    """
    pods = config.kubernetes
    settings = dask_config(config)
    # The root file system is read-only. Besides a worker's /dev/shm, only /tmp is writable.
    mounts: list[Object] = [{"name": "temporary", "mountPath": "/tmp"}]
    volumes: list[Object] = [{"name": "temporary", "emptyDir": {}}]
    if pods.tls:
        certificate, key = f"{CERTIFICATE_MOUNT}/tls.crt", f"{CERTIFICATE_MOUNT}/tls.key"
        settings |= {
            "distributed.comm.require-encryption": True,
            "distributed.comm.tls.ca-file": certificate,
        }
        for peer in ("scheduler", "worker", "client"):
            settings |= {
                f"distributed.comm.tls.{peer}.cert": certificate,
                f"distributed.comm.tls.{peer}.key": key,
            }
        mounts.append({"name": "certificate", "mountPath": CERTIFICATE_MOUNT, "readOnly": True})
        volumes.append({"name": "certificate", "secret": {"secretName": name}})
    # The worker has to know how much time it has for a final checkpoint. The scheduler ends later.
    grace = round(pods.worker_grace)
    given = {"HOME": "/tmp", **_variables(settings), GRACE_VARIABLE: str(grace), **variables}
    environment = [{"name": key, "value": value} for key, value in given.items()]
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    container = {
        "name": role,
        "image": pods.image,
        "imagePullPolicy": pods.image_pull_policy,
        "args": arguments,
        "env": environment,
        "resources": {"requests": dict(resources), "limits": dict(resources)},
        "securityContext": security,
        "volumeMounts": mounts,
    }
    account = {}
    if pods.service_account:
        account["serviceAccountName"] = pods.service_account
    return {
        "automountServiceAccountToken": False,  # neither scheduler nor worker talks to Kubernetes
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        **account,
        "terminationGracePeriodSeconds": grace,
        "containers": [container],
        "volumes": volumes,
    }


def _resources(cpus: float, memory: str) -> dict[str, str]:
    return {"cpu": f"{round(cpus * 1000)}m", "memory": memory}


def _variables(dask_settings: Mapping[str, Any]) -> dict[str, str]:
    """Return settings of Dask as environment variables, which Dask reads as Python literals."""
    variables = {}
    for key, value in dask_settings.items():
        if not isinstance(value, str):
            value = repr(value)
        name = key.upper().replace("-", "_").replace(".", "__")
        variables[f"DASK_{name}"] = value
    return variables
