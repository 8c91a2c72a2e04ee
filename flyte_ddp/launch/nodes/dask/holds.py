"""Tasks that show all users of a Dask cluster which workers a run uses.

The tasks do nothing. Without them, a cluster that scales itself would close workers that train, a
scheduler with an idle timeout would close itself, and tasks of others would run beside the ranks.
A task lasts over many attempts: its begin and its end cost the scheduler three messages, and after
the loss of one of a thousand nodes, the others would wait for those of all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import dask
from distributed import Client, Future

from flyte_ddp.launch.nodes.dask import worker
from flyte_ddp.launch.nodes.dask.calls import ByValue


@dataclass
class Holds:
    """The tasks of one run."""

    # the task on each worker, by the worker's address
    _futures: dict[str, Future] = field(default_factory=dict)

    @property
    def are_lost(self) -> bool:
        """True if Dask has cancelled the tasks, because the client has lost its scheduler."""
        return any(each.cancelled() for each in self._futures.values())

    def begin(self, client: Client, plugin: str, attempt: str, addresses: Sequence[str]) -> None:
        """Hold the workers of an attempt, and no others."""
        self.keep(addresses)
        new = [each for each in addresses if not self._is_held(each)]
        if not new:
            return
        keys = [f"{attempt}-hold-{index}" for index in range(len(new))]
        # One graph for all workers: each graph costs driver and scheduler a millisecond.
        with dask.annotate(workers=dict(zip(keys, new, strict=True)).__getitem__):
            futures = client.map(
                ByValue(worker.hold), [plugin] * len(new), key=keys, pure=False, retries=0
            )
        self._futures.update(zip(new, futures, strict=True))

    def keep(self, addresses: Collection[str]) -> None:
        """Release all workers but these."""
        for address in self._futures.keys() - set(addresses):
            self._futures.pop(address).release()

    def _is_held(self, address: str) -> bool:
        future = self._futures.get(address)
        return future is not None and not future.done()
