"""One attempt: the ranks of all nodes, from their common start to their common end.

Knows nothing of restarts, and nothing of the data: launcher.py decides those. What the workers run is in worker.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Client, Future
from distributed.client import ClosedClientError

from flyte_ddp import events
from flyte_ddp.checkpoints import WRITE_GRACE
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import worker_end
from flyte_ddp.errors import OUT_OF_MEMORY, NodeLost, RankFailure, TrainingStopped
from flyte_ddp.events.wall_time import AttemptEnded
from flyte_ddp.launch.dask import worker
from flyte_ddp.launch.dask.calls import (
    ANSWER_TIMEOUT,
    ByValue,
    call_scheduler,
    call_workers,
    scheduler_id,
    send_command,
)
from flyte_ddp.launch.dask.growth import GrowthWatch
from flyte_ddp.launch.dask.messages import BEAT_INTERVAL, GO, KILL, KILL_GRACE, STOP, NodeJob, decode
from flyte_ddp.launch.dask.placement import Node, natural_key
from flyte_ddp.launch.failures import MAX_LINES, shorten
from flyte_ddp.launch.signals import StopRequest

POLL_INTERVAL = 0.1  # seconds between checks for silence and the stop request
TRANSFER_TIMEOUT = 60.0  # seconds for the code to reach a worker
FIRST_REPORT_TIMEOUT = 60.0  # seconds, at least, for a node's supervisor to start and report
ECHO_GRACE = 3.0  # seconds in which the cause of a failure that looks like another's consequence may be reported
KILL_TIMEOUT = KILL_GRACE + 2.0  # seconds for the nodes to confirm that their ranks are gone
WORKER_LOG_LINES = 15  # of a lost worker's pod in the error

SCHEDULER_TOPIC = "all"  # where the scheduler reports, among other things, that it has lost a worker


@dataclass
class Run:
    """The parts of a run that all its attempts share."""

    name: str  # also of its plugin in the workers
    client: Client
    config: ClusterConfig
    code: bytes  # for the workers, see `code.packed_code`
    shows_nodes: bool  # a line of a rank's begins with its node
    emit: Callable[[events.Event], None]
    relay: Callable[[str], None]
    stop: StopRequest


class Attempt:
    """One gang, from its start to its end on every node."""

    def __init__(
        self,
        run: Run,
        number: int,
        nodes: list[Node],
        make_jobs: Callable[[list[Node]], list[NodeJob]],
        growth: GrowthWatch,
    ) -> None:
        self.run = run
        self.client = run.client
        self.nodes = nodes
        self.make_jobs = make_jobs
        self.growth = growth
        self.scheduler_id = scheduler_id(run.client)
        self.larger: frozenset[str] = frozenset()  # addresses of the workers of the gang that follows this one
        self.name = f"{run.name}-{number}"  # also of the topic of its messages
        self.step = 0  # that the gang has reached
        self.progress_at = time.monotonic()  # when it did
        self.resumed_step = -1  # that it started from, once that is known
        self.is_stoppable = False  # it saves its state when it is asked to end, so it may end to grow
        self.command = GO
        self.next_command_at = 0.0
        self.futures: list[Future] = []
        self.arrivals: queue.SimpleQueue[tuple[float, dict[str, Any]]] = queue.SimpleQueue()
        self.departures: queue.SimpleQueue[str] = queue.SimpleQueue()  # addresses of workers that the scheduler lost
        self.failures: list[tuple[bool, float, Exception]] = []  # (may be a consequence, when noticed, failure)

    def train(self) -> bool:
        """Run the gang to its end. When this returns or raises, no rank runs on a node that can be reached.

        Returns:
            True if the training is finished; False if the gang has ended, after a checkpoint, to start again larger.

        Raises:
            RankFailure: a rank failed; as far as can be known it is the cause, not a consequence.
            NodeLost: a node is gone, or could not run its ranks.
            TrainingStopped: the run was stopped.
        """
        stop = self.run.stop
        deadline = float("inf")  # for the nodes to end in
        is_stopping = False
        self.client.subscribe_topic(self.name, lambda event: self.arrivals.put((time.monotonic(), event[1])))
        self.client.subscribe_topic(SCHEDULER_TOPIC, self._note_departure)
        try:
            self._start()
            while not all(node.has_ended for node in self.nodes) and not self._cause_is_known():
                self._send_command()
                self._receive()
                self._check_silence()
                if stop.is_set() and not is_stopping:  # also while it grows
                    is_stopping = True
                    deadline = self._stop_nodes(stop.reason, stop.grace)
                elif self.command == GO and self.is_stoppable:
                    self.larger = self.growth.members
                    if self.larger:
                        reason = f"the gang grows from {len(self.nodes)} to {len(self.larger)} nodes"
                        deadline = self._stop_nodes(reason, self.growth.grace)
                if stop.is_urgent or time.monotonic() > deadline:
                    break
        finally:
            self._end()
        outcomes = [node.end["outcome"] if node.end else "" for node in self.nodes]
        if all(outcome == "done" for outcome in outcomes):
            return True
        if stop.is_set():
            raise self._stopped()
        if self.larger and all(outcome == "stopped" for outcome in outcomes):
            return False
        if not self.failures:
            raise NodeLost(f"nodes did not end within {self.growth.grace:g} s, to start again larger", "")
        raise self._root_cause()

    def ended(self, reason: str) -> AttemptEnded:
        """Return the event of the end of this attempt, now."""
        return AttemptEnded(self.step, reason, idle_seconds=time.monotonic() - self.progress_at)

    def _stop_nodes(self, reason: str, grace: float) -> float:
        """Order a last checkpoint and the end; return when the nodes must have ended."""
        self._set_command(f"{STOP} {grace:g} {reason}")
        return time.monotonic() + grace + KILL_TIMEOUT

    def _start(self) -> None:
        """Put the code on the nodes, agree on where they meet, and start their supervisors.

        Raises:
            NodeLost: one of them does not answer.
        """
        run, first = self.run, self.nodes[0]
        new = [node for node in self.nodes if not node.has_plugin]
        self._call(new, worker.install, run.name, run.code, timeout=TRANSFER_TIMEOUT)
        host, port = self._call([first], worker.call, run.name, "admit", self.name, True)[first.address]
        self._call(self.nodes[1:], worker.call, run.name, "admit", self.name, False)
        for node in self.nodes:
            node.ranks = dataclasses.replace(node.ranks, host=host, port=port)
            node.last_message_at = time.monotonic()
        for node, job in zip(self.nodes, self.make_jobs(self.nodes), strict=True):
            self.futures.append(
                self.client.submit(
                    ByValue(worker.supervise),
                    *(run.name, self.name, ByValue(worker.Sealed(job.to_json())), self.name),
                    key=f"{self.name}-node-{node.index}",
                    workers=[node.address],
                    allow_other_workers=False,
                    pure=False,
                    retries=0,
                )
            )

    def _call(self, nodes: Sequence[Node], function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        answers = call_workers(self.client, [node.address for node in nodes], function, *arguments, **options)
        for node in nodes:
            if isinstance(error := answers[node.address], Exception):
                raise NodeLost(
                    f"{node} was lost: it does not answer: {type(error).__name__}: {error}", node.name
                ) from error
        return answers

    def _set_command(self, command: str) -> None:
        self.command = command
        self.next_command_at = 0.0
        self._send_command()

    def _send_command(self) -> None:
        """Send the current command to every node, about every second: a lost one is repeated."""
        if time.monotonic() < self.next_command_at:
            return
        self.next_command_at = time.monotonic() + BEAT_INTERVAL
        addresses = [node.address for node in self.nodes if not node.has_ended]
        # Without waiting: a node that does not answer must not delay the others.
        self.client.loop.add_callback(send_command, self.client, addresses, self.run.name, self.name, self.command)

    def _receive(self) -> None:
        """Take in what has arrived, waiting a moment for it if there is nothing."""
        # Looked up before the messages: whatever a task has sent arrived before its end did.
        ended = [node for node, future in zip(self.nodes, self.futures, strict=False) if future.done()]
        with contextlib.suppress(queue.Empty):
            self._take(*self.arrivals.get(timeout=0 if ended else POLL_INTERVAL))
            while True:
                self._take(*self.arrivals.get_nowait())
        for node in ended:
            if not node.has_ended:
                self._conclude(node)
        with contextlib.suppress(queue.Empty):
            while True:
                address = self.departures.get_nowait()
                for node in self.nodes:
                    if node.address == address and not node.has_ended:
                        self._mark_lost(node, "its worker is gone")

    def _take(self, arrived_at: float, envelope: dict[str, Any]) -> None:
        """Take in one of Dask's events with a message of a node in it."""
        sender = next((node for node in self.nodes if node.address == envelope["worker"]), None)
        if sender is None:
            return
        message = decode(envelope["message"])
        sender.last_message_at = max(sender.last_message_at, arrived_at)
        sender.has_reported = True
        if message["kind"] == "beat":
            self._note_step(message["step"])
            sender.is_writing = message["is_writing"]
            return
        for each in sender.inbox.put(message):
            if each["kind"] == "event":
                self._pass_on(events.from_dict(each["event"]))
            elif each["kind"] == "lines":
                node = f"[node {sender.index}] " if self.run.shows_nodes else ""
                for line in each["lines"]:
                    self.run.relay(f"{node}{line}")
            elif each["kind"] == "end":
                sender.end = each

    def _pass_on(self, event: events.Event) -> None:
        self._note_step(getattr(event, "step", 0))
        if isinstance(event, events.RunStarted):
            self.resumed_step = event.resumed_step
        elif isinstance(event, events.CheckpointLoaded):  # by a function
            self.resumed_step = event.step
        elif isinstance(event, (events.StepFinished, events.BecameStoppable)):  # of a recipe, of a function
            self.is_stoppable = True
        self.run.emit(event)

    def _note_step(self, step: int) -> None:
        if step > self.step:
            self.step, self.progress_at = step, time.monotonic()

    def _conclude(self, node: Node) -> None:
        """Note how the task of a node has ended."""
        if node.end is None:
            # Dask keeps the last 1000 messages of a topic: those that were lost on the way here may be among them.
            for _, message in call_scheduler(self.client, "events", topic=self.name) or ():
                self._take(0.0, message)
        if node.end is None:
            self._mark_lost(node, f"its supervisor {self._end_of_task(node)}")
            return
        node.has_ended = True
        outcome, message = node.end["outcome"], node.end.get("message", "")
        if outcome == "failed":
            kind, is_consequence = node.end["failure_kind"], node.end["is_consequence"]
            failure = RankFailure(f"{node}: {message}", node.end["rank"], kind, node.end["cause"], is_consequence)
            # When one node's ranks stand still, the others' do too, and all their stacks are worth reading.
            self.failures.append((is_consequence or kind == "stall", time.monotonic(), failure))
        elif outcome == "broken" or (outcome == "killed" and self.command != KILL and not self.run.stop.is_set()):
            self._mark_lost(node, message, node.end.get("cause", ""))

    def _end_of_task(self, node: Node) -> str:
        try:
            return str(self.futures[node.index].result(timeout=ANSWER_TIMEOUT))
        except Exception as error:  # Dask's own, or one that the task raised
            return f"could not be run: {type(error).__name__}: {error}"

    def _mark_lost(self, node: Node, why: str, cause: str = "", is_silent: bool = False) -> None:
        node.has_ended = True
        node.is_silent = is_silent
        name = "" if is_silent else node.name
        self.failures.append((False, time.monotonic(), NodeLost(f"{node} was lost: {why}", name, cause)))

    def _check_silence(self) -> None:
        limit = self.run.config.node_timeout
        for node in self.nodes:
            silence = time.monotonic() - node.last_message_at
            if node.has_ended:
                continue
            if node.has_reported and silence > limit:
                why = f"it has been silent for {silence:.0f} s (node_timeout: {limit:g})"
                self._mark_lost(node, why, is_silent=True)
            elif not node.has_reported and silence > max(limit, FIRST_REPORT_TIMEOUT):
                self._mark_lost(node, f"its supervisor has not started within {silence:.0f} s")

    def _cause_is_known(self) -> bool:
        if not self.failures:
            return False
        seconds = time.monotonic() - min(noticed for _, noticed, _ in self.failures)
        is_writing = any(node.is_writing and not node.has_ended for node in self.nodes)
        if is_writing and all(getattr(failure, "kind", "") == "exception" for _, _, failure in self.failures):
            return seconds > WRITE_GRACE
        return not all(is_echo for is_echo, _, _ in self.failures) or seconds > ECHO_GRACE

    def _root_cause(self) -> Exception:
        """Return the failure that explains the others, with the last lines of the lost worker's pod."""
        # A program may raise an exception of its own because a node was lost, which the scheduler reports later.
        _, _, cause = min(
            self.failures, key=lambda each: (each[0], getattr(each[2], "kind", "") == "exception", each[1])
        )
        if isinstance(cause, RankFailure) and cause.kind == "stall":
            return _join_stalls([failure for _, _, failure in self.failures if getattr(failure, "kind", "") == "stall"])
        if isinstance(cause, NodeLost) and (now := scheduler_id(self.client)) != self.scheduler_id:
            # Every node seems lost then: their messages come through the scheduler.
            why = "another one has taken its place" if now else "it does not answer"
            return NodeLost(f"the Dask scheduler was lost: {why}", "")
        if isinstance(cause, NodeLost) and cause.worker and "\n" not in str(cause):
            end = worker_end(self.run.config, cause.worker, WORKER_LOG_LINES)
            text = f"{cause}; {end}" if end.reason else str(cause)
            if end.log:
                text += f"\nThe last lines of its pod's log:\n{shorten(end.log, WORKER_LOG_LINES)}"
            return NodeLost(text, cause.worker, OUT_OF_MEMORY if end.is_out_of_memory else cause.cause)
        return cause

    def _stopped(self) -> TrainingStopped:
        stopped = [node.end["message"] for node in self.nodes if node.end and node.end["outcome"] == "stopped"]
        for message in stopped:
            if message.startswith(self.run.stop.reason):  # else they had ended already, to grow
                return TrainingStopped(message)
        how = "the run was stopped" if stopped else "the ranks were killed"
        return TrainingStopped(f"{self.run.stop.reason}: {how} at step {self.step}")

    def _end(self) -> None:
        """Kill what still runs, and wait until the nodes that can be reached confirm it."""
        for node in self.nodes[len(self.futures) :]:
            node.has_ended = True  # it was never started
        deadline = time.monotonic() + KILL_TIMEOUT
        if not all(node.has_ended for node in self.nodes):
            self._set_command(KILL)
        while not all(node.has_ended for node in self.nodes) and time.monotonic() < deadline:
            self._send_command()
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


def _join_stalls(failures: Sequence[Any]) -> RankFailure:
    """Return the nodes' reports of a stall as one, which begins with the node whose rank is to blame if one is."""
    stalls = sorted(failures, key=lambda failure: (failure.rank < 0, natural_key(str(failure))))
    num_lines = max(5, MAX_LINES // len(stalls))  # a stack begins where the rank stands
    num_shown = MAX_LINES // num_lines
    reports = ["\n".join(str(stall).splitlines()[:num_lines]) for stall in stalls[:num_shown]]
    if len(stalls) > num_shown:
        reports.append(f"... (the log has the reports of {len(stalls) - num_shown} more nodes)")
    return RankFailure("\n".join(reports), stalls[0].rank, "stall", "stall")
