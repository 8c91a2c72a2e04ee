"""The gang launcher, on real clusters of this machine's processes."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from flyte_ddp import events
from flyte_ddp.cluster.config import ADDRESS_VARIABLE, ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import (
    OUT_OF_MEMORY,
    ClusterError,
    ConfigError,
    GangLost,
    NodeLost,
    OutOfMemory,
    RankFailure,
    StorageUnavailable,
    TrainingStopped,
)
from flyte_ddp.launch.dask import calls, gang, growth, roll_call
from flyte_ddp.launch.dask import launcher as dask
from flyte_ddp.launch.dask.archive import delete_archive
from flyte_ddp.launch.dask.calls import call_workers
from flyte_ddp.launch.dask.code import packed_code
from flyte_ddp.launch.dask.launcher import train_on_dask, usable_sizes
from flyte_ddp.launch.dask.messages import Inbox, NodeJob, decode, encode
from flyte_ddp.launch.dask.node import DriverLink
from flyte_ddp.launch.dask.placement import Worker, assign_nodes
from flyte_ddp.launch.failures import Ended, is_bug
from flyte_ddp.launch.run import Gang, run_program, script_program
from flyte_ddp.launch.signals import StopRequest
from flyte_ddp.rank.checkpoint_files import load_state
from flyte_ddp.rank.job import Job, NodeRanks
from flyte_ddp.rank.programs import RecipeProgram
from flyte_ddp.sweep.runner import one_node_config
from flyte_ddp.wall_time import AttemptEnded, AttemptStarted
from tests.support.dask_runs import eventually, ranks_below, start_driver, train
from tests.support.image_store import running_store
from tests.support.runs import REPOSITORY, how_it_ended, new_run, wait_for_step

LOCAL = ClusterConfig(kind="local", node_timeout=30)  # a busy machine's workers are slow to answer, not lost


@pytest.fixture(scope="module")
def client():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEP_SECONDS", "0.05")  # for tests that have to meet a run on its way
        with open_cluster(LOCAL, "test") as client:
            yield client


@pytest.fixture
def fault(client):
    """fault("kind rank step"): what the ranks of the next run do, see tests.support.recipes."""

    def switch_on(text, write_seconds=0):
        variables = {"FAULT": text, "WRITE_SECONDS": str(write_seconds)}
        client.run(lambda: os.environ.update(variables))  # a bound method would arrive with an environment of its own

    yield switch_on
    client.run(lambda: [os.environ.pop(name, None) for name in ("FAULT", "WRITE_SECONDS")])


def start_scheduler(directory):
    """The process and the address of a scheduler that no run made."""
    file = directory / "scheduler.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "dask", "scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard"]
        + ["--scheduler-file", str(file)]
    )
    assert eventually(lambda: file.exists() and file.read_text().endswith("}"), 60)
    return process, json.loads(file.read_text())["address"]


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory):
    process, address = start_scheduler(tmp_path_factory.mktemp("dask"))
    yield address
    process.kill()
    process.wait()


@pytest.fixture
def start_worker():
    """start_worker(scheduler, name): the process of a worker's nanny, which cannot import anything of this checkout."""
    nannies = []

    def start(scheduler, name, **environment):
        nannies.append(
            subprocess.Popen(
                [sys.executable, "-m", "dask", "worker", scheduler, "--name", name, "--nthreads", "1"]
                + ["--no-dashboard", "--memory-limit", "0"],
                cwd=tempfile.gettempdir(),
                env={**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **environment},
            )
        )
        return nannies[-1]

    yield start
    for nanny in nannies:
        for process in [*psutil.Process(nanny.pid).children(recursive=True), nanny] if nanny.poll() is None else []:
            process.kill()
        nanny.wait()


def states_equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def events_of(run, kind):
    return [event for event in run.events if isinstance(event, kind)]


def pid_of(client, index):
    return sorted(client.run(os.getpid).values())[index]


def test_two_nodes_give_the_weights_and_the_events_of_two_processes(client, tmp_path, finished_run):
    on_one_machine = finished_run()
    run = train(new_run(tmp_path), client, LOCAL)

    torch.testing.assert_close(run.state(), on_one_machine.state())
    assert [type(event) for event in run.events] == [type(event) for event in on_one_machine.events]
    assert [event.step for event in events_of(run, events.StepFinished)] == list(range(1, 28))
    assert events_of(run, events.PredictionsMade) == events_of(on_one_machine, events.PredictionsMade)
    assert run.result.epochs == events_of(run, events.EpochFinished)
    assert run.error is None
    assert {f"[node {index}] [rank {index}] the data are opened" for index in (0, 1)} <= set(run.lines)
    plugins = client.run(lambda dask_worker: list(dask_worker.plugins))
    assert not [name for names in plugins.values() for name in names if name.startswith("training-")]
    assert "torch" not in client.run(lambda: list(sys.modules)).popitem()[1]


