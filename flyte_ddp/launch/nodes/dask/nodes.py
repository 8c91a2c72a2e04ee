"""The workers of a Dask cluster as the nodes of one attempt.

Dask carries messages, not tensors. On each worker a plugin runs a process with the node's agent
in it (worker.py, agent/main.py). The messages of these processes come back as Dask's structured
events, which the scheduler passes on in batches (relay.py).

A silent machine is the hard case: its connections stay open and nobody reports it. So both sides
send heartbeats, and each takes the other for lost after `node_timeout`. A driver that has lost a
node ends the others; a node that has lost its driver kills its own ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pickle
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from distributed import Client
from distributed.client import ClosedClientError

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.kubernetes.api import pod_end, target_namespace
from flyte_ddp.config.waits import POLL_INTERVAL
from flyte_ddp.errors import OUT_OF_MEMORY, NodeLost
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.control.reference import Reference
from flyte_ddp.launch.nodes.dask import relay, worker
from flyte_ddp.launch.nodes.dask.assignment import DaskNode
from flyte_ddp.launch.nodes.dask.calls import (
    call_scheduler,
    call_workers,
    run_on_scheduler,
    scheduler_id,
)
from flyte_ddp.launch.nodes.dask.heartbeats import START_TIMEOUT, RepeatedCommand, SilenceWatch
from flyte_ddp.launch.nodes.dask.holds import Holds
from flyte_ddp.launch.nodes.dask.preemption import hold_scheduler
from flyte_ddp.launch.nodes.dask.scale_up import ScaleUpWatch
from flyte_ddp.launch.protocol.failures import shorten
from flyte_ddp.launch.protocol.messages import (
    End,
    Failed,
    Leaving,
    NodeJob,
    Outcome,
)
from flyte_ddp.launch.protocol.programs import Job

RESULTS_TIMEOUT = 60.0  # seconds for files of ranks, up to `MAX_TAKEN` bytes
WORKER_LOG_LINES = 15  # lines of the log of a lost worker's pod in the error


@dataclass(eq=False, repr=False)
class DaskNodes(Nodes):
    """The workers in one attempt."""

    plugin: str  # the name of the run's plugin in the workers
    code: bytes  # code that the plugin brings along, see `data.packed_code`
    client: Client
    config: ClusterConfig
    nodes: list[DaskNode]
    # Returns the job of each node in an attempt, given the number of restarts before the attempt.
    make_jobs: Callable[[Job, int], list[NodeJob]]
    growth: ScaleUpWatch  # the watch for a larger gang
    holds: Holds
    reference: Reference | None = None

    _began_at: float = 0.0  # seconds since the epoch
    _name: str = ""  # name of the attempt and of the topic of its messages
    _next_look_at: float = 0.0  # monotonic: when to look again for nodes without messages
    _is_begun: bool = False  # the nodes have been sent their jobs
    # batches of events of the attempt and of the scheduler, each with its time of arrival
    _arrivals: queue.SimpleQueue[tuple[float, list[dict[str, Any]]]] = field(
        default_factory=queue.SimpleQueue
    )

    def __post_init__(self) -> None:
        self._by_address = {node.address: node for node in self.nodes}
        self._command = RepeatedCommand(self.client, self.plugin, self.nodes, self.config)
        self._silence = SilenceWatch(len(self.nodes), self.config.node_timeout)
        self.world_size = self.nodes[0].ranks.world_size
        self.scheduler_id = scheduler_id(self.client)
        if self.config.resolved_kind == "kubernetes":
            self.namespace = target_namespace(self.config)
            self.num_spares = self.config.spare_nodes

    @property
    def larger(self) -> int:
        return len(self.growth.members)

    @property
    def present(self) -> set[str]:
        """The addresses of workers that have ended the attempt, and stay."""
        return {node.address for node in self.nodes if node.is_confirmed and not node.departure}

    def replace_leaving(self) -> None:
        leaving = [node.address for node in self.nodes if node.departure or node.is_slow]
        self.growth.replace(frozenset(leaving))

    @property
    def can_do_without_leaving(self) -> bool:
        """See `Nodes`. If all leave, as with their scheduler, there is nothing to wait for."""
        num_staying = sum(not (node.departure or node.is_slow) for node in self.nodes)
        if not num_staying:
            return any(node.departure for node in self.nodes)
        return num_staying >= self.growth.sizes[-1] or bool(self.growth.members)

    def start(self, job: Job, num_restarts: int) -> None:
        """Put the code on the nodes, agree on where they meet, and start their agents."""
        self._began_at = time.time()
        self._name = f"{self.plugin}-{num_restarts}"
        self.client.subscribe_topic(
            relay.batches_of(self._name),
            lambda event: self._arrivals.put((time.monotonic(), event[1])),
        )
        run_on_scheduler(self.client, hold_scheduler)
        addresses = [node.address for node in self.nodes]
        run_on_scheduler(
            self.client, functools.partial(relay.install, self.plugin, self._name, addresses)
        )
        first = self.nodes[0]
        new = [node for node in self.nodes if not node.has_plugin]
        self._call(new, worker.install, self.plugin, self.code, timeout=START_TIMEOUT)
        host, port = self._call([first], worker.call, self.plugin, "admit", self._name, True)[
            first.address
        ]
        for node in self.nodes:
            node.ranks = dataclasses.replace(node.ranks, host=host, port=port)
        node_jobs = map(pickle.dumps, self.make_jobs(job, num_restarts))
        jobs = dict(zip(addresses, node_jobs, strict=True))
        call_scheduler(self.client, f"{self.plugin}-begin", START_TIMEOUT, jobs=jobs)
        for node in self.nodes:
            node.last_message_at = time.monotonic()
        self._is_begun = True
        self.holds.begin(self.client, self.plugin, self._name, addresses)

    def send(self, command: Any) -> None:
        if not self._is_begun:
            for node in self.nodes:
                node.end = End(Outcome.FAILED)  # the node was never started
        self._command.change(command)
        self._command.repeat()

    def messages(self) -> Iterator[tuple[Node, Any]]:
        self._command.repeat()
        with contextlib.suppress(queue.Empty):
            yield from self._take(*self._arrivals.get(timeout=POLL_INTERVAL))
            while True:
                yield from self._take(*self._arrivals.get_nowait())
        if not self._is_begun or time.monotonic() < self._next_look_at:
            return
        self._next_look_at = time.monotonic() + POLL_INTERVAL
        is_cut_off = self.holds.are_lost
        for node in self.nodes:
            if node.outcome:
                continue
            why = self._silence.find_loss(node)
            if is_cut_off:
                why = "the connection to the Dask scheduler ended"
            if why:
                yield from _lose(node, why)

    def explain(self, failure: Exception) -> Exception:
        """Add the last lines of the lost worker's pod, or name the loss of the scheduler
        instead.
        """
        if not isinstance(failure, NodeLost):
            return failure
        now = scheduler_id(self.client)
        if now != self.scheduler_id:
            # Every node seems lost then: their messages come through the scheduler.
            why = "it does not answer"
            if now:
                why = "another one has taken its place"
            return NodeLost(f"the Dask scheduler was lost: {why}", "")
        if not failure.worker or "\n" in str(failure):
            return failure
        end = pod_end(self.config, failure.worker, self._began_at, WORKER_LOG_LINES)
        text = str(failure)
        if end.reason:
            text = f"{text}; {end}"
        if end.log:
            text += f"\nThe last lines of its pod's log:\n{shorten(end.log, WORKER_LOG_LINES)}"
        cause = failure.cause
        if end.is_out_of_memory:
            cause = OUT_OF_MEMORY
        return NodeLost(text, failure.worker, cause)

    def take_results(self, node: Node, names: Sequence[str]) -> list[bytes | None]:
        address = self.nodes[node.index].address
        message = {"op": f"results-{self.plugin}", "names": names}
        answers = call_scheduler(
            self.client, "broadcast", RESULTS_TIMEOUT, msg=message, workers=[address]
        )
        return list(answers[address])

    def close(self) -> None:
        self.growth.close()
        self.holds.keep(self.present)
        with contextlib.suppress(ClosedClientError):
            self.client.unsubscribe_topic(relay.batches_of(self._name))

    def _call(
        self,
        nodes: Sequence[DaskNode],
        function: Callable[..., Any],
        *arguments: Any,
        **options: Any,
    ) -> Any:
        answers = call_workers(
            self.client, [node.address for node in nodes], function, *arguments, **options
        )
        for node in nodes:
            error = answers[node.address]
            if isinstance(error, Exception):
                why = f"it does not answer: {type(error).__name__}: {error}"
                raise NodeLost(f"{node} was lost: {why}", node.worker) from error
        return answers

    def _take(self, arrived_at: float, batch: list[dict[str, Any]]) -> Iterator[tuple[Node, Any]]:
        """Yield the messages of nodes in Dask's events, and the loss of a worker that the scheduler
        reports.
        """
        for event in batch:
            node = self._by_address.get(event["worker"])
            if node and not node.is_admitted and ("message" in event or "admitted" in event):
                node.is_admitted = True
                self._silence.admitted_at = arrived_at
            if node and "message" in event:
                node.last_message_at, node.is_started = arrived_at, True
                message = pickle.loads(event["message"])
                node.is_confirmed = isinstance(message, End)
                yield node, message
            elif node and "admitted" in event:
                node.last_message_at = arrived_at
            elif node and "leaves_in" in event:
                yield node, Leaving(event["leaves_in"])
            elif node and "lost" in event:
                yield from _lose(node, event["lost"])
            elif node and event.get("action") == "remove-worker":
                yield from _lose(node, "its worker is gone")


def _lose(node: Node, why: str) -> Iterator[tuple[Node, Any]]:
    """Yield the messages that report a lost node."""
    yield node, Failed(NodeLost(why))
    yield node, End(Outcome.FAILED)
