"""Admission policy: limits for the inputs of a launch. They are part of the registered version.

The inputs name machines, images, service accounts, secrets, parts of pods and URLs, and some are
powerful. A DaskCluster can create any pod. Ranks in a driver's pod can read the driver's secrets. A
Dask scheduler's answers are unpickled. So the inputs are compared with a list before anything is
opened. This module opens nothing itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from flyte_ddp.cluster.config import FILLER, ClusterConfig, KubernetesConfig
from flyte_ddp.cluster.kubernetes.manifest import QUEUE_PRIORITY
from flyte_ddp.code.source_code import read_settings
from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import LISTED, Checked, check, field
from flyte_ddp.errors import ConfigError
from flyte_ddp.storage.limits import WHERE, covers, looks_like_place
from flyte_ddp.storage.state_dict_file import TORCHVISION, split_pin

URLS = ("s3://*", "gs://*", "gcs://*", "abfs://*", "abfss://*", "az://*")
OF_PODS = (
    "images",
    "service_accounts",
    "secrets",
    "namespaces",
    "pod_template",
    "env",
    "labels",
    "annotations",
    "gpu_resources",
    "operator_namespaces",
    "tls",
)
IMAGE_VARIABLE = "FLYTE_INTERNAL_IMAGE"  # the image of this task, as registered


# Other variables can load code into a worker.
VARIABLES = (
    *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_SOCKET_*", "NCCL_IB_*", "NCCL_P2P_*", "NCCL_ALGO"),
    *("NCCL_PROTO", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTORCH_*ALLOC_CONF"),
    *("TORCH_DISTRIBUTED_DEBUG", "TOKENIZERS_PARALLELISM"),
)
# Volumes, variables of the worker and a securityContext can mount the node's files, read any secret
# of the namespace, or run as root.
POD_TEMPLATE = (
    *("affinity", "nodeSelector", "tolerations", "topologySpreadConstraints"),
    "terminationGracePeriodSeconds",
    *("containers.worker.resources.*.cpu", "containers.scheduler.resources.*.cpu"),
    *("containers.worker.resources.*.memory", "containers.scheduler.resources.*.memory"),
    "containers.worker.resources.*.ephemeral-storage",
    "containers.scheduler.resources.*.ephemeral-storage",
)


@dataclass(frozen=True)
class Allowed(Checked):
    """Patterns for the values that a run may name. `*` matches any text, in URLs up to the next
    slash. Default values are always allowed.

    Raises:
        ConfigError: a value is not a list of strings.
    """

    images: tuple[str, ...] = field((), help="besides the task's own")
    service_accounts: tuple[str, ...] = field(
        ("flyte-ddp",), help="besides the namespace's default; that one is of deploy/rbac.yaml"
    )
    secrets: tuple[str, ...] = field((), help="of env_from_secrets")
    namespaces: tuple[str, ...] = field((), help="besides the task's own")
    pod_template: tuple[str, ...] = field(
        POD_TEMPLATE, help="paths in both templates, each with all below it"
    )
    # A variable can make a worker load code, and an annotation can have a secret injected.
    env: tuple[str, ...] = field(VARIABLES, help="names of variables of workers")
    labels: tuple[str, ...] = field(
        ("team", "project", "cost-center", "app.kubernetes.io/*"), help="names of labels of pods"
    )
    annotations: tuple[str, ...] = field(
        ("cluster-autoscaler.kubernetes.io/*", "karpenter.sh/*"),
        help="names of annotations of pods",
    )
    # Another resource may be a device of the node, such as its memory.
    gpu_resources: tuple[str, ...] = field(
        ("nvidia.com/*", "amd.com/*", "gpu.intel.com/*"), help="names of devices' resources"
    )
    operator_namespaces: tuple[str, ...] = field(
        ("dask-operator",), help="whose pods reach a scheduler"
    )
    # Without TLS, whoever reaches a scheduler runs code with the run's keys.
    tls: tuple[str, ...] = field(("true",), help="true, and false for clusters without TLS")
    kinds: tuple[str, ...] = field(("kubernetes",), help="of clusters, in a pod")
    addresses: tuple[str, ...] = field((), help="of existing Dask schedulers, in a pod")
    urls: tuple[str, ...] = field(
        URLS, help="of inputs, in a task of Flyte, each with all below it"
    )


def load_allowed(given: Mapping[str, Any] | None = None) -> Allowed:
    """Return the table of the project's settings.toml with the values of `given` in place of its
    own.

    A project without settings.toml uses this package as a library. There the author of a task also
    chooses its pods, so only the choices of a launch are limited: the cluster's kind and address,
    and the files among the inputs.

    Raises:
        ConfigError: an unknown field, or a value that is not a list of strings.
    """
    settings = read_settings()
    table: Mapping[str, Any]
    if settings:
        table = settings.get("allowed", {})
    else:
        table = {**dict.fromkeys(OF_PODS, ("*",)), "urls": (*URLS, "https://*")}
    allowed: Allowed = check("allowed", {**table, **(given or {})}, Allowed)
    return allowed


def check_allowed(config: ClusterConfig, allowed: Allowed, own_namespace: str = "") -> None:
    """Check that `allowed` permits the cluster of a run. Its kind and address are checked only in a
    pod, its own pods everywhere.

    Args:
        own_namespace: the namespace of this process's pod; "" outside Kubernetes.

    Raises:
        ConfigError: a value is not allowed. The message names all such values, and where to allow
            them.
    """
    findings: list[str] = []
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        findings += _check_place(config, allowed)
    if config.resolved_kind == "kubernetes":
        findings += _check_pods(config, allowed, own_namespace)
    if findings:
        raise ConfigError(f"{'; '.join(findings)} {WHERE}")
    with_filler_class(config)


def with_filler_class(config: ClusterConfig) -> ClusterConfig:
    """Return the config of a filler with the PriorityClass that settings.toml names for all its
    pods. The configs of other runs stay as they are.

    Raises:
        ConfigError: settings.toml names none, or the config names a priority in a queue.
    """
    if config.preset != FILLER or config.resolved_kind != "kubernetes":
        return config
    name = read_settings().get("filler_priority_class", "")
    if not name:
        raise ConfigError(
            "cluster.preset: expected '' while settings.toml names no filler_priority_class, got "
            f"{config.preset!r}; create the class of deploy/filler.yaml, and name it there"
        )
    pods = config.kubernetes
    if QUEUE_PRIORITY in pods.labels:
        raise ConfigError(
            f"cluster.kubernetes.labels: expected none called {QUEUE_PRIORITY} with preset "
            f"{config.preset!r}, whose priority is that of {name}, got "
            f"{pods.labels[QUEUE_PRIORITY]!r}"
        )
    priority = {"priorityClassName": name}
    return config.with_pods(
        pod_template={**pods.pod_template, **priority},
        scheduler_pod_template={**pods.scheduler_pod_template, **priority},
    )


def places_of_config(config: TrainingConfig) -> list[tuple[str, str]]:
    """Return the URLs and paths that a run's config names, each with its field, for
    `check_places`.
    """
    state, _ = split_pin(config.initial_model_state)
    places = list_places(config.recipe_options, "recipe_options")
    if not state.startswith(TORCHVISION):
        places.append(("initial_model_state", state))
    return places


def list_places(options: Any, name: str) -> list[tuple[str, str]]:
    """Return the URLs and outward paths in a JSON value, each with its name, for `check_places`.

    Keys and values at any depth are searched. An outward path leads out of a directory.
    """
    if isinstance(options, str):
        if looks_like_place(options):
            return [(name, options)]
        return []
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(options, Mapping):
        items = options.items()
    elif isinstance(options, (list, tuple)):
        items = enumerate(options)
    found = []
    for key, value in items:
        found += list_places(key, f"a key of {name}")
        found += list_places(value, f"{name}.{key}")
    return found


def _check_place(config: ClusterConfig, allowed: Allowed) -> Iterator[str]:
    kind, address = config.resolved_kind, config.resolved_address
    if not _matches(kind, allowed.kinds):
        yield f"cluster.kind: expected {_list(allowed, 'kinds')} in a pod, got {kind!r}"
    elif kind == "existing" and not _matches(address, allowed.addresses):
        yield (
            f"cluster.scheduler_address: expected {_list(allowed, 'addresses')}, got {address!r}"
        )


def _check_pods(config: ClusterConfig, allowed: Allowed, own_namespace: str) -> Iterator[str]:
    pods, defaults = config.kubernetes, KubernetesConfig()
    own = {"image": os.environ.get(IMAGE_VARIABLE, ""), "namespace": own_namespace}
    for each in dataclasses.fields(pods):
        name, table = each.name, each.metadata[LISTED]
        value = getattr(pods, name)
        if not table or value in (getattr(defaults, name), own.get(name)):
            continue
        if table == "pod_template":
            refused = _refused_paths(value, allowed.pod_template)
        else:
            refused = _refused_values(value, getattr(allowed, table))
        for text in refused:
            yield f"cluster.kubernetes.{name}: expected {_list(allowed, table)}, got {text}"


def _refused_paths(template: Any, patterns: Iterable[str]) -> list[str]:
    rules = [tuple(pattern.split(".")) for pattern in patterns]
    refused = []
    for path in _paths(template):
        if not any(covers(rule, path) for rule in rules):
            refused.append(".".join(path))
    return refused


def _refused_values(given: Any, patterns: Sequence[str]) -> list[str]:
    values = [given]
    if isinstance(given, (dict, list)):
        values = list(given)
    refused = []
    for value in values:
        if isinstance(value, bool):
            value = json.dumps(value)
        if not _matches(value, patterns):
            refused.append(repr(value))
    return refused


def _matches(value: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(value, pattern) for pattern in patterns)


def _list(allowed: Allowed, table: str) -> str:
    patterns = ", ".join(getattr(allowed, table))
    if patterns:
        return f"one of allowed.{table} ({patterns})"
    return f"none, because allowed.{table} is empty"


def _paths(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of every value that a pod template sets. An item of a list with names has its
    name in the path.
    """
    items: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list) and all(isinstance(x, Mapping) and "name" in x for x in value):
        for named in value:
            others = dict(named)
            items.append((str(others.pop("name")), others))
    for key, each in items:
        yield from _paths(each, (*path, key))
    if path and not items:
        yield path