def test_a_killed_rank_costs_only_time_and_the_next_is_forked_from_the_same_server(
    client, tmp_path, finished_run, caplog
):
    servers = set()

    def kill():
        rank = ranks_below(pid_of(client, 1))[0]
        servers.add(rank.parent())
        rank.kill()

    def look():
        servers.update(rank.parent() for rank in ranks_below(pid_of(client, 1)))

    at_steps = [(5, kill), (20, look)]
    run = train(new_run(tmp_path), client, LOCAL, at_steps=at_steps, checkpoint_interval=2)

    assert states_equal(run.state(), finished_run().state())
    (server,) = servers
    assert eventually(lambda: not server.is_running())  # it ends with the run
    first, second = events_of(run, events.RunStarted)
    assert (first.resumed_step, second.world_size) == (0, 2)
    assert second.resumed_step >= 4
    assert "was killed by SIGKILL" in caplog.text
    (lost,) = events_of(run, AttemptEnded)
    assert "was killed by SIGKILL" in lost.reason
    assert [event.num_nodes for event in events_of(run, AttemptStarted)] == [2, 2]
    spent = events.RunState.of(run.events).time_spent()
    assert spent.wall == pytest.approx(run.events[-1].at - run.events[0].launched_at)
    assert spent.restarting > lost.idle_seconds > 0  # the ranks' two starts, and until the first one's end was noticed
    assert spent.stepping > 0.05 * 27 * 0.9
    before = [event.step for event in run.events[: run.events.index(second)] if isinstance(event, events.StepFinished)]
    assert (spent.redone_steps > 0) == (max(before) > second.resumed_step)  # a checkpoint may have come in time


@pytest.mark.slow
def test_a_killed_rank_of_a_split_model_costs_only_time(client, tmp_path, finished_run):
    def kill():
        ranks_below(pid_of(client, 1))[0].kill()

    split = {"parallel": "fsdp", "checkpoint_interval": 2}
    run = train(new_run(tmp_path), client, LOCAL, at_steps=[(5, kill)], **split)

    torch.testing.assert_close(run.state(), finished_run().state())
    first, second = events_of(run, events.RunStarted)
    assert (first.resumed_step, second.world_size) == (0, 2)
    assert second.resumed_step >= 4


def test_a_killed_worker_costs_only_time(client, tmp_path, finished_run, caplog):
    def kill():
        os.kill(pid_of(client, 0), signal.SIGKILL)

    run = train(new_run(tmp_path), client, LOCAL, at_steps=[(5, kill)], checkpoint_interval=2)

    assert states_equal(run.state(), finished_run().state())
    assert len(events_of(run, events.RunStarted)) == 2
    assert "its worker is gone" in caplog.text


def test_a_gang_shrinks_and_grows_back_to_the_weights_of_an_undisturbed_run(
    start_worker, scheduler, tmp_path, finished_run, caplog
):
    """On a cluster that somebody scales; a step takes long on one node, so that the second one is there in time."""
    pace = {"STEP_SECONDS": "0.05", "ALONE_SECONDS": "2.5"}
    nannies = [start_worker(scheduler, f"node-{index}", **pace) for index in range(2)]

    class Elastic(type(new_run(tmp_path))):
        def handle(self, event):
            super().handle(event)
            if isinstance(event, events.StepFinished) and event.step == 5 and len(nannies) == 2:
                nanny = nannies.pop()
                for process in [nanny, *psutil.Process(nanny.pid).children()]:
                    process.kill()
            elif isinstance(event, events.RunStarted) and event.world_size == 1:
                start_worker(scheduler, "node-2", **pace)

    config = ClusterConfig(
        kind="existing", scheduler_address=scheduler, min_nodes=1, return_timeout=0.1, grow_delay=1, max_restarts=1
    )
    with open_cluster(config, "test") as client:
        run = train(Elastic(tmp_path, new_run(tmp_path).recipe), client, config, checkpoint_interval=2)

    whole, shrunk, grown = events_of(run, events.RunStarted)
    assert [event.world_size for event in (whole, shrunk, grown)] == [2, 1, 2]
    torch.testing.assert_close(run.state(), finished_run().state())
    # The growth lost no step and used up no restart: the gang took a checkpoint before it ended.
    assert [event.reason for event in events_of(run, AttemptEnded)][1:] == ["it grows to 2 nodes"]
    steps = [event.step for event in run.events[run.events.index(shrunk) :] if isinstance(event, events.StepFinished)]
    assert steps == list(range(shrunk.resumed_step + 1, 28))
    assert f"the gang ended at step {grown.resumed_step}, after a checkpoint, to grow from 1 to 2 nodes" in caplog.text


def test_a_worker_that_a_gang_may_get_has_a_server_of_ranks_before_its_first_attempt(client):
    def servers():
        below = psutil.Process(pid).children(recursive=True)
        return [process for process in below if "forkserver" in str(process.cmdline())]

    address, pid = client.run(os.getpid).popitem()
    code = packed_code(RecipeProgram("digits", dask_config()))
    call_workers(client, [address], dask.worker.install, "training-x", code)
    call_workers(client, [address], dask.worker.call, "training-x", "prepare")
    assert eventually(servers)
    call_workers(client, [address], dask.worker.uninstall, "training-x")
    assert eventually(lambda: not servers())


