"""A gang that goes on smaller when it loses nodes, and larger when they are back."""

from __future__ import annotations

import dataclasses
import io
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import torch

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import (
    ConfigError,
)
from flyte_ddp.events import AttemptEnded
from flyte_ddp.launch.dask import calls, growth, place, roll_call
from flyte_ddp.launch.dask.node import DriverLink
from flyte_ddp.launch.policy import Ended
from flyte_ddp.launch.process.programs import Job, recipe_program
from flyte_ddp.studies.runner import resize_cluster
from tests.support.dask_runs import (
    LOCAL,
    dask_config,
    events_of,
    eventually,
    ranks_below,
    train,
    worker,
)
from tests.support.runs import new_run


@pytest.mark.long
def test_a_gang_shrinks_and_grows_back_to_the_weights_of_an_undisturbed_run(
    start_worker, scheduler, tmp_path, finished_run, caplog
):
    """On a cluster that somebody scales; a step takes long on one node, so that the second one is
    there in time.
    """
    pace = {"STEP_SECONDS": "0.05", "ALONE_SECONDS": "2.5"}
    nannies = [start_worker(scheduler, f"node-{index}", **pace) for index in range(2)]
    newcomers, prepared = [], []

    class Elastic(type(new_run(tmp_path))):
        def handle(self, event):
            super().handle(event)
            if isinstance(event, events.Reported) and event.step == 5 and len(nannies) == 2:
                nanny = nannies.pop()
                for process in [nanny, *psutil.Process(nanny.pid).children()]:
                    process.kill()
            elif isinstance(event, events.RunStarted) and event.world_size == 1:
                newcomers.append(start_worker(scheduler, "node-2", **pace))
            elif isinstance(event, AttemptEnded) and newcomers:
                below = psutil.Process(newcomers.pop().pid).children(recursive=True)
                prepared.extend(
                    process
                    for process in below
                    if "flyte_ddp.launch.dask.node" in str(process.cmdline())
                )

    config = ClusterConfig(
        kind="existing",
        scheduler_address=scheduler,
        min_nodes=1,
        return_timeout=0.1,
        grow_delay=1,
        max_restarts=1,
    )
    with open_cluster(config, "test") as client:
        run = train(
            Elastic(tmp_path, new_run(tmp_path).recipe), client, config, checkpoint_interval=2
        )

    whole, shrunk, grown = events_of(run, events.RunStarted)
    _, resumed, grown_from = events_of(run, events.CheckpointLoaded)
    assert [event.world_size for event in (whole, shrunk, grown)] == [2, 1, 2]
    torch.testing.assert_close(run.state(), finished_run().state())
    # The growth lost no step and used up no restart: the gang took a checkpoint before it ended.
    assert [event.reason for event in events_of(run, AttemptEnded)][1:] == [
        "the gang grows from 1 to 2 nodes"
    ]
    assert prepared  # the newcomer's supervisor was there before
    steps = [
        event.step
        for event in run.events[run.events.index(shrunk) :]
        if isinstance(event, events.Reported)
    ]
    assert steps == list(range(resumed.step + 1, 28))
    assert (
        f"the gang ended at step {grown_from.step}, after a checkpoint, to grow from 1 to 2 nodes"
    ) in caplog.text


def test_a_stop_leaves_ranks_that_end_to_grow_less_time():
    # a driver's silence would end this process
    link = DriverLink(io.BytesIO(), driver_timeout=float("inf"))
    for command in ("go", "stop 600 the gang grows", "stop 600 the gang grows"):
        link.obey(command)
    assert link.stop.is_set()
    assert link.stop.deadline - time.monotonic() > 500
    link.obey("stop 20 SIGTERM")
    assert link.stop.reason == "SIGTERM"
    assert link.stop.deadline - time.monotonic() < 21
    assert not link.stop.is_urgent


