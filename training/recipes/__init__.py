"""The recipes by name. A recipe is named, not passed: a string starts it in any process on any machine.

Two kinds of names: those in `BUILTIN`, and the dotted name of a `Recipe` in any importable module, such as
`my_project.flowers.Flowers`. To add a recipe to this package, write one file here and one line in `BUILTIN`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re

from training.config import ConfigError
from training.recipes.base import DataError, Recipe

BUILTIN = {
    "digits": "training.recipes.digits.Digits",
    "mnist": "training.recipes.mnist.Mnist",
    "pet_names": "training.recipes.pet_names.PetNames",
    "pet_name_windows": "training.recipes.pet_names.PetNameWindows",
}

__all__ = ["BUILTIN", "DataError", "Recipe", "get_recipe"]


def get_recipe(name: str) -> Recipe:
    """The recipe called `name`.

    Raises:
        ConfigError: `name` is neither built in nor the dotted name of a `Recipe` that can be imported.
    """
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
    if isinstance(found, type) and issubclass(found, Recipe):
        found = found()
    if not isinstance(found, Recipe):
        raise ConfigError(f"recipe: {name!r} names no Recipe in module {module_name}; {accepted}")
    return found
