"""One attempt: the ranks of all nodes, from their common start to their common end.

Knows nothing of restarts, which driver.py decides. Does not know how its commands and messages
travel: the `Nodes` of a place carry them. states.py decides the next state, and gang_failures.py
chooses the failure that counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flyte_ddp import events
from flyte_ddp.checkpoints.memory import name_memory
from flyte_ddp.errors import NodeLost, TrainingStopped, first_line
from flyte_ddp.launch.control.gang_failures import Failures, find_cause, is_wrong_result
from flyte_ddp.launch.control.inspection import Inspection
from flyte_ddp.launch.control.node_check import NodeCheck
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.control.paces import PaceWatch
from flyte_ddp.launch.control.states import (
    KILL_TIMEOUT,
    REPORT_TIMEOUT,
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
from flyte_ddp.launch.protocol.messages import (
    Beat,
    Checked,
    Emitted,
    End,
    Failed,
    Go,
    Inspected,
    Kill,
    Leaving,
    Lines,
    Outcome,
    Profiled,
    Stop,
    Submitted,
)
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.protocol.signals import StopRequest

logger = logging.getLogger(__name__)

# Takes a file that a rank has submitted from its node.
TakeResult = Callable[[Nodes, Node, Submitted], None]


class Attempt:
    """One gang, from its start to its end on every node."""

    def __init__(
        self,
        nodes: Nodes,
        emit: Callable[[events.Event], None],
        relay: Callable[[str], None],
        stop: StopRequest,
        shows_nodes: bool = False,  # each line of a rank begins with its node
        take_result: TakeResult | None = None,  # None where no files are wanted
    ) -> None:
        self.nodes, self.stop = nodes, stop
        self.state: State = Starting()
        self.failures = Failures(nodes.nodes, nodes.world_size)
        self.inspection = Inspection(nodes, relay)
        self.check = NodeCheck(nodes, emit)
        self.receiver = Receiver(
            nodes,
            self.failures,
            self.inspection,
            self.check,
            emit,
            relay,
            shows_nodes,
            take_result,
        )

    def train(self, job: Job, num_restarts: int) -> bool:
        """Run the gang to its end. After that, no rank runs on a node that can be reached.

        Returns:
            True if the run is finished; False if the gang has ended, after a checkpoint, to start
            again larger, or without the nodes that leave.

        Raises:
            RankFailure: a rank failed. As far as is known, it is the cause and not a consequence.
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
            raise next(
                (each for each in self.failures.noted if each.is_user_error), self._make_stopped()
            )
        if has_moved(self.state, bool(self.failures)):
            return False
        raise self._explain()

    def _advance(self, program: Program) -> None:
        self.receiver.receive(self.state)
        if isinstance(self.state, Running) and not self.failures:
            stall = self.inspection.look(program)
            if stall:
                self.failures.add(stall)
            if not self.inspection.is_asking:
                self.check.look()
            self._leave_slow_nodes(program)
        state = next_state(self.state, self._facts(program))
        if state != self.state:
            self._enter(state)

    def _leave_slow_nodes(self, program: Program) -> None:
        """Let slow nodes leave as soon as the ranks can save their state, if there are others in
        their place, or enough without them.
        """
        slow = [node for node in self.nodes.nodes if node.is_slow]
        if not slow or self.departures or not self.nodes.can_do_without_leaving:
            return
        if not self.nodes.larger and time.monotonic() < self.check.replaced_by:
            return
        if any(node.beat.is_stoppable for node in self.nodes.nodes):
            for node in slow:
                seconds, now = program.needs.store_timeout, time.monotonic()
                node.departure = Departure.announce(str(node), seconds, now)

    def _facts(self, program: Program) -> Facts:
        nodes = self.nodes.nodes
        return Facts(
            time.monotonic(),
            tuple(node.outcome for node in nodes),
            is_cause_known=self.failures.is_cause_known(),
            stop_reason=self.stop.reason,
            stop_grace=self.stop.grace,
            is_urgent=self.stop.is_urgent,
            departures=self.departures,
            can_do_without_leaving=self.nodes.can_do_without_leaving,
            larger=self.nodes.larger,
            is_stoppable=any(node.beat.is_stoppable for node in nodes),
            save_timeout=program.needs.store_timeout,
        )

    def _enter(self, state: State) -> None:
        self.state = state
        if isinstance(state, Stopping):
            grace = max(0.0, state.deadline - REPORT_TIMEOUT - time.monotonic())
            self.nodes.send(Stop(state.reason, grace))
        elif isinstance(state, Killing):
            self.nodes.send(Kill())
        elif isinstance(state, Ended):
            for node in self.nodes.nodes:
                if node.end is None:
                    logger.warning(
                        "%s did not confirm the end of its ranks: a state in its memory is lost",
                        node,
                    )

    @property
    def step(self) -> int:
        """The latest step of the gang."""
        return self.receiver.step

    @property
    def departures(self) -> list[Departure]:
        """The announced departures of nodes."""
        return [node.departure for node in self.nodes.nodes if node.departure]

    @property
    def reason(self) -> str:
        """The reason why a gang without a failure ends; "" if there is none."""
        if isinstance(self.state, (Killing, Ended)) and self.state.after:
            return self.state.after.reason
        return ""

    def in_memory(self) -> tuple[int, str]:
        """Return the step of the newest complete state in memory, and the name of its place; 0 if
        there is none.
        """
        places: dict[tuple[int, ...], dict[int, int]] = {}  # node of each part, for each state
        for node in self.nodes.nodes:
            if node.end is None:
                continue
            for *state, number, num_parts in node.end.parts:
                places.setdefault((*state, num_parts), {}).setdefault(number, node.index)
        found = [
            (attempt, turn, step, [*of.values()])
            for (step, attempt, turn, num_parts), of in places.items()
            if len(of) == num_parts
        ]
        *_, step, nodes = max(found, default=(0, 0, 0, [0]))
        return step, name_memory(nodes, len(self.nodes.nodes))

    def ended(self, reason: str) -> events.AttemptEnded:
        """Return the event of the end of this attempt, now."""
        idle = time.monotonic() - self.receiver.progress_at
        return events.AttemptEnded(self.step, reason, idle, len(self.departures))

    def _explain(self) -> Exception:
        """Return the failure that has ended the gang."""
        if not self.failures:
            return NodeLost(
                f"nodes did not end in time after they were asked to, because {self.reason}"
            )
        cause = self.failures.explain()
        if is_wrong_result(cause) and self.nodes.can_do_without_leaving:
            for node in self.nodes.nodes:
                if node.is_slow:
                    node.departure = Departure.announce(str(node), 0.0, time.monotonic())
        if self.departures:
            return cause
        return self.nodes.explain(cause)

    def _make_stopped(self) -> TrainingStopped:
        assert isinstance(self.state, Ended)
        reason, at = self.stop.reason, f"at step {self.step}"
        if self.failures.late:
            how = f"the run was stopped {at} ({first_line(find_cause(self.failures.late))})"
        elif self.stop.is_urgent or not {Outcome.KILLED, None}.isdisjoint(self.state.outcomes):
            how = f"the ranks were killed {at}"
        else:
            reports = [node.end.how for node in self.nodes.nodes if node.end and node.end.how]
            how = next(iter(reports), f"the run was stopped {at}")
        return TrainingStopped(f"{reason}: {how}", reason)


