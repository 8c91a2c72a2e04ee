"""The scheduler's part of a run: it passes the nodes' messages on to the driver in batches, and a
command of the driver to all nodes.

With a thousand nodes, a message to the driver for each heartbeat costs both processes more than the
heartbeat, and a connection for each command costs the scheduler more than the command. This module
travels by value, like worker.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from distributed import Scheduler, SchedulerPlugin
from distributed.comm import CommClosedError

# Seconds between two batches, at least. A message after a pause of the others does not wait.
BATCH_INTERVAL = 0.05
# topic in which the scheduler reports, among other things, that it has lost a worker
SCHEDULER_TOPIC = "all"


class Relay(SchedulerPlugin):  # type: ignore[misc]
    """Passes messages and commands of one attempt. The driver gets lists of messages in the topic
    `batches`.
    """

    def __init__(
        self, scheduler: Scheduler, plugin: str, attempt: str, addresses: Sequence[str]
    ) -> None:
        self.scheduler, self.plugin, self.attempt = scheduler, plugin, attempt
        self.batches = batches_of(attempt)
        # The streams to the workers. A worker that starts again has another stream.
        streams = scheduler.stream_comms
        self.streams = {each: streams[each] for each in addresses if each in streams}
        self._waiting: list[dict[str, Any]] = []
        self._passed_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def log_event(self, topic: str, msg: Any) -> None:
        """Take an event. Dask calls this for each event of a worker or of the scheduler."""
        is_loss = topic == SCHEDULER_TOPIC and msg.get("action") == "remove-worker"
        if topic != self.attempt and not is_loss:
            return
        self._waiting.append(msg)
        if is_loss:
            self._pass_on()
        elif self._timer is None:
            delay = self._passed_at + BATCH_INTERVAL - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, delay), self._pass_on)

    def begin(self, jobs: Mapping[str, bytes]) -> None:
        """Send each node its job. `jobs` has them by the addresses of the workers."""
        for address, job in jobs.items():
            self._send(address, {"job": job})

    def send(self, command: bytes) -> None:
        """Send a command to all nodes."""
        content = {"command": command}  # a single dict, because Dask remembers what it has sent
        for address in self.streams:
            self._send(address, content)

    def _send(self, address: str, content: Mapping[str, bytes]) -> None:
        stream = self.streams.get(address)
        if stream is not None:
            with contextlib.suppress(CommClosedError):  # the worker is gone
                stream.send({"op": self.plugin, "attempt": self.attempt, "content": content})

    def _pass_on(self) -> None:
        if self._timer:
            self._timer.cancel()
        batch, self._waiting, self._timer = self._waiting, [], None
        self._passed_at = time.monotonic()
        self.scheduler.log_event(self.batches, batch)


def batches_of(attempt: str) -> str:
    """Return the topic in which the driver gets the messages of an attempt."""
    return f"{attempt}-batches"


def install(plugin: str, attempt: str, addresses: Sequence[str], dask_scheduler: Scheduler) -> None:
    """Pass the messages of an attempt on from now on, and no longer those of the attempt before
    it.
    """
    uninstall(plugin, dask_scheduler)
    relay = Relay(dask_scheduler, plugin, attempt, addresses)
    dask_scheduler.add_plugin(relay, name=plugin)
    dask_scheduler.handlers[plugin] = relay.send
    dask_scheduler.handlers[f"{plugin}-begin"] = relay.begin


def uninstall(plugin: str, dask_scheduler: Scheduler) -> None:
    for name in (plugin, f"{plugin}-begin"):
        dask_scheduler.handlers.pop(name, None)
    dask_scheduler.plugins.pop(plugin, None)


def list_workers(plugin: str, dask_scheduler: Scheduler) -> dict[str, tuple[str, str, bool]]:
    """Return the name of each worker, its identity, and whether it has tasks of others than the run
    of `plugin`, by its address. A worker that starts again has another identity.
    """

    def is_of_another(task: Any) -> bool:
        return not str(task.key).startswith(f"{plugin}-")

    return {
        address: (str(each.name), each.server_id, any(map(is_of_another, each.processing)))
        for address, each in dask_scheduler.workers.items()
    }
