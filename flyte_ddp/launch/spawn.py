"""Run a program on this machine: one process per rank, started, supervised and ended here.

What the supervisor does with the processes is in supervisor.py, and the Dask launcher runs the same on every node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import re
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flyte_ddp import events
from flyte_ddp.checkpoints.ownership import Ownership
from flyte_ddp.errors import (
    OUT_OF_MEMORY,
    ConfigError,
    OutOfMemory,
    RankFailure,
    StorageUnavailable,
    TrainingStopped,
)
from flyte_ddp.events.wall_time import AttemptEnded, AttemptStarted
from flyte_ddp.launch.devices import (
    check_requested_gpus,
    default_num_processes,
    has_mig_slices,
    num_cores,
    num_gpus,
)
from flyte_ddp.launch.dispatch import Dispatcher
from flyte_ddp.launch.failures import Ended, first_line, is_bug
from flyte_ddp.launch.process.job import Job, NodeRanks
from flyte_ddp.launch.process.programs import RecipeProgram, check_compiler
from flyte_ddp.launch.signals import stop_on_signals
from flyte_ddp.launch.supervisor import supervise
from flyte_ddp.storage import Storage, redact_url

OOM_NOTE = "out-of-memory.json"  # beside the checkpoints
TASK_MEMORY = "memory: expected a larger limit of the task (training.memory_gib in settings.toml)"
logger = logging.getLogger(__name__)
MORE_ACCUMULATION = "a GPU ran out of memory: the ranks restart from the last checkpoint with gradient_accumulation %d"
RESTART = "the gang was lost %s and restarts from its last checkpoint (restart %d of at most %d): %s"


@dataclass
class Result:
    """A finished run."""

    finished: events.RunFinished
    epochs: list[events.EpochFinished] = field(default_factory=list)  # those of earlier attempts included

    @classmethod
    def of(cls, state: events.RunState) -> Result:
        """Return the result of the finished run that `state` was folded from."""
        if state.finished is None:
            raise RuntimeError("the ranks exited without an error and without a result; please report this bug")
        return cls(state.finished, state.epochs)


def train(
    job: Job,
    data: Callable[[], str],
    num_processes: int = 0,
    listeners: Sequence[events.Listener] = (),
    relay: Callable[[str], None] | None = None,
) -> Result:
    """Train a recipe on this machine, start to end; `run_on_this_machine` with a job whose program is a recipe's."""
    return Result.of(run_on_this_machine(job, data, num_processes, listeners, relay))


