"""Images in a bucket or a cache: each is requested once, with retries, and never read in part."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from flyte_ddp.errors import DataError, StorageUnavailable
from flyte_ddp.recipes.image_folder.files import (
    Access,
    FileReader,
    UnreadableImage,
    list_files,
)
from tests.support.image_store import COLOURS, image_bytes, image_tree, prepare, running_store, write_tree
from tests.support.runs import REPOSITORY


@pytest.fixture(scope="module")
def store():
    with running_store() as store:
        yield store


# In a bucket


def test_a_prefix_is_listed_page_by_page(store, prepared):
    tree = {f"{name}/{number:04d}.png": b"" for name in ("a", "b") for number in range(1100)}
    url = store.fill(tree | {"a/": b""})  # some tools make such objects for folders
    before = len(store.requests)

    _, train, test, _ = prepare(url, prepared)

    assert len(train) + len(test) == 2200
    pages = [query for _, _, query, _ in store.requests[before:] if "list-type" in query]
    assert len(pages) == 3
    assert sum("continuation-token" in query for query in pages) == 2


def test_an_image_costs_one_request_and_a_process_opens_one_client(store, prepared, monkeypatch):
    clients = []
    url = store.fill(image_tree())
    _, train, _, _ = prepare(url, prepared)
    opened = FileReader._open_once
    monkeypatch.setattr(FileReader, "_open_once", lambda self: clients.append(opened(self)) or clients[-1])
    before = len(store.requests)

    train.prefetch(range(12))
    images = [train[sample][0] for sample in range(12)]

    assert len(images) == 12
    assert [method for method, *_ in store.requests[before:]] == ["GET"] * 12
    assert len({id(storage) for storage, _ in clients}) == 1


def test_neither_index_nor_note_nor_config_holds_credentials(store, prepared):
    prepare(store.fill(image_tree()), prepared)

    for file in prepared.iterdir():
        assert b"the-access-key" not in file.read_bytes()
        assert b"the-secret-key" not in file.read_bytes()


@pytest.mark.parametrize("anonymous", [False, True])
def test_requests_are_signed_unless_anonymous_and_go_to_the_endpoint_given(store, prepared, monkeypatch, anonymous):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    url = store.fill(image_tree())
    before = len(store.requests)

    _, train, _, _ = prepare(url, prepared, endpoint_url=store.endpoint_url, anonymous=anonymous)
    train[0]

    signatures = [bool(signature) for *_, signature in store.requests[before:]]
    assert len(signatures) >= 2
    assert set(signatures) == {not anonymous}


def test_options_of_object_stores_are_refused_elsewhere(tmp_path, prepared):
    with pytest.raises(DataError, match=r"anonymous: expected none with .* for s3:// and gs:// only"):
        prepare(write_tree(image_tree(), tmp_path / "tree"), prepared, anonymous=True)


# With patience


def _one_file(store, timeout=20.0, store_timeout=60.0, cache=""):
    """A reader of a bucket with a single image, and the image's file and contents."""
    contents = image_bytes(COLOURS["red"])
    url, [file] = list_files(store.fill({"a.png": contents}), Access())
    store.requests.clear()
    return FileReader(url, Access(timeout=timeout, store_timeout=store_timeout), cache=cache), file, contents


@pytest.mark.parametrize("fault", ["throttle", "cut", "short", "slow"])
def test_transient_errors_are_retried(store, fault):
    reader, file, contents = _one_file(store, timeout=2.0 if fault == "slow" else 60.0)
    store.faults["images/a.png"] = [fault]

    assert reader.read(file) == contents
    assert len(store.asked_for("a.png")) >= 2


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        (
            "throttle",
            StorageUnavailable,
            r".* could not be reached for 1 s: .*reduce your request rate",
        ),
        ("slow", StorageUnavailable, ".* could not be reached for 1 s: .*(Timeout|no answer)"),
        ("short", UnreadableImage, r"/a.png cannot be read: expected the listed \d+ bytes, got \d+"),
    ],
)
def test_retries_end_with_the_files_name_and_the_reason(store, fault, error, reason):
    reader, file, _ = _one_file(store, timeout=0.3 if fault == "slow" else 60.0, store_timeout=1.0)
    store.faults["images/a.png"] = [fault] * 20

    with pytest.raises(error, match=f"^data: .*{reason}"):
        reader.read(file)
    store.faults.clear()
    assert fault != "short" or len(store.asked_for("a.png")) == 3


