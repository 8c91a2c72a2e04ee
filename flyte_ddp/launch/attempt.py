"""One attempt: the ranks of all nodes, from their common start to their common end.

Knows nothing of restarts: driver.py decides those. Nor what carries its commands and messages: a
place's `Nodes` do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flyte_ddp import events
from flyte_ddp.checkpoints import WRITE_GRACE
from flyte_ddp.errors import NodeLost, RankFailure, TrainingStopped
from flyte_ddp.launch.failures import find_place
from flyte_ddp.launch.node import GO, KILL, KILL_GRACE, STALL, STOP
from flyte_ddp.launch.paces import PaceWatch
from flyte_ddp.launch.process.memory import name_memory
from flyte_ddp.launch.process.programs import Job
from flyte_ddp.launch.signals import StopRequest
from flyte_ddp.launch.stalls import join_stalls, lost_failure

# seconds in which the cause of a failure that looks like another's consequence may be reported
ECHO_GRACE = 3.0
LIBRARIES = re.compile("gloo|NCCL")  # whose errors say that a peer is gone
# of a leaving node's time, for training until its replacement is there; the rest is for the save
TRAINING_SHARE = 0.5
# seconds before a node is gone in which its ranks, if they have not ended, are killed
LEAVE_RESERVE = 1.0
KILL_TIMEOUT = KILL_GRACE + 2.0  # seconds for the nodes to confirm that their ranks are gone


@dataclass
class Node:
    """A machine that takes part in an attempt."""

    index: int = 0  # in the order of the ranks
    label: str = ""  # for people; "" for this machine, which nobody needs to be told
    worker: str = ""  # name of its Dask worker
    is_writing: bool = False  # rank 0 writes a checkpoint
    waits: list[float] = field(default_factory=list)  # as its last beat has them, and the next two
    ended: list[int] = field(default_factory=list)
    has_reported: bool = False
    leaves_at: float = float("inf")  # monotonic: when it is gone, if it was told to go
    # monotonic: so long it may train on while the gang waits for its replacement
    trains_until: float = float("inf")
    because: str = ""  # why it goes, if it was not told to go itself
    outcome: str = ""  # done, stopped, failed, killed, broken or lost; "" while it runs
    stopped: TrainingStopped | None = None  # how it was stopped

    def __str__(self) -> str:
        return self.label or "this machine"

    @property
    def is_leaving(self) -> bool:
        """It has announced that it goes away."""
        return self.leaves_at < float("inf")

    def leave(self, seconds: float, because: str = "") -> None:
        """Note that it goes away in so many seconds. The first notice counts."""
        if not self.is_leaving:
            self.leaves_at = time.monotonic() + seconds
            self.trains_until = time.monotonic() + TRAINING_SHARE * seconds
            self.because = because


class Nodes(Protocol):
    """The nodes of one attempt, as a place gives them.

    A message is a node with a dict, as launch/node.py has them; "lost" besides, with `why`, `cause`
    and `is_silent`, of a node from which nothing more can come.
    """

    grace: float  # seconds for the ranks to save their state and end, when the gang is to grow

    @property
    def nodes(self) -> Sequence[Node]:
        """In the order of their ranks."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def larger(self) -> int:
        """The number of nodes of a larger gang that is possible now; 0 for none."""

    def can_do_without_leaving(self) -> bool:
        """Return whether the next attempt can start now without the nodes that leave: there are
        enough others.
        """

    def start(self, job: Job, num_restarts: int) -> None:
        """Start the ranks. Raises NodeLost if a node does not answer."""

    def send(self, command: str) -> None:
        """Give all nodes a command; see launch/node.py."""

    def messages(self) -> Iterable[tuple[Node, dict[str, Any]]]:
        """Return what has arrived, waiting a moment for it if there is nothing."""

    def explain(self, failure: Exception) -> Exception:
        """Return the failure with what else is known of its cause. Called once, when all nodes have
        ended.
        """

    def close(self) -> None:
        """Release what the attempt has used. Called when its nodes have ended, or do not answer."""


