"""A driver's part in looking into its run: it keeps the status in the run's store, and looks there
for requests.

A thread does both, so that a slow store never delays the run. Errors of the store are ignored: the
run goes on without a status.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from flyte_ddp import events
from flyte_ddp.checkpoints.ownership import check_owner
from flyte_ddp.config.waits import ANSWER_TIMEOUT
from flyte_ddp.errors import TrainingStopped, first_line
from flyte_ddp.launch.control.attempt import Attempt
from flyte_ddp.launch.control.inspection import Order
from flyte_ddp.launch.control.stalls import find_culprits, list_stacks
from flyte_ddp.launch.control.states import Ended, Killing, Running, Stopping
from flyte_ddp.launch.protocol.messages import Profile
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.protocol.requests import (
    PROFILE,
    REQUEST,
    STATUS,
    WAITING,
    Request,
    RunStatus,
    read_json,
    to_json,
)
from flyte_ddp.process.threads import start_thread
from flyte_ddp.storage import Storage, redact_url

LOOK_INTERVAL = 2.0  # seconds between two looks for a request
WRITE_INTERVAL = 10.0  # seconds between two writes of the status, which cost money on a cloud
STACKS = "stacks.txt"  # first file of each answer


class WatchedRun(Protocol):
    """What a status is made of: the driver's run, see `driver.Run`."""

    job: Job
    attempt: Attempt | None  # the latest attempt


@dataclass(eq=False)
class Inside:
    """A thread through which people can look into `run`, until `close`."""

    run: WatchedRun
    state: events.RunState
    _status: RunStatus | None = None  # the newest one in the store
    _error: BaseException | None = None
    _has_ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._storage = Storage(self.run.job.checkpoints, timeout=0)
        self._thread = start_thread("inside", self._serve)

    def close(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Note how the run has ended. An exit function of a context manager."""
        self._error = error
        self._has_ended.set()
        # The wait is bounded: a process that was asked to stop has seconds, and a store may hang.
        self._thread.join(ANSWER_TIMEOUT)

    def _serve(self) -> None:
        with contextlib.suppress(Exception):
            self._storage.delete(REQUEST)  # a request to an earlier driver
        is_over = False
        while not is_over:
            is_over = self._has_ended.wait(LOOK_INTERVAL)
            # Errors of the store: the next look may find it again.
            with contextlib.suppress(Exception):
                check_owner(self._storage, self.run.job.owner)
                self._write_status(is_over)
                self._serve_request()

    def _write_status(self, is_over: bool) -> None:
        """Write the status if it is due: at once for a new phase, else every `WRITE_INTERVAL`."""
        before = self._status
        status = make_status(self.run, self.state)
        if is_over:
            status.phase, status.reason = describe_end(self._error)
        if before:
            seconds = status.written_at - before.written_at
            if status.phase == before.phase and seconds < WRITE_INTERVAL:
                return
            if status.step > before.step > 0:
                status.steps_per_second = (status.step - before.step) / seconds
        self._storage.write(STATUS, to_json(status))
        self._status = status

    def _serve_request(self) -> None:
        """Begin with a request, or answer it."""
        contents = self._storage.read_if_there(REQUEST)
        request = read_json(Request, contents)
        if request is None or request.is_done:
            return
        attempt = self.run.attempt
        request.problem = refuse(request, attempt)
        if attempt and not request.problem:
            order = attempt.inspection.order
            if order is None or order.profile.id != request.id:
                place = self._storage.join(request.folder)
                profile = Profile(request.id, request.rank, request.num_steps, place)
                attempt.inspection.order = Order(profile, request.action == PROFILE)
                return
            if not order.is_done:
                return
            self._store_answer(request, order)
        request.is_done = True
        self._storage.replace(REQUEST, to_json(request), contents)

    def _store_answer(self, request: Request, order: Order) -> None:
        """Store the stacks, and note all files in the request."""
        why = find_culprits(order.ranks).why or "no rank is known to wait for another rank"
        lines = [f"at this moment {why}", *list_stacks(order.ranks), ""]
        self._storage.write(f"{request.folder}/{STACKS}", "\n".join(lines).encode())
        request.files = [STACKS, *order.profiled.files]
        request.problem = redact_url(order.profiled.problem)


def make_status(run: WatchedRun, state: events.RunState) -> RunStatus:
    """Return the status of a run that has not ended."""
    attempt = run.attempt
    phase, reason = find_phase(attempt, state)
    status = RunStatus(run.job.program.name, phase, redact_url(reason), time.time())
    if state.started:
        status.num_steps = state.started.num_steps
    if attempt:
        status.step, status.world_size = attempt.step, attempt.nodes.world_size
    return status


def find_phase(attempt: Attempt | None, state: events.RunState) -> tuple[str, str]:
    """Return what a run does, and why; "" for a reason that is not known."""
    if state.awaited:
        return WAITING, state.awaited.reason
    if attempt is None:
        return WAITING, "its nodes"
    if isinstance(attempt.state, Stopping):
        return "saving", attempt.state.reason
    reason = ""
    if state.ended:
        reason = f"after the ranks ended: {state.ended.reason}"
    if isinstance(attempt.state, Killing | Ended):
        return "restarting", reason
    if attempt.step:
        return "training", reason
    return "running", reason


def describe_end(error: BaseException | None) -> tuple[str, str]:
    """Return the phase of a run that has ended with this error, or without, and the reason."""
    if error is None:
        return "finished", ""
    reason = redact_url(first_line(error) or type(error).__name__)
    if isinstance(error, TrainingStopped):
        return "stopped", reason
    return "failed", reason


def refuse(request: Request, attempt: Attempt | None) -> str:
    """Return why the ranks of an attempt cannot carry out a request now; "" if they can."""
    if attempt is None or not isinstance(attempt.state, Running):
        return "no rank runs now: ask again when `flyte-ddp status` says that the run trains"
    world_size = attempt.nodes.world_size
    if not 0 <= request.rank < world_size:
        return f"--rank: expected 0 to {world_size - 1}, got {request.rank}"
    return ""


def show_waits(job: Job, report: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that reports what a new cluster waits for, also as the run's status, which
    no driver keeps yet.
    """

    def show(reason: str) -> None:
        report(reason)
        status = RunStatus(job.program.name, WAITING, redact_url(reason), time.time())
        with contextlib.suppress(Exception):  # the store may be away
            Storage(job.checkpoints, timeout=0).write(STATUS, to_json(status))

    if not job.checkpoints:
        return report
    return show
