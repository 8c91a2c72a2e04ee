"""Workers that are told to go: the run loses no step, and counts no restart."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import threading
import time

import cloudpickle
import psutil
import pytest
import torch
import yaml

from flyte_ddp import events
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.config import resolve
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.control import driver
from flyte_ddp.launch.nodes.dask.place import DaskPlace
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job, Kind, Program
from flyte_ddp.launch.protocol.signals import StopRequest
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import FunctionCall
from flyte_ddp.recipes import get_recipe
from tests.support.dask_runs import At, events_of, front_of, start_scheduler
from tests.support.promises import NUM_STEPS, count, wait_for_order
from tests.support.runs import REPOSITORY, new_run

RECIPE = "tests.support.promises.Steady"
STEADY = {"checkpoint_interval": 5, "recipe_options": {"faults": ""}}


@pytest.fixture
def pair(start_worker, scheduler):
    """Two nodes, as (config, nannies): a run goes on with one of them."""
    nannies = [start_worker(scheduler, f"node-{index}") for index in range(2)]
    config = ClusterConfig(
        kind="existing",
        scheduler_address=scheduler,
        processes_per_node=2,
        min_nodes=1,
        max_restarts=0,
        node_timeout=30,
        grow_delay=300,
    )
    return config, nannies


def program_of(kind, faults=""):
    if kind == "patient":
        return Program(
            "wait", cloudpickle.dumps(FunctionCall(wait_for_order, (faults,))), ("tests",)
        )
    if kind == "function":
        return Program("count", cloudpickle.dumps(FunctionCall(count, (faults,))), ("tests",))
    config = {**STEADY, "parallel": kind, "recipe_options": {"faults": faults}}
    return recipe_program(RECIPE, resolve(get_recipe(RECIPE, {}).defaults, config))


def train(directory, program, config=None, at_steps=(), listeners=()):
    """Train on the cluster of `config`, or on this machine."""
    run = new_run(directory, RECIPE)
    data = (lambda: str(run.data())) if program.kind is Kind.RECIPE else None
    with open_cluster(config, "test") if config else contextlib.nullcontext() as client:
        place = DaskPlace(client, config) if config else LocalPlace(2)
        job = Job(program, str(directory / "checkpoints"), time.time())
        run.result = driver.run(
            job, place, data, [run, *listeners, *(At(*each) for each in at_steps)], run.relay
        )
    return run


def result_of(run):
    return (
        run.state()
        if run.result.finished.model_state_url
        else cloudpickle.loads(run.result.finished.value)
    )


def check_no_step_was_lost(run):
    steps = [event.step for event in events_of(run, events.Reported)]
    assert steps == sorted(set(steps)), "a step was done again"
    assert steps[-1] == NUM_STEPS


class On(At):
    """A listener that calls a function once, at the first event of a kind, from a step on."""

    def __init__(self, kind, step, function):
        super().__init__(step, function)
        self.kind = kind

    def handle(self, event):
        if isinstance(event, self.kind):
            super().handle(events.Reported(getattr(event, "step", 0), None, {}))


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "notice", "step"),
    [
        slow("ddp", events.Reported, 9),  # This notice comes while the model is evaluated.
        ("function", events.Reported, 9),
        slow("fsdp", events.Reported, 9),
        slow("ddp", events.RunStarted, 0),  # This notice comes before the first step.
        slow("ddp", events.CheckpointSaved, 5),  # This notice comes while a checkpoint is written.
    ],
)
def test_a_worker_that_is_told_to_go_costs_no_step_and_no_restart(
    pair, tmp_path, kind, notice, step, caplog, forked_functions
):
    config, nannies = pair
    faults = tmp_path / "faults"
    faults.mkdir()
    # No rank has this number. While the file is there, steps take their time.
    (faults / "9-kill-1000").touch()
    tell = On(notice, step, lambda: nannies[1].send_signal(signal.SIGTERM))
    run = train(tmp_path, program_of(kind, str(faults)), config, listeners=[tell])
    check_no_step_was_lost(run)
    first, second = events_of(run, events.RunStarted)
    assert (first.num_nodes, second.num_nodes) == (2, 1)
    (ended,) = events_of(run, events.AttemptEnded)
    assert ended.num_leaving == 1
    assert ended.reason.startswith("node 1 (node-1 at ")
    assert "restarts from there" in caplog.text
    resumed = events_of(run, events.CheckpointLoaded)[-1].step
    assert resumed == ended.step >= step
    assert ended.step < NUM_STEPS
    if kind == "function":  # The result depends on the number of ranks at each step.
        sizes = [sum(range(1, 5))] * resumed + [sum(range(1, 3))] * (NUM_STEPS - resumed)
        assert result_of(run) == pytest.approx(
            sum(size * step**0.5 for step, size in enumerate(sizes, 1))
        )
    else:
        torch.testing.assert_close(
            result_of(run), train(tmp_path / "undisturbed", program_of(kind)).state()
        )
    assert nannies[1].wait() == 0
    assert nannies[0].poll() is None


@contextlib.contextmanager
def on_one_core():
    """Run on one core whatever the block starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="half of one core is one core")
