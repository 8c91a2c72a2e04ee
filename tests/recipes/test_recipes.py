"""Recipes by name, and their data: what they prepare, and what they say of data that is missing or
damaged.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.recipes import config_of, get_recipe, mnist
from flyte_ddp.recipes.base import to_png
from flyte_ddp.recipes.digits import Digits
from flyte_ddp.recipes.prepare import describe_data, prepare_data
from tests.support.errors import raises_one_line

IDX_FILES = {
    "train-images-idx3-ubyte": (8, 28, 28),
    "train-labels-idx1-ubyte": (8,),
    "t10k-images-idx3-ubyte": (4, 28, 28),
    "t10k-labels-idx1-ubyte": (4,),
}


# By name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "$"),
        ("/etc/passwd", "$"),
        ("os", "$"),
        ("no_such_module.Recipe", ": there is no module 'no_such_module'"),
        (
            "tests.support.recipe.Tiny",
            r": there is no module 'tests.support.recipe' \(did you mean recipes\?\)",
        ),
        ("tests.support.recipes.Missing", ", which is no Recipe in module tests.support.recipes"),
        ("tests.support.recipes.not_a_recipe", ", which is no Recipe"),
        ("tests.support.recipes.tiny", r", which .* \(did you mean Tiny\?\)"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused_with_the_known_ones_and_the_reason(name, reason):
    with pytest.raises(ConfigError, match=f"^recipe: expected digits, .*, got {name!r}{reason}"):
        get_recipe(name)


def test_the_suggestion_for_a_misspelt_name_comes_first_and_alone():
    with pytest.raises(ConfigError) as recipe:
        get_recipe("mnits")
    with pytest.raises(ConfigError) as option:
        get_recipe(OPTIONAL, {"wdith": 3})
    assert str(recipe.value) == (
        "recipe: expected a known recipe (did you mean mnist?), got 'mnits'"
    )
    assert str(option.value).startswith(
        "recipe_options: expected a known option (did you mean width?), got 'wdith'"
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "\nimport no_such_dependency",
            (
                r"broken_\w+\.py:2: expected the package "
                r"no_such_dependency: pip install it"
            ),
        ),
        (
            "from flyte_ddp import Recipes",
            (
                r"broken_\w+\.py:1: ImportError: cannot import name "
                r"'Recipes'"
            ),
        ),
        ("\n1 / 0", r"broken_\w+\.py:2: ZeroDivisionError: division by zero"),
        ("def", "invalid syntax"),
    ],
)
def test_a_module_that_fails_on_import_is_refused_with_its_error_as_the_cause(
    tmp_path, monkeypatch, source, reason
):
    module = f"broken_{hashlib.md5(source.encode(), usedforsecurity=False).hexdigest()}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(ConfigError, match=f"cannot be imported.*{reason}") as caught:
        get_recipe(f"{module}.Recipe")

    assert caught.value.__cause__ is not None
    assert "recipe: expected" not in str(caught.value)


# Options of their own

OPTIONAL = "tests.support.recipes.Optional"


def test_options_are_attributes_of_the_recipe():
    # A console writes all numbers of a Flyte literal as floats, so 24 becomes 24.0.
    recipe = get_recipe(OPTIONAL, {"width": 24.0, "slope": 1, "sizes": [1, 2]})

    assert (recipe.width, type(recipe.width)) == (24, int)
    assert (recipe.slope, type(recipe.slope)) == (1.0, float)
    assert (recipe.activation, recipe.biased, recipe.sizes) == ("tanh", True, [1, 2])
    assert get_recipe(OPTIONAL).width == 16


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        (
            OPTIONAL,
            {"width": "wide"},
            "^recipe_options.width: expected a whole number, got 'wide'$",
        ),
        (OPTIONAL, {"width": 1.5}, "^recipe_options.width: expected a whole number, got 1.5$"),
        (OPTIONAL, {"biased": 1}, "^recipe_options.biased: expected true or false, got 1$"),
        (OPTIONAL, {"width": 0}, "width: 0 is out of range; accepted is"),
        (OPTIONAL, ["width"], "^recipe_options: expected an object with strings as keys, got "),
        (
            "digits",
            {"model": "large"},
            "^recipe_options: expected no options for recipe 'digits', got 'model'",
        ),
    ],
)
def test_an_invalid_option_is_refused_in_one_line(name, options, reason):
    with raises_one_line(ConfigError, match=reason):
        get_recipe(name, options)


def test_the_config_of_a_run_names_every_option_given_or_not():
    config = config_of(OPTIONAL, {"epochs": 7, "recipe_options": {"width": 24.0}})

    assert (config.epochs, config.global_batch_size) == (7, 12)
    assert config.recipe_options == {
        "width": 24,
        "slope": 0.5,
        "activation": "tanh",
        "biased": True,
        "sizes": [],
    }
    assert config_of("digits", {}).recipe_options == {}


# digits


def test_digits_are_real_whole_and_split_once_and_take_no_data(tmp_path):
    prepare_data(Digits(), "", tmp_path)
    train, test = Digits().datasets(tmp_path)

    assert (len(train), len(test)) == (1437, 360)
    assert describe_data(tmp_path)["description"].startswith(
        "scikit-learn's handwritten digits: 1,437 train"
    )
    images = np.concatenate([train.tensors[0].numpy(), test.tensors[0].numpy()])
    labels = np.concatenate([train.tensors[1].numpy(), test.tensors[1].numpy()])
    assert (images.dtype, images.min(), images.max()) == (np.uint8, 0, 255)
    # The published data set has these counts.
    assert sorted(np.bincount(labels)) == sorted([178, 182, 177, 183, 181, 182, 181, 179, 174, 180])
    # no sample is in both parts
    assert len(np.unique(images.reshape(len(images), -1), axis=0)) == len(images)
    with pytest.raises(DataError, match="expected none, got '/some/where'; recipe digits"):
        prepare_data(Digits(), "/some/where", tmp_path)


@pytest.mark.parametrize(("name", "shape"), [("digits", (5, 8, 8)), ("mnist", (5, 28, 28))])
def test_a_models_outputs_have_a_score_per_class_and_its_predictions_an_image(name, shape):
    import torch

    recipe = get_recipe(name)
    batch = torch.randint(256, shape, dtype=torch.uint8)
    outputs = recipe.model()(recipe.inputs(batch))
    predictions = recipe.report_samples(batch, outputs.detach(), torch.arange(5))

    assert outputs.shape == (5, 10)
    assert [prediction.truth for prediction in predictions] == ["0", "1", "2", "3", "4"]
    for prediction in predictions:
        assert sum(prediction.scores.values()) == pytest.approx(1)
        assert prediction.guess == max(prediction.scores, key=prediction.scores.get)
        assert prediction.image.startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("shape", "expected"), [((2, 3), (2, 3)), ((1, 2, 3), (2, 3)), ((3, 2, 5), (2, 5, 3))]
)
def test_a_picture_of_bytes_becomes_a_png_with_the_same_pixels(shape, expected):
    sample = torch.arange(math.prod(shape), dtype=torch.uint8).view(shape)
    wanted = sample
    if shape[0] == 3:
        wanted = sample.movedim(0, -1)  # colours come last in a picture
    pixels = np.asarray(Image.open(io.BytesIO(to_png(sample))))
    np.testing.assert_array_equal(pixels, wanted.reshape(expected).numpy())
    assert to_png(sample.float()) == b""


def test_inputs_are_bytes_made_floats_with_mnists_mean_and_deviation():
    import torch

    black_and_white = torch.tensor([[[0, 255]]], dtype=torch.uint8)

    assert get_recipe("digits").inputs(black_and_white).tolist() == [[[[0.0, 1.0]]]]
    expected = [(0 - 0.1307) / 0.3081, (1 - 0.1307) / 0.3081]
    assert get_recipe("mnist").inputs(black_and_white).flatten().tolist() == pytest.approx(expected)


# mnist, with small files in the place of the published ones


@pytest.fixture
def idx_files(monkeypatch):
    """{name: contents} of small IDX files. Their checksums replace the published ones."""
    random_state = np.random.RandomState(0)
    files = {}
    for name, shape in IDX_FILES.items():
        header = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
        files[name] = header + random_state.randint(10, size=shape, dtype=np.uint8).tobytes()
    checksums = {name: hashlib.md5(contents).hexdigest() for name, contents in files.items()}
    monkeypatch.setattr(mnist, "CHECKSUMS", checksums)
    return files


def _lay_out(files, directory, name="{}", packed=False):
    for stem, contents in files.items():
        file = directory / name.format(stem, dotted=stem.replace("-idx", ".idx"))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(contents) if packed else contents)


@pytest.mark.parametrize(
    ("name", "packed", "prefix"),
    [
        ("{}", False, "file://"),
        ("{}.gz", True, ""),
        ("raw/{}.gz", False, ""),
        ("MNIST/raw/{}", True, ""),
        ("{dotted}", False, ""),
        ("{dotted}.gz", True, ""),
    ],
)
def test_mnist_is_known_by_its_contents_whatever_its_files_are_called(
    idx_files, tmp_path, prepared, name, packed, prefix
):
    _lay_out(idx_files, tmp_path / "given", name, packed)
    if "dotted" in name:
        # An archive on the web has this layout.
        _lay_out(idx_files, tmp_path / "given", "{}/folder")

    prepare_data(mnist.Mnist(), f"{prefix}{tmp_path}/given", prepared)

    train, test = mnist.Mnist().datasets(prepared)
    assert train.tensors[0].numpy().tobytes() == idx_files["train-images-idx3-ubyte"][16:]
    assert train.tensors[1].tolist() == list(idx_files["train-labels-idx1-ubyte"][8:])
    assert test.tensors[0].shape == (4, 28, 28)
    assert test.tensors[1].tolist() == list(idx_files["t10k-labels-idx1-ubyte"][8:])
    assert describe_data(prepared)["description"].endswith(f"read from {prefix}{tmp_path}/given")


@pytest.mark.parametrize(
    "damage",
    [
        lambda contents: contents[:-7],
        lambda contents: contents[:100] + bytes([contents[100] ^ 1]) + contents[101:],
        lambda contents: b"<html>Not found</html>",
    ],
)
@pytest.mark.parametrize("name", ["{}", "{}.gz"])
def test_a_damaged_or_missing_file_is_named(idx_files, tmp_path, prepared, name, damage):
    _lay_out(idx_files, tmp_path, name, packed=name != "{}")
    file = tmp_path / name.format("train-images-idx3-ubyte")
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=f"^data: {file} is damaged"):
        prepare_data(mnist.Mnist(), str(tmp_path), prepared)

    file.unlink()
    with pytest.raises(DataError, match=f"got {tmp_path}, which holds no train-images"):
        prepare_data(mnist.Mnist(), str(tmp_path), prepared)


def test_mnist_is_downloaded_by_torchvision_into_the_users_cache(
    idx_files, tmp_path, prepared, monkeypatch
):
    from torchvision import datasets

    def fail(self):
        raise RuntimeError("Error downloading:\nTried a mirror, got:\nno route to host")

    monkeypatch.setattr(datasets.MNIST, "_load_data", lambda self: (None, None))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.MNIST, "download", fail)
    with pytest.raises(
        DataError,
        match="^data: MNIST could not be downloaded: .*a mirror, got: no route to host; give a",
    ):
        prepare_data(mnist.Mnist(), "", prepared)
    monkeypatch.setattr(
        datasets.MNIST, "download", lambda self: _lay_out(idx_files, Path(self.raw_folder))
    )
    prepare_data(mnist.Mnist(), "", prepared)
    assert "downloaded from torchvision's mirrors" in describe_data(prepared)["description"]
    assert (tmp_path / "cache/flyte-ddp/MNIST/raw/train-images-idx3-ubyte").exists()


def test_other_data_have_another_fingerprint(tmp_path):
    recipe = get_recipe("tests.support.recipes.Tiny")
    fingerprints = []
    for name, source in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / name).mkdir()
        prepare_data(recipe, source, tmp_path / name)
        fingerprints.append(describe_data(tmp_path / name)["fingerprint"])

    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


@pytest.mark.parametrize("recipe", [None, 3, int, b"digits"])
def test_what_names_no_recipe_is_refused_in_a_line(recipe):
    with raises_one_line(ConfigError, match="^recipe: expected a name or a class of Recipe's, got"):
        config_of(recipe, {})