def run_on_this_machine(
    job: Job,
    data: Callable[[], str] | None = None,
    num_processes: int = 0,
    listeners: Sequence[events.Listener] = (),
    relay: Callable[[str], None] | None = None,
    max_restarts: int = 0,
    port: int = 0,
) -> events.RunState:
    """Run the program of `job` in ranks on this machine, start to end, and return the state that its events fold to.

    Args:
        data: returns the directory of the prepared data. Called while the ranks are already starting. None for a
            program that needs none.
        num_processes: ranks; 0 is one per GPU, or two on a machine without.
        listeners: receive every event, in a thread with the caller's context variables.
        relay: called with every line that a rank prints; standard error by default.
        max_restarts: how often all ranks start again after one was killed, hung, or failed in a way that another
            attempt may not repeat.
        port: where the ranks meet; 0 for any free one.

    Raises:
        ConfigError: before any process is started, also if the checkpoints belong to another run.
        RankFailure: a rank failed; all of them are gone.
        TrainingStopped: SIGINT or SIGTERM ended the run, after a last checkpoint.
    """
    num_processes = num_processes or default_num_processes()
    check(job, num_processes)
    run_id = uuid.uuid4().hex
    gpus = num_gpus()
    state = events.RunState(keep_steps=False)
    data = functools.cache(data) if data else None
    num_restarts = 0
    previous: Ended | None = None
    with (
        own_place(job) as ownership,
        Dispatcher([state, *listeners]) as dispatcher,
        say_where_to_resume(job),
        stop_on_signals(job.program.signals, job.program.stop_grace) as stop,
    ):
        while True:
            job = dataclasses.replace(job, owner=ownership.token if ownership else "")
            step = _LatestStep()
            with listening_socket("127.0.0.1", port) as listener:
                node = NodeRanks(
                    first_rank=0,
                    num_ranks=num_processes,
                    world_size=num_processes,
                    host="127.0.0.1",
                    port=listener.getsockname()[1],
                    interface="lo0" if sys.platform == "darwin" else "lo",
                    use_gpus=gpus > 0,
                    num_threads=max(1, num_cores() // num_processes),
                    run_id=run_id,
                    num_restarts=num_restarts,
                    max_restarts=max_restarts,
                )
                dispatcher.emit(AttemptStarted(1, job.launched_at, waited_seconds=0.0))
                try:
                    supervise(job, node, listener, data, dispatcher.emit, stop, relay, step.on_beat)
                    return state
                except RankFailure as failure:
                    dispatcher.emit(AttemptEnded(step.value, first_line(failure), idle_seconds=0.0))
                    smaller = job.program.with_smaller_batches(failure, num_processes)
                    if failure.cause == OUT_OF_MEMORY and job.checkpoints:
                        resumed_step = state.started.resumed_step if state.started else newest_step(job.checkpoints)
                        refuse_repeated_oom(job, resumed_step, failure)
                    if smaller:
                        job = dataclasses.replace(job, program=smaller)
                        logger.warning(MORE_ACCUMULATION, smaller.config.gradient_accumulation)
                        continue
                    ended = Ended(failure, step.value, -1)
                    if num_restarts == max_restarts or is_bug(ended, previous, job.program):
                        raise
                    num_restarts, previous = num_restarts + 1, ended
                    reason = first_line(failure) if failure.kind == "stall" else failure  # the log has the stacks
                    logger.warning(RESTART, ended.position(), num_restarts, max_restarts, reason)


class _LatestStep:
    """The step that the ranks have reached."""

    value = 0

    def on_beat(self, step: int, is_writing: bool) -> None:
        self.value = max(self.value, step)


@contextlib.contextmanager
def own_place(job: Job) -> Iterator[Ownership | None]:
    """Own the place of the job's checkpoints for the length of the block; None if it has none."""
    if not job.checkpoints:
        yield None
        return
    with Ownership(job.checkpoints, job.run, job.program.store_timeout) as ownership:
        yield ownership


@contextlib.contextmanager
def say_where_to_resume(job: Job) -> Iterator[None]:
    """Add the newest checkpoint in the store to the message of a TrainingStopped, or that there is none."""
    try:
        yield
    except TrainingStopped as stopped:
        hint = ""
        if job.checkpoints and job.is_kept:
            with contextlib.suppress(StorageUnavailable, ConfigError):  # then nobody knows
                step, place = newest_step(job.checkpoints, timeout=0), redact_url(job.checkpoints)
                hint = f". Its checkpoints are in {place}: the same run resumes there, at step {step}"
                if not step:
                    hint = f". No checkpoint is in {place}: the same run starts at step 0"
        raise TrainingStopped(f"{stopped}{hint}") from None


def newest_step(checkpoints: str, timeout: float | None = None) -> int:
    """Return the step of the newest checkpoint, from which the next attempt resumes; 0 if there is none.

    Args:
        timeout: seconds in which requests are repeated; None for the store's default.
    """
    storage = Storage(checkpoints) if timeout is None else Storage(checkpoints, timeout=timeout)
    names = storage.names()
    return max((int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)\.json", name))), default=0)


def refuse_repeated_oom(
    job: Job, resumed_step: int, failure: object, larger: str = TASK_MEMORY, is_repeated: bool = False
) -> None:
    """Note beside the checkpoints that an attempt ran out of memory, for the next attempt at the same run.

    Args:
        resumed_step: from which the attempt had started, or the next one starts.
        failure: how it ended; its first line is shown.
        larger: the setting that limits the memory, and what it should be.
        is_repeated: True if the attempt before it is known to have ended likewise.

    Raises:
        OutOfMemory: the attempt before it did so too, and nothing was saved in between.
    """
    if job.checkpoints:
        storage = Storage(job.checkpoints, timeout=0)
        with contextlib.suppress(FileNotFoundError, StorageUnavailable):
            is_repeated |= resumed_step <= json.loads(storage.read(OOM_NOTE))["resumed_step"]
        with contextlib.suppress(StorageUnavailable):
            if is_repeated:
                storage.delete(OOM_NOTE)  # for the next run, in which the user has changed something
            else:
                storage.write(OOM_NOTE, json.dumps({"resumed_step": resumed_step}).encode())
    if is_repeated:
        raise OutOfMemory(
            f"{larger}, or a smaller evaluation_batch_size, data_workers or model: the ranks ran out of memory twice. "
            f"{first_line(failure)}"
        ) from (failure if isinstance(failure, Exception) else None)


def check(job: Job, num_processes: int) -> None:
    """Check the run before any process is started for it.

    Raises:
        ConfigError: what the program cannot do (an unknown recipe, a batch that cannot be split evenly), more ranks
            than GPUs, missing GPUs, a place for checkpoints that cannot be written to.
    """
    if num_processes < 1:
        raise ConfigError(f"num_processes: expected a whole number of at least 1, got {num_processes}")
    check_requested_gpus()
    gpus = num_gpus()
    if gpus and num_processes > gpus:
        raise ConfigError(f"num_processes: expected at most {gpus}, one per GPU, got {num_processes}")
    program = job.program
    program.check(num_processes, gpus > 0)
    check_compiler(program)
    uses_nccl = isinstance(program, RecipeProgram) and program.config.backend != "gloo"
    if gpus and num_processes > 1 and uses_nccl and has_mig_slices():
        raise ConfigError("backend: expected gloo between MIG slices of a GPU, got nccl")
    if job.checkpoints:
        Storage(job.checkpoints, timeout=program.store_timeout).check_access()


@contextlib.contextmanager
def listening_socket(host: str, port: int = 0) -> Iterator[socket.socket]:
    """Open a listening socket on `port` of `host`; 0 for a free one.

    It is bound before its port is known, and passed to rank 0 open, so no other process can take the port in between.

    Raises:
        ConfigError: another process has the port.
    """
    try:
        listener = socket.create_server((host, port), backlog=1024)
    except OSError as error:
        if not port:
            raise
        raise ConfigError(f"master_port: expected a port that is free, or 0, got {port}: {error}") from None
    with listener:
        yield listener
