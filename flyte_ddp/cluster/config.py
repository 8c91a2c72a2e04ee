"""Which Dask cluster a run uses, and that cluster's life as a `with` block. Knows neither recipes nor ranks.

A worker is one node's supervisor: one thread, and child processes of its own. The three kinds of cluster differ in who
starts the workers; whoever holds the client cannot tell them apart.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import os
import re
import time
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from flyte_ddp.config import checked_type
from flyte_ddp.errors import ClusterError, ConfigError

if typing.TYPE_CHECKING:
    from distributed import Client

CHOICES: dict[str, tuple[str, ...]] = {
    "kind": ("auto", "local", "kubernetes", "existing"),
    "image_pull_policy": ("IfNotPresent", "Always", "Never"),
}
ADDRESS_VARIABLE = "DASK_SCHEDULER_ADDRESS"  # set by Dask's own tools, and in a task by Flyte's Dask plugin

# What a gang needs of Dask, whoever starts the scheduler and the workers; dask.config.set and environment alike.
DASK_CONFIG: dict[str, Any] = {
    # The supervisor of a dead worker is lost at once: the gang restarts as a whole, never one task of it.
    "distributed.scheduler.allowed-failures": 0,
    # A task pinned to a worker that has gone would otherwise wait for it forever.
    "distributed.scheduler.no-workers-timeout": "10s",
    # A daemonic process, as Dask's nanny makes them, may not have children, and a worker's are its ranks.
    "distributed.worker.daemon": False,
    # The ranks want the cores. Dask's processes have next to nothing to do, and by default look at themselves 50 times
    # a second, at the machine twice, and at the stack of the thread that waits for the supervisor a hundred times.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "1s",
    "distributed.admin.system-monitor.interval": "5s",
}
CLIENT_CLOSE_TIMEOUT = 3.0  # seconds; of the 30 that Kubernetes gives a pod to end, most belong to a last checkpoint
POLL_INTERVAL = 0.25  # seconds
STRANGER_TIMEOUT = 30.0  # seconds in which something other than Dask may still answer at a scheduler's address
REPORT_INTERVAL = 15.0  # seconds between two log lines about what a start waits for

_QUANTITY = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(m|[kMGTP]|[KMGTP]i)?")
_FACTORS = {"m": Decimal("0.001"), "k": Decimal(1000)}
_FACTORS |= {letter: Decimal(1000) ** power for power, letter in enumerate("MGTP", start=2)}
_FACTORS |= {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTP", start=1)}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClusterConfig:
    """The machines of one run. Everything from `image` on concerns the kind "kubernetes" alone.

    Raises:
        ConfigError: a value has the wrong type or lies outside the range given beside its field.
    """

    # existing (a running Dask cluster), kubernetes (one made for this run), local (processes of this machine), or auto:
    # existing where an address is known, kubernetes inside a pod, local otherwise
    kind: str = "auto"
    num_nodes: int = 2  # Dask workers, each with a machine's (or a pod's) share of the ranks, >= 1
    gpus_per_node: int = 0  # >= 0
    processes_per_node: int = 0  # ranks on each node; 0: one per GPU, or one where there are none
    threads_per_rank: int = 0  # CPU threads of each rank; 0: its share of its node's cores
    min_nodes: int = 0  # a run goes on with this many when others do not come (back) in time; 0: needs all of num_nodes
    max_restarts: int = 3  # of the whole gang, after a node or a rank was lost, >= 0
    node_timeout: float = 20.0  # seconds of silence after which a node counts as lost, > 0
    start_timeout: float = 900.0  # seconds for the whole start: pods scheduled, images pulled, workers connected; > 0
    scheduler_address: str = ""  # of kind existing, such as tcp://10.0.0.7:8786; "": what DASK_SCHEDULER_ADDRESS says

    image: str = ""  # of scheduler and workers; "": the image of the pod that this process runs in
    namespace: str = ""  # "": this pod's, or the kubeconfig's
    worker_cpus: float = 2.0  # cores of each worker pod, requested and limit, > 0
    worker_memory: str = "8Gi"  # of each worker pod, requested and limit; a Kubernetes quantity
    shared_memory: str = "2Gi"  # size of a worker's /dev/shm, which counts towards worker_memory
    gpu_resource: str = "nvidia.com/gpu"  # what gpus_per_node counts; a MIG profile's name, for example
    scheduler_cpus: float = 0.5  # cores of the scheduler pod, requested and limit, > 0
    scheduler_memory: str = "1Gi"  # of the scheduler pod, requested and limit
    node_selector: dict[str, str] = field(default_factory=dict)  # labels of the nodes that workers may run on
    tolerations: list[dict[str, str]] = field(default_factory=list)  # of workers: key, operator, value, effect
    service_account: str = ""  # of scheduler and workers, for access to storage; "": the namespace's default
    image_pull_policy: str = "IfNotPresent"  # or Always, Never
    image_pull_secrets: list[str] = field(default_factory=list)  # names of secrets in the namespace
    labels: dict[str, str] = field(default_factory=dict)  # on everything that is made
    annotations: dict[str, str] = field(default_factory=dict)  # on everything that is made
    env: dict[str, str] = field(default_factory=dict)  # of workers; readable by all who may read pods: no secrets
    env_from_secrets: list[str] = field(default_factory=list)  # secrets whose keys become variables of workers
    # merged into the workers' pod spec: mappings key by key, lists of named things by name, null removes
    pod_template: dict[str, Any] = field(default_factory=dict)
    idle_timeout: float = 300.0  # seconds after its driver's last sign of life until the operator deletes the cluster
    autoscaled_nodes: bool = False  # nodes are made on demand: preflight does not ask for one that fits
    return_timeout: float = 60.0  # of every kind: seconds until a run with min_nodes goes on without a lost node, > 0

    def __post_init__(self) -> None:
        for name, annotation in typing.get_type_hints(type(self)).items():
            object.__setattr__(self, name, _checked(name, getattr(self, name), annotation))
        for name, choices in CHOICES.items():
            _require(self, name, getattr(self, name) in choices, "one of " + ", ".join(choices))
        _require(self, "num_nodes", self.num_nodes >= 1, "a whole number of at least 1")
        for name in ("gpus_per_node", "processes_per_node", "threads_per_rank", "max_restarts"):
            _require(self, name, getattr(self, name) >= 0, "a whole number of at least 0")
        _require(self, "min_nodes", 0 <= self.min_nodes <= self.num_nodes, f"from 0 to num_nodes ({self.num_nodes})")
        if self.gpus_per_node:
            fits = self.processes_per_node <= self.gpus_per_node
            _require(self, "processes_per_node", fits, f"at most gpus_per_node ({self.gpus_per_node})")
        for name in ("node_timeout", "start_timeout", "return_timeout", "worker_cpus", "scheduler_cpus"):
            _require(self, name, 0 < getattr(self, name) < math.inf, "a finite number above 0")
        _require(self, "idle_timeout", 60 <= self.idle_timeout < math.inf, "a finite number of at least 60 (seconds)")
        for name in ("worker_memory", "shared_memory", "scheduler_memory"):
            quantity = getattr(self, name)
            holds = bool(_QUANTITY.fullmatch(quantity)) and parse_quantity(quantity) > 0
            _require(self, name, holds, "a Kubernetes quantity such as 8Gi or 500M")
        _require(
            self,
            "shared_memory",
            parse_quantity(self.shared_memory) <= parse_quantity(self.worker_memory),
            f"at most worker_memory ({self.worker_memory}), of which it is a part",
        )
        _require(self, "gpu_resource", bool(self.gpu_resource), "a resource name such as nvidia.com/gpu")

    @property
    def ranks_per_node(self) -> int:
        return self.processes_per_node or self.gpus_per_node or 1

    @property
    def enough_nodes(self) -> int:
        """With fewer workers than this a run neither starts nor goes on."""
        return self.min_nodes or self.num_nodes

    @property
    def resolved_kind(self) -> str:
        """`kind`, or what "auto" means in this process."""
        if self.kind != "auto":
            return self.kind
        if self.scheduler_address or os.environ.get(ADDRESS_VARIABLE):
            return "existing"
        return "kubernetes" if os.environ.get("KUBERNETES_SERVICE_HOST") else "local"


def cluster_config(values: Mapping[str, Any]) -> ClusterConfig:
    """The config with `values` in place of the defaults.

    Raises:
        ConfigError: an unknown field, or a value of the wrong type or range.
    """
    known = [each.name for each in dataclasses.fields(ClusterConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(f"cluster: unknown field {name!r}; accepted are {', '.join(known)}")
    return ClusterConfig(**values)


@contextlib.contextmanager
def open_cluster(config: ClusterConfig, run_name: str) -> Iterator[Client]:
    """A client of a cluster whose workers are there, each with one thread.

    All of `num_nodes` are, or, where the time ran out, at least `min_nodes`. A cluster that was made for the run is
    deleted after the block, however that is left; SIGTERM leaves it with SystemExit. An existing one stays as it was.

    Args:
        run_name: unique in a namespace, as of `kube_spec.cluster_name`; used by the kind "kubernetes" alone.

    Raises:
        ConfigError: kind "existing" without an address; as PreflightError: what a Kubernetes cluster lacks.
        ClusterError: not enough workers within `start_timeout` seconds; says what they wait for.
    """
    import dask
    import distributed  # noqa: F401 - before its settings are changed: it adds its defaults to them, which must stay

    deadline = time.monotonic() + config.start_timeout
    with contextlib.ExitStack() as stack:
        kind = config.resolved_kind
        stack.enter_context(dask.config.set(dask_config(config)))
        stack.enter_context(_warnings_only(logging.getLogger("distributed")))
        if kind == "kubernetes":
            from flyte_ddp.cluster.kubernetes import lifecycle as kube

            address = stack.enter_context(kube.kube_cluster(config, run_name, deadline))
        elif kind == "local":
            address = stack.enter_context(_local_cluster(config))
        else:
            address = _existing_address(config)
        client = stack.enter_context(_connected(address, deadline))
        if kind == "kubernetes":
            stack.enter_context(kube.keep_alive(client, config.idle_timeout))
        _wait_for_workers(client, config, run_name, deadline)
        yield client


def explain_missing_workers(config: ClusterConfig, run_name: str) -> str:
    """Why workers are not there, in a sentence; "" where nothing is known beyond that."""
    if config.resolved_kind != "kubernetes":
        return ""
    from flyte_ddp.cluster.kubernetes import api as kube_api

    return kube_api.explain(config, run_name)


def worker_log(config: ClusterConfig, worker_name: str, num_lines: int = 20) -> str:
    """The last lines that a worker's pod wrote, also of a container that has died; "" where there is no pod."""
    if config.resolved_kind != "kubernetes":
        return ""
    from flyte_ddp.cluster.kubernetes import api as kube_api

    return kube_api.worker_log(config, worker_name, num_lines)


