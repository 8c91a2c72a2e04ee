"""Storage against a real S3 server over HTTP: what is there, missing, forbidden, away or silent;
and on a disk.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import fsspec
import pytest

from flyte_ddp import __main__ as command_line
from flyte_ddp import storage
from flyte_ddp.errors import ConfigError, StorageDenied, StorageUnavailable
from flyte_ddp.storage import (
    Storage,
    directory,
    open_filesystem,
    read_file,
    storage_environment,
)
from flyte_ddp.storage.clients import timeouts
from flyte_ddp.storage.failures import describe
from flyte_ddp.storage.filesystem import CLIENTS
from tests.support.emulators import KINDS, abfs, gs  # noqa: F401 - fixtures
from tests.support.errors import raises_one_line
from tests.support.ports import free_port

REPOSITORY = Path(__file__).parents[2]
AWS_VARIABLES = (
    "AWS_ENDPOINT_URL",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_DEFAULT_REGION",
)


@pytest.fixture
def url(store):
    return store.new_bucket() + "/run"


@pytest.fixture(params=["disk", "s3", *KINDS])
def place(request, tmp_path):
    if request.param == "disk":
        return Storage(str(tmp_path / "run"))
    if request.param in ("gs", "abfs"):
        return Storage(request.getfixturevalue(request.param).new_bucket() + "/run")
    return Storage(request.getfixturevalue("url"))


@pytest.fixture
def fast(monkeypatch):
    """Short pauses, so that a test need not wait."""
    monkeypatch.setattr(directory, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(directory, "MAX_PAUSE", 0.2)
    monkeypatch.setattr(directory, "_reached", set())


def no_keys(monkeypatch, tmp_path):
    for name in (*AWS_VARIABLES, "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


def test_files_are_written_read_listed_renamed_and_deleted(place):
    assert place.names() == []
    place.write("a", b"one")
    place.write("a", b"two")
    place.write("b", b"")
    assert place.read("a") == b"two"
    assert sorted(place.names()) == ["a", "b"]
    assert {name: info["size"] for name, info in place.find().items()} == {"a": 3, "b": 0}
    assert place.read_heads(["a", "none"], 2) == [b"tw", b""]
    place.rename("a", "aside")
    assert sorted(place.names()) == ["aside", "b"]
    assert place.read("aside") == b"two"
    place.delete("aside")
    place.delete("aside")
    with pytest.raises(FileNotFoundError):
        place.read("aside")
    with pytest.raises(FileNotFoundError):
        place.rename("aside", "b")
    place.check_access()
    assert place.names() == ["b"]


def test_single_files_are_written_read_and_fetched(place, tmp_path):
    contents = b"12345678" * 1_500_000  # more than a part of an upload
    (tmp_path / "weights").write_bytes(contents)
    storage.write_file(place.join("file"), tmp_path / "weights")
    assert storage.read_file(place.join("file")) == contents
    storage.fetch_file(place.join("file"), tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == contents
    with pytest.raises(FileNotFoundError):
        storage.fetch_file(place.join("none"), tmp_path / "nothing")
    assert not list(tmp_path.glob("nothing*"))


def test_an_unknown_kind_of_url_is_refused_without_its_password():
    with pytest.raises(
        ConfigError,
        match="data: expected a path or a URL that fsspec knows, got 'xyz://...@host/a'",
    ):
        Storage("xyz://me:secret@host/a", "data")


@pytest.mark.parametrize(
    ("url", "package", "extra"), [("gs://b/a", "gcsfs", "gcs"), ("az://b/a", "adlfs", "azure")]
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    monkeypatch, url, package, extra
):
    monkeypatch.setitem(sys.modules, package, None)
    with raises_one_line(ConfigError) as caught:
        Storage(url, "data")
    assert str(caught.value).startswith(
        f"data: expected a path or a URL that fsspec knows, got '{url}': "
    )
    assert str(caught.value).endswith(f"; pip install 'flyte-ddp[{extra}]'")
    assert package in str(caught.value)


# The store is away


def test_another_librarys_file_systems_under_fsspecs_names_are_not_used(url, tmp_path, monkeypatch):
    # Flyte 2's SDK registers such a class for its own use.
    class Foreign(fsspec.AbstractFileSystem):
        pass

    registered = sys.modules["fsspec.registry"]._registry
    for name in ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "file", "local"):
        monkeypatch.setitem(registered, name, Foreign)
    assert fsspec.get_filesystem_class("s3") is Foreign
    for place in (url, url.replace("s3://", "s3a://"), str(tmp_path), f"file://{tmp_path}"):
        found = Storage(place, timeout=5)
        found.replace("owner.json", b"one", b"")
        assert (found.names()[-1], found.read("owner.json")) == ("owner.json", b"one")
        found.delete("owner.json")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage=true")
    for address in ("gs://b/a", "gcs://b/a", "az://b/a", "abfs://b/a"):
        opened, path = open_filesystem(address, anonymous=address.startswith("g"))
        assert (type(opened).__module__.partition(".")[0], path) in [
            ("gcsfs", "b/a"),
            ("adlfs", "b/a"),
        ]


@pytest.mark.parametrize("fault", ["refuses", "hangs"])
def test_an_outage_is_waited_for_and_reported_in_one_line(fault, monkeypatch, fast, caplog):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if fault == "hangs":
            server.listen(50)  # the kernel accepts; nobody answers
            monkeypatch.setattr(timeouts, "READ_TIMEOUT", 1.0)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        place = Storage(f"s3://away-and-{fault}/run", timeout=0.5)
        began = time.monotonic()
        for action in (lambda: place.read("a"), lambda: place.write("a", b""), place.names):
            with pytest.raises(StorageUnavailable) as caught:
                action()
            place.timeout = 0
        assert time.monotonic() - began >= 0.5
    assert str(caught.value).startswith(
        f"checkpoints: s3://away-and-{fault}/run could not be reached for 0 s: "
    )
    assert "\n" not in str(caught.value)
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("flyte_ddp.storage")
    ]
    assert line.startswith(f"s3://away-and-{fault} cannot be reached: ")


def test_the_store_may_work_on_an_upload_for_longer_than_it_may_be_silent(
    store, url, monkeypatch, fast
):
    app, seen = store.app, []

    def complete_slowly(environ, start_response):
        if environ["REQUEST_METHOD"] == "POST" and "uploadId" in environ["QUERY_STRING"]:
            seen.append(environ["PATH_INFO"])
            time.sleep(3)
        return app(environ, start_response)

    monkeypatch.setattr(store, "app", complete_slowly)
    monkeypatch.setattr(timeouts, "READ_TIMEOUT", 1.0)
    monkeypatch.setattr(timeouts, "MIN_UPLOAD_RATE", 1 << 20)
    # other requests may take a second on a busy machine, and are made again
    place = Storage(url, timeout=20)
    place.write("a", os.urandom(2 * directory.UPLOAD_PART))
    assert len(place.read("a")) == 2 * directory.UPLOAD_PART
    assert len(seen) == 1


def test_a_stop_request_ends_waiting(monkeypatch, fast):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    place = Storage("s3://away/run")
    threading.Timer(0.5, place.stop.set).start()
    with pytest.raises(StorageUnavailable):
        place.read("a")


# The user's mistakes


@pytest.mark.parametrize(
    ("mistake", "remedy"),
    [
        ("no keys", "NoCredentialsError.* AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"),
        ("no bucket", "got s3://no-such-bucket/run: .*create the bucket or"),
        *(
            (code, "correct the keys, or give their owner")
            for code in ("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch")
        ),
    ],
)
def test_a_mistake_is_refused_at_once_in_one_line_with_the_remedy(
    store, url, monkeypatch, fast, tmp_path, mistake, remedy
):
    if mistake == "no keys":
        no_keys(monkeypatch, tmp_path)
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint_url)
    monkeypatch.setattr(store, "fault", "" if mistake.startswith("no ") else mistake)
    place = Storage("s3://no-such-bucket/run" if mistake == "no bucket" else url, "champion")
    for action in (place.check_access, lambda: place.read("a"), place.names):
        with raises_one_line(StorageDenied, match=f"champion: .*{remedy}"):
            action()


def test_credentials_that_worked_and_are_gone_are_waited_for(
    store, url, monkeypatch, fast, tmp_path
):
    Storage(url).write("a", b"")  # a pod's identity is a service that can be away for a moment
    no_keys(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint_url)
    with pytest.raises(StorageUnavailable):
        Storage(url, timeout=0.5).read("a")


def test_clocks_that_differ_are_waited_for(store, url, fast):
    place = Storage(url)
    for action in (
        lambda: place.write("a", b"1"),
        lambda: place.read("a"),
        place.names,
    ):
        store.fault = "RequestTimeTooSkewed"
        threading.Timer(0.5, lambda: setattr(store, "fault", "")).start()
        action()


def test_keys_that_have_expired_are_refused_at_once_also_in_an_answer_without_a_body(
    store, url, fast, monkeypatch
):
    place = Storage(url)
    place.write("a", b"1")
    monkeypatch.setattr(store, "fault", "ExpiredToken")
    path = place.path_of("a")
    for action in (
        lambda: place.write("a", b"1"),
        lambda: place.read("a"),
        lambda: place.retry(lambda: place.file_system.info(path, refresh=True)),  # a HEAD
    ):
        with pytest.raises(StorageDenied, match=r"ExpiredToken.*; renew the keys$"):
            action()


def test_a_value_error_of_a_stores_client_is_an_outage_in_mid_run_and_the_users_at_the_start(
    tmp_path, fast
):
    def fail():
        raise ValueError("Expecting value: line 1 column 1")  # a proxy's page in place of JSON

    place = Storage(f"memory://{tmp_path.name}", timeout=0)
    with pytest.raises(StorageDenied):
        place.retry(fail)
    place.write("a", b"")
    with pytest.raises(StorageUnavailable):
        place.retry(fail)


def test_a_directory_in_which_nothing_can_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in ("/proc/run", str(tmp_path / "file" / "below")):
        with pytest.raises(
            ConfigError,
            match="checkpoints: expected a place .*where this process may read and create",
        ):
            Storage(path, timeout=0).check_access()


# Configuration


def test_flyte_s_variables_are_enough(store, url, monkeypatch, tmp_path):
    no_keys(monkeypatch, tmp_path)
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", store.endpoint_url)
    monkeypatch.setenv("FLYTE_AWS_ACCESS_KEY_ID", "flyte-key")
    monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "flyte-secret")
    store.requests.clear()
    Storage(url).check_access()

    assert all("Credential=flyte-key/" in authorization for *_, authorization in store.requests)
    assert storage_environment() == {
        "AWS_ACCESS_KEY_ID": "flyte-key",
        "AWS_SECRET_ACCESS_KEY": "flyte-secret",
        "AWS_ENDPOINT_URL": store.endpoint_url,
    }


FLYTES = {
    "FLYTE_AWS_ENDPOINT": "http://flyte",
    "FLYTE_AWS_ACCESS_KEY_ID": "flyte-key",
    "FLYTE_AWS_SECRET_ACCESS_KEY": "flyte-secret",
}
AZURES = {"ACCOUNT_NAME": "account", "ACCOUNT_KEY": "a2V5"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"AWS_ACCESS_KEY_ID": "mine"}, {"AWS_ACCESS_KEY_ID": "mine"}),  # whole groups
        ({"AWS_PROFILE": "mine"}, {}),
        (
            {f"FLYTE_AZURE_STORAGE_{name}": value for name, value in AZURES.items()},
            {
                "AWS_ACCESS_KEY_ID": "flyte-key",
                "AWS_SECRET_ACCESS_KEY": "flyte-secret",
                **{f"AZURE_STORAGE_{name}": value for name, value in AZURES.items()},
            },
        ),
    ],
)
def test_explicit_variables_win_over_flyte_s(monkeypatch, tmp_path, given, expected):
    no_keys(monkeypatch, tmp_path)
    for name, value in {**FLYTES, **given}.items():
        monkeypatch.setenv(name, value)
    assert storage_environment() == {"AWS_ENDPOINT_URL": "http://flyte", **expected}
    if "FLYTE_AZURE_STORAGE_ACCOUNT_KEY" in given:
        assert open_filesystem("abfs://container/path")[0].account_key == "a2V5"


def test_another_process_adopts_only_missing_credentials(monkeypatch, tmp_path):
    no_keys(monkeypatch, tmp_path)
    given = {
        "AWS_ACCESS_KEY_ID": "1",
        "AWS_SECRET_ACCESS_KEY": "2",
        "AWS_SESSION_TOKEN": "3",
        "AWS_ENDPOINT_URL": "4",
    }
    monkeypatch.setenv("FLYTE_AWS_ACCESS_KEY_ID", "own")
    monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "own")
    for name in given:
        # The next line sets these variables, and monkeypatch restores them.
        monkeypatch.setenv(name, "")
    storage.adopt_storage_environment(given)

    assert storage_environment() == {
        "AWS_ACCESS_KEY_ID": "own",
        "AWS_SECRET_ACCESS_KEY": "own",
        "AWS_ENDPOINT_URL": "4",
    }


def test_file_systems_with_different_keys_are_not_shared(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    found = []
    for key in ("one", "one", "two"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        found.append(open_filesystem("s3://bucket")[0])
    assert found[0] is found[1]
    assert found[0] is not found[2]


@pytest.mark.parametrize("scheme", ["s3", "gs", "abfs"])
def test_a_client_without_the_private_names_keeps_its_own_limits(scheme):
    """Tests of stores that hang, and of missing buckets, show that each name still helps."""
    client = types.SimpleNamespace(service_client=types.SimpleNamespace())
    before = dict(vars(client))
    CLIENTS[scheme].limit_requests(client)
    assert vars(client) == before


def test_only_storage_opens_urls():
    opens = re.compile(r"\bfsspec\.|(import|from) (fsspec|s3fs|gcsfs|adlfs|boto)")
    found = [
        f"{file.relative_to(REPOSITORY)}:{number}: {line.strip()}"
        for package in ("flyte_ddp", "tasks", "workflows")
        for file in sorted((REPOSITORY / package).rglob("*.py"))
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if opens.search(line)
    ]
    places = {line.partition(":")[0] for line in found}
    assert places == {"flyte_ddp/storage/filesystem.py"}, found


def test_a_process_that_used_a_store_exits_silently(store, url, tmp_path):
    """flytekit leaves its own session open. The session's client ends the process with "Unclosed
    client session".
    """
    program = """
