"""Configuration of the Dask cluster that a run uses. Knows neither Dask nor Kubernetes, and opens
nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from flyte_ddp.config.fields import Limits, check, check_names, field, validate
from flyte_ddp.errors import ConfigError

# variable in a worker's or a task's pod: seconds from SIGTERM until the pod is killed
GRACE_VARIABLE = "FLYTE_DDP_TERMINATION_GRACE"
DEFAULT_GRACE = 30.0  # seconds; the default of Kubernetes
MAX_GRACE = 86_400.0  # seconds; a drain waits for this time
MAX_IDLE_TIMEOUT = 604_800.0  # seconds for which the pods of a lost driver cost money
GRACE_IN_TEMPLATE = "terminationGracePeriodSeconds"
# variable that Dask's own tools set, and Flyte's Dask plugin in a task
ADDRESS_VARIABLE = "DASK_SCHEDULER_ADDRESS"

FILLER = "filler"
# Fields that a preset sets where they have their default. A filler begins and goes on with any
# number of nodes. An idle node may be needed again soon, and each growth costs the gang a restart.
PRESETS: dict[str, dict[str, Any]] = {
    "": {},
    FILLER: {
        "min_nodes": 1,
        "start_timeout": 86_400.0,
        "return_timeout": 5.0,
        "grow_delay": 10.0,
        "grow_interval": 60.0,
    },
}

# Dask settings that a gang needs on every kind of cluster. They are passed to dask.config.set and
# to the environment.
DASK_CONFIG: dict[str, Any] = {
    # A task of a dead worker fails at once, because the gang restarts only as a whole.
    "distributed.scheduler.allowed-failures": 0,
    # Without this timeout a task would wait forever for a lost worker.
    "distributed.scheduler.no-workers-timeout": "10s",
    # Dask's nanny makes daemonic processes by default. They may not have children, and the ranks
    # are a worker's children.
    "distributed.worker.daemon": False,
    # The ranks need the cores. By default Dask's processes profile their own threads a hundred
    # times a second, and look at the event loop 50 times and at the machine twice.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
    # The task of a node may run nowhere else.
    "distributed.scheduler.work-stealing": False,
    # By default the scheduler remembers the last thousand messages to each worker, which takes a
    # gigabyte with a thousand workers.
    "distributed.admin.low-level-log-length": 50,
}

_MEMORY: dict[str, Any] = {
    "pattern": r"(\d+(\.\d+)?|\.\d+)([kMGTP]|[KMGTP]i)?",
    "example": "a Kubernetes quantity such as 8Gi or 500M",
}


@dataclass(frozen=True)
class KubernetesConfig:
    """The pods of a Dask cluster on Kubernetes.

    Raises:
        ConfigError: a value has the wrong type or is out of bounds.
    """

    image: str = field(
        "",
        help="of scheduler and workers; by default that of the pod that this process runs in",
        listed="images",
    )
    namespace: str = field(
        "", help="by default this pod's, or the kubeconfig's", listed="namespaces"
    )
    worker_cpus: float = field(
        2.0, above=0, unit="cores", help="of each worker pod, requested and limit"
    )
    worker_memory: str = field("8Gi", **_MEMORY, help="of each worker pod, requested and limit")
    shared_memory: str = field(
        "2Gi", **_MEMORY, help="size of a worker's /dev/shm, which is part of worker_memory"
    )
    gpu_resource: str = field(
        "nvidia.com/gpu",
        pattern=r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-.\w]*[A-Za-z0-9])?",
        example="the name of a device's resource, such as nvidia.com/gpu",
        help="the resource that gpus_per_node counts, such as a MIG profile's name",
        listed="gpu_resources",
    )
    scheduler_cpus: float = field(
        0.5, above=0, unit="cores", help="of the scheduler pod, requested and limit"
    )
    scheduler_memory: str = field(
        "1Gi", **_MEMORY, help="of the scheduler pod, requested and limit"
    )
    service_account: str = field(
        "",
        help="of scheduler and workers, for access to storage; by default the namespace's default",
        listed="service_accounts",
    )
    image_pull_policy: str = field("IfNotPresent", choices=("IfNotPresent", "Always", "Never"))
    labels: dict[str, str] = field(factory=dict, help="on everything that is made", listed="labels")
    annotations: dict[str, str] = field(
        factory=dict, help="on everything that is made", listed="annotations"
    )
    env: dict[str, str] = field(
        factory=dict,
        help="variables of workers; readable by all who may read pods, so no secrets",
        listed="env",
    )
    env_from_secrets: list[str] = field(
        factory=list,
        help="secrets whose keys become environment variables of workers",
        listed="secrets",
    )
    pod_template: dict[str, Any] = field(
        factory=dict,
        help="merged into the workers' pod spec: mappings key by key, lists of named things by "
        "name, null removes",
        listed="pod_template",
    )
    scheduler_pod_template: dict[str, Any] = field(
        factory=dict, help="merged in the same way into the scheduler's", listed="pod_template"
    )
    queue: str = field(
        "",
        pattern=r"|[a-z0-9]([-a-z0-9.]*[a-z0-9])?",
        example="the name of a LocalQueue",
        help="Kueue's LocalQueue: it admits the scheduler and min_nodes workers together, further "
        "workers one by one; start_timeout counts the wait for the former",
    )
    operator_namespace: str = field(
        "dask-operator",
        help="whose pods a run's NetworkPolicy lets in",
        listed="operator_namespaces",
    )
    tls: bool = field(
        True,
        help="driver, scheduler and workers talk by TLS, with a certificate of the run; ranks do "
        "not",
        listed="tls",
    )
    idle_timeout: float = field(
        300.0,
        minimum=60,
        unit="seconds",
        help="from the driver's last heartbeat until the operator deletes the cluster",
        maximum=MAX_IDLE_TIMEOUT,
    )
    termination_grace: float = field(
        60.0,
        minimum=10,
        unit="seconds",
        help="from SIGTERM, as at a drain, until a worker is killed: for a final checkpoint and "
        "its upload",
        maximum=MAX_GRACE,
    )
    autoscaled_nodes: bool = field(
        False, help="nodes are made on demand, so the preflight does not ask for one that fits"
    )

    @property
    def worker_grace(self) -> float:
        """Seconds from SIGTERM until a worker's pod is killed: `pod_template`'s value, or
        `termination_grace`.
        """
        if GRACE_IN_TEMPLATE not in self.pod_template:
            return self.termination_grace
        given = self.pod_template[GRACE_IN_TEMPLATE]
        if given is None:
            return DEFAULT_GRACE
        return float(given)

    def __post_init__(self) -> None:
        validate(self)
        # Flyte's console turns every number of a struct into a float. A pod's specification has
        # whole numbers only.
        for name in ("pod_template", "scheduler_pod_template"):
            text = json.dumps(getattr(self, name))
            parsed = json.loads(text, parse_float=_parse_number)
            object.__setattr__(self, name, parsed)
            grace = parsed.get(GRACE_IN_TEMPLATE)
            if grace is not None:
                limits = Limits(minimum=10, maximum=MAX_GRACE, unit="seconds")
                check(f"{name}.{GRACE_IN_TEMPLATE}", grace, float, limits)
        if _num_bytes(self.shared_memory) > _num_bytes(self.worker_memory):
            raise ConfigError(
                f"shared_memory: expected at most worker_memory ({self.worker_memory}), of which "
                f"it is a part, got {self.shared_memory!r}"
            )


@dataclass(frozen=True)
class ClusterConfig:
    """The machines of one run.

    Raises:
        ConfigError: a value has the wrong type or is out of bounds.
    """

    kind: str = field(
        "auto",
        choices=("auto", "local", "kubernetes", "existing"),
        help="existing: a running Dask cluster; kubernetes: one made for this run; local: "
        "processes of this machine; "
        "auto: existing where an address is known, kubernetes inside a pod, local otherwise",
        listed="kinds",
    )
    preset: str = field(
        "",
        pattern="|".join(PRESETS),
        example="filler or ''",
        help="filler: on idle nodes, which go back to whatever else needs them; fields that have "
        "their default become min_nodes 1, start_timeout a day, return_timeout 5, grow_delay 10 "
        "and grow_interval 60",
    )
    num_nodes: int = field(
        2, minimum=1, help="Dask workers, each with a machine's or a pod's share of the ranks"
    )
    gpus_per_node: int = field(0, minimum=0, help="0: the ranks use CPUs")
    processes_per_node: int = field(
        0, minimum=0, help="ranks on each node; 0: one per GPU, or one where there are none"
    )
    threads_per_rank: int = field(
        0,
        minimum=0,
        help="CPU threads of each rank, also where OMP_NUM_THREADS is set; 0: OMP_NUM_THREADS, or "
        "its share of its node's cores",
    )
    min_nodes: int = field(
        0,
        minimum=0,
        help="a run continues with this many when other nodes do not come (back) in time; 0: it "
        "needs all of num_nodes",
    )
    spare_nodes: int = field(
        0,
        minimum=0,
        help="further workers, which import and fetch the data, and wait to take the place of lost "
        "or slow ones; no start waits for them",
    )
    max_restarts: int = field(
        3,
        minimum=0,
        help="of the whole gang, after a node or a rank was lost, without a newer state in between",
    )
    node_timeout: float = field(
        20.0, above=0, unit="seconds", help="of silence after which a node counts as lost"
    )
    start_timeout: float = field(
        900.0,
        above=0,
        unit="seconds",
        help="of the whole start: pods scheduled, images pulled, workers connected",
    )
    return_timeout: float = field(
        60.0, above=0, unit="seconds", help="until a run with min_nodes continues without a node"
    )
    grow_delay: float = field(
        30.0,
        minimum=0,
        unit="seconds",
        help="for which idle workers have been there when a run with fewer than num_nodes "
        "continues with them",
    )
    grow_interval: float = field(
        300.0, minimum=0, unit="seconds", help="between two growths, at least"
    )
    check_nodes: str = field(
        "auto",
        choices=("auto", "always", "never"),
        help="measure cores, memory, disk and network of the nodes while the ranks import; a node "
        "below 0.7 of the median (0.6 for cores and memory) is named, and left out or replaced "
        "where that is possible; auto: on Kubernetes",
    )
    scheduler_address: str = field(
        "",
        help="of kind existing, such as tcp://10.0.0.7:8786; by default that in "
        f"{ADDRESS_VARIABLE}",
        listed="addresses",
    )
    kubernetes: KubernetesConfig = field(factory=KubernetesConfig, help="of kind kubernetes alone")

    def __post_init__(self) -> None:
        validate(self)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in PRESETS[self.preset] and value == each.default:
                object.__setattr__(self, each.name, PRESETS[self.preset][each.name])
        if self.preset and self.kind in ("local", "existing"):
            raise ConfigError(
                f"preset: expected '' with kind {self.kind}, whose nodes no run can return, got "
                f"{self.preset!r}"
            )
        if self.preset == FILLER and self.spare_nodes:
            raise ConfigError(
                "spare_nodes: expected 0 with preset filler, whose idle nodes others need, got "
                f"{self.spare_nodes}"
            )
        if self.min_nodes > self.num_nodes:
            raise ConfigError(
                f"min_nodes: expected at most num_nodes ({self.num_nodes}), got {self.min_nodes}"
            )
        if self.gpus_per_node and self.processes_per_node > self.gpus_per_node:
            raise ConfigError(
                f"processes_per_node: expected at most gpus_per_node ({self.gpus_per_node}), "
                f"got {self.processes_per_node}"
            )

    def with_pods(self, **fields: Any) -> ClusterConfig:
        """Return the config with other `fields` of `kubernetes`."""
        return replace(self, kubernetes=replace(self.kubernetes, **fields))

    @property
    def ranks_per_node(self) -> int:
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def num_workers(self) -> int:
        """The number of workers, with those that wait."""
        return self.num_nodes + self.spare_nodes

    @property
    def checks_nodes(self) -> bool:
        """True if the speed of a gang's nodes is to be compared."""
        if self.check_nodes == "auto":
            return self.resolved_kind == "kubernetes"
        return self.check_nodes == "always"

    @property
    def enough_nodes(self) -> int:
        """Return the number of workers below which a run neither starts nor continues."""
        return self.min_nodes or self.num_nodes

    @property
    def resolved_kind(self) -> str:
        """Return `kind`, or the kind that "auto" means in this process."""
        if self.kind != "auto":
            return self.kind
        if self.resolved_address:
            return "existing"
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            return "kubernetes"
        return "local"

    @property
    def resolved_address(self) -> str:
        """Return an existing scheduler's address, from here or the environment; "" if there is
        none.
        """
        return self.scheduler_address or os.environ.get(ADDRESS_VARIABLE, "")


