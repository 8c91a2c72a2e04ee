"""Run the ranks of one node as child processes, watch them, and kill them all when one dies or all
stand still.

How they start is in rank_start.py. `torch.multiprocessing.spawn` is not used for three reasons:
importing it costs this process the 3.5 s that the ranks need for themselves; it makes every rank
import the caller's main module again (under `pyflyte run` all of flytekit, 2.5 s); and it notices
only that a rank has exited, not that a rank hangs, and lets the others wait in their collectives
meanwhile.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Pipe, wait
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

from flyte_ddp import events
from flyte_ddp.checkpoints import WRITE_GRACE
from flyte_ddp.config.background import call_in_background
from flyte_ddp.config.main_module import hide_main_module
from flyte_ddp.errors import (
    OUT_OF_MEMORY,
    ConfigError,
    DataError,
    NodeLost,
    RankFailure,
    TrainingStopped,
)
from flyte_ddp.launch.agent.link import Link
from flyte_ddp.launch.agent.output import LogTail
from flyte_ddp.launch.agent.rank_handle import DEATH_GRACE, Rank
from flyte_ddp.launch.agent.rank_start import ForkedProcess, enter_rank, start_rank
from flyte_ddp.launch.agent.scratch import own_directory
from flyte_ddp.launch.protocol.failures import (
    find_place,
    first_line,
    program_failure,
    shorten,
    shorten_traceback,
)
from flyte_ddp.launch.protocol.memory import NodeMemory, count_oom_kills
from flyte_ddp.launch.protocol.messages import KILLED, Beat
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.protocol.ranks import (
    NUM_SLOTS,
    PHASES,
    NodeRanks,
    rank_log,
    rank_stacks,
    semaphore_prefix,
)
from flyte_ddp.launch.protocol.stalls import (
    MAX_FRAMES,
    StalledRank,
    explain_collective,
    head_line,
    left_failure,
    mismatch_line,
    stall_failure,
)

# no failure of another rank ends a rank in these ways
NEVER_CONSEQUENCES = ("SIGKILL", OUT_OF_MEMORY)
CAUSE_GRACE = 0.5  # seconds in which a second failure may turn out to be the cause of the first
# seconds for a rank that has raised to call exit handlers and to write what its files hold back
END_GRACE = 3.0
POLL_INTERVAL = 0.1  # seconds between checks of logs, heartbeats and the stop request
CRASH_LINES = 500  # of its output that may say why a process was ended by a signal
# as gloo ends a process
GLOO_SIZES = re.compile(r"enforce fail at [^\n]*?\] ([^\n]*?nbytes\. \d+ vs \d+)")
INTERFACES = "GLOO_SOCKET_IFNAME"  # the user's own choice, which ranks are given
LOG_TAIL = 20  # lines of a dead rank's output in the error
MAX_MESSAGE = 6  # lines of an exception's own message
NUM_STACK_LOOKS = 10
# at most, for the ranks to write their stacks, and to send which collectives they have entered
STACK_SECONDS = 5.0
UNKNOWN_CODE = 255  # of a forked process whose server, which alone could read its code, is gone
# has the heartbeats, and named semaphores, which macOS does not list
SHARED_MEMORY = Path("/dev/shm")


def supervise(
    job: Job,
    node: NodeRanks,
    listener: socket.socket | None,
    data: Callable[[], str] | None,
    link: Link,
    memory: NodeMemory,
    relay: Callable[[str], None] | None = None,
) -> None:
    """Run the ranks of one node to their end, and send last how they ended. Then all their
    processes are gone.

    Args:
        listener: the rendezvous' listening socket, on the node of rank 0; None elsewhere.
        data: returns the directory of the prepared data on this node; None for a program that needs
            none.
        link: to the driver. About every `POLL_INTERVAL` seconds it gets what the ranks are at.
        memory: of this node, for the states of the ranks.
        relay: called with every line that a rank prints; by default the link's.
    """
    try:
        _check_interfaces()
        with own_directory("ranks-") as logs:
            prepared = call_in_background(data) if data else None
            ranks = _Ranks(job, node, listener, logs, link, memory, relay or link.relay)
            try:
                ranks.watch(prepared)
            finally:
                ranks.kill()
        end: Exception | None = None
    except TrainingStopped as stopped:
        end = NodeLost(str(stopped), cause=KILLED) if link.is_killed else stopped
    except RankFailure as failure:
        end = failure
    except (ConfigError, DataError) as error:
        cause = f"{type(error).__name__}: {error}"
        end = RankFailure(cause, cause=cause)
    except Exception as error:
        what = f"{type(error).__name__}: {error}\n{shorten_traceback(traceback.format_exc())}"
        end = NodeLost(what, cause=type(error).__name__)
    link.send_lines()
    link.send("end", end, memory.held)


def _check_interfaces() -> None:
    """Raise ConfigError if gloo is to use a network interface that this machine does not have."""
    known = [name for _, name in socket.if_nameindex()]
    given = os.environ.get(INTERFACES, "")
    if not set(filter(None, given.split(","))) <= set(known):
        raise ConfigError(
            f"{INTERFACES}: expected network interfaces of {socket.gethostname()} "
            f"({', '.join(known)}), got {given!r}"
        )


@dataclass(eq=False)
class _Ranks:
    """The rank processes of this node. The constructor starts them."""

    job: Job
    node: NodeRanks
    listener: socket.socket | None
    logs: str
    link: Link
    memory: NodeMemory
    relay: Callable[[str], None]
    ranks: list[Rank] = field(default_factory=list)
    # in the order in which they were noticed
    failures: list[RankFailure] = field(default_factory=list)
    failed_at: float = math.inf  # monotonic: when the first was
    sent_deadline: float | None = None  # of the stop, as the ranks know it; None before

    def __post_init__(self) -> None:
        node = self.node
        self.left_parts = self.memory.begin(node)
        self.num_oom_kills = count_oom_kills()
        # Two numbers per local rank: the time of its last progress, 0 before the first, and its
        # step. Then one per local rank: not 0 when its function has ended. One more: since when it
        # waits for other ranks, or 0. Then its steps and the seconds of their phases. After all
        # ranks': not 0 once they save their state when they are asked to stop. Last: not 0 while
        # rank 0 writes a checkpoint. No lock: a rank writes its own slots, and after its death this
        # process.
        try:
            self.beats = RawArray("d", NUM_SLOTS * node.num_ranks + 2)
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

    def _start(self, local_rank: int) -> None:
        number = self.node.first_rank + local_rank
        # A pipe per rank: a process killed while it writes to a queue takes the queue's lock with
        # it.
        pipe, end = Pipe()
        source = self.node.rank_away(number, -self.node.copy_distance)
        copies = self.memory.slots_of(source) if self.node.copy_distance else []
        memory = (self.memory.slots_of(number), copies, self.left_parts)
        listener = self.listener if local_rank == 0 else None
        arguments = (self.job, self.node, local_rank, listener, end, end, self.beats, self.logs)
        process = start_rank(self.job.program, enter_rank, (*arguments, memory), f"rank-{number}")
        # Only the rank holds it now, so that either side sees the other's death as the end of the
        # pipe.
        end.close()
        self.ranks.append(Rank(number, process, pipe, LogTail(rank_log(self.logs, number))))

    def watch(self, prepared: Future[str] | None) -> None:
        """Pass data and events on until every rank has succeeded.

        Raises:
            RankFailure: a rank failed, or no rank made progress for `stall_timeout` seconds.
            TrainingStopped: the run was stopped.
        """
        has_data, stop = prepared is None, self.link.stop
        while any(not rank.outcome or rank.process.is_alive() for rank in self.ranks):
            live = [
                rank
                for rank in self.ranks
                if not rank.pipe.closed or not rank.outcome or rank.process.is_alive()
            ]
            pipes = [rank.pipe for rank in live if not rank.pipe.closed]
            ready = wait([*pipes, *(rank.process.sentinel for rank in live)], POLL_INTERVAL)
            for rank in live:
                # A process that the rank forked may hold the rank's pipes open, its sentinel's too:
                # ask the kernel.
                has_exited = rank.process.exitcode is not None
                if not rank.pipe.closed and (has_exited or rank.pipe in ready):
                    self._read(rank)
                if has_exited:
                    self._note_death(rank)
            self._relay_logs()
            if self.failures and time.monotonic() - self.failed_at >= self._grace():
                raise self._error()
            if prepared and not has_data and prepared.done():
                has_data, directory = True, prepared.result()
                for index, rank in enumerate(self.ranks):
                    self.beats[2 * index] = time.monotonic()  # no progress was possible until now
                    rank.tell("data", directory)
            self.link.note_beat(self._beat())
            if self.link.left and not self.failures and (left := self._describe_left()):
                raise left
            has_stalled = (
                self.link.stalled_for is not None
                or self._silence() >= self.job.program.stall_timeout
            )
            if has_stalled and has_data and not self.failures:
                raise self._describe_stall()
            if stop.is_set() and not has_data:
                raise TrainingStopped(
                    f"{stop.reason}: the run was stopped while its data were prepared",
                    stop.reason,
                )
            if stop.is_urgent or time.monotonic() > stop.deadline:
                if (
                    self.failures
                    and (cause := self._root_cause()).kind == "exception"
                    and not cause.is_consequence
                ):
                    # other ranks' ends, for which the driver ends these, may be due to it
                    raise self._error()
                raise TrainingStopped(
                    f"{stop.reason}: the ranks were killed at step {self._step()}", stop.reason
                )
            if stop.is_set() and self.sent_deadline != stop.deadline:  # a growth may become a loss
                self.sent_deadline = stop.deadline
                for rank in self.ranks:
                    rank.tell("stop", int(stop.forwarded), stop.deadline - time.monotonic())
        self._relay_logs()
        if self.failures:
            raise self._error()
        if any(rank.outcome == "stopped" for rank in self.ranks):
            raise TrainingStopped(
                f"{stop.reason}: the run was stopped at step {self._step()}", stop.reason
            )

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
            with contextlib.suppress(ValueError):  # it hangs in the kernel
                rank.process.close()  # its pipes, too
        _remove_semaphores(semaphore_prefix(self.logs))
        self._relay_logs(at_end=True)

    def _read(self, rank: Rank) -> None:
        """Take in the messages of `rank`."""
        try:
            while rank.pipe.poll():
                match rank.pipe.recv():
                    case ("event", event):
                        self.link.emit(events.from_dict(event))
                    case ("collectives", groups):
                        rank.groups = groups
                    case ("device", device):
                        rank.device = device
                    case ("part", part):
                        self.memory.take(**part)
                    case ("resumed", attempt, turn):
                        self.memory.keep_only(attempt, turn)
                    case (outcome, *error):
                        rank.outcome = outcome
                        if error:
                            self._note_error(rank, *error)
        except (EOFError, OSError):
            deadline = time.monotonic() + DEATH_GRACE
            while rank.process.exitcode is None and time.monotonic() < deadline:
                time.sleep(POLL_INTERVAL / 10)
            rank.pipe.close()
            if rank.process.exitcode is not None or not self.job.program.may_exit:
                # else it has become another program, whose exit code tells how it ended
                self._note_death(rank)

    def _note_error(
        self, rank: Rank, name: str, message: str, text: str, is_consequence: bool
    ) -> None:
        if line := explain_collective(rank.number, message, text):
            self._note_failure(program_failure(line, rank.number))
            return
        what = f"rank {rank.number} failed: {name}" + (
            f": {shorten(message, MAX_MESSAGE)}" if message else ""
        )
        cause = f"{name}: {message}"
        failure = RankFailure(what, rank.number, "exception", cause, is_consequence)
        if text and not failure.is_user_error:  # one line explains those
            failure.args = (f"{what}\n{shorten_traceback(text)}",)
        self._note_failure(failure)

    def _note_failure(self, failure: RankFailure) -> None:
        self.failed_at = min(self.failed_at, time.monotonic())
        self.failures.append(failure)

    def _note_death(self, rank: Rank) -> None:
        rank.pipe.close()
        if rank.outcome:
            return
        if rank.process.exitcode == 0 and self.job.program.may_exit:
            rank.outcome = "stopped" if self.sent_deadline is not None else "done"
            self.beats[2 * len(self.ranks) + self.ranks.index(rank)] = 1.0
        else:
            self._note_failure(self._describe_death(rank))
            rank.outcome = "error"

    def _describe_death(self, rank: Rank) -> RankFailure:
        """Return the failure of a rank that exited without a report."""
        self._relay_logs()
        code = rank.process.exitcode
        details = {}
        if code is not None and code < 0:
            kind, cause = "signal", signal.Signals(-code).name
            what = f"rank {rank.number} was killed by {cause}"
            output = rank.log.last_lines(CRASH_LINES)
            # faulthandler lists the main thread last.
            details["place"] = place = find_place(output.rpartition("Thread 0x")[2].splitlines())
            if sizes := GLOO_SIZES.search(output):
                return program_failure(mismatch_line(rank.number, sizes[1], place), rank.number)
            if cause == "SIGKILL" and count_oom_kills() > self.num_oom_kills:
                cause = OUT_OF_MEMORY
                what += (
                    ": its container ran out of memory. Request more memory, or make batches "
                    "smaller"
                )
            elif cause == "SIGKILL":
                what += ". Unless a person killed it, the machine ran out of memory"
        else:
            what, kind, cause = (
                f"rank {rank.number} exited with code {code}",
                "exit",
                f"exit code {code}",
            )
            if code == UNKNOWN_CODE and isinstance(rank.process, ForkedProcess):
                what += ", or the server that it was forked from was killed"
        tail = rank.log.last_lines(LOG_TAIL)
        text = f"{what}\n{shorten(tail)}" if tail else what
        return RankFailure(text, rank.number, kind, cause, details=details)

    def _grace(self) -> float:
        """Return for how many seconds a failure may wait for its cause, and for a checkpoint that
        is being written.
        """
        first, is_writing = self.failures[0], self.beats[-1] and self.ranks[0].process.is_alive()
        if any(each.cause in NEVER_CONSEQUENCES for each in self.failures) or (
            first.is_user_error and not is_writing
        ):
            return 0.0
        if is_writing and first.kind == "exception":
            return WRITE_GRACE
        is_ending = any(rank.outcome == "error" and rank.process.is_alive() for rank in self.ranks)
        return END_GRACE if is_ending else CAUSE_GRACE

    def _root_cause(self) -> RankFailure:
        """Return the failure that explains the others: the first that is not a consequence of a
        dead peer.
        """
        return min(self.failures, key=lambda failure: failure.is_consequence)

    def _error(self) -> Exception:
        """Return the error of a rank that failed. After it was asked to stop, it may have got a
        signal, or raise.
        """
        cause = self._root_cause()
        if self.sent_deadline is None or cause.is_user_error:
            return cause
        stop = self.link.stop
        text = f"{stop.reason}: the run was stopped at step {self._step()} ({first_line(cause)})"
        return TrainingStopped(text, stop.reason)

    def _silence(self) -> float:
        """Return for how many seconds no rank has made progress; 0 where none is expected."""
        last = max(self.beats[2 * index] for index in range(len(self.ranks)))
        # A function that has never reported is not expected to; the driver compares the ranks that
        # wait.
        return time.monotonic() - last if last else self.link.stalled_for or 0.0

    def _describe_left(self) -> RankFailure | None:
        """Return the failure of ranks that wait for some that have ended; None if they turn out not
        to.
        """
        left, self.link.left = self.link.left, ()
        waiting = [rank for rank, _ in self._inspect() if rank.number not in left]
        return left_failure(waiting, left)

    def _describe_stall(self) -> RankFailure:
        """Return the failure of ranks that stand still, with every rank's stack and collectives."""
        silence, found = self._silence(), []
        for stalled, stacks in self._inspect():
            for line in [head_line([stalled]), *stacks.splitlines()]:
                self.relay(f"[rank {stalled.number}] {line}")
            found.append(stalled)
        limit = self.job.program.stall_timeout
        return stall_failure(
            found, f"no rank made progress for {silence:.0f} s (stall_timeout: {limit:g})"
        )

    def _inspect(self) -> Iterator[tuple[StalledRank, str]]:
        """Yield each rank with its collectives and the stacks of all its threads."""
        now = time.monotonic()
        halted = {rank.number: how for rank in self.ranks if (how := rank.how_halted())}
        asked = [
            rank for rank in self.ranks if rank.process.is_alive() and rank.number not in halted
        ]
        for rank in asked:
            rank.groups = None
            rank.tell("inspect")
        for look in range(NUM_STACK_LOOKS):
            time.sleep(STACK_SECONDS / NUM_STACK_LOOKS)
            for rank in self.ranks:
                if not rank.pipe.closed:
                    self._read(rank)
            # They are sent when the stacks are written.
            unanswered = [each for each in asked if each.groups is None]
            if not unanswered:
                break
            if look == NUM_STACK_LOOKS // 2:
                for rank in unanswered:
                    if rank.process.is_alive() and not self._stacks_of(rank):
                        os.kill(rank.process.pid or 0, signal.SIGUSR1)  # no thread of it can answer
        for index, rank in enumerate(self.ranks):
            stacks = self._stacks_of(rank)
            stacks = stacks or (
                "  no stack: "
                f"{halted.get(rank.number, f'none was written within {STACK_SECONDS:g} s')}"
            )
            ago = now - self.beats[2 * index] if self.beats[2 * index] else None
            # The threads are listed from the newest to the oldest, which is the main thread. Two
            # lines are no frames.
            main_thread = stacks.strip("\n").split("\n\n")[-1].splitlines()[: MAX_FRAMES + 2]
            step, how = int(self.beats[2 * index + 1]), halted.get(rank.number, "")
            yield StalledRank(rank.number, step, ago, main_thread, how, rank.groups), stacks

    def _stacks_of(self, rank: Rank) -> str:
        """Return the stacks of all threads that `rank` has written so far."""
        try:
            return Path(rank_stacks(self.logs, rank.number)).read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _beat(self) -> Beat:
        num_ranks, now = len(self.ranks), time.monotonic()
        has_ended, waiting_since = (
            self.beats[first * num_ranks : (first + 1) * num_ranks] for first in (2, 3)
        )
        return Beat(
            step=self._step(),
            is_writing=bool(self.beats[-1]),
            is_stoppable=bool(self.beats[-2]),
            has_reported=any(self.beats[2 * index] for index in range(num_ranks)),
            paces=self._paces(),
            waits=[
                now - since
                for since, ends in zip(waiting_since, has_ended, strict=True)
                if since and not ends
            ],
            ended=[rank.number for rank, ended in zip(self.ranks, has_ended, strict=True) if ended],
        )

    def _paces(self) -> list[dict[str, Any]]:
        """Return the paces of the ranks that have taken a step, as control/paces.py has them."""
        found, first, size = [], 4 * len(self.ranks), 1 + len(PHASES)
        for index, rank in enumerate(self.ranks):
            num_steps, *seconds = self.beats[first + size * index : first + size * (index + 1)]
            if num_steps:
                values = {"num_steps": int(num_steps), "seconds": seconds, "device": rank.device}
                found.append({"rank": rank.number, **values})
        return found

    def _step(self) -> int:
        return int(max(self.beats[2 * index + 1] for index in range(len(self.ranks))))

    def _relay_logs(self, at_end: bool = False) -> None:
        for rank in self.ranks:
            prefix = f"[rank {rank.number}] " if self.job.program.shows_ranks else ""
            for line in rank.log.new_lines(at_end):
                self.relay(f"{prefix}{line}")


def _remove_semaphores(prefix: str) -> None:
    """Remove the named semaphores that killed processes have left. Else they stay until this
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