def test_a_missing_file_is_requested_once(store):
    reader, file, _ = _one_file(store)
    store.delete(reader.url, "a.png")

    with pytest.raises(UnreadableImage, match="a.png cannot be read: FileNotFoundError"):
        reader.read(file)
    assert len(store.asked_for("a.png")) == 1


IN_A_FORK = """
import os, pickle, sys
reader, file = pickle.loads(bytes.fromhex(sys.argv[1]))
contents = reader.read(file)
pickle.dumps(reader)
child = os.fork()
if child == 0:
    os._exit(0 if reader.read(file) == contents else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_reader_goes_to_another_process_without_its_client(store):
    reader, file, _ = _one_file(store)
    reader.read(file)
    sent = pickle.dumps((reader, file)).hex()
    done = subprocess.run([sys.executable, "-c", IN_A_FORK, sent], cwd=REPOSITORY, timeout=120)

    assert done.returncode == 0
    assert len(store.asked_for("a.png")) == 3


# On disk


def test_read_files_are_cached_and_changed_ones_read_again(store, tmp_path):
    reader, file, contents = _one_file(store, cache=str(tmp_path / "cache"))
    assert [reader.read(file) for _ in range(3)] == [contents] * 3
    assert len(store.asked_for("a.png")) == 1

    other = image_bytes(COLOURS["blue"])
    changed = other + b"\0" * (len(contents) - len(other)) if len(other) < len(contents) else other[: len(contents)]
    store.put(reader.url, "a.png", changed)
    _, [newer] = list_files(reader.url, Access())

    assert newer.size == file.size
    assert reader.read(newer) == changed
    assert reader.read(file) == contents


def test_a_partial_file_in_the_cache_is_read_again(store, tmp_path):
    reader, file, contents = _one_file(store, cache=str(tmp_path / "cache"))
    reader.read(file)
    [kept] = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    kept.write_bytes(contents[:10])  # as a machine that lost its power leaves it

    assert reader.read(file) == contents
    assert kept.read_bytes() == contents


def test_a_killed_writer_leaves_no_partial_file(store, tmp_path, monkeypatch):
    reader, file, contents = _one_file(store, cache=str(tmp_path / "cache"))
    file = dataclasses.replace(file, size=-1)  # as from a store without sizes, where a partial file has no wrong size
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(Path, "write_bytes", lambda self, data: self.open("wb").write(data[:9]))
        with pytest.raises(KeyboardInterrupt):
            reader.read(file)

    assert len(list((tmp_path / "cache").rglob("*.tmp"))) == 1
    assert reader.read(file) == contents


def test_an_unwritable_cache_costs_only_speed_and_a_warning(store, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where a directory should be")
    reader, file, contents = _one_file(store, cache=str(tmp_path / "cache" / "below"))

    assert [reader.read(file), reader.read(file)] == [contents] * 2
    assert len([record for record in caplog.records if "going on without it" in record.getMessage()]) == 1


def test_two_processes_share_a_cache_and_never_see_a_part(store, tmp_path):
    tree = {f"{number:02d}.png": os.urandom(300_000) for number in range(12)}
    url, files = list_files(store.fill(tree), Access())
    readers = [FileReader(url, Access(), 4, str(tmp_path / "cache")) for _ in range(2)]
    store.requests.clear()

    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.starmap(FileReader.read_all, [(reader, files) for reader in readers * 2], chunksize=1)

    assert found == [list(tree.values())] * 4
    assert 12 <= len([path for _, path, *_ in store.requests if path.endswith(".png")]) <= 24
    kept = [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(kept) == sorted(tree.values())
