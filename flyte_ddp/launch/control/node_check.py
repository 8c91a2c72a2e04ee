"""Compare the nodes of a gang while their ranks import, and name those that are slow.

The agents measure (launch/agent/node_check.py). Three questions follow one another: how fast is the
machine, how fast do the bytes of its neighbours arrive, and both again if any node seems slow. Only
what is slow twice is named, because a rate that is bad once may have been disturbed. Nothing waits
for the answers. `find_slow` and `rate_links` are pure; tests/launch/test_node_check.py has their
tables.
"""

from __future__ import annotations

import logging
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flyte_ddp import events
from flyte_ddp.launch.control.nodes import Node, Nodes
from flyte_ddp.launch.protocol.messages import Check, Checked, Go

MIN_SHARE = 0.7  # least share of the median; a node with less is slow
# Least share of a rate that depends on the other work of a machine, and of a rate that was stored.
# Two threads of one core slow each other down to 0.64.
MIN_SHARE_BESIDE_WORK = 0.6
DISTURBED = ("core speed", "memory")
OF_CPU = (events.CORES, *DISTURBED)
# Bytes per second that are enough: what is above varies with the load. One core copies from memory
# at half its rate while others do.
ENOUGH = {"memory": 5e9, "disk": 50e6, "network": 125e6, events.LOSSES: 50.0}
MIN_LOSS = 1e-4  # smaller shares of lost bytes count as this one
# seconds for an idle worker to be found in place of a slow one, before the gang goes on smaller
REPLACEMENT_TIMEOUT = 5.0
CHECK_TIMEOUT = 60.0  # seconds for the answers to one question; agents take some to start

logger = logging.getLogger(__name__)

Rates = Mapping[int, Mapping[str, float]]
"""The rates of each node, by its index and the name of the probe."""


def find_slow(rates: Rates, reference: Mapping[str, float]) -> dict[tuple[int, str], float]:
    """Return the median by node and probe, for each rate that is too small.

    Args:
        reference: takes the place of the median for a kind of probe with fewer than three rates.
    """
    slow = {}
    for kind, found in _sort_by_kind(rates).items():
        median, share = reference.get(kind, 0.0), MIN_SHARE_BESIDE_WORK
        what = kind.partition(" (")[0]
        if len(found) > 2:
            median = statistics.median(found.values())
            if what not in DISTURBED:
                share = MIN_SHARE
        median = min(median, ENOUGH.get(what, math.inf))
        for key, rate in found.items():
            if rate < share * median:
                slow[key] = median
    return slow


def _sort_by_kind(rates: Rates) -> dict[str, dict[tuple[int, str], float]]:
    """Return rates by node and probe, for each kind of probe. All GPUs of a model are one kind."""
    by_kind: dict[str, dict[tuple[int, str], float]] = {}
    for node, each in rates.items():
        for probe, rate in each.items():
            by_kind.setdefault(re.sub(r"GPU \S+", "GPU", probe), {})[node, probe] = rate
    return by_kind


def _part(probe: str) -> str:
    """Return the part of a node that a probe measures. A network that loses packets may be slow at
    one look, and too slow to count them.
    """
    if probe == events.LOSSES:
        return "network"
    return probe


def _intervals(losses: Mapping[int, float]) -> dict[int, float]:
    """Return the bytes between two lost ones, for each share of lost bytes."""
    return {sender: 1 / max(loss, MIN_LOSS) for sender, loss in losses.items()}


def rate_links(links: Mapping[int, Mapping[int, float]]) -> dict[int, float]:
    """Return the rate of each node's network, from the rates at which nodes receive bytes of
    others.

    A node counts by the best of its links in each direction: the other end of a bad link may be to
    blame. Of two nodes, the sender is.

    Args:
        links: by the node that receives, and the node that sends.
    """
    rates = {}
    nodes = {*links, *(sender for each in links.values() for sender in each)}
    for node in nodes:
        sent = [each[node] for each in links.values() if node in each]
        received = list(links.get(node, {}).values())
        if len(nodes) == 2 and sent:
            rates[node] = max(sent)
        elif len(nodes) > 2 and received:
            rates[node] = min(max(sent, default=math.inf), max(received))
    return rates


