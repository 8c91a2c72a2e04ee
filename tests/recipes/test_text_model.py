"""The model of recipe text, and how it trains."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from torch.nn import functional

from flyte_ddp.config import TrainingConfig
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.recipes import config_of, get_recipe
from flyte_ddp.training import evaluation
from flyte_ddp.training.evaluation import sample_utilization
from flyte_ddp.training.optim import build_optimizer
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import ALONE
from tests.support.text_recipe import prepared


def test_fresh_model_is_as_good_as_guessing_and_its_figures_are_means_over_a_windows_tokens(
    tmp_path,
):
    recipe, (train, _), _ = prepared(tmp_path)
    model = recipe.model()
    outputs, targets = model(recipe.inputs(train.tensors[0][:16])).detach(), train.tensors[1][:16]
    expected = functional.cross_entropy(
        outputs.transpose(1, 2), targets.long(), reduction="none"
    ).mean(dim=1)
    torch.testing.assert_close(recipe.losses(outputs, targets), expected)
    assert float(expected.mean()) == pytest.approx(np.log(256), abs=0.1)
    right = (outputs.argmax(dim=2) == targets).float().mean(dim=1)
    torch.testing.assert_close(recipe.num_correct(outputs, targets), right)


def test_a_machine_imports_transformers_once_for_its_ranks():
    modules = recipe_program("text", config_of("text", {})).slow_imports
    assert modules == ("torch", *get_recipe("text").slow_imports)
    assert all(map(importlib.util.find_spec, modules))


def test_norms_and_embeddings_do_not_decay(tmp_path):
    recipe, _, _ = prepared(tmp_path)
    model = recipe.model()
    optimizer = build_optimizer(
        model, TrainingConfig(weight_decay=0.5), recipe.optimizer_groups(model)
    )
    decays = {
        id(each): group["weight_decay"]
        for group in optimizer.param_groups
        for each in group["params"]
    }
    kept = {name for name, parameter in model.named_parameters() if decays[id(parameter)] == 0}
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert kept >= {"model.model.embed_tokens.weight", "model.model.norm.weight"}
    assert kept & matrices == {"model.model.embed_tokens.weight"}
    assert {decays[id(each)] for name, each in model.named_parameters() if name not in kept} == {
        0.5
    }


def test_operations_are_counted_as_the_papers_do_and_shown_as_a_share_of_a_known_gpus(
    tmp_path, monkeypatch
):
    """6 N + 12 L H Q T per token; GPT-2's 124 million parameters at 1,024 tokens take 0.85 GFLOPs a
    token.
    """
    recipe, _, _ = prepared(tmp_path)
    model = recipe.model()
    num_parameters = sum(each.numel() for each in model.parameters())
    operations = recipe.flops_per_sample(model)
    assert operations == 8 * (6 * num_parameters + 12 * 2 * 2 * 8 * 8)

    def shown(recipe):
        config = TrainingConfig(precision="bf16")
        return sample_utilization(model, Parallelism(recipe, config, ALONE))

    assert shown(recipe) == 0
    monkeypatch.setattr(evaluation, "peak_flops", lambda config, world: 312e12)
    assert shown(recipe) == operations / 312e12
    assert shown(get_recipe("digits")) == 0
