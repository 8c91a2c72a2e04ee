"""Classes that no module has: of a notebook, a script or a function, each with a version."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
import types
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist

import flyte_ddp
from flyte_ddp.code import source_code
from flyte_ddp.code.by_value import Checksum, dumps, pickle
from flyte_ddp.errors import ConfigError, RankFailure
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.launch.run import function_program
from flyte_ddp.recipes import config_of, load_anew
from flyte_ddp.recipes.prepare import class_version
from tests.support.mistakes import Line

REPOSITORY = Path(__file__).parents[2]


def make_recipe(weight):
    class Local(Line):
        defaults = {**Line.defaults, "epochs": 1}

        def model(self):
            model = super().model()
            model[0].weight.data.fill_(weight)
            model[0].weight.requires_grad_(False)
            return model

    return Local


@pytest.mark.long
def test_a_class_trains_by_value_and_only_an_equal_one_resumes(tmp_path, capfd):
    place = str(tmp_path)
    first = flyte_ddp.train(make_recipe(3.0), nproc_per_node=2, checkpoints=place)
    assert float(first.model_state["0.weight"]) == 3.0
    assert repr(first).startswith("<Trained Local: epoch 1 of 1 is best, test_loss ")
    assert len(repr(first)) < 100
    assert "Local" in first._repr_html_()
    assert "epoch 1/1: train loss" in capfd.readouterr().err

    with pytest.raises(RankFailure, match=r"recipe: expected \S*Local as it was in the run of \S+"):
        flyte_ddp.train(make_recipe(4.0), nproc_per_node=2, checkpoints=place, progress=False)
    again = flyte_ddp.train(make_recipe(3.0), nproc_per_node=2, checkpoints=place)
    assert [each.epoch for each in again.epochs] == [1]
    assert "resumed at step" in capfd.readouterr().err


CLASS = """
import functools, math
import torch
import helper
from helper import double

NUMBERS = {{"one", "two", {number}}}
TABLE = {{"rows": [torch.ones(2) * {number}, None], "double": functools.partial(double, 2)}}

class Base:
    width: int = {width}

class Kind(Base):
    def read(self, scale={scale}):  {comment}
        unread = self.OTHER if scale else math.pi
        return [TABLE, NUMBERS, double(unread), lambda: {constant}, super()]

OTHER = {other}
"""
VALUES = {"number": 1, "width": 2, "scale": 3, "constant": "'text'", "other": 4, "comment": ""}
DOUBLE = "def double(value):\n    return 2 * value\n"
# Runs the script of each directory in a process of its own, forked after the slow import.
RUN_EACH = """
import os, runpy, sys
import torch
from flyte_ddp.recipes.prepare import class_version
for directory in sys.argv[1:]:
    if os.fork() == 0:
        sys.path[0] = directory
        print(class_version(runpy.run_path(f"{directory}/script.py", run_name="__main__")["Kind"]))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


def versions(directory, seed, *changes):
    """Return the version of `Kind` with each of the changes, in a process with that seed."""
    places = []
    for number, values in enumerate(changes):
        place = directory / f"{seed}-{number}"
        place.mkdir()
        (place / "helper.py").write_text(values.get("helper", DOUBLE))
        (place / "script.py").write_text(CLASS.format(**{**VALUES, **values}))
        places.append(str(place))
    done = subprocess.run(
        [sys.executable, "-c", RUN_EACH, *places],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": seed},
        check=True,
        capture_output=True,
        text=True,
    )
    found = done.stdout.split()
    assert len(found) == len(changes), done.stderr
    return found


@pytest.mark.long
def test_a_version_counts_code_and_values_and_nothing_else(tmp_path):
    others = [{name: 9} for name in ("number", "width", "scale", "constant")]
    others.append({"helper": "def double(value):\n    return value * 2\n"})
    (plain,) = versions(tmp_path, "1", {})
    same, *different = versions(tmp_path, "2", {"comment": "# of an editor's", "other": 5}, *others)
    assert same == plain
    assert len({plain, *different}) == 1 + len(others)


def test_a_dataclass_and_its_instance_have_versions_by_their_fields():
    def make(default):
        @dataclasses.dataclass
        class Options:
            number: int = default
            names: list[str] = dataclasses.field(default_factory=list, metadata={"help": "text"})

        return Options

    assert Checksum(()).of(make(1)) == Checksum(()).of(make(1)) != Checksum(()).of(make(2))
    assert Checksum(()).of(make(1)(3)) != Checksum(()).of(make(1)(4))


def test_a_class_that_refers_to_itself_has_a_version():
    class Node:
        def make(self):
            return Node(), self.make

    assert Checksum(()).of(Node) == Checksum(()).of(Node)


class Settings:
    config = {"weight": 2.0}


def test_modules_of_any_type_are_pickled_by_name():
    importlib.import_module("cryptography.hazmat.bindings._rust")  # a library of cffi's
    names = ["torch.distributed.config", "torch.compiler.config", "torch._inductor.config"]
    modules = [*map(importlib.import_module, names), types]
    modules += [each for each in sys.modules.values() if isinstance(each, types.ModuleType)]
    by_name = [each for each in modules if sys.modules.get(each.__name__) is each]
    assert {type(each).__name__ for each in by_name} > {"module", "ConfigModuleInstance"}
    for module in by_name:
        if type(module).__name__ != "module" or module is types:
            assert cloudpickle.loads(dumps(module)) is module
            assert cloudpickle.loads(pickle([module], int, "modules"))[0] is module


def mentions_settings():
    return dist.__name__, torch.compiler.__name__, Settings().config["weight"]


mentions_settings.__module__ = "__main__"  # Functions of `__main__` travel by value.


