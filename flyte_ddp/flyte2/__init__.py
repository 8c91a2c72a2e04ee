"""The Flyte 2 side of the library. Only this package imports the SDK, the package `flyte`.

import flyte
from flyte_ddp import flyte2

env = flyte2.environment("training", flyte2.SETTINGS.training, gpus=flyte2.SETTINGS.gpus)

@env.task(retries=3, report=True)
def train(recipe: str, config: dict = {}) -> flyte2.TrainingOutputs:
    return flyte2.train(recipe, config)

`Distributed` is for a task with a training function of its own. Each name is imported at its first
use.
"""

from __future__ import annotations

import importlib
import re
from importlib import metadata
from typing import Any

from flyte_ddp.errors import ConfigError

MIN_VERSION = (2, 12)  # oldest version of the SDK that works
# public names by the module that defines them
_HOMES = {
    "flyte_ddp.project.settings": "SETTINGS",
    "flyte_ddp.flyte2.distributed": "Distributed",
    "flyte_ddp.flyte2.environments": "environment schedule",
    "flyte_ddp.flyte2.prediction": "PredictionOutputs predict",
    "flyte_ddp.flyte2.retraining": "Retraining RetrainingOutputs challenge keep_champion "
    "plan_retraining",
    "flyte_ddp.flyte2.training": "SweepOutputs TrainingOutputs sweep train",
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names.split():
            _check_sdk()
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _check_sdk() -> None:
    try:
        found = metadata.version("flyte")
    except metadata.PackageNotFoundError:
        found = ""
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < MIN_VERSION:
        least = ".".join(map(str, MIN_VERSION))
        raise ConfigError(
            f"flyte: expected the SDK of Flyte 2, {least} or newer, got {found or 'none'}: pip "
            f'install "flyte>={least}"'
        )
