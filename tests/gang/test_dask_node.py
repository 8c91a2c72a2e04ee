"""A node of a gang: the code, data and messages that it gets, what it leaves behind, and who
outlives whom.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import io
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from multiprocessing.connection import Pipe

import pytest
import torch

from flyte_ddp.cluster.config import ADDRESS_VARIABLE, ClusterConfig
from flyte_ddp.cluster.connect import open_cluster
from flyte_ddp.errors import (
    ConfigError,
    GangLost,
    StorageUnavailable,
)
from flyte_ddp.flyte.scripts import pack_script
from flyte_ddp.launch.agent import main
from flyte_ddp.launch.nodes.dask import discovery, worker
from flyte_ddp.launch.nodes.dask.calls import call_workers
from flyte_ddp.launch.nodes.dask.data import SharedData, packed_code, packed_directory
from flyte_ddp.launch.protocol.messages import NodeJob
from flyte_ddp.launch.protocol.programs import Job, Program
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import Gang, run_job, script_program
from flyte_ddp.storage import Storage
from tests.support.dask_runs import (
    dask_config,
    eventually,
    ranks_below,
    start_driver,
    start_scheduler,
    train,
)
from tests.support.runs import REPOSITORY, new_run, wait_for_step


@pytest.mark.parametrize("end", ["no attempt comes", "the worker is gone"])
def test_an_agent_that_nobody_needs_ends(end):
    timeout = 0.1 if end == "no attempt comes" else 100
    code = f"from flyte_ddp.launch.agent import main; main.IDLE_TIMEOUT = {timeout}; main.main()"
    connection, given = Pipe()
    command = [sys.executable, "-c", code, "", "", "", str(given.fileno())]
    process = subprocess.Popen(command, pass_fds=[given.fileno()])
    if end == "the worker is gone":
        given.close()
        connection.close()
    assert process.wait() == (0 if end == "no attempt comes" else 1)


def test_code_that_could_not_be_unpacked_whole_is_not_there_for_a_later_attempt(client):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("first.py", "pass")
        archive.writestr("second.py", "the disk is full here")
    # a wrong checksum
    code = buffer.getvalue().replace(b"the disk is full here", b"the disk is full HERE")

    def list_files():
        return client.run(lambda dask_worker: os.listdir(dask_worker.local_directory))

    address, before = client.run(os.getpid).popitem()[0], list_files()
    for _ in range(2):
        answers = call_workers(client, [address], worker.install, "training-y", code)
        assert isinstance(answers[address], zipfile.BadZipFile)
    facts = call_workers(client, [address], worker.introduce, "training-y")
    assert not facts[address]["has_plugin"]
    assert list_files() == before


def test_files_from_before_1980_can_be_packed(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/old.py").write_text("pass")
    os.utime(tmp_path / "data/old.py", (0, 0))  # reproducible archives have such timestamps
    packed_directory(tmp_path / "data", tmp_path / "data.zip")
    for archive in (tmp_path / "data.zip", pack_script(tmp_path / "data")):
        with zipfile.ZipFile(archive) as contents:
            assert contents.read("old.py") == b"pass"


def test_a_node_that_may_join_imports_and_fetches_what_its_ranks_need(tmp_path, monkeypatch):
    for name in ("data", "node"):
        (tmp_path / name).mkdir()
    (tmp_path / "data/mnist.bin").write_bytes(b"images")
    packed_directory(tmp_path / "data", tmp_path / "data.zip")
    imported, ranks = [], []

    class Rank:
        def join(self):
            ranks.append("joined")

    monkeypatch.setattr(main, "start_server", lambda modules: imported.extend(modules) or True)
    monkeypatch.setattr(main, "start_rank", lambda *start: ranks.append(start) or Rank())
    job = Job(recipe_program("digits", dask_config()), "", 0.0)
    node_job = NodeJob(job, None, 20.0, {}, {}, "", str(tmp_path / "data.zip"), False)
    main.prepare(node_job, tmp_path / "node")
    assert (tmp_path / "node/data/mnist.bin").read_bytes() == b"images"
    assert "torch" in imported
    assert ranks[1:] == ["joined"]  # the rank is forked once the server has imported all
    main.prepare(dataclasses.replace(node_job, data_archive="/nowhere.zip"), tmp_path)  # told later


def test_packed_code_does_not_depend_on_its_path(tmp_path, monkeypatch):
    flowers, packed = Program("flowers", b"", packages=("flowers",)), []
    for name in ("here", "there"):
        package = tmp_path / name / "flowers"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("x = 1")
        (package / "names.txt").write_text("rose")
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
    module = newer / "flyte_ddp" / "training" / "main.py"
    addition = (
        'older = main\n\ndef main(*arguments):\n    print("newer code")\n    older(*arguments)\n'
    )
    module.write_text(f"{module.read_text()}\n\n{addition}")
    client.run(importlib.import_module, "flyte_ddp.launch.agent.main")
    address = client.scheduler.address
    driver = start_driver(tmp_path, {"kind": "existing", "scheduler_address": address}, code=newer)
    output, _ = driver.communicate()
    assert '{"ended": ["", ""]}' in output
    assert all(f"[node {index}] [rank {index}] newer code" in output for index in (0, 1))


def test_workers_with_other_versions_are_refused_or_left_out_if_they_join_in_mid_run(
    client, monkeypatch, caplog
):
    roll = discovery.WorkerDiscovery(client, "run")
    assert len(roll.present_workers()) == 2
    joined = next(iter(client.nthreads()))
    roll.known.discard(joined)
    for package, ours in (("python", "3.9"), ("torch", "1.0")):
        monkeypatch.setattr(discovery, "own_versions", lambda each={package: ours}: each)
        with pytest.raises(
            ConfigError, match=rf"{package} {ours}, .* got \d\S+ on worker \d at tcp://"
        ):
            roll.present_workers()
    roll.is_strict = False
    for _ in range(2):
        assert [each.address for each in roll.present_workers()] == list(roll.known)
    assert [record.message for record in caplog.records if "torch 1.0" in record.message] == [
        f"the run continues without a worker: {roll.unfit[joined]}"
    ]


def test_cleaning_up_never_fails_a_finished_run(tmp_path, monkeypatch, caplog):
    def delete(storage, name):
        raise StorageUnavailable("the store is away")

    monkeypatch.setattr(Storage, "delete", delete)
    SharedData(Storage(str(tmp_path)), "s3://bucket/run/data-1.zip").close()
    assert [record.message for record in caplog.records] == [
        "s3://bucket/run/data-1.zip could not be deleted: the store is away"
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


@pytest.mark.long
def test_a_scripts_outputs_are_brought_to_their_url_and_leave_the_workers(client, tmp_path):
    """The workers of an existing cluster go on, so what a run leaves there stays."""
    (tmp_path / "train.py").write_text(
        "import sys; open(sys.argv[1] + '/model', 'w').write('w'); print('in', sys.argv[1])"
    )
    lines = []
    url = f"file://{tmp_path}/kept"
    program = script_program(str(tmp_path / "train.py"), ["{outputs}"], outputs=url)
    gang = Gang(2, cluster={"kind": "local", "node_timeout": 60}, client=client)
    run_job(Job(program), gang, relay=lines.append)
    assert (tmp_path / "kept/model").read_text() == "w"
    places = [line.split(" in ")[1] for line in lines if " in " in line]
    assert len(set(places)) == 2
    assert [place for place in places if os.path.exists(place)] == []


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
    config = ClusterConfig(kind="existing", scheduler_address=address)
    ranks = []

    def end_scheduler():
        ranks.extend(rank for nanny in nannies for rank in ranks_below(nanny.pid))
        # The timeout changes only now, because the length of a start depends on the machine.
        object.__setattr__(config, "start_timeout", 1.0)
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
    assert eventually(lambda: not any(rank.is_running() for rank in ranks))