@dataclass(eq=False)
class NodeCheck:
    """The check of the nodes of one attempt."""

    nodes: Nodes
    emit: Callable[[events.Event], None]
    _question: Check | None = None  # the latest question
    _asked_at: float = 0.0  # monotonic
    _answers: dict[int, Checked] = field(default_factory=dict)  # answers by node
    _rates: dict[int, dict[str, float]] = field(default_factory=dict)
    _addresses: list[tuple[str, int]] = field(default_factory=list)
    # slow nodes and what is slow about them, at the first look
    _suspects: set[tuple[int, str]] = field(default_factory=set)
    is_over: bool = False
    replaced_by: float = 0.0  # monotonic: end of the search for other nodes

    def look(self) -> None:
        """Ask the next question, or conclude, once the answers are there. Does not wait."""
        if self.nodes.reference is None or self.is_over:
            return
        if self._question is None:
            self._ask(Check(1, is_machine=True))
            return
        is_late = time.monotonic() - self._asked_at > CHECK_TIMEOUT
        if len(self._answers) < len(self.nodes.nodes) and not is_late:
            return
        self._take_rates()
        if self._question.number == 1:
            answers = [self._answers.get(node.index) for node in self.nodes.nodes]
            self._addresses = [each.address for each in answers if each and each.address[1]]
            if len(self._addresses) < len(self.nodes.nodes):
                self._addresses = []  # a node that did not answer may be anywhere in the order
            self._ask(Check(2, is_machine=False, addresses=self._addresses))
        else:
            self._judge(self._question.number)

    def take(self, node: Node, answer: Checked) -> None:
        """Take an agent's answer. An answer to an earlier question is ignored."""
        if self._question is None or answer.number != self._question.number:
            return
        self._answers[node.index] = answer
        if answer.problems:
            logger.warning("%s could not be checked: %s", node, "; ".join(answer.problems))

    def _ask(self, question: Check) -> None:
        self._question, self._asked_at = question, time.monotonic()
        self._answers.clear()
        self.nodes.send(question)

    def _take_rates(self) -> None:
        for index, answer in self._answers.items():
            rates = self._rates.setdefault(index, {})
            for name, rate in answer.rates.items():
                probe = name
                if name in OF_CPU:  # other models have other cores and memory
                    probe = f"{name} ({answer.model or 'CPU'})"
                rates[probe] = rate
        links = {index: answer.links for index, answer in self._answers.items() if answer.links}
        intervals = {
            index: _intervals(answer.losses)
            for index, answer in self._answers.items()
            if answer.losses
        }
        for probe, found in (("network", links), (events.LOSSES, intervals)):
            for index, rate in rate_links(found).items():
                self._rates.setdefault(index, {})[probe] = rate

    def _judge(self, number: int) -> None:
        """Conclude from the rates: ask again if any is suspicious for the first time."""
        assert self.nodes.reference is not None  # `look` has checked it
        slow = find_slow(self._rates, self.nodes.reference.rates)
        if slow and number == 2:
            self._suspects = {(index, _part(probe)) for index, probe in slow}
            self._rates.clear()
            self._ask(Check(3, is_machine=True, addresses=self._addresses))
            return
        self.is_over = True
        self.nodes.send(Go())  # a command is repeated, and a question names a thousand addresses
        confirmed = {
            (index, probe): median
            for (index, probe), median in slow.items()
            if (index, _part(probe)) in self._suspects
        }
        if confirmed:
            self._name(confirmed)
            return
        by_kind = _sort_by_kind(self._rates)
        medians = {kind: statistics.median_high(each.values()) for kind, each in by_kind.items()}
        found = {kind: median for kind, median in medians.items() if median > 0}
        logger.info("none of %d nodes is slow", len(self.nodes.nodes))
        self.nodes.reference.add(found)

    def _name(self, slow: Mapping[tuple[int, str], float]) -> None:
        """Name the slow nodes, and look for others."""
        named = []
        for node in self.nodes.nodes:
            for (index, probe), median in slow.items():
                if index == node.index:
                    node.is_slow = True
                    rate = self._rates[index][probe]
                    named.append(events.SlowNode(index, str(node), probe, rate, median))
        for each in named:
            logger.warning("%s", each)
        self.emit(events.NodesFoundSlow(named))
        if self.nodes.reference:
            self.nodes.reference.add_slow(each.machine for each in self.nodes.nodes if each.is_slow)
        self.replaced_by = time.monotonic() + REPLACEMENT_TIMEOUT
        self.nodes.replace_leaving()
