"""How the ranks agree on a stop, without processes."""

from __future__ import annotations

import random
import threading
import time

import pytest
from torch.distributed import HashStore

from tests.support.gang import session_of


def test_it_is_known_once_that_a_function_can_be_stopped_when_it_can_resume_and_all_ranks_ask(
    tmp_path,
):
    store = HashStore()
    (first, link), (second, _) = (session_of(rank, 2, store, tmp_path) for rank in range(2))
    assert not first.stop.poll()
    first.saver.save({}, 1)
    first.close()
    assert not first.stop.poll()
    assert not link.position.is_stoppable, "the second rank has not asked"
    assert not second.stop.poll()
    assert not first.stop.poll()
    assert link.position.is_stoppable

    resumed, link = session_of(checkpoints=tmp_path)
    assert not resumed.stop.poll()
    assert not link.position.is_stoppable
    resumed.saver.load()
    assert not resumed.stop.poll()
    assert link.position.is_stoppable


class Gang:
    """Ranks in threads, which run one program: rank r may be `lag` steps ahead of the slowest, as
    with queued kernels.

    Each reads `stop_requested` in the same steps, and is asked to stop at a moment of its own.
    """

    def __init__(self, seed):
        self.order = order = random.Random(seed)
        self.size = order.choice([2, 3, 5])
        self.lag = order.choice([0, 1, 7, 1000])
        self.num_steps = order.choice([30, 100])
        polling = order.choice([1.0, 0.3])
        # A rank that has never asked gets SIGTERM.
        self.polls = [step == 0 or order.random() < polling for step in range(self.num_steps)]
        store = HashStore()
        self.ranks = [session_of(rank, self.size, store) for rank in range(self.size)]
        self.num_issued = [0] * self.size
        self.moved = threading.Condition()
        self.ended = [None] * self.size  # step in which each rank stopped, or num_steps

    def run(self):
        threads = [
            threading.Thread(target=work, args=(rank, *self.ranks[rank]), daemon=True)
            for work in (self.train, self.stop)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), f"deadlock: {self.num_issued}, ended {self.ended}"
        return self.ended

    def train(self, rank, session, link):
        for step in range(self.num_steps):
            time.sleep(self.order.choice([0, 0, 0.0005, 0.002]))
            with self.moved:
                self.num_issued[rank] += 1
                self.moved.notify_all()
                self.moved.wait_for(lambda step=step: min(self.num_issued) >= step + 1 - self.lag)
            if self.polls[step] and session.stop.poll():
                self.ended[rank] = step
                return
        session.close()
        self.ended[rank] = self.num_steps

    def stop(self, rank, session, link):
        time.sleep(self.order.random() * 0.05)
        while not session.stop.num_polls:
            time.sleep(0.001)
        link.stop()


@pytest.mark.parametrize("seed", range(20))
def test_ranks_stop_at_the_same_call_however_far_apart_they_are(seed):
    ended = Gang(seed).run()
    assert len(set(ended)) == 1, ended


def test_a_rank_that_ended_before_the_stop_lets_the_others_go_on_to_their_end():
    store = HashStore()
    (first, link), (second, _) = (session_of(rank, 2, store) for rank in range(2))
    for _ in range(5):
        assert not second.stop.poll()
    second.close()
    assert not first.stop.poll()
    link.stop()
    assert [first.stop.poll() for _ in range(4)] == [False] * 4
    assert not first.stop.is_reached
