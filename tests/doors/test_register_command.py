"""`flyte-ddp register`, and the commands for the person on call."""

from __future__ import annotations

import concurrent.futures
import re
import shutil
import subprocess
from pathlib import Path

import grpc
import pytest
from flyteidl.admin import execution_pb2
from flyteidl.service import admin_pb2_grpc

from flyte_ddp.__main__ import main
from flyte_ddp.code import source_code
from flyte_ddp.code.source_code import describe_commit
from flyte_ddp.flyte import register
from tests.flyte.test_registration import IMAGE, REPOSITORY


@pytest.fixture
def project(tmp_path, monkeypatch):
    for name in ("tasks", "workflows", "recipes", "settings.toml", ".gitignore"):
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, tmp_path / name)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("IMAGE", raising=False)
    return tmp_path


@pytest.fixture
def calls(monkeypatch):
    """The commands that were called, each with the IMAGE of its environment."""
    made = []
    describe_commit.cache_clear()
    monkeypatch.setattr(source_code, "find_project", Path.cwd)

    def call(command, env):
        made.append([*command[len(register.PYFLYTE) :], env["IMAGE"]])
        return 0

    monkeypatch.setattr(register.subprocess, "call", call)
    return made


def test_a_registration_ships_all_with_the_image_of_the_settings(project, calls, monkeypatch):
    monkeypatch.setenv("IMAGE", IMAGE)
    options = ["--project", "p", "--domain", "production", "--activate", "--dry-run"]
    assert main(["register", *options]) == 0
    assert " ".join(calls.pop()) == (
        f"register --copy none --image {IMAGE} --project p --domain production --service-account "
        f"flyte-ddp --version dry-run --activate-launchplans --dry-run workflows {IMAGE}"
    )
    shutil.rmtree(".git")
    assert main(["register", "--image", "other:1", "--version", "7"]) == 0
    assert " ".join(calls.pop()) == (
        "register --copy all --image other:1 --project flytesnacks --domain development "
        "--service-account flyte-ddp --version 7 workflows other:1"
    )


def test_the_commit_travels_with_the_registration(project, calls, monkeypatch):
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
    monkeypatch.setattr(register.subprocess, "call", lambda command, env: found.append(env) or 0)
    found: list[dict[str, str]] = []
    for command in (["add", "."], ["commit", "--quiet", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    assert main(["register", "--image", IMAGE]) == 0
    describe_commit.cache_clear()
    Path("settings.toml").write_text("# changed\n" + Path("settings.toml").read_text())
    assert main(["register", "--image", IMAGE]) == 0
    clean, dirty = (each[source_code.COMMIT_VARIABLE] for each in found)
    assert re.fullmatch("[0-9a-f]{12}", clean)
    assert dirty == f"{clean}-dirty"
    monkeypatch.setenv(source_code.COMMIT_VARIABLE, dirty)  # The task's pod has this variable.
    describe_commit.cache_clear()
    assert describe_commit() == dirty
    describe_commit.cache_clear()


@pytest.mark.parametrize(
    ("change", "image", "expected"),
    [
        (lambda: None, "", "image: expected its name in settings.toml or IMAGE, got none"),
        (lambda: None, "a b:1", "--image: expected an image with its tag, such as .*, got 'a b:1'"),
        (
            lambda: None,
            "localhost:5000/mine",
            "--image: expected an image with its tag, such as .*, got 'localhost:5000/mine'",
        ),
        (
            lambda: Path(".gitignore").write_text(""),
            IMAGE,
            ".gitignore: expected a line for .venv, which would be shipped",
        ),
        (
            lambda: Path(".flyteignore").write_text("recipes/wine.py\n"),
            IMAGE,
            "recipes/wine.py: expected a file that is shipped, got one that is not there, or",
        ),
        (
            lambda: shutil.rmtree("recipes"),
            IMAGE,
            "recipes: expected a file that is shipped, got one that is not there, or",
        ),
        (
            lambda: Path("settings.toml").write_text("recipes = ["),
            IMAGE,
            "settings.toml: expected TOML, got ",
        ),
    ],
)
def test_a_registration_that_cannot_work_is_refused_in_one_line(
    project, calls, capsys, change, image, expected
):
    (project / ".venv").mkdir()
    (project / ".venv/file").touch()
    (project / "recipes/wine.py").touch()
    change()
    assert main(["register", "--image", image]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"error: {expected}", line)
    assert calls == []


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Flyte's own service, as far as it aborts executions."""

    def __init__(self):
        self.requests = []

    def TerminateExecution(self, request, context):
        self.requests.append(request)
        if request.id.name == "gone":
            context.abort(
                grpc.StatusCode.NOT_FOUND, "missing entity of type execution with identifier gone"
            )
        return execution_pb2.ExecutionTerminateResponse()


@pytest.fixture
def admin(monkeypatch):
    """A server of Flyte's that the environment names."""
    service = Admin()
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    admin_pb2_grpc.add_AdminServiceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setenv("FLYTE_PLATFORM_URL", f"127.0.0.1:{port}")
    monkeypatch.setenv("FLYTE_PLATFORM_INSECURE", "true")
    yield service
    server.stop(None)


def test_an_execution_is_aborted_by_its_name(admin, capsys):
    assert main(["abort", "f3a9"]) == 0
    assert capsys.readouterr().out == "aborted f3a9 in flytesnacks-development\n"
    assert main(["abort", "f3b0", "--project", "vision", "--domain", "production"]) == 0
    found = [(each.id.project, each.id.domain, each.id.name) for each in admin.requests]
    assert found == [("flytesnacks", "development", "f3a9"), ("vision", "production", "f3b0")]
    assert main(["abort", "gone", "--project", "p", "--domain", "d"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: Flyte did not abort gone in p-d: missing entity")
