"""The processes that predict, on the nodes of a Dask cluster, and the parts that Dask has them
compute.

Each node of the cluster is a worker with one thread. In that a task runs for as long as the
predictions do, and keeps the node's processes (keeper.py): they are further workers of the same
scheduler, one for each GPU, with a resource by which it knows them. So no gang is needed: a lost
process or node costs the parts that it had, which are submitted again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import queue
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from distributed import CancelledError, Client, Future, TimeoutError
from distributed.scheduler import KilledWorker, NoValidWorkerError, NoWorkerError

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import by_value
from flyte_ddp.config.waits import ANSWER_TIMEOUT, BEAT_INTERVAL
from flyte_ddp.errors import ClusterError
from flyte_ddp.launch.nodes.dask import worker
from flyte_ddp.launch.nodes.dask.calls import ByValue, call_workers, listed_workers
from flyte_ddp.launch.nodes.dask.data import SharedData, check_same_directory
from flyte_ddp.launch.nodes.dask.nodes import START_TIMEOUT
from flyte_ddp.launch.nodes.dask.placement import DaskNode, Worker, assign_nodes
from flyte_ddp.launch.nodes.dask.roll_call import PREDICTS, RollCall
from flyte_ddp.prediction import keeper
from flyte_ddp.prediction.job import PredictionJob

cloudpickle.register_pickle_by_value(keeper)

# What predictions survive, in one place: how often the process or the node of one part may be lost,
# and how many processes of one node. Dask's own count is the cluster's, 0 where it also trains.
MAX_LOSSES = 3
AHEAD = 2  # parts submitted for each process, so that none waits for its next one


@dataclass(eq=False)
class PredictionWorkers:
    """The processes that predict on the nodes of a cluster, until they are closed."""

    client: Client
    config: ClusterConfig
    job: PredictionJob
    code: bytes  # of `packed_code`
    directory: str  # of the prepared data
    data: SharedData
    name: str = field(default_factory=lambda: f"{PREDICTS}{os.urandom(4).hex()}")
    _keepers: dict[str, Future] = field(default_factory=dict)  # by the node's address
    _num_processes: int = 0
    _check_at: float = 0.0  # monotonic: of the next look at the nodes
    _seen_at: float = field(default_factory=time.monotonic)  # when there was a process

    def __post_init__(self) -> None:
        self._roll_call = RollCall(self.client, self.name)

    def close(self) -> None:
        """End the processes, and remove what they needed on the nodes and in the store."""
        call_workers(self.client, self._roll_call.known, worker.uninstall, self.name)
        for future in self._keepers.values():  # which ends without its plugin
            with contextlib.suppress(CancelledError, TimeoutError):
                future.exception(timeout=ANSWER_TIMEOUT)
        self.data.close()

    def run(self, method: str, inputs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Call a method of `Predictor` with each of `inputs`, and yield what it returns, as soon as
        it does.

        Raises:
            ClusterError: no process comes, one input lost more than `MAX_LOSSES`, or the scheduler
                is gone.
            Exception: any that the method raises.
        """
        waiting = deque(inputs)
        pending: dict[Future, tuple[Any, ...]] = {}
        losses: Counter[tuple[Any, ...]] = Counter()
        ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        while waiting or pending:
            self._check_nodes()
            while waiting and len(pending) < AHEAD * self._num_processes:
                given = waiting.popleft()
                future = self.client.submit(
                    ByValue(keeper.call),
                    method,
                    *given,
                    key=f"{self.name}-{method}-{given}-{os.urandom(4).hex()}",
                    resources={self.name: 1},
                    retries=0,
                )
                pending[future] = given
                future.add_done_callback(ended.put)
            try:
                future = ended.get(timeout=BEAT_INTERVAL)
            except queue.Empty:
                continue
            given = pending.pop(future)
            try:
                result = future.result()  # which may be lost, too, before it is fetched
            except (CancelledError, OSError):
                if future.status == "error":  # of the method
                    raise
                raise ClusterError("the Dask scheduler is gone") from None
            except (NoValidWorkerError, NoWorkerError):  # until a node has its processes again
                waiting.appendleft(given)
            except KilledWorker:
                losses[given] += 1
                if losses[given] > MAX_LOSSES:
                    raise ClusterError(
                        f"{method}{given} lost {losses[given]} processes that predict, the last "
                        "without an exception: a smaller batch_size takes less memory"
                    ) from None
                waiting.appendleft(given)
            else:
                yield result

    def _check_nodes(self) -> None:
        """Start processes on nodes that have none, and count those that are there.

        Raises:
            ClusterError: none came within `start_timeout`, or a node cannot keep one.
        """
        if time.monotonic() < self._check_at:
            return
        for address, future in list(self._keepers.items()):
            if future.done():  # with an error, else it was lost with its node
                del self._keepers[address]
                if isinstance(error := future.exception(), RuntimeError):
                    raise ClusterError(str(error))
        self._start_missing()
        names = listed_workers(self.client).values()
        self._num_processes = sum(name.startswith(f"{self.name}-") for name in names)
        self._check_at = time.monotonic() + BEAT_INTERVAL
        if self._num_processes:
            self._seen_at = time.monotonic()
        elif time.monotonic() > self._seen_at + self.config.start_timeout:
            raise ClusterError(
                f"no process that predicts is there after {self.config.start_timeout:.0f} s"
            )

    def _start_missing(self) -> None:
        workers = [
            each
            for each in self._roll_call.present_workers()
            if each.address in self._keepers or not each.is_busy
        ]
        workers.sort(key=lambda each: each.address not in self._keepers)
        by_address = {each.address: each for each in workers[: self.config.num_nodes]}
        nodes = assign_nodes(list(by_address.values()), len(by_address), self.config)
        new = [node for node in nodes if node.address not in self._keepers]
        if not new:
            return
        answers = call_workers(
            self.client,
            [node.address for node in new],
            worker.install,
            self.name,
            self.code,
            timeout=START_TIMEOUT,
        )
        new = [node for node in new if not isinstance(answers[node.address], Exception)]
        check_same_directory(self.client, self.data.storage, new)
        sees_data = self.data.locate(self.client, self.directory, new)
        self._roll_call.is_strict = False
        for node in new:
            job = dataclasses.replace(
                self.job,
                data=self.directory if node.address in sees_data else "",
                data_archive=self.data.archive,
                num_threads=node.ranks.num_threads,
            )
            self._keepers[node.address] = self.client.submit(
                ByValue(keeper.keep_processes),
                self.name,
                pickle.dumps(job)
                if isinstance(job.recipe, str)
                else by_value.pickle(job, job.recipe, "recipe"),
                _environments(node, by_address[node.address], self.config),
                MAX_LOSSES,
                key=f"{self.name}-node-{os.urandom(4).hex()}",
                workers=[node.address],
                allow_other_workers=False,
                retries=0,
            )


def _environments(node: DaskNode, found: Worker, config: ClusterConfig) -> list[dict[str, str]]:
    """Return the variables of each process of a node: the GPU that it uses, or none, and the
    config's number of threads.
    """
    own = node.environment.get("CUDA_VISIBLE_DEVICES", ",".join(found.gpus)).split(",")
    gpus = own if config.gpus_per_node else [""]
    threads = config.threads_per_rank
    shared = {"OMP_NUM_THREADS": str(threads)} if threads else {}
    return [
        {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)], **shared}
        for index in range(config.ranks_per_node)
    ]
