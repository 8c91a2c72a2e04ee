"""The blocks of docs/how-to.md: Python runs, recipes train, and configs have fields that exist."""

from __future__ import annotations

import faulthandler
import importlib
import json
import runpy

import pytest
import torch.distributed as dist

from flyte_ddp import Recipe
from flyte_ddp.config import resolve
from flyte_ddp.recipes import get_recipe
from tests.doors.test_docs import PACKAGES, SHORT, blocks_of
from tests.support.runs import new_run
from tests.support.trainers import new_trainer

BLOCKS = blocks_of(SHORT)
PYTHON = [block for block in BLOCKS if block.language == "python"]
# These packages take ten seconds to import.
CODE = [block for block in PYTHON if not block.needs] + [
    pytest.param(block, marks=pytest.mark.long) for block in PYTHON if block.needs in PACKAGES
]
CONFIGS = [block for block in BLOCKS if block.language == "json"]


@pytest.mark.parametrize("block", CODE, ids=str)
def test_a_block_runs_and_its_recipe_trains(block, tmp_path, monkeypatch):
    if block.needs:
        pytest.importorskip(block.needs, reason=f"{block.needs} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"short_{block.line}"
    file = tmp_path / f"{name}.py"
    file.write_text(block.text)
    try:
        defined = runpy.run_path(str(file), run_name="__main__")
    finally:
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.destroy_process_group()
    own = [each for each in defined.values() if getattr(each, "__module__", "") == "__main__"]
    for each in own:
        if isinstance(each, type) and issubclass(each, Recipe):
            train(f"{name}.{each.__name__}", tmp_path)


def train(recipe, directory):
    """Train for an epoch in this process, and export the weights."""
    importlib.invalidate_caches()
    trainer = new_trainer(new_run(directory, recipe), epochs=1, log_interval=5)
    trainer.fit()
    (directory / "export").mkdir()
    get_recipe(recipe).export(trainer.state.model.state_dict(), directory / "export")
    if recipe.endswith("Onnx"):
        assert (directory / "export/model.onnx").stat().st_size > 1000
    for name in {"Logged": ["curve.csv"], "Profiled": ["trace.json"]}.get(recipe.split(".")[1], []):
        assert (directory / name).stat().st_size > 100


@pytest.mark.parametrize("block", CONFIGS, ids=str)
def test_a_config_has_fields_that_exist(block):
    given = json.loads(block.text)
    config = resolve({}, given)
    assert {name: getattr(config, name) for name in given} != {
        name: getattr(resolve({}, {}), name) for name in given
    }
