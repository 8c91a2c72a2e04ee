"""Heartbeats between the driver and the nodes of an attempt, and what their absence means."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distributed import Client

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config.waits import ANSWER_TIMEOUT, BEAT_INTERVAL
from flyte_ddp.launch.nodes.dask.assignment import DaskNode
from flyte_ddp.launch.nodes.dask.calls import send_command
from flyte_ddp.launch.protocol.messages import Go

# seconds for the code to reach a worker, and at least for its agent to start and report: a busy
# machine imports slowly
START_TIMEOUT = 60.0
# further seconds for each node of the gang until one that has not taken its job counts as lost
JOB_SECONDS = 0.02
# seconds for each node of the gang between two repetitions of a command, which costs the scheduler
# more than half a millisecond for each node
COMMAND_SECONDS = 0.004
GO_BEATS = 5  # within `node_timeout`, while all nodes train: each costs the scheduler a message


@dataclass
class RepeatedCommand:
    """The current command to all nodes, which also shows them that the driver is there."""

    client: Client
    plugin: str  # the name of the run's plugin in the workers
    nodes: Sequence[DaskNode]
    config: ClusterConfig
    _content: bytes = b""
    _is_go: bool = False  # no node needs to do anything about the command
    _next_at: float = 0.0  # monotonic: when to send the command again

    def change(self, command: Any) -> None:
        self._content, self._next_at = pickle.dumps(command), 0.0
        self._is_go = isinstance(command, Go)
        if self._is_go:  # the job has just shown that the driver is there
            self._next_at = time.monotonic() + BEAT_INTERVAL

    def repeat(self) -> None:
        """Send the command to every node, about every second, because one may get lost.

        Over 250 nodes get it less often. Nodes that all train only need to know that the driver is
        there.
        """
        if time.monotonic() < self._next_at:
            return
        interval = max(BEAT_INTERVAL, COMMAND_SECONDS * len(self.nodes))
        if self._is_go and all(node.is_started or node.outcome for node in self.nodes):
            interval = max(interval, self.config.node_timeout / GO_BEATS)
        self._next_at = time.monotonic() + interval
        # Without waiting: a scheduler that does not answer must not delay the driver.
        self.client.loop.add_callback(send_command, self.client, self.plugin, self._content)


@dataclass
class SilenceWatch:
    """The judgement about nodes that send no messages."""

    num_nodes: int  # number of nodes in the gang
    node_timeout: float  # seconds
    admitted_at: float = 0.0  # monotonic: when a node last took its job

    def find_loss(self, node: DaskNode) -> str:
        """Return why no more messages can come from a node; "" if they can. The node has not sent
        its end.
        """
        silence, limit = time.monotonic() - node.last_message_at, self.node_timeout
        if node.is_started and silence > limit:
            node.is_silent = True
            return f"it has been silent for {silence:.0f} s (node_timeout: {limit:g})"
        # A thousand nodes take their jobs in line, for longer than one may take.
        since_others = time.monotonic() - self.admitted_at
        patience = ANSWER_TIMEOUT + JOB_SECONDS * self.num_nodes
        if not node.is_admitted and min(silence, since_others) > patience:
            return f"it does not answer: it did not take its job within {silence:.0f} s"
        if not node.is_started and silence > max(limit, START_TIMEOUT):
            return f"its agent has not started within {silence:.0f} s"
        return ""
