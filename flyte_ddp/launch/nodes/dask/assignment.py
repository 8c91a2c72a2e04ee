"""Assign ranks, cores and GPUs to the workers of a Dask cluster. Starts nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.control.nodes import Node
from flyte_ddp.launch.protocol.failures import natural_key
from flyte_ddp.launch.protocol.ranks import NodeRanks
from flyte_ddp.process.devices import MISSING_GPUS_HINT


@dataclass(frozen=True)
class Worker:
    """A worker that answers."""

    address: str
    name: str
    host: str
    num_cores: int
    gpus: tuple[str, ...]  # GPUs that it may use, in the names of CUDA_VISIBLE_DEVICES
    has_plugin: bool
    is_busy: bool = False  # another task on the cluster uses it
    shares_host: bool = False  # other workers use its host, and perhaps its GPUs
    # An agent of this run waits here: its memory may have a state, or it has prepared for ranks.
    has_agent: bool = False
    machine: str = ""  # name of its Kubernetes node; "" elsewhere
    is_slow: bool = False  # slower than others, by a node check of this run


@dataclass(kw_only=True, eq=False)
class DaskNode(Node):
    """A worker that takes part in an attempt. When it starts anew, its name stays the same, and its
    address changes.
    """

    address: str
    ranks: NodeRanks
    environment: dict[str, str]
    has_plugin: bool
    last_message_at: float = 0.0  # monotonic
    is_admitted: bool = False  # the worker has taken its job
    is_started: bool = False  # the agent has sent a message
    is_confirmed: bool = False  # the agent has sent its last message


def assign_nodes(
    workers: Sequence[Worker], num_nodes: int, config: ClusterConfig
) -> list[DaskNode]:
    """Return `num_nodes` of the workers as nodes, with their ranks. The place where the ranks meet
    is still open.

    Workers with an agent are chosen first, slow ones last. Workers on one host are neighbours, so
    their ranks are neighbours too. Hosts and workers are sorted by the workers' names. So a node
    that comes back elsewhere gets its ranks back.

    Raises:
        ConfigError: a worker has fewer GPUs than its node needs.
    """
    first_on_host: dict[str, tuple[Any, ...]] = {}
    for each in workers:
        key = natural_key(each.name)
        first_on_host[each.host] = min(key, first_on_host.get(each.host, key))
    ordered = sorted(
        workers, key=lambda each: (first_on_host[each.host], each.host, natural_key(each.name))
    )
    first = sorted(ordered, key=lambda each: (each.is_slow, not each.has_agent))[:num_nodes]
    addresses = {each.address for each in first}
    chosen = [each for each in ordered if each.address in addresses]
    by_host: dict[str, list[Worker]] = {}
    for each in chosen:
        by_host.setdefault(each.host, []).append(each)
    nodes: list[DaskNode] = []
    for index, each in enumerate(chosen):
        neighbours = by_host[each.host]
        num_threads = config.threads_per_rank
        if not num_threads:
            num_threads = max(1, each.num_cores // len(neighbours) // config.ranks_per_node)
        ranks = NodeRanks(
            first_rank=index * config.ranks_per_node,
            num_ranks=config.ranks_per_node,
            world_size=num_nodes * config.ranks_per_node,
            use_gpus=config.gpus_per_node > 0,
            num_threads=num_threads,
            node_rank=index,
            num_nodes=num_nodes,
            has_set_threads=config.threads_per_rank > 0,
        )
        environment = _gpu_environment(each, neighbours, config)
        nodes.append(
            DaskNode(
                index=index,
                label=f"node {index} ({each.name} at {each.host})",
                worker=each.name,
                address=each.address,
                ranks=ranks,
                environment=environment,
                has_plugin=each.has_plugin,
                machine=each.machine,
                is_slow=each.is_slow,
            )
        )
    return nodes


def _gpu_environment(
    each: Worker, neighbours: list[Worker], config: ClusterConfig
) -> dict[str, str]:
    """Return the variable that gives the node its own GPUs. Workers of one host that see the same
    GPUs share them.

    A worker alone on its host, such as a pod, has its GPUs to itself and needs no variable.
    """
    if not config.gpus_per_node:
        return {}
    sharers = [other for other in neighbours if other.gpus == each.gpus]
    start = sharers.index(each) * config.gpus_per_node
    gpus = each.gpus[start : start + config.gpus_per_node]
    if len(gpus) < config.gpus_per_node:
        hint = ""
        if not each.gpus:
            hint = f". {MISSING_GPUS_HINT}"
        found, num_sharers = len(each.gpus), len(sharers)
        raise ConfigError(
            f"gpus_per_node: expected at most {found // num_sharers}, because worker "
            f"{each.name} at {each.host} sees {found} GPUs for {num_sharers} workers, "
            f"got {config.gpus_per_node}{hint}"
        )
    if len(neighbours) > 1 or each.shares_host:
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {}
