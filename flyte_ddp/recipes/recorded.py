"""The options of a recipe, from the record of a run in which it was trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes import Recipe, default_options, get_recipe
from flyte_ddp.storage.recorded_config import OPTIONS, RecordedConfig


def restore_options(
    recipe: str | type[Recipe], trained: RecordedConfig, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options with which a recipe was trained, and what is given besides.

    A value that the record hides has to be given, unless it is the option's default.

    Raises:
        ConfigError: a hidden value is not given, or a given value differs from the training's.
    """
    recorded = {
        name.removeprefix(f"{OPTIONS}."): value
        for name, value in trained.shown.items()
        if name.startswith(f"{OPTIONS}.")
    }
    options, defaults = {**recorded, **given}, default_options(recipe)
    for option in recorded:
        name = f"{OPTIONS}.{option}"
        if option in given or not trained.is_hidden(name):
            continue
        if option not in defaults or not trained.is_same(name, defaults[option]):
            raise ConfigError(
                f"{name}: expected the value with which the model was trained, which its record "
                f'hides: give it by config, as {{"{OPTIONS}": {{"{option}": ...}}}}'
            )
        options[option] = defaults[option]
    changeable = get_recipe(recipe, options).changeable_options
    fixed = {f"{OPTIONS}.{name}": options[name] for name in recorded if name not in changeable}
    trained.check(fixed, ", with which the model was trained")
    return options
