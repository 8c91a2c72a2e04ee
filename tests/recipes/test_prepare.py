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

from flyte_ddp.errors import DataError
from flyte_ddp.recipes import Recipe, get_recipe
from flyte_ddp.recipes.prepare import describe_data, prepare_data, recipe_version
from tests.support.runs import REPOSITORY

NAMES = "\n".join(f"{first}{second}o" for first in "bcdfgh" for second in "aeiou")


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


def test_what_ranks_of_this_machine_import_is_imported_while_the_data_are_prepared():
    code = (
        "from multiprocessing.forkserver import _forkserver as server\n"
        "from tasks.train import prepare\n"
        "prepare(recipe='digits')\n"
        "assert server._forkserver_pid is None\n"
        "prepare(recipe='digits', trains_here=True)\n"
        "assert 'torch' in server._preload_modules and server._forkserver_pid\n"
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
