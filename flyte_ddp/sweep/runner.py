"""Train many models on one Dask cluster, each on a worker of its own, as many at a time as there are workers.

Each model is a run of `train_on_dask` on one node, in a thread of this process: it has its own checkpoints, restarts
from them on whichever worker is free, and its end, whatever that is, is no concern of the others. What ends all of them
is a wish to stop, or the loss of the whole cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass

from distributed import Client

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import CLIENT_CLOSE_TIMEOUT
from flyte_ddp.errors import ClusterError, GangLost, RankFailure, SweepFailed, TrainingStopped, WorkersLost
from flyte_ddp.events import EpochFinished, Event, Listener, RunStarted
from flyte_ddp.launch.dask.gang import POLL, ask_scheduler
from flyte_ddp.launch.dask.launcher import check, train_on_dask
from flyte_ddp.launch.dask.pool import Pool
from flyte_ddp.launch.spawn import StopRequest, print_line, stop_on_signals
from flyte_ddp.prepare import describe_data
from flyte_ddp.rank.main import Job
from flyte_ddp.storage import Storage
from flyte_ddp.sweep.results import FAILED, FINISHED, INTERRUPTED, STOPPED_EARLY, WAITING, ModelRun
from flyte_ddp.sweep.search import EarlyStopping, Model

OUTCOME = "outcome.json"  # beside the checkpoints of a model that needs no more training

Observer = Callable[[ModelRun, Event | None], None]

logger = logging.getLogger(__name__)


def check_models(recipe: str, models: Sequence[Model], cluster: ClusterConfig) -> None:
    """Find what is wrong with any of the models before anything is started for the first.

    Raises:
        ConfigError: as `dask.check`, for one worker's ranks.
    """
    for model in models:
        check(Job(recipe, model.config, "", 0.0), one_node(cluster))


def train_models(
    recipe: str,
    models: Sequence[Model],
    checkpoints: str,
    data: str,
    client: Client,
    cluster: ClusterConfig,
    *,
    stop_early: str = "none",
    observers: Sequence[Observer] = (),
    listeners_of: Callable[[ModelRun], Sequence[Listener]] = lambda run: (),
    relay: Callable[[str], None] = print_line,
    run_name: str = "",
) -> list[ModelRun]:
    """Train `models`, start to end, those left out that `checkpoints` know to be trained already.

    Args:
        checkpoints: URL of a directory that every worker reaches; each model has a directory in it, by what it is.
        data: the directory of the prepared data.
        client: from `cluster.open_cluster`.
        stop_early: which models are not worth going on with, see `EarlyStopping`.
        observers: called with a model and the event that it has heard, or with None: once with every model, in their
            order, before the first starts, and when one of them has ended. One call at a time, in any thread.
        listeners_of: those of one model's run alone.
        relay: called with every line that a rank prints, with its model.
        run_name: as given to `open_cluster`.

    Returns:
        All models, in their order; at least one of them was trained to its end.

    Raises:
        ConfigError: before anything is started.
        ClusterError: the cluster is lost, or its workers did not come.
        TrainingStopped: SIGINT or SIGTERM ended the sweep, after a last checkpoint of each model that was running.
        SweepFailed: no model was trained to its end.
    """
    check_models(recipe, models, cluster)
    storage = Storage(checkpoints)
    storage.check_writable("checkpoints")
    sweep = _Sweep(
        recipe=recipe,
        storage=storage,
        data=data,
        client=client,
        cluster=one_node(cluster),
        early_stopping=EarlyStopping(stop_early),
        observers=observers,
        listeners_of=listeners_of,
        relay=relay,
        run_name=run_name,
    )
    runs = [sweep.known(model) for model in models]
    try:
        sweep.train(runs, cluster.num_nodes)
    finally:
        sweep.pool.close()
    return runs


def one_node(cluster: ClusterConfig) -> ClusterConfig:
    """What one model uses of `cluster`."""
    return dataclasses.replace(cluster, num_nodes=1, min_nodes=0)


@dataclass
class _Sweep:
    """The models on their way."""

    recipe: str
    storage: Storage
    data: str
    client: Client
    cluster: ClusterConfig  # one model's
    early_stopping: EarlyStopping
    observers: Sequence[Observer]
    listeners_of: Callable[[ModelRun], Sequence[Listener]]
    relay: Callable[[str], None]
    run_name: str

    def __post_init__(self) -> None:
        self.pool = Pool(self.storage.url)
        self.stop = StopRequest()
        self.stops: dict[int, StopRequest] = {}  # of the models that are running, by their number
        self.failures: dict[int, Exception] = {}
        self.telling = threading.Lock()
        self.starting = threading.Lock()  # a model that starts hears of the wish to stop, or does not start
        note = describe_data(self.data)
        self.data_version = [note["fingerprint"], note["recipe_version"]]

    def known(self, model: Model) -> ModelRun:
        """What an earlier attempt of the sweep has left of the model: all, if it needs no more training."""
        values = [self.recipe, dataclasses.asdict(model.config), self.data_version]
        key = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
        try:
            return ModelRun.from_json(model, key, self._storage_of(key).read(OUTCOME))
        except FileNotFoundError:
            return ModelRun(model, key)

    def train(self, runs: Sequence[ModelRun], num_slots: int) -> None:
        """Train those that wait for it, so many at a time. Raises as `train_models`."""
        for run in runs:
            if run.status != WAITING:
                for epoch in run.epochs:
                    self.early_stopping.should_stop(run.model.number, epoch.epoch, epoch.test_loss)
                if run.status == FINISHED:
                    self.early_stopping.finish(run.model.number, run.last_loss)
            self.tell(run, None)
        waiting = [run for run in runs if run.status == WAITING]
        with stop_on_signals() as signals, ThreadPoolExecutor(num_slots) as executor:
            pending = {executor.submit(self._see_through, run) for run in waiting}
            try:
                while pending:
                    done, pending = wait(pending, timeout=POLL, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
                    while self.stop.num_requests < signals.num_requests:
                        self._stop_all(signals.reason)
            except BaseException as error:
                for _ in range(2):  # twice is urgent
                    self._stop_all(f"the sweep ended: {error}")
                raise
        num_done = sum(run.status in (FINISHED, STOPPED_EARLY, FAILED) for run in runs)
        if num_done < len(runs):
            raise TrainingStopped(
                f"{self.stop.reason}: the sweep was stopped with {num_done} of {len(runs)} models done. Their "
                f"checkpoints are in {self.storage.url}: the same sweep with the same checkpoints goes on from there"
            )
        if not any(run.status == FINISHED for run in runs):
            lines = [f"{run.model}: {run.error}" for run in runs if run.status == FAILED]
            raise SweepFailed(
                "\n".join([f"none of the {len(runs)} models was trained to its end", *lines]),
                may_succeed=any(isinstance(error, GangLost) for error in self.failures.values()),
            )

    def tell(self, run: ModelRun, event: Event | None) -> None:
        with self.telling:
            for observer in self.observers:
                try:
                    observer(run, event)
                except Exception:
                    logger.exception("%s could not take note of %s", observer, run.model)

    def _stop_all(self, reason: str) -> None:
        with self.starting:
            self.stop.set(reason)
            for stop in self.stops.values():
                stop.set(reason)

    def _see_through(self, run: ModelRun) -> None:
        """Train a model, and note how that ended.

        Raises:
            ClusterError: there is no cluster any more on which to train another.
        """
        number = run.model.number
        threading.current_thread().name = f"model {number}"  # which log records have with them
        stop = StopRequest()
        with self.starting:
            if self.stop.is_set():
                return
            self.stops[number] = stop
        try:
            self._train(run, stop)
            run.status = FINISHED
            self.early_stopping.finish(number, run.last_loss)
        except TrainingStopped:
            if run.status != STOPPED_EARLY:
                run.status = INTERRUPTED
        except Exception as error:  # of any kind: it is this model's, and the others go on
            if self._is_loss_of_cluster(error):
                run.status = INTERRUPTED
                raise ClusterError(f"the cluster was lost: {error}") from error
            run.status = FAILED
            run.error, run.details = _one_line(error), str(error)
            self.failures[number] = error
        finally:
            with self.starting:
                del self.stops[number]
            self.tell(run, None)

    def _train(self, run: ModelRun, stop: StopRequest) -> None:
        """Train a model to its end, or to the error, which is raised."""
        storage = self._storage_of(run.key)
        with self._own_client() as client:
            try:
                train_on_dask(
                    Job(self.recipe, run.model.config, storage.url, time.time()),
                    lambda: self.data,
                    client,
                    self.cluster,
                    [run, _Watch(self, run, stop), *self.listeners_of(run)],
                    relay=lambda line: self.relay(f"[model {run.model.number}] {line.removeprefix('[node 0] ')}"),
                    run_name=self.run_name,
                    stop=stop,
                    pool=self.pool,
                )
            except TrainingStopped:
                if run.status == STOPPED_EARLY:
                    storage.write(OUTCOME, run.to_json().encode())
                raise
        storage.write(OUTCOME, dataclasses.replace(run, status=FINISHED).to_json().encode())

    @contextlib.contextmanager
    def _own_client(self) -> Iterator[Client]:
        """A client for one run, because a client has one handler for each kind of Dask's events."""
        try:
            client = Client(self.client.scheduler.address, security=self.client.security, set_as_default=False)
        except (OSError, AttributeError) as error:  # the latter where our own client has lost its scheduler
            raise ClusterError(f"the Dask scheduler is gone: {error}") from error
        try:
            yield client
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                client.close(timeout=CLIENT_CLOSE_TIMEOUT)

    def _is_loss_of_cluster(self, error: Exception) -> bool:
        if isinstance(error, (ClusterError, WorkersLost)):
            return True
        return isinstance(error, GangLost) and ask_scheduler(self.client, "identity") is None

    def _storage_of(self, key: str) -> Storage:
        return Storage(self.storage.join(f"models/{key}"))


class _Watch:
    """Listens to one model's run after the model itself, for the observers and for what is to stop early."""

    def __init__(self, sweep: _Sweep, run: ModelRun, stop: StopRequest) -> None:
        self.sweep = sweep
        self.run = run
        self.stop = stop

    def handle(self, event: Event) -> None:
        epochs = event.previous_epochs if isinstance(event, RunStarted) else [event]
        for epoch in epochs:
            if isinstance(epoch, EpochFinished):
                self._judge(epoch)
        self.sweep.tell(self.run, event)

    def close(self, error: BaseException | None) -> None:
        pass

    def _judge(self, epoch: EpochFinished) -> None:
        model = self.run.model
        should_stop = self.sweep.early_stopping.should_stop(model.number, epoch.epoch, epoch.test_loss)
        if should_stop and epoch.epoch < model.config.epochs and not self.stop.is_set():
            self.run.status = STOPPED_EARLY
            self.stop.set("others are better")


def _one_line(error: Exception) -> str:
    """The error as a row of a table has it."""
    if isinstance(error, RankFailure) and error.kind == "exception":
        return error.cause.partition("\n")[0]
    return f"{type(error).__name__}: {error}".partition("\n")[0]
