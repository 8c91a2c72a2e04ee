"""The process of a rank: its log, its environment, the call of the program with a session, and how
it ends.

Knows nothing of training: a job's program does (programs.py).

Imports no torch at the top: a rank must be killable, and must notice its parent's death, before the
seconds that torch takes to import. Nor may torch be imported before a function does it: a variable
that the function sets for torch would come too late. So the store where the ranks meet is served
from a thread that waits for the function's own import.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import faulthandler
import gc
import io
import multiprocessing
import os
import re
import resource
import select
import signal
import sys
import threading
import time
import traceback
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from socket import socket
from typing import TYPE_CHECKING, Any

import cloudpickle  # type: ignore[import-untyped]

from flyte_ddp import errors, events, session
from flyte_ddp.code.main_module import show_working_directory
from flyte_ddp.config.waits import POLL_INTERVAL
from flyte_ddp.errors import StopRequested, StorageUnavailable
from flyte_ddp.launch.protocol.messages import Outcome, RaisedError, RankBeat, Returned
from flyte_ddp.launch.protocol.programs import CUDA_OUT_OF_MEMORY, Job, Kind, Program
from flyte_ddp.launch.protocol.ranks import (
    STOP_SIGNALS,
    NodeRanks,
    rank_log,
    rank_stacks,
    semaphore_prefix,
)
from flyte_ddp.process.interpreter import end_threads, has_imported, process_config
from flyte_ddp.process.standard_streams import open_standard_streams
from flyte_ddp.process.threads import start_thread
from flyte_ddp.process.tracebacks import frames_of_user
from flyte_ddp.rank.collectives import entered_collectives, watch_main_thread
from flyte_ddp.rank.link import AgentLink, RankProcess
from flyte_ddp.rank.session import Session
from flyte_ddp.storage.redaction import redact_url

if TYPE_CHECKING:
    from torch.distributed import Store

MAX_RETURNED_BYTES = 64 << 20
ENDED = "flyte_ddp/num_ended"  # the store's counter of calls that have returned
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # constants of glibc's malloc.h
KEPT_BYTES, RETURNED_BYTES = 1 << 30, 1 << 20

# Errors of gloo, NCCL and the store on a rank whose peer has died: a consequence, never the cause.
PEER_FAILURE = re.compile(
    r"gloo|NCCL|[Cc]onnection (was )?(closed|reset|refused)|Broken "
    r"pipe|recvValue|sendBytes|failed to recv"
)

# Errors of torch and multiprocessing if /dev/shm is too small, full, absent or read-only.
SHARED_MEMORY = re.compile(r"</torch_|out of shared memory|SemLock\(")
SHARED_MEMORY_HINT = (
    "data_workers: expected a /dev/shm that loader processes can write batches to: give the task a "
    "larger shared_memory (shared_memory_gib in settings.toml, docker run --shm-size), or use "
    "data_workers: 0"
)

# Errors of a process without another thread, process or memory, by a limit of the shell; each with
# the limit, its option of ulimit, and its unit.
LIMITS = {
    "can't start new thread|Resource temporarily unavailable": (
        resource.RLIMIT_NPROC,
        "-u",
        "threads and processes",
    ),
    "failed to map segment|[Cc]an(?:not|'t) allocate memory": (
        resource.RLIMIT_AS,
        "-v",
        "bytes of addresses",
    ),
}

MEMORY_HINT = (
    "A larger gradient_accumulation needs less memory; grow_accumulation_on_oom: true doubles it "
    "when necessary"
)


def run_rank(
    job: Job,
    node: NodeRanks,
    local_rank: int,
    listener: socket | None,
    pipe: Connection,
    beats: Sequence[RankBeat],
    logs: str,
    memory: tuple[Any, ...] = (),
) -> None:
    """Run rank `node.first_rank + local_rank` and send over `pipe` how it ended.

    Args:
        listener: the listening socket of the rendezvous, on rank 0; None elsewhere.
        pipe: to and from the agent.
        beats: the heartbeats of the node's ranks, in memory that they share with the agent.
        logs: directory of the rank's files for the length of the run.
        memory: the node's memory files, passed on to `RankProcess` as `slots`, `copies`, `parts`.
    """
    show_working_directory()
    open_standard_streams()
    # The agent can then kill this process with all that it starts, such as loader workers.
    os.setpgid(0, 0)
    # The agent removes what loader processes leave when they are killed.
    process_config()["semprefix"] = f"/{semaphore_prefix(logs)}"
    rank = node.first_rank + local_rank
    file = os.open(rank_log(logs, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    os.close(file)
    # Lines appear while the rank runs, and before it is killed.
    typing.cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    # A signal also writes the stacks, for a rank that hangs in C code with the interpreter's lock.
    stacks = open(rank_stacks(logs, rank), "a", encoding="utf-8")  # noqa: SIM115 - open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable()
    link = AgentLink(pipe, beats, local_rank, stacks)
    # Python's own hook would print what the agent reports. Other hooks call this hook.
    sys.excepthook = lambda kind, error, frames: None
    process = os.getpid()
    try:
        keep_freed_memory()
        os.environ.update(environment(job, node, local_rank))
        _limit_threads()
        outcome = call_program(RankProcess(job, node, local_rank, listener, link, *memory))
    except BaseException as error:
        if os.getpid() != process:
            raise  # a process that the program forked is no rank
        # The end of this process may wait for dead peers. The driver ends it in time.
        link.send(Returned(Outcome.FAILED, describe_error(error)))
        # Python calls the hook, too: W&B's hook marks its run as failed.
        if not isinstance(error, SystemExit):
            sys.excepthook(type(error), error, frames_of_user(error) or error.__traceback__)
        flush_files()
    else:
        flush_files()
        link.send(Returned(outcome))
        # From now on a thread of gloo may abort this process: its message is dropped.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def call_program(process: RankProcess) -> Outcome:
    """Call the program, and send rank 0's value once every rank's call has returned. Return whether
    the program is done, or has stopped because the session asked for it.

    Raises:
        ValueError: the value is too large to be sent.
    """
    program = process.job.program
    if program.logging is not None:
        program.logging.apply()
    store = _Store(process)
    process.open_store = store.open
    current = Session(process)
    session.make_current(current)
    if program.kind is not Kind.RECIPE:
        current.reporter.emit_start()
        if process.node.world_size > 1:
            timeout = min(program.needs.stall_timeout, program.left_timeout)
            watch_main_thread(process.link.position, timeout)
    if process.node.num_nodes > 1 and program.kind is not Kind.COMMAND:
        start_thread("copies", _receive_copies, process)
    value = _call(program, current)
    current.close()
    # Ranks of several nodes learn from the store which ranks have ended.
    if process.node.num_nodes > 1:
        store.open()  # may import torch, which a process that has shut down its threads cannot
    end_threads()  # threads and exit functions may use the store
    store.wait_until_all_ended()
    if current.stop.is_stopping:
        return Outcome.STOPPED
    seconds = time.time() - process.job.launched_at
    reporter = current.reporter
    reporter.emit(events.RunFinished(reporter.step, seconds, value, **current.results))
    return Outcome.DONE


def _call(program: Program, current: Session) -> bytes:
    """Return the program's value, pickled; nothing if the session has ended the program. Raises the
    errors of `call_program`.
    """
    # The process looks like one that multiprocessing has not started: a script may check this, or
    # choose a start method.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.current_process().name = "MainProcess"
    rank, value = os.getpid(), b""
    with current.finish_on_error(), contextlib.suppress(StopRequested):
        value = cloudpickle.loads(program.call)()
    if os.getpid() != rank:  # a process that the program forked is no rank
        raise SystemExit(0)
    if len(value) > MAX_RETURNED_BYTES:
        raise ValueError(
            f"{program.name}: expected a value of at most {MAX_RETURNED_BYTES >> 20} MiB, got "
            f"{len(value) >> 20} MiB: write it to session.checkpoints, and return where it is"
        )
    return value


def flush_files() -> None:
    """Flush open files, because a daemon thread that waits in gloo may abort this process at its
    end.
    """
    # Not the frozen objects: to list those would copy the pages that this process shares with its
    # server. The standard streams are the only files among them.
    known = gc.get_objects()
    for kind in (io.TextIOWrapper, io.BufferedWriter):
        for file in (sys.stdout, sys.stderr, *[each for each in known if type(each) is kind]):
            # The file may be closed, or its reader may have ended, or a program has put another
            # object in the place of a stream.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                file.flush()


def _receive_copies(process: RankProcess) -> None:
    """Take copies of another node's states into the memory of this one, once the program has
    imported torch.
    """
    while not has_imported("torch"):
        time.sleep(POLL_INTERVAL)
    from flyte_ddp.checkpoints.memory import receive_copies

    source = process.node.copied_rank(process.rank)
    receive_copies(process.copies, source, process.link.send, process.open_store)


@dataclass(eq=False)
class _Store:
    """The store where the ranks meet: served by rank 0's process, from a thread, until the last
    rank has ended.
    """

    process: RankProcess
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # set when the store is needed now, even if this process then imports torch
    _is_needed: threading.Event = field(default_factory=threading.Event)
    _store: Store | None = None

    def __post_init__(self) -> None:
        if self.process.rank == 0:
            start_thread("store", self._serve)

    def open(self) -> Store:
        """Return the store, as a client on all ranks but rank 0."""
        self._is_needed.set()
        with self._lock:
            if self._store is None:
                self._store = self.process.connect()
        return self._store

    def wait_until_all_ended(self) -> None:
        """Wait, on rank 0, for the functions of all ranks: they may use the store until they
        return.
        """
        node, link = self.process.node, self.process.link
        link.position.has_ended = True
        if self.process.rank > 0:
            if node.first_rank > 0:
                with contextlib.suppress(RuntimeError):  # rank 0 has ended already, by os._exit
                    self.open().add(ENDED, 1)
            return
        while not link.all_ended:
            time.sleep(POLL_INTERVAL)
        while node.num_nodes > 1 and self.open().add(ENDED, 0) < node.world_size - node.num_ranks:
            time.sleep(POLL_INTERVAL)

    def _is_asked_for(self) -> bool:
        # A command's own processes use the store, and this process imports no torch itself.
        listener = self.process.listener
        if listener is None or self.process.job.program.kind is not Kind.COMMAND:
            return False
        return bool(select.select([listener], [], [], 0)[0])

    def _serve(self) -> None:
        while not (
            has_imported("torch") or self._is_needed.wait(POLL_INTERVAL) or self._is_asked_for()
        ):
            pass
        self.open()


def describe_error(error: BaseException) -> RaisedError:
    if isinstance(error, SystemExit):  # Python prints no traceback either
        message = str(error.code)
        if isinstance(error.code, int):
            message = f"exit code {error.code}"
        return RaisedError("SystemExit", message, "", False)
    text = "".join(
        traceback.format_exception(type(error), error, frames_of_user(error) or error.__traceback__)
    )
    message = str(error)
    is_consequence = (
        isinstance(error, (RuntimeError, OSError))
        # A StorageUnavailable may also report a refused connection.
        and not isinstance(error, StorageUnavailable)
        and bool(PEER_FAILURE.search(message))
    )
    name = type(error).__name__
    # torch's message for an error in a loader process contains the process's traceback
    original = message.partition("\nOriginal ")[2]
    if original:
        before, _, after = original.rpartition(f"{name}: ")
        text, message = original, ""
        if before:
            message = after.strip()
    if any(getattr(module, name, type(error)) is not type(error) for module in (errors, builtins)):
        name = f"{type(error).__module__}.{name}"  # another class has the plain name
    if SHARED_MEMORY.search(text):
        lines = (line for line in reversed(text.splitlines()) if "Error" in line)
        reason = next(lines, message).strip()
        return RaisedError("ConfigError", f"{SHARED_MEMORY_HINT}: {reason}", "", False)
    lack = _describe_limit(message)
    if lack:
        return RaisedError("ConfigError", lack, "", False)
    if name == CUDA_OUT_OF_MEMORY:
        message += f". {MEMORY_HINT}"
    groups = []
    if is_consequence:
        groups = entered_collectives(has_failed=True)
    return RaisedError(name, redact_url(message), redact_url(text), is_consequence, groups)


def _describe_limit(message: str) -> str:
    """Return which limit of the shell explains an error's message; "" if none does."""
    for pattern, (limit, option, unit) in LIMITS.items():
        if re.search(pattern, message):
            most = resource.getrlimit(limit)[0]
            if most != resource.RLIM_INFINITY:
                return (
                    f"ulimit {option}: expected more than {most} {unit}, with which a rank ended: "
                    f"{message}"
                )
    return ""


