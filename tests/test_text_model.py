"""The model of recipe text, and how it trains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank import evaluation
from flyte_ddp.rank.evaluation import FlopsUtilization
from flyte_ddp.rank.optim import build_optimizer
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.text.model import Shape, TextModel, compute_rotation, rotate
from flyte_ddp.world import World
from tests.support import sample_run
from tests.support.text_recipe import TINY, prepared

CPU = torch.device("cpu")


def new_model(seed=0, dropout=0.0, **shape):
    model = TextModel(Shape(**{"vocabulary": 50, **TINY, **shape}), dropout)
    model.reset_parameters(seed)
    return model


def test_a_token_is_predicted_from_those_before_it_alone():
    model = new_model()
    tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    assert logits.shape == (2, 8, 50)
    changed = tokens.clone()
    changed[:, 5:] = 0
    torch.testing.assert_close(model(changed)[:, :5], logits[:, :5])
    assert not torch.allclose(model(changed)[:, 5:], logits[:, 5:])


@pytest.mark.parametrize("parts", [[1] * 8, [5, 1, 1, 1], [3, 4, 1]])
def test_generating_with_kept_keys_and_values_equals_a_full_forward_pass(parts):
    model = new_model().eval()
    tokens = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(0))
    caches = model.new_caches()
    logits = torch.cat([model(part, caches) for part in tokens.split(parts, dim=1)], dim=1)
    torch.testing.assert_close(logits, model(tokens), atol=1e-5, rtol=1e-5)


def test_rotary_positions_make_products_depend_on_the_distance_alone():
    queries, keys = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0)).unbind(0)

    def product(at, other):
        places = [compute_rotation(place, 1, 16, CPU) for place in (at, other)]
        return (rotate(queries, places[0]) * rotate(keys, places[1])).sum()

    torch.testing.assert_close(product(7, 3), product(104, 100), atol=1e-4, rtol=1e-4)
    assert not torch.isclose(product(7, 3), product(7, 4))
    torch.testing.assert_close(product(5, 5), (queries * keys).sum(), atol=1e-4, rtol=1e-4)


def test_attention_is_the_textbooks():
    """A block's attention without the library's kernel, its mask and its layout."""
    block = new_model(seed=3).blocks[0].attention
    inputs = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(1))
    rotation = compute_rotation(0, 5, 8, CPU)
    queries, keys, values = (part.view(5, 2, 8).transpose(0, 1) for part in block.qkv(inputs)[0].chunk(3, dim=1))
    queries, keys = (rotate(part[None], rotation)[0] for part in (queries, keys))
    scores = (queries @ keys.transpose(1, 2) / 8**0.5).masked_fill(~torch.ones(5, 5).tril().bool(), -float("inf"))
    expected = block.output((scores.softmax(dim=-1) @ values).transpose(0, 1).reshape(5, 16))
    torch.testing.assert_close(block(inputs, rotation)[0], expected, atol=1e-6, rtol=1e-4)


def test_weights_are_a_function_of_the_seed_also_from_the_meta_device(tmp_path):
    recipe, _, _ = prepared(tmp_path)
    models = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        models.append(recipe.model())
    torch.manual_seed(5)
    with torch.device("meta"):
        hollow = recipe.model()
    assert all(parameter.is_meta for parameter in hollow.parameters())
    hollow.to_empty(device="cpu")
    hollow.reset_parameters(5)
    states = [list(model.parameters()) for model in (*models, hollow)]
    same = [all(map(torch.equal, states[0], other)) for other in states[1:]]
    assert same == [True, False, True]
    assert recipe.blocks(hollow) == list(hollow.blocks)


def test_fresh_model_is_as_good_as_guessing_and_learns(tmp_path):
    recipe, (train, _), _ = prepared(tmp_path)
    torch.manual_seed(0)
    model = recipe.model()
    inputs, targets = recipe.inputs(train.tensors[0][:16]), train.tensors[1][:16]
    expected = functional.cross_entropy(model(inputs).detach().transpose(1, 2), targets.long(), reduction="none").mean(
        dim=1
    )
    torch.testing.assert_close(recipe.losses(model(inputs).detach(), targets), expected)
    assert float(expected.mean()) == pytest.approx(np.log(256), abs=0.1)
    optimizer = build_optimizer(model, TrainingConfig(learning_rate=1e-2), recipe.optimizer_groups(model))
    for _ in range(30):
        optimizer.zero_grad()
        recipe.losses(model(inputs), targets).mean().backward()
        optimizer.step()
    assert recipe.losses(model(inputs), targets).mean() < 3.5
    right = (model(inputs).argmax(dim=2) == targets).float().mean(dim=1)
    torch.testing.assert_close(recipe.num_correct(model(inputs), targets), right)


def test_norms_and_embeddings_do_not_decay(tmp_path):
    recipe, _, _ = prepared(tmp_path)
    model = recipe.model()
    optimizer = build_optimizer(model, TrainingConfig(weight_decay=0.5), recipe.optimizer_groups(model))
    decays = {id(each): group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
    kept = {name for name, parameter in model.named_parameters() if decays[id(parameter)] == 0}
    norms = {f"blocks.{layer}.{part}_norm.weight" for layer in (0, 1) for part in ("attention", "feed_forward")}
    assert kept == {"embedding.weight", "norm.weight", *norms}
    assert {decays[id(each)] for name, each in model.named_parameters() if name not in kept} == {0.5}


def test_a_recipe_that_forgets_a_parameter_in_its_groups_is_refused():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="^optimizer_groups: expected every trained parameter .* got none with bias"):
        build_optimizer(model, TrainingConfig(), [{"params": [model.weight]}])
    model.bias.requires_grad_(False)
    build_optimizer(model, TrainingConfig(), [{"params": [model.weight, model.bias]}])


def test_operations_are_counted_as_the_papers_do(tmp_path):
    """6 N + 12 L H Q T per token; GPT-2's 124 million parameters at 1,024 tokens take 0.85 GFLOPs a token."""
    recipe, _, _ = prepared(tmp_path)
    model = recipe.model()
    num_parameters = sum(each.numel() for each in model.parameters())
    assert recipe.flops_per_sample(model) == 8 * (6 * num_parameters + 12 * 2 * 2 * 8 * 8)


def test_utilization_is_shown_only_for_a_known_gpu_and_a_recipe_that_counts_its_operations(tmp_path, monkeypatch):
    config, world = TrainingConfig(precision="bf16"), World(0, 0, 1, CPU)
    recipe, _, _ = prepared(tmp_path)
    model, epoch = recipe.model(), sample_run.epoch(1)
    assert FlopsUtilization(recipe, model, config, world).of(epoch) == {}
    monkeypatch.setattr(evaluation, "peak_flops", lambda config, world: 312e12)
    share = recipe.flops_per_sample(model) * epoch.samples_per_second / 312e12
    assert FlopsUtilization(recipe, model, config, world).of(epoch) == {"model_flops_utilization": share}
    assert FlopsUtilization(get_recipe("digits"), torch.nn.Linear(2, 2), config, world).of(epoch) == {}


def test_half_precision_and_dropout_train(tmp_path):
    recipe, (train, _), _ = prepared(tmp_path, dropout=0.5)
    model = recipe.model()
    inputs, targets = recipe.inputs(train.tensors[0][:4]), train.tensors[1][:4]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        first, second = (recipe.losses(model(inputs), targets) for _ in range(2))
        assert not torch.equal(first, second)
        model.eval()
        assert torch.equal(*(recipe.losses(model(inputs), targets) for _ in range(2)))
    first.mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
