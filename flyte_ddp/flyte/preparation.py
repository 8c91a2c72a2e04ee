"""Fetch and check a recipe's data, once, before any GPU is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import flytekit
from flytekit import HashMethod
from flytekit.types.directory import FlyteDirectory

from flyte_ddp.config import TrainingConfig
from flyte_ddp.flyte.flyte_context import is_flyte_task
from flyte_ddp.flyte.inputs import (
    ClusterInput,
    OptionalCluster,
    OptionalOverrides,
    OptionalSource,
    given,
    location,
)
from flyte_ddp.flyte.task import (
    check_cluster,
    check_config,
    check_urls,
    task_body,
)
from flyte_ddp.launch.agent.rank_start import start_server
from flyte_ddp.launch.recipe_program import slow_imports
from flyte_ddp.recipes import BUILTIN, config_of, get_recipe
from flyte_ddp.recipes.prepare import describe_data, prepare_data


def _contents_hash(directory: FlyteDirectory) -> str:
    """Return what the cache of a training task compares: the data and the recipe's code, not where
    the data lie.
    """
    note = describe_data(directory.path)
    return f"{note['fingerprint']}-{note['recipe_version']}"


PreparedData = Annotated[FlyteDirectory, HashMethod(_contents_hash)]


class Prepared(NamedTuple):
    """The inputs of the tasks that follow, resolved and checked."""

    data: PreparedData
    # its initial model state with a checksum, which the cache of a training compares too
    config: TrainingConfig
    cluster: ClusterInput


@task_body
def prepare(
    recipe: str,
    config: OptionalOverrides = None,
    source: OptionalSource = None,
    cluster: OptionalCluster = None,
    trains_here: bool = False,
) -> Prepared:
    """Check and resolve the inputs, and prepare the data of `recipe`, from `source` or the recipe's
    own.

    In a local run `trains_here` says that the ranks are processes of this machine: what they import
    is imported meanwhile.
    """
    if trains_here and not is_flyte_task():
        # to import another may take as long
        built_in = get_recipe(recipe) if recipe in BUILTIN else None
        start_server(slow_imports(given(config), built_in))
    resolved = check_config(config_of(recipe, given(config)))
    check_cluster(cluster)
    check_urls(data=location(source))
    directory = Path(flytekit.current_context().working_directory, "data")
    directory.mkdir(parents=True)
    prepare_data(get_recipe(recipe, resolved.recipe_options), location(source), directory)
    return Prepared(FlyteDirectory(str(directory)), resolved, cluster or ClusterInput())
