"""Recipe text for tests: small, with prepared data."""

from __future__ import annotations

import ctypes
import sys

from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.prepare import describe_data, prepare_data
from flyte_ddp.recipes.text.recipe import Text

TINY = {"layers": 2, "width": 16, "heads": 2, "context": 8}


def new_recipe(**options):
    return get_recipe("text", {**TINY, **options})


def prepared(directory, source="", **options):
    """The recipe after `prepare` and `datasets`, the datasets, and the description."""
    recipe, data = new_recipe(**options), directory / "data"
    data.mkdir()
    prepare_data(recipe, str(source), data)
    return recipe, recipe.datasets(data), describe_data(data)["description"]


class _MallocState(ctypes.Structure):
    """The result of `mallinfo`; `hblks` counts the blocks that are mapped alone."""

    _fields_ = [
        (name, ctypes.c_int)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
        )
    ] + [("keepcost", ctypes.c_int)]


class MallocWatchingText(Text):
    """Adds a metric: 1 if malloc maps a block of 4 MiB alone, so that the kernel gets it back once
    it is freed.
    """

    def figures(self, epoch):
        return {**super().figures(epoch), "maps_blocks": float(_maps_blocks(4 << 20))}


def _maps_blocks(size):
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    libc.mallinfo.restype, libc.malloc.restype = _MallocState, ctypes.c_void_p
    before = libc.mallinfo().hblks
    block = libc.malloc(size)
    is_mapped = libc.mallinfo().hblks > before
    libc.free(ctypes.c_void_p(block))
    return is_mapped
