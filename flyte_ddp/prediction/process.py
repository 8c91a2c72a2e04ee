"""A process that predicts: a Dask worker with one thread, which loads the model at its first part.

`keep_processes` (keeper.py) starts it on a node, from the code that the driver ships.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import pickle
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Worker

from flyte_ddp.config.background import start_thread
from flyte_ddp.launch.agent.main import unpack_data
from flyte_ddp.launch.protocol.ranks import choose_threads
from flyte_ddp.prediction.job import PredictionJob
from flyte_ddp.storage import adopt_storage_environment, permit

if TYPE_CHECKING:
    from flyte_ddp.prediction.model import Predictor

_given: dict[str, Any] = {}  # what `main` read, for the tasks, which run in its process


def main() -> None:
    """Compute tasks until the worker that started this process, or the scheduler, is gone.

    Arguments of the process: a directory of the node for the data, and the file descriptor of a
    connection from which come the job, pickled, and the options of `distributed.Worker`.
    """
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # the driver tells what it means
    directory, connection = Path(sys.argv[3]), Connection(int(sys.argv[4]))
    _given.update(job=pickle.loads(connection.recv_bytes()), directory=directory)
    options = pickle.loads(connection.recv_bytes())
    adopt_storage_environment(_given["job"].storage)
    permit(str(directory))
    start_thread("end", _exit_with, connection)
    asyncio.run(_work(**options))
    os._exit(0)


def _exit_with(connection: Connection) -> None:
    """End this process when the other end of the connection is closed."""
    connection.poll(None)
    os._exit(1)


async def _work(scheduler: str, name: str, **options: Any) -> None:
    name = f"{name}-{os.getpid()}-{os.urandom(4).hex()}"  # unlike that of a process before it
    async with Worker(scheduler, name=name, nthreads=1, memory_limit=0, **options) as worker:
        await worker.finished()


@functools.cache
def open_predictor() -> Predictor:
    """Return this process's model and data, opened by its first task."""
    import torch

    from flyte_ddp.prediction.model import Predictor
    from flyte_ddp.rank.entry import keep_freed_memory

    job: PredictionJob = _given["job"]
    keep_freed_memory()  # else, as Dask's environment has it, a call of the system for each tensor
    torch.set_num_threads(choose_threads(job.num_threads))
    return Predictor(job, job.data or unpack_data(job.data_archive, _given["directory"]))
