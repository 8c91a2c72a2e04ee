"""Images in a bucket: each is requested once, with retries, and never read in part."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from flyte_ddp.errors import StorageUnavailable
from flyte_ddp.recipes.image_folder import files
from flyte_ddp.recipes.image_folder.files import FileReader, UnreadableImage, list_images
from tests.support.image_store import (
    COLOURS,
    image_bytes,
    image_tree,
    prepare,
)
from tests.support.runs import REPOSITORY

# In a bucket


def test_a_prefix_of_many_files_is_listed_page_by_page_and_judged_by_names(
    store, prepared, monkeypatch
):
    monkeypatch.setattr(files, "MAX_LOOKS", 2000)
    tree = {f"{name}/{number:04d}.png": b"-" for name in ("a", "b") for number in range(1100)}
    # some tools make such objects for folders
    url = store.fill(tree | {"a/": b"", "a/notes.txt": b"-"})
    before = len(store.requests)

    _, train, test, description = prepare(url, prepared)

    assert len(train) + len(test) == 2200
    assert description.endswith("; 1 file left out: 1 no image by their names")
    assert {method for method, *_ in store.requests[before:]} == {"GET"}
    assert len(store.requests) - before == 4  # the first one looks for shards
    pages = [query for _, _, query, *_ in store.requests[before:] if "list-type" in query]
    assert len(pages) == 3
    assert sum("continuation-token" in query for query in pages) == 2


def test_an_image_costs_one_request(store, prepared):
    url = store.fill(image_tree())
    _, train, _, _ = prepare(url, prepared)
    before = len(store.requests)

    train.prefetch(range(12))
    images = [train[sample][0] for sample in range(12)]

    assert len(images) == 12
    assert [method for method, *_ in store.requests[before:]] == ["GET"] * 12


@pytest.mark.parametrize("anonymous", [False, True])
def test_requests_are_signed_unless_anonymous(store, prepared, anonymous):
    url = store.fill(image_tree())
    before = len(store.requests)

    _, train, _, _ = prepare(url, prepared, anonymous=anonymous)
    train[0]

    assert not any(b"the-secret-key" in file.read_bytes() for file in prepared.iterdir())
    signatures = [bool(signature) for *_, signature in store.requests[before:]]
    assert len(signatures) >= 2
    assert set(signatures) == {not anonymous}


# With patience


def _one_file(store):
    """A reader of a bucket with a single image, and the image's file and contents."""
    contents = image_bytes(COLOURS["red"])
    url, [file], _ = list_images(store.fill({"a.png": contents}))
    store.requests.clear()
    return FileReader(url), file, contents


@pytest.mark.parametrize(
    ("fault", "error", "reason", "num_requests"),
    [
        ("throttle", StorageUnavailable, "could not be reached for 1 s: .*reduce your request", 1),
        (
            "short",
            UnreadableImage,
            r"/a.png cannot be read: expected the listed \d+ bytes, got \d+",
            3,
        ),
        ("gone", UnreadableImage, "/a.png cannot be read: FileNotFoundError", 1),
    ],
)
def test_retries_end_with_the_files_name_and_the_reason(
    store, monkeypatch, fault, error, reason, num_requests
):
    reader, file, _ = _one_file(store)
    monkeypatch.setattr(files, "READ_TIMEOUT", 1.0)
    store.faults["images/a.png"] = [fault] * 20
    if fault == "gone":
        store.delete(reader.url, "a.png")

    with pytest.raises(error, match=f"^data: .*{reason}"):
        reader.read(file)
    store.faults.clear()
    assert len(store.asked_for("a.png")) >= num_requests
    assert fault == "throttle" or len(store.asked_for("a.png")) == num_requests


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