def test_a_function_that_mentions_torchs_packages_and_any_config_travels():
    assert isinstance(sys.modules["torch.distributed.config"], types.ModuleType)
    expected = ("torch.distributed", "torch.compiler", 2.0)
    for function in (mentions_settings, functools.partial(mentions_settings)):
        call = function_program(function, (), {}).call
        assert cloudpickle.loads(call).function() == expected


def test_a_recipe_that_mentions_torchs_packages_and_any_config_travels():
    class Compiled(Line):
        def model(self):
            return torch.compiler, dist, Settings().config["weight"]

    anew = load_anew(Compiled)
    assert anew is not Compiled
    assert anew.model(None)[1:] == (dist, 2.0)
    assert recipe_program(anew, config_of(anew, {})).call


def test_a_class_that_cannot_be_pickled_is_one_line():
    lock = threading.Lock()

    class Locked(Line):
        def model(self):
            return lock

    with pytest.raises(ConfigError) as caught:
        flyte_ddp.train(Locked)
    assert str(caught.value).startswith("recipe: expected one that can be pickled, got ")
    assert str(caught.value).endswith("Locked: TypeError: cannot pickle '_thread.lock' object")
    with pytest.raises(ConfigError, match="^function: expected one that can be pickled, got "):
        flyte_ddp.run(lambda: lock)
    with pytest.raises(ConfigError, match="^recipe: expected a name or a class of Recipe's, got 3"):
        flyte_ddp.train(3)


@pytest.fixture
def helper(tmp_path, monkeypatch):
    """A function that writes a module, which lies beside the main one, in another version."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(source_code, "_imported", {})
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "main.py"), False)

    def write(number):
        (tmp_path / "helper.py").write_text(f"def describe():\n    return 'version {number}'\n")
        os.utime(tmp_path / "helper.py", (2_000_000_000, 2_000_000_000))

    write(1)
    yield write
    sys.modules.pop("helper", None)


def test_what_a_notebooks_class_refers_to_is_read_anew(helper):
    from helper import describe

    namespace = {"Line": Line, "describe": describe, "__name__": "__main__"}
    exec(
        "class Told(Line):\n    def prepare(self, source, directory):\n        return describe()\n",
        namespace,
    )
    versions = set()
    for number in (1, 2, 3):
        helper(number)
        kind = load_anew(namespace["Told"])
        assert kind().prepare("", None) == f"version {number}"
        versions.add(class_version(kind))
    assert len(versions) == 3


def test_a_module_that_is_read_anew_stays_the_one_that_a_notebook_has(helper, tmp_path):
    (tmp_path / "unused.py").write_text("NUMBER = 1\n")
    module, unused = importlib.import_module("helper"), importlib.import_module("unused")
    namespace = {"Line": Line, "describe": module.describe, "__name__": "__main__"}
    exec(
        "class Told(Line):\n    def prepare(self, source, directory):\n        return describe()\n",
        namespace,
    )
    for number in (2, 3):
        helper(number)
        assert load_anew(namespace["Told"])().prepare("", None) == f"version {number}"
        assert sys.modules["helper"] is module
        assert module.describe() == f"version {number}"
        assert importlib.reload(module) is module
    (tmp_path / "helper.py").write_text("def describe(:\n")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"^recipe: .*Told cannot be copied: .*SyntaxError"):
            load_anew(namespace["Told"])
        assert sys.modules["helper"] is module
        assert module.describe() == "version 3"
    with pytest.raises(SyntaxError):
        importlib.reload(module)
    (tmp_path / "helper.py").write_text("TEXT = 'fails'\ndel describe\n")
    with pytest.raises(ConfigError, match=r"^recipe: .*Told cannot be copied: .*NameError"):
        load_anew(namespace["Told"])
    assert module.describe() == "version 3"
    helper(4)
    (tmp_path / "unused.py").write_text("NUMBER = (\n")
    assert load_anew(namespace["Told"])().prepare("", None) == "version 4"
    assert (sys.modules["unused"] is unused, unused.NUMBER) == (True, 1)
    (tmp_path / "unused.py").write_text("NUMBER = 2  # it was edited\n")
    load_anew(namespace["Told"])
    assert unused.NUMBER == 2
    del sys.modules["unused"]


def execute_notebook(name, tmp_path):
    """The outputs of each cell of a notebook of the examples that has any."""
    pytest.importorskip("nbconvert")
    pytest.importorskip("ipykernel")
    shutil.copy(REPOSITORY / "examples/notebooks" / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace"]
        + ["--ExecutePreprocessor.timeout=-1", tmp_path / name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "JUPYTER_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / name).read_text())["cells"]
    return [each["outputs"] for each in cells if each.get("outputs")]


@pytest.mark.long
def test_the_notebook_of_the_examples_trains(tmp_path):
    trained, predicted, averaged = execute_notebook("flowers.ipynb", tmp_path)
    shown = "".join(text for each in trained if "text" in each for text in each["text"])
    assert "epoch 10/10: train loss" in shown
    assert any("<svg" in "".join(each.get("data", {}).get("text/html", "")) for each in trained)
    assert "tensor" in str(predicted)
    assert "step 1: total 1" in str(averaged)
    assert "1.0" in str(averaged[-1]["data"])


@pytest.mark.long
def test_the_notebooks_of_a_plain_function_sweep_and_span_nodes(tmp_path):
    swept, best = execute_notebook("experiments.ipynb", tmp_path)
    shown = [each["data"]["text/html"] for each in swept if "data" in each]
    assert "".join(shown[-1]).count("<svg") == 2
    assert "[256, 0.01]" in str(best)
    *_, state = execute_notebook("many_nodes.ipynb", tmp_path)
    assert "train, 2 ranks on 2 nodes" in str(state)
    assert "tensor" in str(state[-1]["data"])
