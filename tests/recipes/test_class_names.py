"""The names of the classes travel with a model's state, and are compared wherever a state meets
data.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from flyte_ddp.errors import ConfigError
from flyte_ddp.promotion.champion import ChampionStore, load_champion
from flyte_ddp.promotion.policy import Challenge, PromotionCriteria, RetrainingResult, judge, plan
from flyte_ddp.recipes import Recipe, config_of, list_class_names
from flyte_ddp.recipes.prepare import prepare_data
from flyte_ddp.storage.state_dict_file import (
    class_names_of,
    from_bytes,
    save_safetensors,
    with_class_names,
)
from flyte_ddp.training.initial_state import load_initial_state
from tests.support.errors import raises_one_line
from tests.support.runs import new_run

ANT_BEE, BEE_COW = ["ant", "bee"], ["bee", "cow"]


class Model(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, num_classes)


class Animals(Recipe):
    """Two blobs a class; the source has the names of the classes, which `datasets` reads, as
    image_folder does.
    """

    defaults = {
        "epochs": 1,
        "global_batch_size": 10,
        "evaluation_batch_size": 40,
        "learning_rate": 0.05,
    }

    def prepare(self, source, directory):
        (directory / "names.json").write_text(json.dumps(source.split(",")))
        return f"pictures of {source}"

    def datasets(self, directory):
        self.class_names = json.loads((directory / "names.json").read_text())
        targets = torch.arange(80) % len(self.class_names)
        noise = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
        inputs = noise + 3 * nn.functional.one_hot(targets, 4)
        return TensorDataset(inputs[:40], targets[:40]), TensorDataset(inputs[40:], targets[40:])

    def model(self):
        return Model(len(self.class_names))


NAME = f"{__name__}.Animals"


class Computed(Recipe):
    @property
    def class_names(self):
        return np.array(["ant", "bee"])


def with_names(value):
    recipe = Recipe()
    recipe.class_names = value
    return recipe


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (with_names(["ant", "bee"]), ANT_BEE),
        (with_names([3, 8]), ["3", "8"]),
        (with_names(np.array([3, 8])), ["3", "8"]),
        (with_names(torch.tensor([0, 1])), ["0", "1"]),
        (with_names(lambda: ("ant", "bee")), ANT_BEE),
        (with_names({0: "ant", 1: "bee"}), ANT_BEE),
        (with_names({"bee": 1, "ant": 0}), ANT_BEE),
        (with_names(None), []),
        (Computed(), ANT_BEE),
        (Recipe(), []),
    ],
)
def test_names_in_any_form_are_text(recipe, expected):
    assert list_class_names(recipe) == expected
    logits = torch.eye(2)
    made = recipe.report_samples(torch.zeros(2, 4), logits, torch.tensor([0, 1]))
    assert [each.truth for each in made] == (expected or ["0", "1"])


def state_file(names, num_classes=0, scale=1.0):
    torch.manual_seed(0)
    state = Model(num_classes or len(names)).state_dict()
    state = {name: scale * value for name, value in state.items()}
    torch.save(with_class_names(state, names) if names else state, buffer := io.BytesIO())
    return buffer.getvalue()


def test_names_survive_a_file_and_change_nothing_for_others(tmp_path):
    save_safetensors(from_bytes(state_file(ANT_BEE)), tmp_path / "state.safetensors")
    for contents in (state_file(ANT_BEE), (tmp_path / "state.safetensors").read_bytes()):
        state = from_bytes(contents)
        assert class_names_of(state) == ANT_BEE
        assert str(Model(2).load_state_dict(state)) == "<All keys matched successfully>"
    assert class_names_of(from_bytes(state_file([], 2))) == []


def test_a_training_leaves_them_in_states_card_and_manifest(tmp_path):
    run = new_run(tmp_path, NAME).train(1, source="ant,bee")
    finished = run.result.finished
    for url in (finished.model_state_url, f"{finished.export_url}/model_state.safetensors"):
        assert class_names_of(from_bytes(Path(url).read_bytes())) == ANT_BEE
    assert run.started.class_names == ANT_BEE
    given = challenge(tmp_path, "ant,bee")
    store = ChampionStore(str(tmp_path / "champion"))
    judge(store, given, PromotionCriteria(), Path(finished.model_state_url).read_bytes())
    assert store.manifest().class_names == ANT_BEE
    assert class_names_of(load_champion(store.url)[0]) == ANT_BEE


@pytest.mark.parametrize(
    ("theirs", "ours", "fresh", "expected"),
    [
        (ANT_BEE, BEE_COW, [], "its classes are ant, bee, those of the data are bee, cow"),
        (ANT_BEE, ["bee", "ant"], [], "its classes are ant, bee, those of the data are bee, ant"),
        (ANT_BEE, BEE_COW, ["body"], "its classes are ant, bee, those of the data are bee, cow"),
        (
            ANT_BEE,
            ["ant", "bee", "cow"],
            [],
            "other shapes at head.weight (2, 6) instead of (3, 6), ",
        ),
        (
            ANT_BEE,
            ["ant", "bee", "cow"],
            [],
            "its classes are ant, bee, those of the data are ant, bee, cow",
        ),
        (ANT_BEE, BEE_COW, ["head"], ""),
        (ANT_BEE, ["ant", "bee", "cow"], ["head."], ""),
        (ANT_BEE, ANT_BEE, [], ""),
        ([], BEE_COW, [], ""),
        (ANT_BEE, [], [], ""),
        (
            [str(each) for each in range(30)],
            [*(str(each) for each in range(28)), "x", "29"],
            [],
            "its classes from number 28 on are 28, 29, those of the data are x, 29",
        ),
    ],
)
def test_an_initial_state_of_other_classes_is_refused(tmp_path, theirs, ours, fresh, expected):
    (file := tmp_path / "given.pt").write_bytes(state_file(theirs, 2 if not theirs else 0))
    model = Model(len(ours) or 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    if expected:
        with raises_one_line(ConfigError) as caught:
            load_initial_state(model, str(file), fresh_layers=fresh, class_names=ours)
        assert expected in str(caught.value)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    else:
        load_initial_state(model, str(file), fresh_layers=fresh, class_names=ours)
        given = from_bytes(file.read_bytes())
        assert torch.equal(model.body.weight, given["body.weight"])
        assert torch.equal(
            model.head.weight, before["head.weight"] if fresh else given["head.weight"]
        )


def challenge(tmp_path, source, **config):
    directory = tmp_path / f"data of {source}"
    if not directory.exists():
        directory.mkdir()
        prepare_data(Animals(), source, directory)
    return Challenge(NAME, config_of(NAME, config), directory, "2026-01-02T03:04:05Z", "c1", "")


@pytest.mark.parametrize("source", ["bee,cow", "bee,ant"])
@pytest.mark.parametrize("names", [ANT_BEE, []], ids=["named", "by-the-manifest-alone"])
def test_a_champion_of_other_classes_is_incompatible(tmp_path, source, names):
    store = ChampionStore(str(tmp_path / "champion"))
    first = judge(
        store, challenge(tmp_path, "ant,bee"), PromotionCriteria(), state_file(names, 2, scale=5)
    )
    assert first.outcome == RetrainingResult.PROMOTED
    version = store.in_use().version
    given = challenge(tmp_path, source)
    expected = (
        f"its classes are ant, bee, those of the data are {source.replace(',', ', ')}; "
        "give a model of another"
    )
    planned = plan(store, given, PromotionCriteria())
    assert planned.outcome == "refused"
    assert expected in planned.reason
    judged = judge(store, given, PromotionCriteria(), state_file(source.split(","), scale=0.1))
    assert judged.outcome == RetrainingResult.REFUSED
    assert expected in judged.reason
    assert store.in_use().version == version
    same = challenge(tmp_path, "ant,bee", learning_rate=0.01)
    assert not plan(store, same, PromotionCriteria()).outcome
    with pytest.raises(ConfigError, match="its classes are ant, bee, those of the data are "):
        judge(store, given, PromotionCriteria(), state_file(ANT_BEE))
