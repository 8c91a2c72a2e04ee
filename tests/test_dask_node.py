"""A node of a gang: the code, data and messages that it gets, what it leaves behind, and who
outlives whom.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from flyte_ddp import events
from flyte_ddp.cluster.config import ADDRESS_VARIABLE, ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import (
    ConfigError,
    GangLost,
    StorageUnavailable,
)
from flyte_ddp.flyte.scripts import pack_script
from flyte_ddp.launch.dask import roll_call, worker
from flyte_ddp.launch.dask.calls import call_workers
from flyte_ddp.launch.dask.data import packed_code, packed_directory
from flyte_ddp.launch.dask.messages import Inbox, NodeJob, decode, encode
from flyte_ddp.launch.dask.pool import delete_archive
from flyte_ddp.launch.process.programs import Job, Program, recipe_program
from flyte_ddp.launch.process.ranks import NodeRanks
from flyte_ddp.launch.run import Gang, run_program, script_program
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.storage import Storage
from tests.support.dask_runs import (
    LOCAL,
    dask_config,
    eventually,
    ranks_below,
    start_driver,
    start_scheduler,
    train,
)
from tests.support.runs import REPOSITORY, how_it_ended, new_run, wait_for_step


def test_a_worker_that_a_gang_may_get_has_a_server_of_ranks_before_its_first_attempt(client):
    def servers():
        below = psutil.Process(pid).children(recursive=True)
        return [process for process in below if "forkserver" in str(process.cmdline())]

    address, pid = client.run(os.getpid).popitem()
    code = packed_code(recipe_program("digits", dask_config()))
    call_workers(client, [address], worker.install, "training-x", code)
    prepare = worker.call, "training-x", "prepare", ["json"]
    assert call_workers(client, [address], *prepare) == {address: False}
    assert eventually(lambda: call_workers(client, [address], *prepare) == {address: True})
    (server,) = servers()
    assert "['json'" in str(server.cmdline())
    # The watch of the gang before may be late, when the next gang already trains here.
    call_workers(client, [address], worker.install, "training-x", code)
    call_workers(client, [address], worker.call, "training-x", "prepare", ["json"])
    assert servers() == [server]
    call_workers(client, [address], worker.uninstall, "training-x")
    assert eventually(lambda: not servers())


def test_a_supervisor_takes_no_command_before_its_job(monkeypatch):
    plugin = worker.NodePlugin("run", b"")
    lines = []

    class Pipe(io.BytesIO):
        def write(self, line):
            lines.append(line)
            plugin.send_command("attempt", "go")  # the driver's, from another thread

    process = subprocess.Popen([sys.executable, "-c", ""])
    supervisor = worker.Supervisor(process, Pipe(), io.BytesIO(), socket.socket())
    monkeypatch.setattr(plugin, "_start", lambda: supervisor)
    plugin.attempt, plugin.admitted = "attempt", {"attempt": None}
    assert plugin.supervise("attempt", worker.Sealed("the job"), "topic") == (
        "ended with exit code 0"
    )
    assert lines == [b"the job\n"]


def test_a_plugin_that_could_not_be_set_up_is_not_there(client):
    address = client.run(os.getpid).popitem()[0]
    answers = call_workers(client, [address], worker.install, "training-y", b"no zip file")
    assert isinstance(answers[address], zipfile.BadZipFile)
    assert not call_workers(client, [address], worker.introduce, "training-y")[address][
        "has_plugin"
    ]


def test_a_worker_that_was_admitted_to_an_attempt_is_not_prepared_for_it_and_keeps_one_supervisor(
    monkeypatch,
):
    plugin = worker.NodePlugin("run", b"")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    supervisors = [worker.Supervisor(process, None, None, None) for _ in range(2)]
    monkeypatch.setattr(plugin, "_start", None)
    plugin.admitted = {"attempt": None}
    assert plugin.prepare(["json"])
    assert [plugin._keep(each) for each in supervisors] == [True, False]
    assert plugin.idle is supervisors[0]
    process.kill()
    process.wait()


@pytest.mark.parametrize("end", ["no attempt comes", "the worker is gone"])
def test_a_supervisor_that_nobody_needs_ends(end):
    timeout = 0.1 if end == "no attempt comes" else 100
    code = f"from flyte_ddp.launch.dask import node; node.IDLE_TIMEOUT = {timeout}; node.main()"
    commands_in, commands = os.pipe()
    _messages, messages_out = os.pipe()
    _listeners, listeners_in = socket.socketpair()
    given = (commands_in, messages_out, listeners_in.fileno())
    process = subprocess.Popen(
        [sys.executable, "-c", code, "", "", *map(str, given)], pass_fds=given
    )
    if end == "the worker is gone":
        os.close(commands)
    assert process.wait() == (0 if end == "no attempt comes" else 1)


def test_a_nodes_job_crosses_whole_and_shows_no_secret():
    ranks = NodeRanks(0, 1, 2, "10.0.0.1", 1234, "", False, 1)
    job = Job(
        recipe_program(
            "mnist",
            dask_config(gradient_accumulation=2),
            f"s3://bucket/initial.pt (sha256 {64 * '0'})",
        ),
        "s3://bucket/run",
        1.5,
    )
    node_job = NodeJob(
        job, ranks, 20.0, {}, {"AWS_SECRET_ACCESS_KEY": "secret"}, "", "", "data-1", True
    )
    assert NodeJob.from_line(node_job.to_line()) == node_job
    assert "secret" not in repr(node_job) + repr(worker.Sealed(node_job.to_line()))
    assert decode(encode({"image": b"\x00\xff", "score": np.float32(0.5)})) == {
        "image": b"\x00\xff",
        "score": 0.5,
    }


NAMES = [
    *(
        "base64",
        "event",
        "at",
        "self",
        "__class__",
        "",
        "a.b/c:d",
        "%s {0}",
        "$\\frac$",
        "<b>",
        "\n",
        "\0",
        "名",
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_reported_value_crosses_whatever_its_name_is(name):
    event = events.Reported(1, None, {name: 1.0})
    message = encode({"kind": "event", "number": 0, "event": events.to_dict(event)})
    assert events.from_dict(decode(message)["event"]) == event
    assert events.parse_history(events.to_line(event).encode(), "history") == [event]
    report = Report("train")
    report.handle(events.RunStarted("train", 1, 1, 0))
    report.handle(event)
    assert "<svg" in report.render()


def test_messages_are_delivered_once_and_in_order():
    inbox = Inbox()
    messages = [{"number": number} for number in range(4)]
    assert inbox.put(messages[0]) == messages[:1]
    assert inbox.put(messages[2]) == []
    assert inbox.put(messages[0]) == []
    assert inbox.put(messages[1]) == messages[1:3]
    assert inbox.put(messages[2]) == []
    assert inbox.put(messages[3]) == messages[3:]


def test_code_that_could_not_be_unpacked_whole_is_not_there_for_a_later_attempt(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("first.py", "pass")
        archive.writestr("second.py", "the disk is full here")
    # a wrong checksum
    code = buffer.getvalue().replace(b"the disk is full here", b"the disk is full HERE")
    for _ in range(2):
        plugin = worker.NodePlugin("run", code)
        with pytest.raises(zipfile.BadZipFile):
            plugin.setup(SimpleNamespace(local_directory=str(tmp_path), handlers={}))
        assert list(tmp_path.iterdir()) == []


def test_files_from_before_1980_can_be_packed(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/old.py").write_text("pass")
    os.utime(tmp_path / "data/old.py", (0, 0))  # as in reproducible archives
    packed_directory(tmp_path / "data", tmp_path / "data.zip")
    for archive in (tmp_path / "data.zip", pack_script(tmp_path / "data")):
        with zipfile.ZipFile(archive) as contents:
            assert contents.read("old.py") == b"pass"


def test_packed_code_does_not_depend_on_its_path(tmp_path, monkeypatch):
    for name in ("here", "there"):
        package = tmp_path / name / "flowers"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("x = 1")
        (package / "names.txt").write_text("rose")
        time.sleep(0.01)
    flowers, packed = Program("flowers", b"", packages=("flowers",)), []
    for name in ("here", "there"):
        monkeypatch.syspath_prepend(tmp_path / name)
        packed.append(packed_code(flowers))
        importlib.invalidate_caches()
    assert packed[0] == packed[1] != packed_code(recipe_program("digits", dask_config()))
    (tmp_path / "there" / "flowers" / "data.bin").write_bytes(bytes(33 << 20))
    with pytest.raises(
        ConfigError, match="flowers: expected code without data, got more than 32 MiB"
    ):
        packed_code(flowers)


@pytest.mark.long
def test_the_drivers_code_is_what_ranks_run(client, tmp_path):
    """Also when the workers have imported another version of it."""
    newer = tmp_path / "newer"
    shutil.copytree(
        REPOSITORY / "flyte_ddp", newer / "flyte_ddp", ignore=shutil.ignore_patterns("__pycache__")
    )
    module = newer / "flyte_ddp" / "rank" / "main.py"
    addition = (
        'older = main\n\ndef main(*arguments):\n    print("newer code")\n    older(*arguments)\n'
    )
    module.write_text(f"{module.read_text()}\n\n{addition}")
    client.run(importlib.import_module, "flyte_ddp.launch.dask.node")
    address = client.scheduler.address
    driver = start_driver(tmp_path, {"kind": "existing", "scheduler_address": address}, code=newer)
    output, _ = driver.communicate()
    assert '{"ended": ["", ""]}' in output
    assert all(f"[node {index}] [rank {index}] newer code" in output for index in (0, 1))


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


@pytest.mark.long
def test_nodes_that_do_not_see_the_data_get_a_copy(
    start_worker, scheduler, tmp_path, finished_run, monkeypatch
):
    """On a cluster that somebody else has started, as Flyte's own Dask plugin does, of workers
    without the package.
    """
    monkeypatch.setattr(worker, "holds_file", lambda path, contents: not path.endswith("data.json"))
    monkeypatch.setenv(ADDRESS_VARIABLE, scheduler)
    start_worker(scheduler, "node-0")
    start_worker(scheduler, "node-1")
    config = ClusterConfig()
    with open_cluster(config, "test") as client:
        assert set(client.run(importlib.util.find_spec, "flyte_ddp").values()) == {None}
        run = train(new_run(tmp_path), client, config)
    torch.testing.assert_close(run.state(), finished_run().state())
    assert not list(run.checkpoints.glob("data-*"))


def test_a_scripts_outputs_are_brought_to_their_url_and_leave_the_workers(client, tmp_path):
    """The workers of an existing cluster go on, so what a run leaves there stays."""
    (tmp_path / "train.py").write_text(
        "import sys; open(sys.argv[1] + '/model', 'w').write('w'); print('in', sys.argv[1])"
    )
    lines = []
    url = f"file://{tmp_path}/kept"
    program = script_program(str(tmp_path / "train.py"), ["{outputs}"], outputs=url)
    run_program(
        program,
        Gang(2, cluster={"kind": "local", "node_timeout": 60}),
        relay=lines.append,
        client=client,
    )
    assert (tmp_path / "kept/model").read_text() == "w"
    places = [line.split(" in ")[1] for line in lines if " in " in line]
    assert len(set(places)) == 2
    assert [place for place in places if os.path.exists(place)] == []


def test_cleaning_up_never_fails_a_finished_run(tmp_path, monkeypatch, caplog):
    def delete(storage, name):
        raise StorageUnavailable("the store is away")

    monkeypatch.setattr(Storage, "delete", delete)
    delete_archive(Storage(str(tmp_path)), "s3://bucket/run/data-1.zip")
    assert [record.message for record in caplog.records] == [
        "s3://bucket/run/data-1.zip could not be deleted: the store is away"
    ]


@pytest.mark.long
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
def test_ranks_do_not_outlive_their_scheduler(start_worker, tmp_path, caplog):
    scheduler, address = start_scheduler(tmp_path)
    nannies = [start_worker(address, f"node-{index}", STEP_SECONDS="0.1") for index in range(2)]
    config = ClusterConfig(kind="existing", scheduler_address=address, start_timeout=30)
    ranks = []

    def end_scheduler():
        ranks.extend(rank for nanny in nannies for rank in ranks_below(nanny.pid))
        scheduler.kill()
        scheduler.wait()

    with (
        open_cluster(config, "test") as client,
        pytest.raises(GangLost, match="the Dask scheduler (is gone|was lost)"),
    ):
        train(new_run(tmp_path), client, config, at_steps=[(3, end_scheduler)], epochs=100)
    (line,) = [record.message for record in caplog.records if "restarts from" in record.message]
    assert line.endswith("the Dask scheduler was lost: it does not answer"), "no node is blamed"
    assert len(ranks) == 2
    assert not any(rank.is_running() for rank in ranks)
