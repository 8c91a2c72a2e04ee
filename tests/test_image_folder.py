"""Images in folders, on a disk or in a bucket: listed whole, read with patience, and never silently missing."""

from __future__ import annotations

import dataclasses
import io
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, DataError, StorageUnavailable
from flyte_ddp.launch.spawn import check
from flyte_ddp.prepare import describe_data, prepare_data
from flyte_ddp.rank.batch_norm import keep_frozen_statistics
from flyte_ddp.rank.data import _SeededDataset, open_samples
from flyte_ddp.rank.job import Job
from flyte_ddp.rank.programs import RecipeProgram
from flyte_ddp.rank.world import World
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.image_folder.files import (
    Access,
    FileReader,
    UnreadableImage,
    decode_image,
    list_files,
)
from flyte_ddp.recipes.image_folder.index import read_index
from flyte_ddp.recipes.image_folder.recipe import ImageFolder
from tests.support.image_store import COLOURS, image_bytes, image_tree, running_store, write_tree
from tests.support.runs import REPOSITORY, new_run

ALONE = World(0, 0, 1, torch.device("cpu"))


@pytest.fixture(scope="module")
def store():
    with running_store() as store:
        yield store


@pytest.fixture
def prepared(tmp_path):
    directory = tmp_path / "prepared"
    directory.mkdir()
    return directory


def prepare(source, directory, **options):
    """(recipe, training data, held-out data, the description) of `source` with the recipe's `options`."""
    recipe = get_recipe("image_folder", {"image_size": 32, **options})
    prepare_data(recipe, str(source), directory)
    return (recipe, *recipe.datasets(directory), describe_data(directory)["description"])


def names_in(directory):
    """The names of the training and of the held-out images."""
    index = read_index(directory)
    return tuple({images.file(sample).name for sample in range(len(images))} for images in (index.train, index.test))


# Which images


def test_classes_are_the_folders_and_both_directories_are_used_as_they_are(tmp_path, prepared):
    recipe, train, test, description = prepare(write_tree(image_tree(), tmp_path / "tree"), prepared)

    assert recipe.class_names == ["blue", "green", "red"]
    assert (len(train), len(test)) == (12, 12)
    assert {name.split("/")[0] for name in names_in(prepared)[0]} == {"train"}
    assert description.startswith("12 training and 12 held-out images (in val/) of 3 classes, read from ")
    for sample in range(len(train)):
        image, label = train[sample]
        assert (image.dtype, image.shape) == (torch.uint8, (3, 32, 32))
        assert image[:, 16, 16].tolist() == list(COLOURS[recipe.class_names[label]])


def test_validation_images_are_preferred_and_other_files_are_counted(tmp_path, prepared):
    tree = image_tree(("train", "test", "val"), ("blue", "red")) | {
        "train/blue/.DS_Store": b"",
        "train/blue/._000.png": b"",
        "train/red/notes.txt": b"",
        "train/stray.png": b"",
    }
    *_, description = prepare(write_tree(tree, tmp_path / "tree"), prepared)

    assert description.startswith("8 training and 8 held-out images (in val/) of 2 classes, 12 other files left out")


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


BROKEN_TREES = {
    "empty": ({}, "holds no files"),
    "no images": (
        {"train/a/readme.txt": b"", "val/a/b.csv": b""},
        "expected images .*.jpg, .*, got 2 other files",
    ),
    "no folders": ({"a.png": b"", "b.png": b""}, "at least two classes, got no class in"),
    "one class": (image_tree(classes=("red",)), "at least two classes, got 'red' in"),
    "train alone": (image_tree(("train",)), "expected one of val, .* beside train/, got train/ only"),
    "class only held out": (
        {name: b"" for name in image_tree() if not name.startswith("train/green")},
        "got no training images of class 'green' in",
    ),
    "class not held out": (
        {name: b"" for name in image_tree() if not name.startswith("val/green")},
        r"got no held-out \(in val/\) images of class 'green' in",
    ),
    "too few": (
        {name: b"" for name in image_tree() if not name.startswith("train/blue/") or name.endswith("000.png")},
        "expected at least 2 training images of each class .*, got 1 of class 'blue'",
    ),
}


