"""The session of a training function, without processes: what it sends, and how the ranks agree on a stop."""

from __future__ import annotations

import logging
import random
from types import SimpleNamespace

import pytest

from flyte_ddp import events
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.job import Job
from flyte_ddp.rank.programs import FunctionProgram
from flyte_ddp.session import Session


class Link:
    """A rank's link to its supervisor, which keeps what is sent."""

    def __init__(self):
        self.stop_requested = False
        self.on_stop = None
        self.beats = []
        self.events = []

    def beat(self, step):
        self.beats.append(step)

    def emit(self, event):
        self.events.append(event)

    def set_writing(self, is_writing):
        pass


class Store:
    """torch's store of the ranks, in one process."""

    def __init__(self):
        self.values = {}

    def set(self, key, value):
        self.values[key] = value.encode()

    def get(self, key):
        return self.values[key]

    def add(self, key, amount):
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]


def session_of(rank=0, world_size=1, store=None, checkpoints=""):
    process = SimpleNamespace(
        job=Job(FunctionProgram("train", b""), checkpoints, 0.0),
        node=SimpleNamespace(world_size=world_size),
        rank=rank,
        link=Link(),
    )
    return Session(process, lambda: store), process.link


def test_a_report_counts_steps_where_none_is_given_and_only_rank_0_is_shown():
    for rank in (0, 1):
        session, link = session_of(rank, 2)
        session.report(None, None, {"loss": 1})
        session.report(10, 0.5, {})
        session.report(None, None, {})
        assert link.beats == [1, 10, 11]
        expected = [
            events.Reported(1, None, {"loss": 1.0}),
            events.Reported(10, 0.5, {}),
            events.Reported(11, None, {}),
        ]
        assert link.events == (expected if rank == 0 else [])


def test_a_report_of_something_else_than_numbers_is_refused():
    session, _ = session_of()
    with pytest.raises(ConfigError, match=r"session\.report: loss: expected a number, got 'low'"):
        session.report(None, None, {"loss": "low"})


def test_a_save_without_a_place_warns_once_and_nothing_is_loaded(caplog):
    session, _ = session_of()
    with caplog.at_level(logging.WARNING):
        session.save({"step": 1}, 1)
        session.save({"step": 2}, 2)
    assert [record.message for record in caplog.records] == [
        "session.save: nothing is kept, because the run was given no place for checkpoints"
    ]
    assert session.load() is None


def test_one_rank_alone_stops_at_once():
    session, link = session_of()
    assert not session.stop_requested
    link.stop_requested = True
    assert session.stop_requested
    assert session.has_stopped


def test_it_is_known_once_that_a_function_can_be_stopped_when_it_can_resume_and_all_ranks_ask(tmp_path):
    store = Store()
    (first, link), (second, _) = (session_of(rank, 2, store, str(tmp_path)) for rank in range(2))
    assert not first.stop_requested
    first.save({}, 1)
    first.close()
    assert not first.stop_requested
    saved = [type(event) for event in link.events]
    assert set(saved) == {events.CheckpointSaved, events.CheckpointWritten}, "the second rank has not asked"
    assert not second.stop_requested
    assert not first.stop_requested
    assert not first.stop_requested
    assert [type(event) for event in link.events[2:]] == [events.BecameStoppable]

    resumed, link = session_of(checkpoints=str(tmp_path))
    assert not resumed.stop_requested
    assert not link.events
    resumed.load()
    assert not resumed.stop_requested
    assert isinstance(link.events[-1], events.BecameStoppable)


@pytest.mark.parametrize("seed", range(40))
def test_ranks_that_train_together_stop_at_the_same_call_whenever_each_learns_of_it(seed):
    order = random.Random(seed)
    world_size = order.choice([2, 3, 5])
    store = Store()
    ranks = [session_of(rank, world_size, store) for rank in range(world_size)]
    calls, stopped_at = [0] * world_size, [0] * world_size
    learns_at = [order.randrange(1, 12) for _ in ranks]
    while not all(stopped_at):
        # A collective in each step: nobody is more than one call ahead of another. Who has stopped takes no part.
        slowest = min(calls)
        able = [rank for rank in range(world_size) if not stopped_at[rank] and calls[rank] == slowest]
        assert able, f"the others wait for a rank that has stopped: {calls}, {stopped_at}"
        rank = order.choice(able)
        session, link = ranks[rank]
        calls[rank] += 1
        link.stop_requested = calls[rank] >= learns_at[rank]
        if session.stop_requested:
            stopped_at[rank] = calls[rank]
    assert len(set(stopped_at)) == 1
    assert max(learns_at) < stopped_at[0] <= max(learns_at) + 5