@dataclass(frozen=True)
class Failure:
    """A failure in a gang."""

    error: RankFailure | NodeLost
    is_echo: bool  # it may be the consequence of another one
    noticed_at: float  # monotonic

    def rank_as_cause(self) -> tuple[bool, bool, float]:
        """Return a key by which the cause of all others is the smallest.

        A program may raise an exception of its own because a node was lost, which is noticed later.
        """
        return self.is_echo, getattr(self.error, "kind", "") == "exception", self.noticed_at


@dataclass(eq=False)
class Attempt:
    """One gang, from its start to its end on every node."""

    nodes: Nodes
    emit: Callable[[events.Event], None]
    relay: Callable[[str], None]
    stop: StopRequest
    shows_nodes: bool = False  # a line of a rank's begins with its node

    def __post_init__(self) -> None:
        self.larger = 0  # nodes of the gang that follows this one
        self.step = 0  # that the gang has reached
        # The node that has each part of the states that are in memory when it has ended.
        self._parts: dict[tuple[int, ...], dict[int, int]] = {}
        self.progress_at = time.monotonic()  # when it did
        # it saves its state when it is asked to end, so it may end to grow
        self.is_stoppable = False
        self.is_killed = False
        # Ranks that have ended, of which the nodes were asked whether the others wait for them.
        self._left: list[int] = []
        # where ranks lost a peer in a collective, by their numbers
        self._lost_peers: dict[int, str] = {}
        self.has_stalled = False  # its ranks wait for one another, and were ordered to end
        self.failures: list[Failure] = []
        self.paces = PaceWatch(self.nodes.world_size, self.emit)

    def train(self, job: Job, num_restarts: int) -> bool:
        """Run the gang to its end. When this returns or raises, no rank runs on a node that can be
        reached.

        Returns:
            True if the run is finished; False if the gang has ended, after a checkpoint, to start
            again larger, or without the nodes that leave.

        Raises:
            RankFailure: a rank failed; as far as can be known it is the cause, not a consequence.
            NodeLost: a node is gone, or could not run its ranks.
            TrainingStopped: the run was stopped.
        """
        stop, deadline, is_stopping, num_leaving = self.stop, float("inf"), False, 0
        try:
            self.nodes.start(job, num_restarts)
            self.nodes.send(GO)
            while not self.has_ended and not self._cause_is_known():
                self._receive()
                self._end_if_all_wait(job.program.stall_timeout)
                if deadline == float("inf"):
                    self._end_if_left(job.program.left_timeout)
                if stop.is_set() and not is_stopping:  # also while it grows
                    is_stopping = True
                    deadline = self._stop_nodes(stop.reason, stop.grace)
                elif not is_stopping and self._must_leave(num_leaving):
                    num_leaving = len(self.leaving)
                    grace = (
                        min(node.leaves_at for node in self.leaving)
                        - LEAVE_RESERVE
                        - time.monotonic()
                    )
                    deadline = min(deadline, self._stop_nodes(self.reason, max(0.0, grace)))
                elif not self.larger and not self.leaving and self.is_stoppable and not is_stopping:
                    self.larger = self.nodes.larger
                    if self.larger:
                        deadline = self._stop_nodes(self.reason, self.nodes.grace)
                if stop.is_urgent or time.monotonic() > deadline:
                    break
        finally:
            self._end()
        outcomes = {node.outcome for node in self.nodes.nodes}
        if outcomes == {"done"}:
            return True
        if stop.is_set():
            mistakes = [
                each.error for each in self.failures if getattr(each.error, "is_user_error", False)
            ]
            raise mistakes[0] if mistakes else self._make_stopped()
        if (self.larger or num_leaving) and outcomes == {"stopped"}:
            return False
        if not self.failures:
            raise NodeLost(
                f"nodes did not end in time after they were asked to, because {self.reason}", ""
            )
        cause = find_cause(self.failures)
        if isinstance(cause, RankFailure) and cause.rank in self._lost_peers and self.ended_ranks:
            # of nothing else that ended
            raise lost_failure(cause.rank, self.ended_ranks, self._lost_peers[cause.rank])
        raise cause if self.leaving else self.nodes.explain(cause)

    def _must_leave(self, num_ordered: int) -> bool:
        """Return whether the ranks have to end now, or sooner than they were told to, because of
        nodes that leave.

        Args:
            num_ordered: nodes because of which they were told to end already.
        """
        leaving = self.leaving
        if len(leaving) <= num_ordered:
            return False
        is_ending = bool(num_ordered or self.larger)
        is_time = time.monotonic() > min(node.trains_until for node in leaving)
        return is_ending or is_time or self.nodes.can_do_without_leaving()

    @property
    def has_ended(self) -> bool:
        """Return whether the ranks have ended on every node."""
        return all(node.outcome for node in self.nodes.nodes)

    @property
    def leaving(self) -> list[Node]:
        """The nodes that have announced that they go away."""
        return [node for node in self.nodes.nodes if node.is_leaving]

    @property
    def reason(self) -> str:
        """Why a gang that nothing has failed in ends."""
        if leaving := self.leaving:
            if because := next((node.because for node in leaving if node.because), ""):
                return because
            return f"{leaving[0]} leaves" if len(leaving) == 1 else f"{len(leaving)} nodes leave"
        return f"the gang grows from {len(self.nodes.nodes)} to {self.larger} nodes"

    def in_memory(self) -> tuple[int, str]:
        """Return the step of the newest state that is left in memory to go on from, and where it
        is; 0 for none.
        """
        found = [
            (step, [*of.values()])
            for (step, *_, num_parts), of in self._parts.items()
            if len(of) == num_parts
        ]
        step, nodes = max(found, default=(0, [0]), key=lambda each: each[0])
        return step, name_memory(nodes, len(self.nodes.nodes))

    def ended(self, reason: str) -> events.AttemptEnded:
        """Return the event of the end of this attempt, now."""
        idle = time.monotonic() - self.progress_at
        return events.AttemptEnded(
            self.step, reason, idle_seconds=idle, num_leaving=len(self.leaving)
        )

    def _stop_nodes(self, reason: str, grace: float) -> float:
        """Order a last checkpoint and the end; return when the nodes must have ended."""
        self.nodes.send(f"{STOP} {grace:g} {reason}")
        return time.monotonic() + grace + KILL_TIMEOUT

    def _receive(self) -> None:
        for node, message in self.nodes.messages():
            kind = message["kind"]
            if kind == "beat":
                self._note_step(message["step"])
                node.is_writing, node.waits = message["is_writing"], message["waits"]
                node.ended, node.has_reported = message["ended"], message["has_reported"]
                self.is_stoppable |= message["is_stoppable"]
                self.paces.note(node.label, message["paces"], self.step)
                if (seconds := message["leaves_in"]) is not None:
                    node.leave(seconds)
            elif kind == "event":
                self._note_step(getattr(message["event"], "step", 0))
                self.emit(message["event"])
            elif kind == "lines":
                prefix = f"[node {node.index}] " if self.shows_nodes else ""
                for line in message["lines"]:
                    self.relay(f"{prefix}{line}")
            elif kind == "end":
                self._conclude(node, message)
            elif not node.outcome:
                self._note_loss(
                    node, message["why"], message.get("cause", ""), message.get("is_silent", False)
                )

    def _end_if_all_wait(self, timeout: float) -> None:
        """End the ranks of a function that never reports, if all but at most one have waited for
        others for so long.
        """
        waits: list[float] = []
        for node in self.nodes.nodes:
            if node.has_reported or self.has_stalled:
                return
            waits += node.waits
        if waits and len(waits) >= self.nodes.world_size - 1 and min(waits) >= timeout:
            self.has_stalled = True
            self.nodes.send(f"{STALL} {min(waits):g}")

    def _end_if_left(self, timeout: float) -> None:
        """End the ranks if some have ended and all others have waited in collectives for so long.
        Ask once for each.
        """
        ended, waits = (
            self.ended_ranks,
            [seconds for node in self.nodes.nodes for seconds in node.waits],
        )
        is_complete = len(ended) + len(waits) == self.nodes.world_size
        if ended != self._left and is_complete and min(waits, default=0) >= timeout:
            self._left = ended
            self.nodes.send(f"{STALL} {min(waits):g} {','.join(map(str, ended))}")

    @property
    def ended_ranks(self) -> list[int]:
        """The numbers of the ranks that have ended well, or are about to."""
        return [number for node in self.nodes.nodes for number in node.ended]

    def _note_step(self, step: int) -> None:
        if step > self.step:
            self.step, self.progress_at = step, time.monotonic()

    def _conclude(self, node: Node, end: dict[str, Any]) -> None:
        """Note how the ranks of a node have ended."""
        node.outcome = end["outcome"]
        for *state, number, num_parts in end.get("parts", ()):
            self._parts.setdefault((*state, num_parts), {}).setdefault(number, node.index)
        if node.outcome == "stopped":
            node.stopped = TrainingStopped(end["message"], end["reason"])
        elif node.outcome == "failed":
            values = end["failure"]
            if node.label:
                values["message"] = f"{node}: {values['message']}"
                for rank in values["details"].get("ranks", ()):
                    rank["node"] = str(node)
            if values["is_consequence"] and LIBRARIES.search(values["cause"]):
                frames = values["message"].splitlines()
                self._lost_peers[values["rank"]] = find_place(reversed(frames))
            # Where no other node could be lost, a connection that the error names is the program's
            # own.
            values["is_consequence"] &= len(self.nodes.nodes) > 1
            failure = RankFailure(**values)
            # When one node's ranks stand still, the others' do too, and all their stacks are worth
            # reading.
            is_echo = failure.is_consequence or failure.kind == "stall"
            if failure.kind == "stall" and not self.failures:
                self.nodes.send(f"{STALL} 0")
            self.failures.append(Failure(failure, is_echo, time.monotonic()))
        elif node.outcome == "broken" or (
            node.outcome == "killed" and not self.is_killed and not self.stop.is_set()
        ):
            self._note_loss(node, end["message"], end.get("cause", ""))

    def _note_loss(self, node: Node, why: str, cause: str, is_silent: bool = False) -> None:
        node.outcome = "lost"
        error = NodeLost(f"{node} was lost: {why}", "" if is_silent else node.worker, cause)
        self.failures.append(Failure(error, False, time.monotonic()))

    def _cause_is_known(self) -> bool:
        if not self.failures:
            return False
        seconds = time.monotonic() - min(failure.noticed_at for failure in self.failures)
        is_writing = any(node.is_writing and not node.outcome for node in self.nodes.nodes)
        if is_writing and all(
            getattr(failure.error, "kind", "") == "exception" for failure in self.failures
        ):
            return seconds > WRITE_GRACE
        return not all(failure.is_echo for failure in self.failures) or seconds > ECHO_GRACE

    def _make_stopped(self) -> TrainingStopped:
        stopped = [node.stopped for node in self.nodes.nodes if node.stopped]
        for each in stopped:
            if each.reason == self.stop.reason:  # else they had ended already, to grow
                return each
        how = "the run was stopped" if stopped else "the ranks were killed"
        return TrainingStopped(f"{self.stop.reason}: {how} at step {self.step}", self.stop.reason)

    def _end(self) -> None:
        """Kill what still runs, and wait until the nodes that can be reached confirm it."""
        deadline = time.monotonic() + KILL_TIMEOUT
        if not self.has_ended:
            self.is_killed = True
            self.nodes.send(KILL)
        while not self.has_ended and time.monotonic() < deadline:
            self._receive()
        self.nodes.close()


def find_cause(failures: Sequence[Failure]) -> RankFailure | NodeLost:
    """Return the failure that explains the others; of a stall, the reports of all nodes as one."""
    cause = min(failures, key=Failure.rank_as_cause).error
    if isinstance(cause, RankFailure) and cause.kind == "stall":
        stalls = [
            each.error
            for each in failures
            if isinstance(each.error, RankFailure) and each.error.kind == "stall"
        ]
        return join_stalls(stalls)
    return cause
