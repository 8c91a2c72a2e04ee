"""Calls to the workers and the scheduler of a Dask cluster. They end in time, even without an
answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import pickle
from collections import ChainMap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from distributed import Client

from flyte_ddp.config.waits import ANSWER_TIMEOUT
from flyte_ddp.launch.nodes.dask import preemption, relay, worker
from flyte_ddp.process import devices, temporary_directories

# workers that one request asks: one for each worker costs driver and scheduler a millisecond
CALLS_PER_REQUEST = 32
# requests at a time: a request to a thousand workers at once may time out before its turn comes
MAX_REQUESTS = 8

# Pickle code for the workers by value: they may have no such module, or an older one.
for module in (worker, preemption, relay, devices, temporary_directories):
    cloudpickle.register_pickle_by_value(module)


@dataclass
class ByValue:
    """An object of worker.py in a task, which arrives there as itself.

    Dask pickles a task's function and arguments by reference, whatever cloudpickle was told.
    """

    value: Any

    def __call__(self, *arguments: Any) -> Any:
        return self.value(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (cloudpickle.dumps(self.value),)


def call_workers(
    client: Client,
    addresses: Collection[str],
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = ANSWER_TIMEOUT,
) -> dict[str, Any]:
    """Call `function` in each of the workers, outside their tasks. Return answers or exceptions by
    address.

    A worker that does not answer within `timeout` seconds yields a TimeoutError and hardly delays
    the others.
    """
    places = asyncio.Semaphore(MAX_REQUESTS)

    async def call(asked: Sequence[str]) -> dict[str, Any]:
        async with places:
            answers = client.run(
                function, *arguments, workers=asked, on_error="return", asynchronous=True
            )
            try:
                return dict(await asyncio.wait_for(answers, timeout))
            except Exception as error:
                if len(asked) == 1:
                    return {asked[0]: error}
        # A worker did not answer, so each one is asked alone.
        return await call_each(asked, 1)

    async def call_each(asked: Sequence[str], size: int) -> dict[str, Any]:
        chunks = [asked[start : start + size] for start in range(0, len(asked), size)]
        return dict(ChainMap(*await asyncio.gather(*map(call, chunks))))

    if not addresses:
        return {}
    try:
        return dict(client.sync(call_each, list(addresses), CALLS_PER_REQUEST))
    except RuntimeError as error:  # the client is closed
        return dict.fromkeys(addresses, error)


def call_scheduler(
    client: Client, method: str, timeout: float = ANSWER_TIMEOUT, **arguments: Any
) -> Any:
    """Return the scheduler's answer; None without an answer in time. Dask's own calls would wait
    much longer.
    """
    try:
        return client.sync(getattr(client.scheduler, method), callback_timeout=timeout, **arguments)
    except (OSError, RuntimeError, AttributeError, asyncio.TimeoutError):
        return None  # the scheduler is gone, or the client is closed


def listed_workers(client: Client, plugin: str = "") -> dict[str, tuple[str, str, bool]]:
    """Return what `relay.list_workers` returns about the workers that the scheduler knows; they may
    be dead or silent.
    """
    return run_on_scheduler(client, functools.partial(relay.list_workers, plugin)) or {}


def scheduler_id(client: Client) -> str:
    """Return the identity of the scheduler; "" without an answer. Another scheduler at the same
    address has another identity.
    """
    return str((call_scheduler(client, "identity", n_workers=0) or {}).get("id", ""))


def run_on_scheduler(client: Client, function: Callable[..., Any]) -> Any:
    """Return what `function` returns in the scheduler; None without an answer."""
    answer = call_scheduler(client, "run_function", function=cloudpickle.dumps(function)) or {}
    if answer.get("status") != "OK":
        return None
    return answer["result"]


async def send_command(client: Client, plugin: str, command: bytes) -> None:
    """Send `command` to the agents of the run's attempt. A scheduler that cannot be reached is
    skipped.
    """
    with contextlib.suppress(OSError, RuntimeError):
        await getattr(client.scheduler, plugin)(command=command)
