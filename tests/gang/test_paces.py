"""Slow ranks: real ranks of a recipe and of a function. One rank is slower than the others in one
phase.
"""

from __future__ import annotations

import statistics
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flyte_ddp
from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import RunState, StragglersFound
from flyte_ddp.launch.control import paces
from flyte_ddp.launch.control.paces import PaceWatch, median_of_others
from flyte_ddp.launch.protocol.messages import Pace
from flyte_ddp.rank.step_timer import BACKWARD, DATA, FORWARD, STEP, StepTimer
from flyte_ddp.recipes import Recipe
from flyte_ddp.training.ddp import DdpParallelism
from flyte_ddp.world import World
from tests.support.runs import new_run


@pytest.fixture
def short(monkeypatch):
    """A rank is slow after 1.5 s, in place of a minute."""
    monkeypatch.setattr(paces, "SLOW_SECONDS", 1.5)


def check(found, phase, caplog):
    # On a busy machine others may be named in windows as short as here, too.
    named = [(each.rank, each.phase) for event in found for each in event.stragglers]
    assert (1, phase) in named
    assert f"rank 1 is slow in {phase}: " in caplog.text


@pytest.mark.long
@pytest.mark.parametrize(
    "phase",
    [*(pytest.param(phase, marks=pytest.mark.slow) for phase in ("data", "forward")), "backward"],
)
def test_a_slow_rank_of_a_recipe_is_named_with_its_phase(
    short, caplog, tmp_path, monkeypatch, phase
):
    monkeypatch.setenv("SLOW", f"{phase} 1 4")
    run = new_run(tmp_path, "tests.support.slow_recipes.Slow").train(2)
    check([each for each in run.events if isinstance(each, StragglersFound)], phase, caplog)


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


EVEN, SLOW, SLOW_LOADING = [0.1, 0.1, 0.2], [0.1, 0.2, 0.4], [0.3, 0.1, 0.2]
TWICE, A100, H200 = [2 * each for each in EVEN], "A100 (cuda:{})", "H200 (cuda:{})"


class Gang:
    """Ranks that train for a while, with their own seconds per step and phase; what a step takes
    besides is the longest of them, or `pace`.
    """

    def __init__(self, monkeypatch, devices, pace=0.0):
        self.now, self.pace, self.found = 1000.0, pace, []
        self.rows = [
            {"rank": rank, "num_steps": 0, "seconds": [0.0] * 3, "device": device.format(rank % 2)}
            for rank, device in enumerate(devices)
        ]
        self.watch = PaceWatch(len(devices), self.found.append)
        monkeypatch.setattr(paces.time, "monotonic", lambda: self.now)

    def train(self, seconds, *per_step):
        pace = self.pace or max(map(sum, per_step))
        for _ in range(seconds):
            self.now += 1
            steps = int(self.now / pace) - int((self.now - 1) / pace)
            for row, phases in zip(self.rows, per_step, strict=True):
                row["num_steps"] += steps
                row["seconds"] = [
                    before + steps * more
                    for before, more in zip(row["seconds"], phases, strict=True)
                ]
            self.watch.note("", [Pace(**row) for row in self.rows], self.rows[0]["num_steps"])

    @property
    def named(self):
        named = []
        for event in self.found:
            named.append([(each.rank, each.phase) for each in event.stragglers])
        return named


def test_a_rank_is_named_after_a_minute_and_again_only_when_it_changes(monkeypatch, caplog):
    gang = Gang(monkeypatch, ["", ""])
    gang.train(48, EVEN, SLOW)
    assert gang.named == []
    gang.train(10, EVEN, SLOW)
    assert gang.named == [[(1, "backward")]]
    for seconds, rank_1 in ((600, SLOW), (30, EVEN), (300, SLOW)):  # even, but not for a minute
        gang.train(seconds, EVEN, rank_1)
    assert len(gang.found) == 1
    gang.train(200, EVEN, SLOW_LOADING)
    assert gang.named[1:] == [[(1, "data")]]
    gang.train(200, EVEN, EVEN)
    assert gang.named[2:] == [[]]
    assert caplog.messages[-1] == "rank 1 is no longer slower than the others"
    gang.train(200, SLOW, EVEN)
    assert gang.named[3:] == [[(0, "backward")]]
    assert RunState.of(gang.found).stragglers == gang.found


