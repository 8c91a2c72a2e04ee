"""The process of a rank: its log, its environment, and how it ends.

Knows nothing of training: a job's program does (programs.py).

Imports nothing heavy: a rank must be killable, and must notice its parent's death, before the seconds that torch takes
to import.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import io
import multiprocessing
import os
import re
import signal
import sys
import traceback
import types
import typing
from multiprocessing.connection import Connection
from socket import socket
from typing import Any

from flyte_ddp import errors
from flyte_ddp.errors import StopRequested, StorageUnavailable
from flyte_ddp.launch.process.call import call_program
from flyte_ddp.launch.process.end import frames_of_user, release_program, run_exit_handlers
from flyte_ddp.launch.process.link import RankProcess, SupervisorLink
from flyte_ddp.launch.process.malloc import keep_freed_memory
from flyte_ddp.launch.process.output import rank_stacks
from flyte_ddp.launch.process.programs import CUDA_OUT_OF_MEMORY, Job
from flyte_ddp.launch.process.ranks import NodeRanks, semaphore_prefix

# Errors of gloo, NCCL and the store on a rank whose peer has died: a consequence, never the cause.
PEER_FAILURE = re.compile(
    r"gloo|NCCL|[Cc]onnection (was )?(closed|reset|refused)|Broken pipe|recvValue|sendBytes|failed to recv"
)

# Modules whose frames lead to a user's function.
STARTERS = (
    *("flyte_ddp.launch.process.entry", "flyte_ddp.launch.process.programs", "flyte_ddp.launch.process.call"),
    *("flyte_ddp.launch.run", "flyte_ddp.flytekit_plugin.rank_call", "contextlib", "runpy"),
)

MEMORY_HINT = (
    "A larger gradient_accumulation needs less memory; grow_accumulation_on_oom: true doubles it when necessary"
)


def run_rank(
    job: Job,
    node: NodeRanks,
    local_rank: int,
    listener: socket | None,
    up: Connection,
    down: Connection,
    beats: Any,
    logs: str,
    memory: tuple[Any, ...] = (),
) -> None:
    """Run rank `node.first_rank + local_rank` and send over `up` how it ended: "done", "stopped" or "error".

    Args:
        listener: the listening socket of the rendezvous, on rank 0; None elsewhere.
        up, down: pipes to and from the supervisor.
        beats: shared memory, see `_Ranks` in launch/supervisor.py.
        logs: directory of the rank's files for the length of the run; see output.py.
        memory: of the node, as `RankProcess` has it from `memory` on.
    """
    os.setpgid(0, 0)  # so that the supervisor can kill this process with all that it starts, such as loader workers
    # The supervisor removes what loader processes leave when they are killed.
    multiprocessing.current_process()._config["semprefix"] = f"/{semaphore_prefix(logs)}"  # type: ignore[attr-defined]
    rank = node.first_rank + local_rank
    os.environ["TORCHELASTIC_ERROR_FILE"] = error_file = job.program.output.error_file(logs, node, local_rank)
    os.makedirs(os.path.dirname(error_file), exist_ok=True)
    for descriptor, stream in job.program.output.streams(logs, node, local_rank).items():
        file = os.open(stream.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, descriptor)
        os.close(file)
    # Lines appear while the rank runs, and before it is killed.
    typing.cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)
    # By a signal as well, for a rank that hangs in C code which lets no other thread run.
    stacks = open(rank_stacks(logs, rank), "w")  # noqa: SIM115 - open for the life of the process
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.enable()
    link = SupervisorLink(up, down, beats, local_rank, stacks)
    sys.excepthook = _be_quiet
    try:
        keep_freed_memory()
        os.environ.update(environment(job, node, local_rank))
        call_program(RankProcess(job, node, local_rank, listener, link, *memory))
    except BaseException as error:
        if isinstance(error, StopRequested):
            outcome: tuple[Any, ...] = ("stopped",)
        else:
            outcome = ("error", *_describe(error))
            link.send(*outcome)  # now, because what follows may wait for dead peers; the supervisor ends it in time
            if outcome[-1]:  # a peer's death is the cause, so the state may be worth something
                link.wait_until_released()
            _call_excepthook(error)
        has_failed = True
        traceback.clear_frames(error.__traceback__)
    else:
        outcome, has_failed = ("done",), False
    with contextlib.suppress(Exception):
        if has_failed:
            run_exit_handlers(after_error=True)
        release_program()  # ends loader processes too, which would leave their semaphores to the resource tracker
    if outcome[0] != "error":
        link.send(*outcome)
    os._exit(has_failed)  # the supervisor kills what is left of the group


def _describe(error: BaseException) -> tuple[str, str, str, bool]:
    """Return the name of an error's class, its message, its traceback, and whether a peer's death is its cause."""
    if isinstance(error, SystemExit):  # without a traceback, as Python ends
        message = f"exit code {error.code}" if isinstance(error.code, int) else str(error.code)
        return "SystemExit", message, "", False
    text = "".join(traceback.format_exception(type(error), error, frames_of_user(error) or _frames_of_program(error)))
    try:
        message = str(error)
    except Exception as problem:
        message = f"a message that cannot be shown ({type(problem).__name__})"
    is_consequence = (
        isinstance(error, (RuntimeError, OSError))
        and not isinstance(error, StorageUnavailable)  # which may also say that a connection was refused
        and bool(PEER_FAILURE.search(message))
    )
    name = type(error).__name__
    if any(getattr(module, name, type(error)) is not type(error) for module in (errors, builtins)):
        name = f"{type(error).__module__}.{name}"  # not the one that has this name here
    if name == CUDA_OUT_OF_MEMORY:
        message += f". {MEMORY_HINT}"
    return name, message, text, is_consequence


def _call_excepthook(error: BaseException) -> None:
    """Call the hook that the program has set for errors, as Python does: W&B marks its run as failed by its own."""
    if not isinstance(error, SystemExit):
        try:
            sys.excepthook(type(error), error, _frames_of_program(error))
        except Exception:
            traceback.print_exc()


def _be_quiet(kind: type[BaseException], error: BaseException, frames: types.TracebackType | None) -> None:
    """Stand in for Python's own hook, which prints what the supervisor reports; hooks call the one before them."""


