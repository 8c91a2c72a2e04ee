"""The session of a training function, without processes: what it sends."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from flyte_ddp import events
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.distributed import Distributed
from flyte_ddp.launch import run as launch_run
from flyte_ddp.launch.protocol.signals import TimeLimit
from flyte_ddp.rank.batches import EpochBatches
from tests.support.gang import session_of


def test_a_report_counts_steps_where_none_is_given_and_other_ranks_are_sent_together():
    for rank in (0, 1):
        session, link = session_of(rank, 2)
        session.reporter.report(None, None, {"loss": 1})
        session.reporter.report(10, 0.5, {})
        session.reporter.report(None, None, {})
        assert link.beats == [1, 10, 11]
        expected = [
            events.Reported(1, None, {"loss": 1.0}),
            events.Reported(10, 0.5, {}),
            events.Reported(11, None, {}),
        ]
        session.close()
        if rank:
            assert {event.rank for event in link.events} == {1}
            assert [each for event in link.events for each in event.reports] == expected
        else:
            assert link.events == expected


def test_reports_that_do_not_fit_are_told_once(caplog):
    session, link = session_of(1, 2)
    for step in range(1, 5001):
        session.reporter.report(step, None, {})
    session.close()
    steps = [each.step for event in link.events for each in event.reports]
    assert steps[-1] == 5000
    told = [
        line for line in caplog.messages if "rank 1 reports more than 1,000 times in 1 s" in line
    ]
    assert len(told) == (len(steps) < 5000)


STEP = (torch.tensor(5), np.int64(5), 5)
BAD_COUNTS = (
    True,
    5.0,
    -5,
    "5",
    None,
    math.nan,
    np.float64(5),
    np.bool_(True),
    torch.tensor(True),
    torch.tensor(5.0),
)
BAD_NUMBERS = (True, -5.0, "5", math.nan, math.inf, [5.0], np.ones(1), torch.ones(2), 10**400)
DATA = list(range(8))


def batches_with(**given):
    return EpochBatches(
        **{
            "dataset": DATA,
            "global_batch_size": 8,
            "epoch": 0,
            "seed": 0,
            "num_workers": 0,
            **given,
            "collate_fn": None,
        }
    )


COUNTS = {
    "session.report: step": lambda value: session_of()[0].reporter.report(value, None, {}),
    "session.save: step": lambda value: session_of()[0].saver.save({}, value),
    "session.epochs: num_epochs": lambda value: session_of()[0].position.epochs(value),
    "session.batches: global_batch_size": lambda value: batches_with(global_batch_size=value),
    "session.batches: epoch": lambda value: batches_with(epoch=value),
    "session.batches: seed": lambda value: batches_with(seed=value),
    "session.batches: num_workers": lambda value: batches_with(num_workers=value),
    "max_restarts": lambda value: launch_run.Gang(max_restarts=value),
    "master_port": lambda value: launch_run.Gang(master_port=value),
    "nproc_per_node": lambda value: launch_run.Gang(nproc_per_node=value),
    "nnodes": lambda value: launch_run.Gang(nnodes=value),
}
MAY_BE_NONE = ("session.report: step", "session.batches: epoch", "nnodes")
MAY_BE_TEXT = ("nproc_per_node", "nnodes")


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_whole_number_of_any_kind_or_one_line(name):
    accepted = [
        *STEP,
        *([None] if name in MAY_BE_NONE else []),
        *(["5"] if name in MAY_BE_TEXT else []),
    ]
    for value in accepted[1 if name in MAY_BE_TEXT else 0 :]:
        COUNTS[name](value)
    for value in BAD_COUNTS:
        if not any(value is each or value == each == "5" for each in accepted):
            with pytest.raises(ConfigError, match=f"^{name}: expected .*, got [^\n]*$"):
                COUNTS[name](value)


@pytest.mark.parametrize(
    ("name", "enter", "bad"),
    [
        ("stall_timeout", lambda value: launch_run.Gang(stall_timeout=value), [None]),
        ("max_hours", lambda value: TimeLimit(value, time.time()).cancel(), [None]),
        ("max_hours", lambda value: Distributed(max_hours=value), [None]),
        ("max_cost", lambda value: Distributed(max_cost=value), [None]),
        ("session.report: epoch", lambda value: session_of()[0].reporter.report(1, value, {}), []),
    ],
)
def test_a_number_is_finite_and_of_any_kind_or_one_line(name, enter, bad):
    for value in (5, 0.5, np.float32(0.5), np.int64(5), torch.tensor(0.5), 1e300):
        enter(value)
    for value in (*BAD_NUMBERS, *bad):
        expected = f"^{name}: expected a finite number .*, got [^\n]*$"
        with pytest.raises(ConfigError, match=expected):
            enter(value)


@pytest.mark.parametrize("step", STEP)
def test_what_enters_is_an_int_and_what_is_reported_a_float(step, tmp_path):
    session, link = session_of(checkpoints=tmp_path)
    numbers = {"loss": torch.tensor(0.5), "nan": math.nan, "small": np.float32(2)}
    session.reporter.report(step, None, numbers)
    session.saver.save({"a": 1}, step)
    session.saver.wait()
    assert [(type(each), each) for each in link.beats if each] == [(int, 5)] * len(link.beats)
    assert repr(link.events[0].values) == "{'loss': 0.5, 'nan': nan, 'small': 2.0}"
    assert (tmp_path / "step-0000000005.json").exists()


@pytest.mark.parametrize("value", ["low", np.ones(1), torch.ones(2), [1.0], None, 10**400, 1j])
def test_a_report_of_something_else_than_numbers_is_refused(value):
    with pytest.raises(ConfigError, match=r"session\.report: loss: expected a number, got .*"):
        session_of()[0].reporter.report(6, None, {"loss": value})


@pytest.mark.parametrize(
    ("in_memory", "expected"),
    [
        (False, "nothing is kept, because the run was given no place for checkpoints"),
        (True, "in_memory: no state is kept in memory: expected Linux, with memfd_create"),
    ],
)
def test_a_save_without_a_place_or_memory_warns_once_and_nothing_is_loaded(
    in_memory, expected, caplog
):
    session, link = session_of()
    for step in (1, 2):
        session.saver.save({"step": step}, step, in_memory=in_memory)
    assert caplog.messages == [f"session.save: {expected}"]
    assert (session.saver.load(), link.events) == (None, [])
