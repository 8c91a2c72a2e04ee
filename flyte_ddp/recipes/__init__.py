"""The recipes by name: a string starts one in any process on any machine.

Two kinds of names: those in `BUILTIN`, and the dotted name of a `Recipe` in any importable module,
such as `my_project.flowers.Flowers`. To add a recipe to this package, write one file here and one
line in `BUILTIN`. A class that cannot be imported elsewhere, such as a notebook's, stands for
itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import re
import sys
import traceback
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from flyte_ddp.code.by_value import is_by_value, pickle
from flyte_ddp.code.source_code import (
    extend_path,
    find_packages,
    importing_edits,
    list_packages,
    names_read,
)
from flyte_ddp.config import OWN, TrainingConfig, resolve
from flyte_ddp.config.extras import EXTRAS, how_to_install
from flyte_ddp.config.fields import check, check_object, expect_known, suggest
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.process.invocation import POD_VARIABLE
from flyte_ddp.recipes.base import Recipe, list_class_names
from flyte_ddp.storage.state_dict_file import pin_state

BUILTIN = {
    "digits": "flyte_ddp.recipes.digits.Digits",
    "image_folder": "flyte_ddp.recipes.image_folder.recipe.ImageFolder",
    "mnist": "flyte_ddp.recipes.mnist.Mnist",
    "pet_names": "flyte_ddp.recipes.pet_names.recipe.PetNames",
    "text": "flyte_ddp.recipes.text.recipe.Text",
}
REQUIRED = ("prepare", "datasets", "model")  # methods that a recipe defines itself
CHOICES = ("optimizer", "schedule")  # config fields that a recipe's method of that name replaces
# Names by which other frameworks call what a recipe defines.
_OF_OTHERS = {
    "losses": "loss loss_fn compute_loss criterion training_step train_step",
    "metrics": "validation_step test_step compute_metrics configure_metrics",
    "optimizer": "configure_optimizers create_optimizer optimizers get_optimizer",
    "optimizer_groups": "param_groups",
    "schedule": "configure_schedulers create_scheduler lr_scheduler scheduler get_scheduler",
    "model": "forward configure_model build_model get_model model_init",
    "collate": "collate_fn data_collator",
    "datasets": "train_dataloader val_dataloader test_dataloader setup train_dataset "
    "eval_dataset get_train_dataloader get_eval_dataloader",
    "on_epoch": "on_epoch_end on_train_epoch_end on_validation_epoch_end",
    "on_step": "on_step_end on_train_batch_end callbacks",
    "prepare": "prepare_data download",
    "sampling_weights": "sample_weights weighted_sampler",
    "defaults": "hparams config hyperparameters",
    "class_names": "classes labels label_names",
    "metric_outputs": "predict postprocess",
    "report_samples": "predictions",
    "inputs": "preprocess",
}
OF_OTHERS = {other: name for name, others in _OF_OTHERS.items() for other in others.split()}
NEAR = 0.85  # difflib's ratio above which a name counts as a misspelling or a plural

__all__ = [
    "BUILTIN",
    "DataError",
    "Recipe",
    "config_of",
    "get_recipe",
    "list_class_names",
    "locate",
]


def load_anew(kind: type[Recipe]) -> str | type[Recipe]:
    """Return the dotted name of a class of recipes.

    A class that cannot be imported by name is copied instead. The modules that the copy refers to
    are imported as the files are now.

    Raises:
        ConfigError: `kind` is no class of recipes, or cannot be pickled.
    """
    _check_kind(kind)
    if not is_by_value(kind) and "." not in kind.__qualname__:
        return f"{kind.__module__}.{kind.__qualname__}"
    pickled = pickle(kind, kind, "recipe")
    try:
        with importing_edits(find_packages(kind)):
            return cloudpickle.loads(pickled)  # type: ignore[no-any-return]
    except ConfigError:
        raise
    except Exception as error:  # any error is possible: the modules are the user's
        raise ConfigError(
            f"recipe: {kind.__qualname__} cannot be copied: {_last_place(error)}"
            f"{type(error).__name__}: {error}"
        ) from error


def _check_kind(kind: object) -> None:
    if not (isinstance(kind, type) and issubclass(kind, Recipe)):
        raise ConfigError(f"recipe: expected a name or a class of Recipe's, got {kind!r}")


def config_of(name: str | type[Recipe], overrides: Mapping[str, Any]) -> TrainingConfig:
    """Return the config of a run of recipe `name`: the user's `overrides` over the recipe's
    defaults, with all options.

    Raises:
        ConfigError: an unknown recipe, field or option, or a value of the wrong type or range.
    """
    check_object("config", overrides)
    edits: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(name, str):
        edits = importing_edits(list_packages(path_of(name)))
    else:
        _check_kind(name)
    with edits:
        recipe = get_recipe(name, overrides.get("recipe_options", {}))
    options = {field: getattr(recipe, field) for field in _option_types(recipe)}
    config = resolve(
        {**recipe.defaults, **_own_choices(recipe, overrides)},
        {**overrides, "recipe_options": options},
    )
    if config.schedule == OWN and config.warmup_steps:
        raise ConfigError(
            f"warmup_steps: expected 0 beside {locate(recipe, 'schedule')}, which has the whole "
            f"schedule, got {config.warmup_steps}"
        )
    return config


def _own_choices(recipe: Recipe, overrides: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of the config that the recipe's own methods replace. Raises ConfigError
    if the config gives one of these fields as well.
    """
    own = {name: OWN for name in CHOICES if getattr(type(recipe), name) != getattr(Recipe, name)}
    for name in CHOICES:
        given = overrides.get(name, own.get(name))
        if name in own and given != OWN:
            expected = f"none beside {locate(recipe, name)}, which takes its place"
        elif name not in own and given == OWN:
            expected = f"a recipe with a method {name}"
        else:
            continue
        raise ConfigError(f"{name}: expected {expected}, got {given!r}")
    return own


