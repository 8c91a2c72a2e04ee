"""Slow ranks: real ranks of a recipe and of a function, one of which is slower than the others in one phase."""

from __future__ import annotations

import gc
import logging
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flyte_ddp
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import AttemptEnded, RunState, StragglersFound
from flyte_ddp.launch import paces
from flyte_ddp.launch.dask import growth, place, placement
from flyte_ddp.launch.paces import PaceWatch
from flyte_ddp.rank.step_timer import BACKWARD, DATA, FORWARD, STEP, LastGradient, StepTimer, watch_ddp
from flyte_ddp.studies.runner import resize_cluster
from tests.support.dask_runs import events_of, train
from tests.support.runs import new_run

CASES = [(phase, num_ranks) for phase in ("data", "forward", "backward") for num_ranks in (2, 4)]


def all_but(case):
    """Return the cases, all but one of which are slow."""
    return [each if each == case else pytest.param(*each, marks=pytest.mark.slow) for each in CASES]


class Listener:
    def __init__(self):
        self.found = []

    def handle(self, event):
        if isinstance(event, StragglersFound):
            self.found.append(event)

    def close(self, error):
        pass


@pytest.fixture
def short(monkeypatch):
    """A rank is slow after 1.5 s, in place of a minute."""
    monkeypatch.setattr(paces, "SLOW_SECONDS", 1.5)


def make_training(phase, factor, num_steps):
    """A function's training, in which rank 1 needs `factor` times as long for one of three equal phases."""

    def train():
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        dist.init_process_group("gloo")
        torch.set_num_threads(1)

        def work(name):
            time.sleep(0.02 * (factor if name == phase and dist.get_rank() == 1 else 1))

        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(context, inputs):
                work("forward")
                return inputs.clone()

            @staticmethod
            def backward(context, gradient):
                work("backward")
                return gradient

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

            def forward(self, inputs):
                return self.second(Slow.apply(self.first(inputs)))

        model = DistributedDataParallel(Model())
        for _ in range(num_steps):
            work("data")
            model.zero_grad()
            model(torch.ones(4, 8)).sum().backward()
        dist.destroy_process_group()

    return train


def check(found, phase, caplog):
    # On a busy machine others may be named in windows as short as here, too.
    named = {(each.rank, each.phase): each for event in found for each in event.stragglers}
    straggler = named[1, phase]
    assert straggler.seconds > 1.3 * straggler.median_seconds
    assert f"rank 1 is slow in {phase}: " in caplog.text


@pytest.mark.parametrize(("phase", "num_ranks"), all_but(("data", 2)))
def test_a_slow_rank_of_a_function_is_named_with_its_phase(short, caplog, phase, num_ranks):
    listener = Listener()
    flyte_ddp.run(make_training(phase, 2, 60), nproc_per_node=num_ranks, listeners=[listener])
    check(listener.found, phase, caplog)


@pytest.mark.long
@pytest.mark.parametrize(("phase", "num_ranks"), all_but(("backward", 2)))
def test_a_slow_rank_of_a_recipe_is_named_with_its_phase(short, caplog, tmp_path, monkeypatch, phase, num_ranks):
    monkeypatch.setenv("SLOW", f"{phase} 1 2")
    run = new_run(tmp_path, "tests.support.slow_recipes.Slow").train(num_ranks)
    check([each for each in run.events if isinstance(each, StragglersFound)], phase, caplog)
    times = run.result.epochs[-1].rank_step_seconds
    assert times[1] > 1.1 * times[0], "without the wait for the others"


