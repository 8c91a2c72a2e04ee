"""Run the ranks of one machine on every worker of a Dask cluster, as one gang.

Dask carries messages, not tensors. On each worker a task runs a process with `supervise` in it (worker.py, node.py).
The messages of these processes come back as Dask's structured events; the ranks talk to each other by gloo or NCCL.
What fails fails as a whole: the gang is ended on every node and starts again from its last checkpoint.

A silent machine is the hard case: its connections stay open and nobody reports it. So both sides send heartbeats
every second, and each takes the other for lost after `node_timeout`. A driver that has lost a node ends the others; a
node that has lost its driver kills its own ranks.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import math
import time
import uuid
from collections.abc import Callable, Sequence
from typing import TypeVar

from distributed import Client

from flyte_ddp import events
from flyte_ddp.checkpoints.ownership import Ownership
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import explain_missing_workers
from flyte_ddp.errors import (
    ClusterError,
    ConfigError,
    GangLost,
    NodeLost,
    RankFailure,
    StorageUnavailable,
    TrainingStopped,
    WorkersLost,
)
from flyte_ddp.events.wall_time import AttemptStarted
from flyte_ddp.launch.dask import worker
from flyte_ddp.launch.dask.calls import ANSWER_TIMEOUT, call_workers
from flyte_ddp.launch.dask.code import packed_code
from flyte_ddp.launch.dask.data import SharedData, check_same_directory, run_in_background
from flyte_ddp.launch.dask.gang import POLL_INTERVAL, Attempt, Run
from flyte_ddp.launch.dask.growth import GrowthWatch
from flyte_ddp.launch.dask.messages import NodeJob
from flyte_ddp.launch.dask.placement import Node, Worker, assign_nodes
from flyte_ddp.launch.dask.pool import Pool
from flyte_ddp.launch.dask.roll_call import RollCall
from flyte_ddp.launch.dispatch import Dispatcher
from flyte_ddp.launch.failures import Ended, first_line, is_bug, is_out_of_memory, is_store_outage, made_no_progress
from flyte_ddp.launch.process.job import Job
from flyte_ddp.launch.process.output import PREFIX
from flyte_ddp.launch.signals import StopRequest, stop_on_signals
from flyte_ddp.launch.spawn import (
    MORE_ACCUMULATION,
    RESTART,
    Result,
    newest_step,
    own_place,
    refuse_repeated_oom,
    say_where_to_resume,
)
from flyte_ddp.launch.supervisor import print_line
from flyte_ddp.storage import Storage, storage_environment

ROLL_CALL_INTERVAL = 1.0  # seconds between two checks of which workers are there
REUNION_TIMEOUT = 5.0  # seconds for all workers of a larger gang to be idle, after the smaller one has ended

T = TypeVar("T")

logger = logging.getLogger(__name__)


def train_on_dask(
    job: Job,
    data: Callable[[], str],
    client: Client,
    config: ClusterConfig,
    listeners: Sequence[events.Listener] = (),
    relay: Callable[[str], None] | None = None,
    run_name: str = "",
    stop: StopRequest | None = None,
    pool: Pool | None = None,
) -> Result:
    """Train a recipe on a Dask cluster, start to end; `run_on_dask` with a job whose program is a recipe's."""
    return Result.of(run_on_dask(job, data, client, config, listeners, relay, run_name, stop, pool))


