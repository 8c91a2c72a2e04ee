"""One attempt: the ranks of all nodes, from their common start to their common end.

Knows nothing of restarts: driver.py decides those. Nor what carries its commands and messages: a
place's `Nodes` do. states.py decides what it does next, causes.py which failure counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp import events
from flyte_ddp.checkpoints.memory import name_memory
from flyte_ddp.config.waits import ANSWER_TIMEOUT
from flyte_ddp.errors import NodeLost, RankFailure, TrainingStopped
from flyte_ddp.launch.control.causes import LIBRARIES, Failure, cause_grace, find_cause
from flyte_ddp.launch.control.paces import PaceWatch
from flyte_ddp.launch.control.stalls import (
    Suspicion,
    explain,
    head_line,
    judge,
    lost_failure,
    suspect,
)
from flyte_ddp.launch.control.states import (
    KILL_TIMEOUT,
    Departure,
    Ended,
    Facts,
    Killing,
    Running,
    Starting,
    State,
    Stopping,
    has_moved,
    next_state,
)
from flyte_ddp.launch.protocol.failures import find_place, first_line
from flyte_ddp.launch.protocol.messages import (
    Beat,
    Emitted,
    End,
    Failed,
    Go,
    Inspect,
    Inspected,
    InspectedRank,
    Kill,
    Leaving,
    Lines,
    Outcome,
    Stop,
    Submitted,
)
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest

# seconds for the answers about ranks that stand still: what an agent takes at most, and the network
INSPECT_TIMEOUT = ANSWER_TIMEOUT + 3.0


@dataclass(eq=False)
class Node:
    """A machine that takes part in an attempt."""

    index: int = 0  # in the order of the ranks
    label: str = ""  # for people; "" for this machine, which nobody needs to be told
    worker: str = ""  # name of its Dask worker
    beat: Beat = field(default_factory=Beat)  # the last
    departure: Departure | None = None  # if it has announced that it goes away
    outcome: Outcome | None = None  # of its ranks; None before their end
    is_silent: bool = False  # it was lost without a report of its end

    def __str__(self) -> str:
        return self.label or "this machine"


class Nodes:
    """The nodes of one attempt, as a place gives them."""

    nodes: Sequence[Node]  # in the order of their ranks
    world_size: int  # number of ranks

    @property
    def larger(self) -> int:
        """The number of nodes of a larger gang that is possible now; 0 for none."""
        return 0

    @property
    def can_do_without_leaving(self) -> bool:
        """The next attempt can start now without the nodes that leave: there are enough others."""
        return False

    def replace_leaving(self) -> None:
        """Look for nodes in place of those that leave."""

    def start(self, job: Job, num_restarts: int) -> None:
        """Start the ranks. Raises NodeLost if a node does not answer."""

    def send(self, command: Any) -> None:
        """Send all nodes a command of messages.py. Those that were not started have ended."""

    def messages(self) -> Iterable[tuple[Node, Any]]:
        """Return the messages that have arrived, with their nodes, waiting a moment for them if
        there are none. A node that is gone has a `Failed` and an `End` too.
        """
        raise NotImplementedError

    def take_results(self, node: Node, names: Sequence[str]) -> list[bytes | None]:
        """See `take_files`: these are files that ranks of the node have submitted. Any thread may
        call this. It may raise anything where the node cannot be reached.
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
    # takes a file that a rank has submitted away from its node; None where none are wanted
    take_result: Callable[[Nodes, Node, Submitted], None] | None = None

    state: State = field(default_factory=Starting)
    step: int = 0  # that the gang has reached
    progress_at: float = field(default_factory=time.monotonic)  # when it did
    # in the order in which they were noticed
    failures: list[Failure] = field(default_factory=list)
    # those of ranks that had been asked to end, which a signal may have ended
    late_failures: list[Failure] = field(default_factory=list)
    failed_at: float = float("inf")  # monotonic: when the first was
    # The node that has each part of the states that are in memory when it has ended.
    _parts: dict[tuple[int, ...], dict[int, int]] = field(default_factory=dict)
    # where ranks lost a peer in a collective, by their numbers
    _lost_peers: dict[int, str] = field(default_factory=dict)
    _stopped_how: str = ""  # as a node has it
    _suspicion: Suspicion | None = None  # the latest: each is looked into once
    _question: Inspect = field(default_factory=Inspect)
    _asked_at: float = 0.0  # monotonic; 0 when there is no open question
    _answers: dict[int, list[InspectedRank]] = field(default_factory=dict)  # by node

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
        try:
            self.nodes.start(job, num_restarts)
            self.nodes.send(Go())
            while not isinstance(self.state, Ended):
                self._advance(job.program)
        finally:
            if not isinstance(self.state, Ended):
                self._enter(Killing(time.monotonic() + KILL_TIMEOUT))
            while not isinstance(self.state, Ended):
                self._advance(job.program)
            self.nodes.close()
        if all(each is Outcome.DONE for each in self.state.outcomes):
            return True
        if self.stop.is_set():
            raise next((each for each in self.failures if each.is_user_error), self._make_stopped())
        if has_moved(self.state, bool(self.failures)):
            return False
        raise self._explain()

    def _advance(self, program: Program) -> None:
        self._receive()
        self._look_into_stall(program)
        state = next_state(self.state, self._facts(program))
        if state != self.state:
            self._enter(state)

    def _facts(self, program: Program) -> Facts:
        nodes = self.nodes.nodes
        return Facts(
            time.monotonic(),
            tuple(node.outcome for node in nodes),
            is_cause_known=self._is_cause_known(),
            stop_reason=self.stop.reason,
            stop_grace=self.stop.grace,
            is_urgent=self.stop.is_urgent,
            departures=self.departures,
            can_do_without_leaving=self.nodes.can_do_without_leaving,
            larger=self.nodes.larger,
            is_stoppable=any(node.beat.is_stoppable for node in nodes),
            save_timeout=program.store_timeout,
        )

    def _enter(self, state: State) -> None:
        self.state = state
        if isinstance(state, Stopping):
            grace = max(0.0, state.deadline - KILL_TIMEOUT - time.monotonic())
            self.nodes.send(Stop(state.reason, grace))
        elif isinstance(state, Killing):
            self.nodes.send(Kill())

    @property
    def departures(self) -> list[Departure]:
        """The announcements of nodes that they go away."""
        return [node.departure for node in self.nodes.nodes if node.departure]

    @property
    def reason(self) -> str:
        """Why a gang that nothing has failed in ends."""
        after = self.state.after if isinstance(self.state, (Killing, Ended)) else None
        return after.reason if after else ""

    def in_memory(self) -> tuple[int, str]:
        """Return the step of the newest state that is left in memory to go on from, and where it
        is; 0 for none.
        """
        found = [
            (attempt, turn, step, [*of.values()])
            for (step, attempt, turn, num_parts), of in self._parts.items()
            if len(of) == num_parts
        ]
        *_, step, nodes = max(found, default=(0, 0, 0, [0]))
        return step, name_memory(nodes, len(self.nodes.nodes))

    def ended(self, reason: str) -> events.AttemptEnded:
        """Return the event of the end of this attempt, now."""
        idle = time.monotonic() - self.progress_at
        return events.AttemptEnded(self.step, reason, idle, len(self.departures))

    def _receive(self) -> None:
        for node, message in self.nodes.messages():
            match message:
                case Beat():
                    node.beat = message
                    self._note_step(message.step)
                    self.paces.note(node.label, message.paces, self.step)
                case Leaving(seconds) if node.departure is None:
                    node.departure = Departure.announce(str(node), seconds, time.monotonic())
                    if isinstance(self.state, (Starting, Running)):
                        self.nodes.replace_leaving()
                case Emitted(event):
                    self._note_step(getattr(event, "step", 0))
                    self.emit(event)
                case Submitted() if self.take_result:
                    self.take_result(self.nodes, node, message)
                case Lines(lines):
                    prefix = f"[node {node.index}] " if self.shows_nodes else ""
                    for line in lines:
                        self.relay(f"{prefix}{line}")
                case Failed(failure) if node.outcome is None:
                    self._note_failure(node, failure)
                case Inspected(number, ranks) if number == self._question.number:
                    self._answers[node.index] = ranks
                    for rank in ranks:
                        rank.node = node.label
                case End() if node.outcome is None:
                    self._note_end(node, message)

    def _note_end(self, node: Node, end: End) -> None:
        node.outcome = end.outcome
        for *state, number, num_parts in end.parts:
            self._parts.setdefault((*state, num_parts), {}).setdefault(number, node.index)
        if end.outcome is Outcome.STOPPED:
            self._stopped_how = self._stopped_how or end.how
        elif end.outcome is Outcome.KILLED and isinstance(self.state, (Starting, Running)):
            self._note_failure(node, NodeLost(end.how))  # its agent has lost this driver

    def _note_step(self, step: int) -> None:
        if step > self.step:
            self.step, self.progress_at = step, time.monotonic()

    def _note_failure(self, node: Node, failure: Failure) -> None:
        """Note how the ranks of a node have failed."""
        if isinstance(failure, RankFailure):
            if failure.is_consequence and LIBRARIES.search(failure.cause):
                self._lost_peers[failure.rank] = find_place(reversed(str(failure).splitlines()))
            failure = explain(failure)
            if node.label:
                failure.args = (f"{node}: {failure}",)
            is_late = isinstance(self.state, Stopping) and not failure.is_user_error
        else:
            failure.args = (f"{node} was lost: {failure}",)
            failure.worker = "" if node.is_silent else node.worker
            is_late = False
        (self.late_failures if is_late else self.failures).append(failure)
        self.failed_at = min(self.failed_at, time.monotonic())

    def _is_cause_known(self) -> bool:
        failures = [*self.failures, *self.late_failures]
        if not failures:
            return False
        running = [node.beat for node in self.nodes.nodes if node.outcome is None]
        grace = cause_grace(
            failures,
            len(self.nodes.nodes),
            any(beat.is_writing for beat in running),
            any(beat.is_ending for beat in running),
        )
        return time.monotonic() - self.failed_at >= grace

    def _look_into_stall(self, program: Program) -> None:
        """Ask the agents where their ranks are if they may stand still, and judge the answers."""
        if not isinstance(self.state, Running) or self.failures:
            return
        nodes = self.nodes.nodes
        if not self._asked_at:
            beats = [node.beat for node in nodes]
            found = suspect(
                beats, self.nodes.world_size, program.stall_timeout, program.left_timeout
            )
            before = self._suspicion
            if found is None or (before is not None and before.left == found.left):
                return
            self._suspicion, self._asked_at = found, time.monotonic()
            self._question = Inspect(self._question.number + 1)
            self._answers.clear()
            self.nodes.send(self._question)
        missing = [each for each in nodes if not each.outcome and each.index not in self._answers]
        if missing and time.monotonic() - self._asked_at < INSPECT_TIMEOUT:
            return
        assert self._suspicion is not None  # which was asked about
        self._asked_at = 0.0
        ranks = [rank for index in sorted(self._answers) for rank in self._answers[index]]
        if failure := judge(self._suspicion, ranks, program.stall_timeout):
            for rank in [] if self._suspicion.left else ranks:
                for line in (head_line([rank]), *rank.stacks.splitlines()):
                    self.relay(f"[rank {rank.number}] {line}")
            self.failures.append(failure)
            self.failed_at = time.monotonic()

    def _explain(self) -> Exception:
        """Return the failure that has ended the gang."""
        if not self.failures:
            return NodeLost(
                f"nodes did not end in time after they were asked to, because {self.reason}"
            )
        nodes, cause = self.nodes.nodes, find_cause(self.failures)
        ended = [number for node in nodes for number in node.beat.ended]
        if isinstance(cause, RankFailure):
            if cause.rank in self._lost_peers and ended:  # of nothing else that ended
                return lost_failure(cause.rank, ended, self._lost_peers[cause.rank])
            # Where no other node could be lost, a connection that the error names is the program's
            # own.
            cause.is_consequence &= len(nodes) > 1
        return cause if self.departures else self.nodes.explain(cause)

    def _make_stopped(self) -> TrainingStopped:
        assert isinstance(self.state, Ended)
        reason, at = self.stop.reason, f"at step {self.step}"
        if self.late_failures:
            how = f"the run was stopped {at} ({first_line(find_cause(self.late_failures))})"
        elif self.stop.is_urgent or not {Outcome.KILLED, None}.isdisjoint(self.state.outcomes):
            how = f"the ranks were killed {at}"
        else:
            how = self._stopped_how or f"the run was stopped {at}"
        return TrainingStopped(f"{reason}: {how}", reason)
