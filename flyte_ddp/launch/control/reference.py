"""The rates of a run's nodes at an earlier check, beside its checkpoints. Two nodes have no median
of their own.

Nothing here raises where the store cannot be reached.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from flyte_ddp.errors import StorageUnavailable
from flyte_ddp.process.threads import call_in_background
from flyte_ddp.storage import Storage


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
            call_in_background(lambda: self._write(new))

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

    def _write(self, rates: Mapping[str, float]) -> None:
        with contextlib.suppress(StorageUnavailable):
            Storage(self.url, timeout=0).write(self._name, json.dumps(rates).encode())
