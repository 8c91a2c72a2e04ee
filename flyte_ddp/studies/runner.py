"""Run the trials of a study on one Dask cluster.

A trial is a run of `driver.run` in a thread of this process, with its own checkpoints, from which
it restarts. In a sweep each trial has workers of its own, and a failed one does not affect the
others. A scaling study trains one trial at a time on as many nodes as its ranks need, because
the trials are timed, and a failure ends it. In both, a stop request or the loss of the cluster or
the store ends all trials, and a retry skips the trials that are done.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from distributed import Client

from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import closing
from flyte_ddp.config.waits import POLL_INTERVAL
from flyte_ddp.errors import (
    ClusterError,
    ConfigError,
    FailureKind,
    GangLost,
    RankFailure,
    StorageUnavailable,
    SweepFailed,
    TrainingStopped,
    WorkersLost,
    first_line,
    log_failures,
)
from flyte_ddp.events import CheckpointLoaded, Event, Listener
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask.calls import call_scheduler
from flyte_ddp.launch.nodes.dask.data import SharedData
from flyte_ddp.launch.nodes.dask.place import DaskPlace, check
from flyte_ddp.launch.nodes.dask.pool import Pool
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.protocol.signals import StopRequest, stop_on_signals
from flyte_ddp.process.standard_streams import print_line
from flyte_ddp.recipes.prepare import describe_data
from flyte_ddp.storage import Storage
from flyte_ddp.studies.results import (
    DONE,
    FAILED,
    FINISHED,
    INTERRUPTED,
    STOPPED_EARLY,
    UNFINISHED,
    WAITING,
    TrialRun,
)
from flyte_ddp.studies.search import Search, Trial

Observer = Callable[[TrialRun, Event | None], None]


def check_trials(trials: Sequence[Trial], cluster: ClusterConfig) -> None:
    """Validate all trials before one starts. Raises ConfigError as `resize_cluster`, and as
    `place.check` for each.
    """
    for trial in trials:
        check(trial.program(), resize_cluster(cluster, trial.world_size))


def resize_cluster(cluster: ClusterConfig, world_size: int) -> ClusterConfig:
    """Return the part of `cluster` that `world_size` ranks use: one node, or as many full nodes as
    needed.

    Args:
        world_size: 0 for all ranks of one node.

    Raises:
        ConfigError: the ranks do not fill whole nodes.
    """
    per_node = cluster.ranks_per_node
    if world_size > per_node and world_size % per_node:
        raise ConfigError(
            f"world_sizes: expected at most {per_node} (ranks per node) or a multiple of it, such "
            f"as {world_size // per_node * per_node}, got {world_size}"
        )
    return dataclasses.replace(
        cluster,
        num_nodes=max(1, world_size // per_node),
        processes_per_node=min(world_size or per_node, per_node),
        # Continuing with fewer nodes would change the world size.
        preset="",
        min_nodes=0,
    )


@dataclass
class Entries:
    """The trials of a study in their search, and the places of their checkpoints."""

    storage: Storage
    search: Search
    cluster: ClusterConfig
    runs: list[TrialRun]
    data_version: Sequence[str]
    # numbers of trials that an earlier attempt started in place of drawn ones
    recalled: set[int] = field(default_factory=set)

    def load(self, trials: Sequence[Trial]) -> None:
        """Add the trials, with what earlier attempts have stored of them."""
        for trial in map(self._recall, trials):
            self.runs.append(TrialRun.load(trial, self._place(trial)))

    def _place(self, trial: Trial) -> str:
        """Return the directory of a trial and its data: it is reused only if nothing differs."""
        values = json.dumps(trial.identity(self.data_version), sort_keys=True)
        return self.storage.join(f"trials/{hashlib.sha256(values.encode()).hexdigest()[:16]}")

    def _recall(self, drawn: Trial) -> Trial:
        """Return the trial that an earlier attempt started in place of a drawn one, else the drawn
        one.
        """
        if not self.search.note:
            return drawn
        note = Storage(self._place(drawn)).read_if_there(self.search.note)
        if not note:
            return drawn
        self.recalled.add(drawn.number)
        return drawn.with_values(json.loads(note))

    def _replace(self, drawn: Trial, values: Mapping[str, Any]) -> Trial | None:
        """Return the trial of suggested values if it is a valid one, and none of the others."""
        try:
            trial = drawn.with_values(values)
            check_trials([trial], self.cluster)
        except ConfigError:
            return None
        if any(trial.config == run.trial.config for run in self.runs):
            return None
        return trial

    def enter(self, run: TrialRun) -> None:
        """Begin a trial in the search. If the search puts another trial in its place, write a note
        of the new values beside the first trial.

        A drawn trial differs from all others, so a suggestion that does not is never needed.
        """
        replace = None
        if run.status == WAITING and run.trial.number not in self.recalled:
            replace = functools.partial(self._replace, run.trial)
        trial = self.search.start(run.trial, replace)
        for result in run.results:  # results of an earlier attempt
            self.should_stop(run, result)
        if trial is not run.trial:
            Storage(run.url).write(self.search.note, json.dumps(dict(trial.values)).encode())
            run.trial, run.url = trial, self._place(trial)

    def leave(self, run: TrialRun) -> None:
        """End a trial in the search."""
        outcome = {FINISHED: "COMPLETE", STOPPED_EARLY: "PRUNED"}.get(run.status, "FAIL")
        self.search.finish(run.trial.number, outcome, run.score(run.kept))

    def should_stop(self, run: TrialRun, result: Event) -> bool:
        """Record an epoch, or what a function has reported, and return True if others are so much
        better that the trial should stop.
        """
        trial, figures = run.trial, result.figures()
        if not isinstance(result, trial.counted) or run.metric not in figures.values:
            return False
        place = (figures.epoch if figures.axis == "epoch" else figures.step) or 0
        score = trial.config.monitor.score(figures.values)
        is_worse = self.search.should_stop(trial.number, place, score)
        return is_worse and place != trial.num_epochs


@dataclass
class TrialRunner:
    """Runs the trials of a study to their end; `train` does it."""

    # URL of a directory that every worker reaches; each trial has a subdirectory named by its hash
    checkpoints: str
    data: str  # the directory of the prepared data; "" where none are needed
    client: Client  # from `cluster.open_cluster`
    cluster: ClusterConfig
    # The trials are timed, and start with the largest world size. All their ranks get the number of
    # CPU threads that its ranks get: otherwise one rank with a whole machine, compared with two
    # that share it, would measure the cores and not the ranks. Without it each trial has nodes of
    # its own, by default one.
    one_at_a_time: bool = False
    # the ranks reach `checkpoints`, for states of theirs
    keeps_states: bool = True
    # stops trials early, and may suggest others
    search: Search = field(default_factory=Search)
    # Called with a trial and its event. The event is None before the first trial starts (once for
    # every trial, in order) and when a trial has ended. One call at a time, in any thread.
    observe: Observer = lambda run, event: None
    make_listeners: Callable[[TrialRun], Sequence[Listener]] = (
        lambda run: ()
    )  # listeners of one trial
    # called with every line a rank prints, prefixed with its trial
    relay: Callable[[str], None] = print_line
    run_name: str = ""  # name given to `open_cluster`
    run: str = ""  # the same for all attempts of the study, see `Job`
    # receives all trials, in order, before the first one starts
    runs: list[TrialRun] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.stop = StopRequest()
        self.stops: dict[int, StopRequest] = {}  # stop requests of running trials, by number
        self.failures: list[Exception] = []
        self.notifying = threading.Lock()
        self.storage = Storage(self.checkpoints)
        self.pool = None  # the workers that trials share
        if not self.one_at_a_time:
            self.pool = Pool(SharedData(Storage(self.storage.url)))

    def train(self, trials: Sequence[Trial]) -> list[TrialRun]:
        """Run `trials`, except the trials that are done according to `checkpoints`.

        Returns:
            All trials, in order. At least one of them finished; if they run one at a time, all of
            them.

        Raises:
            ConfigError: before anything is started.
            ClusterError: the cluster was lost, or its workers did not start.
            StorageUnavailable: the store of the checkpoints stayed away. What is done is not
                trained again.
            TrainingStopped: SIGINT or SIGTERM ended the study, after a final checkpoint of each
                running trial.
            SweepFailed: no trial finished.
            RankFailure, GangLost: a trial failed, and the trials run one at a time.
        """
        check_trials(trials, self.cluster)
        self.storage.check_access()
        version = []
        if self.data:
            note = describe_data(self.data)
            version = [note["fingerprint"], note["recipe_version"]]
        self.entries = Entries(self.storage, self.search, self.cluster, self.runs, version)
        self.entries.load(trials)
        try:
            self._train_waiting()
        finally:
            if self.pool:
                self.pool.data.close()
        num_done = sum(run.status in DONE for run in self.runs)
        if num_done < len(self.runs):
            place = "a place that outlives it"
            if self.keeps_states:
                place = self.storage.url
            raise TrainingStopped(
                f"{self.stop.reason}: the study was stopped with {num_done} of {len(self.runs)} "
                f"trials done. To resume, start the same study with the same checkpoints: {place}",
                self.stop.reason,
            )
        if not any(run.status == FINISHED for run in self.runs):
            lines = [f"{run.trial}: {run.error}" for run in self.runs if run.status == FAILED]
            raise SweepFailed(
                "\n".join([f"none of the {len(self.runs)} trials finished", *lines]),
                # Machines or processes were lost, which another attempt may not lose.
                may_succeed=any(
                    isinstance(error, GangLost)
                    or (isinstance(error, RankFailure) and error.kind is not FailureKind.EXCEPTION)
                    for error in self.failures
                ),
            )
        return self.runs

    def _train_waiting(self) -> None:
        for run in self.runs:
            if run.status != WAITING:
                self.entries.enter(run)
                self.entries.leave(run)
            self.notify(run, None)
        waiting = [run for run in self.runs if run.status == WAITING]
        num_slots = 1
        if self.pool:
            nodes = resize_cluster(self.cluster, self.runs[0].trial.world_size).num_nodes
            num_slots = self.cluster.num_nodes // nodes
        with stop_on_signals() as signals, ThreadPoolExecutor(num_slots) as executor:
            pending = {executor.submit(self._run_trial, run) for run in waiting}
            try:
                while pending:
                    done, pending = wait(
                        pending, timeout=POLL_INTERVAL, return_when=FIRST_COMPLETED
                    )
                    for future in done:
                        future.result()
                    while self.stop.num_requests < signals.num_requests:
                        self._stop_all(signals.reason)
            except BaseException as error:
                for _ in range(2):  # twice is urgent
                    self._stop_all(f"the study ended: {error}")
                raise

    def notify(self, run: TrialRun, event: Event | None) -> None:
        """Call the observer. Its errors end no trial."""
        with self.notifying, log_failures(f"an event of {run.trial}"):
            self.observe(run, event)

    def _stop_all(self, reason: str) -> None:
        # A trial enters its own before it looks at this: it gets the reason, or does not start.
        self.stop.set(reason)
        for stop in list(self.stops.values()):
            stop.set(reason)

    def _run_trial(self, run: TrialRun) -> None:
        """Run a trial and record how it ended.

        Raises:
            ClusterError: the cluster is lost, so no other trial can run.
            StorageUnavailable: the store stayed away, so the trial goes on in the next attempt of
                the study.
            Exception: any other, of a trial that others are compared with.
        """
        number = run.trial.number
        threading.current_thread().name = f"trial {number}"  # appears in log records
        stop = self.stops[number] = StopRequest()
        if self.stop.is_set():
            return
        try:
            self.entries.enter(run)
            try:
                self._train(run, stop)
            except TrainingStopped:
                if run.status != STOPPED_EARLY:
                    raise
            run.conclude()
        except TrainingStopped:
            run.status = INTERRUPTED
            with log_failures(f"history of {run.trial}"):
                run.store(UNFINISHED)
        except StorageUnavailable:  # all trials' store
            run.status = INTERRUPTED
            raise
        except Exception as error:
            self._record_failure(run, error)
        finally:
            del self.stops[number]
            self.entries.leave(run)
            self.notify(run, None)

    def _record_failure(self, run: TrialRun, error: Exception) -> None:
        """Record why a trial failed. Raise the error if it concerns other trials too."""
        is_lost = isinstance(error, (ClusterError, WorkersLost))
        if is_lost or call_scheduler(self.client, "identity") is None:
            run.status = INTERRUPTED
            raise ClusterError(f"the cluster was lost: {error}") from error
        run.status = FAILED
        run.error, run.details = _one_line(error), str(error)
        self.failures.append(error)
        if self.pool is None:
            self._stop_all(f"the study ended: {error}")  # before the next trial starts
            raise error

    def _train(self, run: TrialRun, stop: StopRequest) -> None:
        """Train one trial. Any error is raised."""
        cluster = resize_cluster(self.cluster, run.trial.world_size)
        largest = self.runs[0].state.started
        if self.pool is None and not cluster.threads_per_rank and largest:
            cluster = dataclasses.replace(cluster, threads_per_rank=largest.num_threads)
        program, place, data = run.trial.program(), "", None
        if self.keeps_states:
            place = run.url
        if self.data:
            data = lambda: self.data  # noqa: E731
        prefix = "[node 0] " * (cluster.num_nodes == 1)
        # A client has only one handler per event topic, so each run has its own.
        address, security = self.client.scheduler.address, self.client.security
        with closing(Client(address, security=security, set_as_default=False)) as client:
            driver.run(
                Job(program, place, time.time(), run=self.run),
                DaskPlace(client, cluster, self.run_name, self.pool),
                data,
                [run, _TrialListener(self, run, stop), *self.make_listeners(run)],
                relay=lambda line: self.relay(
                    f"[trial {run.trial.number}] {line.removeprefix(prefix)}"
                ),
                stop=stop,
            )


@dataclass
class _TrialListener(Listener):
    """Stops a trial where the early stopping wants it, and notifies the observer of the study."""

    runner: TrialRunner
    run: TrialRun
    stop: StopRequest

    def handle(self, event: Event) -> None:
        results: Sequence[Event] = [event]
        if isinstance(event, CheckpointLoaded):
            results = event.epochs
        for each in results:
            if self.runner.entries.should_stop(self.run, each) and not self.stop.is_set():
                self.run.status = STOPPED_EARLY
                self.stop.set("other trials are better")
        self.runner.notify(self.run, event)


def _one_line(error: Exception) -> str:
    """Format an error as one line for the table."""
    if isinstance(error, RankFailure) and error.kind is FailureKind.EXCEPTION:
        return first_line(error.cause)
    return first_line(f"{type(error).__name__}: {error}")
