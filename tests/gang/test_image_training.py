"""Models for images: their weights, their BatchNorm, and whole runs on two ranks."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from PIL import Image

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.launch.nodes.local import LocalPlace
from flyte_ddp.launch.protocol.programs import Job
from flyte_ddp.launch.recipe_program import recipe_program
from flyte_ddp.recipes.image_folder.recipe import ImageFolder
from flyte_ddp.recipes.image_folder.shards import write_images
from flyte_ddp.storage.state_dict_file import pin_state
from flyte_ddp.training.batch_norm import keep_frozen_statistics
from flyte_ddp.training.initial_state import load_initial_state
from tests.support.image_store import image_tree, prepare
from tests.support.runs import new_run

# The model


@pytest.mark.parametrize(
    "architecture",
    [
        "resnet18",
        "mobilenet_v3_small",
        "squeezenet1_1",
        pytest.param("vit_b_32", marks=pytest.mark.slow),
    ],
)
def test_the_last_layer_is_for_the_classes_and_alone_trained_if_so_configured(
    prepared, architecture
):
    recipe, train, _, _ = prepare(
        "", prepared, architecture=architecture, trainable="head", image_size=64
    )
    torch.manual_seed(0)
    model = recipe.model()
    outputs = model(recipe.inputs(torch.stack([train[sample][0] for sample in range(2)])))
    outputs.sum().backward()

    assert outputs.shape == (2, 4)
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(trained) == 2
    assert all(model.get_parameter(name).shape[0] == 4 for name in trained)


def test_torchvisions_weights_are_an_initial_state_fetched_once_or_missing_in_one_line(
    tmp_path, prepared, monkeypatch
):
    from torchvision import models

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    published = {
        name: value
        for name, value in models.resnet18().state_dict().items()
        if not name.endswith("batches_tracked")
    }

    def fetch(url, target, hash_prefix, progress):
        fetched.append((url.rpartition("/")[2], hash_prefix))
        if len(fetched) == 1:
            raise OSError("no route to host")
        torch.save(published, target)

    fetched = []
    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    recipe, *_ = prepare("", prepared)
    name, fresh = "torchvision:resnet18", ["fc"]
    assert pin_state(name) == name  # no path
    with pytest.raises(
        ConfigError,
        match=f"^initial_model_state: '{name}' cannot be downloaded .* no route to host",
    ):
        load_initial_state(recipe.model(), name, fresh_layers=fresh)
    with pytest.raises(
        ConfigError,
        match=(
            r"other shapes at fc.weight \(1000, 512\) instead of "
            r"\(4, 512\).*fresh_lay"
        ),
    ):
        load_initial_state(recipe.model(), name)
    for version in ("", ".IMAGENET1K_V1"):
        model = recipe.model()
        own_head = model.fc.weight.clone()
        load_initial_state(model, name + version, fresh_layers=fresh)
        assert torch.equal(model.fc.weight, own_head)
        assert all(
            torch.equal(model.state_dict()[key], published[key])
            for key in published
            if not key.startswith("fc")
        )
    assert fetched == [("resnet18-f37072fd.pth", "f37072fd")] * 2
    for unknown in ("torchvision:resnet19", "torchvision:resnet18.V9", "torchvision:"):
        with pytest.raises(
            ConfigError,
            match=f"^initial_model_state: expected .* torchvision:resnet50 .*'{unknown}'$",
        ):
            load_initial_state(recipe.model(), unknown)


def test_the_statistics_of_a_frozen_batch_norm_stay_and_those_of_a_trained_one_move():
    model = torch.nn.Sequential(
        torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)
    )
    model[0].requires_grad_(False)
    model.train()
    keep_frozen_statistics(model)
    model(torch.randn(8, 3) + 5)

    assert model[0].running_mean.tolist() == [0.0] * 3
    assert model[2].num_batches_tracked == 1


def test_synchronized_batch_norm_is_refused_on_cpus_before_any_rank_starts(tmp_path):
    job = Job(
        recipe_program("image_folder", TrainingConfig(sync_batch_norm=True)), str(tmp_path), 0.0
    )
    LocalPlace(1).check(job)
    with pytest.raises(
        ConfigError, match="^sync_batch_norm: expected false for ranks without GPUs, got true"
    ):
        LocalPlace(2).check(job)


def test_a_model_is_not_compiled_where_no_compiler_is(tmp_path, monkeypatch):
    program = recipe_program("image_folder", TrainingConfig(compile=True))
    monkeypatch.setenv("CXX", sys.executable)
    LocalPlace(1).check(Job(program, str(tmp_path), 0.0))
    monkeypatch.delenv("CXX")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=(
            r"^compile: expected false, or a C\+\+ compiler "
            r".*COMPILER=1.*, got true"
        ),
    ):
        LocalPlace(1).check(Job(program, str(tmp_path), 0.0))
    with pytest.raises(ConfigError, match="^compile: expected"):
        program.check_compiler()  # A rank on another machine makes this check too.


def test_predictions_travel_with_small_images_and_the_likeliest_classes():
    recipe = ImageFolder()
    recipe.class_names = [str(number) for number in range(50)]
    [shown] = recipe.report_samples(
        torch.zeros(1, 3, 224, 224, dtype=torch.uint8), torch.arange(50.0)[None], torch.tensor([3])
    )

    assert Image.open(io.BytesIO(shown.image)).size == (64, 64)
    assert (shown.truth, shown.guess) == ("3", "49")
    assert list(shown.scores) == [str(number) for number in range(49, 39, -1)]


@pytest.mark.long
def test_one_and_two_ranks_learn_the_same_from_shards_in_a_bucket(store, tmp_path):
    destination = f"{store.new_bucket()}/shards"
    write_images(
        store.fill(image_tree(count=16)),
        destination,
        0,
        1000,
        0.2,
        leaves_out_unreadable=False,
    )
    losses = {}
    for num_ranks in (1, 2):
        run = new_run(
            tmp_path / str(num_ranks), "flyte_ddp.recipes.image_folder.recipe.ImageFolder"
        )
        run.train(
            num_ranks,
            source=destination,
            epochs=2,
            global_batch_size=16,
            data_workers=0,
            recipe_options={"image_size": 32, "trainable": "head"},
        )
        last = run.result.epochs[-1]
        losses[num_ranks] = [last.train_loss, last.test_loss, last.metrics["accuracy"]]
    assert losses[1] == pytest.approx(losses[2], rel=1e-4)
