"""Distributed PyTorch training: a recipe, or a function of your own, on one machine or a Dask
cluster.

It does not know Flyte. Start reading at `flyte_ddp.training.trainer`, the training loop.
`flyte_ddp.launch.control.driver` is the loop of attempts around it; `flyte_ddp.recipes` has models
with their data.

`Recipe`, its kinds `Regression`, `MultiLabel` and `Segmentation`, and `DataError` are for your own
recipes, `load_champion` is for serving, `train` trains a recipe, `predict` predicts new data, `run`
calls a function of yours in every rank, `sweep` with many arguments, and `session` is what that
function may ask of its run. Each is imported at its first use, so `import flyte_ddp` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flyte_ddp import session
    from flyte_ddp.errors import DataError
    from flyte_ddp.launch.run import run
    from flyte_ddp.launch.train import train
    from flyte_ddp.prediction.predict import predict
    from flyte_ddp.promotion.champion import load_champion
    from flyte_ddp.recipes.base import Recipe
    from flyte_ddp.recipes.problems import MultiLabel, Regression, Segmentation
    from flyte_ddp.studies.sweep import sweep

_HOMES = {
    "DataError": "flyte_ddp.errors",
    "MultiLabel": "flyte_ddp.recipes.problems",
    "Recipe": "flyte_ddp.recipes.base",
    "Regression": "flyte_ddp.recipes.problems",
    "Segmentation": "flyte_ddp.recipes.problems",
    "load_champion": "flyte_ddp.promotion.champion",
    "predict": "flyte_ddp.prediction.predict",
    "run": "flyte_ddp.launch.run",
    "sweep": "flyte_ddp.studies.sweep",
    "train": "flyte_ddp.launch.train",
}

__all__ = [
    "DataError",
    "MultiLabel",
    "Recipe",
    "Regression",
    "Segmentation",
    "load_champion",
    "predict",
    "run",
    "session",
    "sweep",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "session":  # a module, which only its own import makes an attribute
        return importlib.import_module("flyte_ddp.session")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
