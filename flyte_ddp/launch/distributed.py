"""`Distributed`: the gang of a Flyte task, whose function runs in every rank. It has the fields of
kfpytorch's `Elastic`. Knows neither of Flyte's SDKs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.cluster.config import KubernetesConfig
from flyte_ddp.code.source_code import find_project
from flyte_ddp.config.fields import check, finite_number
from flyte_ddp.config.training import Needs
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.run import Gang
from flyte_ddp.observers.mlflow import find_server
from flyte_ddp.observers.recorder import TRACKERS
from flyte_ddp.process.devices import num_gpus
from flyte_ddp.project.admission import Allowed, load_allowed


@dataclass
class Distributed:
    """Run the function of a Flyte task in every rank of a gang, in torchrun's environment.

    The first eight fields are the fields of kfpytorch's `Elastic`, in the same order.

    Args:
        nnodes: number of machines; "1:4" for at least 1 and at most 4. One machine is the task's
            own pod and needs no cluster.
        nproc_per_node: ranks on each machine; "gpu" for one per GPU, "auto" for one per GPU, or two
            without GPUs.
        start_method: "spawn" or "fork", which change nothing: ranks are always fresh processes.
        monitor_interval: changes nothing: the end of a rank is noticed at once.
        max_restarts: how often all ranks start again, within one attempt of Flyte's and without a
            new checkpoint in between, after one was killed, hung or lost, or failed in a way that
            another attempt may not repeat.
        rdzv_configs: "join_timeout" is the number of seconds that a cluster of several nodes may
            take to start; the rest has no meaning here.
        increase_shared_mem: give a pod with ranks as much shared memory as it has memory, if
            neither the task's `shared_memory` nor `cluster` names its size.
        run_policy: Kubeflow's, which changes nothing: the task's own `timeout` and `retries` count.
        cluster: the machines, with the fields of `flyte_ddp.cluster.config.ClusterConfig`. For
            other fields, the task's `requests` and `limits` count, for each machine's pod.
        stall_timeout: seconds without a report of any rank until the run is ended with all stacks;
            it counts from the first `session.report` on.
        max_hours: hours of the task, all attempts together. After that its ranks are asked for a
            final checkpoint, and the task ends for good. 0 is no limit.
        max_cost: what the nodes of the run may cost, by the table `prices` of settings.toml. Then
            it ends as after `max_hours`. 0 is no limit.
        wandb: the project of W&B that records the run, with the key in the task's secret
            `wandb/api_key` or in WANDB_API_KEY; "" for none, as for a function that calls W&B
            itself.
        mlflow: the experiment of MLflow that records the run in place of W&B, on the server that
            MLFLOW_TRACKING_URI or settings.toml names. The token is in the task's secret
            `mlflow/token` or in MLFLOW_TRACKING_TOKEN.
        tensorboard: a directory or URL for TensorBoard in place of both. Each run gets a directory
            in it.
        allowed: the clusters and input files that the task may use, such as {"kinds": ["existing"],
            "addresses": ["tcp://dask:8786"], "env": ["NCCL_*"]}. For other fields, the table
            `allowed` in the settings.toml beside this package counts. Without this file: the kind
            "kubernetes" with any pods, and files in object stores or at https.
        results: URL for the files that `session.submit_result` sends, or a directory of the task's
            machine.

    Raises:
        ConfigError: a value has the wrong type or range.

    Example:
        # in a task of Flyte
        @task(task_config=Distributed(nnodes=2, nproc_per_node="gpu", max_restarts=3), retries=2)
        def count_ranks() -> int:
            dist.init_process_group()
            return dist.get_world_size()
    """

    nnodes: int | str = 1
    nproc_per_node: int | str = 1
    start_method: str = "spawn"
    monitor_interval: float = 5
    max_restarts: int = 0
    rdzv_configs: dict[str, Any] = field(
        default_factory=lambda: {"timeout": 900, "join_timeout": 900}
    )
    increase_shared_mem: bool = True
    run_policy: Any = None
    cluster: Mapping[str, Any] | None = None
    stall_timeout: float = Needs.stall_timeout
    max_hours: float = 0.0
    wandb: str = ""
    allowed: Mapping[str, Sequence[str]] | None = None
    mlflow: str = ""
    tensorboard: str = ""
    results: str = ""
    max_cost: float = 0.0

    def __post_init__(self) -> None:
        check("allowed", self.allowed or {}, Allowed)
        trackers = [name for name in TRACKERS if getattr(self, name)]
        for name in trackers[1:]:
            raise ConfigError(
                f"{name}: expected none beside {trackers[0]}, got {getattr(self, name)!r}"
            )
        finite_number("max_hours", self.max_hours, minimum=0, unit="hours")
        finite_number("max_cost", self.max_cost, minimum=0)
        self.gang()

    def gang(self, pods: Mapping[str, Any] | None = None) -> Gang:
        """Return the gang of the ranks.

        Args:
            pods: defaults for the cluster's field `kubernetes`, and for `gpus_per_node`.
        """
        gang = Gang(
            self.nnodes, self.nproc_per_node, self.max_restarts, self.cluster, self.stall_timeout
        )
        if not gang.needs_cluster:
            return gang
        values = dict(self.cluster or {})
        if "join_timeout" in self.rdzv_configs:
            values.setdefault("start_timeout", float(self.rdzv_configs["join_timeout"]))
        gang = dataclasses.replace(gang, cluster=values)
        kind = gang.cluster_config().resolved_kind
        pods = dict(pods or {})
        gpus = pods.pop("gpus_per_node", 0)
        if kind == "kubernetes":
            values.setdefault("gpus_per_node", gpus)
            kubernetes = {**pods, **values.get("kubernetes", {})}
            if self.increase_shared_mem:
                kubernetes.setdefault(
                    "shared_memory",
                    kubernetes.get("worker_memory", KubernetesConfig().worker_memory),
                )
            values["kubernetes"] = kubernetes
        elif kind == "local" and values.get("gpus_per_node", 0) > num_gpus():
            values["gpus_per_node"] = 0  # the same task, tried out on a machine without GPUs
        return dataclasses.replace(gang, cluster=values)

    def limit_urls(
        self, limit: Callable[..., AbstractContextManager[None]]
    ) -> AbstractContextManager[None]:
        """Return a block in which the task may open only its own URLs and allowed URLs.

        Args:
            limit: function of an SDK that returns such a block.

        Raises:
            ConfigError: settings.toml has a bad table `allowed`.
        """
        # Without such a list, the task may open any URL that its author's code names.
        if find_project() is None and "urls" not in (self.allowed or {}):
            return nullcontext()
        return limit(load_allowed(self.allowed).urls, self.tensorboard, self.results)

    def tracking(self) -> tuple[str, ...]:
        """Return the arguments of `make_tracker`; () without a tracker. Raises ConfigError as
        `find_server` does.
        """
        server = []
        if self.mlflow:
            server.append(find_server())
        for name in TRACKERS:
            place = getattr(self, name)
            if place:
                return (name, *server, place)
        return ()

    def list_ignored(self) -> list[str]:
        """Return the fields that were given and have no meaning here."""
        default = Distributed()
        fields = ("start_method", "monitor_interval", "run_policy")
        names = [name for name in fields if getattr(self, name) != getattr(default, name)]
        unknown = set(self.rdzv_configs)
        if self.gang().needs_cluster or self.rdzv_configs == default.rdzv_configs:
            unknown -= default.rdzv_configs.keys()
        return [*names, *(f"rdzv_configs.{name}" for name in sorted(unknown))]
