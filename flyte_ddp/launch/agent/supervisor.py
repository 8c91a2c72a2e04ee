"""Run the ranks of one node as child processes, watch them, report how they end, and end them on
the driver's command.

How they start is in rank_start.py. `torch.multiprocessing.spawn` is not used for three reasons:
importing it costs this process the 3.5 s that the ranks need for themselves; it makes every rank
import the caller's main module again (under `pyflyte run` all of flytekit, 2.5 s); and it notices
only that a rank has exited, not that a rank hangs, and lets the others wait in their collectives
meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from flyte_ddp.checkpoints.memory import NodeMemory
from flyte_ddp.code.main_module import hide_main_module
from flyte_ddp.code.source_code import compute_library_digest
from flyte_ddp.config.waits import ANSWER_TIMEOUT, POLL_INTERVAL
from flyte_ddp.errors import (
    OUT_OF_MEMORY,
    ConfigError,
    DataError,
    FailureKind,
    NodeLost,
    RankFailure,
    log_failures,
)
from flyte_ddp.events import NodeMeasured
from flyte_ddp.launch.agent.link import Link
from flyte_ddp.launch.agent.output import LogTail
from flyte_ddp.launch.agent.rank_start import ForkedProcess, enter_rank, start_rank
from flyte_ddp.launch.agent.resolver import ask_name
from flyte_ddp.launch.protocol.failures import find_place, shorten, shorten_traceback
from flyte_ddp.launch.protocol.messages import (
    DEATH_GRACE,
    Beat,
    Device,
    Emitted,
    End,
    Entered,
    Failed,
    Group,
    Inspect,
    Inspected,
    InspectedRank,
    Outcome,
    Pace,
    PartSaved,
    Prepared,
    Profile,
    Profiled,
    RaisedError,
    RankBeat,
    Resumed,
    Returned,
    Stop,
    Submitted,
)
from flyte_ddp.launch.protocol.programs import Job, Kind
from flyte_ddp.launch.protocol.ranks import NodeRanks, rank_log, rank_stacks, semaphore_prefix
from flyte_ddp.launch.protocol.signals import StopRequest, find_signal
from flyte_ddp.process.devices import gpu_uuids, locate, measure_gpus
from flyte_ddp.process.memory_limits import count_oom_kills, memory_use
from flyte_ddp.process.temporary_directories import temporary_directory
from flyte_ddp.process.threads import start_thread

CRASH_LINES = 500  # lines of output that may show why a signal ended a process
# message with which gloo ends a process
GLOO_SIZES = re.compile(r"enforce fail at [^\n]*?\] ([^\n]*?nbytes\. \d+ vs \d+)")
INTERFACES = "GLOO_SOCKET_IFNAME"  # variable with the user's own choice, which ranks get
LOG_TAIL = 20  # lines of a dead rank's output in the error
MAX_MESSAGE = 6  # lines of an exception's own message
NUM_STACK_LOOKS = 10
UNKNOWN_CODE = 255  # exit code of a forked process after its server, which knows the code, died
# directory with the heartbeats and named semaphores; macOS does not list the semaphores
SHARED_MEMORY = Path("/dev/shm")
# Seconds between two measurements, or this share of the attempt so far if it is longer. So days of
# a run have a thousand points, not a hundred thousand.
MIN_INTERVAL, INTERVAL_SHARE = 15.0, 0.01
SAMPLE_SECONDS = 1.0  # time over which the use of the cores is measured, as for GPUs


def supervise(
    job: Job,
    node: NodeRanks,
    listener: socket.socket | None,
    prepared: Future[str] | None,
    link: Link,
    memory: NodeMemory,
) -> None:
    """Run the ranks of one node to their end. The last message says how they ended. Then all their
    processes are gone.

    Args:
        listener: the rendezvous' listening socket, on the node of rank 0; None elsewhere.
        prepared: the directory of the prepared data on this node; None for a program without data.
        link: link to the driver. It gets the ranks' state about every `POLL_INTERVAL` seconds.
        memory: memory of this node for the states of the ranks.
    """
    end = End(Outcome.FAILED)
    try:
        _check_interfaces()
        _check_library(job.library)
        if node.world_size > 1:
            start_thread("resolver", ask_name, node.host, link.relay)
        with temporary_directory("ranks-") as logs:
            ranks = _Ranks(job, node, listener, logs, link, memory)
            try:
                end = ranks.watch(prepared)
            finally:
                ranks.kill()
    except (ConfigError, DataError) as error:
        cause = f"{type(error).__name__}: {error}"
        link.send(Failed(RankFailure(cause, cause=cause)))
    except Exception as error:
        what = f"{type(error).__name__}: {error}\n{shorten_traceback(traceback.format_exc())}"
        link.send(Failed(NodeLost(what, cause=type(error).__name__)))
    link.send_lines()
    link.send(dataclasses.replace(end, parts=memory.held))


def _check_interfaces() -> None:
    """Raise ConfigError if gloo is to use a network interface that this machine does not have."""
    known = [name for _, name in socket.if_nameindex()]
    given = os.environ.get(INTERFACES, "")
    if not set(filter(None, given.split(","))) <= set(known):
        raise ConfigError(
            f"{INTERFACES}: expected network interfaces of {socket.gethostname()} "
            f"({', '.join(known)}), got {given!r}"
        )


def _check_library(expected: str) -> None:
    """Raise ConfigError if new ranks would import another library than the driver, for example
    after an upgrade in the middle of the run.
    """
    found = compute_library_digest()
    if found != expected:
        raise ConfigError(
            f"flyte_ddp: expected {expected[:8]}, with which this run has started, got "
            f"{found[:8]} on {socket.gethostname()}: start the run again, and it goes on with the "
            "other version"
        )


@dataclass
class Rank:
    """The agent's view of one rank."""

    number: int
    process: BaseProcess
    pipe: Connection
    log: LogTail
    outcome: Outcome | None = None  # outcome that the rank reported
    # collectives that the rank has entered; None until it has answered
    groups: list[Group] | None = None
    device: str = ""  # name of the rank's GPU, for people

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the rank has just died
            self.pipe.send(message)

    def kill_group(self, number: int = signal.SIGKILL) -> bool:
        """Send a signal to the rank and all processes that it started, without waiting. Return
        whether there was any process.
        """
        # The rank makes itself the leader of a group early on. Until then it has no children. The
        # number of a finished group may belong to another user's group now.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid or 0, number)
            return True
        return False


