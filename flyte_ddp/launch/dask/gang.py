"""One gang: its nodes, their places, and its life from a common start to a common end.

Knows nothing of restarts, and nothing of the data: `dask.py` decides those. What the workers run is in worker.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import pickle
import queue
import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from distributed import Client, Future
from distributed.client import ClosedClientError

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import worker_log
from flyte_ddp.errors import ConfigError, NodeLost, RankFailure, TrainingStopped
from flyte_ddp.launch.dask import node, worker
from flyte_ddp.launch.spawn import STOP_GRACE, StopRequest
from flyte_ddp.rank.job import NodeRanks

POLL = 0.1  # seconds between looks at silence and the wish to stop
ANSWER_TIMEOUT = 5.0  # seconds for a worker to answer a question before it counts as absent
TRANSFER_TIMEOUT = 60.0  # seconds for the code to reach a worker
FIRST_SIGN_TIMEOUT = 60.0  # seconds, at least, for a node's supervisor to start and say so
ECHO_GRACE = 3.0  # seconds in which the cause of a failure that looks like another's echo may come to light
KILL_TIMEOUT = node.KILL_GRACE + 2.0  # seconds for the nodes to confirm that their ranks are gone

SCHEDULER_TOPIC = "all"  # where the scheduler says, among other things, that it has lost a worker

# What runs in the workers travels by value: they may have no such module, or an older one.
cloudpickle.register_pickle_by_value(worker)


class _ByValue:
    """A function of worker.py as a task: a graph is pickled as a whole, by reference whatever cloudpickle was told."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (cloudpickle.dumps(self.function),)


# --- The nodes -----------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A worker that takes part in an attempt."""

    index: int  # in the order of the ranks
    address: str
    name: str  # the same when a node comes back, unlike its address
    host: str
    place: NodeRanks
    environment: dict[str, str]
    has_plugin: bool
    last_sign: float = 0.0  # monotonic
    has_spoken: bool = False
    is_over: bool = False  # its task has ended, or nothing more can be heard of it
    end: dict[str, Any] | None = None  # its last message
    inbox: Inbox = field(default_factory=lambda: Inbox())

    def __str__(self) -> str:
        return f"node {self.index} ({self.name} at {self.host})"


@dataclass(frozen=True)
class Worker:
    """A worker that answers."""

    address: str
    name: str
    host: str
    num_cores: int
    gpus: tuple[str, ...]  # that it may use, as CUDA_VISIBLE_DEVICES names them
    has_plugin: bool
    is_busy: bool = False  # with whatever else runs on the cluster