class GrowsAtOnce(growth.GrowthWatch):
    """Finds a worker for a larger gang as soon as there is a gang, and calls `on_growth` when that is noticed."""

    on_growth = staticmethod(lambda: None)

    @property
    def members(self):
        self.on_growth()
        return frozenset({*(each.address for each in self.gang), "tcp://a-third"})

    @members.setter
    def members(self, value):
        pass


@pytest.mark.slow
def test_a_vanished_newcomer_costs_a_moment_and_a_stop_wins_over_a_growth(client, tmp_path, monkeypatch):
    run, stop, commands = new_run(tmp_path), StopRequest(), []

    async def send(*arguments):
        commands.append(arguments[-1])
        await calls.send_command(*arguments)

    def stop_in_second_gang():
        if len(events_of(run, events.RunStarted)) == 2 and not stop.is_set():
            stop.set("SIGTERM")

    monkeypatch.setattr(GrowsAtOnce, "on_growth", staticmethod(stop_in_second_gang))
    monkeypatch.setattr(dask, "GrowthWatch", GrowsAtOnce)
    monkeypatch.setattr(dask, "REUNION_TIMEOUT", 1.0)
    monkeypatch.setattr(gang, "send_command", send)
    elastic = dataclasses.replace(LOCAL, num_nodes=3, min_nodes=2, return_timeout=0.1, max_restarts=0)
    with pytest.raises(TrainingStopped, match="^SIGTERM: the run was stopped at step"):
        train(run, client, elastic, stop=stop)
    first, second = events_of(run, events.RunStarted)
    assert (first.world_size, second.world_size) == (2, 2)
    assert second.resumed_step > 0
    assert commands[-1] == "stop 20 SIGTERM"
    assert list(run.checkpoints.glob("step-*.json"))


def test_a_stop_leaves_ranks_that_end_to_grow_less_time():
    link = DriverLink(io.BytesIO(), driver_timeout=float("inf"))  # a driver's silence would end this process
    for command in ("go", "stop 600 the gang grows", "stop 600 the gang grows"):
        link.obey(command)
    assert link.stop.is_set()
    assert link.stop.deadline - time.monotonic() > 500
    link.obey("stop 20 SIGTERM")
    assert link.stop.reason == "SIGTERM"
    assert link.stop.deadline - time.monotonic() < 21
    assert not link.stop.is_urgent


def test_a_bug_fails_at_once_with_the_ranks_traceback(client, tmp_path, fault):
    fault("raise 1 4", write_seconds=1)  # step 3 shows that rank 0 has begun to save step 2
    run = new_run(tmp_path)
    with pytest.raises(RankFailure, match=r"(?s)node 1 .*rank 1 failed: ValueError.*Traceback.*in _raise") as caught:
        train(run, client, LOCAL, checkpoint_interval=2)
    assert (run.checkpoints / "step-0000000002.json").exists()  # rank 0 of the other node was still writing
    assert (caught.value.rank, caught.value.kind) == (1, "exception")
    assert run.error is caught.value
    assert len(events_of(run, events.RunStarted)) == 1


def test_a_gpu_out_of_memory_restarts_with_smaller_micro_batches_without_using_up_restarts(client, tmp_path, fault):
    fault("cuda-oom 1 14")
    config = {"grow_accumulation_on_oom": True, "epochs": 2}
    run = train(new_run(tmp_path), client, dataclasses.replace(LOCAL, max_restarts=0), **config)
    assert [event.config["gradient_accumulation"] for event in events_of(run, events.RunStarted)] == [1, 2]


def test_used_up_restarts_lose_the_gang_and_leave_no_rank(client, tmp_path, fault):
    fault("kill 1 3")
    with pytest.raises(GangLost, match=r"(?s)max_restarts: 0.*rank 1 was killed by SIGKILL.*killed on purpose"):
        train(new_run(tmp_path), client, dataclasses.replace(LOCAL, max_restarts=0))
    assert not [rank for pid in client.run(os.getpid).values() for rank in ranks_below(pid)]


