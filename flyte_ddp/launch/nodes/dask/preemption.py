"""The notice that a Dask worker has to go: the SIGTERM that a pod gets when it is deleted, drained
or preempted.

The worker then announces its departure to the drivers of its ranks. It closes when its ranks have
ended, or shortly before its time is up. A second SIGTERM closes it at once. This module travels by
value, like worker.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
import types
from collections.abc import Callable, Coroutine
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from distributed import Nanny, Scheduler, Worker

from flyte_ddp.cluster.config import DEFAULT_GRACE, GRACE_VARIABLE
from flyte_ddp.config.waits import POLL_INTERVAL

CLOSE_RESERVE = 5.0  # seconds of the grace that the worker and its nanny need to close


async def announce_departures(dask_worker: Worker) -> None:
    """Let this worker announce its departure when it, or its nanny, receives SIGTERM."""
    if hasattr(dask_worker, "leaves_at"):
        return
    dask_worker.leaves_at = float("inf")  # monotonic
    _on_first_sigterm(_leave, dask_worker)
    if dask_worker.nanny:
        async with dask_worker.rpc(dask_worker.nanny) as nanny:
            await nanny.run(function=cloudpickle.dumps(_forward_sigterm))


async def hold_scheduler(dask_scheduler: Scheduler) -> None:
    """Prepare the scheduler for SIGTERM. It then lets its workers announce their departure, because
    they end with it, and closes when no attempt runs.
    """
    _on_first_sigterm(_close_after_attempts, dask_scheduler)


async def _close_after_attempts(dask_scheduler: Scheduler) -> None:
    seconds = _time_to_leave()
    leaves_at = time.monotonic() + seconds
    call = {"function": cloudpickle.dumps(_announce), "args": cloudpickle.dumps((seconds,))}
    await dask_scheduler.broadcast(msg={"op": "run", **call}, on_error="ignore")
    while time.monotonic() < leaves_at and any(
        each.processing for each in dask_scheduler.workers.values()
    ):
        await asyncio.sleep(POLL_INTERVAL)
    os.kill(os.getpid(), signal.SIGTERM)  # the second one, for Dask's own handler


def is_leaving(dask_worker: Worker) -> bool:
    """Return whether this worker has received SIGTERM, or its scheduler retires it."""
    return (
        getattr(dask_worker, "leaves_at", float("inf")) < float("inf")
        or dask_worker.status.name != "running"
    )


def _on_first_sigterm(leave: Callable[[Any], Coroutine[Any, Any, None]], server: Any) -> None:
    """Begin `leave(server)` in its event loop at the first SIGTERM. At the second one, call the
    previous handler. A second call for a server changes nothing.

    Only the main thread may install a handler. In another thread, such as the thread of a
    LocalCluster's nannies, this changes nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if hasattr(server, "departure") or not is_main:
        return
    server.departure, loop = None, asyncio.get_running_loop()
    previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL

    def handle(number: int, frame: types.FrameType | None) -> None:
        signal.signal(signal.SIGTERM, previous)
        # The attribute holds the task, because a task without a reference may vanish.
        server.departure = asyncio.run_coroutine_threadsafe(leave(server), loop)

    signal.signal(signal.SIGTERM, handle)


def plugins_of(dask_worker: Worker) -> list[Any]:
    return [each for each in dask_worker.plugins.values() if hasattr(each, "announce_departure")]


def _announce(seconds: float, dask_worker: Worker) -> None:
    dask_worker.leaves_at = time.monotonic() + seconds
    for each in plugins_of(dask_worker):
        each.announce_departure(dask_worker.leaves_at)


def _time_to_leave() -> float:
    return max(1.0, float(os.environ.get(GRACE_VARIABLE, DEFAULT_GRACE)) - CLOSE_RESERVE)


async def _leave(dask_worker: Worker) -> None:
    _announce(_time_to_leave(), dask_worker)
    while time.monotonic() < dask_worker.leaves_at and any(
        each.is_at_work for each in plugins_of(dask_worker)
    ):
        await asyncio.sleep(POLL_INTERVAL)
    # Otherwise the nanny starts another worker.
    await dask_worker.close(nanny=False, reason="SIGTERM")


def _forward_sigterm(dask_worker: Nanny) -> None:
    """Let a nanny pass its first SIGTERM on to its worker, and end after the worker. Runs in the
    nanny's process.
    """
    _on_first_sigterm(_leave_with_worker, dask_worker)


async def _leave_with_worker(nanny: Nanny) -> None:
    nanny.close_gracefully(reason="SIGTERM")  # the nanny then starts no other worker
    os.kill(nanny.pid or os.getpid(), signal.SIGTERM)
