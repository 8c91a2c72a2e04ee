"""The parts of a split model: its blocks, its precision, what it needs of memory, and when its
weights are gathered.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.sharding import whole_state
from flyte_ddp.recipes import Recipe, config_of, get_recipe
from flyte_ddp.training.contract import open_model
from flyte_ddp.training.fsdp import FsdpParallelism
from flyte_ddp.training.initial_state import load_initial_state
from flyte_ddp.training.parallel import choose_parallelism, large_blocks
from flyte_ddp.world import World
from tests.support.gang import run_gang, train_recipe
from tests.support.recipes import Tiny
from tests.support.runs import new_run
from tests.support.text_recipe import TINY as SMALL
from tests.support.text_recipe import prepared

TINY = "tests.support.recipes.Tiny"
STEPS = 9  # per epoch


class Drawn(Tiny):
    """A recipe with weights that can be drawn one by one."""

    def model(self):
        model = super().model()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not parameter.is_meta:
                    parameter.copy_(self.initial_value(name, parameter.shape))
        return model

    def initial_value(self, name, shape):
        return torch.arange(float(shape.numel())).view(shape) + len(name)


@pytest.fixture(scope="module")
def inside(tmp_path_factory):
    """The values that `look_inside` returns on rank 0, one run for all tests."""
    directory = tmp_path_factory.mktemp("inside")
    run, text = new_run(directory / "tiny"), directory / "text"
    text.mkdir()
    prepared(text)
    state = directory / "state.pt"
    torch.manual_seed(7)
    torch.save(get_recipe(TINY).model().state_dict(), state)
    given = (str(run.data()), str(run.checkpoints), str(text / "data"), str(state))
    return run_gang(2, look_inside, *given)[0]


def look_inside(world, store, data, checkpoints, text_data, state):
    """Work of a gang: what is split before each micro-batch, the initial state, and what is
    compiled and computed.
    """
    before, sync = [], FsdpParallelism.sync

    def note(parallelism, model, is_last):
        before.append(type(next(model.parameters())).__name__ == "DTensor")
        return sync(parallelism, model, is_last)

    FsdpParallelism.sync = note
    config = config_of(TINY, {"epochs": 1, "parallel": "fsdp", "gradient_accumulation": 3})
    train_recipe(world, store, TINY, config, data, checkpoints)

    split = FsdpParallelism(get_recipe(TINY), config, world)
    model, _ = split.shard(open_model(split))
    load_initial_state(model, state)

    split = FsdpParallelism(Drawn(), config, world)
    drawn = open_model(split)
    assert all(parameter.is_meta for parameter in drawn.parameters())
    split.shard(drawn)

    compiled = []
    nn.Module.compile = lambda module: compiled.append(module)  # a method, so no built-in function
    options = {"recipe_options": SMALL, "parallel": "fsdp", "compile": True, "precision": "bf16"}
    config = config_of("text", options)
    recipe = get_recipe("text", config.recipe_options)
    recipe.datasets(Path(text_data))
    split = FsdpParallelism(recipe, config, world)
    language_model, replica = split.shard(open_model(split))
    types = []
    block = language_model.model.model.layers[0]
    block.register_forward_hook(lambda module, inputs, output: types.append(output.dtype))
    outputs = replica(torch.zeros(1, 4, dtype=torch.int64))
    outputs.sum().backward()
    return {
        "split": before,
        "state": whole_state(model.state_dict(), keep=True),
        "drawn": whole_state(drawn.state_dict(), keep=True),
        "compiled": [name for name, module in language_model.named_modules() if module in compiled],
        "types": [*types, outputs.dtype, next(language_model.parameters()).grad.dtype],
    }


@pytest.mark.long
def test_weights_stay_gathered_between_the_micro_batches_of_a_step(inside):
    first, *others = inside["split"]
    assert first  # the look at the layers has left nothing gathered
    # The last batch has one sample, and so one micro-batch.
    assert others == [False, False] + [True, False, False] * (STEPS - 2) + [True]


def test_a_split_model_starts_from_the_file_of_a_whole_one_or_is_drawn_tensor_by_tensor(inside):
    torch.manual_seed(7)
    models = {"state": get_recipe(TINY).model(), "drawn": Drawn().model()}
    for name, model in models.items():
        torch.testing.assert_close(inside[name], dict(model.state_dict()), rtol=0, atol=0)


def test_each_block_of_a_split_model_is_compiled_and_computes_in_bf16_with_gradients_in_fp32(
    inside,
):
    assert inside["compiled"] == ["model.model.layers.0", "model.model.layers.1"]
    assert inside["types"] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("asked", [False, True])
def test_blocks_compute_their_activations_again_only_if_asked(asked, caplog):
    calls = []

    class Counted(nn.Linear):
        def forward(self, inputs):
            calls.append(self)
            return super().forward(inputs)

    model = nn.Sequential(Counted(300, 300), Counted(300, 300))
    alone = World(0, 1, torch.device("cpu"))
    config = TrainingConfig(activation_checkpointing=asked, parallel="fsdp")
    _, replica = choose_parallelism(Tiny(), config, alone).shard(model)
    replica(torch.ones(1, 300, requires_grad=True)).sum().backward()
    assert [calls.count(layer) for layer in model] == ([2, 2] if asked else [1, 1])
    assert caplog.messages == [
        "parallel: one rank holds the whole model; fsdp splits it over several"
    ]


@pytest.mark.parametrize(
    ("parallel", "num_ranks", "gib", "optimizer", "expected"),
    [
        ("ddp", 1, 5, "adamw", None),
        ("ddp", 1, 2, "adamw", 'at least 3 ranks, with "parallel": "fsdp": .* 4.0 GiB'),
        ("fsdp", 2, 1, "adamw", "at least 5 ranks, on more GPUs or nodes: .* 2.0 GiB"),
        ("fsdp", 5, 1, "adamw", None),
        ("ddp", 1, 4, "sgd", None),
    ],
)
def test_a_model_that_cannot_fit_is_refused_with_what_would_make_it_fit(
    parallel, num_ranks, gib, optimizer, expected, monkeypatch
):
    # 1 GiB of weights, 4 GiB with AdamW
    model = nn.Linear(1 << 14, 1 << 14, bias=False, device="meta")
    config = TrainingConfig(parallel=parallel, optimizer=optimizer)
    gpu = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(nn.Module, "to", lambda self, device: self)
    world = World(0, num_ranks, torch.device("cuda", 0))
    refused = pytest.raises(ConfigError, match=f"^parallel: expected {expected}")
    with refused if expected else contextlib.nullcontext():
        choose_parallelism(Recipe(), config, world).place(model)


@pytest.mark.parametrize(("parallel", "is_contiguous"), [("ddp", False), ("fsdp", True)])
def test_convolutions_that_are_to_be_split_keep_the_order_that_fsdp_takes(parallel, is_contiguous):
    config, world = TrainingConfig(parallel=parallel), World(0, 2, torch.device("cpu"))
    model = choose_parallelism(Recipe(), config, world).place(nn.Conv2d(3, 8, 3))
    assert model.weight.is_contiguous() is is_contiguous


LAYERS = [nn.Linear(300, 300) for _ in range(3)]


@pytest.mark.parametrize(
    ("model", "blocks"),
    [
        (nn.ModuleDict({"body": nn.ModuleList(LAYERS), "head": nn.Linear(300, 300)}), LAYERS),
        (nn.Sequential(nn.Linear(4, 300), nn.Sequential(*LAYERS), nn.ReLU()), LAYERS),
        (nn.Linear(300, 300), []),
    ],
)
def test_a_model_without_named_blocks_is_split_by_size(model, blocks):
    assert large_blocks(model) == blocks