def test_a_node_with_half_the_cores_is_named_and_left_out(
    start_worker, scheduler, tmp_path, forked_functions
):
    start_worker(scheduler, "node-0")
    with on_one_core():
        start_worker(scheduler, "node-1")
    start_worker(scheduler, "node-2")
    config = ClusterConfig(
        kind="existing",
        scheduler_address=scheduler,
        num_nodes=3,
        min_nodes=2,
        node_timeout=30,
        grow_delay=0,
        grow_interval=0,
        check_nodes="always",
    )
    faults = tmp_path / "faults"
    faults.mkdir()
    wait = faults / "9-kill-1000"  # no rank has this number
    wait.touch()

    class Finish(events.Listener):
        """Lets the run go on for some steps after the node has left."""

        def handle(self, event, state):
            if state.num_starts == 2 and isinstance(event, events.Reported):
                wait.unlink(missing_ok=True)

    run = train(tmp_path, program_of("patient", str(faults)), config, listeners=[Finish()])
    (found,) = events_of(run, events.NodesFoundSlow)
    assert [each.label.split(" at ")[0] for each in found.nodes] == ["node 1 (node-1"]
    assert [each.probe.partition(" (")[0] for each in found.nodes] == ["usable cores"]
    assert found.nodes[0].rate < 0.7 * found.nodes[0].median
    assert [each.num_nodes for each in events_of(run, events.RunStarted)] == [3, 2]
    (ended,) = events_of(run, events.AttemptEnded)
    assert ended.num_leaving == 1
    assert ended.reason.startswith("node 1 (node-1 at ")
    assert events_of(run, events.CheckpointLoaded)[-1].step == ended.step


def agents_of(nanny):
    """The processes of agents on a worker."""
    return {
        each.pid
        for each in psutil.Process(nanny.pid).children(recursive=True)
        if "flyte_ddp.launch.agent.main" in each.cmdline()
    }


@pytest.mark.long
def test_a_spare_node_takes_the_place_of_a_lost_one_at_once(
    start_worker, scheduler, tmp_path, forked_functions, caplog
):
    caplog.set_level("INFO", "flyte_ddp")
    nannies = [start_worker(scheduler, f"node-{index}") for index in range(3)]
    config = ClusterConfig(
        kind="existing",
        scheduler_address=scheduler,
        spare_nodes=1,
        max_restarts=1,
        node_timeout=30,
        check_nodes="never",
    )
    faults = tmp_path / "faults"
    faults.mkdir()
    wait = faults / "9-kill-1000"  # no rank has this number
    wait.touch()
    seen = {}

    class Lose(events.Listener):
        """Kills a node once the spare node is ready."""

        def handle(self, event, state):
            if isinstance(event, events.RunStarted):
                seen.setdefault("started", []).append(event.at)
            if state.num_starts == 2 and isinstance(event, events.Reported):
                seen.setdefault("agents then", agents_of(nannies[2]))
                wait.unlink(missing_ok=True)
            if "1 of 1 spare nodes are ready: node-2" in caplog.text and "lost" not in seen:
                seen["agents"] = agents_of(nannies[2])
                lost = psutil.Process(nannies[1].pid)
                for process in [lost, *lost.children(recursive=True)]:
                    process.kill()
                seen["lost"] = time.time()

    run = train(tmp_path, program_of("patient", str(faults)), config, listeners=[Lose()])
    assert [each.num_nodes for each in events_of(run, events.RunStarted)] == [2, 2]
    (ended,) = events_of(run, events.AttemptEnded)
    assert ended.reason.startswith("node 1 (node-1 at ")
    print(f"whole again after {seen['started'][1] - seen['lost']:.2f} s")
    assert len(seen["agents"]) == 1, "the spare node has an agent before the loss"
    assert seen["agents then"] == seen["agents"]


@pytest.mark.slow
def test_a_scheduler_that_is_told_to_go_costs_no_step_and_no_restart(
    pair, start_worker, scheduler, tmp_path
):
    config, _ = pair
    process, first = start_scheduler(tmp_path)
    slow = tmp_path / "faults"
    slow.mkdir()
    (slow / "9-kill-1000").touch()
    with front_of(first) as (address, targets):
        for index in (3, 4):
            start_worker(address, f"node-{index}")

        def replace():
            process.wait()
            time.sleep(1)  # The client tries to connect again meanwhile.
            targets[0] = scheduler

        def tell():
            targets[0] = ""
            process.send_signal(signal.SIGTERM)
            threading.Thread(target=replace).start()

        config = dataclasses.replace(config, scheduler_address=address, min_nodes=0)
        run = train(tmp_path, program_of("ddp", str(slow)), config, at_steps=[(5, tell)])
    check_no_step_was_lost(run)
    assert [event.num_nodes for event in events_of(run, events.RunStarted)] == [2, 2]
    (ended,) = events_of(run, events.AttemptEnded)
    assert ended.reason == "2 nodes leave"
    assert process.wait() == 0


def test_the_ranks_of_a_task_get_what_its_pods_grace_leaves(monkeypatch):
    assert StopRequest().grace == Program("own", b"").stop_grace == 20
    spec = yaml.safe_load((REPOSITORY / "deploy/pod-template.yaml").read_text())["template"]["spec"]
    (variable,) = spec["containers"][0]["env"]
    assert int(variable["value"]) == spec["terminationGracePeriodSeconds"] == 60
    monkeypatch.setenv(variable["name"], variable["value"])
    graces = {StopRequest().grace, Program("own", b"").stop_grace, LocalPlace(1).notice_seconds}
    assert graces == {50}
    monkeypatch.setenv(variable["name"], "a minute")
    with pytest.raises(
        ConfigError,
        match="^FLYTE_DDP_TERMINATION_GRACE: expected a number of seconds, got 'a minute'$",
    ):
        StopRequest()
