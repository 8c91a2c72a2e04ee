"""What others load: the weights as safetensors, the run card, and recipe text's model in
transformers.
"""

from __future__ import annotations

import json
import pickle
import tracemalloc
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open

import flyte_ddp
from flyte_ddp.events import RunState
from flyte_ddp.flyte.task import open_task_run
from flyte_ddp.observers.reports.run import Report
from flyte_ddp.observers.reports.run_card import run_card
from flyte_ddp.recipes import get_recipe
from flyte_ddp.storage.state_dict_file import from_bytes, is_safetensors
from flyte_ddp.training import main as rank_main
from flyte_ddp.training.main import export_model
from tests.support.runs import to_safetensors
from tests.support.short_run import run_finished, started
from tests.support.task_context import executing
from tests.support.text_recipe import prepared

TINY = "tests.support.recipes.Tiny"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A training of Tiny from the weights of a champion: (result, files of its export by name)."""
    place = tmp_path_factory.mktemp("runs")
    first = flyte_ddp.train(TINY, {"epochs": 1}, nproc_per_node=1, checkpoints=str(place / "first"))
    champion = (
        place
        / "champion"
        / "versions"
        / "20260102T030405.000000Z-0badcafe"
        / "model_state.safetensors"
    )
    champion.parent.mkdir(parents=True)
    champion.write_bytes((place / "first" / "export" / "model_state.safetensors").read_bytes())
    result = flyte_ddp.train(
        TINY,
        {"epochs": 2, "initial_model_state": str(champion)},
        nproc_per_node=2,
        checkpoints=str(place / "second"),
    )
    # The training started from those weights.
    assert result.epochs[0].train_loss < first.epochs[0].train_loss
    return result, {file.name: file for file in (place / "second" / "export").iterdir()}


def test_a_training_leaves_its_weights_as_safetensors_and_a_card(trained):
    result, files = trained
    assert sorted(files) == ["README.md", "model_state.safetensors", "run_card.json"]
    with safe_open(files["model_state.safetensors"], "pt") as weights:
        assert {*weights.keys()} == {*result.model_state}
        assert all(
            torch.equal(weights.get_tensor(name), value)
            for name, value in result.model_state.items()
        )


def test_the_card_says_where_a_model_comes_from(trained):
    result, files = trained
    card = json.loads(files["run_card.json"].read_text())
    assert card == json.loads(json.dumps(result.card))
    assert card["recipe"] == TINY
    assert card["config"]["epochs"] == 2
    assert len(card["data"]["fingerprint"]) == len(card["origin"]["recipe_version"]) == 64
    assert card["data"]["license"] == "not known"
    assert card["origin"]["parent_champion"] == "20260102T030405.000000Z-0badcafe"
    assert card["ranks"]["world_sizes"] == [2]
    assert [epoch["test_loss"] for epoch in card["epochs"]] == [
        epoch.test_loss for epoch in result.epochs
    ]
    assert [epoch["accuracy"] for epoch in card["epochs"]] == [
        epoch.metrics["accuracy"] for epoch in result.epochs
    ]
    assert card["seconds"]["wall"] > card["seconds"]["stepping"] > 0
    page = files["README.md"].read_text()
    for value in (
        f"# {TINY}",
        card["data"]["fingerprint"],
        "20260102T030405",
        "not known",
        f'"seed": {0}',
    ):
        assert value in page


def test_the_licence_of_data_is_the_recipes_where_it_knows_it():
    licences = {
        name: get_recipe(name).data_license("")
        for name in ("digits", "mnist", "text", "image_folder")
    }
    assert licences == {
        "digits": "CC-BY-4.0",
        "mnist": "CC-BY-SA-3.0",
        "text": "PSF-2.0",
        "image_folder": "",
    }
    assert get_recipe("text").data_license("s3://ours/books") == ""


def test_tied_tensors_and_values_survive_safetensors():
    weight = torch.arange(6.0, dtype=torch.bfloat16).view(2, 3)
    state = {
        "embedding": weight,
        "output": weight,
        "count": torch.tensor(3),
        "_extra_state": {"sizes": [1, "ä"]},
    }
    read = from_bytes(to_safetensors(state))
    assert read.keys() == state.keys()
    assert read["_extra_state"] == state["_extra_state"]
    assert all(torch.equal(read[name], state[name]) for name in ("embedding", "output", "count"))


def test_a_damaged_safetensors_file_is_no_state():
    contents = to_safetensors({"weight": torch.ones(100)})
    assert is_safetensors(contents)
    with pytest.raises(pickle.UnpicklingError, match="no safetensors file"):
        from_bytes(contents[:-1])


def test_a_safetensors_file_may_begin_as_a_pickle_does():
    # the header's length is a multiple of 8, and 128 mod 256 once in 32
    for length in range(1, 300):
        contents = to_safetensors({"x" * length: torch.ones(2)})
        if contents.startswith(b"\x80"):
            break
    assert contents.startswith(b"\x80")
    assert is_safetensors(contents)
    assert is_safetensors(contents[:-1])  # damaged, and no pickle
    assert list(from_bytes(contents)) == ["x" * length]


def test_no_file_of_an_export_is_in_memory(tmp_path):
    recipe, _, _ = prepared(tmp_path, layers=4, width=256, heads=4)
    state = recipe.model().state_dict()
    tracemalloc.start()
    try:
        results = export_model(get_recipe("text"), state, str(tmp_path))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {"model_state.safetensors", "model.safetensors", "config.json"} <= {*results["exported"]}
    assert peak < (tmp_path / "export" / "model_state.safetensors").stat().st_size / 4


def test_what_cannot_be_exported_is_named_and_ends_nothing(tmp_path):
    class Careless(type(get_recipe(TINY))):
        def export(self, state, directory):
            raise ZeroDivisionError("division\nby zero")

    state = {"weight": torch.ones(2), "steps": {1, 2}}
    results = export_model(Careless(), state, str(tmp_path))
    assert results["exported"] == [] == list(tmp_path.iterdir())
    assert results["not_exported"] == (
        "model_state.safetensors: steps is a set that JSON cannot hold; Careless.export: division "
        "by zero"
    )


def test_an_exported_file_may_be_in_a_directory(tmp_path):
    class Nested(type(get_recipe(TINY))):
        def export(self, state, directory):
            (directory / "onnx").mkdir()
            (directory / "onnx" / "model.onnx").write_bytes(b"model")

    results = export_model(Nested(), {"weight": torch.ones(2)}, str(tmp_path / "run"))
    assert results["exported"] == ["model_state.safetensors", "onnx/model.onnx"]
    assert results["not_exported"] == ""

    state = RunState()
    for event in [started(), replace(run_finished(), **results)]:
        state.handle(event)
    with executing():
        # the second run with the same output
        for files in (results["exported"], ["model_state.safetensors"]):
            finished = replace(state.finished, exported=files)
            with open_task_run(Report(), TINY, str(tmp_path / "c"), str(tmp_path / "out")) as run:
                (tmp_path / "out" / "export").mkdir(parents=True, exist_ok=True)
                (tmp_path / "out" / "export" / "mine.txt").touch()
                run.files.collect_export(
                    finished,
                    {**run_card(state), "model": {**run_card(state)["model"], "files": files}},
                )
            has_old = (tmp_path / "out" / "export" / "onnx" / "model.onnx").exists()
            assert has_old == ("onnx/model.onnx" in files)
            assert (tmp_path / "out" / "export" / "mine.txt").exists()


def test_a_store_that_takes_no_more_is_named_and_ends_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_main, "SHORT_TIMEOUT", 0.1)
    (tmp_path / "export").write_text("no directory")
    results = export_model(get_recipe(TINY), {"weight": torch.ones(2)}, str(tmp_path))
    assert results["exported"] == []
    assert results["not_exported"].startswith("model_state.safetensors: ")
