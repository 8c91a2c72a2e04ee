"""The examples in the docstrings of public names. An example whose first line is a comment needs
more than this process. Such an example is only compiled, as are the examples of tasks of Flyte.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import os
import textwrap
import zlib
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import TensorDataset

import flyte_ddp
from flyte_ddp import flyte2, session
from flyte_ddp.config import TrainingConfig
from flyte_ddp.data import Mixture, Packed, Shards, loader
from flyte_ddp.errors import DataError
from flyte_ddp.events import EpochFinished, Prediction, Reported
from flyte_ddp.recipes.base import Recipe
from flyte_ddp.recipes.problems import MultiLabel, Regression, Segmentation
from flyte_ddp.storage import read_file

ROOT = Path(__file__).parents[2]
# public names that no package lists
FURTHER = [
    ("flyte_ddp.data.mixture", "Mixture"),
    ("flyte_ddp.data.packed", "Packed"),
    ("flyte_ddp.data.shards", "Shards"),
    ("flyte_ddp.flyte.prediction", "predict"),
    ("flyte_ddp.flyte.resources", "pod"),
    ("flyte_ddp.flyte.training", "prepare"),
    ("flyte_ddp.flyte.training", "train_on_cluster"),
    ("flyte_ddp.flyte.training", "train_on_one_node"),
    ("flyte_ddp.integrations.accelerate", "prepare"),
    ("flyte_ddp.integrations.lightning", "SessionCallback"),
    ("flyte_ddp.integrations.transformers", "SessionCallback"),
    ("flyte_ddp.launch.distributed", "Distributed"),
    ("flyte_ddp.launch.run", "RunResult"),
    ("flyte_ddp.launch.train", "Trained"),
    ("flyte_ddp.prediction.predict", "Predictions"),
    ("flyte_ddp.rank.loader", "loader"),
    ("flyte_ddp.studies.sweep", "Swept"),
]
# functions for the library's own modules
INTERNAL = ("current", "is_in_run", "make_current", "_")
PADDING = 0
# what a user's file has imported and made
GIVEN = {
    "DataError": DataError,
    "Mixture": Mixture,
    "MultiLabel": MultiLabel,
    "PADDING": PADDING,
    "Packed": Packed,
    "Prediction": Prediction,
    "Recipe": Recipe,
    "Regression": Regression,
    "Segmentation": Segmentation,
    "Shards": Shards,
    "TensorDataset": TensorDataset,
    "functional": functional,
    "io": io,
    "json": json,
    "loader": loader,
    "nn": nn,
    "numpy": numpy,
    "os": os,
    "pad_sequence": pad_sequence,
    "read_file": read_file,
    "session": session,
    "torch": torch,
    "zlib": zlib,
}


def list_public_names() -> list[tuple[str, str]]:
    """Return the module and the name in it of everything that must show its use."""
    names = [(module, name) for name, module in flyte_ddp._HOMES.items()]
    names += FURTHER
    for module, text in flyte2._HOMES.items():
        names += [(module, name) for name in text.split() if name != "SETTINGS"]
    for node in parse("flyte_ddp.session").body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith(INTERNAL):
            names.append(("flyte_ddp.session", node.name))
    for node in find("flyte_ddp.recipes.base", "Recipe").body:
        if isinstance(node, ast.FunctionDef):
            names.append(("flyte_ddp.recipes.base", f"Recipe.{node.name}"))
    return names


def parse(module: str) -> ast.Module:
    return ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))


def find(module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
    """Return the definition of a class, a function or a method."""
    found = parse(module)
    for part in name.split("."):
        found = next(node for node in found.body if getattr(node, "name", "") == part)
    return found


def read_example(module: str, name: str) -> str:
    """Return the code of the example at the end of a docstring; "" for none."""
    text = ast.get_docstring(find(module, name)) or ""
    return textwrap.dedent(text.partition("\n\nExample:\n")[2])


NAMES = list_public_names()
HOOKS = [name.partition(".")[2] for _, name in NAMES if name.startswith("Recipe.")]
IN_ONE_PROCESS = [
    (module, name)
    for module, name in NAMES
    if not name.startswith("Recipe.")
    and not module.startswith("flyte_ddp.flyte")
    and not read_example(module, name).startswith("#")
]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_shows_its_use(module, name):
    example = read_example(module, name)
    lines = [line for line in example.splitlines() if line.strip()]
    assert 3 <= len(lines) <= 10, f"{len(lines)} lines"
    compile(example, name, "exec")


def test_the_collection_is_complete():
    names = {name for _, name in NAMES}
    assert {*flyte_ddp.__all__, *flyte_ddp.data.__all__} <= {*names, "session"}
    assert {"challenge", "save", "Recipe.losses"} <= names
    executed = {name for _, name in IN_ONE_PROCESS}
    assert {"save", "load", "report", "Mixture", "Packed", "Recipe", "Shards"} <= executed


@pytest.fixture
def given(tmp_path, monkeypatch):
    """The names that an example may use, in a directory with data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # place of the cache of shards
    for name in ("train", "code", "web", "documents"):
        (tmp_path / name).mkdir()
        fields = {"pixels": [0, 255], "tokens": [5, 6, 7]}
        rows = [json.dumps({**fields, "label": number % 2}) for number in range(64)]
        (tmp_path / name / "rows.jsonl").write_text("\n".join(rows))
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(100, 4), torch.randint(0, 2, (100,)))
    optimizer = torch.optim.SGD(model.parameters())
    return {**GIVEN, "data": data, "model": model, "optimizer": optimizer}