@pytest.mark.parametrize("name", BROKEN_TREES)
def test_an_unusable_tree_is_refused_with_the_reason(tmp_path, prepared, name):
    tree, reason = BROKEN_TREES[name]
    (tmp_path / "tree").mkdir()
    source = write_tree(tree, tmp_path / "tree")

    with pytest.raises((ConfigError, DataError), match=reason) as caught:
        prepare(source, prepared)

    assert str(caught.value).startswith("data: ")
    assert source in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("s3://no-such-bucket/images", "data: .*got s3://no-such-bucket/images: .*; create the bucket or correct"),
        ("nope://images", "data: expected a path or a URL that fsspec knows, got 'nope://images'"),
        ("s3://somebody:secret@bucket/images", "without a user name or a password; give them in the environment"),
    ],
)
def test_a_source_that_cannot_be_listed_is_refused(store, prepared, source, reason):
    with pytest.raises((ConfigError, DataError), match=reason) as caught:
        prepare(source, prepared)

    assert "secret@" not in str(caught.value)


def test_an_empty_prefix_is_refused(store, prepared):
    url = store.fill(image_tree(classes=("blue", "red")))

    with pytest.raises(DataError, match=f"expected a directory or a prefix .* got {url}/nothing, which holds no files"):
        prepare(f"{url}/nothing", prepared)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"trainable": "tail"}, "trainable: expected all or head, got 'tail'"),
        ({"unreadable": "ignore"}, "unreadable: expected fail or skip, got 'ignore'"),
        ({"held_out": 1.0}, "held_out: expected a share above 0 and below 1, got 1.0"),
        ({"store_timeout": 0.0}, "store_timeout: expected a finite number above 0, got 0.0"),
        ({"image_size": 8}, "image_size: expected 0, or at least 16 pixels, got 8"),
        ({"architecture": "vit_b_16", "image_size": 100}, "image_size: expected a multiple of 16, got 100"),
        ({"endpoint_url": "https://me:secret@store"}, "endpoint_url: expected a URL without a user name or a password"),
    ],
)
def test_an_option_outside_its_range_is_refused(options, reason):
    with pytest.raises(ConfigError, match=reason) as caught:
        get_recipe("image_folder", options)

    assert "secret@" not in str(caught.value).replace(repr(options), "")


def test_an_unknown_architecture_is_refused_with_the_known_ones(prepared):
    with pytest.raises(DataError, match="architecture: expected one of .*resnet152, resnet18.*, got 'resnet19'"):
        prepare("", prepared, architecture="resnet19")


def test_without_a_source_the_images_are_drawn_and_always_the_same(tmp_path):
    fingerprints = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        recipe, *_, description = prepare("", tmp_path / name, image_size=0)
        fingerprints.add(describe_data(tmp_path / name)["fingerprint"])

    assert len(fingerprints) == 1
    assert description == "240 training and 80 held-out images (in val/) of 4 classes, drawn here"
    assert recipe.class_names == ["circle", "cross", "square", "triangle"]
    (tmp_path / "two").rename(tmp_path / "elsewhere")  # as on another machine
    train, _ = recipe.datasets(tmp_path / "elsewhere")
    assert train[0][0].shape == (3, 64, 64)


# In a bucket


def test_a_prefix_is_listed_page_by_page(store, prepared):
    tree = {f"{name}/{number:04d}.png": b"" for name in ("a", "b") for number in range(1100)}
    url = store.fill(tree | {"a/": b""})  # some tools make such objects for folders
    before = len(store.requests)

    _, train, test, _ = prepare(url, prepared)

    assert len(train) + len(test) == 2200
    pages = [query for _, _, query, _ in store.requests[before:] if "list-type" in query]
    assert len(pages) == 3
    assert sum("continuation-token" in query for query in pages) == 2


def test_an_image_costs_one_request_and_a_process_opens_one_client(store, prepared, monkeypatch):
    clients = []
    url = store.fill(image_tree())
    _, train, _, _ = prepare(url, prepared)
    opened = FileReader._opened
    monkeypatch.setattr(FileReader, "_opened", lambda self: clients.append(opened(self)) or clients[-1])
    before = len(store.requests)

    train.prefetch(range(12))
    images = [train[sample][0] for sample in range(12)]

    assert len(images) == 12
    assert [method for method, *_ in store.requests[before:]] == ["GET"] * 12
    assert len({id(client) for client in clients}) == 1


def test_neither_index_nor_note_nor_config_holds_credentials(store, prepared):
    prepare(store.fill(image_tree()), prepared)

    for file in prepared.iterdir():
        assert b"the-access-key" not in file.read_bytes()
        assert b"the-secret-key" not in file.read_bytes()


