"""The task that fetches and checks a recipe's data, once, before any GPU is asked for."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from flytekit import HashMethod, task
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.prepare import describe_data, prepare_data
from flyte_ddp.recipes import config_of, get_recipe
from tasks.inputs import InputError, Source, TrainingOverrides, given, location
from tasks.resources import SMALL_TASK


def _contents_hash(directory: FlyteDirectory) -> str:
    """What the training task's cache compares: which data it is and which recipe's code, not where it lies."""
    note = describe_data(directory.path)
    return f"{note['fingerprint']}-{note['recipe_version']}"


PreparedData = Annotated[FlyteDirectory, HashMethod(_contents_hash)]


# Not cached: what lies behind a URL may have changed. The training task is, by the contents of what this one returns.
@task(**SMALL_TASK, retries=2)
def prepare(recipe: str, config: TrainingOverrides, source: Source | None = None) -> PreparedData:
    """Check the inputs, and prepare the data of `recipe` from `source`, or its own data where there is none."""
    try:
        found = get_recipe(recipe, config_of(recipe, given(config)).recipe_options)
        directory = Path(tempfile.mkdtemp(prefix="data-"))
        prepare_data(found, location(source), directory)
    except (ConfigError, DataError) as error:
        raise InputError(str(error)) from error
    return FlyteDirectory(str(directory))
