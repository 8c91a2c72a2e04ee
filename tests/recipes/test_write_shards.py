"""Shards that `flyte-ddp shards` writes: every sample once, in a seeded order, and what recipe
`image_folder` and `text` make of them.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os

import pyarrow
import pyarrow.parquet
import pytest

from flyte_ddp.data import Shards, write
from flyte_ddp.data.index import OWN_INDEX
from flyte_ddp.errors import ConfigError, DataError, StorageUnavailable
from flyte_ddp.recipes import get_recipe
from flyte_ddp.recipes.image_folder.shards import write_images
from flyte_ddp.recipes.shards_command import main
from flyte_ddp.recipes.text.shards import write_text
from flyte_ddp.recipes.text.tokens import train_tokenizer
from flyte_ddp.storage import Storage
from tests.support import sample_run, text_recipe
from tests.support.image_store import image_tree, prepare, write_tree

SHARD_BYTES = 1000  # some 8 of the images


@pytest.fixture(autouse=True)
def cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def contents_of(url):
    place = Storage(str(url))
    return {name: place.read(name) for name in place.find()}


@pytest.mark.parametrize("place", ["disk", pytest.param("store", marks=pytest.mark.long)])
def test_images_are_in_shards_once_as_they_are_and_mixed(place, store, tmp_path):
    tree = image_tree(count=16)
    source, destination = write_tree(tree, tmp_path / "tree"), str(tmp_path / "shards")
    if place == "store":
        source, destination = store.fill(tree), f"{store.new_bucket()}/shards"
    described = write_images(source, destination, 0, SHARD_BYTES, 0.2, leaves_out_unreadable=False)

    assert "48 training and 48 held-out images (in val/)" in described
    written = contents_of(destination)
    for split in ("train", "val"):
        records = [Shards(f"{destination}/{split}")[sample] for sample in range(48)]
        found = [(each["png"], ["blue", "green", "red"][int(each["cls"])]) for each in records]
        wanted = [(tree[name], name.split("/")[1]) for name in tree if name.startswith(split)]
        assert sorted(found) == sorted(wanted)
        labels = [each["cls"] for each in records]
        assert all(len(set(labels[first : first + 16])) == 3 for first in (0, 16, 32))
        shards = [name for name in written if name.startswith(split) and name.endswith(".tar")]
        assert 4 < len(shards) < 12
        Storage(destination).delete(f"{split}/{OWN_INDEX}")
        Shards(f"{destination}/{split}").prepare()
    assert contents_of(destination) == written  # the index too is what `prepare` makes


def test_the_same_command_writes_what_is_missing(tmp_path, monkeypatch):
    source, destination = write_tree(image_tree(), tmp_path / "tree"), str(tmp_path / "shards")
    arguments = source, destination, 0, SHARD_BYTES, 0.2, False
    write_images(*arguments)
    whole = contents_of(destination)
    for name in ("train/000001.tar", "train/" + OWN_INDEX, "val/000000.tar", "val/" + OWN_INDEX):
        os.unlink(f"{destination}/{name}")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left")

    with monkeypatch.context() as patch:
        patch.setattr(write, "SHORT_TIMEOUT", 0)
        patch.setattr("flyte_ddp.storage.directory.os.replace", fail)
        with pytest.raises(StorageUnavailable, match=r"^destination: .*/train is full: "):
            write_images(*arguments)
    with pytest.raises(DataError, match="^index: expected .* or end `flyte-ddp shards`"):
        prepare(destination, tmp_path)
    kept = os.stat(f"{destination}/train/000000.tar")
    write_tree({f"train/000001.tar.{'0' * 32}.tmp": b"cut"}, tmp_path / "shards")
    write_images(*arguments)
    assert contents_of(destination) == whole
    assert os.stat(f"{destination}/train/000000.tar") == kept
    for other in (
        (source, destination, 1),
        (write_tree({**image_tree(count=5)}, tmp_path / "more"), destination, 0),
    ):
        with pytest.raises(
            ConfigError, match="^destination: expected .* without shards of another"
        ):
            write_images(*other, SHARD_BYTES, 0.2, False)
    assert contents_of(destination) == whole


def test_an_unreadable_image_is_named_or_left_out_and_counted(tmp_path, caplog):
    tree = {**image_tree(), "train/red/cut.png": image_tree()["train/red/000.png"][:-30]}
    source = write_tree(tree, tmp_path / "tree")
    with pytest.raises(DataError, match="^data: .*/train/red/cut.png is no image that can be read"):
        main([source, str(tmp_path / "shards")])
    described = main([source, str(tmp_path / "skipped"), "--unreadable", "skip"])
    assert described.endswith("; 1 file left out: 1 unreadable")
    assert any("cut.png" in line and "it is left out" in line for line in caplog.messages)
    assert len(Shards(str(tmp_path / "skipped/train"))) == 12


def table_of(**columns):
    file = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("tree", "options", "expected"),
    [
        ({}, [], "data: expected a directory .*, which holds no files"),
        ({"a/x.txt": b"text"}, [], "data: expected images .*; 1 file left out: 1 no image"),
        ({"a.parquet": b"none"}, [], "data: .*/a.parquet cannot be read: pyarrow.lib.ArrowInvalid"),
        ({"a.parquet": table_of(a=[])}, [], "source: expected rows, got none in "),
        (
            {"a.parquet": table_of(a=[1]), "b.parquet": table_of(b=[1])},
            [],
            "data: .*/b.parquet cannot be read: .* columns of a.parquet, got another a, b",
        ),
        (image_tree(), ["--shard-mib", "0"], "--shard-mib: expected a whole number of at least 1"),
        (image_tree(), ["--held-out", "1"], "--held-out: expected a finite number "),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(tree, options, expected, tmp_path):
    (tmp_path / "tree").mkdir()
    source = write_tree(tree, tmp_path / "tree")
    with pytest.raises((ConfigError, DataError), match=f"^{expected}[^\n]*$"):
        main([source, str(tmp_path / "shards"), *options])
    assert not (tmp_path / "shards").exists()


def test_a_destination_with_other_files_is_refused(tmp_path):
    source = write_tree(image_tree(), tmp_path / "tree")
    with pytest.raises(ConfigError, match="^destination: expected a place without files, got "):
        main([source, source])


def test_shards_of_images_are_samples_as_those_of_their_folder(tmp_path):
    source, destination = write_tree(image_tree(), tmp_path / "tree"), str(tmp_path / "shards")
    write_images(source, destination, 0, SHARD_BYTES, 0.2, leaves_out_unreadable=False)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    of_folder, _, held_out, _ = prepare(source, tmp_path / "a")
    of_shards, _, streamed, described = prepare(destination, tmp_path / "b")

    assert described.startswith("12 training and 12 held-out samples in shards, read from ")
    assert described.endswith(": images of 3 classes")
    assert of_folder.class_names == of_shards.class_names

    def samples_of(data):
        samples = [data[number] for number in range(12)]
        return sorted((image.numpy().tobytes(), label) for image, label in samples)

    assert samples_of(held_out) == samples_of(streamed)
    _, train, _, _ = prepare(destination, tmp_path / "c", unreadable="skip", cache_gib=2)
    assert (train.unreadable, train.cache_gib) == ("ignore", 2)


def test_windows_of_a_text_are_in_shards_as_they_are_without_and_so_are_its_figures(tmp_path):
    options = {"tokens": "bpe", "vocabulary": 300, "separator": "\f"}
    text = tmp_path / "a.txt"
    text.write_text("\f".join(f"{number} is one of many numbers, über" for number in range(300)))
    shards = str(tmp_path / "shards")
    arguments = text_recipe.new_recipe(**options), str(text), shards, 0, SHARD_BYTES
    write_text(*arguments)
    whole = contents_of(shards)
    os.unlink(f"{shards}/train/000001.mds")
    write_text(*arguments)
    assert contents_of(shards) == whole

    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    of_text, plain, _ = text_recipe.prepared(tmp_path / "a", text, **options)
    of_shards, streamed, described = text_recipe.prepared(tmp_path / "b", shards, **options)
    sizes = [len(each) for each in plain]
    assert described == (
        f"{sizes[0]:,} training and {sizes[1]} held-out samples in shards, read from {shards}: "
        "windows in rows of 8 tokens"
    )

    def windows_of(data, size):
        pairs = [data[number] for number in range(size)]
        return [(*pair[0].tolist(), *pair[1].tolist()) for pair in pairs]

    found = [windows_of(data, size) for data, size in zip(streamed, sizes, strict=True)]
    expected = [windows_of(data, size) for data, size in zip(plain, sizes, strict=True)]
    assert found[1] == expected[1]
    assert found[0] != expected[0]
    assert sorted(found[0]) == sorted(expected[0])
    assert streamed[0].count_targets([0, 1]) == 2  # No rank has to count the windows of a batch.
    assert streamed[0][0][0].dtype == plain[0][0][0].dtype
    epoch = sample_run.epoch(1)
    assert of_shards.figures(epoch) == of_text.figures(epoch)


def test_shards_of_other_windows_than_the_recipes_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("one of many " * 30)
    shards = str(tmp_path / "shards")
    assert "1 shards of" in main([f"{tmp_path}/a.txt", shards, "--text", '{"context": 8}'])
    model = tmp_path / "model"
    train_tokenizer(iter(["another"]), 300).save(model)
    for name in ("config.json", "model.safetensors"):
        (model / name).write_text("{}")
    for number, (options, expected) in enumerate(
        (
            ({}, "context: expected 8, as in the shards at .*, got 128"),
            ({"context": 8, "tokens": "bpe"}, "tokens: expected 'auto', as in the shards"),
            ({"context": 8, "pretrained": str(model)}, "pretrained: expected a model with the tok"),
        )
    ):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(ConfigError, match=f"^recipe_options.{expected}"):
            get_recipe("text", options).prepare(shards, tmp_path / str(number))
    with pytest.raises(ConfigError, match="^source: expected text, got shards of it at "):
        main([shards, str(tmp_path / "again"), "--text", '{"context": 8}'])


def read_rows(place):
    shards = Shards(str(place))
    return [shards[number] for number in range(len(shards))]


def as_parquet(rows):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


RECORDS = [{"number": number, "text": f'row "{number}",\nx'} for number in range(40)]
TABLES = {
    "csv": lambda rows: (
        b"number,text\n"
        + "".join(
            f'{n["number"]},"{n["text"].replace(chr(34), 2 * chr(34))}"\n' for n in rows
        ).encode()
    ),
    "jsonl": lambda rows: "".join(f"{json.dumps(each)}\n" for each in rows).encode(),
    "csv.gz": lambda rows: gzip.compress(TABLES["csv"](rows)),
    "parquet": as_parquet,
}


@pytest.mark.parametrize("kind", TABLES)
def test_rows_of_tables_are_split_and_written_once(kind, tmp_path):
    tree = {f"{n}.{kind}": TABLES[kind](RECORDS[20 * n : 20 * n + 20]) for n in range(2)}
    source, destination = write_tree(tree, tmp_path / "source"), tmp_path / "shards"
    arguments = [source, str(destination), "--held-out", "0.25"]
    main(arguments)
    val, train = read_rows(destination / "val"), read_rows(destination / "train")
    assert (len(train), len(val)) == (30, 10)
    assert sorted([*train, *val], key=lambda each: each["number"]) == RECORDS
    assert [each["number"] for each in val] != sorted(each["number"] for each in val)
    whole = contents_of(destination)
    Storage(str(destination)).delete("train/000000.parquet")
    main(arguments)  # writes what is missing
    assert contents_of(destination) == whole
    with pytest.raises(ConfigError, match="without shards of another held-out share, got"):
        main(arguments[:2])
    main([source, str(tmp_path / "one")])
    assert sorted(read_rows(tmp_path / "one"), key=lambda each: each["number"]) == RECORDS


def test_files_of_a_table_may_differ_in_the_order_and_the_width_of_their_columns(tmp_path):
    tree = {"label=a/0.csv": b"x,y\n1,2\n", "label=b/0.csv": b"y,x\n2.5,1\n"}
    main([write_tree(tree, tmp_path / "csv"), f"{tmp_path}/a"])
    tree = {
        "label=a/0.parquet": as_parquet([{"x": 1, "y": 2.0}]),
        "label=b/0.parquet": as_parquet([{"y": 2.5, "x": 1}]),
    }
    main([write_tree(tree, tmp_path / "parquet"), f"{tmp_path}/b"])
    for place in "ab":
        found = sorted(read_rows(tmp_path / place), key=lambda each: each["label"])
        expected = [{"x": 1, "y": 2.0, "label": "a"}, {"x": 1, "y": 2.5, "label": "b"}]
        assert found == expected


@pytest.mark.parametrize(
    ("tree", "options", "expected"),
    [
        (
            {"a.csv": b"x\n1\n"},
            ["--unreadable", "skip"],
            "--unreadable: expected none with a table",
        ),
        (
            {"a.parquet": table_of(a=[1])},
            ["--unreadable", "fail"],
            "--unreadable: expected none with a table",
        ),
        (image_tree(count=2), ["--unreadable", "some"], "--unreadable: expected one of fail, skip"),
        ({"a.csv": b"x\n1\n"}, ["--held-out", "0.5"], "--held-out: expected a share that leaves"),
        ({"a.csv": b"x\n1\n"}, ["--held-out", "0"], "--held-out: expected"),
        ({"a.csv": b"x\n1\n"}, ["--held-out", "nan"], "--held-out: expected a finite number"),
        (
            {"a.csv": b"x\n1\n", "b.csv": b"x\nred\n"},
            [],
            "b.csv cannot be read: .*x.*int64.*string",
        ),
        ({"a.csv": b"x\n1\n", "b.csv": b"z\n1\n"}, [], "b.csv .*the columns of a.csv, got .* x, z"),
        ({"a.csv": b"x,y\n1\n"}, [], "a.csv cannot be read: .*Expected 2 columns, got 1"),
        ({"a.csv": b"x,x\n1,2\n"}, [], "columns: expected names that differ, got 'x' 2 times"),
        ({"a.jsonl": b'{"x": 1}\n{"x"'}, [], "a.jsonl cannot be read: .*JSON parse error"),
        ({"a.npy": b"x"}, [], "a.npy: read such files where they are, with a `reader`"),
        ({"a.tar": b"x"}, [], "these are shards, which"),
        ({"a.txt": b"x"}, [], "give --text"),
        ({"a.txt": b"x"}, ["--text", "{}", "--unreadable", "fail"], "--unreadable: expected none"),
        (
            {"a.txt": b"x"},
            ["--text", '{"held_out": 0.1}', "--held-out", "0.2"],
            "--held-out: expected none beside held_out in --text",
        ),
    ],
)
def test_sources_and_options_that_do_not_fit_are_refused_in_a_line(
    tree, options, expected, tmp_path
):
    source = write_tree(tree, tmp_path / "source")
    with pytest.raises((ConfigError, DataError), match=expected) as caught:
        main([source, f"{tmp_path}/shards", *options])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "shards").exists()


def test_the_share_of_text_that_is_held_out_may_be_given(tmp_path):
    text = "".join(f"line {number} of many\n\n" for number in range(200))
    source = write_tree({"a.txt": text.encode()}, tmp_path / "source")
    sizes = []
    for share in ("0.1", "0.5"):
        place = f"{tmp_path}/{share}"
        main([source, place, "--text", '{"context": 8}', "--held-out", share])
        sizes.append(len(Shards(f"{place}/val")))
    assert sizes[1] > 3 * sizes[0]


def test_images_beside_a_table_are_images(tmp_path):
    source = write_tree({**image_tree(count=16), "labels.csv": b"x\n1\n"}, tmp_path / "tree")
    assert "48 training and 48 held-out images" in main([source, f"{tmp_path}/shards"])