@pytest.mark.long
def test_the_wait_for_rank_0s_buffers_is_no_slow_forward_pass(short, caplog, tmp_path, monkeypatch):
    """DDP gives every rank the statistics of rank 0's BatchNorm before a forward pass, for which the others wait."""
    monkeypatch.setenv("SLOW", "data 0 3")
    run = new_run(tmp_path, "tests.support.slow_recipes.SlowNormed").train(2)
    found = [each for each in run.events if isinstance(each, StragglersFound)]
    named = {(each.rank, each.phase) for event in found for each in event.stragglers}
    assert (0, "data") in named
    assert (1, "forward") not in named


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "min_nodes", "expected"),
    [("01", 1, ["01", "0"]), ("012", 0, ["01", "02"]), ("01", 0, ["01", "01"])],
    ids=["fewer nodes", "a spare worker", "no other worker"],
)
def test_a_slow_node_is_replaced_once_in_an_hour(
    start_worker, scheduler, tmp_path, monkeypatch, names, min_nodes, expected
):
    chosen = []

    def assign_nodes(*arguments):
        nodes = placement.assign_nodes(*arguments)
        chosen.append("".join(node.worker for node in nodes))
        return nodes

    monkeypatch.setattr(place, "assign_nodes", assign_nodes)
    for module, name, value in (
        *((paces, "SLOW_SECONDS", 1.0), (paces, "NUM_WINDOWS", 2)),
        *((growth, "REPLACEMENT_DELAY", 0.0), (place, "DEFAULT_GRACE", 15.0)),
    ):
        monkeypatch.setattr(module, name, value)
    for name in names:
        start_worker(scheduler, name, SLOW="data 1 4" if name == "1" else "none 0 1")
    kind = {"kind": "existing", "scheduler_address": scheduler, "node_timeout": 30, "max_restarts": 0}
    config = ClusterConfig(**kind, min_nodes=min_nodes, grow_delay=0, grow_interval=0, replace_stragglers=True)
    with open_cluster(config, "test") as client:
        client.wait_for_workers(len(names))
        run = train(new_run(tmp_path, "tests.support.slow_recipes.Slow"), client, config, epochs=4)
    assert chosen == expected
    (ended,) = events_of(run, AttemptEnded)
    assert ended.num_leaving == 1
    assert ended.reason.startswith("rank 1 (node 1 (1 at 127.0.0.1)) is slow in data: ")
    assert RunState.of(run.events).departure == ended.reason
    steps = [event.step for event in events_of(run, flyte_ddp.events.Reported)]
    assert steps == sorted(set(steps)), "a step was done again"


def test_on_one_node_there_is_nothing_to_replace_a_slow_one_by():
    with pytest.raises(ConfigError, match=r"^replace_stragglers: expected false with num_nodes 1, .*, got true$"):
        ClusterConfig(num_nodes=1, replace_stragglers=True)
    with pytest.raises(ConfigError, match="^replace_stragglers: expected false"):
        flyte_ddp.run(print, cluster={"replace_stragglers": True})
    assert not resize_cluster(ClusterConfig(replace_stragglers=True)).replace_stragglers


@pytest.mark.long
def test_a_slow_rank_of_a_function_that_only_reports_is_named(short, caplog):
    def train():
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        for _ in range(60):
            time.sleep(0.1 if dist.get_rank() == 1 else 0.05)
            dist.all_reduce(torch.ones(1))
            flyte_ddp.session.report(loss=0.5)
        dist.destroy_process_group()

    listener = Listener()
    flyte_ddp.run(train, nproc_per_node=2, listeners=[listener])
    check(listener.found, "step", caplog)


@pytest.fixture
def passes(monkeypatch, tmp_path):
    """The steps and seconds that a function's passes in this process publish, newest last; and of its reports."""
    monkeypatch.setattr(DistributedDataParallel, "forward", DistributedDataParallel.forward)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    published = []
    note_report = watch_ddp(lambda steps, seconds: published.append((steps, list(seconds))), lambda name: None)
    yield published, note_report
    dist.destroy_process_group()


def new_ddp():
    return DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))


def step(*models):
    """Take a step of models, the output of each of which is the next one's input."""
    values = torch.ones(1, 2)
    for model in models:
        values = model(values).expand(1, 2)
    values.sum().backward()


def test_passes_after_one_that_failed_are_counted(passes):
    """Such as for lack of memory: the backward pass has begun, and nothing tells that it has ended."""

    def fail(gradient):
        raise torch.cuda.OutOfMemoryError

    model, (published, _) = new_ddp(), passes
    step(model)
    handle = model.module[0].weight.register_hook(fail)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        step(model)
    handle.remove()
    for _ in range(3):
        step(new_ddp())  # DDP itself does not go on with the model
    assert [steps for steps, _ in published] == [1, 2, 3, 4]