@pytest.mark.parametrize(
    ("per_step", "devices", "pace", "named"),
    [
        ([EVEN] * 4, [""] * 4, 0, []),
        # 1.25 x in all, but half as long again in a phase
        ([EVEN, [0.1, 0.1, 0.3]], ["", ""], 0, [(1, "backward")]),
        ([EVEN, [0.11, 0.11, 0.24]], ["", ""], 0, []),
        # 10 x the other's, of a phase that is short
        ([[0.001, 0.1, 0.2], [0.01, 0.1, 0.2]], ["", ""], 0, []),
        ([[0.0, 0.1, 0.2], [0.0, 0.1, 0.2]], ["", ""], 0, []),
        # steps that are longer than a window
        ([[10.0, 10.0, 5.0], [10.0, 10.0, 20.0]], ["", ""], 0, [(1, "backward")]),
        # with others of their kind of GPU alone
        ([TWICE, TWICE, EVEN, EVEN], [A100, A100, H200, H200], 0, []),
        ([TWICE, TWICE, EVEN, SLOW], [A100, A100, H200, H200], 0, [(3, "backward")]),
        # where passes are not measured, because ranks wait in them: 6 ms of half a second
        ([[0.002, 0, 0], [0.008, 0, 0]], ["", ""], 0.5, []),
        ([[0.002, 0, 0], [0.1, 0, 0]], ["", ""], 0.5, [(1, "data")]),
    ],
)
def test_what_counts_as_slow(monkeypatch, per_step, devices, pace, named):
    gang = Gang(monkeypatch, devices, pace)
    gang.train(600, *per_step)
    assert gang.named == ([named] if named else [])


def test_the_median_of_the_others_is_that_of_a_list_without_one_value():
    for values in ([1.0, 3.0], [1.0, 1.0, 5.0], [1.0, 3.0, 4.0, 9.0], [2.0, 2.0, 2.0, 7.0, 8.0]):
        for index, own in enumerate(values):
            others = values[:index] + values[index + 1 :]
            assert median_of_others(values, own) == statistics.median(others)


def test_the_comparison_of_many_ranks_takes_work_in_proportion_to_them(monkeypatch):
    def count_calls(num_ranks):
        gang, calls = Gang(monkeypatch, [""] * num_ranks), 0

        def count(frame, event, argument):
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            gang.train(31, *[EVEN] * (num_ranks - 1), SLOW)
        finally:
            sys.setprofile(None)
        return calls

    assert count_calls(256) < 6 * count_calls(64)


def test_a_pause_of_all_ranks_and_one_of_one_rank_are_not_named(monkeypatch):
    """Such as an evaluation, or a checkpoint that rank 0 writes."""
    gang = Gang(monkeypatch, ["", ""])
    for _ in range(10):
        gang.train(30, EVEN, EVEN)
        gang.now += 50
        gang.train(20, EVEN, SLOW_LOADING)
    assert gang.found == []


def test_a_phase_with_waits_in_it_is_not_published(monkeypatch):
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


def test_a_forward_pass_that_waits_for_rank_0s_buffers_is_not_timed():
    timer, ranks = StepTimer(print, torch.device("cpu")), World(0, 2, torch.device("cpu"))
    DdpParallelism(Recipe(), TrainingConfig(), ranks).watch(timer, nn.BatchNorm1d(2))
    assert timer.waiting == [FORWARD]


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
        loss.backward()  # The gradient is ready now, and the exchange begins.
        Event.now += 10
        pace.end()
        pace.end_step()
        Event.reached = Event.now - 5  # the GPU is behind
    assert [steps for steps, _ in published] == [1, 2, 3]
    assert published[0][1][FORWARD:STEP] == [0, 0]
    assert published[2][1][FORWARD:STEP] == [2, 4], "of two steps, without the exchange"
    assert pace.seconds[DATA] < 0.1
