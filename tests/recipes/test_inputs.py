"""Input is judged by its contents, not by its name; what is left out is counted by reason and
told.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import threading
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image
from pyarrow import parquet
from torch.utils.data import TensorDataset

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.rank.data import open_samples
from flyte_ddp.recipes import Recipe, get_recipe
from flyte_ddp.recipes.image_folder.files import decode_image
from flyte_ddp.recipes.image_folder.recipe import Images
from flyte_ddp.recipes.prepare import describe_data, prepare_data
from flyte_ddp.recipes.text.corpus import Corpus
from flyte_ddp.training.contract import check_contract
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import ALONE
from tests.support.errors import raises_one_line
from tests.support.image_store import (
    COLOURS,
    image_bytes,
    prepare,
    running_store,
    saved,
    write_tree,
)

# Folders of images

PICTURE = image_bytes(COLOURS["red"])


def folders(*names, classes=("a", "b"), count=4):
    return {
        f"{top}/{name}/{n}.png": PICTURE for top in names for name in classes for n in range(count)
    }


@pytest.mark.parametrize(
    ("tree", "held_out", "left_out"),
    [
        (folders("Train", "Test"), "Test", ""),
        (folders("TRAIN", "VAL"), "VAL", ""),
        (folders("training", "testing"), "testing", ""),
        (folders("train", "validation"), "validation", ""),
        (folders("train", "dev"), "dev", ""),
        (folders("train_images", "test_images"), "test_images", ""),
        (folders("Training Set", "Validation Set"), "Validation Set", ""),
        (folders("train2017", "val2017"), "val2017", ""),
        (folders("seg_train", "seg_test"), "seg_test", ""),
        (folders("train", "val", "extra"), "val", "8 outside of the folders used (extra/)"),
        (folders("train", "valid", "test"), "valid", "8 outside of the folders used (test/)"),
        (
            folders("train", "val") | {"unlabelled/1.png": PICTURE},
            "val",
            "1 outside of the folders used (unlabelled/)",
        ),
        (folders("train", "val") | {"train/1.png": PICTURE}, "val", "1 in no class's folder"),
        (folders("train", "val") | {"train/a/c/1.png": PICTURE}, "val", ""),
    ],
    ids=lambda value: (
        ",".join(dict.fromkeys(name.split("/")[0] for name in value))
        if isinstance(value, dict)
        else ""
    ),
)
def test_usual_names_of_splits_are_never_classes(tmp_path, prepared, tree, held_out, left_out):
    recipe, train, test, description = prepare(write_tree(tree, tmp_path / "tree"), prepared)

    assert recipe.class_names == ["a", "b"]
    assert (len(train), len(test)) == (8 + ("train/a/c/1.png" in tree), 8)
    assert f"(in {held_out}/) of 2 classes (a, b), read from" in description
    told = description.partition("left out: ")[2]
    assert told == left_out


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (folders("train", "more"), r"one folder of training images, .* got more/, train/ in"),
        (
            folders("Train", "train", "val"),
            (
                r"one folder of training images, .* got Train/, "
                r"train/, val/ in"
            ),
        ),
        (
            folders("train", "test", "testing"),
            (
                r"beside it one of held-out images, .* got test/, "
                r"testing/, train/ in"
            ),
        ),
        (folders("val", "test"), "one folder of training images, .* got test/, val/ in"),
        (folders(".", "test"), "one folder of training images, .* got a/, b/, test/ in"),
    ],
)
def test_folders_of_unclear_purpose_are_refused_in_one_line(tmp_path, prepared, tree, expected):
    with pytest.raises(DataError, match=f"^data: expected .*{expected} [^\n]*$"):
        prepare(write_tree(tree, tmp_path / "tree"), prepared)


def test_folders_that_hold_images_themselves_are_classes_whatever_their_names(tmp_path, prepared):
    tree = {f"{name}/{number}.png": PICTURE for name in ("train", "bus") for number in range(20)}
    recipe, *_ = prepare(write_tree(tree, tmp_path / "vehicles"), prepared)
    assert recipe.class_names == ["bus", "train"]


FILES = {  # name: (contents, its reason to be left out, "" for an image)
    "jpeg.png": (saved(Image.new("RGB", (40, 40)), "JPEG"), ""),
    "jpeg.txt": (saved(Image.new("RGB", (40, 40)), "JPEG"), ""),
    "without_suffix": (saved(Image.new("RGB", (40, 40)), "WEBP"), ""),
    "UPPER.JPG": (saved(Image.new("CMYK", (40, 40)), "JPEG"), ""),
    "palette.gif": (saved(Image.new("P", (40, 40)), "GIF"), ""),
    "animated.gif": (
        saved(
            Image.new("P", (40, 40)),
            "GIF",
            save_all=True,
            append_images=[Image.new("P", (40, 40), 9)],
        ),
        "",
    ),
    "bitmap.dat": (saved(Image.new("RGB", (40, 40)), "BMP"), ""),
    "tiff.img": (saved(Image.new("I;16", (40, 40)), "TIFF"), ""),
    "grey.pgm": (
        b"P5\n# Created by a program with a long name and a long address\n40 40\n255\n"
        + bytes(1600),
        "",
    ),
    os.fsdecode(b"caf\xe9.jpg"): (PICTURE, ""),
    "linked.png": (Path("a/jpeg.png"), ""),
    "broken_link.png": (Path("nowhere.png"), "no regular file"),
    "circle.png": (Path("a/circle.png"), "no regular file"),
    "text.jpg": (b"404 Not Found", "no image"),
    "page.png": (b"<!DOCTYPE html>", "no image"),
    "BMW.txt": (b"BMW is a make of cars", "no image"),
    "Thumbs.db": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), "no image"),
    "archive.jpg": (b"PK\x03\x04" + bytes(99), "no image"),
    "svg.jpg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
    "empty.jpg": (b"", "empty"),
    ".DS_Store": (b"\0\0\0\1Bud1", "hidden"),
    "._jpeg.jpg": (PICTURE, "hidden"),
}


def test_images_are_known_by_their_contents_and_other_files_are_counted_by_reason(
    tmp_path, prepared, caplog
):
    tree = folders("train", "val")
    source = tmp_path / "tree"
    write_tree(tree | {"__MACOSX/train/a/0.png": PICTURE}, source)
    for name, (contents, _) in FILES.items():
        file = source / "train/a" / name
        if isinstance(contents, Path):
            file.symlink_to(source / "train" / contents)
        else:
            file.write_bytes(contents)
    recipe, train, _, description = prepare(source, prepared)

    good = {f"train/a/{name}" for name, (_, reason) in FILES.items() if not reason}
    found = {train.images.file(sample).name for sample in range(len(train))}
    assert found == good | {name for name in tree if name.startswith("train")}
    told = "11 files left out: 6 no image, 3 hidden, 2 no regular file, 1 empty"
    assert description.endswith(f"; {told.replace('11', '12')}")
    assert any("12 files left out" in record.getMessage() for record in caplog.records)
    assert all(train[sample][0].shape == (3, 32, 32) for sample in range(len(train)))
    assert recipe.class_names == ["a", "b"]


def test_the_beginnings_of_a_stores_files_decide_too_and_nothing_more_is_read(prepared):
    with running_store() as store:
        tree = folders("train", "val") | {
            "train/a/photo": PICTURE,
            "train/a/text.jpg": b"no image" * 1000,
            "train/b/empty.jpg": b"",
        }
        url = store.fill(tree)
        before = len(store.requests)
        _, train, _, description = prepare(url, prepared)
        methods = [method for method, *_ in store.requests[before:]]
    assert len(train) == 9
    assert description.endswith("; 2 files left out: 1 empty, 1 no image")
    # a look for shards, a listing, and one of each file that is not empty
    assert methods == ["GET"] * (2 + len(tree) - 1)


def test_linked_folders_are_classes_and_circles_of_links_end(tmp_path, prepared):
    source = tmp_path / "tree"
    elsewhere = write_tree({f"{n}.png": PICTURE for n in range(4)}, tmp_path / "elsewhere")
    write_tree(folders("train", "val", classes=("a",)), source)
    for split in ("train", "val"):
        (source / split / "b").symlink_to(elsewhere)
    (source / "train/a/again").symlink_to(source)
    (source / "val/loop").symlink_to("loop")
    recipe, train, test, description = prepare(source, prepared)

    assert recipe.class_names == ["a", "b"]
    assert (len(train), len(test)) == (8, 8)
    assert train[7][1] == 1
    assert description.endswith("; 1 file left out: 1 no regular file")


# Pixels


def tiff_of_12_bits(value, size=8):
    """A TIFF with 12 bits a pixel, which PIL reads but does not write."""
    row = (value << 12 | value).to_bytes(3, "big") * (size // 2)
    entries = [
        (256, size),
        (257, size),
        (258, 12),
        (259, 1),
        (262, 1),
        (273, 134),
        (277, 1),
        (278, size),
    ]
    entries.append((279, size * len(row)))
    head = struct.pack("<2sHIH", b"II", 42, 8, len(entries))
    fields = b"".join(
        struct.pack("<HHII", tag, 4 if tag > 270 else 3, 1, number) for tag, number in entries
    )
    return (head + fields + bytes(4)).ljust(134, b"\0") + row * size


def uniform(value, dtype, mode=None):
    image = Image.fromarray(np.full((8, 8), value, dtype=dtype))
    assert mode is None or image.mode == mode
    return image


@pytest.mark.parametrize(
    "contents",
    [
        saved(uniform(0.5, np.float32, "F"), "TIFF"),
        saved(uniform(127.5, np.float32, "F"), "TIFF"),
        saved(uniform(1 << 30, np.int32, "I"), "TIFF"),
        saved(uniform(1 << 15, np.int32, "I"), "TIFF"),
        saved(uniform(128, np.int32, "I"), "TIFF"),
        saved(uniform(1 << 15, np.uint16), "TIFF"),
        saved(uniform(1 << 15, np.uint16), "PNG"),
        saved(uniform(1 << 11, np.uint16), "PNG"),
        tiff_of_12_bits(1 << 11),
        b"P5 8 8 4095\n" + b"\x08\x00" * 64,
        saved(uniform(128, np.uint8), "PNG"),
    ],
    ids=[
        "float",
        "float-255",
        "int32",
        "int32-16",
        "int32-8",
        "16-tiff",
        "16-png",
        "12-in-16",
        "12-tiff",
        "12-pgm",
        "8",
    ],
)
def test_half_grey_is_half_grey_at_any_depth(contents):
    image = decode_image(contents)
    assert (image.mode, image.size) == ("RGB", (8, 8))
    assert image.getpixel((4, 4)) == pytest.approx((128,) * 3, abs=1)


def test_black_and_white_of_floats_are_black_and_white():
    pixels = np.array([[-1.0, 0.0, 0.25, 1.0, np.nan]], dtype=np.float32)
    image = decode_image(saved(Image.fromarray(pixels), "TIFF"))
    assert [image.getpixel((column, 0))[0] for column in range(5)] == [0, 0, 64, 255, 0]


@pytest.mark.parametrize("size", [(3, 6000), (6000, 3), (40, 30)])
def test_a_long_image_takes_no_more_memory_and_is_torchvisions_middle(size, monkeypatch):
    from torchvision import transforms

    noise = np.random.RandomState(0).randint(0, 256, (*size[::-1], 3), dtype=np.uint8)
    picture = Image.fromarray(noise)
    sizes = []
    resize = Image.Image.resize

    def watch(self, size, *arguments, **options):
        sizes.append(size)
        return resize(self, size, *arguments, **options)

    monkeypatch.setattr(Image.Image, "resize", watch)
    image, _ = Images(
        images=_OneImage(),
        reader=_Reader(saved(picture, "PNG")),
        image_size=32,
        augments=False,
        skips=False,
    )[0]

    assert max(max(size) for size in sizes) <= 16 * 36
    # torchvision's own evaluation takes the same part of the image. The 3 x 600 pixels in the
    # middle are enough.
    middle = transforms.CenterCrop([min(side, 600) for side in size[::-1]])(picture)
    expected = transforms.PILToTensor()(transforms.CenterCrop(32)(transforms.Resize(36)(middle)))
    assert (image.int() - expected.int()).abs().float().mean() < (1 if max(size) == 40 else 12)


class _OneImage:
    labels = np.array([0])

    def __len__(self):
        return 1

    def file(self, sample):
        return "one.png"


class _Reader:
    def __init__(self, contents):
        self.contents = contents

    def read(self, file):
        return self.contents

    def decode(self, file, contents):
        return decode_image(contents)


# Text

STORIES = [f"{number}: " + "a story of its own, über alles " * 20 + "\n" for number in range(12)]


def zipped(text):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("one.txt", text)
    return file.getvalue()


def parquet_of(text):
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": [text]}), file)
    return file.getvalue()


TEXTS = {  # name: (how the story is stored, its reason to be left out, "" where it is read)
    "plain.txt": (str.encode, ""),
    "packed.txt": (lambda text: gzip.compress(text.encode()), ""),
    "UPPER.TXT.GZ": (lambda text: gzip.compress(text.encode()), ""),
    "not_packed.txt.gz": (str.encode, ""),
    "with_mark.txt": (lambda text: text.encode("utf-8-sig"), ""),
    "utf16.txt": (lambda text: text.encode("utf-16"), ""),
    "utf16_be.md": (lambda text: b"\xfe\xff" + text.encode("utf-16-be"), ""),
    "utf32.txt": (lambda text: text.encode("utf-32"), ""),
    "utf16.txt.gz": (lambda text: gzip.compress(text.encode("utf-16")), ""),
    "rows.txt": (parquet_of, ""),
    "text.parquet": (str.encode, ""),
    "zip.txt": (zipped, "zip archive"),
    "document.txt": (lambda text: b"%PDF-1.7\n" + text.encode(), "PDF"),
    "tar.txt.gz": (
        lambda text: gzip.compress(b"one.txt".ljust(512, b"\0") + text.encode()),
        "no text",
    ),
    "picture.md": (lambda text: PICTURE, "image"),
    "latin.txt": (lambda text: text.encode("latin-1"), "not in UTF-8"),
    "utf16_without_mark.txt": (lambda text: text.encode("utf-16-le"), "no text"),
    "binary.txt": (lambda text: bytes(range(256)), "no text"),
    "empty.txt": (lambda text: b"", "empty"),
    "picture.png": (lambda text: PICTURE, "hidden or of other names"),
    ".hidden/plain.txt": (str.encode, "hidden or of other names"),
    "__MACOSX/plain.txt": (str.encode, "hidden or of other names"),
    ".plain.txt": (str.encode, "hidden or of other names"),
    "_plain.txt": (str.encode, "hidden or of other names"),
}


def documents(corpus):
    """The documents of a corpus, whole."""
    found = [""]
    for piece in corpus.pieces():
        found[-1] += piece.text
        found += [""] * piece.ends
    return found[:-1]


def test_text_is_read_in_any_packing_and_encoding_and_nothing_else_is_trained(tmp_path, caplog):
    source = tmp_path / "texts"
    stories = {name: f"{name}: {STORIES[0]}" * 3 for name in TEXTS}
    write_tree({name: store(stories[name]) for name, (store, _) in TEXTS.items()}, source)
    elsewhere = write_tree({"linked.txt": b"a linked story"}, tmp_path / "elsewhere")
    (source / "linked").symlink_to(elsewhere)
    (source / "linked" / "back").symlink_to(source)
    corpus = Corpus(str(source))

    expected = [stories[name] for name, (_, reason) in TEXTS.items() if not reason]
    assert sorted(documents(corpus)) == sorted([*expected, "a linked story"])
    assert corpus.left_out == Counter(reason for _, reason in TEXTS.values() if reason)
    (tmp_path / "data").mkdir()
    prepare_data(get_recipe("text", {"context": 8}), str(source), tmp_path / "data")
    told = "13 files left out: 5 hidden or of other names, 3 no text, 1 "
    assert told in describe_data(tmp_path / "data")["description"]
    assert any(told in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name, (_, reason) in TEXTS.items()
        if reason not in ("", "empty") and not name.startswith((".", "_"))
    ],
)
def test_one_file_that_is_no_text_is_refused_with_what_it_is(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(TEXTS[name][0](STORIES[0]))
    said = f"^data: expected text in UTF-8, or in UTF-16 .*{name}: .*; convert it$"
    with pytest.raises(DataError, match=said):
        documents(Corpus(str(file)))


def test_text_in_utf16_is_cut_at_its_separators(tmp_path):
    file = tmp_path / "one.txt"
    file.write_bytes("<|end|>".join(STORIES * 40).encode("utf-16"))
    assert documents(Corpus(str(file), "<|end|>")) == STORIES * 40


# Names

# 180
NAMES = [
    f"{first}{second}{third}o" for first in "bdfhjl" for second in "aeiou" for third in "mnprst"
]
NO_ROW = "in a line that is no row of the table"
OTHERS = "with other characters than a to z, hyphen, full stop and space"


def table(names=NAMES, mark=",", header=("License", "Animal's Name", "Breed"), at=90, line=None):
    rows = [mark.join(["1", name, '"Mix, large"']) for name in names]
    return "\n".join([mark.join(header), *rows[:at], *([line] if line else []), *rows[at:]]) + "\n"


@pytest.mark.parametrize(
    ("name", "contents", "left_out"),
    [
        ("stray.csv", table(line='12,"Rex,Cat').encode(), f"1 {NO_ROW}"),
        ("stray_in_breed.csv", table(line='12,Rex,"Cat').encode(), f"1 {NO_ROW}"),
        ("stray_within.csv", table(line='12,Rex "the King,Cat').encode(), f"1 {OTHERS}"),
        ("ended_early.csv", table(line='12,"Rex" Max,Cat').encode(), f"1 {NO_ROW}"),
        ("too_many.csv", table(line="12,Rex,Cat,grey").encode(), f"1 {NO_ROW}"),
        ("last.csv", table(at=180, line='12,"Rex,Cat').encode(), f"1 {NO_ROW}"),
        ("short.csv", table(line="12").encode(), "1 empty"),
        (
            "over_lines.csv",
            table(["abo", *NAMES[1:]], line=f'12,{NAMES[0]},"one\nand, two"').encode(),
            "",
        ),
        ("semicolons.csv", table(mark=";").encode(), ""),
        ("tabs.txt", table(mark="\t").encode(), ""),
        ("bars", table(mark="|").encode(), ""),
        ("windows.csv", b"\xef\xbb\xbf" + table().replace("\n", "\r\n").encode(), ""),
        ("old_mac.csv", table().replace("\n", "\r").encode(), ""),
        ("utf16.csv", table().encode("utf-16"), ""),
        ("latin.csv", table(line="12,José,Cat").encode("latin-1"), f"1 {OTHERS}"),
        ("packed.csv", gzip.compress(table().encode()), ""),
        ("not_packed.csv.gz", table().encode(), ""),
        ("a_name_a_line.csv", "\n".join(NAMES).encode(), ""),
        ("stray.txt", "\n".join([*NAMES, '"Rex']).encode(), f"1 {OTHERS}"),
        ("list.txt", json.dumps(NAMES).encode("utf-8-sig"), ""),
        ("list.csv", json.dumps(NAMES).encode("utf-16"), ""),
    ],
)
def test_a_bad_line_costs_one_name_and_any_encoding_and_packing_is_read(
    tmp_path, name, contents, left_out
):
    (tmp_path / name).write_bytes(contents)
    (tmp_path / "data").mkdir()
    prepare_data(get_recipe("pet_names"), str(tmp_path / name), tmp_path / "data")
    description = describe_data(tmp_path / "data")["description"]
    count = 181 if name == "over_lines.csv" else 180
    assert f"{name}: {count} usable, {count} of them distinct" in description
    assert description.partition("left out: ")[2] == left_out


@pytest.mark.parametrize(
    ("name", "contents", "expected"),
    [
        ("pets", table(header=("id", "pet", "breed")).encode(), "with the columns id, pet, breed$"),
        (
            "pets.txt",
            table(mark=";", header=("id", "pet", "breed")).encode(),
            "with the columns id, pet, breed$",
        ),
        ("zip.csv", zipped(table()), "got .*zip.csv: zip archive$"),
        ("sheet.csv", b"PK\x05\x06" + bytes(18), "got .*sheet.csv: zip archive$"),
        ("paper.csv", b"%PDF-1.4 name", "got .*paper.csv: PDF$"),
        ("binary.txt", b"name\n" + bytes(99), "got .*binary.txt: no text$"),
    ],
)
def test_a_file_without_names_is_refused_with_what_it_is(tmp_path, name, contents, expected):
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(DataError, match=f"^data: expected a CSV.* {expected}"):
        prepare_data(get_recipe("pet_names"), str(tmp_path / name), tmp_path)


# Labels, and data sets that loader processes get

LABELS = torch.arange(32) % 4
CLASSES = "data: expected classes from 0 to 3 as targets, because the model has 4 outputs, got "


def in_memory(labels):
    return TensorDataset(torch.zeros(len(labels), 5), labels)


def loaded(labels):
    return [(torch.zeros(5), label) for label in labels]


def replace(number, label):
    labels = LABELS.clone()
    labels[number] = label
    return labels


class Labelled(Recipe):
    def __init__(self, train, held_out=None):
        self.sets = train, held_out or in_memory(LABELS)

    def prepare(self, source, directory):
        return "labels"

    def datasets(self, directory):
        return self.sets

    def model(self):
        return torch.nn.Linear(5, 4)


def check(recipe, **config):
    config = TrainingConfig(global_batch_size=8, **config)
    train, held_out = open_samples(recipe.datasets(None), recipe, config, ALONE)
    model = recipe.model()
    check_contract(model, train, Parallelism(recipe, config, ALONE), held_out)
    for inputs, targets in train.batches(torch.arange(len(train)).split(8), epoch=1):
        recipe.losses(model(recipe.inputs(inputs)), targets)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (Labelled(in_memory(LABELS + 1)), f"{CLASSES}4: number the classes from 0, or "),
        (Labelled(in_memory(LABELS - 1)), f"{CLASSES}-1: number"),
        (Labelled(in_memory(replace(29, 7))), f"{CLASSES}7: number"),
        (Labelled(in_memory(LABELS), in_memory(replace(30, 4))), f"{CLASSES}4: number"),
        (Labelled(in_memory((LABELS + 1).to(torch.uint8))), f"{CLASSES}4: number"),
        (Labelled(loaded((LABELS + 1).tolist())), f"{CLASSES}4: number"),
        (Labelled(loaded(replace(29, 4).tolist())), f"{CLASSES}4: number"),
        (
            Labelled(loaded(["cat", "dog"] * 16)),
            "data: expected the numbers of classes as targets, got 'cat': number ",
        ),
        (Labelled(in_memory(replace(3, -100))), None),
        (Labelled(loaded(LABELS.tolist())), None),
    ],
)
def test_labels_that_are_no_classes_are_named_first(recipe, expected):
    if expected is None:
        check(recipe)
        return
    with raises_one_line(DataError) as caught:
        check(recipe)
    assert str(caught.value).startswith(expected)


class WithLambda:
    def __init__(self):
        self.transform = lambda value: value + 1

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return self.transform(torch.zeros(5)), index % 4


class WithLock(WithLambda):
    def __init__(self):
        self.transform, self.lock = torch.neg, threading.Lock()


@pytest.mark.parametrize("data", [WithLambda(), WithLock()], ids=["lambda", "lock"])
def test_what_cannot_be_sent_to_loader_processes_is_named_in_one_line(data):
    check(Labelled(data))
    with pytest.raises(
        ConfigError,
        match=(
            r"datasets: expected .* can send to data_workers, "
            r"[^\n]* a lambda, [^\n]*$"
        ),
    ):
        check(Labelled(data), data_workers=1)
