"""Slow ranks: real ranks of a recipe and of a function, one of which is slower than the others in
one phase.
"""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flyte_ddp
from flyte_ddp.events import RunState, StragglersFound
from flyte_ddp.launch import paces
from flyte_ddp.launch.paces import PaceWatch
from flyte_ddp.rank.step_timer import BACKWARD, DATA, FORWARD, STEP, StepTimer
from tests.support.runs import new_run


@pytest.fixture
def short(monkeypatch):
    """A rank is slow after 1.5 s, in place of a minute."""
    monkeypatch.setattr(paces, "SLOW_SECONDS", 1.5)


def check(found, phase, caplog):
    # On a busy machine others may be named in windows as short as here, too.
    named = {(each.rank, each.phase): each for event in found for each in event.stragglers}
    straggler = named[1, phase]
    assert straggler.seconds > 1.3 * straggler.median_seconds
    assert f"rank 1 is slow in {phase}: " in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(
    "phase",
    [*(pytest.param(phase, marks=pytest.mark.slow) for phase in ("data", "forward")), "backward"],
)
def test_a_slow_rank_of_a_recipe_is_named_with_its_phase(
    short, caplog, tmp_path, monkeypatch, phase
):
    monkeypatch.setenv("SLOW", f"{phase} 1 2")
    run = new_run(tmp_path, "tests.support.slow_recipes.Slow").train(2)
    check([each for each in run.events if isinstance(each, StragglersFound)], phase, caplog)
    times = run.result.epochs[-1].rank_step_seconds
    assert times[1] > 1.1 * times[0], "without the wait for the others"


@pytest.mark.long
def test_the_wait_for_rank_0s_buffers_is_no_slow_forward_pass(short, caplog, tmp_path, monkeypatch):
    """DDP gives every rank the statistics of rank 0's BatchNorm before a forward pass, for which
    the others wait.
    """
    monkeypatch.setenv("SLOW", "data 0 3")
    run = new_run(tmp_path, "tests.support.slow_recipes.SlowNormed").train(2)
    found = [each for each in run.events if isinstance(each, StragglersFound)]
    named = {(each.rank, each.phase) for event in found for each in event.stragglers}
    assert (0, "data") in named
    assert (1, "forward") not in named


@pytest.mark.long
def test_a_slow_rank_of_a_function_that_only_reports_is_named(short, caplog):
    def train():
        import torch

        dist.init_process_group("gloo")
        for _ in range(60):
            time.sleep(0.1 if dist.get_rank() == 1 else 0.05)
            dist.all_reduce(torch.ones(1))
            flyte_ddp.session.report(loss=0.5)
        dist.destroy_process_group()

    seen = []
    listener = SimpleNamespace(handle=seen.append, close=lambda error: None)
    flyte_ddp.run(train, nproc_per_node=2, listeners=[listener])
    check([each for each in seen if isinstance(each, StragglersFound)], "step", caplog)


# The comparison, on a clock of the test's own


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(paces.time, "monotonic", lambda: self.now)


def drive(watch, clock, seconds, per_step, devices=(), pace_of_gang=0.0):
    """Let ranks with these seconds per step and phase train for a while; what a step takes else is
    the longest.
    """
    totals = {rank: [0, [0.0] * 3] for rank in range(len(per_step))}
    if watch._latest:
        totals = {
            rank: [pace.num_steps, list(pace.seconds)] for rank, pace in watch._latest.items()
        }
    pace_of_gang = pace_of_gang or max(map(sum, per_step))
    for _ in range(int(seconds)):
        clock.now += 1
        steps = int(clock.now / pace_of_gang) - int((clock.now - 1) / pace_of_gang)
        rows = []
        for rank, each in enumerate(per_step):
            totals[rank][0] += steps
            totals[rank][1] = [
                before + steps * more for before, more in zip(totals[rank][1], each, strict=True)
            ]
            device = devices[rank] if devices else ""
            rows.append(
                {
                    "rank": rank,
                    "num_steps": totals[rank][0],
                    "seconds": totals[rank][1],
                    "device": device,
                }
            )
        watch.note("", rows, totals[0][0])


EVEN, SLOW, SLOW_LOADING = [0.1, 0.1, 0.2], [0.1, 0.2, 0.4], [0.3, 0.1, 0.2]


def new_watch(monkeypatch, num_ranks=2):
    found = []
    return PaceWatch(num_ranks, found.append), Clock(monkeypatch), found


def named(found):
    return [[(each.rank, each.phase) for each in event.stragglers] for event in found]


