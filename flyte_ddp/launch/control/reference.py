"""The results of earlier checks of a run's nodes, stored beside the run's checkpoints: the rates of
nodes, because two nodes have no median of their own, and the names of slow nodes.

Nothing here raises where the store cannot be reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flyte_ddp.errors import StorageUnavailable
from flyte_ddp.process.threads import call_in_background
from flyte_ddp.storage import Storage

SLOW_NODES = "slow-nodes.json"


@dataclass(eq=False)
class Reference:
    """The rates that a check has stored for a pool of nodes, by probe."""

    url: str  # place of the checkpoints; "" for a run that stores nothing
    pool: str  # kind of the nodes

    def __post_init__(self) -> None:
        # The driver does not wait for the store while ranks run.
        self._stored = call_in_background(self._read)

    @property
    def rates(self) -> Mapping[str, float]:
        """The stored rates; none while they are not there."""
        if not self._stored.done() or self._stored.exception():
            return {}
        return self._stored.result()

    def add(self, found: Mapping[str, float]) -> None:
        """Store the rates of probes that have none. A slow day must not become the measure."""
        new = {**found, **self.rates}
        if self.url and new != self.rates:
            call_in_background(lambda: self._write(self._name, new))

    def add_slow(self, machines: Iterable[str]) -> None:
        """Store names of Kubernetes nodes that are slow."""
        new = set(machines) - {""}
        if self.url and new:
            call_in_background(
                lambda: self._write(SLOW_NODES, sorted(new.union(read_slow_nodes(self.url))))
            )

    @property
    def _name(self) -> str:
        digest = hashlib.sha256(self.pool.encode()).hexdigest()[:8]
        return f"node-rates-{digest}.json"

    def _read(self) -> dict[str, float]:
        with contextlib.suppress(FileNotFoundError, StorageUnavailable):
            if self.url:
                rates: dict[str, float] = json.loads(Storage(self.url, timeout=0).read(self._name))
                return rates
        return {}

    def _write(self, name: str, contents: Any) -> None:
        with contextlib.suppress(StorageUnavailable):
            Storage(self.url, timeout=0).write(name, json.dumps(contents).encode())


def read_slow_nodes(url: str) -> list[str]:
    """Return the names of Kubernetes nodes that a check has found slow earlier in the run; none
    where they cannot be read.

    Args:
        url: place of the checkpoints.
    """
    names = None
    # Text that is no JSON is a ValueError. So is a wrong place, which the run itself reports.
    with contextlib.suppress(StorageUnavailable, ValueError):
        names = json.loads(Storage(url, timeout=0).read_if_there(SLOW_NODES) or b"[]")
    if isinstance(names, list) and all(isinstance(each, str) for each in names):
        return names
    return []