@pytest.mark.parametrize("anonymous", [False, True])
def test_requests_are_signed_unless_anonymous_and_go_to_the_endpoint_given(store, prepared, monkeypatch, anonymous):
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    url = store.fill(image_tree())
    before = len(store.requests)

    _, train, _, _ = prepare(url, prepared, endpoint_url=store.endpoint_url, anonymous=anonymous)
    train[0]

    signatures = [bool(signature) for *_, signature in store.requests[before:]]
    assert len(signatures) >= 2
    assert set(signatures) == {not anonymous}


def test_options_of_object_stores_are_refused_elsewhere(tmp_path, prepared):
    with pytest.raises(DataError, match=r"anonymous: expected none with .* for s3:// and gs:// only"):
        prepare(write_tree(image_tree(), tmp_path / "tree"), prepared, anonymous=True)


# With patience


def _one_file(store, timeout=20.0, store_timeout=60.0, cache=""):
    """A reader of a bucket with a single image, and the image's file and contents."""
    contents = image_bytes(COLOURS["red"])
    url, [file] = list_files(store.fill({"a.png": contents}), Access())
    store.requests.clear()
    return FileReader(url, Access(timeout=timeout, store_timeout=store_timeout), cache=cache), file, contents


@pytest.mark.parametrize("fault", ["throttle", "cut", "short", "slow"])
def test_transient_errors_are_retried(store, fault):
    reader, file, contents = _one_file(store, timeout=2.0 if fault == "slow" else 60.0)
    store.faults["images/a.png"] = [fault]

    assert reader.read(file) == contents
    assert len(store.asked_for("a.png")) >= 2


@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        (
            "throttle",
            StorageUnavailable,
            r".* could not be reached for 1 s: .*reduce your request rate",
        ),
        ("slow", StorageUnavailable, ".* could not be reached for 1 s: .*(Timeout|no answer)"),
        ("short", UnreadableImage, r"/a.png cannot be read: expected the listed \d+ bytes, got \d+"),
    ],
)
def test_retries_end_with_the_files_name_and_the_reason(store, fault, error, reason):
    reader, file, _ = _one_file(store, timeout=0.3 if fault == "slow" else 60.0, store_timeout=1.0)
    store.faults["images/a.png"] = [fault] * 20

    with pytest.raises(error, match=f"^data: .*{reason}"):
        reader.read(file)
    store.faults.clear()
    assert fault != "short" or len(store.asked_for("a.png")) == 3


def test_a_missing_file_is_requested_once(store):
    reader, file, _ = _one_file(store)
    store.delete(reader.url, "a.png")

    with pytest.raises(UnreadableImage, match="a.png cannot be read: FileNotFoundError"):
        reader.read(file)
    assert len(store.asked_for("a.png")) == 1