def run_on_dask(
    job: Job,
    data: Callable[[], str] | None,
    client: Client,
    config: ClusterConfig,
    listeners: Sequence[events.Listener] = (),
    relay: Callable[[str], None] | None = None,
    run_name: str = "",
    stop: StopRequest | None = None,
    pool: Pool | None = None,
) -> events.RunState:
    """Run the program of `job` in ranks on the workers of `client`'s cluster; return the state its events fold to.

    Args:
        job: its checkpoints must be at a place that every worker reaches.
        data: returns the local directory of the prepared data. Called while the workers are still being gathered. Nodes
            that do not have that directory fetch a copy from beside the checkpoints. None where none are needed.
        client: from `cluster.open_cluster`.
        listeners: receive every event, in a thread with the caller's context variables.
        relay: called with every line that a rank prints, with its node and rank; standard error by default.
        run_name: as given to `open_cluster`, to find out what missing workers wait for.
        stop: ends the run early when set; by default SIGINT and SIGTERM do.
        pool: shared with other runs that train on the cluster at the same time, each on one node and with a client of
            its own, because a client has one handler for each kind of Dask's events.

    Raises:
        ConfigError: before any rank is started; OutOfMemory also later.
        ClusterError: the workers did not come in time.
        RankFailure: a rank failed in a way that another attempt would repeat, or raised without a restart left.
        GangLost: nodes or ranks were lost more often than `max_restarts` allows.
        StorageUnavailable: the checkpoints could not be reached for `store_timeout` seconds.
        TrainingStopped: SIGINT or SIGTERM, or `stop`, ended the run, after a last checkpoint.
    """
    check(job, config)
    storage = None
    if job.checkpoints:
        storage = Storage(job.checkpoints, timeout=job.program.store_timeout)
        storage.check_access()
        job = dataclasses.replace(job, checkpoints=storage.url)
    state = events.RunState(keep_steps=False)
    stopping = contextlib.nullcontext(stop) if stop else stop_on_signals(job.program.signals, job.program.stop_grace)
    with (
        own_place(job) as ownership,
        Dispatcher([state, *listeners]) as dispatcher,
        say_where_to_resume(job),
        stopping as stop,
    ):
        run = Run(
            name=f"training-{uuid.uuid4().hex[:12]}",
            client=client,
            config=config,
            code=packed_code(job.program),
            shows_nodes=job.program.output.prefix == PREFIX,
            emit=dispatcher.emit,
            relay=relay or print_line,
            stop=stop,
        )
        launcher = _Launcher(job, data, run, run_name, storage, ownership, pool)
        try:
            launcher.launch()
        finally:
            launcher.close()
    return state


def check(job: Job, config: ClusterConfig) -> None:
    """Check the run before anything is asked of its cluster.

    Raises:
        ConfigError: what the program cannot do, such as an unknown recipe, or a batch that cannot be split evenly at
            `num_nodes`, or at none of the smaller sizes that `min_nodes` allows.
    """
    job.program.check(config.num_nodes * config.ranks_per_node, config.gpus_per_node > 0)
    if config.enough_nodes < config.num_nodes and usable_sizes(job, config) == [config.num_nodes]:
        raise ConfigError(
            f"min_nodes: expected a smaller number of nodes, because the global batch splits evenly at none from "
            f"{config.min_nodes} to {config.num_nodes - 1} ({config.ranks_per_node} ranks each), or 0 for a run that "
            f"needs all {config.num_nodes}, got {config.min_nodes}"
        )


def usable_sizes(job: Job, config: ClusterConfig) -> list[int]:
    """Return the numbers of nodes at which the run may go on, largest first: those that split the batch evenly."""
    sizes = []
    for num_nodes in range(config.num_nodes, config.enough_nodes - 1, -1):
        with contextlib.suppress(ConfigError):
            job.program.check_world_size(num_nodes * config.ranks_per_node)
            sizes.append(num_nodes)
    return sizes


