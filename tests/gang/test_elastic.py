"""A gang that goes on smaller when it loses nodes, and larger when they are back."""

from __future__ import annotations

import contextlib
import dataclasses
import re
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
from flyte_ddp.launch.agent.link import Link
from flyte_ddp.launch.nodes.dask import place, scale_up
from flyte_ddp.launch.protocol.messages import Go, Stop
from flyte_ddp.launch.recipe_program import recipe_program
from tests.support.dask_runs import (
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
    start_worker, scheduler, tmp_path, finished_run, caplog, monkeypatch
):
    """On a cluster that somebody scales; a step takes long on one node, so that the second one is
    there in time.
    """
    pace = {"STEP_SECONDS": "0.05", "ALONE_SECONDS": "6"}
    nannies = [start_worker(scheduler, f"node-{index}", **pace) for index in range(2)]

    seen, is_over = [], scale_up.Preparation.is_over

    def watch_preparation(preparation, nodes, ready, now):
        seen.append({each.address for each in nodes} <= ready)
        return is_over(preparation, nodes, ready, now)

    monkeypatch.setattr(scale_up.Preparation, "is_over", watch_preparation)

    class Elastic(type(new_run(tmp_path))):
        def handle(self, event):
            super().handle(event)
            if isinstance(event, events.Reported) and event.step == 5 and len(nannies) == 2:
                nanny = nannies.pop()
                for process in [nanny, *psutil.Process(nanny.pid).children()]:
                    process.kill()
            elif isinstance(event, events.RunStarted) and event.world_size == 1:
                start_worker(scheduler, "node-2", **pace)

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
    assert [seen[0], seen[-1]] == [False, True]  # the gang trained on until the newcomer was ready
    # The growth lost no step and used up no restart: the gang took a checkpoint before it ended.
    assert [event.reason for event in events_of(run, AttemptEnded)][1:] == [
        "the gang grows from 1 to 2 nodes"
    ]
    steps = [
        event.step
        for event in run.events[run.events.index(shrunk) :]
        if isinstance(event, events.Reported)
    ]
    assert steps == list(range(resumed.step + 1, 28))
    assert (
        "the gang grows from 1 to 2 nodes: the gang ended at step "
        f"{grown_from.step} and restarts from there"
    ) in caplog.text


def test_a_stop_leaves_ranks_that_end_to_grow_less_time():
    link = Link(lambda message: None)
    link.obey(Go())
    for _ in range(2):
        link.obey(Stop("the gang grows", 600.0))
    assert link.stop.is_set()
    assert link.stop.deadline - time.monotonic() > 500
    link.obey(Stop("SIGTERM", 20.0))
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
        node_timeout=10,
        min_nodes=1,
        return_timeout=1,
        start_timeout=60,
    )
    stopped = []

    def fall_silent():
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
        assert re.search(r"it has been silent for \d+ s \(node_timeout: 10\)", caplog.text)
        for process in stopped:  # the first, the node, may end its ranks before their turn
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        assert eventually(lambda: not ranks_below(silent.pid))


@dataclasses.dataclass
class Present:
    """A roll call of workers that the test names."""

    names: tuple = ()
    busy: tuple = ()
    gpus: tuple = ("0",)
    unfit: dict = dataclasses.field(default_factory=dict)
    unprepared: tuple = ()
    slow: tuple = ()

    def present_workers(self, leave_out=(), present=()):
        every = [
            dataclasses.replace(
                worker(name, "10.0.0.1", self.gpus),
                is_busy=name in self.busy,
                has_agent=name not in self.unprepared,
                is_slow=name in self.slow,
            )
            for name in self.names
        ]
        return [each for each in every if each.address not in {*leave_out, *self.unfit}]

    def mark_unfit(self, address, why):
        self.unfit[address] = why


@pytest.fixture
def watch(monkeypatch):
    """watch(present, gang, sizes, **config): `seen(seconds)` is the size that is possible when it
    looks then.
    """

    def make(present, gang, sizes, check=lambda nodes: None, not_before=0.0, **config):
        prepared = []
        config = ClusterConfig(**{"num_nodes": sizes[0], "grow_delay": 30, **config})
        gang = [worker(name, "10.0.0.1", present.gpus) for name in gang]
        monkeypatch.setattr(scale_up.ScaleUpWatch, "_run", lambda self: None)
        preparation = scale_up.Preparation(prepared.extend, config.start_timeout)
        made = scale_up.ScaleUpWatch(gang, sizes, config, present, check, preparation, not_before)

        def seen(seconds):
            monkeypatch.setattr(scale_up.time, "monotonic", lambda: seconds)
            seen.members = made._find_members()
            return len(seen.members)

        seen.watch, seen.prepared = made, prepared
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
    present.busy, present.slow = (), ("w-2",)
    assert seen(172) == 0
    seen = watch(Present(("w-1", "w-2")), ["w-1"], [2, 1], grow_delay=0, not_before=150)
    assert [seen(149), seen(150)] == [0, 2]


