"""The rules for restarts: whether a run goes on after an attempt has failed, and how.

`decide` is a pure function, without a clock, a socket or a store. tests/launch/test_policy.py has
its table of cases.
"""

from __future__ import annotations

import builtins
import enum
from dataclasses import dataclass

from flyte_ddp.errors import (
    OUT_OF_MEMORY,
    FailureKind,
    GangLost,
    NodeLost,
    OutOfMemory,
    ProgramError,
    RankFailure,
    StorageUnavailable,
)

# Exceptions of these classes may be a machine's or a network's doing. Other builtin ones are bugs.
ENVIRONMENT_ERRORS = (RuntimeError, OSError, MemoryError, EOFError, SystemError)
BUGS = ("NotImplementedError", "RecursionError")  # RuntimeErrors that only code raises
CRASHES = ("SIGABRT", "SIGSEGV", "SIGFPE", "SIGILL")  # signals that a process ends itself with


class Next(enum.Enum):
    """How the run goes on after an attempt."""

    RESTART = "restart"  # all ranks start again; `max_restarts` limits how often
    WAIT = "wait"  # wait for the store, and then restart; not counted
    SHRINK = "shrink"  # restart with twice as many micro-batches of half the size; not counted
    # restart on more nodes, or without those that have announced that they go away; not counted
    MOVE = "move"
    RAISE = "raise"  # the failure itself


@dataclass(frozen=True)
class AttemptEnd:
    """The end of an attempt that did not finish the run."""

    # Failure that explains all others; None for a gang that saved its state to start again larger,
    # or without the nodes that leave.
    failure: RankFailure | NodeLost | None
    step: int  # latest step of the attempt; 0 if unknown
    # step of the newest state, in the store or in memory, at the start; -1 if unknown
    resumed_step: int
    kept_step: int = -1  # step of the newest state at the end; -1 if unknown
    is_announced: bool = False  # a node had announced that it goes away

    @property
    def cause(self) -> str:
        """What made the attempt fail, in a word or two. Empty if it succeeded."""
        if self.failure is None:
            return ""
        return self.failure.cause

    @property
    def is_out_of_memory(self) -> bool:
        """The kernel ended it for lack of memory."""
        return self.cause == OUT_OF_MEMORY

    @property
    def is_store_outage(self) -> bool:
        """It ended because the store could not be reached."""
        return self.cause.partition(":")[0] == StorageUnavailable.__name__

    @property
    def position(self) -> str:
        """The part of a message that says at which step it ended."""
        if self.step:
            return f"at step {self.step}"
        return "before its first step"

    @property
    def has_saved(self) -> bool:
        """It left a newer state than it found."""
        return self.kept_step > self.resumed_step >= 0

    def got_further_than(self, previous: AttemptEnd) -> bool:
        """Return whether this attempt started from a newer state than the previous one, and died at
        a later step.
        """
        died_at_same_step = 0 < previous.step >= self.step  # a function may report no step
        return self.resumed_step > previous.resumed_step and not died_at_same_step


@dataclass(frozen=True)
class Before:
    """The run up to the attempt that has just ended."""

    previous: AttemptEnd | None = None  # the end of the attempt before it, in the same process
    num_restarts: int = 0  # counted restarts since the last attempt that left a newer state
    # step from which the last attempt that ran out of memory had started, in any process
    oom_step: int | None = None


@dataclass(frozen=True)
class Rules:
    """The restarts and changes that the run allows."""

    max_restarts: int = 0  # counted restarts without a newer state in between
    # an exception that would repeat is answered by a restart too, as torchrun does
    repeats_bugs: bool = False
    can_shrink: bool = False  # the batches may be made smaller when a GPU has run out of memory


def decide(ended: AttemptEnd, before: Before, rules: Rules) -> Next | type[Exception]:
    """Return how the run goes on after an attempt has ended, or the class of the error to raise."""
    failure, previous = ended.failure, before.previous
    if failure is None:
        return Next.MOVE
    if rules.can_shrink:
        return Next.SHRINK
    if ended.is_store_outage:
        stays_away = (
            previous is not None
            and previous.is_store_outage
            and not ended.got_further_than(previous)
        )
        if stays_away:
            return StorageUnavailable
        return Next.WAIT
    if is_bug(ended, previous, rules.repeats_bugs):
        return Next.RAISE
    if previous is not None and _repeats_crash(ended, previous):
        return ProgramError
    is_again = before.oom_step is not None and ended.resumed_step <= before.oom_step
    if ended.is_out_of_memory and is_again:  # nothing was saved since then
        return OutOfMemory
    if ended.is_announced:  # a failure while a node leaves is due to the departure
        return Next.MOVE
    if before.num_restarts < rules.max_restarts:
        return Next.RESTART
    # An error that a rank caused itself is raised as it is. The consequence of a lost peer becomes
    # GangLost, which may be retried.
    if failure.is_consequence or failure.kind is FailureKind.LOST:
        return GangLost
    return Next.RAISE


def is_bug(ended: AttemptEnd, previous: AttemptEnd | None, repeats_bugs: bool) -> bool:
    """Return whether the program or its input is to blame. Another attempt would then fail in the
    same way.
    """
    failure = ended.failure
    if not isinstance(failure, RankFailure) or failure.kind is not FailureKind.EXCEPTION:
        return False
    if failure.is_user_error:
        return True
    if repeats_bugs:
        return False
    if failure.error_name in BUGS:
        return True
    kind = getattr(builtins, failure.error_name, None)
    if isinstance(kind, type) and not issubclass(kind, ENVIRONMENT_ERRORS):
        return True
    return previous is not None and previous.cause == ended.cause and ended.step <= previous.step


def _repeats_crash(ended: AttemptEnd, previous: AttemptEnd) -> bool:
    """Return whether a rank has crashed twice in the same line of the user's, without progress."""
    places = set()
    for each in (previous, ended):
        place = None
        if isinstance(each.failure, RankFailure):
            place = each.failure.details.get("place")
        places.add(place)
    is_same = previous.cause == ended.cause and len(places) == 1 and any(places)
    has_progress = ended.got_further_than(previous) or ended.step > previous.step
    return is_same and ended.cause in CRASHES and not has_progress
