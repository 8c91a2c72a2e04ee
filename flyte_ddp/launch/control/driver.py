"""The loop of attempts: start the ranks of a program, watch them, and restart them or give up, as
policy.py decides.

A place gives the nodes: this machine (local.py), or the workers of a Dask cluster (dask/place.py).
What fails fails as a whole: the gang is ended on every node and starts again from memory or its
last checkpoint.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import logging
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar

from flyte_ddp import events
from flyte_ddp.checkpoints import stored_steps
from flyte_ddp.checkpoints.ownership import Ownership
from flyte_ddp.code.source_code import compute_library_digest, describe_commit
from flyte_ddp.config.waits import POLL_INTERVAL
from flyte_ddp.errors import (
    OUT_OF_MEMORY,
    ConfigError,
    NodeLost,
    RankFailure,
    TrainingStopped,
    first_line,
    log_failures,
)
from flyte_ddp.launch.control.attempt import Attempt
from flyte_ddp.launch.control.costs import Costs
from flyte_ddp.launch.control.inside import Inside
from flyte_ddp.launch.control.nodes import Nodes
from flyte_ddp.launch.control.policy import AttemptEnd
from flyte_ddp.launch.control.restarts import Restarts
from flyte_ddp.launch.control.results import Destination, Results
from flyte_ddp.launch.control.stored_steps import StoredSteps
from flyte_ddp.launch.protocol.programs import Job, Kind, Program
from flyte_ddp.launch.protocol.signals import StopRequest, stop_on_signals
from flyte_ddp.observers.traces import Traces, make_traces
from flyte_ddp.process.invocation import COMMAND_VARIABLE, find_flyte_ddp_command
from flyte_ddp.process.standard_streams import open_standard_streams, print_line
from flyte_ddp.process.threads import call_in_background
from flyte_ddp.project.admission import IMAGE_VARIABLE
from flyte_ddp.storage import (
    SHORT_TIMEOUT,
    Storage,
    list_client_modules,
    redact_errors,
    redact_url,
    redact_values,
)
from flyte_ddp.storage.recorded_config import hash_hidden

# seconds for listeners to finish what they have begun: W&B's and MLflow's last files
CLOSE_TIMEOUT = 2 * SHORT_TIMEOUT

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Place(Protocol):
    """The machines of a run: this one, or a cluster.

    Attributes:
        max_restarts: the number of counted restarts of the gang.
        larger_memory: the setting that limits the memory of the ranks, and its better value. The
            text begins an error.
        notice_seconds: the time for a final checkpoint, from the notice that a node has to go.
        is_cluster: the driver waits for nodes, and each line of a rank begins with its node.
    """

    max_restarts: int
    larger_memory: str
    notice_seconds: float
    is_cluster: bool

    def check(self, job: Job) -> None:
        """Raise ConfigError if the job cannot run here. Called before anything is started."""

    def gather(self, run: Run, previous: AttemptEnd | None) -> Nodes:
        """Wait for the nodes of the next attempt, and return them. `previous` is the end of the
        attempt before it.

        Raises:
            ClusterError: there are too few nodes in time. WorkersLost after a failure.
        """

    def close(self, run: Run) -> None:
        """Remove the files and processes of the run from the nodes. Does not raise."""


@redact_errors()
def run(
    job: Job,
    place: Place,
    data: Callable[[], str] | None = None,
    listeners: Sequence[events.Listener] = (),
    relay: Callable[[str], None] | None = None,
    stop: StopRequest | None = None,
    results: Destination | None = None,
    state: events.RunState | None = None,
) -> events.RunState:
    """Run the program of `job` in ranks at `place`, start to end. Return the state that the events
    add up to.

    Args:
        job: the run. Every node must reach its checkpoints.
        data: returns the local directory of the prepared data. Called while the ranks start, or the
            nodes are gathered. None if the program needs no data.
        listeners: receive every event, in a thread with the caller's context variables.
        relay: called with every line that a rank prints; standard error by default.
        stop: ends the run early when set; by default SIGINT and SIGTERM do.
        results: the destination of the files that ranks submit, see `Results`. All files have
            arrived when this returns or raises.
        state: receives all events, even if the run fails; by default a new state that keeps no
            reports.

    Raises:
        ConfigError: before any rank is started, also if the checkpoints belong to another run.
            OutOfMemory, a ConfigError, is also possible later.
        ClusterError: the nodes did not come in time.
        RankFailure: a rank failed in a way that another attempt would repeat, or without a restart
            left.
        GangLost: nodes were lost more often than `max_restarts` allows.
        StorageUnavailable: the checkpoints could not be reached for `store_timeout` seconds.
        TrainingStopped: SIGINT or SIGTERM, or `stop`, ended the run, after a final checkpoint.
    """
    open_standard_streams()
    place.check(job)
    job = _complete(job)
    program = job.program
    state, show = state or events.RunState(keep_reports=False), relay or print_line
    with contextlib.ExitStack() as stack:
        job, storage = stack.enter_context(_own_checkpoints(job))
        if program.missing_state and not (storage and stored_steps(storage.url)):
            raise ConfigError(program.missing_state)
        name = f"training-{uuid.uuid4().hex[:12]}"
        costs = Costs(job, storage, lambda: own.stop.set("SIGTERM"))
        dispatcher = stack.enter_context(
            Dispatcher([*listeners, costs, *_make_traces(job, name)], state, program)
        )
        stop = stop or stack.enter_context(stop_on_signals(program.stop_grace))
        own = Run(
            name,
            place,
            job,
            storage,
            stop,
            dispatcher.emit,
            costs,
            relay=lambda line: show(redact_url(line)),
        )
        if data:
            own.prepared = call_in_background(data)
        stack.callback(place.close, own)
        if results is not None:
            own.results = Results(results)
            stack.callback(own.results.close, stop)
        if storage:
            stack.push(Inside(own, state).close)
        try:
            own.drive()
        except TrainingStopped as stopped:
            own.say_where_to_resume(stopped)
            raise costs.convert_error(stopped) from None
    if own.results:
        own.results.check()
    return state


def _complete(job: Job) -> Job:
    """Return the job with what its ranks need of this process."""
    variables = {**job.program.needs.variables, COMMAND_VARIABLE: find_flyte_ddp_command()}
    program = job.program.with_needs(variables=variables)
    return dataclasses.replace(job, program=program, library=_library_at_start())


@functools.cache
def _library_at_start() -> str:
    """Return the digest of the library at the first run of this process, which has imported it."""
    return compute_library_digest()


def _make_traces(job: Job, name: str) -> list[Traces]:
    """Return the listener that sends spans, if there is one. All drivers of a run give it the same
    id. `name` is the id of a run that has only this process.
    """
    run = job.run or name
    if not job.run and job.is_kept and job.checkpoints:
        run = job.checkpoints
        if Storage(job.checkpoints).is_local:
            run = f"{socket.gethostname()}:{job.checkpoints}"
    return make_traces(run)


@contextlib.contextmanager
def _own_checkpoints(job: Job) -> Iterator[tuple[Job, Storage | None]]:
    """Own the place of the checkpoints, if there is one, for the length of the block.

    Yields:
        The job with its owner, and the store. Raises as `run`.
    """
    if not job.checkpoints:
        yield job, None
        return
    program = job.program
    name = "checkpoints"
    if job.output:
        name = "output"
    storage = Storage(job.checkpoints, name, program.needs.store_timeout)
    storage.check_access()
    if program.slow_imports:
        modules = (*program.slow_imports, *list_client_modules(storage.url))
        program = dataclasses.replace(program, slow_imports=modules)
    with Ownership(storage.url, job.run, program.needs.store_timeout, job.output) as owner:
        job = dataclasses.replace(job, checkpoints=storage.url, owner=owner.token, program=program)
        yield job, storage


@dataclass
class Run:
    """A run: attempt after attempt, until an attempt succeeds or no other attempt can help."""

    name: str  # unique name
    place: Place
    job: Job  # current job: a restart may have changed its program
    storage: Storage | None  # store of the checkpoints; None for a run without checkpoints
    stop: StopRequest
    emit: Callable[[events.Event], None]
    costs: Costs
    relay: Callable[[str], None]
    # local directory of the prepared data; None if the program needs no data
    prepared: concurrent.futures.Future[str] | None = None
    results: Results | None = None  # receives the files that ranks submit
    num_attempts: int = 0
    attempt: Attempt | None = None  # the latest attempt

    def __post_init__(self) -> None:
        place = self.place
        self.restarts = Restarts(place.max_restarts, place.larger_memory, self.job.checkpoints)
        self.stored = StoredSteps(self.storage is not None, self.job.is_kept)

    def check_stop(self) -> None:
        """Raise TrainingStopped if the run is to end. Called only while no rank runs."""
        if self.stop.is_set():
            if self.storage:
                self.storage.stop.set()
            raise TrainingStopped(
                f"{self.stop.reason}: the run was stopped while no rank was running",
                self.stop.reason,
            )

    def wait_for(self, future: concurrent.futures.Future[T]) -> T:
        """Return the result of `future`. Raises the error of `future`, or as `check_stop`."""
        while not concurrent.futures.wait([future], timeout=POLL_INTERVAL).done:
            self.check_stop()
        return future.result()

    def drive(self) -> None:
        """Make attempts until one succeeds. Raises as `run`."""
        if self.job.earlier_failure:
            self.restarts.look_back(self.job.earlier_failure)
        ended = None
        while True:
            attempt = self._begin(ended)
            failure: RankFailure | NodeLost | None = None
            try:
                if attempt.train(self.job, self.num_attempts - 1):
                    return
            except (RankFailure, NodeLost) as error:
                failure = error
            reason = attempt.reason
            if failure:
                reason = first_line(failure)
            self.emit(attempt.ended(reason))
            if failure and self.prepared and self.prepared.done() and self.prepared.exception():
                self.prepared.result()  # raises the caller's own error; a node only reported it
            ended = self._go_on(attempt, failure)

    def _begin(self, ended: AttemptEnd | None) -> Attempt:
        """Wait for nodes, and return the next attempt on them.

        Args:
            ended: the end of the last attempt; None before the first.
        """
        is_cluster = self.place.is_cluster
        begun = self.job.launched_at  # start of the wait for nodes
        if self.num_attempts:
            begun = time.time()
        nodes = self.place.gather(self, ended)
        waited = 0.0
        if is_cluster:
            waited = time.time() - begun
        self.emit(
            events.AttemptStarted(
                len(nodes.nodes),
                self.job.launched_at,
                waited,
                self.place.notice_seconds,
                *self.costs.find_price(nodes, begun),
            )
        )
        self.num_attempts += 1
        self.stored.begin_attempt()
        self.job = dataclasses.replace(self.job, launched_at=time.time())
        shows_nodes = is_cluster and self.job.program.shows_ranks
        take_result = None
        if self.results:
            take_result = self.results.put
        self.attempt = Attempt(nodes, self._take, self.relay, self.stop, shows_nodes, take_result)
        return self.attempt

    def _take(self, event: events.Event) -> None:
        """Note the steps in the store that an event names, and pass the event on."""
        self.emit(self.stored.note(event, self.job.is_in_memory))

    def _go_on(self, attempt: Attempt, failure: RankFailure | NodeLost | None) -> AttemptEnd:
        """Prepare the next attempt, and return the end of the last one. Raises if there is no next
        attempt.
        """
        ran_out = failure is not None and failure.cause == OUT_OF_MEMORY
        memory_step, where = 0, ""
        if not ran_out:  # a state in memory may exhaust the memory again
            memory_step, where = attempt.in_memory()
        newest_step = self.stored.newest
        kept_step = max(memory_step or -1, newest_step)
        is_announced = bool(attempt.departures)
        ended = AttemptEnd(failure, attempt.step, self.stored.resumed, kept_step, is_announced)
        is_in_memory = memory_step > max(newest_step, 0)
        if failure and memory_step:  # the store, which has the same state, may be away
            is_in_memory |= memory_step == newest_step
        if is_in_memory:
            origin = f"step {memory_step}, from {where}"
        elif kept_step < 0:  # the attempt ended before it looked for a checkpoint
            origin = "its last checkpoint, if there is one"
        elif kept_step:
            origin = "its last checkpoint"
        else:
            origin = "the beginning"
        world_size = attempt.nodes.world_size
        program = self.restarts.follow(ended, attempt.reason, origin, self.job.program, world_size)
        if self.storage and (not memory_step or ended.is_store_outage):
            # raises StorageUnavailable
            self.wait_for(call_in_background(self.storage.names))
        self.job = dataclasses.replace(
            self.job,
            program=program,
            stored=tuple(sorted(self.stored.steps or ())),
            is_in_memory=is_in_memory,
            ran_out_of_memory=self.job.ran_out_of_memory or ran_out,
        )
        return ended

    def say_where_to_resume(self, stopped: TrainingStopped) -> None:
        """Add the newest checkpoint in the store to the message."""
        job, step = self.job, self.stored.newest
        if job.checkpoints and job.is_kept:
            at = ""
            if step >= 0:
                at = f", at step {step}"
            stopped.args = (
                f"{stopped}. Its checkpoints are in {redact_url(job.checkpoints)}: the same run "
                f"resumes there{at}",
            )


@dataclass(eq=False)
class Dispatcher:
    """Folds events into a state and passes them to listeners, in a thread. So a slow listener does
    not delay the run or its rescue.

    This is a context manager. Call `emit` inside the block. At its end every listener is closed,
    with the error if there is one. The state then has every event, even if a listener hangs.

    A listener that raises is named in the log and receives no more events: watching a run must not
    end the run. Listeners run with the context variables of the dispatcher's creator, so that a
    Flyte Deck finds its task.
    """

    listeners: Sequence[events.Listener]
    state: events.RunState = field(default_factory=lambda: events.RunState(keep_reports=False))
    program: Program | None = None
    # events that are not folded yet; None marks the end of the run
    _waiting: deque[events.Event | None] = field(default_factory=deque)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _facts: dict[str, Any] = field(default_factory=dict)  # fields that each start lacks
    _error: BaseException | None = None
    _delivery: concurrent.futures.Future[None] = field(init=False)

    def __post_init__(self) -> None:
        asks = (getattr(each, "needs_reports", False) for each in self.listeners)
        self.state.keep_reports |= any(asks)

    def emit(self, event: events.Event) -> None:
        """Pass `event` on, with the time: one clock for all of a run's processes."""
        self._put(dataclasses.replace(event, at=time.time()))

    def __enter__(self) -> Dispatcher:
        self._delivery = call_in_background(self._deliver)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._error = error
        self._put(None)
        if concurrent.futures.wait([self._delivery], CLOSE_TIMEOUT).not_done:
            logger.warning(
                "a listener did not finish within %.0f s of the end of the run", CLOSE_TIMEOUT
            )
            with self._changed:
                while self._waiting[0] is not None:
                    self._fold()

    def _put(self, event: events.Event | None) -> None:
        with self._changed:
            self._waiting.append(event)
            self._changed.notify()

    def _fold(self) -> events.Event | None:
        """Fold the next event, and return it without secrets for the listeners; None if folding
        fails. The caller holds the lock, and has checked that the event is not the end.
        """
        event = self._waiting.popleft()
        assert event is not None
        shown: events.Event | None = None
        with log_failures(f"event {type(event).__name__}"):
            if isinstance(event, events.RunStarted):
                event = dataclasses.replace(event, **self._facts)
            redacted = _redact(event)
            self.state.handle(redacted)
            shown = redacted
        return shown  # noqa: RET504 - None after a failure

    def _deliver(self) -> None:
        # git may take a second, so it runs in this thread
        with log_failures("facts"):
            self._facts = {
                "commit": describe_commit(),
                "image": os.environ.get(IMAGE_VARIABLE, ""),
            }
            if self.program and self.program.kind is not Kind.RECIPE:
                self._facts["recipe_version"] = self.program.compute_code_version()
                self._facts["arguments"] = self.program.arguments
                self._facts["named_arguments"] = self.program.named_arguments
                self._facts["hidden"] = hash_hidden(self.program.named_arguments)
        active = [(each, takes_state(each)) for each in self.listeners]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                if self._waiting[0] is None:
                    break
                event = self._fold()
            if event is None:
                continue
            for each in list(active):
                listener, has_state = each
                try:
                    if has_state:
                        listener.handle(event, self.state)
                    else:
                        listener.handle(event)
                except BaseException as error:
                    _log("%s failed and receives no more events of this run", listener, error)
                    active.remove(each)
        for listener in self.listeners:
            try:
                listener.close(self._error)
            except BaseException as error:
                _log("%s could not be closed", listener, error)


def takes_state(listener: events.Listener) -> bool:
    """Return True if the listener's `handle` has a parameter for the state."""
    try:
        return "state" in inspect.signature(listener.handle).parameters
    except Exception:  # a built-in function may have no signature
        return False


def _redact(event: events.Event) -> events.Event:
    """Return `event` without secrets. The URLs from which observers fetch the model stay."""
    redacted: events.Event = redact_values(event)
    if isinstance(event, events.RunFinished) and isinstance(redacted, events.RunFinished):
        return dataclasses.replace(
            redacted, model_state_url=event.model_state_url, export_url=event.export_url
        )
    return redacted


def _log(text: str, listener: events.Listener, error: BaseException) -> None:
    with contextlib.suppress(Exception):  # a handler of the log may write to what has just failed
        logger.error(text, type(listener).__name__, exc_info=error)
