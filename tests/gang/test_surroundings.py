"""Machines that lack something: the line names the thing, and nothing of the user's is blamed for
it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flyte_ddp
from flyte_ddp.config.fields import read_object
from flyte_ddp.errors import ConfigError, DataError, RankFailure, StorageDenied
from flyte_ddp.launch.agent import resolver, supervisor
from flyte_ddp.launch.nodes import local
from flyte_ddp.rank import entry
from flyte_ddp.rank.nested import collate
from flyte_ddp.storage import Storage
from tests.support.emulators import s3  # noqa: F401 - a fixture
from tests.support.errors import raises_one_line

REPOSITORY = Path(__file__).parents[2]


def train():
    return "trained"


def test_a_network_interface_that_is_not_there_is_named_with_those_that_are(
    monkeypatch, forked_functions
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth77")
    with pytest.raises(
        RankFailure,
        match=(
            r"GLOO_SOCKET_IFNAME: expected network interfaces of \S+ "
            r"\(.*\blo\b.*\), got 'lo,eth77'"
        ),
    ) as caught:
        flyte_ddp.run(train)
    assert caught.value.is_user_error
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert flyte_ddp.run(train) == "trained"


def test_a_gang_is_told_of_dns_that_answers_late(monkeypatch, forked_functions, capfd):
    """torch asks for the name of the address where the ranks meet."""
    asked = []

    def answer(address, flags):
        asked.append(address[0])
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getnameinfo", answer)
    monkeypatch.setattr(resolver, "SLOW_SECONDS", 0.0)
    assert flyte_ddp.run(train, nproc_per_node=2) == "trained"
    assert asked == ["::ffff:127.0.0.1"]
    line = r"DNS on \S+ took \d\.\d s to answer which name 127\.0\.0\.1 has"
    assert len(re.findall(line, capfd.readouterr().err)) == 1
    assert flyte_ddp.run(train) == "trained"  # a rank without others meets nobody
    assert len(asked) == 1


def test_dns_that_answers_at_once_is_not_worth_a_line(monkeypatch):
    lines, asked = [], []
    monkeypatch.setattr(socket, "getnameinfo", lambda *query: asked.append(query))
    for host in ("10.0.0.1", "fd00::1"):
        resolver.ask_name(host, lines.append)
    assert [address for (address, _), _ in asked] == ["::ffff:10.0.0.1", "fd00::1"]
    assert lines == []


def test_a_shared_memory_that_cannot_be_written_is_named(monkeypatch):
    def refuse(kind, size):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(supervisor, "RawArray", refuse)
    expected = (
        r"/dev/shm: expected to be able to write there, got \[Errno 30\] Read-only file "
        r"system$"
    )
    with pytest.raises(RankFailure, match=expected) as caught:
        flyte_ddp.run(train, max_restarts=3)
    assert caught.value.is_user_error


def test_a_loopback_that_is_down_is_named(monkeypatch):
    def refuse(*arguments):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(
        ConfigError,
        match=(
            r"^127.0.0.1: expected a loopback interface that is up "
            r".*unreachable$"
        ),
    ):
        local.listening_socket(0)


def test_a_worker_that_may_not_start_ranks_is_told_how_it_may(monkeypatch):
    # Dask's nanny starts its worker in this way.
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    expected = (
        r"^flyte_ddp\.run: expected .* a daemonic one, .*: set "
        r"DASK_DISTRIBUTED__WORKER__DAEMON=False .* client$"
    )
    with pytest.raises(ConfigError, match=expected):
        flyte_ddp.run(train, nproc_per_node=1, max_restarts=3)


@pytest.mark.parametrize(
    "raised",
    [
        (
            "RuntimeError: unable to allocate shared memory(shm) for file </torch_9_1_0>: No space "
            "left on device (28)"
        ),
        (
            "RuntimeError: unable to open shared memory object </torch_9_1_0> in read-write mode: "
            "Read-only system (30)"
        ),
        "RuntimeError: DataLoader worker (pid 9) is killed by signal: Bus error. It is possible "
        "that dataloader's "
        "workers are out of shared memory. Please try to raise your shared memory limit.",
        (
            "    sl = self._semlock = _multiprocessing.SemLock(\nFileNotFoundError: [Errno 2] No "
            "such "
            "file or directory"
        ),
    ],
)
def test_a_shared_memory_that_loader_processes_cannot_use_is_named(raised, monkeypatch):
    monkeypatch.setattr(
        entry.traceback, "format_exception", lambda *arguments: [f"Traceback\n{raised}\n"]
    )
    described = entry.describe_error(RuntimeError(raised))
    message = described.message
    assert (described.name, described.trace) == ("ConfigError", "")
    assert not described.is_consequence
    assert message.startswith(
        "data_workers: expected a /dev/shm that loader processes can write batches to: give "
        "the "
        "task"
    )
    assert "shared_memory" in message
    assert message.endswith(raised.splitlines()[-1])


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (
            (
                "unable to open shared memory object </torch_9_1_0> in read-write mode: Permission "
                "denied (13)"
            ),
            RuntimeError,
        ),
        ("stack expects each tensor to be equal size", DataError),
    ],
)
def test_a_batch_that_has_no_room_is_not_blamed_on_its_shapes(message, kind, monkeypatch):
    def fail(parts):
        raise RuntimeError(message)

    monkeypatch.setattr("flyte_ddp.rank.nested.default_collate", fail)
    with pytest.raises(kind, match=message.partition("<")[0].partition("(")[0].strip()) as caught:
        collate([torch.ones(1), torch.ones(2)])
    assert ("each of the same shape" in str(caught.value)) == (kind is DataError)


def test_files_are_read_as_utf_8_in_any_locale(tmp_path):
    (tmp_path / "config.yaml").write_text("name: caf\u00e9 \u732b\n", encoding="utf-8")
    code = (
        "import sys; from flyte_ddp.config.fields import read_object as read; "
        "print(ascii(read('--f', sys.argv[1])))"
    )
    variables = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code, str(tmp_path / "config.yaml")]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.stdout == "{'name': 'caf\\xe9 \\u732b'}\n", done.stderr
    assert read_object("--config", str(tmp_path / "config.yaml")) == {"name": "caf\u00e9 \u732b"}


@pytest.mark.parametrize(
    ("request_name", "action", "permission"),
    [
        ("list_objects_v2", lambda place: place.names(), "s3:ListBucket"),
        ("delete_objects", lambda place: place.delete("a"), "s3:DeleteObject"),
        ("put_object", lambda place: place.write("b", b"1"), "s3:PutObject"),
        ("get_object", lambda place: place.read("a"), "s3:GetObject"),
    ],
)
def test_a_permission_that_a_bucket_s_policy_denies_is_named(
    request_name,
    action,
    permission,
    s3,  # noqa: F811
    monkeypatch,
):
    from botocore.exceptions import ClientError

    place = Storage(s3.new_bucket() + "/run", timeout=5)
    place.write("a", b"1")
    call = place.file_system._call_s3

    async def deny(method, *arguments, **options):
        if method == request_name or (
            request_name == "delete_objects" and method == "delete_object"
        ):
            names = "".join(part.capitalize() for part in method.split("_"))
            answer = {
                "Error": {"Code": "AccessDenied", "Message": "no"},
                "ResponseMetadata": {"HTTPStatusCode": 403},
            }
            raise ClientError(answer, names)
        return await call(method, *arguments, **options)

    monkeypatch.setattr(place.file_system, "_call_s3", deny)
    with raises_one_line(StorageDenied, match=f"give their owner the permission {permission}"):
        action(place)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("can't start new thread", "ulimit -u: expected more than 12 threads and processes"),
        (
            "[Errno 11] Resource temporarily unavailable",
            "ulimit -u: expected more than 12 threads and processes",
        ),
        (
            "libtorch_cpu.so: failed to map segment from shared object",
            "ulimit -v: expected more than 12 bytes",
        ),
        (
            "DefaultCPUAllocator: can't allocate memory: you tried",
            "ulimit -v: expected more than 12 bytes",
        ),
    ],
)
def test_a_limit_of_the_shell_is_named_where_there_is_one(message, expected, monkeypatch):
    error = RuntimeError(message)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (resource.RLIM_INFINITY,) * 2)
    described = entry.describe_error(error)
    assert (described.name, described.message) == ("RuntimeError", message)
    monkeypatch.setattr(resource, "getrlimit", lambda limit: (12, 12))
    described = entry.describe_error(error)
    assert described.name == "ConfigError"
    assert described.message.startswith(expected)
    assert message in described.message
