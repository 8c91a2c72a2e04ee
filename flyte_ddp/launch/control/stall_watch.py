"""Watch for a gang that stands still: ask agents where their ranks are, and judge the answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flyte_ddp.config.waits import ANSWER_TIMEOUT
from flyte_ddp.errors import RankFailure
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.control.stalls import Suspicion, head_line, judge, suspect
from flyte_ddp.launch.protocol.messages import Inspect, Inspected, InspectedRank
from flyte_ddp.launch.protocol.programs import Program

# seconds to wait for answers about stalled ranks: the most that an agent takes, and the network
INSPECT_TIMEOUT = ANSWER_TIMEOUT + 3.0


@dataclass(eq=False)
class StallWatch:
    """Looks for ranks of one attempt that stand still."""

    nodes: Nodes
    relay: Callable[[str], None]  # called with each line of the stacks
    _suspicion: Suspicion | None = None  # the latest suspicion; each is looked into once
    _question: Inspect = field(default_factory=Inspect)
    _asked_at: float = 0.0  # monotonic; 0 when there is no open question
    _answers: dict[int, list[InspectedRank]] = field(default_factory=dict)  # answers by node

    def look(self, program: Program) -> RankFailure | None:
        """Ask the agents about ranks that may stand still. Return the failure once it is certain,
        and None until then.
        """
        if not self._asked_at:
            self._ask(program)
        if not self._asked_at or not self._has_answers():
            return None
        assert self._suspicion is not None  # the question was about it
        self._asked_at = 0.0
        ranks = [rank for index in sorted(self._answers) for rank in self._answers[index]]
        failure = judge(self._suspicion, ranks, program.needs.stall_timeout)
        if failure and not self._suspicion.left:
            self._show_stacks(ranks)
        return failure

    def take(self, node: Node, answer: Inspected) -> None:
        """Take an agent's answer. An answer to an earlier question is ignored."""
        if answer.number == self._question.number:
            self._answers[node.index] = answer.ranks
            for rank in answer.ranks:
                rank.node = node.label

    def _ask(self, program: Program) -> None:
        beats = [node.beat for node in self.nodes.nodes]
        found = suspect(
            beats, self.nodes.world_size, program.needs.stall_timeout, program.left_timeout
        )
        before = self._suspicion
        if found is None or (before is not None and before.left == found.left):
            return
        self._suspicion, self._asked_at = found, time.monotonic()
        self._question = Inspect(self._question.number + 1)
        self._answers.clear()
        self.nodes.send(self._question)

    def _has_answers(self) -> bool:
        """Return whether all nodes with ranks have answered, or had the time for it."""
        if time.monotonic() - self._asked_at >= INSPECT_TIMEOUT:
            return True
        running = [node.index for node in self.nodes.nodes if not node.outcome]
        return all(index in self._answers for index in running)

    def _show_stacks(self, ranks: Iterable[InspectedRank]) -> None:
        for rank in ranks:
            for line in (head_line([rank]), *rank.stacks.splitlines()):
                self.relay(f"[rank {rank.number}] {line}")
