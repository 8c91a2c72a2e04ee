"""Shards of samples, of any size, the order in which an epoch visits them, and a loader for any
loop.
"""

import importlib
from typing import Any

from flyte_ddp.data.mixture import Mixture
from flyte_ddp.data.packed import Packed
from flyte_ddp.data.shards import Shards

__all__ = ["Mixture", "Packed", "Shards", "loader"]


def __getattr__(name: str) -> Any:
    # A loader shares batches between ranks, and this folder knows no ranks.
    if name == "loader":
        return importlib.import_module("flyte_ddp.rank.loader").loader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