def test_nodes_have_the_drivers_storage_keys_and_a_restart_waits_for_the_store(
    client, tmp_path, monkeypatch, caplog, finished_run
):
    """The workers have none of the variables, as on Flyte, which gives them to the task alone."""
    secret = "a-secret-that-nobody-sees"
    seen = []

    def fail():
        started = time.monotonic()

        def refuse(name):  # until the driver has noticed
            is_noticed = any("cannot be reached" in record.message for record in caplog.records)
            if not is_noticed and time.monotonic() < started + 60:
                raise ConnectionError("the store is away")

        store.before_request = refuse
        ranks_below(pid_of(client, 1))[0].kill()
        # All that the dashboard could show of the tasks, and the workers log when one fails.
        seen.append(client.run_on_scheduler(lambda dask_scheduler: describe(dask_scheduler.tasks)))
        seen.extend(client.run(lambda dask_worker: describe(dask_worker.state.tasks)).values())

    def describe(tasks):
        return str([[(name, getattr(task, name, "")) for name in type(task).__slots__] for task in tasks.values()])

    with running_store() as store:
        for ours, theirs in (
            ("AWS_ENDPOINT_URL", "FLYTE_AWS_ENDPOINT"),
            ("AWS_ACCESS_KEY_ID", "FLYTE_AWS_ACCESS_KEY_ID"),
            ("AWS_SECRET_ACCESS_KEY", "FLYTE_AWS_SECRET_ACCESS_KEY"),
        ):
            monkeypatch.setenv(theirs, secret if "SECRET" in ours else os.environ[ours])
            monkeypatch.delenv(ours)
        run = new_run(tmp_path)
        run.url = store.fill({"": b""}).replace("/images", "/run")
        train(run, client, dataclasses.replace(LOCAL, max_restarts=1), at_steps=[(6, fail)], checkpoint_interval=2)
        assert states_equal(load_state(run.result.finished.model_state_url), finished_run().state())

    assert len(events_of(run, events.RunStarted)) == 2
    gone = [record for record in caplog.records if "cannot be reached" in record.message]
    back = [record for record in caplog.records if "answers again" in record.message]
    assert len(gone) == len(back)
    assert 1 <= len(gone) <= 2  # the run's owner has a request of its own, which may end after the other was answered
    assert len(seen) == 3
    assert "supervise" in seen[0]
    assert secret not in "".join([*seen, caplog.text, *run.lines])


class Scripted:
    """An attempt that ends as the test says: (error, step, step that it started from)."""

    def __init__(self, endings):
        self.endings = list(endings)
        self.num_attempts = 0

    def __call__(self, run, number, nodes, make_jobs, growth):
        self.num_attempts += 1
        self.error, self.step, self.resumed_step = self.endings.pop(0)
        return self

    def train(self):
        raise self.error

    def ended(self, reason):
        return AttemptEnded(self.step, reason, 0.0)


OOM = NodeLost("node 1 (w-1 at 10.0.0.1) was lost: its worker is gone (OOMKilled: ...)", "w-1", OUT_OF_MEMORY)
AWAY = RankFailure("node 0: rank 0 failed: ...", 0, "exception", "StorageUnavailable: s3://b could not be reached")
DENIED = RankFailure("node 0: StorageDenied: ...", -1, "exception", "StorageDenied: checkpoints: no keys")
ENOUGH = (TrainingStopped("enough"), 99, 9)


@pytest.mark.parametrize(
    ("max_restarts", "endings", "error", "num_attempts"),
    [
        (16, [(OOM, 7, 5), (OOM, 8, 5)], OutOfMemory, 2),  # nothing new was saved in between
        (16, [(OOM, 7, -1), (OOM, 7, -1)], OutOfMemory, 2),
        (16, [(OOM, 7, 0), (OOM, 12, 6), ENOUGH], TrainingStopped, 3),  # it got further
        (0, [(AWAY, 5, 0), (AWAY, 9, 5), ENOUGH], TrainingStopped, 3),  # counts as no restart
        (0, [(AWAY, 5, 5), (AWAY, 5, 5)], StorageUnavailable, 2),
        (16, [(DENIED, 5, 0)], RankFailure, 1),
    ],
)
def test_failures_that_end_a_run_and_failures_that_restart_it(
    client, tmp_path, monkeypatch, max_restarts, endings, error, num_attempts
):
    script = Scripted(endings)
    monkeypatch.setattr(dask, "Attempt", script)
    with pytest.raises(error) as caught:
        train(new_run(tmp_path), client, dataclasses.replace(LOCAL, max_restarts=max_restarts))
    assert script.num_attempts == num_attempts
    if error is OutOfMemory:
        assert str(caught.value).startswith("cluster.kubernetes.worker_memory: expected more than 8Gi, or a smaller")
    assert "\n" not in str(caught.value)


def test_a_store_that_stays_away_ends_the_run_recoverably(client, tmp_path, monkeypatch):
    def names(storage):
        raise StorageUnavailable(f"checkpoints: {storage.url} could not be reached for {storage.timeout:g} s")

    monkeypatch.setattr(dask.Storage, "names", names)
    script = Scripted([(RankFailure("killed", 0, "signal", "SIGKILL"), 5, 0)])
    monkeypatch.setattr(dask, "Attempt", script)
    with pytest.raises(StorageUnavailable, match="could not be reached for 7 s"):
        train(new_run(tmp_path), client, LOCAL, store_timeout=7)


def test_cleaning_up_never_fails_a_finished_run(tmp_path, monkeypatch, caplog):
    def delete(storage, name):
        raise StorageUnavailable("the store is away")

    monkeypatch.setattr(dask.Storage, "delete", delete)
    delete_archive(dask.Storage(str(tmp_path)), "s3://bucket/run/data-1.zip")
    assert [record.message for record in caplog.records] == [
        "s3://bucket/run/data-1.zip could not be deleted: the store is away"
    ]