class Inbox:
    """Puts the messages of a node in order and takes each of them once, however often and in what order they come."""

    def __init__(self) -> None:
        self.num_taken = 0
        self._early: dict[int, dict[str, Any]] = {}

    def put(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages whose turn it is, now that `message` is there."""
        if message["number"] >= self.num_taken:
            self._early[message["number"]] = message
        ready = []
        while self.num_taken in self._early:
            ready.append(self._early.pop(self.num_taken))
            self.num_taken += 1
        return ready


def assigned(workers: Sequence[Worker], num_nodes: int, config: ClusterConfig) -> list[Node]:
    """`num_nodes` of the workers as nodes, with their places in the gang; the rendezvous is still open.

    Workers on one host are neighbours, so that their ranks are too, and hosts and workers go by the workers' names: a
    node that comes back, under another address, gets its ranks back.

    Raises:
        ConfigError: a worker has fewer GPUs than its node needs.
    """
    first_on_host: dict[str, tuple[Any, ...]] = {}
    for each in workers:
        key = _natural(each.name)
        first_on_host[each.host] = min(key, first_on_host.get(each.host, key))
    chosen = sorted(workers, key=lambda each: (first_on_host[each.host], each.host, _natural(each.name)))[:num_nodes]
    nodes: list[Node] = []
    for index, each in enumerate(chosen):
        neighbours = [other for other in chosen if other.host == each.host]
        place = NodeRanks(
            first_rank=index * config.ranks_per_node,
            num_ranks=config.ranks_per_node,
            world_size=num_nodes * config.ranks_per_node,
            host="",
            port=0,
            interface="",
            use_gpus=config.gpus_per_node > 0,
            num_threads=config.threads_per_rank or max(1, each.num_cores // len(neighbours) // config.ranks_per_node),
        )
        devices = _devices(each, neighbours, config)
        nodes.append(Node(index, each.address, each.name, each.host, place, devices, each.has_plugin))
    return nodes


def _devices(each: Worker, neighbours: list[Worker], config: ClusterConfig) -> dict[str, str]:
    """The variable that gives the node its own GPUs. Workers of one host that were given the same ones share them."""
    if not config.gpus_per_node:
        return {}
    shares = [other for other in neighbours if other.gpus == each.gpus]
    start = shares.index(each) * config.gpus_per_node
    devices = each.gpus[start : start + config.gpus_per_node]
    if len(devices) < config.gpus_per_node:
        raise ConfigError(
            f"gpus_per_node: {config.gpus_per_node} are more than worker {each.name} at {each.host} has; it has "
            f"{len(each.gpus)}, for {len(shares)} workers; accepted is at most {len(each.gpus) // len(shares)}"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(devices)}


def _natural(name: str) -> tuple[Any, ...]:
    """A key that sorts worker-10 after worker-9."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name))


# --- The attempt ---------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What all attempts of a run have in common."""

    name: str  # also of its plugin in the workers
    client: Client
    config: ClusterConfig
    checkpoints: str  # URL
    code: bytes  # for the workers, see `code.packed_code`
    emit: Callable[[events.Event], None]
    relay: Callable[[str], None]
    stop: StopRequest


class Attempt:
    """One gang, from its start to its end on every node."""

    def __init__(self, run: Run, number: int, nodes: list[Node], orders: Callable[[list[Node]], list[bytes]]) -> None:
        self.run = run
        self.client = run.client
        self.nodes = nodes
        self.orders = orders
        self.name = f"{run.name}-{number}"  # also of the topic of its messages
        self.step = 0  # that the gang has reached
        self.words = node.GO
        self.next_words_at = 0.0
        self.futures: list[Future] = []
        self.arrivals: queue.SimpleQueue[tuple[float, dict[str, Any]]] = queue.SimpleQueue()
        self.departures: queue.SimpleQueue[str] = queue.SimpleQueue()  # addresses of workers that the scheduler lost
        self.failures: list[tuple[bool, float, Exception]] = []  # (is maybe an echo, when noticed, failure)

    def see_through(self) -> None:
        """Start the gang and see it through. When this returns or raises, no rank runs on a node that can be reached.

        Raises:
            RankFailure: a rank failed; as far as can be known it is the cause, not an echo.
            NodeLost: a node is gone, or could not run its ranks.
            TrainingStopped: the run was asked to stop.
        """
        stop = self.run.stop
        stop_deadline = float("inf")
        self.client.subscribe_topic(self.name, lambda event: self.arrivals.put((time.monotonic(), event[1])))
        self.client.subscribe_topic(SCHEDULER_TOPIC, self._note_departure)
        try:
            self._start()
            while not all(each.is_over for each in self.nodes) and not self._cause_is_known():
                self._send_words()
                self._receive()
                self._look_for_silence()
                if stop.is_set() and self.words == node.GO:
                    self._say(f"{node.STOP} {stop.reason}")
                    stop_deadline = time.monotonic() + STOP_GRACE + KILL_TIMEOUT
                if stop.is_urgent or time.monotonic() > stop_deadline:
                    break
        finally:
            self._end()
        if all(each.end and each.end["outcome"] == "done" for each in self.nodes):
            return
        if stop.is_set():
            raise self._stopped()
        raise self._root_cause()

    def _start(self) -> None:
        """Put the code on the nodes, agree on where they meet, and set their supervisors going.

        Raises:
            NodeLost: one of them does not answer.
        """
        run, first = self.run, self.nodes[0]
        new = [each for each in self.nodes if not each.has_plugin]
        self._ask(new, worker.install, run.name, run.code, timeout=TRANSFER_TIMEOUT)
        host, port = self._ask([first], worker.call, run.name, "admit", self.name, True)[first.address]
        self._ask(self.nodes[1:], worker.call, run.name, "admit", self.name, False)
        for each in self.nodes:
            each.place = dataclasses.replace(each.place, host=host, port=port)
            each.last_sign = time.monotonic()
        for each, order in zip(self.nodes, self.orders(self.nodes), strict=True):
            self.futures.append(
                self.client.submit(
                    _ByValue(worker.supervise),
                    *(run.name, self.name, order, self.name),
                    key=f"{self.name}-node-{each.index}",
                    workers=[each.address],
                    allow_other_workers=False,
                    pure=False,
                    retries=0,
                )
            )

    def _ask(self, nodes: Sequence[Node], function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        answers = ask(self.client, [each.address for each in nodes], function, *arguments, **options)
        for each in nodes:
            if isinstance(error := answers[each.address], Exception):
                raise NodeLost(f"{each} does not answer: {type(error).__name__}: {error}", each.name) from error
        return answers

    def _say(self, words: str) -> None:
        self.words = words
        self.next_words_at = 0.0
        self._send_words()

    def _send_words(self) -> None:
        """Tell every node, about every second, what is wanted of it. What is said again cannot be lost for good."""
        if time.monotonic() < self.next_words_at:
            return
        self.next_words_at = time.monotonic() + node.BEAT_SECONDS
        addresses = [each.address for each in self.nodes if not each.is_over]
        # Not waited for: a node that does not answer must not keep the words from the others.
        self.client.loop.add_callback(tell, self.client, addresses, self.run.name, self.name, self.words)

    def _receive(self) -> None:
        """Take in what has come, waiting a moment for it if there is nothing."""
        # Looked up before the messages: whatever a task has said came before its end did.
        over = [each for each, future in zip(self.nodes, self.futures, strict=False) if future.done()]
        with contextlib.suppress(queue.Empty):
            self._take(*self.arrivals.get(timeout=0 if over else POLL))
            while True:
                self._take(*self.arrivals.get_nowait())
        for each in over:
            if not each.is_over:
                self._conclude(each)
        with contextlib.suppress(queue.Empty):
            while True:
                address = self.departures.get_nowait()
                for each in self.nodes:
                    if each.address == address and not each.is_over:
                        self._lose(each, "its worker is gone")

    def _take(self, arrived_at: float, message: dict[str, Any]) -> None:
        sender = next((each for each in self.nodes if each.address == message["worker"]), None)
        if sender is None:
            return
        sender.last_sign = max(sender.last_sign, arrived_at)
        sender.has_spoken = True
        if message["kind"] == "beat":
            self.step = max(self.step, message["step"])
            return
        for each in sender.inbox.put(message):
            if each["kind"] == "event":
                event = events.from_dict(pickle.loads(each["event"]))
                self.step = max(self.step, getattr(event, "step", 0))
                self.run.emit(event)
            elif each["kind"] == "lines":
                for line in each["lines"]:
                    self.run.relay(f"[node {sender.index}] {line}")
            elif each["kind"] == "end":
                sender.end = each

    def _conclude(self, each: Node) -> None:
        """The task of a node has ended: note how."""
        if each.end is None:
            # Dask keeps the last 1000 messages of a topic: there may be what was lost on the way here.
            for _, message in ask_scheduler(self.client, "events", topic=self.name) or ():
                self._take(0.0, message)
        if each.end is None:
            self._lose(each, f"its supervisor {self._end_of_task(each)}")
            return
        each.is_over = True
        outcome, message = each.end["outcome"], each.end.get("message", "")
        if outcome == "failed":
            kind, is_consequence = each.end["failure_kind"], each.end["is_consequence"]
            failure = RankFailure(f"{each}: {message}", each.end["rank"], kind, each.end["cause"], is_consequence)
            # When one node's ranks stand still, the others' do too, and all their stacks are worth reading.
            self.failures.append((is_consequence or kind == "stall", time.monotonic(), failure))
        elif outcome == "broken" or (outcome == "killed" and self.words == node.GO):
            self._lose(each, message)

    def _end_of_task(self, each: Node) -> str:
        try:
            return str(self.futures[each.index].result(timeout=ANSWER_TIMEOUT))
        except Exception as error:  # Dask's own, or one that the task raised
            return f"could not be run: {type(error).__name__}: {error}"

    def _lose(self, each: Node, why: str, is_silent: bool = False) -> None:
        each.is_over = True
        worker = "" if is_silent else each.name
        self.failures.append((False, time.monotonic(), NodeLost(f"{each} was lost: {why}", worker)))

    def _look_for_silence(self) -> None:
        limit = self.run.config.node_timeout
        for each in self.nodes:
            silence = time.monotonic() - each.last_sign
            if each.is_over:
                continue
            if each.has_spoken and silence > limit:
                self._lose(each, f"it has been silent for {silence:.0f} s (node_timeout: {limit:g})", is_silent=True)
            elif not each.has_spoken and silence > max(limit, FIRST_SIGN_TIMEOUT):
                self._lose(each, f"its supervisor has not started within {silence:.0f} s")

    def _cause_is_known(self) -> bool:
        if not self.failures:
            return False
        first = min(noticed for _, noticed, _ in self.failures)
        return not all(is_echo for is_echo, _, _ in self.failures) or time.monotonic() - first > ECHO_GRACE

    def _root_cause(self) -> Exception:
        """The failure that explains the others, with what the lost worker's pod wrote last."""
        _, _, cause = min(self.failures, key=lambda failure: failure[:2])
        if isinstance(cause, RankFailure) and cause.kind == "stall":
            stacks = [str(failure) for _, _, failure in self.failures if getattr(failure, "kind", "") == "stall"]
            return RankFailure("\n".join(sorted(stacks, key=_natural)), cause.rank, cause.kind, cause.cause)
        if isinstance(cause, NodeLost) and cause.worker and (log := worker_log(self.run.config, cause.worker)):
            return NodeLost(f"{cause}\nThe worker's last lines:\n{log}", cause.worker)
        return cause

    def _stopped(self) -> TrainingStopped:
        for each in self.nodes:
            if each.end and each.end["outcome"] == "stopped":
                return TrainingStopped(each.end["message"])
        return TrainingStopped(
            f"{self.run.stop.reason}: the ranks were killed at step {self.step}. Their checkpoints are in "
            f"{self.run.checkpoints}: the same run with the same checkpoints goes on from there"
        )

    def _end(self) -> None:
        """End what still runs, and wait until the nodes that can be reached say that it is gone."""
        for each in self.nodes[len(self.futures) :]:
            each.is_over = True  # it was never started
        deadline = time.monotonic() + KILL_TIMEOUT
        if not all(each.is_over for each in self.nodes):
            self._say(node.KILL)
        while not all(each.is_over for each in self.nodes) and time.monotonic() < deadline:
            self._send_words()
            self._receive()
        for future in self.futures:
            future.release()
        with contextlib.suppress(ClosedClientError):
            self.client.unsubscribe_topic(self.name)
            self.client.unsubscribe_topic(SCHEDULER_TOPIC)

    def _note_departure(self, event: tuple[float, dict[str, Any]]) -> None:
        _, message = event
        if message.get("action") == "remove-worker":
            self.departures.put(message["worker"])


# --- Talking to workers --------------------------------------------------------------------------------------------


def ask(
    client: Client,
    addresses: Collection[str],
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = ANSWER_TIMEOUT,
) -> dict[str, Any]:
    """Call `function` in each of the workers at once, outside their tasks; the answers, or exceptions, by address.

    A worker that does not answer within `timeout` seconds gives a TimeoutError and holds up nobody else's answer.
    """

    async def one(address: str) -> Any:
        call = client.run(function, *arguments, workers=[address], asynchronous=True)
        return (await asyncio.wait_for(call, timeout))[address]

    async def everyone() -> list[Any]:
        return await asyncio.gather(*(one(address) for address in addresses), return_exceptions=True)

    if not addresses:
        return {}
    try:
        answers = client.sync(everyone)
    except RuntimeError as error:  # the client is closed
        answers = [error] * len(addresses)
    return dict(zip(addresses, answers, strict=True))


def ask_scheduler(client: Client, method: str, **arguments: Any) -> Any:
    """The scheduler's answer, or None where it gives none in time. Dask's own calls would wait for it much longer."""
    try:
        return client.sync(getattr(client.scheduler, method), callback_timeout=ANSWER_TIMEOUT, **arguments)
    except (OSError, RuntimeError, AttributeError, asyncio.TimeoutError):  # it is gone, or the client is closed
        return None


async def tell(client: Client, addresses: list[str], plugin: str, attempt: str, words: str) -> None:
    """Pass `words` on to the supervisors at `addresses`, those that can be reached."""
    message = {"op": plugin, "attempt": attempt, "words": words}
    with contextlib.suppress(OSError, RuntimeError):
        await client.scheduler.broadcast(msg=message, workers=addresses, on_error="ignore")
