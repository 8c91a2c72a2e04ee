"""Distributed PyTorch training: a recipe's loop with DistributedDataParallel on one machine or a Dask cluster.

It does not know Flyte. Start reading at `flyte_ddp.rank.trainer`, the training loop. `flyte_ddp.launch.spawn` starts
and watches the ranks; `flyte_ddp.recipes` has models with their data.

`Recipe` and `DataError` are for your own recipes, `load_champion` is for serving. Each is imported at its first use, so
`import flyte_ddp` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flyte_ddp.errors import DataError
    from flyte_ddp.promotion.champion import load_champion
    from flyte_ddp.recipes.base import Recipe

_HOMES = {
    "DataError": "flyte_ddp.errors",
    "Recipe": "flyte_ddp.recipes.base",
    "load_champion": "flyte_ddp.promotion.champion",
}

__all__ = ["DataError", "Recipe", "load_champion"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