def test_a_supervisor_takes_no_command_before_its_job(monkeypatch):
    plugin = dask.worker.NodePlugin("run", b"")
    lines = []

    class Pipe(io.BytesIO):
        def write(self, line):
            lines.append(line)
            plugin.send_command("attempt", "go")  # the driver's, from another thread

    process = subprocess.Popen([sys.executable, "-c", ""])
    supervisor = dask.worker.Supervisor(process, Pipe(), io.BytesIO(), socket.socket())
    monkeypatch.setattr(plugin, "_start", lambda: supervisor)
    plugin.attempt, plugin.admitted = "attempt", {"attempt": None}
    assert plugin.supervise("attempt", dask.worker.Sealed("the job"), "topic") == "ended with exit code 0"
    assert lines == [b"the job\n"]


@pytest.mark.parametrize("end", ["no attempt comes", "the worker is gone"])
def test_a_supervisor_that_nobody_needs_ends(end):
    timeout = 0.1 if end == "no attempt comes" else 100
    code = f"from flyte_ddp.launch.dask import node; node.IDLE_TIMEOUT = {timeout}; node.main()"
    commands_in, commands = os.pipe()
    _messages, messages_out = os.pipe()
    _listeners, listeners_in = socket.socketpair()
    given = (commands_in, messages_out, listeners_in.fileno())
    process = subprocess.Popen([sys.executable, "-c", code, "", "", *map(str, given)], pass_fds=given)
    if end == "the worker is gone":
        os.close(commands)
    assert process.wait(timeout=30) == (0 if end == "no attempt comes" else 1)


def test_a_nodes_job_crosses_as_json_and_shows_no_secret():
    ranks = NodeRanks(0, 1, 2, "10.0.0.1", 1234, "", False, 1)
    job = Job(
        RecipeProgram("digits", dask_config(recipe_options={"width": 3}), timed_batch_sizes=(4, 8)),
        "s3://bucket/run",
        1.5,
    )
    node_job = NodeJob(job, ranks, 20.0, {}, {"AWS_SECRET_ACCESS_KEY": "secret"}, "", "", "data-1", True)
    assert NodeJob.from_json(node_job.to_json()) == node_job
    assert "secret" not in repr(node_job) + repr(dask.worker.Sealed(node_job.to_json()))
    assert decode(encode({"image": b"\x00\xff", "score": np.float32(0.5)})) == {"image": b"\x00\xff", "score": 0.5}


def test_workers_with_other_versions_are_refused(client, tmp_path, monkeypatch):
    monkeypatch.setattr(roll_call, "own_versions", lambda: {"python": "3.12.1", "torch": "1.0"})
    with pytest.raises(ConfigError, match=r"python 3.12.1, .* got 3\.\S+ on worker \d at tcp://"):
        train(new_run(tmp_path), client, LOCAL)
    monkeypatch.setattr(roll_call, "own_versions", lambda: {"torch": "1.0"})
    with pytest.raises(ConfigError, match=r"torch 1.0, .* got \d\S+ on worker \d at tcp://"):
        train(new_run(tmp_path), client, LOCAL)


def test_workers_with_other_versions_that_join_in_mid_run_are_left_out(client, monkeypatch, caplog):
    roll = roll_call.RollCall(client, "run")
    assert len(roll.present_workers()) == 2
    joined = client.scheduler_info(n_workers=-1)["workers"].popitem()[0]
    roll.known.discard(joined)
    roll.is_strict = False
    monkeypatch.setattr(roll_call, "own_versions", lambda: {"torch": "1.0"})
    for _ in range(2):
        assert [each.address for each in roll.present_workers()] == list(roll.known)
    assert joined in roll.unfit
    assert [record.message for record in caplog.records if "torch 1.0" in record.message] == [
        f"the run continues without a worker: {roll.unfit[joined]}"
    ]


def test_missing_workers_are_counted(client, tmp_path):
    config = ClusterConfig(kind="local", num_nodes=3, start_timeout=0.1)
    with pytest.raises(ClusterError, match="2 of 3 workers are there and idle"):
        train(new_run(tmp_path), client, config)


def test_the_drivers_code_is_what_ranks_run(client, tmp_path):
    """Also when the workers have imported another version of it."""
    newer = tmp_path / "newer"
    shutil.copytree(REPOSITORY / "flyte_ddp", newer / "flyte_ddp", ignore=shutil.ignore_patterns("__pycache__"))
    module = newer / "flyte_ddp" / "rank" / "world.py"
    module.write_text(module.read_text() + '\n\nprint("newer code")\n')
    client.run(importlib.import_module, "flyte_ddp.launch.dask.node")
    address = client.scheduler.address
    driver = start_driver(tmp_path, {"kind": "existing", "scheduler_address": address}, code=newer)
    output, _ = driver.communicate(timeout=300)
    assert '{"ended": ["", ""]}' in output
    assert all(f"[node {index}] [rank {index}] newer code" in output for index in (0, 1))