def test_a_rank_is_named_after_a_minute_and_again_only_when_it_changes(monkeypatch, caplog):
    watch, clock, found = new_watch(monkeypatch)
    drive(watch, clock, 48, [EVEN, SLOW])
    assert found == []
    drive(watch, clock, 10, [EVEN, SLOW])
    assert named(found) == [[(1, "backward")]]
    drive(watch, clock, 600, [EVEN, SLOW])
    drive(watch, clock, 30, [EVEN, EVEN])  # not for a minute
    drive(watch, clock, 300, [EVEN, SLOW])
    assert len(found) == 1
    drive(watch, clock, 200, [EVEN, SLOW_LOADING])
    assert named(found[1:]) == [[(1, "data")]]
    drive(watch, clock, 200, [EVEN, EVEN])
    assert named(found[2:]) == [[]]
    assert caplog.messages[-1] == "rank 1 is no longer slower than the others"
    drive(watch, clock, 200, [SLOW, EVEN])
    assert named(found[3:]) == [[(0, "backward")]]
    assert RunState.of(found).stragglers == found


@pytest.mark.parametrize(
    "per_step",
    [
        [EVEN] * 4,
        [EVEN, [0.1, 0.1, 0.3]],  # 1.25 x in all, but half as long again in a phase: named
        [EVEN, [0.11, 0.11, 0.24]],
        [[0.001, 0.1, 0.2], [0.01, 0.1, 0.2]],  # 10 x the other's, of a phase that is short
        [[0.0, 0.1, 0.2], [0.0, 0.1, 0.2]],
    ],
)
def test_small_differences_are_not_named(monkeypatch, per_step):
    watch, clock, found = new_watch(monkeypatch, len(per_step))
    drive(watch, clock, 400, per_step)
    assert named(found) == ([[(1, "backward")]] if per_step[1] == [0.1, 0.1, 0.3] else [])


def test_a_pause_of_all_ranks_and_one_of_one_rank_are_not_named(monkeypatch):
    """Such as an evaluation, or a checkpoint that rank 0 writes."""
    watch, clock, found = new_watch(monkeypatch)
    for _ in range(10):
        drive(watch, clock, 30, [EVEN, EVEN])
        clock.now += 50
        drive(watch, clock, 20, [EVEN, SLOW_LOADING])
    assert found == []


def test_steps_that_are_longer_than_a_window_are_compared_too(monkeypatch):
    watch, clock, found = new_watch(monkeypatch)
    drive(watch, clock, 600, [[10.0, 10.0, 5.0], [10.0, 10.0, 20.0]])
    assert named(found) == [[(1, "backward")]]


def test_ranks_are_compared_with_those_on_the_same_kind_of_gpu(monkeypatch):
    watch, clock, found = new_watch(monkeypatch, 4)
    kinds = ["A100 (cuda:0)", "A100 (cuda:1)", "H200 (cuda:0)", "H200 (cuda:1)"]
    twice = [2 * each for each in EVEN]
    drive(watch, clock, 200, [twice, twice, EVEN, EVEN], kinds)
    assert found == []
    drive(watch, clock, 200, [twice, twice, EVEN, SLOW], kinds)
    assert named(found) == [[(3, "backward")]]


def test_a_phase_with_waits_in_it_is_not_compared(monkeypatch):
    """Such as a compiled backward pass: the faster rank waits in it for the other one, as if it was
    slow there.
    """
    published = []
    pace = StepTimer(
        lambda steps, seconds: published.append(list(seconds)),
        torch.device("cpu"),
        waiting=[BACKWARD],
    )
    for phase in (DATA, FORWARD, BACKWARD):
        pace.begin(phase)
        time.sleep(0.01)
    pace.end_step()
    assert min(published[0][:BACKWARD]) > 0
    assert published[0][BACKWARD] == 0
    assert pace.seconds[BACKWARD] > 0
    watch, clock, found = new_watch(monkeypatch)
    drive(watch, clock, 200, [[0.002, 0, 0], [0.008, 0, 0]], pace_of_gang=0.5)
    assert found == [], "6 ms of half a second"
    drive(watch, clock, 200, [[0.002, 0, 0], [0.1, 0, 0]], pace_of_gang=0.5)
    assert named(found) == [[(1, "data")]]


class Event:
    """Stands in for CUDA's: a moment of the test's own, which the GPU reaches later."""

    now, reached = 0.0, 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def query(self):
        return self.at <= Event.reached

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


def test_passes_on_a_gpu_are_timed_by_events_that_no_step_waits_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    published = []
    pace = StepTimer(
        lambda steps, seconds: published.append((steps, list(seconds))), torch.device("cuda", 0)
    )
    parameter = nn.Parameter(torch.ones(1))
    pace.watch(parameters := nn.ParameterList([parameter]))
    for _ in range(3):
        pace.begin(DATA)
        pace.begin(FORWARD)
        Event.now += 1
        loss = parameters[0].sum()
        pace.begin(BACKWARD)
        Event.now += 2
        loss.backward()  # its gradient is there now, and the exchange begins
        Event.now += 10
        pace.end()
        pace.end_step()
        Event.reached = Event.now - 5  # the GPU is behind
    assert [steps for steps, _ in published] == [1, 2, 3]
    assert published[0][1][FORWARD:STEP] == [0, 0]
    assert published[2][1][FORWARD:STEP] == [2, 4], "of two steps, without the exchange"
    assert pace.seconds[DATA] < 0.1