def dask_config(config: ClusterConfig) -> dict[str, Any]:
    """The settings of scheduler and workers, by their name in Dask's configuration."""
    # Checked once in this time, so that Dask forgets a silent worker after one to two of them.
    return {**DASK_CONFIG, "distributed.scheduler.worker-ttl": f"{config.node_timeout:g}s"}


def parse_quantity(text: str) -> Decimal:
    """A Kubernetes quantity, such as 500m, 2 or 8Gi, as a number of cores, bytes or things.

    Raises:
        ValueError: it is none.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no Kubernetes quantity; accepted is a number with a unit such as m, M or Gi")
    number, unit = match.groups()
    return Decimal(number) * (_FACTORS[unit] if unit else 1)


@contextlib.contextmanager
def _warnings_only(logger: logging.Logger) -> Iterator[None]:
    """Keep what is merely informative from people, who under `pyflyte run` would read it between the epochs."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _existing_address(config: ClusterConfig) -> str:
    address = config.scheduler_address or os.environ.get(ADDRESS_VARIABLE, "")
    if not address:
        raise ConfigError(
            "scheduler_address: '' names no scheduler; accepted is an address such as tcp://10.0.0.7:8786, here or in "
            f"the environment variable {ADDRESS_VARIABLE}"
        )
    return address


