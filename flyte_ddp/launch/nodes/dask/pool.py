"""The workers of a cluster and the copy of the data that runs which train at the same time share.

Knows neither trials nor attempts. A worker belongs to one run at a time, from before its attempt
begins until it has ended; a run that finds none free waits for its turn.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from flyte_ddp.launch.nodes.dask.data import SharedData
from flyte_ddp.launch.nodes.dask.placement import Worker


@dataclass(eq=False)
class Pool:
    """The workers of a cluster, of which each run takes one, and the data that all runs need."""

    data: SharedData
    _claims: dict[str, Worker] = field(default_factory=dict)  # by the run that holds it
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(self, run: str, workers: Sequence[Worker], num_gpus: int) -> list[Worker]:
        """Return an idle worker that is `run`'s own until it releases it; none if there is none.

        It has its share of its host: the cores are split evenly among the `workers` there, which
        are all that answer, and of GPUs that several of them see it has `num_gpus` that no other
        run uses.
        """
        with self._lock:
            taken = list(self._claims.values())
            for each in workers:
                if each.is_busy or any(each.address == other.address for other in taken):
                    continue
                in_use = {gpu for other in taken if other.host == each.host for gpu in other.gpus}
                gpus = tuple(gpu for gpu in each.gpus if gpu not in in_use)
                if len(gpus) < num_gpus <= len(each.gpus):
                    continue  # in use by a neighbour
                num_neighbours = sum(other.host == each.host for other in workers)
                cores = max(1, each.num_cores // num_neighbours)
                self._claims[run] = dataclasses.replace(each, num_cores=cores, gpus=gpus[:num_gpus])
                return [self._claims[run]]
            return []

    def release(self, run: str) -> None:
        """Release what `run` has claimed, if anything."""
        with self._lock:
            self._claims.pop(run, None)

    def is_in_use(self) -> bool:
        """Return whether any run has a worker, so that another may become free."""
        return bool(self._claims)