def test_a_scripts_outputs_are_brought_to_their_url_and_leave_the_workers(client, tmp_path):
    """The workers of an existing cluster go on, so what a run leaves there stays."""
    (tmp_path / "train.py").write_text(
        "import sys; open(sys.argv[1] + '/model', 'w').write('w'); print('in', sys.argv[1])"
    )
    lines = []
    url = f"file://{tmp_path}/kept"
    program = script_program(str(tmp_path / "train.py"), ["{outputs}"], outputs=url)
    run_program(program, Gang(2, cluster={"kind": "local", "node_timeout": 60}), relay=lines.append, client=client)
    assert (tmp_path / "kept/model").read_text() == "w"
    places = [line.split(" in ")[1] for line in lines if " in " in line]
    assert len(set(places)) == 2
    assert [place for place in places if os.path.exists(place)] == []


def test_nodes_that_do_not_see_the_data_get_a_copy(start_worker, scheduler, tmp_path, finished_run, monkeypatch):
    """On a cluster that somebody else has started, as Flyte's own Dask plugin does, of workers without the package."""
    monkeypatch.setattr(dask.worker, "holds_file", lambda path, contents: not path.endswith("data.json"))
    monkeypatch.setenv(ADDRESS_VARIABLE, scheduler)
    start_worker(scheduler, "node-0")
    start_worker(scheduler, "node-1")
    config = ClusterConfig()
    with open_cluster(config, "test") as client:
        assert set(client.run(importlib.util.find_spec, "flyte_ddp").values()) == {None}
        run = train(new_run(tmp_path), client, config)
    torch.testing.assert_close(run.state(), finished_run().state())
    assert not list(run.checkpoints.glob("data-*"))


def test_a_silent_node_is_abandoned_and_kills_its_ranks_when_it_returns(
    start_worker, scheduler, tmp_path, caplog, monkeypatch
):
    start_worker(scheduler, "node-0", STEP_SECONDS="0.1")
    silent = start_worker(scheduler, "node-1", STEP_SECONDS="0.1")
    config = ClusterConfig(
        kind="existing", scheduler_address=scheduler, node_timeout=5, min_nodes=1, return_timeout=1, start_timeout=60
    )
    stopped, asked_briefly = [], []

    def note_call(client, addresses, *arguments, **options):
        if options.get("timeout", 60) < 1:
            asked_briefly.extend(addresses)
        return calls.call_workers(client, addresses, *arguments, **options)

    monkeypatch.setattr(roll_call, "call_workers", note_call)

    def fall_silent():
        assert not asked_briefly
        stopped.extend([psutil.Process(silent.pid), *psutil.Process(silent.pid).children(recursive=True)])
        for process in stopped:
            process.suspend()

    with open_cluster(config, "test") as client:
        run = train(new_run(tmp_path), client, config, at_steps=[(3, fall_silent)], checkpoint_interval=2)
        assert [event.world_size for event in events_of(run, events.RunStarted)] == [2, 1]
        assert "it has been silent for 5 s" in caplog.text
        assert len(set(asked_briefly)) == 1  # the silent one: each look at the workers would wait 5 s for it
        for process in stopped:
            process.resume()
        assert eventually(lambda: not ranks_below(silent.pid))


def test_sigterm_ends_a_run_after_a_last_checkpoint(tmp_path, monkeypatch, survivors):
    monkeypatch.setenv("STEP_SECONDS", "0.2")
    driver = start_driver(tmp_path, {"kind": "local"})
    wait_for_step(driver, 3)
    driver.send_signal(signal.SIGTERM)
    name, message = how_it_ended(driver)
    assert name == "TrainingStopped"
    assert "SIGTERM: the run was stopped at step" in message
    assert list((tmp_path / "checkpoints").glob("step-*.json"))
    assert eventually(lambda: not survivors())


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_ranks_do_not_outlive_their_driver(end, tmp_path, monkeypatch, survivors):
    monkeypatch.setenv("STEP_SECONDS", "0.2")
    driver = start_driver(tmp_path, {"kind": "local", "node_timeout": 5}, epochs=100)
    wait_for_step(driver, 3)
    ranks = ranks_below(driver.pid)
    assert len(ranks) == 2
    driver.send_signal(end)
    # Dask itself gives a silent scheduler up after 30 s.
    assert eventually(lambda: not any(rank.is_running() for rank in ranks), timeout=20)
    driver.kill()
    driver.wait()
    assert eventually(lambda: not survivors())


@pytest.mark.slow
def test_ranks_do_not_outlive_their_scheduler(start_worker, tmp_path):
    scheduler, address = start_scheduler(tmp_path)
    nannies = [start_worker(address, f"node-{index}", STEP_SECONDS="0.1") for index in range(2)]
    config = ClusterConfig(kind="existing", scheduler_address=address, start_timeout=30)
    ranks = []

    def end_scheduler():
        ranks.extend(rank for nanny in nannies for rank in ranks_below(nanny.pid))
        scheduler.kill()
        scheduler.wait()

    with open_cluster(config, "test") as client, pytest.raises(GangLost, match="of 2 workers are there|scheduler"):
        train(new_run(tmp_path), client, config, at_steps=[(3, end_scheduler)], epochs=100)
    assert len(ranks) == 2
    assert not any(rank.is_running() for rank in ranks)