@dataclass(eq=False)
class _Ranks:
    """The rank processes of this node. The constructor starts them."""

    job: Job
    node: NodeRanks
    listener: socket.socket | None
    logs: str
    link: Link
    memory: NodeMemory
    ranks: list[Rank] = field(default_factory=list)
    sent_deadline: float | None = None  # deadline of the stop that the ranks know; None before

    def __post_init__(self) -> None:
        node = self.node
        self.left_parts = self.memory.begin(node.num_restarts, node.ranks_in_memory)
        self.num_oom_kills = count_oom_kills()
        try:
            self.beats = RawArray(RankBeat, node.num_ranks)
        except OSError as error:
            raise ConfigError(
                f"{SHARED_MEMORY}: expected to be able to write there, got {error}"
            ) from error
        try:
            with hide_main_module():
                for local_rank in range(node.num_ranks):
                    self._start(local_rank)
        except BaseException:
            self.kill()
            raise
        start_thread("measurements", self._measure)

    def _measure(self) -> None:
        """Measure and send the use of the node from time to time. Stop at the first error. Runs in
        a thread, because the driver of a broken GPU may hang.
        """
        started = time.monotonic()
        with log_failures("measurements"):
            while not self.link.is_over.wait(
                max(MIN_INTERVAL, INTERVAL_SHARE * (time.monotonic() - started))
            ):
                self.link.send(Emitted(measure_node(self.node)))

    def _start(self, local_rank: int) -> None:
        number = self.node.first_rank + local_rank
        # A pipe per rank: a process killed while it writes to a queue takes the queue's lock with
        # it.
        pipe, end = Pipe()
        source = self.node.copied_rank(number)
        copies = []
        if self.node.num_nodes > 1:
            copies = self.memory.slots_of(source)
        memory = (self.memory.slots_of(number), copies, self.left_parts)
        listener = None
        if local_rank == 0:
            listener = self.listener
        arguments = (self.job, self.node, local_rank, listener, end, self.beats, self.logs, memory)
        process = start_rank(self.job.program, enter_rank, arguments, f"rank-{number}")
        # Now only the rank holds this end. So either side sees the other's death as the end of the
        # pipe.
        end.close()
        self.ranks.append(Rank(number, process, pipe, LogTail(rank_log(self.logs, number))))

    def watch(self, prepared: Future[str] | None) -> End:
        """Pass data, events and failures on until every rank has ended or has to be killed. Return
        how the ranks ended.
        """
        has_data, stop = prepared is None, self.link.stop
        while True:
            running = [each for each in self.ranks if not each.outcome or each.process.is_alive()]
            if not running:
                break
            self._read_ranks(running)
            self._relay_logs()
            if prepared and not has_data and prepared.done():
                has_data = True
                self._give_data(prepared.result())
            self.link.note_beat(self._beat(has_data))
            question = self.link.question
            if question:
                self.link.question = None
                self._answer(question)
            if stop.is_urgent or time.monotonic() > stop.deadline:
                return End(Outcome.KILLED, stop.reason)
            if stop.is_set() and not has_data:
                return End(Outcome.STOPPED, "the run was stopped while its data were prepared")
            if stop.is_set():
                self._pass_on(stop)
        self._relay_logs()
        outcomes = {rank.outcome for rank in self.ranks}
        worst = (Outcome.FAILED, Outcome.STOPPED, Outcome.DONE)
        return End(next(each for each in worst if each in outcomes))

    def _read_ranks(self, running: Sequence[Rank]) -> None:
        """Wait a moment for messages, and read all that have come."""
        pipes = [self.link.alarm, *(rank.pipe for rank in self.ranks if not rank.pipe.closed)]
        ready = wait([*pipes, *(rank.process.sentinel for rank in running)], POLL_INTERVAL)
        if self.link.alarm in ready:
            self.link.alarm.recv_bytes()
        for rank in self.ranks:
            # A process that the rank forked may hold the rank's pipes open, its sentinel's too:
            # ask the kernel.
            has_exited = rank.process.exitcode is not None
            if not rank.pipe.closed and (has_exited or rank.pipe in ready):
                self._read(rank)
            if has_exited:
                self._note_death(rank)

    def _give_data(self, directory: str) -> None:
        for rank, beat in zip(self.ranks, self.beats, strict=True):
            beat.progress_at = time.monotonic()  # no progress was possible until now
            rank.send(Prepared(directory))

    def _pass_on(self, stop: StopRequest) -> None:
        """Ask the ranks to stop, and again if the deadline changes: a growth may become a loss."""
        if self.sent_deadline != stop.deadline:
            self.sent_deadline = stop.deadline
            for rank in self.ranks:
                rank.send(Stop(stop.reason, stop.deadline - time.monotonic()))

    def _answer(self, question: Inspect | Profile) -> None:
        """Answer a question. A request for a profile is passed on to its rank, which answers."""
        if isinstance(question, Inspect):
            self.link.send(Inspected(question.number, list(self._inspect(question))))
            return
        for rank in self.ranks:
            if rank.number == question.rank:
                rank.send(question)

    def kill(self) -> None:
        """Kill every rank and all it started, and wait until they are gone."""
        for rank in self.ranks:
            rank.kill_group()
            if rank.process.is_alive():
                rank.process.kill()
        for rank in self.ranks:
            rank.process.join()
            rank.pipe.close()
        # A loader process of a rank that died before it is no child of this process, so it cannot
        # be joined.
        deadline = time.monotonic() + DEATH_GRACE
        while any(rank.kill_group(0) for rank in self.ranks) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL / 10)
        for rank in self.ranks:
            with contextlib.suppress(ValueError):  # the process hangs in the kernel
                rank.process.close()  # closes the pipes of the process, too
        _remove_semaphores(semaphore_prefix(self.logs))
        self._relay_logs(at_end=True)

    def _read(self, rank: Rank) -> None:
        """Take in the messages of `rank`."""
        try:
            while rank.pipe.poll():
                match rank.pipe.recv():
                    case Emitted(event):
                        self.link.emit(event)
                    case Entered(groups):
                        rank.groups = groups
                    case Device(name):
                        rank.device = name
                    case PartSaved() as saved:
                        self.memory.take(saved)
                    case Resumed(attempt, turn):
                        self.memory.keep_only(attempt, turn)
                    case Submitted() | Profiled() as message:
                        self.link.send(message)
                    case Returned(outcome, error):
                        rank.outcome = outcome
                        if error:
                            self._report(_describe_error(rank.number, error))
        except (EOFError, OSError):
            deadline = time.monotonic() + DEATH_GRACE
            while rank.process.exitcode is None and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL / 10)
            rank.pipe.close()
            if rank.process.exitcode is not None or not self._may_exit:
                # else it has become another program, whose exit code tells how it ended
                self._note_death(rank)

    @property
    def _may_exit(self) -> bool:
        """True if a rank may end its own process. Exit code 0 then counts as success."""
        return self.job.program.kind is not Kind.RECIPE

    def _report(self, failure: RankFailure) -> None:
        self._relay_logs()
        self.link.send_lines()
        self.link.send(Failed(failure))

    def _note_death(self, rank: Rank) -> None:
        rank.pipe.close()
        if rank.outcome:
            return
        code, is_stopping = rank.process.exitcode, self.sent_deadline is not None
        is_asked = is_stopping and code == -find_signal(self.link.stop.reason)
        if is_asked or (code == 0 and self._may_exit):
            rank.outcome = Outcome.DONE
            if is_stopping:
                rank.outcome = Outcome.STOPPED
            self.beats[self.ranks.index(rank)].has_ended = True
        else:
            rank.outcome = Outcome.FAILED
            self._report(self._describe_death(rank))

    def _describe_death(self, rank: Rank) -> RankFailure:
        """Return the failure of a rank that exited without a report."""
        code = rank.process.exitcode
        details = {}
        if code is not None and code < 0:
            kind, cause = FailureKind.SIGNAL, signal.Signals(-code).name
            what = f"rank {rank.number} was killed by {cause}"
            output = rank.log.last_lines(CRASH_LINES)
            # faulthandler lists the main thread last.
            details["place"] = find_place(output.rpartition("Thread 0x")[2].splitlines())
            sizes = GLOO_SIZES.search(output)
            if sizes:
                details["sizes"] = sizes[1].strip()
            if cause == "SIGKILL" and count_oom_kills() > self.num_oom_kills:
                cause = OUT_OF_MEMORY
                what += (
                    ": its container ran out of memory. Request more memory, or make batches "
                    "smaller"
                )
            elif cause == "SIGKILL":
                what += ". Unless a person killed it, the machine ran out of memory"
        else:
            kind, cause = FailureKind.EXIT, f"exit code {code}"
            what = f"rank {rank.number} exited with code {code}"
            if code == UNKNOWN_CODE and isinstance(rank.process, ForkedProcess):
                what += ", or the server that it was forked from was killed"
        tail = rank.log.last_lines(LOG_TAIL)
        if tail:
            what = f"{what}\n{shorten(tail)}"
        return RankFailure(what, rank.number, kind, cause, details=details)

    def _inspect(self, question: Inspect) -> Iterator[InspectedRank]:
        """Yield each rank with its collectives and the stacks of all its threads."""
        asked = [rank for rank in self.ranks if rank.process.is_alive()]
        for rank in asked:
            rank.groups = None
            with contextlib.suppress(FileNotFoundError):  # stacks of an earlier question
                os.truncate(rank_stacks(self.logs, rank.number), 0)
            rank.send(question)
        for look in range(NUM_STACK_LOOKS):
            time.sleep(ANSWER_TIMEOUT / NUM_STACK_LOOKS)
            for rank in self.ranks:
                if not rank.pipe.closed:
                    self._read(rank)
            # A rank sends its collectives when its stacks are written.
            unanswered = [each for each in asked if each.groups is None]
            if not unanswered:
                break
            if look == NUM_STACK_LOOKS // 2:
                for rank in unanswered:
                    if rank.process.is_alive() and not self._stacks_of(rank):
                        # No thread of the rank answers, so a signal asks for its stacks.
                        os.kill(rank.process.pid or 0, signal.SIGUSR1)
        now = time.monotonic()
        for rank, beat in zip(self.ranks, self.beats, strict=True):
            stacks = self._stacks_of(rank) or (
                f"  no stack: none was written within {ANSWER_TIMEOUT:g} s"
            )
            # The threads are listed from the newest to the oldest, which is the main thread.
            stack = stacks.strip("\n").split("\n\n")[-1].splitlines()
            ago = None
            if beat.progress_at:
                ago = now - beat.progress_at
            yield InspectedRank(rank.number, beat.step, ago, stack, rank.groups, stacks)

    def _stacks_of(self, rank: Rank) -> str:
        """Return the stacks of all threads that `rank` has written so far."""
        try:
            return Path(rank_stacks(self.logs, rank.number)).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _beat(self, has_data: bool) -> Beat:
        now, beats = time.monotonic(), self.beats
        numbered = list(zip(self.ranks, beats, strict=True))
        progress_at = max(beat.progress_at for beat in beats)
        silent_for = 0.0
        if has_data and progress_at:
            silent_for = now - progress_at
        failed = [rank for rank in self.ranks if rank.outcome is Outcome.FAILED]
        paces = [
            Pace(rank.number, beat.num_steps, list(beat.seconds), rank.device)
            for rank, beat in numbered
            if beat.num_steps
        ]
        waiting = [beat for beat in beats if beat.waits_since and not beat.has_ended]
        return Beat(
            step=max(beat.step for beat in beats),
            is_writing=beats[0].is_writing and self.ranks[0].process.is_alive(),
            is_stoppable=beats[0].is_stoppable,
            is_ending=any(rank.process.is_alive() for rank in failed),
            has_reported=progress_at > 0,
            silent_for=silent_for,
            paces=paces,
            waits=[now - beat.waits_since for beat in waiting],
            ended=[rank.number for rank, beat in numbered if beat.has_ended],
        )

    def _relay_logs(self, at_end: bool = False) -> None:
        for rank in self.ranks:
            prefix = ""
            if self.job.program.shows_ranks:
                prefix = f"[rank {rank.number}] "
            for line in rank.log.new_lines(at_end):
                self.link.relay(f"{prefix}{line}")


