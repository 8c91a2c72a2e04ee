"""What follows on the end of an attempt, case by case."""

from __future__ import annotations

import pickle

import pytest

from flyte_ddp.errors import (
    OUT_OF_MEMORY,
    GangLost,
    NodeLost,
    OutOfMemory,
    RankFailure,
    StorageUnavailable,
    SweepFailed,
    TrainingStopped,
)
from flyte_ddp.launch.control.policy import AttemptEnd, Before, Next, Rules, decide


def raised(name, is_consequence=False, rank=1):
    return RankFailure(
        f"rank {rank} failed: {name}: ...", rank, "exception", f"{name}: ...", is_consequence
    )


KILLED = RankFailure("rank 1 was killed by SIGKILL", 1, "signal", "SIGKILL")
EXITED = RankFailure("rank 1 exited with code 3", 1, "exit", "exit code 3")
STALLED = RankFailure("no rank made progress", -1, "stall", "stall")
OOM = RankFailure("rank 0 was killed by SIGKILL: its container", 0, "signal", OUT_OF_MEMORY)
LOST = NodeLost("node 1 was lost: its worker is gone", "w-1")
OOM_POD = NodeLost("node 1 was lost: its worker is gone (OOMKilled)", "w-1", OUT_OF_MEMORY)
AWAY = raised("StorageUnavailable")
DENIED = raised("StorageDenied", rank=-1)
SHAPES = raised("RuntimeError")
THEIRS = raised("TheirOwnError")
ECHO = raised("RuntimeError", is_consequence=True)
GPU_FULL = raised("OutOfMemoryError")

RESTART, WAIT, SHRINK, MOVE, ITSELF = (
    *(Next.RESTART, Next.WAIT, Next.SHRINK, Next.MOVE, Next.RAISE),
)
FINAL_OOM, STORE, GANG = OutOfMemory, StorageUnavailable, GangLost


def after(failure, step=5, resumed=0):
    return AttemptEnd(failure, step, resumed)


def left(failure, step=5, resumed=0):
    return AttemptEnd(failure, step, resumed, is_announced=True)


