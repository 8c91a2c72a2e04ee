"""deploy/register.sh: its questions to Flyte, its registrations and its refusals."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import subprocess

import grpc
import pytest
from flyteidl.admin import execution_pb2, task_pb2
from flyteidl.service import admin_pb2_grpc

from flyte_ddp.flyte.__main__ import main as tasks_command
from flyte_ddp.flyte.limits import CLASSES
from flyte_ddp.flyte.settings import SettingsError
from tests.test_registration import BIN, IMAGE, KNOWN, REPOSITORY, clean_environment, resources


class Admin(admin_pb2_grpc.AdminServiceServicer):
    """Flyte's own service, as far as it refuses tasks that request too much."""

    memory = "64Gi"

    def __init__(self):
        self.requests = []

    def CreateTask(self, request, context):
        self.requests.append(request)
        asked = resources(request.spec.template.container.resources.limits)[1]
        if int(asked.removesuffix("Gi")) > int(self.memory.removesuffix("Gi")):
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"Requested MEMORY limit [{asked}] is greater than current limit set in the "
                "platform configuration "
                f"[{self.memory}]. Please contact Flyte Admins to change these limits or consult "
                "the configuration",
            )
        return task_pb2.TaskCreateResponse()

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


def register(tmp_path, *, with_pyflyte=False, **environment):
    """Run deploy/register.sh, with a `pyflyte` that only notes what it is called with unless
    `with_pyflyte`.
    """
    calls = tmp_path / "calls"
    stub = tmp_path / "pyflyte"
    stub.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    stub.chmod(0o755)
    path = os.pathsep.join(
        str(place) for place in (BIN if with_pyflyte else tmp_path, BIN, os.environ["PATH"])
    )
    done = subprocess.run(
        [REPOSITORY / "deploy" / "register.sh"],
        env=clean_environment(**{"PATH": path, **environment}),
        capture_output=True,
        text=True,
        timeout=180,
    )
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_register_uses_the_settings_and_activates_the_launch_plan_if_asked(tmp_path, admin):
    done, calls = register(tmp_path, IMAGE=IMAGE, PROJECT="p", DOMAIN="production", ACTIVATE="1")
    assert done.returncode == 0, done.stderr
    version = re.search(r"^version (7-[0-9a-f]{8}), image registry", done.stdout, re.MULTILINE)[1]
    assert calls == [
        f"register --project p --domain production --version {version} --image {IMAGE} "
        "--service-account flyte-ddp --copy none workflows",
        f"launchplan --project p --domain production --activate retrain {version}",
    ]
    (tmp_path / "calls").unlink()
    done, calls = register(tmp_path, IMAGE=IMAGE, SANDBOX="1")
    assert f"--version {version}" not in calls[0]  # the same code with other settings
    # Flyte was asked before each, with the most of each resource that any task requests.
    asked = [
        resources(request.spec.template.container.resources.limits) for request in admin.requests
    ]
    assert asked == [("4", "16Gi", "50Gi", "1"), ("2", "4Gi", "4Gi", "")]
    assert (admin.requests[0].id.project, admin.requests[0].id.version) == ("p", version)


def test_register_registers_nothing_where_flyte_refuses_what_the_tasks_request_or_does_not_answer(
    tmp_path, admin, monkeypatch
):
    admin.memory = "1Gi"  # as a stock installation
    done, calls = register(tmp_path, IMAGE=IMAGE, SANDBOX="1")
    assert (done.returncode, calls) == (1, [])
    assert (
        "Flyte refuses what the tasks request: Requested MEMORY limit [4Gi] is greater than"
    ) in done.stderr
    assert "training    2 CPU, 4Gi memory, 4Gi disk, timeout 4 h" in done.stdout
    assert "Traceback" not in done.stderr
    monkeypatch.setenv("FLYTE_PLATFORM_URL", "127.0.0.1:9")
    done, calls = register(tmp_path, IMAGE=IMAGE)
    assert (done.returncode, calls) == (1, [])
    assert done.stderr.startswith("Flyte does not answer (")


def test_register_activates_nothing_by_default_and_takes_another_version(tmp_path, admin):
    _, (call,) = register(tmp_path, IMAGE="other:1", VERSION="7", SERVICE_ACCOUNT="me")
    assert "--version 7 --image other:1 --service-account me" in call


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ACTIVATE": "retrain"}, "ACTIVATE: expected 0 or 1, got 'retrain'"),
        ({"DRY_RUN": "yes"}, "DRY_RUN: expected 0 or 1, got 'yes'"),
        (
            {"IMAGE": ""},
            (
                "image: expected the name of your image in settings.toml, in IMAGE or by "
                "--image, got none"
            ),
        ),
    ],
)
def test_register_refuses_bad_settings_before_any_request(tmp_path, environment, expected):
    done, calls = register(tmp_path, **{"IMAGE": IMAGE, **environment})
    assert done.returncode in (1, 2)
    assert calls == []
    assert expected in done.stderr


@pytest.mark.slow
def test_a_dry_run_needs_no_flyte_and_lists_everything(tmp_path):
    done, _ = register(
        tmp_path,
        with_pyflyte=True,
        DRY_RUN="1",
        ACTIVATE="1",
        SANDBOX="1",
        IMAGE=IMAGE,
        VERSION="7",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "training    2 CPU, 4Gi memory, 4Gi disk, timeout 4 h\n" in done.stdout
    for name in (*(f"Task: {name}" for name in KNOWN), "Launch Plan: retrain"):
        assert f"{name} (Dry run Mode)" in done.stdout
    assert done.stdout.endswith(
        f"retrain would be activated as version 7\nversion 7, image {IMAGE}\n"
    )


def test_the_doctor_gets_what_each_class_of_tasks_requests():
    requests = json.loads(tasks_command(["requests", "--json"]))
    assert requests.keys() == CLASSES.keys()
    for name, arguments in CLASSES.items():
        limits = arguments["limits"]
        assert (requests[name]["cpu"], requests[name]["memory"]) == (str(limits.cpu), limits.mem)
        assert requests[name].get("nvidia.com/gpu", "") == str(limits.gpu or "")


def test_an_execution_is_aborted_by_its_name(admin, monkeypatch):
    printed = tasks_command(["abort", "f3a9"])
    assert printed == "aborted f3a9 in flytesnacks-development"
    tasks_command(["abort", "f3b0", "vision", "production"])
    found = [(each.id.project, each.id.domain, each.id.name) for each in admin.requests]
    assert found == [("flytesnacks", "development", "f3a9"), ("vision", "production", "f3b0")]
    assert all(each.cause for each in admin.requests)


def test_an_abort_that_flyte_refuses_is_one_line(admin, monkeypatch):
    with pytest.raises(
        SettingsError,
        match="^Flyte refuses to abort gone in p-d: missing entity of type execution",
    ):
        tasks_command(["abort", "gone", "p", "d"])
    monkeypatch.setenv("FLYTE_PLATFORM_URL", "127.0.0.1:9")
    with pytest.raises(SettingsError, match="^Flyte does not answer "):
        tasks_command(["abort", "f3a9"])
