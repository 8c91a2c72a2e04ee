"""Google's and Azure's stores by their emulators, in outages and after mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from wsgiref.simple_server import make_server

import pytest

from flyte_ddp.errors import ConfigError, StorageDenied, StorageUnavailable
from flyte_ddp.storage import Storage, directory
from flyte_ddp.storage.clients import timeouts
from tests.storage.test_storage import fast  # noqa: F401 - a fixture
from tests.support.dask_runs import eventually
from tests.support.emulators import PROGRAMS, abfs, gs  # noqa: F401 - fixtures
from tests.support.errors import raises_one_line

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(params=PROGRAMS)
def emulator(request):
    return request.getfixturevalue(request.param)


def test_a_store_that_stops_and_starts_again_is_waited_for_with_two_lines(emulator, fast, caplog):  # noqa: F811
    place = Storage(emulator.new_bucket() + "/run", timeout=60)
    place.write("a", b"1")
    results = []
    reader = threading.Thread(target=lambda: results.append(place.read("a")))
    with emulator.refusing():
        reader.start()
        assert eventually(lambda: "cannot be reached" in caplog.text)
        assert not results
    reader.join(60)
    assert results == [b"1"]
    # google.auth has warnings of its own
    lines = [each.message for each in caplog.records if each.name.startswith("flyte_ddp")]
    assert ["answers again" in line for line in lines] == [False, True]


def test_a_store_that_hangs_is_away(emulator, fast, monkeypatch):  # noqa: F811
    monkeypatch.setattr(timeouts, "READ_TIMEOUT", 1.0)
    monkeypatch.setattr(timeouts, "MIN_UPLOAD_RATE", 8 << 20)
    url = emulator.new_bucket() + "/run"
    place = Storage(url, timeout=0)
    with emulator.hanging():
        # The connection's buffers take a part of these bytes.
        for action in (
            lambda: place.read("a"),
            lambda: place.write("a", bytes(12 << 20)),
            place.names,
        ):
            with raises_one_line(StorageUnavailable, match="could not be reached for 0 s"):
                action()
    place.timeout = 60
    place.write("a", b"2")
    assert place.read("a") == b"2"


def test_listings_show_what_other_processes_have_just_written_and_deleted(emulator):
    place = Storage(emulator.new_bucket() + "/run")
    file_system = place.file_system
    other = type(file_system)(**file_system.storage_options, skip_instance_cache=True)
    assert place.names() == []
    other.pipe_file(f"{place.root}/a", b"1")
    assert place.names() == ["a"]
    other.rm_file(f"{place.root}/a")
    assert place.names() == []


def test_bytes_that_are_stored_are_counted_while_they_are_sent(emulator):
    place, size, seen = Storage(emulator.new_bucket() + "/run"), 80 << 20, set()
    writer = threading.Thread(target=lambda: place.write("a", bytes(size)))
    writer.start()
    while writer.is_alive():
        seen.add(place.stored_bytes)
        time.sleep(0.002)
    assert any(0 < each < size for each in seen)
    assert max(seen) < size + (1 << 20)
    assert place.stored_bytes == 0


def test_a_missing_bucket_is_a_user_error_and_not_an_empty_one(emulator):
    place = Storage(f"{emulator.kind}://no-such-bucket/run", "champion")
    actions = (
        place.check_access,
        lambda: place.write("a", b""),
        place.names,
        lambda: place.replace("a", b"1", b""),
    )
    for action in (*actions, lambda: place.read("a")):
        with raises_one_line(
            StorageDenied,
            match=(
                r"champion: .*://no-such-bucket/run: .*create the "
                r"bucket or"
            ),
        ) as caught:
            action()
        assert "<" not in str(caught.value)


def test_a_process_that_used_a_store_exits_silently(emulator):
    program = (
        "import sys; from flyte_ddp.storage import Storage; Storage(sys.argv[1]).check_access()"
    )
    command = [sys.executable, "-c", program, emulator.new_bucket() + "/run"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# The user's mistakes


def test_a_wrong_key_of_azure_is_refused_in_one_line(abfs, fast, monkeypatch):  # noqa: F811
    url = abfs.new_bucket() + "/run"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", abfs.connection_string(key="d3Jvbmc="))
    place = Storage(url)
    for action in (place.check_access, lambda: place.read("a"), place.names):
        directory._reached.clear()
        with raises_one_line(
            StorageDenied, match="; correct the keys, or give their owner the permission$"
        ) as caught:
            action()
        assert "d3Jvbmc" not in str(caught.value)


def test_an_account_or_a_bucket_that_cannot_be_is_refused_in_one_line(abfs, monkeypatch):  # noqa: F811
    with pytest.raises(StorageDenied, match="create the bucket or correct the URL"):
        Storage("abfs://x/run").check_access()
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    with pytest.raises(ConfigError, match="checkpoints: expected .*account_name"):
        Storage("abfs://container/run")


def test_missing_credentials_of_azure_are_refused_in_one_line_with_the_remedy(
    fast,  # noqa: F811
    monkeypatch,
    caplog,
):
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    # no identity of this machine
    monkeypatch.setenv("AZURE_TOKEN_CREDENTIALS", "EnvironmentCredential")
    with raises_one_line(
        StorageDenied,
        match=(
            r"give this process credentials: "
            r".*AZURE_STORAGE_\*"
        ),
    ):
        Storage("abfs://container/run").read("a")
    assert not caplog.records


@pytest.fixture
def google(monkeypatch):
    """A store that refuses as Google's does, which the emulator cannot; `google.status` is what it
    answers.
    """

    def refuse(environ, start_response):
        error = {"code": server.status, "message": "The caller has no storage.objects access"}
        start_response(f"{server.status} No", [("Content-Type", "application/json")])
        return [json.dumps({"error": error}).encode()]

    with make_server("127.0.0.1", 0, refuse) as server:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    ("status", "remedy"), [(401, "GOOGLE_APPLICATION_CREDENTIALS"), (403, "give their owner the")]
)
def test_google_s_refusals_are_the_user_s_errors_in_one_line(google, fast, caplog, status, remedy):  # noqa: F811
    google.status = status
    place = Storage("gs://bucket/run")
    for action in (
        place.check_access,
        lambda: place.read("a"),
        place.names,
        lambda: place.replace("a", b"", b""),
    ):
        with raises_one_line(StorageDenied, match=remedy):
            action()
    assert not caplog.records


@pytest.mark.parametrize("status", [429, 503])
def test_google_s_store_that_is_overloaded_is_waited_for_in_one_line(google, fast, caplog, status):  # noqa: F811
    google.status = status
    with pytest.raises(StorageUnavailable, match="could not be reached for 0.5 s"):
        Storage(f"gs://answers-{status}/run", timeout=0.5).read("a")
    assert len(caplog.records) == 1