@pytest.mark.long
def test_a_silent_node_is_abandoned_and_kills_its_ranks_when_it_returns(
    start_worker, scheduler, tmp_path, caplog, monkeypatch
):
    start_worker(scheduler, "node-0", STEP_SECONDS="0.1")
    silent = start_worker(scheduler, "node-1", STEP_SECONDS="0.1")
    config = ClusterConfig(
        kind="existing",
        scheduler_address=scheduler,
        node_timeout=5,
        min_nodes=1,
        return_timeout=1,
        start_timeout=60,
    )
    stopped, asked_briefly = [], []

    def note_call(client, addresses, *arguments, **options):
        if options.get("timeout", 60) < 1:
            asked_briefly.extend(addresses)
        return calls.call_workers(client, addresses, *arguments, **options)

    monkeypatch.setattr(roll_call, "call_workers", note_call)

    def fall_silent():
        assert not asked_briefly
        stopped.extend(
            [psutil.Process(silent.pid), *psutil.Process(silent.pid).children(recursive=True)]
        )
        for process in stopped:
            process.suspend()

    with open_cluster(config, "test") as client:
        run = train(
            new_run(tmp_path), client, config, at_steps=[(3, fall_silent)], checkpoint_interval=2
        )
        assert [event.world_size for event in events_of(run, events.RunStarted)] == [2, 1]
        assert "it has been silent for 5 s" in caplog.text
        # the silent one: each look at the workers would wait 5 s for it
        assert len(set(asked_briefly)) == 1
        for process in stopped:
            process.resume()
        assert eventually(lambda: not ranks_below(silent.pid))


@dataclasses.dataclass
class Present:
    """A roll call of workers that the test names."""

    names: tuple = ()
    busy: tuple = ()
    gpus: tuple = ("0",)
    unfit: dict = dataclasses.field(default_factory=dict)
    prepared: list = dataclasses.field(default_factory=list)  # addresses
    # addresses of those that have not imported torch yet
    importing: set = dataclasses.field(default_factory=set)

    def present_workers(self, leave_out=()):
        every = [
            dataclasses.replace(worker(name, "10.0.0.1", self.gpus), is_busy=name in self.busy)
            for name in self.names
        ]
        return [each for each in every if each.address not in {*leave_out, *self.unfit}]

    def prepare(self, address):
        self.prepared.append(address)
        return address not in self.importing

    def mark_unfit(self, address, why):
        self.unfit[address] = why


@pytest.fixture
def watch(monkeypatch):
    """watch(present, gang, sizes, **config): `seen(seconds)` is the size that is possible when it
    looks then.
    """

    def make(present, gang, sizes, check=lambda nodes: None, not_before=0.0, **config):
        config = ClusterConfig(**{"num_nodes": sizes[0], "grow_delay": 30, **config})
        gang = [worker(name, "10.0.0.1", present.gpus) for name in gang]
        monkeypatch.setattr(growth.GrowthWatch, "_run", lambda self: None)
        made = growth.GrowthWatch(
            gang, sizes, config, present, present.prepare, check, not_before, 60
        )

        def seen(seconds):
            monkeypatch.setattr(growth.time, "monotonic", lambda: seconds)
            seen.members = made._find_members()
            return len(seen.members)

        seen.watch = made
        return seen

    return make


def test_a_gang_grows_when_idle_workers_have_been_there_for_a_while(watch):
    present = Present(("w-1", "w-2"))
    seen = watch(present, ["w-1"], [2, 1])
    assert [seen(100), seen(129), seen(130)] == [0, 0, 2]
    present.names = ("w-1",)  # gone, and back: it has to stay again
    assert seen(131) == 0
    present.names = ("w-1", "w-2")
    assert [seen(140), seen(169), seen(170)] == [0, 0, 2]
    present.busy = ("w-2",)
    assert seen(171) == 0
    assert present.prepared == [worker("w-2", "10.0.0.1").address] * 2  # each time that it came
    seen = watch(Present(("w-1", "w-2")), ["w-1"], [2, 1], grow_delay=0, not_before=150)
    assert [seen(149), seen(150)] == [0, 2]


