"""The workers of a Dask cluster as the place of a run: choose the workers of an attempt, and bring
them its data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distributed import Client, LocalCluster

from flyte_ddp import events
from flyte_ddp.cluster.config import DEFAULT_GRACE, ClusterConfig
from flyte_ddp.cluster.connect import closing, connect
from flyte_ddp.cluster.kubernetes.api import count_waiting, explain
from flyte_ddp.config.waits import BEAT_INTERVAL, LINE_INTERVAL
from flyte_ddp.errors import ClusterError, ConfigError, WorkersLost
from flyte_ddp.launch.control.reference import Reference
from flyte_ddp.launch.nodes.dask import relay, worker
from flyte_ddp.launch.nodes.dask.assignment import DaskNode, Worker, assign_nodes
from flyte_ddp.launch.nodes.dask.calls import (
    call_workers,
    listed_workers,
    run_on_scheduler,
    scheduler_id,
)
from flyte_ddp.launch.nodes.dask.data import SharedData, check_same_directory, packed_code
from flyte_ddp.launch.nodes.dask.discovery import WorkerDiscovery
from flyte_ddp.launch.nodes.dask.holds import Holds
from flyte_ddp.launch.nodes.dask.nodes import DaskNodes
from flyte_ddp.launch.nodes.dask.pool import Pool
from flyte_ddp.launch.nodes.dask.preemption import CLOSE_RESERVE
from flyte_ddp.launch.nodes.dask.scale_up import MAX_PREPARATION, Preparation, ScaleUpWatch
from flyte_ddp.launch.protocol.messages import NodeJob
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.storage import Storage, storage_environment

if TYPE_CHECKING:
    from flyte_ddp.launch.control.driver import Run
    from flyte_ddp.launch.control.policy import AttemptEnd

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class DaskPlace:
    """The ranks of a run on the workers of a Dask cluster. Each worker is a node."""

    client: Client  # client of `cluster.open_cluster`, or our own after the loss of its scheduler
    config: ClusterConfig
    run_name: str = ""  # name given to `open_cluster`, to find out what missing workers wait for
    # Shared with other runs that train on the cluster at the same time, each on nodes of its own
    # and with a client of its own, because a client has one handler for each kind of Dask's events.
    pool: Pool | None = None
    is_cluster = True
    _code: bytes = b""
    _data: SharedData | None = None
    _latest: DaskNodes | None = None
    # addresses of workers that have the directory of the checkpoints
    _checked: set[str] = field(default_factory=set)
    _explain_at: float = 0.0  # monotonic: when to look again what missing workers wait for
    _reason: str = ""  # reason that the last look found
    _measured: set[str] = field(default_factory=set)  # addresses of workers that were checked
    _grown_at: float = -math.inf  # monotonic: when a gang last ended to grow
    _clients: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # our own clients
    _holds: Holds = field(default_factory=Holds)

    def __post_init__(self) -> None:
        config = self.config
        self._discovery = WorkerDiscovery(self.client)
        self.max_restarts = config.max_restarts
        grace: float = DEFAULT_GRACE
        if config.resolved_kind == "kubernetes":
            grace = config.kubernetes.worker_grace
        self.notice_seconds = max(1.0, grace - CLOSE_RESERVE)
        self.larger_memory = (
            "cluster.kubernetes.worker_memory: expected more than "
            f"{config.kubernetes.worker_memory}"
        )

    def check(self, job: Job) -> None:
        check(job.program, self.config)

    def gather(self, run: Run, previous: AttemptEnd | None) -> DaskNodes:
        """Return the nodes of the next attempt: all workers, or after a while as many as a smaller
        size needs.

        Raises the errors of `Place`, and ConfigError if the checkpoints are in another directory on
        one of the nodes.
        """
        if not self._code:
            self._discovery.plugin, self._code = run.name, packed_code(run.job.program)
            if run.prepared and run.storage:
                if self.pool:
                    self._data = self.pool.data
                else:
                    self._data = SharedData(run.storage)
        sizes = usable_sizes(run.job.program, self.config)
        workers = self._wait_for_workers(run, previous, sizes)
        self._discovery.is_strict = False
        size = next(size for size in sizes if size <= len(workers))
        directory = ""
        if run.prepared:
            directory = run.wait_for(run.prepared)
        nodes = assign_nodes(workers, size, self.config)
        new = [node for node in nodes if node.address not in self._checked]
        if run.storage and new:
            check_same_directory(self.client, run.storage, new)
            self._checked.update(node.address for node in new)
        growth = self._watch_for_growth(run, workers, nodes, sizes, directory)
        make_jobs = functools.partial(self._make_jobs, run, directory, nodes)
        self._latest = DaskNodes(
            run.name, self._code, self.client, self.config, nodes, make_jobs, growth, self._holds
        )
        self._latest.reference = self._find_reference(run, nodes)
        if any(node.is_slow for node in nodes):
            self._latest.replace_leaving()
        return self._latest

    def close(self, run: Run) -> None:
        """Remove the plugin from the workers and the copy of the data from the store."""
        self._holds.keep(())
        asked = self._discovery.known & set(listed_workers(self.client))
        call_workers(self.client, asked, worker.uninstall, run.name)
        if asked:
            run_on_scheduler(self.client, functools.partial(relay.uninstall, run.name))
        if self.pool:
            self.pool.release(run.name)
        elif self._data:
            self._data.close()
        self._clients.close()

    def _find_reference(self, run: Run, nodes: Sequence[DaskNode]) -> Reference | None:
        """Return the reference for the check of the nodes; None if they are not to be checked."""
        addresses = {node.address for node in nodes}
        if not self.config.checks_nodes or len(nodes) < 2 or addresses <= self._measured:
            return None
        self._measured |= addresses
        url = ""
        if run.job.is_kept and not run.job.output:
            url = run.job.checkpoints
        return Reference(url, describe_pool(self.config))

    def _is_connected(self) -> bool:
        """Return whether the scheduler answers. If it is another scheduler, connect a new client,
        because the old client's stream of events may have ended.

        Dask's own reconnection may wait for minutes on an address that no longer answers. It holds
        submitted tasks back for as long.
        """
        if self._latest is None:
            return True
        now = scheduler_id(self.client)
        if not now:
            return False
        if now != self._latest.scheduler_id or self.client.status != "running":
            deadline = time.monotonic() + self.config.start_timeout
            try:
                client = connect(self.client.scheduler.address, deadline, self.client.security)
            except ClusterError:
                return False
            self._holds.keep(())  # the scheduler that knew of them is gone
            self.client = self._discovery.client = self._clients.enter_context(closing(client))
            self._latest.scheduler_id = now
        return True

    def _look_back(self, run: Run, previous: AttemptEnd | None) -> set[str]:
        """Return the addresses of workers that are enough for the next gang: the workers that the
        watch has found, or the workers of the last gang, without the nodes that leave.
        """
        if self._latest is None or previous is None:
            return set()
        if self.pool:
            self.pool.release(run.name)
        if previous.failure is None and not previous.is_announced:
            self._grown_at = time.monotonic()
        nodes = self._latest.nodes
        leaving = {node.address for node in nodes if node.departure and not node.is_slow}
        # A worker that is just closing does not answer.
        self._discovery.unfit |= dict.fromkeys(leaving, "it leaves")
        slow = {name for node in nodes if node.is_slow for name in (node.address, node.machine)}
        self._discovery.slow |= slow - {""}
        left = {node.address for node in nodes if node.departure}
        return {*(self._latest.growth.members or (node.address for node in nodes))} - left

    def _wait_for_workers(
        self, run: Run, previous: AttemptEnd | None, sizes: Sequence[int]
    ) -> list[Worker]:
        """Return the workers for the next attempt. These are the workers of `_look_back` as soon as
        they are idle, or all workers, or as many as a smaller size needs: after a while, or at once
        if all others wait for room.
        """
        expected, config, begun = self._look_back(run, previous), self.config, time.monotonic()
        patience = config.start_timeout
        if config.min_nodes:
            patience = config.return_timeout
        while True:
            run.check_stop()
            is_connected = self._is_connected()
            workers = []
            if is_connected:
                workers = self._find_idle(run)
            if not workers and self.pool and self.pool.is_in_use():
                begun = time.monotonic()  # the run waits for its turn: no worker is missing
            chosen = [each for each in workers if each.address in expected]
            if len(chosen) >= sizes[-1] and len(chosen) == len(expected):
                return chosen
            waited = time.monotonic() - begun
            if self._are_enough(len(workers), sizes, waited >= patience):
                return workers
            is_gone = not is_connected and self.client.status == "closed"
            if waited > max(patience, config.start_timeout) or is_gone:
                break
            self._report_wait(run, waited)
            # At first the workers are about to be idle, so the waits are short.
            time.sleep(min(BEAT_INTERVAL, 0.1 + waited, max(0.1, patience - waited)))
        message = "the Dask scheduler is gone"
        if is_connected:
            message = f"{len(workers)} of {config.num_nodes} workers are there and idle after "
            message += f"{waited:.0f} s"
        raise self._make_error(message, previous, is_connected)

    def _are_enough(self, num_present: int, sizes: Sequence[int], is_late: bool) -> bool:
        """Return whether the next attempt begins with so many workers. It does not wait for workers
        that wait for room, because nobody knows for how long.
        """
        if num_present >= sizes[0] or num_present < sizes[-1]:
            return num_present >= sizes[0]
        num_waiting = count_waiting(self.config, self.run_name)
        return is_late or num_present + num_waiting >= self.config.num_workers

    def _report_wait(self, run: Run, waited: float) -> None:
        """Emit, at most every ten seconds, for which new reason pods of the cluster are missing.
        `waited` is in seconds.
        """
        is_late = waited > LINE_INTERVAL and time.monotonic() >= self._explain_at
        if not is_late or self.config.resolved_kind != "kubernetes":
            return
        self._explain_at = time.monotonic() + LINE_INTERVAL
        reason = explain(self.config, self.run_name)
        if reason and reason != self._reason:
            logger.info(reason)
            run.emit(events.NodesAwaited(reason))
        self._reason = reason

    def _make_error(
        self, message: str, previous: AttemptEnd | None, is_connected: bool
    ) -> ClusterError | WorkersLost:
        """Return the error about missing workers, with the reason if it is known."""
        reason = explain(self.config, self.run_name)
        if reason:
            message += f". {reason.rstrip('.')}"
        if previous is None:
            return ClusterError(message)
        if is_connected and previous.failure:
            message += f". The gang had to restart, because {previous.failure}"
        error = WorkersLost(message)
        error.__cause__ = previous.failure
        return error

    def _find_idle(self, run: Run) -> list[Worker]:
        """Return the workers that the run may have now."""
        present: set[str] = set()
        if self._latest:
            present = self._latest.present
        workers = self._discovery.present_workers(present=present)
        if self.pool is None:
            return [each for each in workers if not each.is_busy]
        config = self.config
        return self.pool.claim(run.name, workers, config.gpus_per_node, config.num_nodes)

    def _watch_for_growth(
        self,
        run: Run,
        workers: Sequence[Worker],
        nodes: Sequence[DaskNode],
        sizes: Sequence[int],
        directory: str,
    ) -> ScaleUpWatch:
        """Return the watch for workers with which the gang of these nodes could be larger."""
        addresses = {node.address for node in nodes}
        if run.storage is None:
            sizes = [len(nodes)]  # without a store, a larger gang would have to start over

        def check_nodes(newcomers: Sequence[DaskNode]) -> None:
            probe = Storage(run.job.checkpoints, timeout=0)
            probe.names()  # while the store is away, the gang could not save its state
            check_same_directory(self.client, probe, newcomers)

        def prepare_nodes(newcomers: Sequence[DaskNode]) -> None:
            addresses = [node.address for node in newcomers]
            call_workers(self.client, addresses, worker.install, run.name, self._code)
            jobs = self._make_jobs(run, directory, newcomers, run.job, 0)
            for address, node_job in zip(addresses, jobs, strict=True):
                message = pickle.dumps(dataclasses.replace(node_job, is_ahead=True))
                call_workers(self.client, [address], _make_preparation(run.name, message))

        return ScaleUpWatch(
            [each for each in workers if each.address in addresses],
            sizes,
            self.config,
            self._discovery,
            check_nodes,
            Preparation(prepare_nodes, min(self.config.start_timeout, MAX_PREPARATION)),
            not_before=self._grown_at + self.config.grow_interval,
        )

    def _make_jobs(
        self, run: Run, directory: str, nodes: Sequence[DaskNode], job: Job, num_restarts: int
    ) -> list[NodeJob]:
        """Return the job of each of the nodes."""
        sees_data: set[str] = set()
        archive = ""
        if self._data:
            sees_data = self._data.locate(self.client, directory, nodes)
            archive = self._data.archive
        results = ""
        if run.results:
            results = f"results-{run.name}"
        node_jobs = []
        for node in nodes:
            ranks = dataclasses.replace(
                node.ranks,
                run_id=run.name,
                results=results,
                num_restarts=num_restarts,
                max_restarts=self.max_restarts,
            )
            data = ""
            if node.address in sees_data:
                data = directory
            node_job = NodeJob(
                job=job,
                ranks=ranks,
                driver_timeout=self.config.node_timeout,
                environment=node.environment,
                storage=storage_environment(),
                data=data,
                data_archive=archive,
                start_timeout=self.config.start_timeout,
                prints_lines=not has_own_terminal(self.client, self.config),
            )
            node_jobs.append(node_job)
        return node_jobs


def has_own_terminal(client: Client, config: ClusterConfig) -> bool:
    """Return whether the workers are children of this process, and share its terminal."""
    return config.resolved_kind == "local" or isinstance(client.cluster, LocalCluster)


def _make_preparation(plugin: str, message: bytes) -> Callable[..., None]:
    """Return the function that a worker calls before it joins the gang. The job in `message` is no
    argument of it: a job contains secrets, and Dask logs the arguments of a failed function.
    """
    call = worker.call
    return lambda dask_worker: call(plugin, "prepare", message, dask_worker=dask_worker)


def check(program: Program, config: ClusterConfig) -> None:
    """Check the program before anything is asked of its cluster.

    Raises:
        ConfigError: what the program cannot do, such as an unknown recipe, or a batch that cannot
            be split evenly at `num_nodes`, or at none of the smaller sizes that `min_nodes` allows.
    """
    program.check(config.num_nodes * config.ranks_per_node, config.gpus_per_node > 0)
    if config.enough_nodes < config.num_nodes and usable_sizes(program, config) == [
        config.num_nodes
    ]:
        raise ConfigError(
            "min_nodes: expected a smaller number of nodes, because the global batch splits evenly "
            f"at none from {config.min_nodes} to {config.num_nodes - 1} ({config.ranks_per_node} "
            f"ranks each), or 0 for a run that needs all {config.num_nodes}, got {config.min_nodes}"
        )


def describe_pool(config: ClusterConfig) -> str:
    """Return the kind of nodes that workers are placed on, as text."""
    selector = config.kubernetes.pod_template.get("nodeSelector") or {}
    labels = [f"{name}={value}" for name, value in sorted(selector.items())]
    return ",".join([*labels, f"{config.gpus_per_node} GPUs"])


def usable_sizes(program: Program, config: ClusterConfig) -> list[int]:
    """Return the numbers of nodes that split the batch evenly, largest first. The run may go on at
    each of them.
    """
    sizes = []
    for num_nodes in range(config.num_nodes, config.enough_nodes - 1, -1):
        with contextlib.suppress(ConfigError):
            program.check_world_size(num_nodes * config.ranks_per_node)
            sizes.append(num_nodes)
    return sizes
