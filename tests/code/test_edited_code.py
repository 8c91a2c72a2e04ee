"""A process that lives on while a recipe is edited, such as a notebook's, reads the code anew, as
its ranks do.
"""

from __future__ import annotations

import importlib
import os
import sys
import types

import pytest

import flyte_ddp
from flyte_ddp.code import source_code
from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes import Recipe, config_of, get_recipe
from flyte_ddp.recipes.prepare import list_code, recipe_version
from tests.support.errors import raises_one_line

RECIPE = """
from tests.support.mistakes import Line
from edited.helper import WORDS
{more}

class Edited(Line):
    defaults = {{**Line.defaults, "epochs": {epochs}, "global_batch_size": 20}}

    def prepare(self, source, directory):
        return f"{{WORDS}} {{self.losses(1, 0)}}" if source else WORDS

    def model(self):
        model = super().model()
        model[0].weight.data.fill_({weight})
        model[0].weight.requires_grad_(False)
        return model
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The directory of a package with a recipe, which imports a helper, and functions that write
    them.
    """
    directory = tmp_path / "edited"
    (directory / "inner").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(source_code, "_imported", {})
    write(directory, 1)
    yield directory
    for name in [name for name in sys.modules if name.partition(".")[0] == "edited"]:
        del sys.modules[name]


def write(directory, number, more=""):
    """Write the code in its version `number`, of one digit, so that the size stays; as in one
    second, for Python.
    """
    (directory / "__init__.py").write_text("from edited.inner.recipe import Edited\n")
    (directory / "helper.py").write_text(f"WORDS = 'data {number}'\n")
    (directory / "inner/recipe.py").write_text(
        RECIPE.format(epochs=number, weight=number, more=more)
    )
    for file in directory.rglob("*.py"):
        os.utime(file, (2_000_000_000, 2_000_000_000))


@pytest.mark.parametrize(
    "name", ["edited.inner.recipe.Edited", "edited.Edited", "edited.inner.recipe:Edited"]
)
def test_defaults_and_data_are_those_of_the_edited_code(name, package):
    config = config_of(name, {})
    assert (config.epochs, get_recipe(name).prepare("", None)) == (1, "data 1")
    same = get_recipe(name)
    config_of(name, {})
    assert type(get_recipe(name)) is type(same)  # nothing was edited, nothing is imported again
    version, code = recipe_version("edited.inner.recipe"), list_code("edited.inner.recipe")
    for number in (2, 3):
        write(package, number)
        assert config_of(name, {}).epochs == number
        recipe = get_recipe(name)
        assert recipe.prepare("", None) == f"data {number}"
        assert float(recipe.model()[0].weight) == number
        assert isinstance(recipe, sys.modules["edited.inner.recipe"].Edited)
        assert isinstance(recipe, Recipe)
        assert recipe_version("edited.inner.recipe") != version
        now = list_code("edited.inner.recipe")
        changed = {name for name in code if now[name] != code[name]}
        assert "edited/inner/recipe.py" in changed
        assert not changed & {"flyte_ddp", "edited/__init__.py"}


def test_a_module_that_a_notebook_has_imported_before_the_edit_is_imported_again(package):
    importlib.import_module("edited")
    write(package, 2)
    assert config_of("edited.Edited", {}).epochs == 2


@pytest.mark.parametrize(
    ("file", "text", "expected"),
    [
        (
            "inner/recipe.py",
            "class Edited(:\n",
            (
                r"cannot be imported: SyntaxError: .*recipe.py, "
                r"line 1"
            ),
        ),
        ("helper.py", "WORDS = \n", r"cannot be imported: SyntaxError: .*helper.py, line 1"),
        ("inner/recipe.py", "1 / 0\n", r"recipe.py:1: ZeroDivisionError"),
        ("helper.py", None, r"there is no module 'edited.helper'|cannot be imported"),
        ("inner/recipe.py", None, r"there is no module 'edited.inner.recipe'|cannot be imported"),
        ("inner/recipe.py", "Edited = 1\n", r"which is no Recipe in module edited"),
    ],
)
def test_an_edit_that_cannot_be_imported_is_one_line_until_it_is_corrected(
    file, text, expected, package
):
    config_of("edited.Edited", {})
    if text is None:
        (package / file).unlink()
    else:
        (package / file).write_text(text)
    for _ in range(2):
        with raises_one_line(ConfigError, match=rf"^recipe: .*({expected})"):
            config_of("edited.Edited", {})
    write(package, 4)
    assert config_of("edited.Edited", {}).epochs == 4


def test_an_edited_library_needs_a_new_process(monkeypatch):
    config_of("digits", {})
    monkeypatch.setitem(source_code._imported, "flyte_ddp.recipes.digits", "another digest")
    with pytest.raises(
        ConfigError,
        match=(
            r"^recipe: expected flyte_ddp.recipes.digits as .*: "
            r"restart the process$"
        ),
    ):
        config_of("digits", {})


def test_the_second_training_of_a_process_is_that_of_the_edited_code(package, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    for number in (1, 2):
        write(package, number)
        trained = flyte_ddp.train("edited.Edited", nproc_per_node=1)
        assert len(trained.epochs) == number
        assert float(trained.model_state["0.weight"]) == number
        assert trained.card["data"]["description"] == f"data {number}"


def test_a_module_that_others_load_lazily_is_not_loaded(monkeypatch):
    loaded = []

    class Lazy(types.ModuleType):
        def __getattr__(self, name):
            loaded.append(name)
            raise AttributeError(name)

    monkeypatch.setitem(sys.modules, "lazily_loaded", Lazy("lazily_loaded"))
    with source_code.importing_edits(["flyte_ddp"]):
        pass
    assert loaded == []