@pytest.mark.slow
def test_a_stall_shows_the_stacks_of_all_nodes(client, tmp_path, fault):
    fault("hang 1 3")
    with pytest.raises(GangLost, match=r"(?s)node 0 .*--- rank 0.*node 1 .*--- rank 1.*in _hang"):
        train(new_run(tmp_path), client, dataclasses.replace(LOCAL, max_restarts=0), stall_timeout=30)


@pytest.mark.parametrize(
    ("cause", "previous", "expected"),
    [
        ("TypeError: no", None, True),
        ("NonFiniteLoss: nan", None, True),
        ("DataError: no", None, True),
        ("RuntimeError: CUDA error", None, False),
        ("OSError: disk", None, False),
        ("TheirOwnError: no", None, False),
        ("TheirOwnError: no", ("TheirOwnError: no", 7), True),
        ("TheirOwnError: no", ("TheirOwnError: no", 6), False),  # it got on in between
        ("TheirOwnError: no", ("RuntimeError: CUDA error", 7), False),
    ],
)
def test_failures_that_count_as_a_bug(cause, previous, expected):
    earlier = Ended(RankFailure("", 0, "exception", previous[0]), previous[1], 0) if previous else None
    assert is_bug(Ended(RankFailure("", 0, "exception", cause), 7, 0), earlier) is expected


def test_a_killed_rank_does_not_count_as_a_bug():
    ended = Ended(RankFailure("", 0, "signal", "SIGKILL"), 3, 0)
    assert not is_bug(ended, ended)


def worker(name, host, gpus=()):
    return Worker(f"tcp://{host}:1{name[-1]}", name, host, 8, gpus, False)


def test_ranks_are_ordered_by_host_and_name():
    config = ClusterConfig(num_nodes=4, processes_per_node=2)
    before = [worker("w-10", "10.0.0.9"), worker("w-3", "10.0.0.1"), worker("w-2", "10.0.0.9")]
    before.append(worker("w-4", "10.0.0.1"))
    nodes = assign_nodes(before, 4, config)
    assert [each.name for each in nodes] == ["w-2", "w-10", "w-3", "w-4"]
    assert [each.ranks.first_rank for each in nodes] == [0, 2, 4, 6]
    assert {(each.ranks.world_size, each.ranks.num_threads) for each in nodes} == {(8, 2)}
    after = [dataclasses.replace(each, host=each.host.replace("10.0.0.9", "10.0.0.0")) for each in before]
    assert [each.name for each in assign_nodes(after, 4, config)] == ["w-2", "w-10", "w-3", "w-4"]


@dataclasses.dataclass
class Present:
    """A roll call of workers that the test names."""

    names: tuple = ()
    busy: tuple = ()
    gpus: tuple = ("0",)
    unfit: dict = dataclasses.field(default_factory=dict)
    prepared: list = dataclasses.field(default_factory=list)  # addresses

    def present_workers(self, leave_out=()):
        every = [
            dataclasses.replace(worker(name, "10.0.0.1", self.gpus), is_busy=name in self.busy) for name in self.names
        ]
        return [each for each in every if each.address not in {*leave_out, *self.unfit}]

    def mark_unfit(self, address, why):
        self.unfit[address] = why


@pytest.fixture
def watch(monkeypatch):
    """watch(present, gang, sizes, **config): `seen(seconds)` is the size that is possible when it looks then."""

    def make(present, gang, sizes, check=lambda nodes: None, not_before=0.0, **config):
        config = ClusterConfig(**{"num_nodes": sizes[0], "grow_delay": 30, **config})
        gang = [worker(name, "10.0.0.1", present.gpus) for name in gang]
        made = growth.GrowthWatch(gang, sizes, config, present, present.prepared.append, check, not_before, 60)
        made.close()

        def seen(seconds):
            monkeypatch.setattr(growth.time, "monotonic", lambda: seconds)
            size = len(made._find_members())
            seen.pause = made._pause()
            return size

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
    assert (seen(100), seen.pause, present.prepared) == (0, growth.WATCH_INTERVAL, [])  # it would end unused
    assert [seen(370), seen(399.9)] == [0, 0]
    assert len(present.prepared) == 1
    assert seen.pause == pytest.approx(0.1)
    assert seen(400) == 2