@contextlib.contextmanager
def _local_cluster(config: ClusterConfig) -> Iterator[str]:
    from distributed import LocalCluster

    with LocalCluster(
        n_workers=config.num_nodes,
        threads_per_worker=1,
        processes=True,
        memory_limit=0,  # a worker is only its ranks' supervisor, and must not be paused or killed for their sake
        dashboard_address=None,
        silence_logs=logging.WARNING,
    ) as cluster:
        yield cluster.scheduler_address


@contextlib.contextmanager
def _connected(address: str, deadline: float) -> Iterator[Client]:
    from distributed import Client

    _wait_for_dask(address, deadline)
    try:
        client = Client(address, timeout=max(1.0, deadline - time.monotonic()), set_as_default=False)
    except OSError as error:  # Dask's TimeoutError is one as well
        raise ClusterError(f"the Dask scheduler at {address} cannot be reached: {error}") from error
    try:
        yield client
    finally:
        # A scheduler that has died must neither hold up nor replace what ended the block.
        with contextlib.suppress(OSError, TimeoutError):
            client.close(timeout=CLIENT_CLOSE_TIMEOUT)


def _wait_for_dask(address: str, deadline: float) -> None:
    """Wait until a Dask server answers at `address`.

    A Client that is answered by anything else, such as the dashboard's port, fails in a way that keeps this process
    from ending. And what lies beyond the cluster may answer at a Service's address, until every node has learnt of it.

    Raises:
        ClusterError: nothing answers until `deadline`, or what answers is not Dask.
    """
    from distributed.comm import connect

    async def knock() -> None:
        comm = await connect(address, timeout=max(1.0, deadline - time.monotonic()))
        await comm.close()

    give_up_at = min(deadline, time.monotonic() + STRANGER_TIMEOUT)
    # In a thread of its own, because the caller's may have an event loop that runs.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        while True:
            try:
                return executor.submit(asyncio.run, knock()).result()
            except OSError as error:  # Dask's TimeoutError is one as well
                raise ClusterError(f"the Dask scheduler at {address} cannot be reached: {error}") from error
            except (MemoryError, ValueError) as error:  # its first bytes, read as a length or a protocol's version
                if time.monotonic() > give_up_at:
                    raise ClusterError(f"what answers at {address} is no Dask scheduler: {error}") from error
            time.sleep(POLL_INTERVAL)


