"""Images in folders: chosen, listed and held out, decoded and augmented, and never silently
missing.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import models
from torchvision.transforms import functional

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.rank.data import SeededDataset, open_samples
from flyte_ddp.recipes.image_folder.files import (
    decode_image,
)
from flyte_ddp.recipes.image_folder.index import read_index
from flyte_ddp.recipes.image_folder.recipe import ImageFolder
from flyte_ddp.recipes.prepare import describe_data
from flyte_ddp.world import World
from tests.support.errors import raises_one_line
from tests.support.image_store import (
    COLOURS,
    image_bytes,
    image_tree,
    prepare,
    saved,
    write_tree,
)

ALONE = World(0, 1, torch.device("cpu"))


def names_in(directory):
    """The names of the training and of the held-out images."""
    index = read_index(directory)
    train = {index.train.file(sample).name for sample in range(len(index.train))}
    test = {index.test.file(sample).name for sample in range(len(index.test))}
    return train, test


# Choice of images


def test_classes_are_the_folders_and_both_directories_are_used_as_they_are(tmp_path, prepared):
    recipe, train, test, description = prepare(
        write_tree(image_tree(), tmp_path / "tree"), prepared
    )

    assert recipe.class_names == ["blue", "green", "red"]
    assert (len(train), len(test)) == (12, 12)
    assert {name.split("/")[0] for name in names_in(prepared)[0]} == {"train"}
    assert description.startswith(
        "12 training and 12 held-out images (in val/) of 3 classes (blue, green, red), read fr"
    )
    for sample in range(len(train)):
        image, label = train[sample]
        assert (image.dtype, image.shape) == (torch.uint8, (3, 32, 32))
        # A random part of the image: the corner with the number is less than half of any.
        assert image.flatten(1).median(dim=1).values.tolist() == list(
            COLOURS[recipe.class_names[label]]
        )


def test_without_split_directories_a_share_is_held_out_that_stays_when_images_are_added(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for directory, count in ((first, 50), (second, 70)):
        directory.mkdir()
        tree = write_tree(image_tree(("",), ("blue", "red"), count), tmp_path / f"tree{count}")
        prepare(tree, directory, held_out=0.3)
    (train, test), (more_train, more_test) = names_in(first), names_in(second)

    assert len(train) + len(test) == 100
    assert not train & test
    assert 15 <= len(test) <= 45
    assert train < more_train
    assert test < more_test


LACKING = r"at least two classes, each with at least 2 training images .*, got "
BROKEN_TREES = {
    "empty": ({}, "holds no files"),
    "no images": (
        {"train/a/readme.txt": b"-", "val/a/b.csv": b"-"},
        "expected images in a folder for each class, got none in .*; 2 files left out: 2 no image",
    ),
    "no folders": ({"a.png": image_bytes(COLOURS["red"])}, f"{LACKING}no class in"),
    "one class": (image_tree(classes=("red",)), f"{LACKING}'red' in"),
    "class only held out": (
        {name: each for name, each in image_tree().items() if not name.startswith("train/green")},
        f"{LACKING}0 and 4 of class 'green' in",
    ),
    "class not held out": (
        {name: each for name, each in image_tree().items() if not name.startswith("val/green")},
        rf"{LACKING}4 and 0 of class 'green' in",
    ),
    "too few": (
        {
            name: each
            for name, each in image_tree().items()
            if name[:10] != "train/blue" or name.endswith("000.png")
        },
        f"{LACKING}1 and 4 of class 'blue' in",
    ),
}


@pytest.mark.parametrize("name", BROKEN_TREES)
def test_an_unusable_tree_is_refused_with_the_reason(tmp_path, prepared, name):
    tree, reason = BROKEN_TREES[name]
    (tmp_path / "tree").mkdir()
    source = write_tree(tree, tmp_path / "tree")

    with pytest.raises(DataError, match=rf"^data: [^\n]*{reason}[^\n]*$") as caught:
        prepare(source, prepared)

    assert source in str(caught.value)


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        (
            "s3://no-such-bucket/images",
            {},
            "data: .*got s3://no-such-bucket/images: .*; create the bucket or correct",
        ),
        (
            "{url}/nothing",
            {},
            "expected a directory or a prefix .* got .*/nothing, which holds no files",
        ),
        (
            "s3://somebody:secret@bucket/images",
            {},
            "without a user name or a password; give them in the environment",
        ),
        ("/images", {"anonymous": True}, "anonymous: expected none with /images; it is for s3"),
        (
            "",
            {"architecture": "resnet19"},
            r"expected a known architecture \(did you mean resnet18\?\), got 'resnet19'",
        ),
        ("", {"trainable": "tail"}, "trainable: expected one of all, head, got 'tail'"),
        (
            "",
            {"architecture": "vit_b_16", "image_size": 100},
            "recipe_options.image_size: expected a multiple of 16, got 100",
        ),
    ],
)
def test_what_cannot_be_prepared_is_refused(store, prepared, source, options, reason):
    source = source.replace("{url}", store.fill({"a/a.png": b"-"}))
    with pytest.raises((ConfigError, DataError), match=reason) as caught:
        prepare(source, prepared, **options)

    assert "secret@" not in str(caught.value)


def test_without_a_source_the_images_are_drawn_and_always_the_same(tmp_path):
    fingerprints = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        recipe, *_, description = prepare("", tmp_path / name, image_size=0)
        fingerprints.add(describe_data(tmp_path / name)["fingerprint"])

    assert len(fingerprints) == 1
    assert description == (
        "240 training and 80 held-out images (in val/) of 4 classes (circle, pentagon, square, "
        "triangle), drawn here"
    )
    assert recipe.class_names == ["circle", "pentagon", "square", "triangle"]
    # the folder has another place on another machine
    (tmp_path / "two").rename(tmp_path / "elsewhere")
    train, _ = recipe.datasets(tmp_path / "elsewhere")
    assert train[0][0].shape == (3, 64, 64)


# Pixels


HALF_RED = Image.new("RGBA", (4, 2), (255, 0, 0, 255))
HALF_RED.paste((0, 0, 0, 0), (2, 0, 4, 2))
PALETTE = HALF_RED.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE)


@pytest.mark.parametrize(
    ("contents", "first", "last"),
    [
        (saved(Image.new("L", (4, 2), 120), "PNG"), (120,) * 3, (120,) * 3),
        (saved(Image.new("1", (4, 2), 1), "PNG"), (255,) * 3, (255,) * 3),
        (saved(HALF_RED, "PNG"), (255, 0, 0), (255,) * 3),
        (saved(HALF_RED.convert("LA"), "PNG"), (76,) * 3, (255,) * 3),
        (saved(HALF_RED, "WEBP", lossless=True), (255, 0, 0), (255,) * 3),
        (saved(PALETTE, "PNG"), (255, 0, 0), (0, 0, 0)),
        (
            saved(
                HALF_RED.convert("P"), "GIF", transparency=HALF_RED.convert("P").getpixel((3, 0))
            ),
            None,
            (255,) * 3,
        ),
    ],
    ids=[
        "grey",
        "black and white",
        "alpha",
        "grey alpha",
        "webp",
        "palette",
        "gif",
    ],
)
def test_every_kind_of_image_becomes_rgb(contents, first, last):
    image = decode_image(contents)

    assert (image.mode, image.size) == ("RGB", (4, 2))
    assert first is None or image.getpixel((0, 0)) == first
    assert image.getpixel((3, 0)) == last


def test_cmyk_becomes_rgb():
    image = decode_image(
        saved(Image.new("RGB", (16, 16), (200, 30, 30)).convert("CMYK"), "JPEG", quality=95)
    )

    assert image.mode == "RGB"
    assert np.allclose(image.getpixel((8, 8)), (200, 30, 30), atol=12)


def test_an_image_is_rotated_by_its_exif_orientation():
    wide = Image.new("RGB", (16, 8), "white")
    wide.paste("black", (0, 0, 8, 8))
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn to the right
    upright = decode_image(saved(wide, "PNG", exif=exif))

    assert upright.size == (8, 16)
    assert (upright.getpixel((4, 2)), upright.getpixel((4, 13))) == ((0,) * 3, (255,) * 3)


def test_augmentation_is_drawn_from_seed_epoch_and_sample_alone(tmp_path, prepared):
    contents = saved(
        Image.fromarray(np.random.RandomState(0).randint(0, 256, (60, 60, 3), dtype=np.uint8)),
        "PNG",
    )
    tree = dict.fromkeys(image_tree(), contents)
    _, train, test, _ = prepare(write_tree(tree, tmp_path / "tree"), prepared)
    seeded, again = SeededDataset(train, 5), SeededDataset(train, 5)
    (inputs, _), _ = seeded.__getitems__([(1, 3), (1, 4)])

    assert torch.equal(inputs[1], again[1, 4][0])
    assert not torch.equal(seeded[1, 3][0], seeded[2, 3][0])
    assert not torch.equal(seeded[1, 3][0], seeded[1, 4][0])
    held_out = SeededDataset(test, 5)
    assert torch.equal(held_out[1, 3][0], held_out[2, 4][0])


def test_pixels_are_normalized_as_torchvisions_weights_want():
    batch = torch.arange(96, dtype=torch.uint8).view(2, 3, 4, 4)
    preset = models.ResNet18_Weights.DEFAULT.transforms()
    expected = functional.normalize(batch / 255, preset.mean, preset.std)
    torch.testing.assert_close(ImageFolder().inputs(batch), expected)


# Unreadable images


BROKEN_IMAGES = {
    "missing": (None, "cannot be read: FileNotFoundError"),
    "no image": (
        b"<html>Not found</html>",
        "is no image that can be read: its format is not known",
    ),
    "empty": (b"", "cannot be read: expected the listed"),
    "cut": (
        image_bytes(COLOURS["green"], size=(200, 200), kind="JPEG")[:700],
        "is no image that can be read",
    ),
}


def _prepare_broken(tmp_path, prepared, kind, names=("train/green/001.png",), **options):
    """Call `prepare` with broken images: one is cut from the beginning, others break after the
    listing.
    """
    source = write_tree(image_tree(), tmp_path / "tree")
    contents, _ = BROKEN_IMAGES[kind]
    files = [Path(source, name) for name in names]
    for file in files if kind == "cut" else ():
        file.write_bytes(contents)
    found = prepare(source, prepared, **options)
    for file in files:
        if contents is None:
            file.unlink()
        elif kind == "no image":
            file.write_bytes(contents.ljust(file.stat().st_size))
        elif kind == "empty":
            file.write_bytes(contents)
    return found


@pytest.mark.parametrize("kind", BROKEN_IMAGES)
def test_an_unreadable_image_is_fatal_or_left_out_and_named_once(tmp_path, prepared, kind, caplog):
    recipe, train, _, _ = _prepare_broken(
        tmp_path, prepared, kind, unreadable="skip", augment=False
    )
    (samples,) = open_samples([train], recipe, TrainingConfig(), ALONE)
    for _ in range(2):
        (batch,) = samples.batches([torch.arange(12)], epoch=1)

    assert batch[1].tolist() == [0] * 4 + [1] * 3 + [2] * 4
    assert samples.num_unreadable == 2
    (line,) = [each for each in caplog.messages if "it keeps its place" in each]
    assert "train/green/001.png" in line
    fatal = dataclasses.replace(train, skips=False)
    with pytest.raises(DataError, match=f"^data: .*/train/green/001.png {BROKEN_IMAGES[kind][1]}"):
        fatal[5]


def test_predictions_leave_no_image_out(tmp_path, prepared):
    name = "val/green/001.png"
    recipe, _, _, _ = _prepare_broken(tmp_path, prepared, "no image", [name], unreadable="skip")
    images = recipe.predict_dataset(prepared)

    with pytest.raises(DataError, match=f"sample {name} cannot be read, and none is left out"):
        [images[index] for index in range(len(images))]


@pytest.mark.long
def test_an_error_in_a_loader_process_is_the_same_line(tmp_path, prepared):
    recipe, train, _, _ = _prepare_broken(tmp_path, prepared, "no image")
    (samples,) = open_samples([train], recipe, TrainingConfig(data_workers=1), ALONE)

    with raises_one_line(DataError) as caught:
        list(samples.batches(torch.arange(12).split(6), epoch=1))

    assert str(caught.value).startswith("data: ")
    assert "train/green/001.png is no image" in str(caught.value)