def test_a_gang_trains_on_until_those_that_join_it_are_prepared(watch):
    present = Present(("w-1", "w-2", "w-3"), unprepared=("w-2", "w-3"))
    seen = watch(present, ["w-1"], [3, 1], grow_delay=0, start_timeout=60)
    assert [seen(100), seen(101)] == [0, 0]
    assert [node.worker for node in seen.prepared] == ["w-2", "w-3"]
    present.unprepared = ("w-3",)
    assert seen(159) == 0
    # a node without a rank may take part, for example if its preparation failed
    assert seen(160) == 3
    present.unprepared = ()
    assert seen(102) == 3
    seen.watch.replace(frozenset({worker("w-1", "10.0.0.1").address}))
    seen.watch.sizes, present.unprepared = [1], ("w-2", "w-3")
    seen.watch.preparation._ends.clear()
    assert seen(200) == 1  # leaving nodes do not wait
    assert len(seen.prepared) == 2


def test_a_full_gang_keeps_spare_nodes_prepared(watch, caplog, monkeypatch):
    caplog.set_level("INFO", "flyte_ddp")
    present = Present(("w-1", "w-2"), unprepared=("w-3", "w-4"))
    seen = watch(present, ["w-1", "w-2"], [2], spare_nodes=1, start_timeout=60)

    def look(seconds):
        monkeypatch.setattr(scale_up.time, "monotonic", lambda: seconds)
        seen.watch._keep_spares()
        return [node.worker for node in seen.prepared]

    assert look(1) == []  # The spare node has no room.
    present.names = ("w-1", "w-2", "w-3", "w-4")
    assert look(2) == look(61) == ["w-3"]
    present.unprepared = ("w-4",)
    assert look(70) == look(71) == ["w-3"]
    present.unprepared = ("w-3", "w-4")
    assert look(90) == ["w-3", "w-3"], "its agent has ended"
    assert [each for each in caplog.messages if "spare" in each] == [
        "0 of 1 spare nodes are ready: none",
        "1 of 1 spare nodes are ready: w-3",
        "0 of 1 spare nodes are ready: none",
    ]


def test_a_gang_grows_to_sizes_that_split_the_batch_with_workers_that_can_take_part(watch):
    program = recipe_program("digits", dask_config(global_batch_size=24))
    sizes = place.usable_sizes(program, ClusterConfig(num_nodes=6, min_nodes=2))
    assert sizes == [6, 4, 3, 2]
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


@pytest.mark.parametrize("num_waiting", [0, 1, 2])
def test_a_gang_begins_at_once_with_min_nodes_if_all_others_wait_for_room(num_waiting, monkeypatch):
    """Four nodes, of which two are there. Pods that do not wait for room will be there soon."""

    class StillWaits(Exception):
        pass

    def sleep(seconds):
        raise StillWaits

    monkeypatch.setattr(place.time, "sleep", sleep)
    monkeypatch.setattr(place, "count_waiting", lambda config, run_name: num_waiting)
    config = ClusterConfig(kind="existing", num_nodes=4, min_nodes=1, return_timeout=600)
    run = SimpleNamespace(check_stop=lambda: None, name="run")
    gathering = place.DaskPlace(None, config, "run")
    gathering._discovery = Present(("w-1", "w-2"))
    expected = contextlib.nullcontext()
    if num_waiting < 2:
        expected = pytest.raises(StillWaits)
    with expected:
        assert len(gathering._wait_for_workers(run, None, [4, 2, 1])) == 2


def test_a_gang_finds_replacements_for_workers_that_leave_it(watch, monkeypatch):
    present = Present(("w-1",))
    seen = watch(present, ["w-1", "w-2"], [2], not_before=1e9)
    address = {name: worker(name, "10.0.0.1").address for name in ("w-1", "w-2", "w-3")}
    assert seen(100) == 0  # a gang of full size needs nobody
    seen.watch.replace(frozenset({address["w-2"]}))
    present.names = ("w-1", "w-2", "w-3")
    assert seen(110) == 2
    assert seen.members == {address["w-1"], address["w-3"]}
    seen.watch.replace(frozenset({address["w-1"], address["w-2"]}))  # another one leaves
    assert seen(130) == 0