def _wait_for_workers(client: Client, config: ClusterConfig, run_name: str, deadline: float) -> None:
    report_at = time.monotonic() + REPORT_INTERVAL
    while (num_workers := len(client.scheduler_info(n_workers=-1)["workers"])) < config.num_nodes:
        now = time.monotonic()
        if now > deadline:
            break
        if now > report_at:
            report_at = now + REPORT_INTERVAL
            logger.info(
                "%d of %d workers are there. %s",
                num_workers,
                config.num_nodes,
                explain_missing_workers(config, run_name),
            )
        time.sleep(POLL_INTERVAL)
    if num_workers >= config.num_nodes:
        return
    reason = explain_missing_workers(config, run_name)
    message = f"{num_workers} of {config.num_nodes} workers came within {config.start_timeout:g} s. {reason}".rstrip()
    if num_workers < config.enough_nodes:
        raise ClusterError(message)
    logger.warning("%s The run starts with these, as min_nodes allows.", message)


def _checked(name: str, value: object, expected: Any) -> object:
    """`value` as `expected`: a number, bool or string as in TrainingConfig, or a list or mapping of such."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if expected is Any:
        return value
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name}: {value!r} is of the wrong type; accepted is a list")
        return [_checked(f"{name}[{index}]", each, arguments[0]) for index, each in enumerate(value)]
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ConfigError(f"{name}: {value!r} is of the wrong type; accepted is a mapping from strings")
        return {key: _checked(f"{name}[{key!r}]", each, arguments[1]) for key, each in value.items()}
    return checked_type(name, value, expected)


def _require(config: ClusterConfig, name: str, holds: bool, accepted: str) -> None:
    if not holds:
        raise ConfigError(f"{name}: {getattr(config, name)!r} is out of range; accepted is {accepted}")
