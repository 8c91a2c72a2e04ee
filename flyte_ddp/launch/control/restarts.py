"""How a run goes on after an attempt: the decisions of policy.py, carried out and remembered.

A note beside the checkpoints tells later processes of the same run about an attempt that ran out of
memory. A store that cannot be reached is no error here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from dataclasses import dataclass, field

from flyte_ddp.checkpoints import stored_steps
from flyte_ddp.errors import (
    FailureKind,
    GangLost,
    OutOfMemory,
    ProgramError,
    RankFailure,
    StorageUnavailable,
    first_line,
)
from flyte_ddp.launch.control.policy import AttemptEnd, Before, Next, Rules, decide
from flyte_ddp.launch.protocol.failures import program_failure
from flyte_ddp.launch.protocol.programs import Kind, Program
from flyte_ddp.storage import Storage

NOTE = "out-of-memory.json"

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Restarts:
    """The restarts of one run."""

    max_restarts: int  # see `Place`
    larger_memory: str
    checkpoints: str  # URL of the checkpoints; "" for a run without them
    before: Before = field(default_factory=Before)  # the run up to the latest attempt

    def look_back(self, failure: RankFailure) -> None:
        """Raise OutOfMemory if the attempt of an earlier process was the second to run out of
        memory. No event tells this process what the earlier one has stored.
        """
        newest_step = -1
        with contextlib.suppress(StorageUnavailable):
            newest_step = max(stored_steps(self.checkpoints), default=0)
        ended = AttemptEnd(failure, 0, newest_step)
        self.before = Before(oom_step=self._read_note())
        decision = decide(ended, self.before, Rules(max_restarts=1))
        self._note_lack_of_memory(ended, decision)
        if decision is OutOfMemory:
            raise self._make_error(ended, decision)

    def follow(
        self, ended: AttemptEnd, reason: str, origin: str, program: Program, world_size: int
    ) -> Program:
        """Return the program of the next attempt. Log why there is one, and where it starts. Raise
        the error of the run if there is none.

        Args:
            reason: why the gang ended, if it has not failed; "" if it has.
            origin: the point from which the next attempt starts, for the log.
            program: what the last attempt ran, on `world_size` ranks.
        """
        failure, before = ended.failure, self.before
        if ended.has_saved:
            before = dataclasses.replace(before, num_restarts=0)
        if ended.is_out_of_memory and before.oom_step is None:
            before = dataclasses.replace(before, oom_step=self._read_note())
        smaller = None
        if isinstance(failure, RankFailure):
            smaller = program.with_smaller_batches(failure, world_size)
        repeats_bugs = program.kind is not Kind.RECIPE
        rules = Rules(self.max_restarts, repeats_bugs, smaller is not None)
        decision = decide(ended, before, rules)
        if decision is Next.MOVE:
            logger.warning("%s", describe_move(ended, reason))
            return program
        self.before = before
        if ended.is_out_of_memory:
            self._note_lack_of_memory(ended, decision)
        if decision is Next.SHRINK and smaller is not None and smaller.needs.batch is not None:
            program = smaller
            how = f"from {origin} with gradient_accumulation {smaller.needs.batch.num_parts}"
        elif decision is Next.WAIT:
            self.before = dataclasses.replace(self.before, previous=ended)
            how = "when the store is back"
        elif decision is Next.RESTART:
            number = before.num_restarts + 1
            self.before = dataclasses.replace(self.before, previous=ended, num_restarts=number)
            how = f"from {origin} (restart {number} of at most {self.max_restarts})"
        else:
            raise self._make_error(ended, decision)
        logger.warning("%s", describe_loss(ended, before, how, bool(self.checkpoints)))
        return program

    def _make_error(self, ended: AttemptEnd, kind: Next | type[Exception]) -> Exception:
        """Return the error that ends the run, with its cause.

        Args:
            kind: what `policy.decide` has returned.
        """
        failure = ended.failure
        assert failure is not None  # only a gang that moves has none
        used_up = (
            f"the gang was lost {ended.position} and has used up its restarts (max_restarts: "
            f"{self.max_restarts})"
        )
        error: Exception = failure
        if kind is OutOfMemory:
            error = OutOfMemory(
                f"{self.larger_memory}, or a smaller evaluation_batch_size, data_workers or "
                f"model: the ranks ran out of memory twice. {first_line(failure)}"
            )
        elif kind is ProgramError and isinstance(failure, RankFailure):
            twice = f"{first_line(failure)} twice, at {failure.details['place']}, without progress"
            bug = "in between: the program, or a library that it calls there, has a bug"
            return program_failure(f"{twice} {bug}", failure.rank)
        elif kind is StorageUnavailable:
            error = StorageUnavailable(first_line(failure))
        elif kind is GangLost:
            error = GangLost(f"{used_up}: {failure}")
        elif failure.kind is not FailureKind.EXCEPTION and self.before.num_restarts:
            failure.args = (f"{used_up}: {failure}",)
        if error is not failure:
            error.__cause__ = failure
        return error

    def _note_lack_of_memory(self, ended: AttemptEnd, decision: Next | type[Exception]) -> None:
        """Remember from which step an attempt ran out of memory, for the attempts that follow."""
        self.before = dataclasses.replace(self.before, oom_step=ended.resumed_step)
        if not self.checkpoints:
            return
        storage = Storage(self.checkpoints, timeout=0)
        with contextlib.suppress(StorageUnavailable):
            if decision is OutOfMemory:
                storage.delete(NOTE)
            else:
                note = {"resumed_step": ended.resumed_step}
                storage.write(NOTE, json.dumps(note).encode())

    def _read_note(self) -> int | None:
        """Return the step from which the last attempt that ran out of memory had started; None if
        there was no such attempt.
        """
        if self.checkpoints:
            with contextlib.suppress(FileNotFoundError, StorageUnavailable):
                note = Storage(self.checkpoints, timeout=0).read(NOTE)
                return int(json.loads(note)["resumed_step"])
        return None


def describe_loss(ended: AttemptEnd, before: Before, how: str, has_store: bool) -> str:
    """Return the line about a gang that was lost.

    Args:
        how: the point from which the gang restarts, such as "from the beginning".
        has_store: the run keeps checkpoints.
    """
    failure = ended.failure
    assert failure is not None  # only a gang that moves has none
    at = ""
    if ended.step or has_store:  # a script may report no step
        at = f" {ended.position}"
    is_known = before.previous is not None and before.previous.cause == failure.cause != ""
    what = str(failure)
    if is_known or failure.kind is FailureKind.STALL:  # the log has all stacks of a stall
        what = first_line(failure)
    return f"the gang was lost{at} and restarts {how}: {what}"


def describe_move(ended: AttemptEnd, reason: str) -> str:
    """Return the line about a gang that ended to start again on other nodes."""
    if not reason and ended.failure:
        reason = first_line(ended.failure)
    start = "there"
    if 0 <= ended.kept_step < ended.step:
        start = f"step {ended.kept_step}, because no later one was saved in time"
    return f"{reason}: the gang ended {ended.position} and restarts from {start}"
