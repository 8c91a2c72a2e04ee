"""Prepared data from a store: with Flyte's keys alone, with a signed URL, and while the store is
away.
"""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from flyte_ddp.errors import DataError
from flyte_ddp.recipes import Recipe, get_recipe
from flyte_ddp.recipes.prepare import describe_data, prepare_data, recipe_version

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
