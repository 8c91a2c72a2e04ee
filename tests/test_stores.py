"""Google's and Azure's stores by their emulators: runs, ownership, outages and mistakes; other
files have the rest.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from flyte_ddp.checkpoints.ownership import read_owner
from flyte_ddp.errors import ConfigError, StorageDenied, StorageUnavailable
from flyte_ddp.storage import Storage, directory, filesystem
from tests.support.dask_runs import eventually
from tests.support.emulators import PROGRAMS, abfs, gs  # noqa: F401 - fixtures
from tests.support.image_store import image_tree, prepare, write_tree
from tests.support.runs import how_it_ended, new_run, start_parent
from tests.test_checkpoint import load_state, take_away
from tests.test_storage import fast  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow
REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(params=PROGRAMS)
def emulator(request):
    return request.getfixturevalue(request.param)


def steps_of(url):
    return sorted(
        name for name in Storage(url).names() if name.startswith("step-") and name.endswith(".json")
    )


def kill(parent):
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait()


def test_a_killed_run_resumes_through_outages_to_the_same_weights(
    emulator, tmp_path, finished_run, monkeypatch
):
    url = emulator.new_bucket() + "/run"
    monkeypatch.setenv("STEP_SECONDS", "1")
    parent = start_parent(tmp_path, checkpoints=url, checkpoint_interval=1)
    assert eventually(lambda: steps_of(url), timeout=200)
    kill(parent)
    monkeypatch.setenv("STEP_SECONDS", "0.2")
    run = new_run(tmp_path)
    take_away(emulator.refusing, 2)  # while the run starts
    steps = take_away(emulator.refusing, 2, run, 15)
    run.train(2, checkpoints=url, checkpoint_interval=1)

    assert 0 < run.loaded.step < 15
    assert steps[1] > steps[0]
    for expected in ("cannot be reached", "answers again"):  # once, for the outage in mid-run
        assert sum(expected in line for line in run.lines) == 1, run.lines
    state, whole = load_state(run.result.finished.model_state_url), finished_run("Tiny", 2).state()
    assert all(torch.equal(value, whole[name]) for name, value in state.items())


def test_one_of_two_simultaneous_drivers_gets_the_place(emulator, tmp_path, monkeypatch):
    monkeypatch.setenv("STEP_SECONDS", "60")  # none ends by itself
    url = emulator.new_bucket() + "/run"
    parents = [start_parent(tmp_path / name, checkpoints=url) for name in "ab"]
    try:
        assert eventually(lambda: any(parent.poll() is not None for parent in parents), timeout=200)
        (refused,) = [parent for parent in parents if parent.poll() is not None]
        (running,) = [parent for parent in parents if parent is not refused]
        name, message = how_it_ended(refused)
        assert (name, "belongs to process" in message) == ("ConfigError", True), message
        assert read_owner(Storage(url))[1].pid == running.pid
    finally:
        for parent in parents:
            if parent.poll() is None:
                kill(parent)


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
    assert ["answers again" in line for line in caplog.messages] == [False, True]


def test_a_store_that_hangs_is_away(emulator, fast, monkeypatch):  # noqa: F811
    monkeypatch.setattr(filesystem, "READ_TIMEOUT", 1.0)
    monkeypatch.setattr(filesystem, "MIN_UPLOAD_RATE", 8 << 20)
    url = emulator.new_bucket() + "/run"
    place = Storage(url, timeout=0)
    with emulator.hanging():
        # The connection's buffers take a part of these bytes.
        for action in (
            lambda: place.read("a"),
            lambda: place.write("a", bytes(12 << 20)),
            place.names,
        ):
            with pytest.raises(StorageUnavailable, match="could not be reached for 0 s") as caught:
                action()
            assert "\n" not in str(caught.value)
    place.timeout = 60
    place.write("a", b"2")
    assert place.read("a") == b"2"


def test_listings_show_what_other_processes_have_just_written_and_deleted(emulator):
    url = emulator.new_bucket() + "/run"
    program = (
        "import sys; from flyte_ddp.storage import Storage; place = Storage(sys.argv[1])\n"
        "for line in sys.stdin:\n"
        "    action, name = line.split()\n"
        "    print(place.write(name, b'1') if action == 'write' else place.delete(name))"
    )
    command = [sys.executable, "-u", "-c", program, url]
    place = Storage(url)
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        for action, name, names in (
            ("write", "a", ["a"]),
            ("write", "b", ["a", "b"]),
            ("delete", "a", ["b"]),
        ):
            before = place.names()
            print(action, name, file=other.stdin, flush=True)
            assert other.stdout.readline() == "None\n"
            assert sorted(place.names()) == names != before
        other.stdin.close()
    assert other.returncode == 0


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


def test_azure_gets_few_blocks_of_a_file_at_once(abfs, monkeypatch):  # noqa: F811
    """More would share the time that each may take, and hold memory, for each of some thousand
    blocks.
    """
    place, size, under_way, seen = Storage(abfs.new_bucket() + "/run"), 80 << 20, [], []
    transport = place.file_system.service_client._pipeline._transport
    send = transport.send

    async def count(*arguments, **options):
        under_way.append(1)
        seen.append(len(under_way))
        try:
            return await send(*arguments, **options)
        finally:
            under_way.pop()

    monkeypatch.setattr(transport, "send", count)
    place.write("a", bytes(size))
    assert len(place.read("a")) == size
    assert 1 < max(seen) <= 8


def test_a_data_set_in_a_store_is_prepared_and_read_as_on_a_disk(emulator, tmp_path):
    tree = image_tree()
    url = emulator.new_bucket() + "/images"
    for name, contents in tree.items():
        Storage(url).write(name, contents)
    on_disk, in_store = (tmp_path / "disk", tmp_path / "store")
    for each in (on_disk, in_store):
        each.mkdir()
    _, train, test, _ = prepare(write_tree(tree, tmp_path / "images"), on_disk)
    _, train_found, test_found, description = prepare(url, in_store)
    assert url in description
    assert [label for _, label in train_found] == [label for _, label in train]
    for (found, label), (expected, expected_label) in zip(test_found, test, strict=True):
        assert torch.equal(found, expected)
        assert label == expected_label


def test_a_missing_bucket_is_a_user_error_and_not_an_empty_one(emulator):
    place = Storage(f"{emulator.kind}://no-such-bucket/run", "champion")
    actions = (
        place.check_access,
        lambda: place.write("a", b""),
        place.names,
        lambda: place.replace("a", b"1", b""),
    )
    for action in (*actions, lambda: place.read("a")):
        with pytest.raises(
            StorageDenied,
            match=(
                r"champion: .*://no-such-bucket/run: .*create the "
                r"bucket or"
            ),
        ) as caught:
            action()
        assert "\n" not in str(caught.value)
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
        with pytest.raises(
            StorageDenied, match="; correct the keys, or give their owner the permission$"
        ) as caught:
            action()
        assert "\n" not in str(caught.value)
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
    with pytest.raises(
        StorageDenied,
        match=(
            r"give this process credentials: "
            r".*AZURE_STORAGE_\*"
        ),
    ) as caught:
        Storage("abfs://container/run").read("a")
    assert "\n" not in str(caught.value)
    assert not caplog.records


@pytest.fixture
def google(monkeypatch):
    """A store that refuses as Google's does, which the emulator cannot; `google.status` is what it
    answers.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            error = {
                "code": server.status,
                "message": "The caller does not have storage.objects access",
            }
            body = json.dumps({"error": error}).encode()
            self.send_response(server.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

        do_POST = do_DELETE = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


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
        with pytest.raises(StorageDenied, match=remedy) as caught:
            action()
        assert "\n" not in str(caught.value)
    assert not caplog.records


@pytest.mark.parametrize("status", [429, 503])
def test_google_s_store_that_is_overloaded_is_waited_for_in_one_line(google, fast, caplog, status):  # noqa: F811
    google.status = status
    with pytest.raises(StorageUnavailable, match="could not be reached for 0.5 s"):
        Storage(f"gs://answers-{status}/run", timeout=0.5).read("a")
    assert len(caplog.records) == 1