def measure_node(node: NodeRanks) -> NodeMeasured:
    """Return how much of this machine and of the GPUs of its ranks is in use, and where the ranks
    run. The measurement takes `SAMPLE_SECONDS`.
    """
    import psutil  # type: ignore[import-untyped]

    cpu = psutil.cpu_percent(SAMPLE_SECONDS) / 100
    used, limit = memory_use()
    num_gpus, uuids = 0, [""] * node.num_ranks
    if node.use_gpus:
        num_gpus, uuids = node.num_ranks, gpu_uuids(node.num_ranks)
    use = (cpu, used / limit, limit, *measure_gpus(num_gpus))
    return NodeMeasured(node.node_rank, *use, *locate(), node.first_rank, uuids)


def _describe_error(rank: int, error: RaisedError) -> RankFailure:
    """Return the failure of a rank that has raised an error."""
    what, cause = f"rank {rank} failed: {error.name}", f"{error.name}: {error.message}"
    if error.message:
        what += f": {shorten(error.message, MAX_MESSAGE)}"
    details = {"groups": error.groups}
    failure = RankFailure(what, rank, FailureKind.EXCEPTION, cause, error.is_consequence, details)
    if error.trace and not failure.is_user_error:  # a user's error needs no traceback
        failure.args = (f"{what}\n{shorten_traceback(error.trace)}",)
    return failure


def _remove_semaphores(prefix: str) -> None:
    """Remove the named semaphores that killed processes have left. Otherwise they stay until this
    process ends.
    """
    for file in SHARED_MEMORY.glob(f"sem.{prefix}-*"):
        name = f"/{file.name.removeprefix('sem.')}"
        with contextlib.suppress(OSError):
            file.unlink()
        # The tracker, which the ranks share, would remove it again, with a warning. It does not
        # know the semaphore of a rank that was killed before it registered it.
        resource_tracker.register(name, "semaphore")
        resource_tracker.unregister(name, "semaphore")
