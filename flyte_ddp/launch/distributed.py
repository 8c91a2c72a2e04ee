"""`Distributed`: the gang of a Flyte task whose function runs in every rank, with the fields of
kfpytorch's `Elastic`. Knows neither of Flyte's SDKs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.cluster.admission import Allowed
from flyte_ddp.cluster.config import KubernetesConfig
from flyte_ddp.config.fields import check, finite_number
from flyte_ddp.config.training import Needs
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.agent.devices import num_gpus
from flyte_ddp.launch.run import Gang
from flyte_ddp.observers.mlflow import find_server
from flyte_ddp.observers.recorder import TRACKERS


@dataclass
class Distributed:
    """Run the function of a Flyte task in every rank of a gang, in torchrun's environment.

    The first eight fields are those of kfpytorch's `Elastic`, in its order.

    Args:
        nnodes: machines; "1:4" for at least 1 and at most 4. One is the task's own pod and needs no
            cluster.
        nproc_per_node: ranks on each; "gpu" for one per GPU, "auto" for one per GPU, or two where
            there are none.
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
        cluster: the machines, with the fields of `flyte_ddp.cluster.config.ClusterConfig`. What it
            does not name follows from the task's `requests` and `limits`: they are those of each
            machine's pod.
        stall_timeout: seconds without a report of any rank until the run is ended with all stacks;
            it counts from the first `session.report` on.
        max_hours: of the task, all attempts together, until its ranks are asked for a last
            checkpoint and it ends for good; 0 is no limit.
        wandb: the project of W&B that records the run, by the key of the task's secret
            `wandb/api_key` or of WANDB_API_KEY; "" for none, as for a function that calls W&B
            itself.
        mlflow: instead of it, the experiment of MLflow that records the run, on the server that
            MLFLOW_TRACKING_URI or settings.toml names, by the token of the task's secret
            `mlflow/token` or of MLFLOW_TRACKING_TOKEN.
        tensorboard: instead of both, a directory or URL for TensorBoard, in which each run gets
            one.
        allowed: what the task's cluster and its input files may be, such as {"kinds": ["existing"],
            "addresses": ["tcp://dask:8786"], "env": ["NCCL_*"]}. A field that it does not name is
            that of the table `allowed` in the settings.toml beside this package. Without that file:
            the kind "kubernetes" with whatever pods, and files in object stores or at https.
        results: URL for the files that `session.submit_result` sends, or a directory of the task's
            machine.

    Raises:
        ConfigError: a value has the wrong type or range.
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

    def __post_init__(self) -> None:
        check("allowed", self.allowed or {}, Allowed)
        trackers = [name for name in TRACKERS if getattr(self, name)]
        for name in trackers[1:]:
            raise ConfigError(
                f"{name}: expected none beside {trackers[0]}, got {getattr(self, name)!r}"
            )
        finite_number("max_hours", self.max_hours, minimum=0, unit="hours")
        self.gang()

    def gang(self, pods: Mapping[str, Any] | None = None) -> Gang:
        """Return where the ranks run. `cluster` need not name what `pods` has of `kubernetes`, and
        gpus_per_node.
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

    def tracking(self) -> tuple[str, ...]:
        """Return what records the runs, see `make_tracker`. Raises ConfigError as `find_server`."""
        server = [find_server()] if self.mlflow else []
        found = [(name, *server, place) for name in TRACKERS if (place := getattr(self, name))]
        return found[0] if found else ()

    def list_ignored(self) -> list[str]:
        """Return the fields that were given and have no meaning here."""
        default = Distributed()
        fields = ("start_method", "monitor_interval", "run_policy")
        names = [name for name in fields if getattr(self, name) != getattr(default, name)]
        known = self.gang().needs_cluster or self.rdzv_configs == default.rdzv_configs
        unknown = self.rdzv_configs.keys() - (default.rdzv_configs.keys() if known else set())
        return [*names, *(f"rdzv_configs.{name}" for name in sorted(unknown))]
