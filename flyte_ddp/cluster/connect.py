"""The life of a run's Dask cluster as a `with` block. Knows neither recipes nor ranks.

A worker runs one node's agent, in one thread and with child processes. The kinds of cluster differ
in who starts the workers. The client is used in the same way with all of them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
import typing
from collections.abc import Callable, Iterator

from flyte_ddp.cluster.config import ADDRESS_VARIABLE, ClusterConfig, dask_config
from flyte_ddp.cluster.kubernetes import api, lifecycle
from flyte_ddp.cluster.kubernetes.api import API_PATIENCE, POLL_INTERVAL
from flyte_ddp.code.main_module import hide_main_module
from flyte_ddp.config.waits import ANSWER_TIMEOUT, BEAT_INTERVAL, LINE_INTERVAL
from flyte_ddp.errors import ClusterError, ConfigError

if typing.TYPE_CHECKING:
    from distributed import Client, LocalCluster, Security

# Code that each local worker runs. A terminal sends Ctrl-C to its foreground process group. This
# must be the driver alone, which asks the ranks for a final checkpoint. A worker that is closed
# during a task logs a warning, with this logger.
WORKER_PRELOAD = """
import logging, os
os.setpgrp()
logging.getLogger("distributed.worker.state_machine").setLevel(logging.ERROR)
"""

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def open_cluster(
    config: ClusterConfig, run_name: str, report_wait: Callable[[str], None] = logger.info
) -> Iterator[Client]:
    """Yield a client of a cluster after its workers have connected. Each worker has one thread.

    There are `num_nodes` workers, or at least `min_nodes` if the time ran out or a queue holds the
    others back. A cluster that was made for the run is deleted after the block, also after an error
    or SIGTERM, which raises SystemExit in the block. An existing cluster stays.

    Args:
        run_name: a name that is unique in its namespace (`manifest.cluster_name`). Only the kind
            "kubernetes" uses it.
        report_wait: gets what the start waits for, about every ten seconds.

    Raises:
        ConfigError: the user made a mistake, such as kind "existing" without an address. A
            PreflightError lists everything that a Kubernetes cluster lacks.
        ClusterError: too few workers connected within `start_timeout` seconds, or a scheduler or an
            API server does not answer. Another attempt may succeed.
    """
    import dask
    import distributed  # noqa: F401 - adds its defaults to Dask's settings, so it comes before they are changed

    deadline = time.monotonic() + config.start_timeout
    with contextlib.ExitStack() as stack:
        kind = config.resolved_kind
        stack.enter_context(dask.config.set(dask_config(config)))
        dask_logger = logging.getLogger("distributed")
        stack.callback(dask_logger.setLevel, dask_logger.level)
        # Dask's informative lines would hide the epochs that `pyflyte run` shows.
        dask_logger.setLevel(logging.WARNING)
        security = None  # None: Dask's own configuration decides
        if kind == "kubernetes":
            address, security = stack.enter_context(
                lifecycle.kube_cluster(config, run_name, deadline, report_wait)
            )
        elif kind == "local":
            # After this timeout Dask drops a lost worker for good, even if it came back and was
            # lost again.
            patience = {"distributed.deploy.lost-worker-timeout": f"{config.start_timeout:g}s"}
            stack.enter_context(dask.config.set(patience))
            nanny_logger = logging.getLogger("distributed.nanny")
            stack.callback(nanny_logger.setLevel, nanny_logger.level)
            address = stack.enter_context(_local_cluster(config)).scheduler_address
            # When the cluster ends, Dask kills slow workers. Its lines about that help nobody.
            stack.callback(nanny_logger.setLevel, logging.ERROR)
        else:
            address = config.resolved_address
            if not address:
                raise ConfigError(
                    "scheduler_address: expected an address such as tcp://10.0.0.7:8786, here or "
                    f"in {ADDRESS_VARIABLE}, got ''"
                )
        client = stack.enter_context(closing(connect(address, deadline, security)))
        if kind == "kubernetes":
            stack.enter_context(lifecycle.keep_alive(client, config.kubernetes.idle_timeout))
        _wait_for_workers(client, config, run_name, deadline, report_wait)
        yield client


def _local_cluster(config: ClusterConfig) -> LocalCluster:
    import dask
    from distributed import LocalCluster

    with hide_main_module():
        return LocalCluster(
            n_workers=config.num_workers,
            threads_per_worker=1,
            processes=True,
            # A worker supervises ranks. Dask must not pause or kill it for their memory.
            memory_limit=0,
            dashboard_address=None,
            # There is an HTTP server all the same. It uses any free port, because Dask warns if its
            # usual port is taken. By default the whole network could reach it.
            scheduler_kwargs={"dashboard_address": "127.0.0.1:0"},
            silence_logs=logging.WARNING,
            preload=[*dask.config.get("distributed.worker.preload", []), WORKER_PRELOAD],
        )


@contextlib.contextmanager
def closing(client: Client) -> Iterator[Client]:
    """Close the client after the block. A dead scheduler must neither delay nor hide the error that
    ended the block.
    """
    try:
        yield client
    finally:
        with contextlib.suppress(OSError, TimeoutError):
            client.close(timeout=ANSWER_TIMEOUT)


def connect(address: str, deadline: float, security: Security | None) -> Client:
    """Return a client of the scheduler at `address`.

    Raises:
        ClusterError: no scheduler answers until `deadline` (monotonic).
    """
    from distributed import Client, Security

    security = security or Security()
    try:
        _wait_for_dask(address, deadline, security)
        timeout = max(1.0, deadline - time.monotonic())
        return Client(address, timeout=timeout, security=security, set_as_default=False)
    except OSError as error:  # Dask's TimeoutError is an OSError too
        raise ClusterError(f"the Dask scheduler at {address} cannot be reached: {error}") from error


def _wait_for_dask(address: str, deadline: float, security: Security) -> None:
    """Wait until a Dask server answers at `address`.

    If a Client connects to any other server, such as the dashboard's, it fails in a way that keeps
    this process from ending. Another server may also answer at the address of a new Service, until
    every node knows the Service.

    Raises:
        ClusterError: the server that answers is not Dask.
        OSError: no server answers until `deadline`.
    """
    from distributed.comm import connect
    from distributed.comm.core import FatalCommClosedError

    async def connect_once() -> None:
        timeout = max(1.0, deadline - time.monotonic())
        comm = await connect(address, timeout=timeout, **security.get_connection_args("client"))
        await comm.close()

    foreign_until = min(deadline, time.monotonic() + API_PATIENCE)
    # The connection has its own thread, because the caller's thread may run an event loop.
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        while True:
            try:
                return executor.submit(asyncio.run, connect_once()).result()
            # Dask reads the other server's first bytes as a length or a version, or TLS fails.
            except (MemoryError, ValueError, FatalCommClosedError) as error:
                if time.monotonic() > foreign_until:
                    message = f"the server at {address} is not a Dask scheduler: {error!r}"
                    raise ClusterError(message) from error
            time.sleep(POLL_INTERVAL)


def _wait_for_workers(
    client: Client,
    config: ClusterConfig,
    run_name: str,
    deadline: float,
    report_wait: Callable[[str], None],
) -> None:
    report_at = time.monotonic() + LINE_INTERVAL
    while True:
        rest = deadline - time.monotonic()
        timeout = max(POLL_INTERVAL, min(rest, BEAT_INTERVAL))
        # Workers that wait for room join the run when it grows.
        num_coming = config.num_workers - api.count_waiting(config, run_name)
        num_awaited = min(config.num_nodes, num_coming)
        with contextlib.suppress(TimeoutError):
            client.wait_for_workers(max(config.enough_nodes, num_awaited), timeout=timeout)
            return
        if rest > BEAT_INTERVAL and time.monotonic() < report_at:
            continue
        report_at = time.monotonic() + LINE_INTERVAL
        num_workers = len(client.nthreads())
        message = (
            f"{num_workers} of {config.num_nodes} workers connected (start_timeout: "
            f"{config.start_timeout:g} s). {api.explain(config, run_name)}"
        ).rstrip()
        if rest > BEAT_INTERVAL:
            report_wait(message)
        elif num_workers < config.enough_nodes:
            raise ClusterError(message)
        else:
            logger.warning("%s The run starts with these, because min_nodes allows it.", message)
            return
