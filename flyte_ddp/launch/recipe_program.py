"""Make the program that trains a recipe.

Agents, and the ranks of a function, run programs of any kind. They do not import this module, so
they import no recipe.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pickle
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyte_ddp.code import by_value
from flyte_ddp.code.source_code import find_packages, list_packages
from flyte_ddp.config import TrainingConfig
from flyte_ddp.launch.protocol.caller_logging import CallerLogging
from flyte_ddp.launch.protocol.programs import Kind, Program
from flyte_ddp.launch.protocol.ranks import TRAINING
from flyte_ddp.project.admission import places_of_config
from flyte_ddp.recipes import Recipe, get_recipe, name_of, path_of, pin_initial_state
from flyte_ddp.storage import check_places, list_client_modules
from flyte_ddp.storage.state_dict_file import describe_missing


def recipe_program(recipe: str | type[Recipe], config: TrainingConfig) -> Program:
    """Return the program that trains a recipe. The present contents of the initial state count: see
    `pin_initial_state`.

    Args:
        recipe: its name, or a class that travels by value.

    Raises:
        ConfigError: an unknown recipe or option, or a place that this task may not open.
    """
    check_places(places_of_config(config))  # the config may come from anywhere
    named = get_recipe(recipe, config.recipe_options)
    config = pin_initial_state(config)
    training = _Training(recipe, config)
    if isinstance(recipe, str):
        call, packages = pickle.dumps(training), list_packages(path_of(recipe))
    else:
        call = by_value.pickle(training, recipe, "recipe")
        packages = sorted(find_packages(recipe))
    return Program(
        name=name_of(recipe),
        call=call,
        packages=tuple(packages),
        slow_imports=slow_imports(dataclasses.asdict(config), named),
        kind=Kind.RECIPE,
        missing_state=describe_missing(config.initial_model_state),
        logging=CallerLogging.read(),
        needs=config.needs,
    )


def slow_imports(config: Mapping[str, Any], recipe: Recipe | None = None) -> tuple[str, ...]:
    """Return the slow modules that the ranks of a recipe import.

    Args:
        config: the fields of the config, or the fields that are known so far.
        recipe: None if it is not known yet.
    """
    modules = ["torch"]
    if recipe:
        modules += recipe.slow_imports
    if config.get("compile") or config.get("parallel") == "fsdp":
        # fsdp needs it to leave the gathering of weights out of graphs.
        modules.append("torch._dynamo")
    if (
        recipe
        and type(recipe).metrics is not Recipe.metrics
        and importlib.util.find_spec("torchmetrics")
    ):
        modules.append("torchmetrics")
    return (*modules, *list_client_modules(config))


@dataclass(frozen=True)
class _Training:
    """The training of a recipe."""

    recipe: str | type[Recipe]
    config: TrainingConfig

    def __call__(self) -> bytes:
        pkgutil.resolve_name(TRAINING)(self.recipe, self.config)
        return b""
