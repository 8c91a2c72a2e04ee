"""The nodes of an attempt, as a place gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.launch.control.states import Departure
from flyte_ddp.launch.protocol.messages import Beat, End, Outcome
from flyte_ddp.launch.protocol.programs import Job


@dataclass(eq=False)
class Node:
    """A machine that takes part in an attempt."""

    index: int = 0  # in the order of the ranks
    label: str = ""  # for people; "" for this machine, which nobody needs to be told
    worker: str = ""  # name of its Dask worker
    beat: Beat = field(default_factory=Beat)  # the last
    departure: Departure | None = None  # if it has announced that it goes away
    end: End | None = None  # of its ranks; None before it
    is_silent: bool = False  # it was lost without a report of its end

    @property
    def outcome(self) -> Outcome | None:
        """How its ranks have ended; None before their end."""
        return self.end.outcome if self.end else None

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
