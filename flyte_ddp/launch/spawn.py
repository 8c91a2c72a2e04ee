"""Start the ranks of one machine, watch them, and stop them all when one dies.

The ranks are child processes of Python's `spawn` method, the one below `torch.multiprocessing.spawn`. Torch's own
function is not used for three reasons: importing it costs this process the 3.5 s that the ranks need for themselves; it
makes every rank import the caller's main module again (under `pyflyte run` all of flytekit, 2.5 s); and it learns of a
rank's end only, not of a rank that hangs, and lets the others wait in their collectives meanwhile.

`train` is the whole of a single-node run. `supervise` is the part of it that the Dask launcher runs on every node.
"""

from __future__ import annotations

import contextlib
import contextvars
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from flyte_ddp import events
from flyte_ddp.errors import ConfigError, RankFailure, TrainingStopped
from flyte_ddp.launch.dispatch import Dispatcher
from flyte_ddp.rank.job import Job, NodeRanks, rank_log, rank_stacks
from flyte_ddp.rank.process import run_rank
from flyte_ddp.recipes import get_recipe
from flyte_ddp.storage import Storage

STOP_GRACE = 20.0  # seconds to write a last checkpoint in; Kubernetes kills a pod 30 s after SIGTERM
CAUSE_GRACE = 0.5  # seconds in which a second failure may turn out to be the cause of the first
POLL = 0.1  # seconds between looks at logs, beats and the wish to stop
LOG_TAIL = 20  # lines of a failed rank's output in the error
DEATH_GRACE = 2.0  # seconds for the kernel to end what was killed, and for whoever adopted it to notice

_hiding = threading.Lock()


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


@dataclass
class _Rank:
    """The supervisor's view of one rank."""

    number: int
    process: BaseProcess
    up: Connection
    down: Connection
    log: _LogTail
    outcome: str = ""  # "done", "stopped" or "error", as the rank said; "" until it did


def num_gpus() -> int:
    """GPUs that this process may use. Asks torch only on a machine that has any."""
    if not os.path.exists("/dev/nvidiactl"):
        return 0
    import torch

    return torch.cuda.device_count()


def num_cores() -> int:
    """CPU cores that this process may use: what its affinity and its container's quota leave of the machine."""
    from dask.system import cpu_count

    return max(1, int(cpu_count()))


def default_num_processes() -> int:
    """One rank per GPU; without any, two where there are two cores."""
    return num_gpus() or min(2, num_cores())


def check(job: Job, num_processes: int) -> None:
    """Find what is wrong with a run before any process is started for it.

    Raises:
        ConfigError: an unknown recipe or option of it, a batch that cannot be shared evenly, more ranks than GPUs, a
            place for checkpoints that cannot be written to.
    """
    get_recipe(job.recipe, job.config.recipe_options)
    if num_processes < 1:
        raise ConfigError(f"num_processes: {num_processes} is out of range; accepted is a whole number of at least 1")
    gpus = num_gpus()
    if gpus and num_processes > gpus:
        raise ConfigError(f"num_processes: {num_processes} ranks need as many GPUs; accepted here is at most {gpus}")
    if job.config.backend == "nccl" and not gpus:
        raise ConfigError("backend: 'nccl' needs GPUs, and there are none here; accepted here are auto and gloo")
    if job.config.sync_batch_norm and num_processes > 1 and not gpus:
        raise ConfigError("sync_batch_norm: true needs GPUs, which torch's has alone; accepted here is false")
    job.config.batch_size_per_rank(num_processes)
    Storage(job.checkpoints).check_access("checkpoints")