IN_A_FORK = """
import os, pickle, sys
reader, file = pickle.loads(bytes.fromhex(sys.argv[1]))
contents = reader.read(file)
pickle.dumps(reader)
child = os.fork()
if child == 0:
    os._exit(0 if reader.read(file) == contents else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_reader_goes_to_another_process_without_its_client(store):
    reader, file, _ = _one_file(store)
    reader.read(file)
    sent = pickle.dumps((reader, file)).hex()
    done = subprocess.run([sys.executable, "-c", IN_A_FORK, sent], cwd=REPOSITORY, timeout=120)

    assert done.returncode == 0
    assert len(store.asked_for("a.png")) == 3


# On disk


def test_read_files_are_cached_and_changed_ones_read_again(store, tmp_path):
    reader, file, contents = _one_file(store, cache=str(tmp_path / "cache"))
    assert [reader.read(file) for _ in range(3)] == [contents] * 3
    assert len(store.asked_for("a.png")) == 1

    other = image_bytes(COLOURS["blue"])
    changed = other + b"\0" * (len(contents) - len(other)) if len(other) < len(contents) else other[: len(contents)]
    store.put(reader.url, "a.png", changed)
    _, [newer] = list_files(reader.url, Access())

    assert newer.size == file.size
    assert reader.read(newer) == changed
    assert reader.read(file) == contents


def test_a_partial_file_in_the_cache_is_read_again(store, tmp_path):
    reader, file, contents = _one_file(store, cache=str(tmp_path / "cache"))
    reader.read(file)
    [kept] = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    kept.write_bytes(contents[:10])  # as a machine that lost its power leaves it

    assert reader.read(file) == contents
    assert kept.read_bytes() == contents


def test_a_killed_writer_leaves_no_partial_file(store, tmp_path, monkeypatch):
    reader, file, contents = _one_file(store, cache=str(tmp_path / "cache"))
    file = dataclasses.replace(file, size=-1)  # as from a store without sizes, where a partial file has no wrong size
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(Path, "write_bytes", lambda self, data: self.open("wb").write(data[:9]))
        with pytest.raises(KeyboardInterrupt):
            reader.read(file)

    assert len(list((tmp_path / "cache").rglob("*.tmp"))) == 1
    assert reader.read(file) == contents


def test_an_unwritable_cache_costs_only_speed_and_a_warning(store, tmp_path, caplog):
    (tmp_path / "cache").write_text("a file where a directory should be")
    reader, file, contents = _one_file(store, cache=str(tmp_path / "cache" / "below"))

    assert [reader.read(file), reader.read(file)] == [contents] * 2
    assert len([record for record in caplog.records if "going on without it" in record.getMessage()]) == 1


def test_two_processes_share_a_cache_and_never_see_a_part(store, tmp_path):
    tree = {f"{number:02d}.png": os.urandom(300_000) for number in range(12)}
    url, files = list_files(store.fill(tree), Access())
    readers = [FileReader(url, Access(), 4, str(tmp_path / "cache")) for _ in range(2)]
    store.requests.clear()

    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.starmap(FileReader.read_all, [(reader, files) for reader in readers * 2], chunksize=1)

    assert found == [list(tree.values())] * 4
    assert 12 <= len([path for _, path, *_ in store.requests if path.endswith(".png")]) <= 24
    kept = [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sorted(kept) == sorted(tree.values())


# Pixels


def _saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def _exif(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


HALF_RED = Image.new("RGBA", (4, 2), (255, 0, 0, 255))
HALF_RED.paste((0, 0, 0, 0), (2, 0, 4, 2))
SIXTEEN_BITS = Image.fromarray(np.full((2, 4), 200 << 8, dtype=np.uint16))
PALETTE = HALF_RED.convert("RGB").convert("P", palette=Image.Palette.ADAPTIVE)


@pytest.mark.parametrize(
    ("contents", "first", "last"),
    [
        (_saved(Image.new("L", (4, 2), 120), "PNG"), (120,) * 3, (120,) * 3),
        (_saved(Image.new("1", (4, 2), 1), "PNG"), (255,) * 3, (255,) * 3),
        (_saved(HALF_RED, "PNG"), (255, 0, 0), (255,) * 3),
        (_saved(HALF_RED.convert("LA"), "PNG"), (76,) * 3, (255,) * 3),
        (_saved(HALF_RED, "WEBP", lossless=True), (255, 0, 0), (255,) * 3),
        (_saved(PALETTE, "PNG"), (255, 0, 0), (0, 0, 0)),
        (_saved(HALF_RED.convert("P"), "GIF", transparency=HALF_RED.convert("P").getpixel((3, 0))), None, (255,) * 3),
        (_saved(SIXTEEN_BITS, "PNG"), (200,) * 3, (200,) * 3),
        (_saved(SIXTEEN_BITS, "TIFF"), (200,) * 3, (200,) * 3),
    ],
    ids=["grey", "black and white", "alpha", "grey alpha", "webp", "palette", "gif", "16 bit png", "16 bit tiff"],
)
def test_every_kind_of_image_becomes_rgb(contents, first, last):
    image = decode_image(contents)

    assert (image.mode, image.size) == ("RGB", (4, 2))
    assert first is None or image.getpixel((0, 0)) == first
    assert image.getpixel((3, 0)) == last


def test_cmyk_becomes_rgb():
    image = decode_image(_saved(Image.new("RGB", (16, 16), (200, 30, 30)).convert("CMYK"), "JPEG", quality=95))

    assert image.mode == "RGB"
    assert np.allclose(image.getpixel((8, 8)), (200, 30, 30), atol=12)


def test_an_image_is_rotated_by_its_exif_orientation():
    wide = Image.new("RGB", (16, 8), "white")
    wide.paste("black", (0, 0, 8, 8))
    upright = decode_image(_saved(wide, "PNG", exif=_exif(6)))  # a quarter turn to the right

    assert upright.size == (8, 16)
    assert (upright.getpixel((4, 2)), upright.getpixel((4, 13))) == ((0,) * 3, (255,) * 3)


def test_augmentation_is_drawn_from_seed_epoch_and_sample_alone(tmp_path, prepared):
    contents = _saved(Image.fromarray(np.random.RandomState(0).randint(0, 256, (60, 60, 3), dtype=np.uint8)), "PNG")
    tree = dict.fromkeys(image_tree(), contents)
    _, train, test, _ = prepare(write_tree(tree, tmp_path / "tree"), prepared)
    seeded, again = _SeededDataset(train, 5), _SeededDataset(train, 5)
    batch = seeded.__getitems__([(1, 3), (1, 4)])

    assert torch.equal(batch[1][0], again[1, 4][0])
    assert not torch.equal(seeded[1, 3][0], seeded[2, 3][0])
    assert not torch.equal(seeded[1, 3][0], seeded[1, 4][0])
    held_out = _SeededDataset(test, 5)
    assert torch.equal(held_out[1, 3][0], held_out[2, 4][0])


def test_pixels_are_normalized_as_torchvisions_weights_want():
    batch = torch.full((2, 3, 4, 4), 255, dtype=torch.uint8)
    batch[1] = 0
    inputs = ImageFolder().inputs(batch)

    assert inputs[0, :, 0, 0].tolist() == pytest.approx([(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225])
    assert inputs[1, :, 0, 0].tolist() == pytest.approx([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225])


# Unreadable images


BROKEN_IMAGES = {
    "missing": (None, "cannot be read: FileNotFoundError"),
    "no image": (b"<html>Not found</html>", "is no image that can be read: its format is not known"),
    "empty": (b"", "is no image that can be read"),
    "cut": (image_bytes(COLOURS["green"], size=(200, 200), kind="JPEG")[:700], "is no image that can be read"),
}


def _with_broken_images(tmp_path, kind, names=("train/green/001.png",)):
    source = write_tree(image_tree(), tmp_path / "tree")
    for name in names:
        file = Path(source, name)
        if BROKEN_IMAGES[kind][0] is not None:
            file.write_bytes(BROKEN_IMAGES[kind][0])
    return source


def _lose(source, kind, names):
    if kind == "missing":
        for name in names:
            Path(source, name).unlink()


@pytest.mark.parametrize("kind", BROKEN_IMAGES)
def test_an_unreadable_image_is_named_and_fatal_by_default(tmp_path, prepared, kind):
    source = _with_broken_images(tmp_path, kind)
    _, train, _, _ = prepare(source, prepared)
    _lose(source, kind, ["train/green/001.png"])

    with pytest.raises(DataError, match=f"^data: .*/train/green/001.png {BROKEN_IMAGES[kind][1]}"):
        [train[sample] for sample in range(len(train))]


@pytest.mark.parametrize("kind", BROKEN_IMAGES)
def test_an_unreadable_image_may_be_replaced_by_the_next_of_its_class(tmp_path, prepared, kind, caplog):
    source = _with_broken_images(tmp_path, kind)
    _, train, test, _ = prepare(source, prepared, unreadable="skip", augment=False)
    _lose(source, kind, ["train/green/001.png"])
    train.prefetch(range(12))
    samples = [train[sample] for sample in range(12)]

    assert [label for _, label in samples] == [0] * 4 + [1] * 4 + [2] * 4
    images = [image for image, _ in samples]
    assert torch.equal(images[5], images[6])  # of green, 001 and 002
    assert not torch.equal(images[4], images[6])
    assert (train.num_replaced, test.num_replaced) == (1, 0)
    train[5]
    assert train.num_replaced == 2
    lines = [record.getMessage() for record in caplog.records if "replaces it" in record.getMessage()]
    assert len(lines) == 1
    assert "train/green/001.png" in lines[0]


def test_a_class_without_readable_images_is_always_fatal(tmp_path, prepared):
    names = [f"train/green/{number:03d}.png" for number in range(4)]
    source = _with_broken_images(tmp_path, "no image", names)
    _, train, _, _ = prepare(source, prepared, unreadable="skip")

    with pytest.raises(DataError, match="nor can the images that follow it in class 'green'"):
        train[5]


def test_an_error_in_a_loader_process_is_the_same_line(tmp_path, prepared):
    source = _with_broken_images(tmp_path, "no image")
    recipe, train, _, _ = prepare(source, prepared)
    (samples,) = open_samples([train], recipe, TrainingConfig(data_workers=1), ALONE)

    with pytest.raises(DataError) as caught:
        list(samples.batches(torch.arange(12).split(6), epoch=1))

    assert str(caught.value).startswith("data: ")
    assert "train/green/001.png is no image" in str(caught.value)
    assert "\n" not in str(caught.value)


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
    job = Job(RecipeProgram("image_folder", TrainingConfig(sync_batch_norm=True)), str(tmp_path), 0.0)
    check(job, 1)
    with pytest.raises(ConfigError, match="^sync_batch_norm: expected false for ranks without GPUs, got true"):
        check(job, 2)


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
    assert bucket_run.result.epochs[-1].accuracy > 0.6  # of three classes
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