def environment(job: Job, node: NodeRanks, local_rank: int) -> dict[str, str]:
    """Return the variables that torch and its libraries read, with torchrun's names and meaning.

    The user's own variables replace defaults such as a network interface or a number of threads,
    because a user may know faster values. A config's number of threads replaces the user's.
    """
    rank = node.first_rank + local_rank
    values = {
        "RANK": rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": node.world_size,
        "LOCAL_WORLD_SIZE": node.num_ranks,
        "GROUP_RANK": node.node_rank,
        "GROUP_WORLD_SIZE": node.num_nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": node.world_size,
        "MASTER_ADDR": node.host,
        "MASTER_PORT": node.port,
        "TORCHELASTIC_RUN_ID": node.run_id,
        "TORCHELASTIC_RESTART_COUNT": node.num_restarts,
        "TORCHELASTIC_MAX_RESTARTS": node.max_restarts,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(STOP_SIGNALS),
        # All ranks are clients of a store that is served for them.
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    defaults = {
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
        "OMP_NUM_THREADS": str(node.num_threads),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    given = {name: os.environ[name] for name in defaults if name in os.environ}
    if node.has_set_threads:
        given.pop("OMP_NUM_THREADS", None)
    return (
        {name: str(value) for name, value in values.items()}
        | defaults
        | given
        | dict(job.program.needs.variables)
    )


def _limit_threads() -> None:
    """Apply OMP_NUM_THREADS to a torch that was imported before this process was forked: torch
    reads the variable at its import only.
    """
    torch = sys.modules.get("torch")
    number = os.environ["OMP_NUM_THREADS"].partition(",")[0].strip()
    if torch is not None and number.isdigit():
        torch.set_num_threads(max(1, int(number)))


def keep_freed_memory(num_bytes: int = KEPT_BYTES) -> None:
    """Keep glibc from returning a step's activations to the kernel, only to fault them in again in
    the next step.

    By default glibc maps large blocks one by one, and trims the end of the heap until larger blocks
    were freed. This costs up to 5,000 page faults and a quarter of the time of a step of `mnist`.
    With this call the process keeps its peak, because it needs the memory again. A C library
    without `mallopt` is left as it is.

    Args:
        num_bytes: larger blocks are returned at once. A rank that splits its model passes
            `RETURNED_BYTES`, in order to have more memory. Otherwise gathered weights would stay in
            the heap of each thread that gathered them: 0.6 GB in a rank on a CPU with 100 million
            parameters.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            mallopt(option, num_bytes)