def _parse_number(text: str) -> float:
    number = float(text)
    if number % 1 == 0:
        return int(number)
    return number


def _num_bytes(quantity: str) -> float:
    """Return the bytes of a quantity that matches `_MEMORY`."""
    number = quantity.rstrip("kKMGTPi")
    unit = quantity.removeprefix(number)
    base = 1000.0
    if unit.endswith("i"):
        base = 1024.0
    return float(number) * base ** " KMGTP".index(unit[:1].upper() or " ")


def cluster_config(values: Mapping[str, Any]) -> ClusterConfig:
    """Return the config with `values` in place of its defaults. Raises ConfigError for an unknown
    field or a bad value.
    """
    check_names(ClusterConfig, values, "cluster")
    return ClusterConfig(**values)


def termination_grace() -> float:
    """Return the seconds from SIGTERM until this process is killed, as its environment says."""
    text = os.environ.get(GRACE_VARIABLE, "")
    try:
        return float(text or DEFAULT_GRACE)
    except ValueError:
        raise ConfigError(f"{GRACE_VARIABLE}: expected a number of seconds, got {text!r}") from None


def dask_config(config: ClusterConfig) -> dict[str, Any]:
    """Return the settings of scheduler and workers, by their names in Dask's configuration."""
    # Dask checks once per timeout, so it drops a silent worker after one to two timeouts.
    return {**DASK_CONFIG, "distributed.scheduler.worker-ttl": f"{config.node_timeout:g}s"}
