"""The recipes by name. A recipe is named, not passed: a string starts it in any process on any machine.

Two kinds of names: those in `BUILTIN`, and the dotted name of a `Recipe` in any importable module, such as
`my_project.flowers.Flowers`. To add a recipe to this package, write one file here and one line in `BUILTIN`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import typing
from collections.abc import Mapping
from typing import Any

from flyte_ddp.config import TrainingConfig, resolve
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.fields import check
from flyte_ddp.recipes.base import Recipe

BUILTIN = {
    "digits": "flyte_ddp.recipes.digits.Digits",
    "image_folder": "flyte_ddp.recipes.image_folder.recipe.ImageFolder",
    "mnist": "flyte_ddp.recipes.mnist.Mnist",
    "pet_names": "flyte_ddp.recipes.pet_names.recipe.PetNames",
    "pet_name_windows": "flyte_ddp.recipes.pet_names.recipe.PetNameWindows",
}

__all__ = ["BUILTIN", "DataError", "Recipe", "config_of", "get_recipe"]


def config_of(name: str, overrides: Mapping[str, Any]) -> TrainingConfig:
    """The config of a run of recipe `name`: the user's `overrides` over the recipe's own defaults, options included.

    Raises:
        ConfigError: an unknown recipe, field or option, or a value of the wrong type or range.
    """
    recipe = get_recipe(name, overrides.get("recipe_options", {}))
    options = {field: getattr(recipe, field) for field in _option_types(recipe)}
    return resolve(recipe.defaults, {**overrides, "recipe_options": options})


def get_recipe(name: str, options: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe called `name`, told `options`: values for fields of its class, which then is a dataclass.

    Raises:
        ConfigError: `name` is neither built in nor the dotted name of a `Recipe` that can be imported; it has no such
            option, or refuses the value.
    """
    return _told(_found(name), name, options or {})


def _told(recipe: Recipe | type[Recipe], name: str, options: Mapping[str, Any]) -> Recipe:
    given: dict[str, Any] = check("recipe_options", options, dict[str, Any])
    types = _option_types(recipe)
    for option, value in given.items():
        if option not in types:
            accepted = f"accepted are {', '.join(types)}" if types else "it has none"
            raise ConfigError(f"recipe_options: recipe {name!r} has no option {option!r}; {accepted}")
        if types[option] in (int, float, bool, str):  # what else a recipe may want, it checks itself
            given[option] = check(f"recipe_options.{option}", value, types[option])
    try:
        if isinstance(recipe, Recipe):
            return dataclasses.replace(recipe, **given) if given else recipe  # type: ignore[type-var]
        return recipe(**given)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:  # an option without a default that is not given, or what the class refuses
        raise ConfigError(f"recipe_options: {given!r} is refused by recipe {name!r}: {error}") from error


def _option_types(recipe: Any) -> dict[str, Any]:
    """The options that `recipe` takes, with their types; none where it is no dataclass."""
    if not dataclasses.is_dataclass(recipe):
        return {}
    hints = typing.get_type_hints(recipe if isinstance(recipe, type) else type(recipe))
    return {field.name: hints[field.name] for field in dataclasses.fields(recipe) if field.init}


def _found(name: str) -> Recipe | type[Recipe]:
    path = BUILTIN.get(name, name).replace(":", ".")
    module_name, _, attribute = path.rpartition(".")
    accepted = f"accepted are {', '.join(sorted(BUILTIN))}, or the dotted name of a Recipe, such as my_module.MyRecipe"
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path):
        raise ConfigError(f"recipe: {name!r} is unknown; {accepted}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing dependency of the user's module is the user's news, not "unknown recipe".
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(f"recipe: {name!r} is unknown: there is no module {error.name!r}; {accepted}") from None
        raise ConfigError(f"recipe: {name!r} cannot be imported: {error}; install what its module needs") from error
    except Exception as error:  # of any kind: the module is the user's
        raise ConfigError(
            f"recipe: {name!r} cannot be imported: {type(error).__name__}: {error}; accepted is a module that imports"
        ) from error
    found = getattr(module, attribute, None)
    if not isinstance(found, Recipe) and not (isinstance(found, type) and issubclass(found, Recipe)):
        raise ConfigError(f"recipe: {name!r} names no Recipe in module {module_name}; {accepted}")
    return found