import sys, threading
from flyte_ddp.storage.clients import timeouts
from flyte_ddp.storage import Storage
from flytekit.configuration import DataConfig
from flytekit.core.data_persistence import FileAccessProvider
url, directory = sys.argv[1:]
place = Storage(url)
place.write("a", b"1")
thread = threading.Thread(target=Storage(url).read, args=("a",))
thread.start()
thread.join()
flyte = FileAccessProvider(directory, url, DataConfig.auto())
flyte.get_data(url + "/a", directory + "/a")
"""
    command = [sys.executable, "-c", program, url, str(tmp_path)]
    flyte = {
        "FLYTE_AWS_ENDPOINT": store.endpoint_url,
        "FLYTE_AWS_ACCESS_KEY_ID": "key",
        "FLYTE_AWS_SECRET_ACCESS_KEY": "secret",
    }
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**os.environ, **flyte}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "url",
    [
        "s3://",
        "gs://",
        "s3:///x",
        "s3:/bucket/x",
        "s3:",
        "s3:bucket",
        "https:///x",
        "abfs://?a=b",
        "file://",
        "",
        "simplecache::s3://",
        "zip://x::https://",
    ],
)
def test_a_url_without_its_place_is_refused_in_one_line(url, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = "expected a path, or a URL with a host or bucket such as s3://bucket/directory, got "
    for enter in (
        lambda: Storage(url, "place"),
        lambda: open_filesystem(url, "place"),
        lambda: read_file(url, "place"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"place: {line}")):
            enter()
    (tmp_path / "train.py").write_text("raise AssertionError")
    assert command_line.main(["run", f"--checkpoints={url}", "train.py"]) == 2
    assert f"error: --checkpoints: {line}" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("name", ["plain", "with:colon", "s3", "x::y", "C:", "trailing/"])
def test_a_path_is_a_path_whatever_its_name(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in (name, f"file://{tmp_path}/{name}"):
        Storage(place).write("a", place.encode())
        assert (tmp_path / name / "a").read_bytes() == place.encode()


def test_a_full_disk_is_one_line_until_something_is_written_again(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left")

    place = Storage(str(tmp_path), timeout=0)
    place.write("before", b"x")
    with monkeypatch.context() as patch:
        patch.setattr(directory.os, "replace", fail)
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match="is full"):
                place.write("after", b"y")
            assert place.read("before") == b"x"
    place.write("after", b"z")
    begin, end = caplog.messages
    assert begin.startswith(f"the disk of {tmp_path} is full: ")
    assert re.fullmatch(rf"{tmp_path} has space again after \d+ s", end)


def test_a_host_name_that_is_not_found_is_told():
    error = RuntimeError('Could not connect to the endpoint URL: "http://store:9"')
    error.__context__ = socket.gaierror(-3, "Temporary failure in name resolution")
    assert describe(error).endswith('"http://store:9" (Temporary failure in name resolution)')
