"""Runs like those of tests.support.runs, on a Dask cluster, and the clusters.

As a program, `python -m tests.support.dask_runs JSON`, it is the driver of a run, for tests that
send signals to it or give it other code: it prints every event and every line of a rank as a line
of JSON, and last how the run ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.config import resolve
from flyte_ddp.events import Listener, Reported
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask.assignment import Worker
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.recipes import get_recipe
from tests.support.runs import REPOSITORY, Run, _Printer, new_run, print_json

# a busy machine's workers are slow to answer, not lost
LOCAL = ClusterConfig(kind="local", node_timeout=30)

logging.getLogger("distributed").setLevel(logging.ERROR)


def train(run: Run, client, cluster: ClusterConfig, at_steps=(), stop=None, **config):
    """Train `run` to its end, or to the error, which is raised.

    Args:
        at_steps: pairs of a step and a function, which is called once, when the run has reached the
            step.
        stop: the request that ends the run.
    """
    job = Job(
        recipe_program(run.recipe, resolve(get_recipe(run.recipe).defaults, config)),
        run.url or str(run.checkpoints),
        time.time(),
    )
    listeners = [run, *(At(*pair) for pair in at_steps)]
    run.result = driver.run(
        job, DaskPlace(client, cluster), lambda: str(run.data()), listeners, run.relay, stop
    )
    return run


class At(Listener):
    """A listener that calls a function once, when a run has reached a step."""

    def __init__(self, step, function):
        self.step = step
        self.function = function

    def handle(self, event):
        if isinstance(event, Reported) and event.step >= self.step and self.function:
            function, self.function = self.function, None
            function()


def ranks_below(pid):
    """The processes of recipes' ranks that were started by process `pid` or its children."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        # The process, or a process above it, has just ended.
        with contextlib.suppress(psutil.NoSuchProcess, AttributeError):
            server = process.parent()
            if "forkserver" in str(server.cmdline()) and "flyte_ddp.launch.agent.main" in str(
                server.parent().cmdline()
            ):
                found.append(process)
    return found


def start_driver(directory, cluster, code=REPOSITORY, **config):
    """The process of a driver of a run of `Tiny` that imports package `training` from below
    `code`.
    """
    new_run(directory).data()  # now, because the recipe prints while it prepares
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.support.dask_runs",
            json.dumps([str(directory), cluster, config]),
        ],
        cwd=code,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def start_scheduler(directory):
    """The process and the address of a scheduler that no run made."""
    file = directory / "scheduler.json"
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "dask",
            "scheduler",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--no-dashboard",
        ]
        + ["--scheduler-file", str(file)]
    )
    assert eventually(lambda: file.exists() and file.read_text().endswith("}"), 60)
    return process, json.loads(file.read_text())["address"]


@contextlib.contextmanager
def front_of(*addresses):
    """An address that behaves like a Service of Kubernetes. A connection is forwarded to the first
    address of the list that it yields. While the list is empty, a connection never gets an answer,
    like one to a pod that has just ended.
    """
    targets, silent = list(addresses), []

    async def pump(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
        writer.close()

    async def take(reader, writer):
        if not targets[0]:
            silent.append(writer)
            return
        host, port = targets[0].removeprefix("tcp://").split(":")
        behind, to_behind = await asyncio.open_connection(host, int(port))
        await asyncio.gather(pump(reader, to_behind), pump(behind, writer))

    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(take, "127.0.0.1", 0))
    threading.Thread(target=loop.run_forever, daemon=True).start()
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", targets
    finally:
        loop.call_soon_threadsafe(loop.stop)


# `make setup` puts the library on the environment's path.
WITHOUT_CHECKOUT = (
    "import sys\nsys.path[:] = [each for each in sys.path if not each.endswith('/checkout')]"
)


@contextlib.contextmanager
def worker_starter():
    """A function (scheduler, name) that starts a worker, without this checkout on its path; the
    nanny's process.
    """
    nannies = []

    def start(scheduler, name, **environment):
        nannies.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "dask",
                    "worker",
                    scheduler,
                    "--name",
                    name,
                    "--nthreads",
                    "1",
                ]
                + ["--no-dashboard", "--memory-limit", "0"],
                cwd=tempfile.gettempdir(),
                env={
                    **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                    "DASK_DISTRIBUTED__WORKER__PRELOAD": repr([WITHOUT_CHECKOUT]),
                    **environment,
                },
            )
        )
        return nannies[-1]

    try:
        yield start
    finally:
        for nanny in nannies:
            for process in (
                [*psutil.Process(nanny.pid).children(recursive=True), nanny]
                if nanny.poll() is None
                else []
            ):
                process.kill()
            nanny.wait()


def pid_of(client, index):
    return sorted(client.run(os.getpid).values())[index]


def states_equal(one, other):
    import torch  # A driver must not import torch.

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def events_of(run, kind):
    return [event for event in run.events if isinstance(event, kind)]


def dask_config(**values):
    return resolve({}, values)


def worker(name, host, gpus=()):
    """A worker as a roll call finds it."""
    return Worker(f"tcp://{host}:1{name[-1]}", name, host, 8, gpus, False)


def eventually(condition, timeout=120):
    """Return whether `condition()` holds within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


class _DriverRun(_Printer):
    def relay(self, line):
        print_json({"line": line})


def _main():
    directory, cluster, config = json.loads(sys.argv[1])
    run = _DriverRun(Path(directory), new_run(directory).recipe)
    ended = ("", "")
    try:
        with open_cluster(ClusterConfig(**cluster), "test") as client:
            train(run, client, ClusterConfig(**cluster), **config)
    except Exception as error:
        ended = (type(error).__name__, str(error))
    print_json({"ended": ended})


if __name__ == "__main__":
    _main()
