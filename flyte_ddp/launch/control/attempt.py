"""One attempt: the ranks of all nodes, from their common start to their common end.

Knows nothing of restarts: driver.py decides those. Nor what carries its commands and messages: a
place's `Nodes` do.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp import events
from flyte_ddp.checkpoints import WRITE_GRACE
from flyte_ddp.errors import NodeLost, RankFailure, TrainingStopped
from flyte_ddp.launch.control.paces import PaceWatch
from flyte_ddp.launch.protocol.failures import find_place
from flyte_ddp.launch.protocol.memory import name_memory
from flyte_ddp.launch.protocol.messages import KILL_GRACE, KILLED, Beat
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.launch.protocol.stalls import join_stalls, lost_failure

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
    beat: Beat = field(default_factory=Beat)  # the last
    leaves_at: float = float("inf")  # monotonic: when it is gone, if it was told to go
    # monotonic: so long it may train on while the gang waits for its replacement
    trains_until: float = float("inf")
    has_ended: bool = False
    error: Exception | None = None  # with which it has ended
    is_silent: bool = False  # it was lost without a report of its end

    def __str__(self) -> str:
        return self.label or "this machine"

    @property
    def is_leaving(self) -> bool:
        """It has announced that it goes away."""
        return self.leaves_at < float("inf")

    def leave(self, seconds: float) -> None:
        """Note that it goes away in so many seconds. The first notice counts."""
        if not self.is_leaving:
            self.leaves_at = time.monotonic() + seconds
            self.trains_until = time.monotonic() + TRAINING_SHARE * seconds


class Nodes:
    """The nodes of one attempt, as a place gives them."""

    nodes: Sequence[Node]  # in the order of their ranks
    world_size: int  # number of ranks

    @property
    def larger(self) -> int:
        """The number of nodes of a larger gang that is possible now; 0 for none."""
        return 0

    def can_do_without_leaving(self) -> bool:
        """Return whether the next attempt can start now without the nodes that leave: there are
        enough others.
        """
        return False

    def start(self, job: Job, num_restarts: int) -> None:
        """Start the ranks. Raises NodeLost if a node does not answer."""

    def send(self, *command: Any) -> None:
        """Give all nodes a command; see agent/node.py. Those that were not started have ended."""

    def messages(self) -> Iterable[tuple[Node, tuple[Any, ...]]]:
        """Return what has arrived, as agent/node.py has it, with its node, waiting a moment for it
        if there is nothing. The end of a node that is gone is a NodeLost.
        """
        raise NotImplementedError

    def explain(self, failure: Exception) -> Exception:
        """Return the failure with what else is known of its cause. Called once, when all nodes have
        ended.
        """
        return failure

    def close(self) -> None:
        """Release what the attempt has used. Called when its nodes have ended, or do not answer."""


@dataclass(eq=False)
class Attempt:
    """One gang, from its start to its end on every node."""

    nodes: Nodes
    emit: Callable[[events.Event], None]
    relay: Callable[[str], None]
    stop: StopRequest
    shows_nodes: bool = False  # a line of a rank's begins with its node

    larger: int = 0  # nodes of the gang that follows this one
    step: int = 0  # that the gang has reached
    progress_at: float = field(default_factory=time.monotonic)  # when it did
    is_killed: bool = False
    has_stalled: bool = False  # its ranks wait for one another, and were ordered to end
    # in the order in which they were noticed
    failures: list[RankFailure | NodeLost] = field(default_factory=list)
    failed_at: float = float("inf")  # monotonic: when the first was
    # The node that has each part of the states that are in memory when it has ended.
    _parts: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)
    # Ranks that have ended, of which the nodes were asked whether the others wait for them.
    _left: list[int] = field(default_factory=list)
    # where ranks lost a peer in a collective, by their numbers
    _lost_peers: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
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
            self.nodes.send("go")
            while not self.has_ended and not self._cause_is_known():
                self._receive()
                self._end_if_all_wait(job.program, deadline < float("inf"))
                if stop.is_set() and not is_stopping:  # also while it grows
                    is_stopping = True
                    deadline = self._stop_nodes(stop.reason, stop.grace)
                elif not is_stopping and self._must_leave(num_leaving):
                    num_leaving = len(self.leaving)
                    gone_at = min(node.leaves_at for node in self.leaving)
                    grace = max(0.0, gone_at - LEAVE_RESERVE - time.monotonic())
                    deadline = min(deadline, self._stop_nodes(self.reason, grace))
                elif not self.larger and not self.leaving and self.is_stoppable and not is_stopping:
                    self.larger = self.nodes.larger
                    if self.larger:
                        deadline = self._stop_nodes(self.reason, job.program.store_timeout)
                if stop.is_urgent or time.monotonic() > deadline:
                    break
        finally:
            self._end()
        errors = [node.error for node in self.nodes.nodes]
        if self.has_ended and not any(errors):
            return True
        if stop.is_set():
            raise next((each for each in self.failures if each.is_user_error), self._make_stopped())
        if (self.larger or num_leaving) and all(isinstance(e, TrainingStopped) for e in errors):
            return False
        if not self.failures:
            raise NodeLost(
                f"nodes did not end in time after they were asked to, because {self.reason}"
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
        return all(node.has_ended for node in self.nodes.nodes)

    @property
    def is_stoppable(self) -> bool:
        """It saves its state when it is asked to end, so it may end to grow."""
        return any(node.beat.is_stoppable for node in self.nodes.nodes)

    @property
    def leaving(self) -> list[Node]:
        """The nodes that have announced that they go away."""
        return [node for node in self.nodes.nodes if node.is_leaving]

    @property
    def reason(self) -> str:
        """Why a gang that nothing has failed in ends."""
        if leaving := self.leaving:
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
        self.nodes.send("stop", reason, grace)
        return time.monotonic() + grace + KILL_TIMEOUT

    def _receive(self) -> None:
        for node, message in self.nodes.messages():
            match message:
                case ("beat", beat):
                    node.beat = beat
                    self._note_step(beat.step)
                    self.paces.note(node.label, beat.paces, self.step)
                    if beat.leaves_in is not None:
                        node.leave(beat.leaves_in)
                case ("event", event):
                    self._note_step(getattr(event, "step", 0))
                    self.emit(event)
                case ("lines", lines):
                    prefix = f"[node {node.index}] " if self.shows_nodes else ""
                    for line in lines:
                        self.relay(f"{prefix}{line}")
                case ("end", error, parts) if not node.has_ended:
                    node.has_ended, node.error = True, error
                    for *state, number, num_parts in parts:
                        of = self._parts.setdefault((*state, num_parts), {})
                        of.setdefault(number, node.index)
                    self._note_failure(node, error)

    def _end_if_all_wait(self, program: Program, is_ending: bool) -> None:
        """End the ranks if all but at most one of a function that never reports have waited for
        others for too long, or if some have ended and all others wait for them in collectives. Ask
        once for each.
        """
        beats = [node.beat for node in self.nodes.nodes]
        waits, ended = [each for beat in beats for each in beat.waits], self.ended_ranks
        wait, num_others = min(waits, default=0.0), self.nodes.world_size - len(waits)
        may_stall = not self.has_stalled and not any(beat.has_reported for beat in beats)
        if may_stall and num_others <= 1 and wait >= program.stall_timeout:
            self.has_stalled = True
            self.nodes.send("stall", wait)
        elif (
            num_others == len(ended)
            and wait >= program.left_timeout
            and not is_ending
            and ended != self._left
        ):
            self._left = ended
            self.nodes.send("stall", wait, *ended)

    @property
    def ended_ranks(self) -> list[int]:
        """The numbers of the ranks that have ended well, or are about to."""
        return [number for node in self.nodes.nodes for number in node.beat.ended]

    def _note_step(self, step: int) -> None:
        if step > self.step:
            self.step, self.progress_at = step, time.monotonic()

    def _note_failure(self, node: Node, error: Exception | None) -> None:
        """Note how the ranks of a node have failed, if they have."""
        if isinstance(error, NodeLost):
            if error.cause == KILLED and (self.is_killed or self.stop.is_set()):
                return
            error.args = (f"{node} was lost: {error}",)
            error.worker = "" if node.is_silent else node.worker
        elif isinstance(error, RankFailure):
            if error.is_consequence and LIBRARIES.search(error.cause):
                frames = str(error).splitlines()
                self._lost_peers[error.rank] = find_place(reversed(frames))
            # Where no other node could be lost, a connection that the error names is the program's
            # own.
            error.is_consequence &= len(self.nodes.nodes) > 1
            if node.label:
                error.args = (f"{node}: {error}",)
                for rank in error.details.get("ranks", ()):
                    rank.node = str(node)
            # When one node's ranks stand still, the others' do too, and all their stacks are worth
            # reading.
            if error.kind == "stall" and not self.failures:
                self.nodes.send("stall", 0.0)
        else:
            return
        self.failed_at = min(self.failed_at, time.monotonic())
        self.failures.append(error)

    def _cause_is_known(self) -> bool:
        if not self.failures:
            return False
        seconds = time.monotonic() - self.failed_at
        is_writing = any(node.beat.is_writing and not node.has_ended for node in self.nodes.nodes)
        if is_writing and all(each.kind == "exception" for each in self.failures):
            return seconds > WRITE_GRACE
        return not all(map(is_echo, self.failures)) or seconds > ECHO_GRACE

    def _make_stopped(self) -> TrainingStopped:
        reason = self.stop.reason
        for error in (node.error for node in self.nodes.nodes):
            if isinstance(error, TrainingStopped) and error.reason == reason:
                return error  # else they had ended already, to grow, or were killed
        how = "the ranks were killed" if self.stop.is_urgent else "the run was stopped"
        return TrainingStopped(f"{reason}: {how} at step {self.step}", reason)

    def _end(self) -> None:
        """Kill what still runs, and wait until the nodes that can be reached confirm it."""
        deadline = time.monotonic() + KILL_TIMEOUT
        if not self.has_ended:
            self.is_killed = True
            self.nodes.send("kill")
        while not self.has_ended and time.monotonic() < deadline:
            self._receive()
        self.nodes.close()


def is_echo(failure: RankFailure | NodeLost) -> bool:
    """Return whether a failure may be the consequence of another one."""
    return failure.is_consequence or failure.kind == "stall"


def find_cause(failures: Sequence[RankFailure | NodeLost]) -> RankFailure | NodeLost:
    """Return the failure that explains the others, of those alike the first; of a stall, the
    reports of all nodes as one.

    A program may raise an exception of its own because a node was lost, which is noticed later.
    """
    cause = min(failures, key=lambda each: (is_echo(each), each.kind == "exception"))
    if cause.kind == "stall":
        stalls = [each for each in failures if isinstance(each, RankFailure)]
        return join_stalls([each for each in stalls if each.kind == cause.kind])
    return cause