def test_a_gang_grows_to_sizes_that_split_the_batch_with_workers_that_can_take_part(watch):
    names = ("w-1", "w-2", "w-3", "w-4", "w-5")
    assert [watch(Present(names[:num]), names[:2], [6, 4, 3, 2], grow_delay=0)(1) for num in (2, 3, 4, 5)] == [
        0,
        3,
        4,
        4,
    ]
    assert watch(Present(names[:3]), names[:2], [4, 2], grow_delay=0)(1) == 0
    assert watch(Present(names[:2], gpus=("0", "1")), names[:1], [2, 1], grow_delay=0, gpus_per_node=1)(1) == 2
    without = Present(names[:2], gpus=())
    assert watch(without, names[:1], [2, 1], grow_delay=0, gpus_per_node=1)(1) == 0
    assert list(without.unfit.values()) == ["gpus_per_node: expected 1, got 0 on worker w-2"]

    def refuse(nodes):
        if nodes[0].name == "w-3":
            raise ConfigError("checkpoints: another directory on w-3")

    present = Present(names[:4])
    seen = watch(present, names[:2], [4, 3, 2], check=refuse, grow_delay=0)
    assert [seen(1), seen(2)] == [0, 3]
    assert list(present.unfit.values()) == ["checkpoints: another directory on w-3"]


def test_fewer_nodes_go_on_as_soon_as_the_others_time_to_return_is_over(monkeypatch):
    clock = [0.0]
    advance = lambda seconds: clock.append(clock[-1] + seconds)  # noqa: E731
    monkeypatch.setattr(dask, "time", SimpleNamespace(monotonic=lambda: clock[-1], sleep=advance))
    launcher = SimpleNamespace(
        roll_call=Present(("w-1",)), pool=None, config=LOCAL, client=SimpleNamespace(status="running")
    )
    launcher._check_stop = lambda: None
    for patience in (0.0, 1.0, 60.0):
        clock[:] = [0.0]
        (left,) = dask._Launcher._gather(launcher, [2, 1], frozenset(), patience)
        assert (left.name, clock[-1]) == ("w-1", pytest.approx(patience))


def test_a_gang_of_full_size_and_a_trial_of_a_sweep_look_for_no_worker(monkeypatch):
    monkeypatch.setattr(growth.threading, "Thread", None)  # not even started
    gang = [worker("w-1", "10.0.0.1")]
    config = one_node_config(ClusterConfig(num_nodes=4, min_nodes=1))
    sizes = usable_sizes(Job(RecipeProgram("digits", dask_config()), "", 0.0), config)
    assert growth.GrowthWatch(gang, sizes, config, None, None, None, 0.0, 60).members == frozenset()


def test_a_smaller_gang_still_shares_the_global_batch_evenly(tmp_path):
    job = Job(RecipeProgram("digits", dask_config(global_batch_size=24)), str(tmp_path), 0.0)
    assert usable_sizes(job, ClusterConfig(num_nodes=6, min_nodes=2)) == [6, 4, 3, 2]
    assert usable_sizes(job, ClusterConfig(num_nodes=6)) == [6]


def dask_config(**values):
    from flyte_ddp.config import resolve

    return resolve({}, values)


def test_bad_input_is_refused_before_any_cluster_is_asked(tmp_path):
    job = Job(RecipeProgram("digits", dask_config(global_batch_size=32)), str(tmp_path), 0.0)
    with pytest.raises(ConfigError, match="global_batch_size: expected a multiple of 3, got 32"):
        train_on_dask(job, str, None, ClusterConfig(num_nodes=3))
    message = (
        "min_nodes: expected a smaller number of nodes, because the global batch splits evenly at none from 3 to 3"
    )
    with pytest.raises(ConfigError, match=message):
        train_on_dask(job, str, None, ClusterConfig(num_nodes=4, min_nodes=3))
    nccl = dataclasses.replace(job, program=RecipeProgram("digits", dask_config(backend="nccl")))
    with pytest.raises(ConfigError, match="backend: expected auto or gloo for ranks without GPUs"):
        train_on_dask(nccl, str, None, ClusterConfig(num_nodes=2))


def test_messages_are_delivered_once_and_in_order():
    inbox = Inbox()
    messages = [{"number": number} for number in range(4)]
    assert inbox.put(messages[0]) == messages[:1]
    assert inbox.put(messages[2]) == []
    assert inbox.put(messages[0]) == []
    assert inbox.put(messages[1]) == messages[1:3]
    assert inbox.put(messages[2]) == []
    assert inbox.put(messages[3]) == messages[3:]


def test_packed_code_does_not_depend_on_its_path(tmp_path, monkeypatch):
    for name in ("here", "there"):
        package = tmp_path / name / "flowers"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("x = 1")
        (package / "names.txt").write_text("rose")
        time.sleep(0.01)
    packed = []
    for name in ("here", "there"):
        monkeypatch.syspath_prepend(tmp_path / name)
        packed.append(packed_code(RecipeProgram("flowers.Flowers", dask_config())))
        importlib.invalidate_caches()
    assert packed[0] == packed[1] != packed_code(RecipeProgram("digits", dask_config()))
    (tmp_path / "there" / "flowers" / "data.bin").write_bytes(bytes(33 << 20))
    with pytest.raises(ConfigError, match=r"flowers.Flowers: expected code without data, got more than 32 MiB"):
        packed_code(RecipeProgram("flowers.Flowers", dask_config()))


logging.getLogger("distributed").setLevel(logging.ERROR)