def pin_initial_state(config: TrainingConfig) -> TrainingConfig:
    """Return `config` with the checksum of its initial model state, as `pin_state`."""
    state = pin_state(config.initial_model_state)
    if state == config.initial_model_state:  # no second validation of what is resolved
        return config
    return dataclasses.replace(config, initial_model_state=state)


def get_recipe(name: str | type[Recipe], options: Mapping[str, Any] | None = None) -> Recipe:
    """Return the recipe called `name`, or of that class, with `options`: values for fields of the
    class.

    Raises:
        ConfigError: `name` is neither built in nor the dotted name of a `Recipe` that can be
            imported; it has no such option, or refuses the value; or one of its methods is missing,
            has another name, or takes other parameters.
    """
    recipe = _with_options(_find(name), name_of(name), options or {})
    _check_methods(recipe)
    _check_names(recipe)
    return recipe


def name_of(recipe: str | type[Recipe]) -> str:
    """Return the name of a recipe, for messages."""
    if isinstance(recipe, str):
        return recipe
    return recipe.__name__


def _with_options(kind: type[Recipe], name: str, options: Mapping[str, Any]) -> Recipe:
    given: dict[str, Any] = check("recipe_options", options, dict[str, Any])
    types = _option_types(kind)
    for option, value in given.items():
        if option not in types:
            if not types:
                raise ConfigError(
                    f"recipe_options: expected no options for recipe {name!r}, got {option!r}"
                )
            problem = expect_known("option", types, option)
            raise ConfigError(f"recipe_options: {problem}; the recipe is {name!r}")
        # values of other types are checked by the recipe
        if types[option] in (int, float, bool, str):
            given[option] = check(f"recipe_options.{option}", value, types[option])
    try:
        return kind(**given)
    except ConfigError:
        raise
    # a missing option without a default, or a value that the class refuses
    except (TypeError, ValueError) as error:
        raise ConfigError(f"recipe_options: recipe {name!r} refuses {given!r}: {error}") from error


def _check_methods(recipe: Recipe) -> None:
    methods = {name: each for name, each in vars(Recipe).items() if inspect.isfunction(each)}
    for name, base in methods.items():
        own: Any = getattr(recipe, name)
        if name in REQUIRED and getattr(type(recipe), name) is base:
            others = [
                other
                for other in dir(recipe)
                if other not in methods and callable(getattr(recipe, other))
            ]
            expected = "expected a method of this name"
            raise ConfigError(
                f"{locate(recipe, name)}: {expected}, got none{suggest(name, others)}"
            )
        parameters = list(inspect.signature(base).parameters)[1:]  # all parameters but self
        got: Any = own
        try:
            got = inspect.signature(own)
            got.bind(*parameters)
        except ValueError:  # a function in C has no signature
            continue
        except TypeError:
            expected = f"expected a method with the parameters ({', '.join(parameters)})"
            raise ConfigError(f"{locate(recipe, name)}: {expected}, got {got}") from None


def _check_names(recipe: Recipe) -> None:
    """Refuse a name that no code reads and that is nearly a name of `Recipe`, or means one in other
    frameworks.
    """
    own = [
        kind
        for kind in type(recipe).__mro__
        if issubclass(kind, Recipe) and kind.__module__.partition(".")[0] != "flyte_ddp"
    ]
    known = {name.replace("_", ""): name for name in dir(Recipe) if not name.startswith("_")}
    names = {name for owner in (recipe, *own) for name in vars(owner) if not name.startswith("_")}
    names -= {name for kind in type(recipe).__mro__ if kind not in own for name in vars(kind)}
    for name in sorted(names - _option_types(recipe).keys()):
        meant = OF_OTHERS.get(name.lower())
        near = difflib.get_close_matches(name.replace("_", "").lower(), known, n=1, cutoff=NEAR)
        if not meant and near:
            meant = known[near[0]]
        if meant and all(name not in (names_read(kind.__module__) or [name]) for kind in own):
            raise ConfigError(
                f"{locate(recipe, name)}: expected a name of Recipe's, got {name!r}, which nothing "
                f"reads (did you mean {meant}?); a helper's name may begin with _"
            )


def _option_types(recipe: Any) -> dict[str, Any]:
    """Return the options of a recipe or its class with their types; none if it is no dataclass."""
    if not dataclasses.is_dataclass(recipe):
        return {}
    kind: Any = recipe
    if not isinstance(recipe, type):
        kind = type(recipe)
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(recipe) if field.init}


