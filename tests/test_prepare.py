"""Prepared data from a store: with Flyte's keys alone, with a signed URL, and while the store is
away.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flyte_ddp import storage
from flyte_ddp.errors import DataError, StorageDenied, StorageUnavailable
from flyte_ddp.recipes import Recipe, get_recipe
from flyte_ddp.recipes.prepare import describe_data, prepare_data, recipe_version
from tests.support.runs import REPOSITORY

NAMES = "\n".join(f"{first}{second}o" for first in "bcdfgh" for second in "aeiou")


def test_data_is_read_with_the_keys_that_flyte_gives_a_task(store, tmp_path, monkeypatch):
    url = store.fill({"names.txt": NAMES.encode()})
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLYTE_AWS_ENDPOINT", store.endpoint_url)
    monkeypatch.setenv("FLYTE_AWS_ACCESS_KEY_ID", "flyte-key")
    monkeypatch.setenv("FLYTE_AWS_SECRET_ACCESS_KEY", "flyte-secret")
    prepare_data(get_recipe("pet_names"), f"{url}/names.txt", tmp_path)

    assert f"pet names from {url}/names.txt: 30 usable" in describe_data(tmp_path)["description"]
    (tmp_path / "mnist").mkdir()
    with pytest.raises(DataError, match=f"got {url}, which holds no train-images"):
        prepare_data(get_recipe("mnist"), url, tmp_path / "mnist")
    assert store.requests
    assert all("Credential=flyte-key/" in key for *_, key in store.requests)


def test_neither_the_note_nor_an_error_holds_a_signature(store, tmp_path):
    url = store.fill({"names.txt": NAMES.encode(), "few.txt": b"rex"}).replace(
        "s3://", f"{store.endpoint_url}/"
    )
    prepare_data(get_recipe("pet_names"), f"{url}/names.txt?X-Amz-Signature=secret", tmp_path)

    assert f"{url}/names.txt?X-Amz-Signature=..." in describe_data(tmp_path)["description"]
    for name in ("few.txt", "missing.txt"):
        with pytest.raises(DataError, match="X-Amz-Signature=...") as caught:
            prepare_data(get_recipe("pet_names"), f"{url}/{name}?X-Amz-Signature=secret", tmp_path)
        assert "secret" not in str(caught.value)

    class Own(Recipe):
        def prepare(self, source, directory):
            raise DataError(f"data: {source} is not what this recipe reads")

    with pytest.raises(DataError, match="^data: https://...@host/a is not what"):
        prepare_data(Own(), "https://me:secret@host/a", tmp_path)


@pytest.mark.parametrize(
    ("fault", "error"), [("unavailable", StorageUnavailable), ("AccessDenied", StorageDenied)]
)
def test_an_unreachable_store_is_recoverable_and_a_refusal_is_a_user_error(
    store, tmp_path, monkeypatch, fault, error
):
    monkeypatch.setattr(storage.Storage.__init__, "__defaults__", ("checkpoints", 1.0))
    monkeypatch.setattr(storage.read_file, "__defaults__", ("url", 1.0))
    url = store.fill({"names.txt": NAMES.encode()})
    store.fault = fault
    try:
        for recipe in ("pet_names", "mnist"):
            with pytest.raises(error, match="^data: "):
                prepare_data(get_recipe(recipe), f"{url}/names.txt", tmp_path)
        monkeypatch.setattr("flyte_ddp.recipes.image_folder.files.STORE_TIMEOUT", 1.0)
        images = get_recipe("image_folder")
        with pytest.raises(error, match="^data: "):
            prepare_data(images, url, tmp_path)
    finally:
        store.fault = ""


def test_what_ranks_of_this_machine_import_is_imported_while_the_data_are_prepared():
    code = (
        "from multiprocessing.forkserver import _forkserver as server\n"
        "from tasks.train import prepare\n"
        "prepare(recipe='digits')\n"
        "assert server._forkserver_pid is None\n"
        "prepare(recipe='digits', trains_here=True)\n"
        "assert server._preload_modules[0] == 'torch' and server._forkserver_pid\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_several_runs_of_a_process_may_hash_their_recipes_at_once():
    def switch_threads(*_):
        time.sleep(0.0001)

    thresholds = gc.get_threshold()
    gc.callbacks.append(switch_threads)
    gc.set_threshold(50)
    try:
        with ThreadPoolExecutor(3) as threads:
            versions = list(threads.map(recipe_version, ["tests.support.recipes"] * 9))
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(switch_threads)
    assert len(set(versions)) == 1