def test_a_newcomer_is_prepared_shortly_before_a_growth_which_is_not_late(watch):
    present = Present(("w-1", "w-2"))
    seen = watch(present, ["w-1"], [2, 1], grow_delay=30, not_before=400)
    assert (seen(100), present.prepared) == (0, [])  # it would end unused
    assert [seen(370), seen(399.9)] == [0, 0]
    assert len(present.prepared) == 1
    assert seen(400) == 2


def test_a_gang_trains_on_until_the_ranks_of_a_newcomer_can_start_at_once(watch):
    address = worker("w-2", "10.0.0.1").address
    present = Present(("w-1", "w-2"), importing={address})
    seen = watch(present, ["w-1"], [2, 1], grow_delay=1)
    assert [seen(100), seen(101), seen(102)] == [0, 0, 0]
    present.importing.clear()
    assert [seen(103), seen(104)] == [2, 2]
    assert present.prepared == [address] * 4
    stuck = watch(Present(("w-1", "w-2"), importing={address}), ["w-1"], [2, 1], grow_delay=1)
    # it may import for as long in the gang
    assert [stuck(100), stuck(160), stuck(161)] == [0, 0, 2]


def test_only_as_many_newcomers_are_prepared_as_a_growth_needs_and_those_that_came_first_join(
    watch,
):
    others = tuple(f"w-{number}" for number in range(10))
    gang, sizes = ["w-a", "w-b"], [4, 3, 2]
    present = Present(("w-a", "w-b", "w-7", "w-8"))
    seen = watch(present, gang, sizes)
    address = {name: worker(name, "10.0.0.1").address for name in (*others, *gang)}
    assert seen(100) == 0
    present.names = (*gang, *others)
    assert [seen(110), seen(130)] == [0, 4]
    assert present.prepared == [address["w-7"], address["w-8"]]
    assert seen.members == {address[name] for name in (*gang, "w-7", "w-8")}
    present.names = tuple(name for name in present.names if name != "w-7")
    seen(131)
    assert present.prepared[2:] == [address["w-0"]]


def test_a_watch_that_is_over_prepares_no_worker_and_is_waited_for():
    present, is_asked, may_answer = Present(("w-1", "w-2")), threading.Event(), threading.Event()

    def present_workers(leave_out):
        is_asked.set()
        assert may_answer.wait(30)
        return Present.present_workers(present, leave_out)

    present.present_workers = present_workers
    gang = [worker("w-1", "10.0.0.1")]
    made = growth.GrowthWatch(
        gang, [2, 1], ClusterConfig(grow_delay=0), present, present.prepare, None, 0.0, 60
    )
    assert is_asked.wait(30)
    made.close()
    may_answer.set()
    made.join(30)
    assert (present.prepared, made.members) == ([], frozenset())


def test_a_gang_grows_to_sizes_that_split_the_batch_with_workers_that_can_take_part(watch):
    names = ("w-1", "w-2", "w-3", "w-4", "w-5")
    assert [
        watch(Present(names[:num]), names[:2], [6, 4, 3, 2], grow_delay=0)(1)
        for num in (2, 3, 4, 5)
    ] == [
        0,
        3,
        4,
        4,
    ]
    assert watch(Present(names[:3]), names[:2], [4, 2], grow_delay=0)(1) == 0
    assert (
        watch(
            Present(names[:2], gpus=("0", "1")), names[:1], [2, 1], grow_delay=0, gpus_per_node=1
        )(1)
        == 2
    )
    without = Present(names[:2], gpus=())
    assert watch(without, names[:1], [2, 1], grow_delay=0, gpus_per_node=1)(1) == 0
    assert list(without.unfit.values()) == ["gpus_per_node: expected 1, got 0 on worker w-2"]

    def refuse(nodes):
        if nodes[0].worker == "w-3":
            raise ConfigError("checkpoints: another directory on w-3")

    present = Present(names[:4])
    seen = watch(present, names[:2], [4, 3, 2], check=refuse, grow_delay=0)
    assert [seen(1), seen(2)] == [0, 3]
    assert list(present.unfit.values()) == ["checkpoints: another directory on w-3"]