@dataclass(eq=False)
class Receiver:
    """Takes messages to the nodes and the watches of one attempt that they concern."""

    nodes: Nodes
    failures: Failures
    inspection: Inspection
    check: NodeCheck
    emit: Callable[[events.Event], None]
    relay: Callable[[str], None]
    shows_nodes: bool
    take_result: TakeResult | None

    step: int = 0  # latest step of the gang
    progress_at: float = field(default_factory=time.monotonic)  # time of that step

    def __post_init__(self) -> None:
        self.paces = PaceWatch(self.nodes.world_size, self.emit)

    def receive(self, state: State) -> None:
        """Take the messages that have arrived. Wait a moment if there are none.

        Args:
            state: the state of the attempt.
        """
        is_running = isinstance(state, (Starting, Running))
        for node, message in self.nodes.messages():
            match message:
                case Beat():
                    node.beat = message
                    self._note_step(message.step)
                    self.paces.note(node.label, message.paces, self.step)
                case Leaving(seconds) if node.departure is None:
                    node.departure = Departure.announce(str(node), seconds, time.monotonic())
                    if is_running:
                        self.nodes.replace_leaving()
                case Emitted(event):
                    self._note_step(getattr(event, "step", 0))
                    self.emit(event)
                case Submitted() if self.take_result:
                    self.take_result(self.nodes, node, message)
                case Lines(lines):
                    self._relay_lines(node, lines)
                case Failed(failure) if node.outcome is None:
                    self.failures.add_of(node, failure, isinstance(state, Stopping))
                case Inspected():
                    self.inspection.take(node, message)
                case Checked():
                    self.check.take(node, message)
                case Profiled():
                    self.inspection.take_profile(message)
                case End() if node.outcome is None:
                    node.end = message
                    if message.outcome is Outcome.KILLED and is_running:
                        lost = NodeLost(message.how)  # the agent has lost this driver
                        self.failures.add_of(node, lost, is_stopping=False)

    def _relay_lines(self, node: Node, lines: Sequence[str]) -> None:
        prefix = ""
        if self.shows_nodes:
            prefix = f"[node {node.index}] "
        for line in lines:
            self.relay(f"{prefix}{line}")

    def _note_step(self, step: int) -> None:
        if step > self.step:
            self.step, self.progress_at = step, time.monotonic()