@pytest.mark.parametrize(
    ("ended", "before", "rules", "expected"),
    [
        # A gang that saved its state to grow
        (after(None), {}, {}, MOVE),
        (after(None), {"num_restarts": 3}, {"max_restarts": 3}, MOVE),
        # A gang that a node leaves after a notice, at any moment, whatever fails because of it
        (left(None), {}, {}, MOVE),
        (left(None), {"num_restarts": 3}, {"max_restarts": 3}, MOVE),
        (left(None, 0), {}, {}, MOVE),  # The notice came before the first step.
        (left(None, 7, 5), {}, {}, MOVE),  # The notice came while a checkpoint was written.
        # The notice came in an evaluation, with no step after the checkpoint.
        (left(None, 9, 9), {}, {}, MOVE),
        # The notice came while the gang was growing, or just after that.
        (left(None, 7, 5), {"previous": after(None, 5, 5)}, {}, MOVE),
        (left(None), {"previous": left(None)}, {}, MOVE),  # another notice
        # The two notices came at the same step.
        (left(None, 7), {"previous": left(None, 7)}, {}, MOVE),
        # The notice came in the last step, and the ranks did not just finish.
        (left(None, 27, 20), {}, {}, MOVE),
        (left(KILLED, 27, 20), {}, {}, MOVE),  # The rank was killed in the last step.
        (left(LOST), {}, {}, MOVE),  # The node was gone before its time.
        (left(KILLED), {}, {}, MOVE),
        (left(ECHO), {}, {}, MOVE),
        (left(STALLED), {}, {}, MOVE),
        (left(SHAPES), {}, {}, MOVE),
        (left(raised("TypeError")), {}, {}, ITSELF),
        (left(DENIED), {}, {}, ITSELF),
        (left(AWAY), {}, {}, WAIT),
        (left(AWAY, 5, 5), {"previous": after(AWAY, 5, 5)}, {}, STORE),
        (left(OOM_POD, 8, 5), {"oom_step": 5}, {}, FINAL_OOM),
        (left(GPU_FULL), {}, {"can_shrink": True}, SHRINK),
        # Restarts while there are any
        (after(KILLED), {}, {"max_restarts": 1}, RESTART),
        (after(EXITED), {}, {"max_restarts": 1}, RESTART),
        (after(STALLED), {}, {"max_restarts": 1}, RESTART),
        (after(LOST), {}, {"max_restarts": 1}, RESTART),
        (after(SHAPES), {}, {"max_restarts": 1}, RESTART),
        (after(THEIRS), {}, {"max_restarts": 1}, RESTART),
        (after(ECHO), {}, {"max_restarts": 1}, RESTART),
        (after(KILLED), {"num_restarts": 2}, {"max_restarts": 3}, RESTART),
        (after(KILLED, 0, -1), {}, {"max_restarts": 1}, RESTART),
        # A rank's own error is raised unchanged; a machine's fault is raised as the loss of the
        # gang.
        (after(KILLED), {}, {}, ITSELF),
        (after(EXITED), {}, {}, ITSELF),
        (after(STALLED), {}, {}, ITSELF),
        (after(SHAPES), {}, {}, ITSELF),
        (after(THEIRS), {"num_restarts": 1}, {"max_restarts": 1}, ITSELF),
        (after(KILLED), {"num_restarts": 3}, {"max_restarts": 3}, ITSELF),
        (after(LOST), {}, {}, GANG),
        (after(LOST), {"num_restarts": 3}, {"max_restarts": 3}, GANG),
        (after(ECHO), {}, {}, GANG),
        (after(OOM_POD), {}, {}, GANG),
        # A bug, or input that nobody but the user can mend
        (after(raised("TypeError")), {}, {"max_restarts": 16}, ITSELF),
        (after(raised("NotImplementedError")), {}, {"max_restarts": 16}, ITSELF),
        (after(raised("DataError")), {}, {"max_restarts": 16}, ITSELF),
        (after(raised("OSError")), {}, {"max_restarts": 16}, RESTART),
        (after(raised("MemoryError")), {}, {"max_restarts": 16}, RESTART),
        (after(raised("RecursionError")), {}, {"max_restarts": 16}, ITSELF),
        (after(DENIED), {}, {"max_restarts": 16}, ITSELF),
        (after(raised("ConfigError")), {}, {"max_restarts": 16}, ITSELF),
        (after(raised("NonFiniteLoss")), {}, {"max_restarts": 16}, ITSELF),
        (after(THEIRS, 7), {"previous": after(THEIRS, 7)}, {"max_restarts": 16}, ITSELF),
        # The run made progress in between.
        (after(THEIRS, 7), {"previous": after(THEIRS, 6)}, {"max_restarts": 16}, RESTART),
        # The previous error was another one.
        (after(THEIRS, 7), {"previous": after(SHAPES, 7)}, {"max_restarts": 16}, RESTART),
        (after(THEIRS, 7), {"previous": after(KILLED, 7)}, {"max_restarts": 16}, RESTART),
        (after(THEIRS, 7), {"previous": after(LOST, 7)}, {"max_restarts": 16}, RESTART),
        # For a function the number of restarts means what torchrun means by it
        (after(raised("TypeError")), {}, {"max_restarts": 1, "repeats_bugs": True}, RESTART),
        (
            after(THEIRS, 7),
            {"previous": after(THEIRS, 7)},
            {"max_restarts": 2, "repeats_bugs": True},
            RESTART,
        ),
        (after(raised("TypeError")), {}, {"repeats_bugs": True}, ITSELF),
        (after(DENIED), {}, {"max_restarts": 16, "repeats_bugs": True}, ITSELF),
        # The store is away: that uses up no restart, while there is progress
        (after(AWAY), {}, {}, WAIT),
        (after(AWAY), {}, {"repeats_bugs": True}, WAIT),
        (after(AWAY, 9, 5), {"previous": after(AWAY, 5, 0)}, {}, WAIT),
        (after(AWAY, 5, 5), {"previous": after(AWAY, 5, 5)}, {}, STORE),
        (after(AWAY, 5, 5), {"previous": after(AWAY, 5, 5)}, {"max_restarts": 16}, STORE),
        (after(AWAY, 5, 5), {"previous": after(KILLED, 5, 5)}, {}, WAIT),
        # Out of memory: once is a failure like others, twice without progress is the user's
        (after(OOM), {}, {"max_restarts": 1}, RESTART),
        (after(OOM), {}, {}, ITSELF),
        (after(OOM_POD, 7, -1), {"oom_step": -1}, {"max_restarts": 16}, FINAL_OOM),
        (after(OOM, 8, 5), {"previous": after(KILLED, 7, 5)}, {"max_restarts": 16}, RESTART),
        (after(OOM, 8, 5), {"oom_step": 5}, {"max_restarts": 16}, FINAL_OOM),
        (after(OOM, 8, 6), {"oom_step": 5}, {"max_restarts": 16}, RESTART),
        (after(OOM, 8, 0), {"oom_step": 0}, {}, FINAL_OOM),
        (after(KILLED, 8, 5), {"oom_step": 5}, {"max_restarts": 16}, RESTART),
        # A GPU out of memory
        (after(GPU_FULL), {}, {"can_shrink": True}, SHRINK),
        (after(GPU_FULL), {"num_restarts": 3}, {"max_restarts": 3, "can_shrink": True}, SHRINK),
        (after(GPU_FULL), {}, {"max_restarts": 1}, RESTART),
        (after(GPU_FULL), {}, {}, ITSELF),
    ],
)
def test_what_follows_on_the_end_of_an_attempt(ended, before, rules, expected):
    assert decide(ended, Before(**before), Rules(**rules)) == expected


@pytest.mark.parametrize(
    ("found", "left_behind", "expected"),
    [(0, 4, True), (4, 4, False), (-1, 4, False), (4, -1, False)],
)
def test_an_attempt_that_left_a_newer_checkpoint_than_it_found_has_saved(
    found, left_behind, expected
):
    assert AttemptEnd(KILLED, 5, found, left_behind).has_saved is expected


@pytest.mark.parametrize(
    "error",
    [
        ECHO,
        OOM_POD,
        StorageUnavailable("the disk is full", is_full=True),
        SweepFailed("none of the 2 trials finished", may_succeed=True),
        TrainingStopped("SIGTERM: the run was stopped", "SIGTERM"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_in_another_process_with_all_that_it_says(error):
    arrived = pickle.loads(pickle.dumps(error))

    assert (type(arrived), str(arrived)) == (type(error), str(error))
    assert {**vars(arrived), "timestamp": 0} == {**vars(error), "timestamp": 0}
