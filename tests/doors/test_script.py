"""Scripts of a user's own as workflows: what travels, what comes back, and what is refused."""

from __future__ import annotations

import os
import tempfile
import zipfile
from pathlib import Path

import pytest
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile

from flyte_ddp.errors import ConfigError
from flyte_ddp.events import Reported, RunStarted, read_history
from flyte_ddp.flyte import scripts
from flyte_ddp.flyte.inputs import ClusterInput, InputError
from flyte_ddp.flyte.scripts import ScriptSource, pack_script, unpack_script
from flyte_ddp.launch.protocol.programs import OUTPUTS_VARIABLE
from flyte_ddp.launch.run import outputs_directory
from tests.support.prometheus import record_figures
from workflows.script import script_wf

SCRIPT = """
import os, sys
import torch.distributed as dist
from helper import VALUE
from flyte_ddp import session

dist.init_process_group()
print(VALUE, "of rank", dist.get_rank())
session.report(step=7, loss=0.25)
rate, out = sys.argv[1:]
if dist.get_rank() == 0:
    os.makedirs(f"{out}/deep")
    with open(f"{out}/deep/model.txt", "w") as file:
        file.write(rate)
dist.barrier()
"""


@pytest.fixture
def project(tmp_path):
    directory = tmp_path / "project"
    (directory / ".git").mkdir(parents=True)
    (directory / ".git" / "config").write_text("hidden")
    (directory / "train.py").write_text(SCRIPT)
    (directory / "helper.py").write_text("VALUE = 'the value'\n")
    return directory


def converted(source):
    """Return `source` as the task receives it."""
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(
        context, source, ScriptSource, TypeEngine.to_literal_type(ScriptSource)
    )
    return TypeEngine.to_python_value(context, literal, ScriptSource)


@pytest.mark.long
def test_a_script_runs_with_the_files_beside_it_and_returns_what_it_wrote(
    project, tmp_path, monkeypatch
):
    figures = record_figures(monkeypatch)
    # No other test leaves anything in this folder. Its path is short, for sockets.
    own = tempfile.mkdtemp(prefix="s-")
    monkeypatch.setattr(tempfile, "tempdir", own)
    monkeypatch.setenv("TMPDIR", own)
    results = script_wf(
        script=FlyteFile(str(project / "train.py"), remote_path=False),
        arguments=["0.1", "{outputs}"],
        cluster=ClusterInput(kind="local", num_nodes=1, processes_per_node=2),
        output=str(tmp_path / "kept"),
    )

    kept = tmp_path / "kept"
    assert {"outputs", "log.txt", "report.html"} < {each.name for each in kept.iterdir()}
    assert str(results.outputs) == str(kept / "outputs")
    assert (Path(str(results.outputs)) / "deep" / "model.txt").read_text() == "0.1"
    log = Path(str(results.log)).read_text().splitlines()
    assert sorted(line.partition("the value")[2] for line in log) == [" of rank 0", " of rank 1"]
    history = read_history(str(results.history))
    assert [event for event in history if isinstance(event, Reported)] == [
        Reported(7, None, {"loss": 0.25})
    ]
    assert any(isinstance(event, RunStarted) and event.world_size == 2 for event in history)
    report = Path(str(results.report)).read_text()
    assert all(
        text in report for text in ("the value of rank 1", "finished", "Outputs", "Step", "Loss")
    )
    assert any('flyte_ddp_world_size{run="",script="train"} 2.0\n' in text for text in figures)
    left = os.listdir(own)
    assert [
        name for name in left if name.startswith(("checkpoints-", "data-", "ranks-", "script-"))
    ] == []


@pytest.mark.parametrize("keeps_path", [True, False], ids=["local", "remote"])
def test_a_scripts_directory_travels_as_one_archive(project, tmp_path, keeps_path):
    source = converted(
        FlyteFile(str(project / "train.py"), remote_path=False if keeps_path else None)
    )
    with zipfile.ZipFile(source.download()) as archive:
        assert sorted(archive.namelist()) == ["helper.py", "train.py"]
    file = unpack_script(source, "", tmp_path / "unpacked")
    assert (file.name, file.read_text()) == ("train.py", SCRIPT)
    assert (file.parent / "helper.py").is_file()


def test_a_directory_needs_the_name_of_its_script(project, tmp_path):
    source = converted(FlyteDirectory(str(project)))
    assert unpack_script(source, "train.py", tmp_path / "one").read_text() == SCRIPT
    for entry in ("", "nope.py"):
        said = rf"^entry_point: expected the name of .* \(helper.py, train.py\), got '{entry}'$"
        with pytest.raises(ConfigError, match=said):
            unpack_script(source, entry, tmp_path / f"unpacked-{entry}")


def test_the_entry_point_lies_in_the_scripts_directory(project, tmp_path):
    """Its directory goes to every node, and a pod has files that no other pod may see."""
    (tmp_path / "token").write_text("secret")
    source = converted(FlyteFile(str(project / "train.py"), remote_path=False))
    for number, name in enumerate(("../token", str(tmp_path / "token"))):
        with pytest.raises(ConfigError, match="^entry_point: expected the name of a script "):
            unpack_script(source, name, tmp_path / f"unpacked-{number}")


def test_data_beside_a_script_are_refused(project, monkeypatch):
    monkeypatch.setattr(scripts, "MAX_SIZE", 100)
    with pytest.raises(
        InputError, match="^script: expected a directory of code without data.*; give data by"
    ):
        pack_script(project / "train.py")


def test_a_script_that_is_not_there_is_named():
    with pytest.raises(
        InputError, match="^script: expected a script or a directory with one, got 'nope.py'"
    ):
        TypeEngine.get_transformer(ScriptSource).assert_type(ScriptSource, "nope.py")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_outputs_of_rank_0s_node_are_copied_to_their_url(tmp_path, monkeypatch, rank):
    monkeypatch.setenv(OUTPUTS_VARIABLE, str(tmp_path / "node"))
    monkeypatch.setenv("RANK", rank)
    url = f"file://{tmp_path}/kept"
    with outputs_directory(url) as directory:
        assert directory == str(tmp_path / "node")
        (Path(directory) / "deep").mkdir()
        (Path(directory) / "deep" / "file").write_bytes(b"\0contents")
    kept = tmp_path / "kept" / "deep" / "file"
    assert kept.read_bytes() == b"\0contents" if rank == "0" else not kept.exists()