class _Launcher:
    """A run: attempt after attempt, until one succeeds or another would be of no use."""

    def __init__(
        self,
        job: Job,
        data: Callable[[], str] | None,
        run: Run,
        run_name: str,
        storage: Storage | None,
        ownership: Ownership | None,
        pool: Pool | None,
    ) -> None:
        self.job = job
        self.run = run
        self.client = run.client
        self.config = run.config
        self.run_name = run_name
        self.storage = storage
        self.ownership = ownership
        self.pool = pool
        self.data = SharedData(run.client, storage, pool) if data and storage else None
        self.prepared = run_in_background(data) if data else None
        self.num_attempts = 0
        self.num_restarts = 0  # those that count
        self.previous: Ended | None = None  # the attempt before this one
        self.roll_call = RollCall(run.client, run.name)
        self.is_growing = False  # the attempt before this one ended to grow
        self.grown_at = -math.inf  # monotonic: when one last did so
        self.growth: GrowthWatch | None = None  # the latest

    def close(self) -> None:
        """Remove the plugin from the workers and the copy of the data from the store. Does not raise."""
        if self.growth:
            self.growth.join(2 * ANSWER_TIMEOUT)  # not to have it install the plugin after this
        asked = self.roll_call.known & set(self.roll_call.listed_workers())
        call_workers(self.client, asked, worker.uninstall, self.run.name)
        self._release()
        if self.data:
            self.data.close()

    def launch(self) -> None:
        """Make attempts until one succeeds. Raises as `train_on_dask`."""
        expected: frozenset[str] = frozenset()  # addresses of the workers of the next gang, where they are known
        patience = self.config.return_timeout if self.config.min_nodes else self.config.start_timeout
        while True:
            sizes = usable_sizes(self.job, self.config)
            begun = time.time() if self.num_attempts else self.job.launched_at  # since then the cluster was started
            workers = self._gather(sizes, expected, REUNION_TIMEOUT if self.is_growing else patience)
            self.roll_call.is_strict = False
            size = next(size for size in sizes if size <= len(workers))
            self.run.emit(AttemptStarted(size, self.job.launched_at, time.time() - begun))
            directory = self._wait_for_data()
            nodes = assign_nodes(workers, size, self.config)
            if self.storage:
                check_same_directory(self.client, self.storage, nodes)
            self.growth = growth = self._watch_for_growth(workers, nodes, sizes)
            self.num_attempts += 1
            make_jobs = functools.partial(self._make_jobs, directory)
            attempt = Attempt(self.run, self.num_attempts - 1, nodes, make_jobs, growth)
            try:
                if attempt.train():
                    return
                self.is_growing, self.grown_at, expected = True, time.monotonic(), attempt.larger
                self.run.emit(attempt.ended(f"it grows to {len(expected)} nodes"))
                logger.warning(
                    "the gang ended at step %d, after a checkpoint, to grow from %d to %d nodes",
                    *(attempt.step, len(nodes), len(expected)),
                )
            except (RankFailure, NodeLost) as error:
                self.run.emit(attempt.ended(first_line(error)))
                self.roll_call.silent |= {node.address for node in nodes if node.is_silent}
                # Without the loss of a node the same ones go on: for a larger gang the watch waits.
                self.is_growing, expected = False, frozenset(node.address for node in nodes)
                self._release()
                smaller = None
                if isinstance(error, RankFailure):
                    smaller = self.job.program.with_smaller_batches(error, nodes[0].ranks.world_size)
                if smaller:
                    self.job = dataclasses.replace(self.job, program=smaller)
                    logger.warning(MORE_ACCUMULATION, smaller.config.gradient_accumulation)
                else:
                    self._decide(Ended(error, attempt.step, attempt.resumed_step))
            finally:
                growth.close()
            self._wait_for_store()

    def _watch_for_growth(self, workers: Sequence[Worker], nodes: Sequence[Node], sizes: Sequence[int]) -> GrowthWatch:
        """Return the watch for workers with which the gang of these nodes could be larger."""
        addresses = {node.address for node in nodes}
        if self.storage is None:
            sizes = [len(nodes)]  # nothing is kept that a larger gang could go on from
        probe = Storage(self.job.checkpoints, timeout=0)

        def prepare(address: str) -> None:
            if modules := self.job.program.slow_imports:
                call_workers(self.client, [address], worker.install, self.run.name, self.run.code)
                call_workers(self.client, [address], worker.call, self.run.name, "prepare", modules)

        def check_nodes(newcomers: Sequence[Node]) -> None:
            probe.names()  # while the store is away, the gang could not save its state
            check_same_directory(self.client, probe, newcomers)

        return GrowthWatch(
            [each for each in workers if each.address in addresses],
            sizes,
            self.config,
            self.roll_call,
            prepare,
            check_nodes,
            not_before=self.grown_at + self.config.grow_interval,
            grace=self.job.program.store_timeout,
        )

    def _decide(self, ended: Ended) -> None:
        """Log the restart that follows, or raise if there is none."""
        if ended.resumed_step < 0 and self.storage:  # known only of what session.load returned
            with contextlib.suppress(StorageUnavailable):
                ended = dataclasses.replace(ended, resumed_step=newest_step(self.storage.url, timeout=0))
        previous, self.previous = self.previous, ended
        failure, what = ended.failure, first_line(ended.failure)
        if is_bug(ended, previous, self.job.program):
            raise failure
        if is_out_of_memory(ended):
            larger = f"cluster.kubernetes.worker_memory: expected more than {self.config.kubernetes.worker_memory}"
            is_repeated = is_out_of_memory(previous) and made_no_progress(ended, previous)
            refuse_repeated_oom(self.job, ended.resumed_step, failure, larger, is_repeated)
        if is_store_outage(ended):
            if is_store_outage(previous) and made_no_progress(ended, previous):
                raise StorageUnavailable(what) from failure
            logger.warning("the gang was lost %s and restarts when the store is back: %s", ended.position(), what)
            return
        if self.num_restarts == self.config.max_restarts:
            # As on one machine, and Flyte retries no exception of the program. What a lost peer caused is no such one.
            if isinstance(failure, RankFailure) and failure.kind == "exception" and not failure.is_consequence:
                raise failure
            raise GangLost(
                f"the gang was lost {ended.position()} and has used up its restarts (max_restarts: "
                f"{self.config.max_restarts}): {failure}"
            ) from failure
        self.num_restarts += 1
        is_known = previous is not None and previous.failure.cause == failure.cause != ""
        reason = what if is_known or failure.cause == "stall" else failure  # of a stall the log has all stacks
        logger.warning(RESTART, ended.position(), self.num_restarts, self.config.max_restarts, reason)

    def _wait_for_store(self) -> None:
        """Wait until the store of the checkpoints answers.

        Raises:
            StorageUnavailable: it did not within `store_timeout` seconds.
        """
        if self.storage is None:
            return
        self._wait_for(run_in_background(self.storage.names))

    def _make_jobs(self, directory: str, nodes: Sequence[Node]) -> list[NodeJob]:
        """Return what each of the nodes has to do."""
        sees_data, archive_name = self.data.locate(directory, nodes) if self.data else (set(), "")
        # A new token for each gang: a rank of an earlier one that still lives on a silent node may not write any more.
        owner = self.ownership.renew() if self.ownership else ""
        job = dataclasses.replace(self.job, launched_at=time.time(), owner=owner)
        return [
            NodeJob(
                job=job,
                ranks=dataclasses.replace(
                    node.ranks,
                    run_id=self.run.name,
                    num_restarts=self.num_attempts - 1,
                    max_restarts=self.config.max_restarts,
                ),
                driver_timeout=self.config.node_timeout,
                environment=node.environment,
                storage=storage_environment(),
                data=directory if node.address in sees_data else "",
                data_archive=self.data.archive if self.data else "",
                data_name=archive_name.removesuffix(".zip"),
                prints_lines=self.config.resolved_kind != "local",  # whose workers have this process's terminal
            )
            for node in nodes
        ]

    def _release(self) -> None:
        if self.pool:
            self.pool.release(self.run.name)

    def _gather(self, sizes: Sequence[int], expected: frozenset[str], patience: float) -> list[Worker]:
        """Return the workers for the next attempt: all of them, or after a while as many as a smaller size needs.

        Args:
            expected: addresses of workers that are enough as soon as all of them are idle.
            patience: seconds after which a smaller size is enough.

        Raises:
            ClusterError, WorkersLost after a failure: there are too few of them in time.
        """
        begun = time.monotonic()
        while True:
            self._check_stop()
            workers = self.roll_call.present_workers()
            if self.pool is None:
                workers = [each for each in workers if not each.is_busy]
            else:
                workers = self.pool.claim(self.run.name, workers, self.config.gpus_per_node)
                if not workers and self.pool.is_in_use():
                    begun = time.monotonic()  # it waits for its turn: no worker is missing
            chosen = [each for each in workers if each.address in expected]
            if chosen and len(chosen) == len(expected):
                return chosen
            waited = time.monotonic() - begun
            if len(workers) >= sizes[0] or (len(workers) >= sizes[-1] and waited >= patience):
                return workers
            if waited > max(patience, self.config.start_timeout) or self.client.status == "closed":
                break
            # At first they are only about to be idle again. A smaller size is enough as soon as `patience` is over.
            pause = min(ROLL_CALL_INTERVAL, 0.1 + waited)
            time.sleep(min(pause, patience - waited) if waited < patience else pause)
        message = f"{len(workers)} of {self.config.num_nodes} workers are there and idle after {waited:.0f} s"
        if is_gone := self.client.status == "closed":
            message = "the Dask scheduler is gone"
        if reason := explain_missing_workers(self.config, self.run_name):
            message += f". {reason.rstrip('.')}"
        if self.previous is None:
            raise ClusterError(message)
        failure = self.previous.failure
        because = "" if is_gone else f". The gang had to restart, because {failure}"
        raise WorkersLost(f"{message}{because}") from failure

    def _wait_for_data(self) -> str:
        if self.prepared is None:
            return ""
        return self._wait_for(self.prepared)

    def _wait_for(self, future: concurrent.futures.Future[T]) -> T:
        while not concurrent.futures.wait([future], timeout=POLL_INTERVAL).done:
            self._check_stop()
        return future.result()

    def _check_stop(self) -> None:
        if self.run.stop.is_set():
            if self.storage:
                self.storage.stop.set()
            raise TrainingStopped(f"{self.run.stop.reason}: the run was stopped while no rank was running")
