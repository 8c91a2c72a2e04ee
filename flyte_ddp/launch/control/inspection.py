"""Ask agents where their ranks are: because the gang may stand still, or because a user asks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from flyte_ddp.config.waits import ANSWER_TIMEOUT
from flyte_ddp.errors import RankFailure
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.control.stalls import Suspicion, go_on, judge, list_stacks, suspect
from flyte_ddp.launch.protocol.messages import (
    Inspect,
    Inspected,
    InspectedRank,
    Profile,
    Profiled,
)
from flyte_ddp.launch.protocol.programs import Program

# seconds to wait for answers about ranks: the most that an agent takes, and the network
INSPECT_TIMEOUT = ANSWER_TIMEOUT + 3.0

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Order:
    """What a user asks of an attempt: the stacks of all ranks, and then perhaps a profile."""

    profile: Profile
    is_profile: bool  # False: the stacks only
    has_begun: bool = False
    ranks: list[InspectedRank] = field(default_factory=list)  # answers of the agents
    profiled: Profiled = field(default_factory=Profiled)  # answer of the rank
    is_done: bool = False


@dataclass(eq=False)
class Inspection:
    """Looks for ranks of one attempt that stand still, and carries out the orders of users."""

    nodes: Nodes
    relay: Callable[[str], None]  # called with each line of the stacks
    order: Order | None = None  # the newest order; another thread sets it
    _suspicion: Suspicion | None = None  # the latest suspicion; each is looked into once
    _asked_for: Order | None = None  # the order that the open question is for; None for a suspicion
    _question: Inspect = field(default_factory=Inspect)
    _asked_at: float = 0.0  # monotonic; 0 when there is no open question
    _answers: dict[int, list[InspectedRank]] = field(default_factory=dict)  # answers by node

    @property
    def is_asking(self) -> bool:
        """True while agents have not all answered a question."""
        return self._asked_at > 0

    def look(self, program: Program) -> RankFailure | None:
        """Ask the agents about ranks that may stand still, or for a user. Return the failure once
        it is certain, and None until then.
        """
        if not self._asked_at:
            self._ask(program)
        if not self._asked_at or not self._has_answers():
            return None
        self._asked_at = 0.0
        ranks = [rank for index in sorted(self._answers) for rank in self._answers[index]]
        order = self._asked_for
        if order:
            order.ranks, order.is_done = ranks, not order.is_profile
            if order.is_profile:
                self.nodes.send(order.profile)
            return None
        assert self._suspicion is not None  # the question was about it
        stall_timeout = program.needs.stall_timeout
        by_node = [self._answers.get(index, []) for index in self._running]
        if not self._suspicion.left and go_on(by_node, stall_timeout):
            seconds = self._suspicion.seconds
            logger.warning("no rank made progress for %.0f s; now they go on", seconds)
            self._suspicion = None
            return None
        failure = judge(self._suspicion, ranks, stall_timeout)
        if failure and not self._suspicion.left:
            for line in list_stacks(ranks):
                self.relay(line)
        return failure

    def take(self, node: Node, answer: Inspected) -> None:
        """Take an agent's answer. An answer to an earlier question is ignored."""
        if answer.number == self._question.number:
            self._answers[node.index] = answer.ranks
            for rank in answer.ranks:
                rank.node = node.label

    def take_profile(self, profiled: Profiled) -> None:
        """Take a rank's answer. An answer to an earlier order is ignored."""
        if self.order and self.order.profile.id == profiled.id:
            self.order.profiled, self.order.is_done = profiled, True

    def _ask(self, program: Program) -> None:
        """Ask where the ranks are, for a new order or about a new suspicion."""
        self._asked_for = None
        if self.order and not self.order.has_begun:
            self._asked_for, self.order.has_begun = self.order, True
        else:
            beats, size = [node.beat for node in self.nodes.nodes], self.nodes.world_size
            found = suspect(beats, size, program.needs.stall_timeout, program.left_timeout)
            before = self._suspicion
            if found is None or (before is not None and before.left == found.left):
                return
            self._suspicion = found
        self._asked_at = time.monotonic()
        self._question = Inspect(self._question.number + 1)
        self._answers.clear()
        self.nodes.send(self._question)

    def _has_answers(self) -> bool:
        """Return whether all nodes with ranks have answered, or had the time for it."""
        if time.monotonic() - self._asked_at >= INSPECT_TIMEOUT:
            return True
        return all(index in self._answers for index in self._running)

    @property
    def _running(self) -> list[int]:
        """The indices of the nodes with ranks."""
        return [node.index for node in self.nodes.nodes if not node.outcome]