def default_options(name: str | type[Recipe]) -> dict[str, Any]:
    """Return the options of a recipe that have a default, with their defaults."""
    kind: Any = _find(name)
    defaults: dict[str, Any] = {}
    if not dataclasses.is_dataclass(kind):
        return defaults
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = field.default_factory()
    return defaults


def path_of(name: str) -> str:
    """Return the dotted name of a recipe's class."""
    return BUILTIN.get(name, name).replace(":", ".")


def _make_import_error(name: str, error: Exception) -> ConfigError:
    """Return the error about a recipe whose module cannot be imported."""
    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        hint = (
            f"expected the package {package}: pip install it, in a project by a line in "
            "pyproject.toml"
        )
        if package in EXTRAS:
            hint = how_to_install(package)
    else:
        hint = f"{type(error).__name__}: {error}; correct its module"
    place = ""
    if not isinstance(error, SyntaxError):  # the text of a SyntaxError contains the place
        place = _last_place(error)
    return ConfigError(f"recipe: {name!r} cannot be imported: {place}{hint}")


def _find(name: str | type[Recipe]) -> type[Recipe]:
    if not isinstance(name, str):
        return name
    path = path_of(name)
    module_name, _, attribute = path.rpartition(".")
    expected = (
        f"expected {', '.join(sorted(BUILTIN))}, or the dotted name of a Recipe, such as "
        "my_module.MyRecipe"
    )
    extend_path()
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", path) or name.endswith(".py"):
        hint = _suggest_recipes(_module_of(name)) or suggest(name, BUILTIN)
        if hint:
            expected = f"expected a known recipe{hint}"
        raise ConfigError(f"recipe: {expected}, got {name!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # A missing dependency of the user's module is another error than an unknown recipe.
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            if os.environ.get(POD_VARIABLE):
                hint = " in this pod: register with --copy all"
            else:
                hint = _suggest_module(error.name)
            raise ConfigError(
                f"recipe: {expected}, got {name!r}: there is no module {error.name!r}{hint}"
            ) from None
        raise _make_import_error(name, error) from error
    except Exception as error:  # any error is possible: the module is the user's
        raise _make_import_error(name, error) from error
    found = getattr(module, attribute, None)
    if not isinstance(found, type) or not issubclass(found, Recipe):
        hint = _suggest_recipes(path) or suggest(attribute, _recipes_of(vars(module)))
        raise ConfigError(
            f"recipe: {expected}, got {name!r}, which is no Recipe in module {module_name}{hint}"
        )
    return found


def _module_of(name: str) -> str:
    """Return the dotted name of the module in a file; "" for a file that no import finds."""
    file = Path(name)
    if file.is_absolute():
        relative = Path(os.path.relpath(file))
    else:
        relative = Path(os.path.normpath(file))
    if not relative.name or ".." in relative.parts:
        return ""
    return ".".join(relative.with_suffix("").parts)


def _recipes_of(names: Mapping[str, Any]) -> list[str]:
    """Return which of a module's names are recipes."""
    return [
        name for name, each in names.items() if isinstance(each, type) and issubclass(each, Recipe)
    ]


def _suggest_recipes(module_name: str) -> str:
    """Return the end of an error about a module or file in place of a recipe: the recipes in it."""
    names: dict[str, Any] = {}
    with contextlib.suppress(Exception, SystemExit):  # the module is the user's code
        names = vars(importlib.import_module(module_name))
    found = []
    for name in _recipes_of(names):
        if names[name].__module__ == module_name:
            found.append(f"{module_name}.{name}")
    if not found:
        return ""
    return f" (did you mean {' or '.join(found)}?)"


def _last_place(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}:{frame.lineno}: "


def _suggest_module(missing: str) -> str:
    """Return the end of an error about a missing module: the module beside it with the nearest
    name.
    """
    package, _, name = missing.rpartition(".")
    directories = getattr(sys.modules.get(package), "__path__", [""])  # the working directory
    return suggest(name, [module.name for module in pkgutil.iter_modules(directories)])


def locate(recipe: Recipe, method: str) -> str:
    """Return the place of a recipe's method: file, line and name. For an inherited method it is the
    place of the recipe's class.
    """
    own = getattr(type(recipe), method, None)
    is_inherited = getattr(own, "__module__", "") in (
        Recipe.__module__,
        "flyte_ddp.recipes.problems",
    )
    code: Any = type(recipe)
    if callable(own) and not is_inherited:
        code = inspect.unwrap(own)
    try:
        file = Path(inspect.getsourcefile(code) or "")
        line = inspect.getsourcelines(code)[1]
    except (OSError, TypeError):  # The code was typed into an interpreter.
        return f"{type(recipe).__name__}.{method}"
    # The path starts at the project's directory: a Dask worker has its copy in another directory.
    depth = code.__module__.count(".") + 1 + (file.name == "__init__.py")
    return f"{'/'.join(file.parts[-depth:])}:{line}: {type(recipe).__name__}.{method}"