def test_each_model_of_a_function_is_watched_and_none_is_kept(passes):
    published, note_report = passes
    first, second = new_ddp(), new_ddp()
    note_report()
    for _ in range(4):
        step(first)
        step(first, second)
        note_report()  # counts only where there are no such passes
    assert [steps for steps, _ in published] == list(range(1, 10))
    second.module.requires_grad_(False)
    for _ in range(20):  # also after that of the gradient that came last
        step(first, second)
    assert len(published) == 29
    for parameter in first.module[1].parameters():
        parameter.requires_grad = False
    kept = weakref.ref(next(first.parameters()))
    del first, parameter
    gc.collect()
    assert kept() is None


# The comparison, on a clock of the test's own


class Clock:
    def __init__(self, monkeypatch):
        self.now = 1000.0
        monkeypatch.setattr(paces.time, "monotonic", lambda: self.now)


def drive(watch, clock, seconds, per_step, devices=(), pace_of_gang=0.0):
    """Let ranks with these seconds per step and phase train for a while; what a step takes else is the longest."""
    totals = {rank: [0, [0.0] * 3] for rank in range(len(per_step))}
    if watch._latest:
        totals = {rank: [pace.num_steps, list(pace.seconds)] for rank, pace in watch._latest.items()}
    pace_of_gang = pace_of_gang or max(map(sum, per_step))
    for _ in range(int(seconds)):
        clock.now += 1
        steps = int(clock.now / pace_of_gang) - int((clock.now - 1) / pace_of_gang)
        rows = []
        for rank, each in enumerate(per_step):
            totals[rank][0] += steps
            totals[rank][1] = [before + steps * more for before, more in zip(totals[rank][1], each, strict=True)]
            device = devices[rank] if devices else ""
            rows.append({"rank": rank, "num_steps": totals[rank][0], "seconds": totals[rank][1], "device": device})
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


def test_different_gpus_are_said_once_and_of_one_rank_nothing(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    watch, clock, _ = new_watch(monkeypatch, 1)
    drive(watch, clock, 200, [EVEN])
    watch, clock, _ = new_watch(monkeypatch, 2)
    drive(watch, clock, 200, [EVEN, EVEN], ["A100 (cuda:0)", "H200 (cuda:1)"])
    watch, clock, _ = new_watch(monkeypatch, 2)
    drive(watch, clock, 200, [EVEN, EVEN], ["H200 (cuda:0)", "H200 (cuda:1)"])
    assert caplog.messages == [
        "the ranks have different kinds of GPU, of which each is compared with its own kind: A100: ranks 0; "
        "H200: ranks 1",
    ]


def test_ranks_are_compared_with_those_on_the_same_kind_of_gpu(monkeypatch):
    watch, clock, found = new_watch(monkeypatch, 4)
    kinds = ["A100 (cuda:0)", "A100 (cuda:1)", "H200 (cuda:0)", "H200 (cuda:1)"]
    twice = [2 * each for each in EVEN]
    drive(watch, clock, 200, [twice, twice, EVEN, EVEN], kinds)
    assert found == []
    drive(watch, clock, 200, [twice, twice, EVEN, SLOW], kinds)
    assert named(found) == [[(3, "backward")]]


def test_a_phase_with_waits_in_it_is_not_compared(monkeypatch):
    """Such as a compiled backward pass: the faster rank waits in it for the other one, as if it was slow there."""
    published = []
    pace = StepTimer(lambda steps, seconds: published.append(list(seconds)), torch.device("cpu"), waiting=[BACKWARD])
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


def test_only_the_parameter_whose_gradient_comes_last_keeps_a_hook():
    model, calls = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), []
    last = LastGradient(model, lambda: calls.append(1))
    counts = []
    for _ in range(4):
        model(torch.ones(1, 2)).sum().backward()
        last.settle(bool(calls))
        counts.append(len(calls))
        calls.clear()
    assert counts == [4, 4, 1, 1]
    model[0].requires_grad_(False)  # the one that is left gets no gradient any more
    for _ in range(3):
        model(torch.ones(1, 2)).sum().backward()
        last.settle(bool(calls))
        counts.append(len(calls))
        calls.clear()
    assert counts[-1] > 0


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
    pace = StepTimer(lambda steps, seconds: published.append((steps, list(seconds))), torch.device("cuda", 0))
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
