"""Run the ranks of one machine on every worker of a Dask cluster, as one gang.

Dask carries words, not tensors. On each worker a task runs a process with `spawn.supervise` in it (worker.py, node.py);
the processes' messages come back as Dask's structured events, and the ranks talk to each other through gloo or NCCL.
What fails fails as a whole: the gang is ended on every node and starts again from its last checkpoint.

A silent machine is the hard case: its connections stay open and nobody reports it. So both sides give a sign of life
every second, and each takes the other for lost after `node_timeout`. A driver that has lost a node ends the others; a
node that has lost its driver ends its own ranks.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import os
import pickle
import platform
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from distributed import Client

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import explain_missing_workers
from flyte_ddp.errors import ClusterError, ConfigError, GangLost, NodeLost, RankFailure, TrainingStopped, WorkersLost
from flyte_ddp.launch.dask import node, worker
from flyte_ddp.launch.dask.code import packed_code, packed_directory
from flyte_ddp.launch.dask.gang import POLL, Attempt, Node, Run, Worker, ask, ask_scheduler, assigned
from flyte_ddp.launch.dask.pool import Pool
from flyte_ddp.launch.dispatch import Dispatcher
from flyte_ddp.launch.spawn import Result, StopRequest, print_line, stop_on_signals
from flyte_ddp.prepare import NOTE, describe_data
from flyte_ddp.rank.job import Job
from flyte_ddp.recipes import get_recipe
from flyte_ddp.storage import Storage

ROLL_CALL_SECONDS = 1.0  # between two looks at which workers are there

# A rank's exceptions that another attempt would only repeat: what the user has to mend, and what only a bug raises. Any
# other may be a machine's or a network's doing; it counts as a bug when the next attempt dies of it at the same step.
USER_ERRORS = ("ConfigError", "DataError", "NonFiniteLoss", "NotImplementedError", "RecursionError")
OTHERS_DOING = (RuntimeError, OSError, MemoryError, EOFError, SystemError)

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
    """Train on the workers of `client`'s cluster, start to end.

    Args:
        job: its checkpoints must be at a place that every worker reaches.
        data: gives the local directory of the prepared data. Called while the workers are still being gathered. Nodes
            that do not have that directory fetch a copy from beside the checkpoints.
        client: from `cluster.open_cluster`.
        listeners: told of every event, in a thread with the caller's context variables.
        relay: called with every line that a rank prints, with its node and rank; standard error by default.
        run_name: as given to `open_cluster`, to find out what missing workers wait for.
        stop: asks for an early end when set; by default SIGINT and SIGTERM do.
        pool: what this run shares with others that train on the cluster at the same time, each on one node and with a
            client of its own, because a client has one handler for each kind of Dask's events.

    Raises:
        ConfigError: before any rank is started.
        ClusterError: the workers did not come in time.
        RankFailure: a rank failed in a way that another attempt would repeat.
        GangLost: nodes or ranks were lost more often than `max_restarts` allows.
        TrainingStopped: SIGINT or SIGTERM, or `stop`, ended the run, after a last checkpoint.
    """
    check(job, config)
    storage = Storage(job.checkpoints)
    storage.check_access("checkpoints")
    job = dataclasses.replace(job, checkpoints=storage.url)
    state = events.RunState(keep_steps=False)
    stopping = contextlib.nullcontext(stop) if stop else stop_on_signals()
    with Dispatcher([state, *listeners]) as dispatcher, stopping as stop:
        run = Run(
            name=f"training-{uuid.uuid4().hex[:12]}",
            client=client,
            config=config,
            checkpoints=job.checkpoints,
            code=packed_code(job.recipe),
            emit=dispatcher.emit,
            relay=relay or print_line,
            stop=stop,
        )
        launcher = _Launcher(job, data, run, run_name, pool)
        try:
            launcher.launch()
        finally:
            launcher.close()
    return Result.of(state)


def check(job: Job, config: ClusterConfig) -> None:
    """Find what is wrong with a run before anything is asked of its cluster.

    Raises:
        ConfigError: an unknown recipe or option of it, a batch that cannot be shared evenly, NCCL without GPUs.
    """
    get_recipe(job.recipe, job.config.recipe_options)
    job.config.batch_size_per_rank(config.num_nodes * config.ranks_per_node)
    if job.config.backend == "nccl" and not config.gpus_per_node:
        raise ConfigError("backend: 'nccl' needs GPUs, and gpus_per_node is 0; accepted without them are auto and gloo")
    if job.config.sync_batch_norm and not config.gpus_per_node:
        raise ConfigError("sync_batch_norm: true needs GPUs, and gpus_per_node is 0; accepted without them is false")


def usable_sizes(job: Job, config: ClusterConfig) -> list[int]:
    """The numbers of nodes at which the run may go on, largest first: those that share the global batch evenly."""
    sizes = []
    for num_nodes in range(config.num_nodes, config.enough_nodes - 1, -1):
        with contextlib.suppress(ConfigError):
            job.config.batch_size_per_rank(num_nodes * config.ranks_per_node)
            sizes.append(num_nodes)
    return sizes


# --- The run -------------------------------------------------------------------------------------------------------


class _Launcher:
    """A run: attempt after attempt, until one ends well or another would be of no use."""

    def __init__(self, job: Job, data: Callable[[], str], run: Run, run_name: str, pool: Pool | None) -> None:
        self.job = job
        self.run = run
        self.client = run.client
        self.config = run.config
        self.run_name = run_name
        self.pool = pool
        self.shared = pool.shared if pool else Storage(job.checkpoints)  # where the copy of the data goes
        self.prepared = _in_background(data)
        self.archive = ""  # URL of the data for nodes that do not see the driver's
        self.known: set[str] = set()  # addresses of workers that were found to have our versions

    def close(self) -> None:
        """Leave nothing in the workers, nor beside the checkpoints."""
        ask(self.client, self.known & set(self._listed_workers()), worker.uninstall, self.run.name)
        if self.pool:
            self.pool.release(self.run.name)
        elif self.archive:
            self.shared.delete(os.path.basename(self.archive))

    def launch(self) -> None:
        """Make attempts until one succeeds. Raises as `train_on_dask`."""
        sizes = usable_sizes(self.job, self.config)
        failure: Exception | None = None
        failed_step = 0
        for number in itertools.count():
            workers = self._gather(sizes, failure)
            directory = self._wait_for_data()
            nodes = assigned(workers, next(size for size in sizes if size <= len(workers)), self.config)
            self._check_checkpoints(nodes)
            attempt = Attempt(self.run, number, nodes, functools.partial(self._orders, directory))
            try:
                attempt.see_through()
                return
            except (RankFailure, NodeLost) as error:
                if isinstance(error, RankFailure) and is_bug(error, attempt.step, failure, failed_step):
                    raise
                if number == self.config.max_restarts:
                    raise GangLost(
                        f"the gang was lost once more than it may restart (max_restarts: {number}), at step "
                        f"{attempt.step}: {error}"
                    ) from error
                logger.warning(
                    "the gang was lost at step %d and restarts from its last checkpoint (restart %d of at most %d): %s",
                    *(attempt.step, number + 1, self.config.max_restarts, error),
                )
                failure, failed_step = error, attempt.step
                if self.pool:
                    self.pool.release(self.run.name)

    def _orders(self, directory: str, nodes: Sequence[Node]) -> list[bytes]:
        """What each of the nodes is told to do."""
        note = Path(directory, NOTE)
        addresses = [each.address for each in nodes]
        sees_data = ask(self.client, addresses, worker.holds_file, str(note), note.read_bytes())
        archive_name = f"data-{describe_data(directory)['fingerprint'][:16]}.zip"
        if not self.archive and not all(sees_data[address] is True for address in addresses):
            upload = functools.partial(self._upload, Path(directory), archive_name)
            self.archive = self.pool.archive(upload) if self.pool else upload()
        return [
            pickle.dumps(
                node.Order(
                    job=dataclasses.replace(self.job, launched_at=time.time()),
                    place=each.place,
                    lease=self.config.node_timeout,
                    environment=each.environment,
                    data=directory if sees_data[each.address] is True else "",
                    data_archive=self.archive,
                    data_name=archive_name.removesuffix(".zip"),
                    prints_lines=self.config.resolved_kind != "local",  # whose workers have this process's terminal
                )
            )
            for each in nodes
        ]

    def _gather(self, sizes: Sequence[int], failure: Exception | None) -> list[Worker]:
        """The workers for the next attempt: as many as there should be, or when patience ends, as a smaller size needs.

        Raises:
            ClusterError, GangLost after a `failure`: there are too few of them in time.
        """
        begun = time.monotonic()
        patience = self.config.return_timeout if self.config.min_nodes else self.config.start_timeout
        while True:
            self._check_stop()
            workers = self._present_workers()
            if self.pool is None:
                workers = [each for each in workers if not each.is_busy]
            else:
                workers = self.pool.claim(self.run.name, workers, self.config.gpus_per_node)
                if not workers and self.pool.is_in_use():
                    begun = time.monotonic()  # a turn to wait for is not a worker that is missing
            waited = time.monotonic() - begun
            if len(workers) >= sizes[0] or (len(workers) >= sizes[-1] and waited > patience):
                return workers
            if waited > max(patience, self.config.start_timeout) or self.client.status == "closed":
                break
            time.sleep(ROLL_CALL_SECONDS)
        message = f"{len(workers)} of {self.config.num_nodes} workers are there and idle after {waited:.0f} s"
        if self.client.status == "closed":
            message = "the Dask scheduler is gone"
        elif reason := explain_missing_workers(self.config, self.run_name):
            message += f". {reason}"
        if failure is None:
            raise ClusterError(message)
        raise WorkersLost(f"{message}; the gang had to restart because of this: {failure}") from failure

    def _present_workers(self) -> list[Worker]:
        """The workers that answer.

        Raises:
            ConfigError: one of them runs other versions than this process.
        """
        names = self._listed_workers()
        self._check_versions(names)
        answers = ask(self.client, self.known & set(names), worker.introduce, self.run.name)
        return [
            Worker(
                address,
                names[address],
                facts["host"],
                facts["num_cores"],
                tuple(facts["gpus"]),
                facts["has_plugin"],
                facts["is_busy"],
            )
            for address, facts in answers.items()
            if not isinstance(facts, Exception)
        ]

    def _listed_workers(self) -> dict[str, str]:
        """The names of the workers that the scheduler knows, by address; they may be dead or silent."""
        scheduler = ask_scheduler(self.client, "identity", n_workers=-1) or {"workers": {}}
        return {address: str(facts["name"]) for address, facts in scheduler["workers"].items()}

    def _check_versions(self, names: dict[str, str]) -> None:
        """Find out what the workers among `names` that are not known yet run, before any of our code goes there."""
        new = set(names) - self.known
        for package, ours in own_versions().items():
            # Python's own functions: one of ours could not even be unpickled by another Python.
            if package == "python":
                answers = ask(self.client, new, platform.python_version)
            else:
                answers = ask(self.client, new, importlib.metadata.version, package)
            for address, theirs in answers.items():
                if isinstance(theirs, importlib.metadata.PackageNotFoundError):
                    theirs = "none"
                if isinstance(theirs, Exception):
                    new.discard(address)  # it does not answer, and is asked again
                elif _comparable(package, theirs) != _comparable(package, ours):
                    raise ConfigError(
                        f"cluster: worker {names[address]} at {address} has {package} {theirs}, and this process has "
                        f"{ours}; accepted are workers with the same version, such as those of the same image"
                    )
        self.known |= new

    def _wait_for_data(self) -> str:
        while not self.prepared.done():
            self._check_stop()
            time.sleep(POLL)
        return self.prepared.result()

    def _check_stop(self) -> None:
        if self.run.stop.is_set():
            raise TrainingStopped(f"{self.run.stop.reason}: the run was stopped while no rank was running")

    def _check_checkpoints(self, nodes: Sequence[Node]) -> None:
        """Raise ConfigError where checkpoints go to a local path that is another directory for one of the nodes."""
        storage = Storage(self.job.checkpoints)
        if not storage.is_local:
            return
        token = uuid.uuid4().hex
        storage.write(f".probe-{token}", token.encode())
        path = os.path.join(storage.root, f".probe-{token}")
        answers = ask(self.client, [each.address for each in nodes], worker.holds_file, path, token.encode())
        storage.delete(f".probe-{token}")
        for each in nodes:
            if answers[each.address] is False:
                raise ConfigError(
                    f"checkpoints: {storage.root!r} is not the same directory on {each} as here; accepted is a URL, or "
                    "a path that all machines share"
                )

    def _upload(self, directory: Path, name: str) -> str:
        """Put a copy of the data beside the checkpoints, which every node reaches; returns its URL."""
        with tempfile.TemporaryDirectory(prefix="data-") as scratch:
            archive = Path(scratch, name)
            packed_directory(directory, archive)
            self.shared.file_system.put_file(str(archive), f"{self.shared.root}/{name}")
        return self.shared.join(name)


def is_bug(failure: RankFailure, step: int, previous: Exception | None, previous_step: int) -> bool:
    """Whether the recipe or its input is to blame, so that another attempt would end the same way.

    Args:
        step: that the failed attempt had reached.
        previous, previous_step: how the attempt before it ended, and where.
    """
    if failure.kind != "exception":
        return False
    name = failure.cause.partition(":")[0]
    kind = getattr(builtins, name, None)
    if name in USER_ERRORS or (isinstance(kind, type) and not issubclass(kind, OTHERS_DOING)):
        return True
    return isinstance(previous, RankFailure) and previous.cause == failure.cause and step <= previous_step


def own_versions() -> dict[str, str]:
    """What must be the same here and in the workers, because pickles and collectives cross between them."""
    packages = ("torch", "distributed", "cloudpickle")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def _comparable(package: str, version: str) -> str:
    if package == "python":
        return ".".join(version.split(".")[:2])
    return version.partition("+")[0]  # torch for CPUs and for GPUs is the same torch


def _in_background(data: Callable[[], str]) -> concurrent.futures.Future[str]:
    """`data`'s result to come, from a thread that sees the caller's context variables, such as Flyte's context."""
    future: concurrent.futures.Future[str] = concurrent.futures.Future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(data))
        except BaseException as error:
            future.set_exception(error)

    # A daemon: a download that hangs must not outlive a run that was stopped.
    threading.Thread(target=run, name="data", daemon=True).start()
    return future
