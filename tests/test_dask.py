"""The gang launcher, on real clusters of this machine's processes: runs, failures and restarts."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from flyte_ddp import events
from flyte_ddp.checkpoints.files import load_state
from flyte_ddp.cluster.config import ClusterConfig
from flyte_ddp.config import TrainingConfig
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
from flyte_ddp.events.wall_time import AttemptEnded, AttemptStarted
from flyte_ddp.launch.dask import gang
from flyte_ddp.launch.dask import launcher as dask
from flyte_ddp.launch.dask.launcher import train_on_dask
from flyte_ddp.launch.dask.placement import assign_nodes
from flyte_ddp.launch.failures import Ended, is_bug
from flyte_ddp.launch.process.job import Job
from flyte_ddp.launch.process.programs import FunctionProgram, RecipeProgram
from flyte_ddp.storage import Storage
from tests.support.dask_runs import (
    LOCAL,
    dask_config,
    events_of,
    eventually,
    pid_of,
    ranks_below,
    states_equal,
    train,
    worker,
)
from tests.support.image_store import running_store
from tests.support.runs import new_run


@pytest.fixture
def fault(client):
    """fault("kind rank step"): what the ranks of the next run do, see tests.support.recipes."""

    def switch_on(text, write_seconds=0):
        variables = {"FAULT": text, "WRITE_SECONDS": str(write_seconds)}
        client.run(lambda: os.environ.update(variables))  # a bound method would arrive with an environment of its own

    yield switch_on
    client.run(lambda: [os.environ.pop(name, None) for name in ("FAULT", "WRITE_SECONDS")])


def test_two_nodes_give_the_weights_and_the_events_of_two_processes(client, tmp_path, finished_run):
    on_one_machine = finished_run()
    run = train(new_run(tmp_path), client, LOCAL)

    torch.testing.assert_close(run.state(), on_one_machine.state())
    ours, theirs = (
        [type(event) for event in each.events if not isinstance(event, events.CheckpointWritten)]  # at any moment
        for each in (run, on_one_machine)
    )
    assert ours == theirs
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


SHAPES = RankFailure("node 1: rank 1 failed: ...", 1, "exception", "RuntimeError: mat1 and mat2 shapes differ")


THEIRS = RankFailure("node 1: rank 1 failed: ...", 1, "exception", "TheirOwnError: no")


ECHO = RankFailure("node 1: rank 1 failed: ...", 1, "exception", "RuntimeError: connection reset", is_consequence=True)


KILLED = RankFailure("node 1: rank 1 was killed", 1, "signal", "SIGKILL")


ENOUGH = (TrainingStopped("enough"), 99, 9)


@pytest.mark.parametrize(
    ("max_restarts", "endings", "error", "num_attempts"),
    [
        (16, [(OOM, 7, 5), (OOM, 8, 5)], OutOfMemory, 2),  # nothing new was saved in between
        (16, [(OOM, 7, -1), (OOM, 7, -1)], OutOfMemory, 2),
        (16, [(OOM, 7, 0), (OOM, 12, 6), ENOUGH], TrainingStopped, 3),  # it got further
        (16, [(OOM, 0, 4), (OOM, 0, 8), ENOUGH], TrainingStopped, 3),  # also a function that reports no steps
        (0, [(AWAY, 5, 0), (AWAY, 9, 5), ENOUGH], TrainingStopped, 3),  # counts as no restart
        (0, [(AWAY, 5, 5), (AWAY, 5, 5)], StorageUnavailable, 2),
        (16, [(DENIED, 5, 0)], RankFailure, 1),
        # Without restarts left, an exception ends the run as on one machine, and not as a loss that Flyte retries.
        (0, [(SHAPES, 0, -1)], RankFailure, 1),
        (0, [(THEIRS, 5, 0)], RankFailure, 1),
        (1, [(OOM, 7, 0), (THEIRS, 9, 7)], RankFailure, 2),
        (0, [(ECHO, 5, 0)], GangLost, 1),
        (0, [(KILLED, 5, 0)], GangLost, 1),
        (0, [(OOM, 5, 0)], GangLost, 1),
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


def test_a_lost_node_explains_the_exception_that_a_program_raised_because_of_it():
    failures = [(True, 1.0, ECHO), (False, 2.0, THEIRS), (False, 3.0, NodeLost("node 0 was lost", ""))]
    causes = [
        gang.Attempt._root_cause(SimpleNamespace(failures=failures[:count], client=None, scheduler_id=""))
        for count in (1, 2, 3)
    ]
    assert causes == [ECHO, THEIRS, failures[2][2]]


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ("Scheduler-1", "node 0 (w at h) was lost: its task was cancelled"),
        ("", "the Dask scheduler was lost: it does not answer"),
        ("Scheduler-2", "the Dask scheduler was lost: another one has taken its place"),
    ],
)
def test_the_loss_of_the_scheduler_is_not_blamed_on_a_node(monkeypatch, now, expected):
    """Without it, no message of a healthy node arrives."""
    monkeypatch.setattr(gang, "scheduler_id", lambda client: now)
    lost = NodeLost("node 0 (w at h) was lost: its task was cancelled", "")
    attempt = SimpleNamespace(failures=[(False, 1.0, lost)], client=None, scheduler_id="Scheduler-1")
    cause = gang.Attempt._root_cause(attempt)
    assert str(cause) == expected
    assert isinstance(cause, NodeLost)


def test_a_stall_of_many_nodes_names_the_stopped_rank_in_its_first_line():
    def stall(node, rank=-1):
        what = f"node {node} (w at h): no rank made progress for 31 s (stall_timeout: 30)"
        what += f": rank {rank} is stopped (SIGSTOP)" if rank >= 0 else ""
        return RankFailure("\n".join([what, *["  File"] * 36]), rank, "stall", "stall")

    stalls = [(True, float(node), stall(node, 11 if node == 11 else -1)) for node in range(16)]
    cause = gang.Attempt._root_cause(SimpleNamespace(failures=stalls))
    head, *rest = str(cause).splitlines()
    assert head.endswith("stall_timeout: 30): rank 11 is stopped (SIGSTOP)")
    assert cause.rank == 11
    assert len(rest) < 40
    assert rest[-1] == "... (the log has the reports of 10 more nodes)"
    assert [line.split(" (")[0] for line in rest if line.startswith("node")] == [f"node {index}" for index in range(5)]


def test_a_restart_after_a_stall_is_logged_in_one_line_because_the_log_has_the_stacks(
    client, tmp_path, monkeypatch, caplog
):
    stall = RankFailure("no rank made progress: rank 1 is stopped\n--- rank 1\n  File", 1, "stall", "stall")
    monkeypatch.setattr(dask, "Attempt", Scripted([(stall, 7, 0), ENOUGH]))
    with pytest.raises(TrainingStopped):
        train(new_run(tmp_path), client, LOCAL)
    (line,) = [record.message for record in caplog.records if "restarts from" in record.message]
    assert line.endswith(": no rank made progress: rank 1 is stopped")


def test_a_second_kill_for_lack_of_memory_ends_the_run_also_in_another_attempt_of_it(client, tmp_path, monkeypatch):
    monkeypatch.setattr(dask, "Attempt", Scripted([(OOM, 7, 0), (OOM, 9, 0), (OOM, 9, 0)]))
    run = new_run(tmp_path)
    config = dataclasses.replace(LOCAL, max_restarts=0)
    for error in (GangLost, OutOfMemory, GangLost):  # the third is of a run in which something was changed
        with pytest.raises(error):
            train(run, client, config)


def test_a_function_that_loads_its_state_itself_makes_progress_by_its_checkpoints(client, tmp_path, monkeypatch):
    script = Scripted([(OOM, 0, -1), (OOM, 0, -1), (OOM, 0, -1)])
    monkeypatch.setattr(dask, "Attempt", script)
    run = new_run(tmp_path)
    place = Storage(str(run.checkpoints))
    train_one = script.train

    def save_first():
        if script.num_attempts < 3:
            place.write(f"step-{script.num_attempts:010d}.json", b"{}")
        train_one()

    monkeypatch.setattr(script, "train", save_first)
    with pytest.raises(OutOfMemory):
        train(run, client, dataclasses.replace(LOCAL, max_restarts=16))
    assert script.num_attempts == 3


def test_a_log_line_says_whether_a_lost_gang_had_made_a_step(client, tmp_path, monkeypatch, caplog):
    lost = NodeLost("node 1 was lost", "w-1", "")
    monkeypatch.setattr(dask, "Attempt", Scripted([(lost, 0, -1), (lost, 7, 0), ENOUGH]))
    with pytest.raises(TrainingStopped):
        train(new_run(tmp_path), client, LOCAL)
    said = re.findall(r"the gang was lost (.*) and restarts", caplog.text)
    assert said == ["before its first step", "at step 7"]


def test_a_store_that_stays_away_ends_the_run_recoverably(client, tmp_path, monkeypatch):
    def names(storage):
        raise StorageUnavailable(f"checkpoints: {storage.url} could not be reached for {storage.timeout:g} s")

    monkeypatch.setattr(dask.Storage, "names", names)
    script = Scripted([(RankFailure("killed", 0, "signal", "SIGKILL"), 5, 0)])
    monkeypatch.setattr(dask, "Attempt", script)
    with pytest.raises(StorageUnavailable, match="could not be reached for 7 s"):
        train(new_run(tmp_path), client, LOCAL, store_timeout=7)


def test_missing_workers_are_counted(client, tmp_path):
    config = ClusterConfig(kind="local", num_nodes=3, start_timeout=0.1)
    with pytest.raises(ClusterError, match="2 of 3 workers are there and idle"):
        train(new_run(tmp_path), client, config)


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
    ended = Ended(RankFailure("", 0, "exception", cause), 7, 0)
    assert is_bug(ended, earlier, RecipeProgram("digits", TrainingConfig())) is expected
    # For a function the number of restarts means what torchrun means by it.
    is_user_error = "NonFiniteLoss" in cause or "DataError" in cause
    assert is_bug(ended, earlier, FunctionProgram("train", b"")) is is_user_error


def test_a_killed_rank_does_not_count_as_a_bug():
    ended = Ended(RankFailure("", 0, "signal", "SIGKILL"), 3, 0)
    assert not is_bug(ended, ended, RecipeProgram("digits", TrainingConfig()))


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