@pytest.mark.parametrize(("module", "name"), IN_ONE_PROCESS)
def test_an_example_runs_in_one_process(module, name, given):
    exec(compile(read_example(module, name), name, "exec"), given)
    for made in list(given.values()):
        is_example = inspect.isclass(made) and made.__module__ == "builtins"
        if is_example and issubclass(made, Recipe) and name != "DataError":
            assert isinstance(made().model(), nn.Module)


def test_the_example_of_a_recipe_is_a_recipe(given, tmp_path):
    exec(read_example("flyte_ddp.recipes.base", "Recipe"), given)
    recipe = given["Majority"]()
    assert recipe.prepare("", tmp_path)
    train, held_out = recipe.datasets(tmp_path)
    inputs, targets = train[:16]
    losses = recipe.losses(recipe.model()(recipe.inputs(inputs)), targets)
    assert (len(train), len(held_out), losses.shape) == (448, 64, (16,))


def test_each_method_of_a_recipe_can_be_overridden_as_shown(given, tmp_path):
    methods = {}
    for name in HOOKS:
        exec(read_example("flyte_ddp.recipes.base", f"Recipe.{name}"), given, methods)
        base = inspect.signature(getattr(Recipe, name)).parameters
        assert list(inspect.signature(methods[name]).parameters) == list(base), name
    recipe = type("Example", (Recipe,), methods)()
    file = tmp_path / "rows.csv"
    file.write_text("".join(f"{row},1,2,3,{row % 3}\n" for row in range(50)))
    assert recipe.prepare(str(file), tmp_path) == "50 rows"
    assert "50 rows" in recipe.prepare_new_data(str(file), tmp_path)
    train, held_out = recipe.datasets(tmp_path)
    assert (len(train), len(held_out), len(recipe.predict_dataset(tmp_path))) == (45, 5, 50)
    model, (inputs, targets) = recipe.model(), train[:]
    outputs = model(recipe.inputs(inputs))
    for method in (recipe.losses, recipe.num_correct, *recipe.metrics().values()):
        assert method(outputs, targets).shape == (45,)
    assert recipe.sampling_weights(train).shape == (45,)
    assert recipe.metric_outputs(outputs).shape == (45,)
    assert recipe.num_targets(torch.tensor([[1, 2, 0], [1, 0, 0]])).tolist() == [2, 1]
    texts = [(torch.tensor([1, 2]), 0), (torch.tensor([3]), 1)]
    padded, labels = recipe.collate(texts, training=True)
    assert padded.tolist() == [[1, 2], [3, 0]]
    assert recipe.num_samples(padded, labels) == 2
    config = TrainingConfig()
    optimizer = recipe.optimizer(model, config)
    assert recipe.schedule(optimizer, config, 10)(5) == 0.5
    torch.optim.SGD(recipe.optimizer_groups(model), lr=0.1).step()
    assert len(recipe.blocks(model)) == 2
    assert recipe.tokens_per_sample() == 512
    assert recipe.flops_per_sample(model) == 6 * (4 * 32 + 32 + 32 * 3 + 3)
    for name, value in model.state_dict().items():
        assert recipe.initial_value(name, value.shape).shape == value.shape
    assert {len(column) for column in recipe.prediction_columns(outputs).values()} == {45}
    assert len(recipe.report_samples(inputs, outputs, targets)) == 45
    assert len(recipe.generate_sample(model)) == 8
    recipe.export(model.state_dict(), tmp_path)
    assert set(numpy.load(tmp_path / "weights.npz")) == set(model.state_dict())
    epoch = EpochFinished(1, 45, 0.25, 0.5, 0.1, 1.0, 45.0, 0.1)
    assert recipe.figures(epoch) == {"generalization_gap": 0.25}
    recipe.on_epoch(epoch)
    recipe.on_step(Reported(1, 0.5, {"gradient_norm": 1000.0}))
    assert Path("losses.csv").read_text() == "1,0.25,0.5\n"
    assert recipe.data_license("") == "CC BY 4.0"
