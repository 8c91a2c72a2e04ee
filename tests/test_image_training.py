"""Models for images: their weights, their BatchNorm, and whole runs on two ranks."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.launch.local import LocalPlace
from flyte_ddp.launch.process.programs import Job, recipe_program
from flyte_ddp.rank.batch_norm import keep_frozen_statistics
from flyte_ddp.recipes.image_folder.recipe import ImageFolder
from tests.support.image_store import image_tree, prepare, running_store
from tests.support.runs import new_run


@pytest.fixture(scope="module")
def store():
    with running_store() as store:
        yield store


# The model


@pytest.fixture(scope="module")
def state_file(tmp_path_factory):
    """resnet18 for seven classes, as somebody else trained it."""
    from flyte_ddp.recipes.image_folder.models import build_model

    torch.manual_seed(1)
    model, _ = build_model("resnet18", 7, 32)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.1, 0.1)
    file = tmp_path_factory.mktemp("weights") / "resnet18.pt"
    torch.save(model.state_dict(), file)
    return file


@pytest.mark.parametrize(
    "architecture",
    ["resnet18", "mobilenet_v3_small", "squeezenet1_1", pytest.param("vit_b_32", marks=pytest.mark.slow)],
)
def test_the_last_layer_is_for_the_classes_and_alone_trained_if_so_configured(prepared, architecture):
    recipe, train, _, _ = prepare("", prepared, architecture=architecture, trainable="head", image_size=64)
    torch.manual_seed(0)
    model = recipe.model()
    outputs = model(recipe.inputs(torch.stack([train[sample][0] for sample in range(2)])))
    outputs.sum().backward()

    assert outputs.shape == (2, 4)
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(trained) == 2
    assert all(model.get_parameter(name).shape[0] == 4 for name in trained)


def test_weights_come_from_a_state_file_but_for_a_last_layer_of_other_classes(prepared, state_file):
    recipe, *_ = prepare("", prepared, weights=str(state_file))
    state_file_contents = torch.load(state_file, weights_only=True)
    state = recipe.model().state_dict()

    assert state.keys() == state_file_contents.keys()
    for name, value in state.items():
        assert name.startswith("fc.") or torch.equal(value, state_file_contents[name])
    assert state["fc.weight"].shape[0] == 4


class _Code:
    def __reduce__(self):
        return print, ("this ran",)


def test_weights_that_do_not_fit_are_refused_before_any_training(tmp_path, prepared, state_file, capsys):
    torch.save({"conv1.weight": _Code()}, tmp_path / "code.pt")
    (tmp_path / "text.pt").write_text("no weights")
    for weights, options, reason in (
        (
            state_file,
            {"architecture": "mobilenet_v3_small"},
            "entries are missing, unknown or of another shape",
        ),
        (tmp_path / "code.pt", {}, "is damaged or more than tensors"),
        (tmp_path / "text.pt", {}, "is damaged or more than tensors"),
        (tmp_path / "missing.pt", {}, "weights: expected none, default, or .*missing.pt', which does not exist"),
    ):
        directory = prepared / weights.name
        directory.mkdir()
        with pytest.raises(DataError, match=reason) as caught:
            prepare("", directory, weights=str(weights), **options)
        assert str(caught.value).startswith("weights: ")
        assert f"'{weights}'" in str(caught.value)
    assert "this ran" not in capsys.readouterr().out


def test_torchvisions_weights_are_fetched_once_or_missing_in_one_line(tmp_path, prepared, state_file, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))

    def fetch(url, target, hash_prefix, progress):
        fetched.append((url.rpartition("/")[2], hash_prefix))
        if len(fetched) == 1:
            raise OSError("no route to host")
        Path(target).write_bytes(state_file.read_bytes())

    fetched = []
    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    with pytest.raises(DataError, match=r"^weights: 'default' cannot be downloaded from .*no route.*; give none"):
        prepare("", prepared, weights="default")
    for name in ("second", "third"):
        (prepared / name).mkdir()
        recipe, *_ = prepare("", prepared / name, weights="default")
    expected = torch.load(state_file, weights_only=True)["conv1.weight"]

    assert torch.equal(recipe.model().state_dict()["conv1.weight"], expected)
    assert fetched == [("resnet18-f37072fd.pth", "f37072fd")] * 2


def test_the_statistics_of_a_frozen_batch_norm_stay_and_those_of_a_trained_one_move():
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    model[0].requires_grad_(False)
    model.train()
    keep_frozen_statistics(model)
    model(torch.randn(8, 3) + 5)

    assert model[0].running_mean.tolist() == [0.0] * 3
    assert model[2].num_batches_tracked == 1


def test_synchronized_batch_norm_is_refused_on_cpus_before_any_rank_starts(tmp_path):
    job = Job(recipe_program("image_folder", TrainingConfig(sync_batch_norm=True)), str(tmp_path), 0.0)
    LocalPlace(1).check(job)
    with pytest.raises(ConfigError, match="^sync_batch_norm: expected false for ranks without GPUs, got true"):
        LocalPlace(2).check(job)


def test_a_model_is_not_compiled_where_no_compiler_is(tmp_path, monkeypatch):
    program = recipe_program("image_folder", TrainingConfig(compile=True))
    monkeypatch.setenv("CXX", sys.executable)
    LocalPlace(1).check(Job(program, str(tmp_path), 0.0))
    monkeypatch.delenv("CXX")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"^compile: expected false, or a C\+\+ compiler .*COMPILER=1.*, got true"):
        LocalPlace(1).check(Job(program, str(tmp_path), 0.0))
    with pytest.raises(ConfigError, match="^compile: expected"):
        program.check_compiler()  # as a rank on another machine does


def test_predictions_travel_with_small_images_and_the_likeliest_classes():
    recipe = ImageFolder()
    recipe.class_names = [str(number) for number in range(50)]
    [shown] = recipe.predictions(
        torch.zeros(1, 3, 224, 224, dtype=torch.uint8), torch.arange(50.0)[None], torch.tensor([3])
    )

    assert Image.open(io.BytesIO(shown.image)).size == (64, 64)
    assert (shown.truth, shown.guess) == ("3", "49")
    assert list(shown.scores) == [str(number) for number in range(49, 39, -1)]


# Whole runs


@pytest.fixture(scope="module", params=[0, pytest.param(1, marks=pytest.mark.slow)])
def bucket_run(request, store, tmp_path_factory):
    """Two ranks, without and with loader processes, on images in a bucket, one of which is deleted in mid-epoch."""
    tree = image_tree(count=16)
    url = store.fill(tree)
    directory = tmp_path_factory.mktemp("bucket_run")
    (directory / "record").mkdir()
    asked = []

    def delete_one(name):
        if not name.endswith(".png"):
            return
        asked.append(name.removeprefix("images/"))
        if len(asked) == 20:
            gone.append(next(other for other in sorted(tree) if other.startswith("train/") and other not in asked))
            store.delete(url, gone[0])

    gone = []
    store.before_request = delete_one
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RECORD", str(directory / "record"))
        run = new_run(directory, "tests.support.recipes.WatchedImages").train(
            2,
            source=url,
            epochs=3,
            global_batch_size=16,
            data_workers=request.param,
            recipe_options={"image_size": 32, "unreadable": "skip", "cache": str(directory / "cache")},
        )
    store.before_request = lambda name: None
    run.gone = gone[0]
    run.asked = asked
    return run


def test_two_ranks_learn_from_images_in_a_bucket(bucket_run):
    assert bucket_run.result.epochs[-1].metrics["accuracy"] > 0.6  # of three classes
    assert bucket_run.started.num_train_samples == 48


def test_a_deleted_image_is_named_once_per_process_and_counted_each_epoch(bucket_run):
    assert [epoch.num_replaced for epoch in bucket_run.result.epochs] == [1, 1, 1]
    lines = [line for line in bucket_run.lines if bucket_run.gone in line]
    assert 1 <= len(lines) <= 2
    assert all("FileNotFoundError" in line and "another image of its class replaces it" in line for line in lines)


def test_each_other_image_is_requested_once(bucket_run):
    counts = {name: bucket_run.asked.count(name) for name in set(bucket_run.asked)} | {bucket_run.gone: 1}

    assert len(counts) == 96
    assert max(counts.values()) <= 2  # 2: both ranks at the same moment


def test_both_ranks_evaluate_with_the_saved_statistics(bucket_run):
    record = Path(bucket_run.directory) / "record"
    first, second = (json.loads((record / f"statistics-{rank}.json").read_text()) for rank in (0, 1))

    assert first == second
    assert first == pytest.approx(bucket_run.state()["bn1.running_mean"].tolist())
    assert first != [0.0] * len(first)


@pytest.mark.slow
def test_a_frozen_backbone_stays_unchanged_on_two_ranks(tmp_path, state_file):
    run = new_run(tmp_path, "flyte_ddp.recipes.image_folder.recipe.ImageFolder").train(
        2,
        epochs=1,
        data_workers=0,
        recipe_options={"image_size": 32, "weights": str(state_file), "trainable": "head"},
    )
    before, after = torch.load(state_file, weights_only=True), run.state()

    assert before.keys() == after.keys()
    for name, value in after.items():
        assert name.startswith("fc.") or torch.equal(value, before[name]), name
    assert after["fc.weight"].abs().max() > 0