def _frames_of_program(error: BaseException) -> types.TracebackType | None:
    """Return the traceback of `error` without the frames that lead to a user's function: these are ours."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_globals.get("__name__") in STARTERS:
        frames = frames.tb_next
    return frames or error.__traceback__


def environment(job: Job, node: NodeRanks, local_rank: int) -> dict[str, str]:
    """Return the variables that torch and its libraries read, with torchrun's names and meaning.

    Those that choose a network interface or a number of threads are the user's own where they are set: a user may know
    a faster one.
    """
    values = {
        "RANK": node.first_rank + local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": node.world_size,
        "LOCAL_WORLD_SIZE": node.num_ranks,
        "GROUP_RANK": node.node_rank,
        "GROUP_WORLD_SIZE": node.num_nodes,
        "ROLE_NAME": "default",
        "ROLE_RANK": node.first_rank + local_rank,
        "ROLE_WORLD_SIZE": node.world_size,
        "MASTER_ADDR": node.host,
        "MASTER_PORT": node.port,
        "TORCHELASTIC_RUN_ID": node.run_id,
        "TORCHELASTIC_RESTART_COUNT": node.num_restarts,
        "TORCHELASTIC_MAX_RESTARTS": node.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # all ranks are clients of a store that is served for them
    }
    defaults = {
        "GLOO_SOCKET_IFNAME": node.interface,
        "NCCL_SOCKET_IFNAME": node.interface,
        "OMP_NUM_THREADS": str(node.num_threads),
    }
    given = {name: os.environ[name] for name in defaults if name in os.environ}
    return {name: str(value) for name, value in values.items()} | defaults | given | job.program.environment
