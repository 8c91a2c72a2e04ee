"""The driver's code in a Dask worker, and in the tasks: it travels by value, as worker.py of
launch/nodes/dask/ does, because the worker may have another version of this package, or none.
"""

from __future__ import annotations

import importlib
import pickle
import subprocess
import time
from multiprocessing.connection import Connection, Pipe
from typing import Any

from distributed import get_worker
from distributed.comm import get_address_host

from flyte_ddp.config.waits import POLL_INTERVAL

PROCESS = "flyte_ddp.prediction.process"


def keep_processes(
    plugin: str, job: bytes, variables: list[dict[str, str]], max_losses: int
) -> None:
    """Keep a process that predicts for each of `variables`, their environments, on this worker
    until the plugin is removed, or the task is cancelled, as it is when the driver is gone.

    Args:
        plugin: the run's `NodePlugin`, which has the code; and the resource of its tasks.
        job: a pickled `PredictionJob`, of which this worker knows nothing.

    Raises:
        RuntimeError: more than `max_losses` processes have ended.
    """
    worker = get_worker()
    node, key = worker.plugins[plugin], worker.get_current_task()
    options = {
        "scheduler": worker.scheduler.address,
        "name": plugin,
        "host": get_address_host(worker.address),
        "security": worker.security,
        "resources": {plugin: 1},
        "local_directory": worker.local_directory,
        "dashboard": False,
    }

    def start(environment: dict[str, str]) -> tuple[subprocess.Popen[bytes], Connection]:
        connection, handed_over = Pipe()
        with handed_over:
            process = node.start_process(PROCESS, handed_over, **environment)
        connection.send_bytes(job)
        connection.send_bytes(pickle.dumps(options))
        return process, connection

    processes = [start(environment) for environment in variables]
    num_losses = 0
    try:
        while plugin in worker.plugins and worker.state.tasks[key].state == "executing":
            for index, (process, _) in enumerate(processes):
                if process.poll() is None:
                    continue
                num_losses += 1
                if num_losses > max_losses:
                    raise RuntimeError(
                        f"{num_losses} processes that predict have ended on {worker.name}, the "
                        f"last with exit code {process.returncode}"
                    )
                processes[index] = start(variables[index])
            time.sleep(POLL_INTERVAL)
    finally:
        for process, connection in processes:
            process.kill()
            process.wait()
            connection.close()


def call(method: str, *arguments: Any) -> Any:
    """Call a method of the `Predictor` of a process that predicts, in which the task runs."""
    return getattr(importlib.import_module(PROCESS).open_predictor(), method)(*arguments)
