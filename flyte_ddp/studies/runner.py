"""Run the trials of a sweep on one Dask cluster, one trial per worker at a time.

A trial is a one-node run of `train_on_dask` in a thread of this process. It has its own checkpoints and restarts from
them on any free worker. A failed trial does not affect the others. A stop request or the loss of the
cluster or the store ends all.
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
from flyte_ddp.errors import (
    ClusterError,
    GangLost,
    RankFailure,
    StorageUnavailable,
    SweepFailed,
    TrainingStopped,
    WorkersLost,
)
from flyte_ddp.events import CheckpointLoaded, EpochFinished, Event, Listener
from flyte_ddp.launch import driver
from flyte_ddp.launch.dask.calls import call_scheduler
from flyte_ddp.launch.dask.place import DaskPlace, check
from flyte_ddp.launch.dask.pool import Pool
from flyte_ddp.launch.driver import POLL_INTERVAL
from flyte_ddp.launch.process.job import Job
from flyte_ddp.launch.process.programs import RecipeProgram
from flyte_ddp.launch.signals import StopRequest, stop_on_signals
from flyte_ddp.launch.supervisor import print_line
from flyte_ddp.recipes.prepare import describe_data
from flyte_ddp.storage import Storage
from flyte_ddp.studies.results import FAILED, FINISHED, INTERRUPTED, STOPPED_EARLY, WAITING, TrialRun
from flyte_ddp.studies.search import EarlyStopping, Trial

OUTCOME = "outcome.json"  # beside the checkpoints of a trial that needs no more training

Observer = Callable[[TrialRun, Event | None], None]

logger = logging.getLogger(__name__)


def check_trials(recipe: str, trials: Sequence[Trial], cluster: ClusterConfig) -> None:
    """Validate all trials before the first one starts.

    Raises:
        ConfigError: as `launcher.check`, for the ranks of one worker.
    """
    for trial in trials:
        check(Job(RecipeProgram(recipe, trial.config), "", 0.0), one_node_config(cluster))


def train_trials(
    recipe: str,
    trials: Sequence[Trial],
    checkpoints: str,
    data: str,
    client: Client,
    cluster: ClusterConfig,
    *,
    stop_early: str = "none",
    observers: Sequence[Observer] = (),
    make_listeners: Callable[[TrialRun], Sequence[Listener]] = lambda run: (),
    relay: Callable[[str], None] = print_line,
    run_name: str = "",
    run: str = "",
) -> list[TrialRun]:
    """Run `trials` to their end. Trials already done according to `checkpoints` are not trained again.

    Args:
        checkpoints: URL of a directory that every worker reaches; each trial has a subdirectory named by its hash.
        data: the directory of the prepared data.
        client: from `cluster.open_cluster`.
        stop_early: the stopping rule, see `EarlyStopping`.
        observers: called with a trial and its event. The event is None before the first trial starts (once for every
            trial, in order) and when a trial has ended. One call at a time, in any thread.
        make_listeners: returns the listeners of one trial's run.
        relay: called with every line a rank prints, prefixed with its trial.
        run_name: as given to `open_cluster`.
        run: the same for all attempts of the sweep, see `Job`.

    Returns:
        All trials, in order. At least one of them finished.

    Raises:
        ConfigError: before anything is started.
        ClusterError: the cluster was lost, or its workers did not start.
        StorageUnavailable: the store of the checkpoints stayed away. What is done is not trained again.
        TrainingStopped: SIGINT or SIGTERM ended the sweep, after a last checkpoint of each running trial.
        SweepFailed: no trial finished.
    """
    check_trials(recipe, trials, cluster)
    storage = Storage(checkpoints)
    storage.check_access("checkpoints")
    sweep = _Sweep(
        recipe=recipe,
        storage=storage,
        data=data,
        client=client,
        cluster=one_node_config(cluster),
        early_stopping=EarlyStopping(stop_early),
        observers=observers,
        make_listeners=make_listeners,
        relay=relay,
        run_name=run_name,
        run=run,
    )
    runs = [sweep.load(trial) for trial in trials]
    try:
        sweep.train(runs, cluster.num_nodes)
    finally:
        sweep.pool.close()
    return runs


def one_node_config(cluster: ClusterConfig) -> ClusterConfig:
    """Return the configuration of the one node that a trial uses."""
    return dataclasses.replace(cluster, num_nodes=1, min_nodes=0)


@dataclass
class _Sweep:
    """The trials in progress."""

    recipe: str
    storage: Storage
    data: str
    client: Client
    cluster: ClusterConfig  # of one trial
    early_stopping: EarlyStopping
    observers: Sequence[Observer]
    make_listeners: Callable[[TrialRun], Sequence[Listener]]
    relay: Callable[[str], None]
    run_name: str
    run: str

    def __post_init__(self) -> None:
        self.pool = Pool(self.storage.url)
        self.stop = StopRequest()
        self.stops: dict[int, StopRequest] = {}  # of running trials, by number
        self.failures: dict[int, Exception] = {}
        self.notifying = threading.Lock()
        self.starting = threading.Lock()  # a starting trial either sees the stop request or does not start
        note = describe_data(self.data)
        self.data_version = [note["fingerprint"], note["recipe_version"]]

    def load(self, trial: Trial) -> TrialRun:
        """Return the stored result of the trial from an earlier attempt, else a waiting trial."""
        values = [self.recipe, dataclasses.asdict(trial.config), self.data_version]
        key = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
        try:
            return TrialRun.from_json(trial, key, self._storage_of(key).read(OUTCOME))
        except FileNotFoundError:
            return TrialRun(trial, key)

    def train(self, runs: Sequence[TrialRun], num_slots: int) -> None:
        """Run the waiting trials, `num_slots` at a time. Raises as `train_trials`."""
        for run in runs:
            if run.status != WAITING:
                for epoch in run.epochs:
                    self.early_stopping.should_stop(run.trial.number, epoch.epoch, epoch.test_loss)
                if run.status == FINISHED:
                    self.early_stopping.finish(run.trial.number, run.last_loss)
            self.notify(run, None)
        waiting = [run for run in runs if run.status == WAITING]
        with stop_on_signals() as signals, ThreadPoolExecutor(num_slots) as executor:
            pending = {executor.submit(self._run_trial, run) for run in waiting}
            try:
                while pending:
                    done, pending = wait(pending, timeout=POLL_INTERVAL, return_when=FIRST_COMPLETED)
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
                f"{self.stop.reason}: the sweep was stopped with {num_done} of {len(runs)} trials done. To resume, "
                f"start the same sweep with the same checkpoints: {self.storage.url}",
                self.stop.reason,
            )
        if not any(run.status == FINISHED for run in runs):
            lines = [f"{run.trial}: {run.error}" for run in runs if run.status == FAILED]
            raise SweepFailed(
                "\n".join([f"none of the {len(runs)} trials finished", *lines]),
                may_succeed=any(_may_succeed(error) for error in self.failures.values()),
            )

    def notify(self, run: TrialRun, event: Event | None) -> None:
        with self.notifying:
            for observer in self.observers:
                try:
                    observer(run, event)
                except Exception:
                    logger.exception("observer %s failed on an event of %s", observer, run.trial)

    def _stop_all(self, reason: str) -> None:
        with self.starting:
            self.stop.set(reason)
            for stop in self.stops.values():
                stop.set(reason)

    def _run_trial(self, run: TrialRun) -> None:
        """Run a trial and record how it ended.

        Raises:
            ClusterError: the cluster is lost, so no other trial can run.
            StorageUnavailable: the store stayed away, so the trial goes on in the next attempt of the sweep.
        """
        number = run.trial.number
        threading.current_thread().name = f"trial {number}"  # appears in log records
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
        except StorageUnavailable:  # all trials' store
            run.status = INTERRUPTED
            raise
        except Exception as error:  # any kind: it concerns this trial only
            if self._is_loss_of_cluster(error):
                run.status = INTERRUPTED
                raise ClusterError(f"the cluster was lost: {error}") from error
            run.status = FAILED
            run.error, run.details = _one_line(error), str(error)
            self.failures[number] = error
        finally:
            with self.starting:
                del self.stops[number]
            self.notify(run, None)

    def _train(self, run: TrialRun, stop: StopRequest) -> None:
        """Train one trial. Any error is raised."""
        storage = self._storage_of(run.key)
        with self._own_client() as client:
            try:
                driver.run(
                    Job(RecipeProgram(self.recipe, run.trial.config), storage.url, time.time(), run=self.run),
                    DaskPlace(client, self.cluster, self.run_name, self.pool),
                    lambda: self.data,
                    [run, _TrialListener(self, run, stop), *self.make_listeners(run)],
                    relay=lambda line: self.relay(f"[trial {run.trial.number}] {line.removeprefix('[node 0] ')}"),
                    stop=stop,
                )
            except TrainingStopped:
                if run.status == STOPPED_EARLY:
                    storage.write(OUTCOME, run.to_json().encode())
                raise
        storage.write(OUTCOME, dataclasses.replace(run, status=FINISHED).to_json().encode())

    @contextlib.contextmanager
    def _own_client(self) -> Iterator[Client]:
        """A Dask client for one run: a client has only one handler per event topic."""
        try:
            client = Client(self.client.scheduler.address, security=self.client.security, set_as_default=False)
        except (OSError, AttributeError) as error:  # AttributeError: our own client has lost its scheduler
            raise ClusterError(f"the Dask scheduler is gone: {error}") from error
        try:
            yield client
        finally:
            with contextlib.suppress(OSError, TimeoutError):
                client.close(timeout=CLIENT_CLOSE_TIMEOUT)

    def _is_loss_of_cluster(self, error: Exception) -> bool:
        if isinstance(error, (ClusterError, WorkersLost)):
            return True
        return isinstance(error, GangLost) and call_scheduler(self.client, "identity") is None

    def _storage_of(self, key: str) -> Storage:
        return Storage(self.storage.join(f"trials/{key}"))


class _TrialListener:
    """Listener of one trial that notifies the observers and applies early stopping."""

    def __init__(self, sweep: _Sweep, run: TrialRun, stop: StopRequest) -> None:
        self.sweep = sweep
        self.run = run
        self.stop = stop

    def handle(self, event: Event) -> None:
        epochs = event.epochs if isinstance(event, CheckpointLoaded) else [event]
        for epoch in epochs:
            if isinstance(epoch, EpochFinished):
                self._stop_if_behind(epoch)
        self.sweep.notify(self.run, event)

    def close(self, error: BaseException | None) -> None:
        pass

    def _stop_if_behind(self, epoch: EpochFinished) -> None:
        trial = self.run.trial
        should_stop = self.sweep.early_stopping.should_stop(trial.number, epoch.epoch, epoch.test_loss)
        if should_stop and epoch.epoch < trial.config.epochs and not self.stop.is_set():
            self.run.status = STOPPED_EARLY
            self.stop.set("other trials are better")


def _may_succeed(error: Exception) -> bool:
    """Return whether machines or processes were lost, which another attempt may not lose."""
    return isinstance(error, GangLost) or (isinstance(error, RankFailure) and error.kind != "exception")


def _one_line(error: Exception) -> str:
    """Format an error as one line for the table."""
    if isinstance(error, RankFailure) and error.kind == "exception":
        return error.cause.partition("\n")[0]
    return f"{type(error).__name__}: {error}".partition("\n")[0]
