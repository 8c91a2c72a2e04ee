"""The nodes of an attempt, as a place gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.launch.control.reference import Reference
from flyte_ddp.launch.control.states import Departure
from flyte_ddp.launch.protocol.messages import Beat, End, Outcome
from flyte_ddp.launch.protocol.programs import Job


@dataclass(eq=False)
class Node:
    """A machine that takes part in an attempt."""

    index: int = 0  # position in the order of the ranks
    label: str = ""  # name for people; "" for this machine
    worker: str = ""  # name of its Dask worker
    machine: str = ""  # name of its Kubernetes node; "" elsewhere
    beat: Beat = field(default_factory=Beat)  # the latest heartbeat
    departure: Departure | None = None  # announcement that it goes away
    end: End | None = None  # the end of its ranks; None while they may run
    is_silent: bool = False  # lost without a report of its end
    # slower than the others, by the node check, or it computes wrongly: the gang goes on without it
    # when it can
    is_slow: bool = False

    @property
    def outcome(self) -> Outcome | None:
        """How its ranks have ended; None before their end."""
        if self.end is None:
            return None
        return self.end.outcome

    def __str__(self) -> str:
        return self.label or "this machine"


class Nodes:
    """The nodes of one attempt, as a place gives them."""

    nodes: Sequence[Node]  # nodes in the order of their ranks
    world_size: int  # number of ranks
    namespace: str = ""  # namespace of the workers' pods; "" if they have none
    num_spares: int = 0  # further pods of the run, which cost as much as its nodes
    reference: Reference | None = None  # the check of the nodes uses it; None: no check

    @property
    def larger(self) -> int:
        """The number of nodes of a larger gang that is possible now; 0 for none."""
        return 0

    @property
    def can_do_without_leaving(self) -> bool:
        """True if enough nodes that neither leave nor are slow are there to start the next attempt
        now.
        """
        return False

    def replace_leaving(self) -> None:
        """Look for nodes that replace the leaving and the slow ones."""

    def start(self, job: Job, num_restarts: int) -> None:
        """Start the ranks. Raises NodeLost if a node does not answer."""

    def send(self, command: Any) -> None:
        """Send all nodes a command of messages.py. Nodes that were not started count as ended."""

    def messages(self) -> Iterable[tuple[Node, Any]]:
        """Return the messages that have arrived, with their nodes. Wait a moment if there are none.
        For a node that is gone, return a `Failed` and an `End`.
        """
        raise NotImplementedError

    def take_results(self, node: Node, names: Sequence[str]) -> list[bytes | None]:
        """Take away files that ranks of the node have submitted; see `take_files`. Any thread may
        call this. An error of any kind is possible if the node cannot be reached.
        """
        raise NotImplementedError

    def explain(self, failure: Exception) -> Exception:
        """Return the failure with further details of its cause. Called once, when all nodes have
        ended.
        """
        return failure

    def close(self) -> None:
        """Release the resources of the attempt. Its nodes have ended, or do not answer."""