def train(
    job: Job,
    data: Callable[[], str],
    num_processes: int = 0,
    listeners: Sequence[events.Listener] = (),
    relay: Callable[[str], None] | None = None,
) -> Result:
    """Train on this machine, start to end.

    Args:
        data: gives the directory of the prepared data. Called while the ranks are already starting.
        num_processes: ranks; 0 is one per GPU, or two on a machine without.
        listeners: told of every event, in a thread with the caller's context variables.
        relay: called with every line that a rank prints; standard error by default.

    Raises:
        ConfigError: before any process is started.
        RankFailure: a rank failed; all of them are gone.
        TrainingStopped: SIGINT or SIGTERM ended the run, after a last checkpoint.
    """
    num_processes = num_processes or default_num_processes()
    check(job, num_processes)
    gpus = num_gpus()
    state = events.RunState(keep_steps=False)
    with (
        listening_socket("127.0.0.1") as listener,
        Dispatcher([state, *listeners]) as dispatcher,
        stop_on_signals() as stop,
    ):
        place = NodeRanks(
            first_rank=0,
            num_ranks=num_processes,
            world_size=num_processes,
            host="127.0.0.1",
            port=listener.getsockname()[1],
            interface="lo0" if sys.platform == "darwin" else "lo",
            use_gpus=gpus > 0,
            num_threads=max(1, num_cores() // num_processes),
        )
        supervise(job, place, listener, data, dispatcher.emit, stop, relay)
    return Result.of(state)


def supervise(
    job: Job,
    place: NodeRanks,
    listener: socket.socket | None,
    data: Callable[[], str],
    emit: Callable[[events.Event], None],
    stop: StopRequest,
    relay: Callable[[str], None] | None = None,
    on_beat: Callable[[int], None] | None = None,
) -> None:
    """Run the ranks of one node to their end. When this returns or raises, all their processes are gone.

    Args:
        listener: the rendezvous' listening socket, on the node of rank 0; None elsewhere.
        data: gives the directory of the prepared data on this node.
        emit: called with every event, on the node of rank 0.
        stop: asks for an early end when set.
        on_beat: called about every `POLL` seconds with the step that this node's ranks have reached.

    Raises:
        RankFailure, TrainingStopped: as `train`.
    """
    relay = relay or print_line
    with _logs_directory() as logs:
        gang = _Gang(job, place, listener, logs, relay)
        try:
            gang.watch(_Preparation(data), emit, stop, on_beat)
        finally:
            gang.kill()


class _Gang:
    """The rank processes of this node. Starting them is making it."""

    def __init__(
        self, job: Job, place: NodeRanks, listener: socket.socket | None, logs: str, relay: Callable[[str], None]
    ) -> None:
        self.job = job
        self.place = place
        self.logs = logs
        self.relay = relay
        self.ranks: list[_Rank] = []
        self.failures: list[tuple[bool, float, RankFailure]] = []  # (is a consequence, when noticed, failure)
        self.oom_kills = _oom_kills()
        context = multiprocessing.get_context("spawn")
        # Per local rank: when it last got on, and the step it had reached. No lock: each slot has one writer.
        self.beats = context.RawArray("d", [time.monotonic(), 0.0] * place.num_ranks)
        try:
            with _no_main_module():
                for local_rank in range(place.num_ranks):
                    self._start(context, local_rank, listener if local_rank == 0 else None)
        except BaseException:
            self.kill()
            raise

    def _start(self, context: Any, local_rank: int, listener: socket.socket | None) -> None:
        number = self.place.first_rank + local_rank
        # One pipe per rank and direction: a process killed while it writes to a queue takes the queue's lock with it.
        up, rank_up = context.Pipe(duplex=False)
        rank_down, down = context.Pipe(duplex=False)
        process = context.Process(
            target=run_rank,
            args=(self.job, self.place, local_rank, listener, rank_up, rank_down, self.beats, self.logs),
            name=f"rank-{number}",
        )
        process.start()
        # Only the rank holds its ends now, so that either side sees the other's death as the end of a pipe.
        rank_up.close()
        rank_down.close()
        self.ranks.append(_Rank(number, process, up, down, _LogTail(rank_log(self.logs, number))))

    def watch(
        self,
        preparation: _Preparation,
        emit: Callable[[events.Event], None],
        stop: StopRequest,
        on_beat: Callable[[int], None] | None,
    ) -> None:
        """Pass data and events on until every rank has ended well. Raise when one has not, or when nothing moves."""
        stop_deadline = 0.0
        has_data = False
        while any(rank.process.is_alive() or not rank.outcome for rank in self.ranks):
            live = [rank for rank in self.ranks if not rank.up.closed]
            ready = wait([*(rank.up for rank in live), *(rank.process.sentinel for rank in live)], timeout=POLL)
            for rank in live:
                if rank.up in ready or rank.process.sentinel in ready:
                    self._read(rank, emit)
            self._relay_logs()
            if self.failures and time.monotonic() - self.failures[0][1] > CAUSE_GRACE:
                raise self._root_cause()
            if not has_data and preparation.is_done:
                has_data = True
                self._pass_on(preparation.result())
            if has_data and not self.failures:
                self._check_progress()
            if on_beat:
                on_beat(self._step())
            if stop.is_set() and not has_data:
                raise TrainingStopped(f"{stop.reason}: the run was stopped while its data were prepared")
            if stop.is_set() and not stop_deadline:
                stop_deadline = time.monotonic() + STOP_GRACE
                for rank in self.ranks:
                    _tell(rank, "stop")
            if stop.is_urgent or (stop_deadline and time.monotonic() > stop_deadline):
                raise TrainingStopped(f"{stop.reason}: the ranks were killed {self._where_stopped()}")
            if not live and not self.failures:
                time.sleep(POLL / 10)  # every pipe has ended, the processes are about to
        self._relay_logs()
        if self.failures:
            raise self._root_cause()
        if any(rank.outcome == "stopped" for rank in self.ranks):
            raise TrainingStopped(f"{stop.reason}: the run was stopped {self._where_stopped()}")

    def kill(self) -> None:
        """End every rank and all it started, at once, and wait until they are gone."""
        for rank in self.ranks:
            if rank.process.pid is not None:
                # The rank makes itself the leader of a group early on. Until then it has no children.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)
                if rank.process.is_alive():
                    rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.up.close()
            rank.down.close()
        # A loader process of a rank that died before it is nobody's child here, so there is nothing to join.
        deadline = time.monotonic() + DEATH_GRACE
        while any(_has_group(rank.process.pid) for rank in self.ranks) and time.monotonic() < deadline:
            time.sleep(POLL / 10)
        self._relay_logs()

    def _pass_on(self, directory: str) -> None:
        now = time.monotonic()
        for index, rank in enumerate(self.ranks):
            self.beats[2 * index] = now  # until now it could not get on
            _tell(rank, "data", directory)

    def _read(self, rank: _Rank, emit: Callable[[events.Event], None]) -> None:
        """Take what `rank` has said, or note how it ended."""
        try:
            while rank.up.poll():
                kind, *values = rank.up.recv()
                if kind == "event":
                    emit(events.from_dict(values[0]))
                    continue
                rank.outcome = kind
                if kind == "error":
                    name, message, text, is_consequence = values
                    failure = RankFailure(
                        f"rank {rank.number} failed: {name}: {message}\n{text}",
                        rank.number,
                        "exception",
                        f"{name}: {message}",
                        is_consequence,
                    )
                    self.failures.append((is_consequence, time.monotonic(), failure))
        except (EOFError, OSError):
            rank.up.close()
            rank.process.join(timeout=5)
            if not rank.outcome:
                self.failures.append((False, time.monotonic(), self._death_of(rank)))
                rank.outcome = "error"

    def _death_of(self, rank: _Rank) -> RankFailure:
        """What to say of a rank that ended without a word."""
        self._relay_logs()
        code = rank.process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            why = f"rank {rank.number} was killed by {name}"
            if name == "SIGKILL":
                if _oom_kills() > self.oom_kills:
                    why += ": its container ran out of memory. Request more memory, or make batches smaller"
                else:
                    why += ". Unless somebody did that on purpose, the machine ran out of memory"
            kind, cause = "signal", name
        else:
            why, kind, cause = f"rank {rank.number} ended with exit code {code}", "exit", f"exit code {code}"
        tail = rank.log.last_lines(LOG_TAIL)
        return RankFailure(f"{why}\n{tail}" if tail else why, rank.number, kind, cause)

    def _root_cause(self) -> RankFailure:
        """The failure that explains the others: the first that is not the echo of a dead peer."""
        return min(self.failures, key=lambda failure: failure[:2])[2]

    def _check_progress(self) -> None:
        """Raise with every rank's stacks where none has got on for the stall timeout."""
        limit = self.job.config.stall_timeout
        now = time.monotonic()
        silent = min(now - self.beats[2 * index] for index in range(len(self.ranks)))
        if silent < limit:
            return
        for rank in self.ranks:
            if rank.process.is_alive() and rank.process.pid is not None:
                os.kill(rank.process.pid, signal.SIGUSR1)
        time.sleep(1.0)  # for the ranks to write them
        lines = [f"no rank has got on for {silent:.0f} s (stall_timeout: {limit:g})"]
        for index, rank in enumerate(self.ranks):
            with contextlib.suppress(FileNotFoundError):
                stacks = Path(rank_stacks(self.logs, rank.number)).read_text()
                ago = now - self.beats[2 * index]
                step = int(self.beats[2 * index + 1])
                lines.append(f"--- rank {rank.number}, at step {step}, last got on {ago:.0f} s ago\n{stacks}")
        raise RankFailure("\n".join(lines), -1, "stall", "stall")

    def _step(self) -> int:
        return int(max(self.beats[2 * index + 1] for index in range(len(self.ranks))))

    def _where_stopped(self) -> str:
        return (
            f"at step {self._step()}. Its checkpoints are in {self.job.checkpoints}: "
            "the same run with the same checkpoints goes on from there"
        )

    def _relay_logs(self) -> None:
        for rank in self.ranks:
            for line in rank.log.new_lines():
                self.relay(f"[rank {rank.number}] {line}")


class _Preparation:
    """`data` at work in a thread with the caller's context variables.

    So a rank's death and the wish to stop are noticed meanwhile. A thread that is not waited for to the end goes on
    until the process ends, but does not hold it up.
    """

    def __init__(self, data: Callable[[], str]) -> None:
        self._data = data
        self._directory = ""
        self._error: BaseException | None = None
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="data", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> str:
        if self._error is not None:
            raise self._error
        return self._directory

    def _run(self) -> None:
        try:
            self._directory = self._data()
        except BaseException as error:
            self._error = error


class StopRequest:
    """A wish, possibly repeated, to end a run early. Set from a signal handler or another thread."""

    def __init__(self) -> None:
        self.reason = ""
        self.num_requests = 0

    def set(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.num_requests += 1

    def is_set(self) -> bool:
        return self.num_requests > 0

    @property
    def is_urgent(self) -> bool:
        """Whether it was asked for twice: whoever asks does not want to wait for a checkpoint."""
        return self.num_requests > 1


@contextlib.contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """SIGINT and SIGTERM become a stop request for the length of the block.

    Signal handlers belong to the main thread; in another one this changes nothing, and whoever owns the main thread
    has to pass the wish on.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: types.FrameType | None) -> None:
        stop.set(signal.Signals(number).name)

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def listening_socket(host: str) -> Iterator[socket.socket]:
    """A listening socket on a free port of `host`.

    It is bound before its port is told to anyone and handed to rank 0 open, so nobody can take the port in between.
    """
    with socket.create_server((host, 0), backlog=1024) as listener:
        yield listener


class _LogTail:
    """The lines that appear at the end of a growing file."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.position = 0
        self.rest = b""

    def new_lines(self) -> list[str]:
        try:
            with open(self.path, "rb") as file:
                file.seek(self.position)
                contents = file.read()
        except FileNotFoundError:
            return []
        self.position += len(contents)
        *lines, self.rest = (self.rest + contents).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def last_lines(self, count: int) -> str:
        try:
            return "\n".join(self.path.read_text(errors="replace").splitlines()[-count:])
        except FileNotFoundError:
            return ""


def _tell(rank: _Rank, *message: Any) -> None:
    with contextlib.suppress(OSError):  # it has just died, which its end of the other pipe will tell
        rank.down.send(message)


@contextlib.contextmanager
def _no_main_module() -> Iterator[None]:
    """Hide the main module while children start, so that they do not import it.

    `spawn` makes a child import its parent's main module, in case what it runs is defined there. Ours never is, and
    under `pyflyte` that module is the whole of flytekit.
    """
    with _hiding:  # two runs in threads of one process would take each other's stand-in for the real one
        main_module = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main_module


@contextlib.contextmanager
def _logs_directory() -> Iterator[str]:
    directory = tempfile.mkdtemp(prefix="ranks-")
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _has_group(leader: int | None) -> bool:
    """Whether a process of the group of `leader`, which has ended, is left."""
    if leader is None:
        return False
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):  # the latter: the number has gone to somebody else
        return False
    return True


def _oom_kills() -> int:
    """How often the kernel killed something in this container for want of memory; 0 where it does not tell."""
    try:
        counters = Path("/sys/fs/cgroup/memory.events").read_text().split()
        return int(counters[counters.index("oom_kill") + 1])
    except (OSError, ValueError, IndexError):
        return 0


def print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 - a rank's output belongs on the terminal
