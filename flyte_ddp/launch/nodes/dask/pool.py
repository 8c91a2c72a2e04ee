"""The workers of a cluster and the copy of the data that runs which train at the same time share.

Knows neither trials nor attempts. A worker belongs to one run at a time, from before its attempt
begins until it has ended; a run that finds none free waits for its turn.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from flyte_ddp.launch.nodes.dask.assignment import Worker
from flyte_ddp.launch.nodes.dask.data import SharedData


@dataclass(eq=False)
class Pool:
    """The workers of a cluster, which runs claim, and the data that all runs need."""

    data: SharedData
    # workers that each run holds, by the name of the run
    _claims: dict[str, list[Worker]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def claim(
        self, run: str, workers: Sequence[Worker], num_gpus: int, num_nodes: int = 1
    ) -> list[Worker]:
        """Return `num_nodes` idle workers that belong to `run` until it releases them; none if
        there are fewer.

        Each worker gets its share of its host. The cores are split evenly among the `workers`
        there, which are all workers that answer. If several workers see the same GPUs, each gets
        `num_gpus` that no other worker uses.
        """
        with self._lock:
            taken = [each for claim in self._claims.values() for each in claim]
            claim: list[Worker] = []
            for each in workers:
                others = [*taken, *claim]
                if each.is_busy or any(each.address == other.address for other in others):
                    continue
                in_use = {gpu for other in others if other.host == each.host for gpu in other.gpus}
                gpus = tuple(gpu for gpu in each.gpus if gpu not in in_use)
                if len(gpus) < num_gpus <= len(each.gpus):
                    continue  # a neighbour uses the GPUs
                claim.append(dataclasses.replace(each, gpus=gpus[:num_gpus]))
                if len(claim) == num_nodes:
                    break
            else:
                return []
            hosts, own = [each.host for each in workers], [each.host for each in claim]
            shares = {host: own.count(host) / hosts.count(host) for host in own}
            # A gang splits the cores among its nodes on the host.
            self._claims[run] = [
                dataclasses.replace(each, num_cores=max(1, int(each.num_cores * shares[each.host])))
                for each in claim
            ]
            return self._claims[run]

    def release(self, run: str) -> None:
        """Release what `run` has claimed, if anything."""
        with self._lock:
            self._claims.pop(run, None)

    def is_in_use(self) -> bool:
        """Return whether any run has workers, so that others may become free."""
        return bool(self._claims)
