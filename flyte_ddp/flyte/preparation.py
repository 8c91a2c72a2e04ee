"""Fetch and check a recipe's data, once, before any GPU is requested."""

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
    """Return the key of a training task's cache: the data and the recipe's code, but not the data's
    place.
    """
    note = describe_data(directory.path)
    return f"{note['fingerprint']}-{note['recipe_version']}"


PreparedData = Annotated[FlyteDirectory, HashMethod(_contents_hash)]


class Prepared(NamedTuple):
    """The inputs of the tasks that follow, resolved and checked."""

    data: PreparedData
    # The initial model state in the config has a checksum, because the training's cache compares
    # it too.
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
    """Check and resolve the inputs, and prepare the data of `recipe`: `source` or the recipe's own
    data.

    With `trains_here` in a local run, the ranks are processes of this machine. Then their modules
    are imported meanwhile.

    Example:
        @task(**flyte.pod(flyte.SETTINGS.small), retries=2)
        def prepare(recipe: str, source: flyte.OptionalSource = None) -> flyte.Prepared:
            return flyte.prepare(recipe=recipe, source=source)
    """
    if trains_here and not is_flyte_task():
        built_in = None
        if recipe in BUILTIN:  # The import of any other recipe may itself take seconds.
            built_in = get_recipe(recipe)
        start_server(slow_imports(given(config), built_in))
    resolved = check_config(config_of(recipe, given(config)))
    check_cluster(cluster)
    check_urls(data=location(source))
    directory = Path(flytekit.current_context().working_directory, "data")
    directory.mkdir(parents=True)
    prepare_data(get_recipe(recipe, resolved.recipe_options), location(source), directory)
    return Prepared(FlyteDirectory(str(directory)), resolved, cluster or ClusterInput())