def test_fewer_nodes_go_on_as_soon_as_the_others_time_to_return_is_over(monkeypatch):
    clock = [0.0]
    advance = lambda seconds: clock.append(clock[-1] + seconds)  # noqa: E731
    monkeypatch.setattr(place, "time", SimpleNamespace(monotonic=lambda: clock[-1], sleep=advance))
    workers = SimpleNamespace(
        _roll_call=Present(("w-1",)), pool=None, config=LOCAL, client=SimpleNamespace(status="ok")
    )
    run = SimpleNamespace(check_stop=lambda: None)
    for patience in (0.0, 1.0, 60.0):
        clock[:] = [0.0]
        (left,) = place.DaskPlace._wait_for_workers(
            workers, run, None, [2, 1], frozenset(), patience
        )
        assert (left.name, clock[-1]) == ("w-1", pytest.approx(patience))


def test_a_worker_that_leaves_is_not_waited_for_while_it_closes():
    nodes = [
        SimpleNamespace(address=name, is_leaving=name == "leaving")
        for name in ("leaving", "staying")
    ]
    latest = SimpleNamespace(nodes=nodes, growth=SimpleNamespace(members=frozenset()), plugin="")
    workers = SimpleNamespace(
        config=LOCAL, pool=None, _latest=latest, _roll_call=SimpleNamespace(silent=set())
    )
    expected, _ = place.DaskPlace._look_back(workers, Ended(None, 5, 0, is_announced=True))
    assert (expected, workers._roll_call.silent) == ({"staying"}, {"leaving"})


def test_a_gang_of_full_size_and_a_trial_of_a_sweep_look_for_no_worker(monkeypatch):
    monkeypatch.setattr(growth.threading.Thread, "start", None)  # not even called
    gang = [worker("w-1", "10.0.0.1")]
    config = resize_cluster(ClusterConfig(num_nodes=4, min_nodes=1))
    sizes = place.usable_sizes(recipe_program("digits", dask_config()), config)
    assert growth.GrowthWatch(gang, sizes, config, None, None, None, 0.0, 60).members == frozenset()


def test_a_smaller_gang_still_shares_the_global_batch_evenly(tmp_path):
    job = Job(recipe_program("digits", dask_config(global_batch_size=24)), str(tmp_path), 0.0)
    assert place.usable_sizes(job.program, ClusterConfig(num_nodes=6, min_nodes=2)) == [6, 4, 3, 2]
    assert place.usable_sizes(job.program, ClusterConfig(num_nodes=6)) == [6]


def test_a_gang_finds_replacements_for_workers_that_leave_it(watch, monkeypatch):
    present = Present(("w-1",))
    seen = watch(present, ["w-1", "w-2"], [2], not_before=1e9)
    address = {name: worker(name, "10.0.0.1").address for name in ("w-1", "w-2", "w-3")}
    assert seen(100) == 0  # a gang of full size needs nobody
    seen.watch.replace(frozenset({address["w-2"]}))
    present.names = ("w-1", "w-2", "w-3")
    assert [seen(110), seen(110 + growth.REPLACEMENT_DELAY - 0.1)] == [0, 0]
    assert present.prepared == [address["w-3"]]  # while the gang still trains
    assert seen(110 + growth.REPLACEMENT_DELAY) == 2
    assert seen.members == {address["w-1"], address["w-3"]}
    seen.watch.replace(frozenset({address["w-1"], address["w-2"]}))  # another one leaves
    assert seen(130) == 0
