"""Shards in each format and place, read in any order; and what is wrong with them, in one line."""

from __future__ import annotations

import contextlib
import dataclasses
import decimal
import errno
import fcntl
import functools
import gzip
import http.server
import io
import itertools
import json
import os
import pickle
import subprocess
import tarfile
import threading

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flyte_ddp.data import Mixture, Shards
from flyte_ddp.data.cache import room_for_reads
from flyte_ddp.data.readers import (
    HEAD,
    WHOLE,
    TarShard,
    decode_mds,
    find_tar_offsets,
    read_members,
)
from flyte_ddp.data.source import CONCURRENT_READS, Source
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.rank.plan import EpochPlan, Share
from flyte_ddp.storage import Storage
from tests.support.emulators import s3, s3_bucket  # noqa: F401 - fixtures
from tests.support.image_store import write_tree
from tests.support.shards import FORMATS, SIZES, make_tree, mds, record, tar, to_record


def put(url, tree):
    place = Storage(url)
    for name, contents in tree.items():
        place.write(name, contents)
    return url


@pytest.fixture(name="cache", autouse=True)
def cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / f"flyte-ddp-shards-{os.getuid()}"


@pytest.mark.parametrize("place", ["disk", "store"])
@pytest.mark.parametrize("kind", FORMATS)
def test_any_sample_of_each_format_is_read(kind, place, bucket, tmp_path):
    tree, read = make_tree(kind)
    url = put(f"{bucket}/train" if place == "store" else str(tmp_path / "train"), tree)
    shards = Shards(url, transform=to_record, reader=read)
    with pytest.raises(DataError, match=r"index: expected the index of .*: call `prepare\(\)`"):
        len(shards)
    assert shards.prepare().startswith(
        f"100 samples in 8 shards of {url}/, 0.00 GiB; fewer than 128, of which each rank reads"
    )
    shards = pickle.loads(pickle.dumps(Shards(url, transform=to_record, reader=read)))
    assert len(shards) == 100
    shards.prefetch([0, 3, 50])
    assert [shards[number] for number in range(99, -1, -1)] == [
        record(number) for number in range(99, -1, -1)
    ]
    with pytest.raises(IndexError):
        shards[100]


@pytest.mark.parametrize("kind", ["tar", "mds", "jsonl"])
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_shards_are_unpacked_once(kind, suffix, tmp_path):
    tree, _ = make_tree(kind)
    codec = {".gz": "gzip", ".zst": "zstd"}[suffix]
    packed = {
        f"{name}{suffix}": gzip.compress(contents)
        if codec == "gzip"
        else pyarrow.compress(contents, codec, asbytes=True)
        for name, contents in tree.items()
    }
    shards = Shards(write_tree(packed, tmp_path / "train"), transform=to_record)
    shards.prepare()
    assert [shards[number] for number in range(100)] == [record(number) for number in range(100)]


def test_columns_are_those_that_are_read(tmp_path):
    for kind in FORMATS:
        tree, read = make_tree(kind)
        url = write_tree(tree, tmp_path / kind)
        shards = Shards(url, columns=["number"], reader=read)
        shards.prepare()
        assert int(shards[41].pop("number")) == 41
        assert shards[41].keys() == {"number"}
        shards = Shards(url, columns=["label"], reader=read)
        with pytest.raises(DataError, match="shard-0003.* columns: expected 'label', got only"):
            shards[21]


def test_indexes_of_others_are_read_as_they_are(tmp_path, caplog):
    sizes = dict(zip(make_tree("mds")[0], SIZES, strict=True))
    for kind in ("mds", "wids", "energon"):
        tree, _ = make_tree("mds" if kind == "mds" else "tar")
        rows = [
            (name, size, len(contents))
            for (name, contents), size in zip(tree.items(), sizes.values(), strict=True)
        ]
        name, index = {
            "mds": (
                "index.json",
                {
                    "version": 2,
                    "shards": [
                        {
                            "samples": size,
                            "raw_data": {"basename": name, "bytes": num_bytes, "hashes": {}},
                            "zip_data": None,
                        }
                        for name, size, num_bytes in rows
                    ],
                },
            ),
            "wids": (
                "index.json",
                {
                    "wids_version": 1,
                    "shardlist": [
                        {"url": name, "nsamples": size, "filesize": num_bytes}
                        for name, size, num_bytes in rows
                    ],
                },
            ),
            "energon": (
                ".nv-meta/.info.json",
                {"shard_counts": {name: size for name, size, _ in rows}},
            ),
        }[kind]
        tree[name] = json.dumps(index).encode()
        tree[".nv-meta/split.yaml"] = b"split_parts: {val: [shard-0001.tar]}"
        shards = Shards(write_tree(tree, tmp_path / kind), transform=to_record)
        assert [shards[number]["number"] for number in (0, 55, 99)] == [0, 55, 99]
        assert shards._index.num_bytes == sum(num_bytes for _, _, num_bytes in rows)
        assert shards.prepare().startswith("100 samples in 8 shards")
        warned = "split.yaml divides the shards into training and held-out ones" in caplog.text
        assert warned == (kind == "energon")


def test_new_shards_follow_those_that_the_index_has(tmp_path):
    tree, _ = make_tree("tar")
    late = tree.pop("shard-0002.tar")
    url = write_tree(tree, tmp_path / "train")
    Shards(url).prepare()
    before = Shards(url)._index
    write_tree({"shard-0002.tar": late}, tmp_path / "train")
    Shards(url).prepare()
    after = Shards(url)._index
    assert after.entry(7).name == "shard-0002.tar"
    assert after.head(7).checksum() == before.checksum() != after.checksum()


def test_a_list_of_urls_has_its_index_at_a_place_of_its_own(bucket, tmp_path):
    tree, _ = make_tree("jsonl")
    put(bucket, tree)
    urls = [f"{bucket}/{name}" for name in tree]
    with pytest.raises(ConfigError, match="index: expected a URL where the index"):
        Shards(urls).prepare()
    shards = Shards(urls, index=f"{tmp_path}/index", transform=to_record)
    shards.prepare()
    assert [shards[number]["number"] for number in (0, 55, 99)] == [0, 55, 99]
    with pytest.raises(DataError, match=r"other names, got .*shard-0000.jsonl 2 times"):
        Shards([*urls, urls[0]], index=f"{tmp_path}/other").prepare()


def test_every_encoding_of_mds_is_decoded():
    image = Image.new("RGB", (3, 2), (10, 20, 30))
    file = io.BytesIO()
    image.save(file, "PNG")
    array = numpy.arange(6, dtype=numpy.int16).reshape(2, 3)
    raw = numpy.array([3, 2, 3], numpy.uint32).tobytes() + b"RGB" + image.tobytes()
    cases = [
        ("bytes", b"ab", b"ab"),
        ("str", "ä".encode(), "ä"),
        ("int", numpy.int64(-5).tobytes(), -5),
        ("uint16", numpy.uint16(65535).tobytes(), 65535),
        ("float32", numpy.float32(1.5).tobytes(), 1.5),
        ("str_int", b"123456789012345678901", 123456789012345678901),
        ("str_float", b"1.25", 1.25),
        ("str_decimal", b"1.10", decimal.Decimal("1.10")),
        ("json", b'{"a": [1]}', {"a": [1]}),
    ]
    for encoding, data, expected in cases:
        assert decode_mds(encoding, data) == expected, encoding
    for encoding, data in (
        ("ndarray:int16:2,3", array.tobytes()),
        ("ndarray:int16", bytes([2 << 2, 2, 3]) + array.tobytes()),
        ("ndarray", bytes([17, 2 << 2 | 1, 2, 0, 3, 0]) + array.tobytes()),
    ):
        found = decode_mds(encoding, data)
        assert found.dtype == array.dtype
        assert numpy.array_equal(found, array)
    for encoding, data in (("png", file.getvalue()), ("pil", raw), ("jpeg:90", file.getvalue())):
        assert decode_mds(encoding, data).convert("RGB").tobytes() == image.tobytes()
    with pytest.raises(DataError, match="got 'pkl', which runs code of whoever wrote it"):
        decode_mds("pkl", pickle.dumps(1))


def test_values_of_parquet_are_pythons_and_lists_of_numbers_arrays(tmp_path):
    import pyarrow.parquet

    rows = [
        {"tokens": [1, 2, 3], "names": ["a"], "image": {"bytes": b"x"}, "score": None},
        {"tokens": [4], "names": [], "image": None, "score": 0.5},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    shards = Shards(str(tmp_path))
    shards.prepare()
    found = [{**shards[row], "tokens": shards[row]["tokens"].tolist()} for row in range(2)]
    assert found == rows
    assert shards[0]["tokens"].dtype == numpy.int64


def cut(tree):
    tree["shard-0004.tar"] = tree["shard-0004.tar"][:-2000]


def replace(tree):
    # The new file has as many bytes: the store's version differs.
    tree["shard-0004.tar"] = tree["shard-0004.tar"].replace(b"record 25", b"recorr 25")


@pytest.mark.parametrize(
    ("break_it", "place", "expected"),
    [
        (lambda tree: tree.pop("shard-0004.tar"), "disk", "FileNotFoundError"),
        (lambda tree: tree.pop("shard-0004.tar"), "store", "FileNotFoundError"),
        (cut, "disk", r"expected \d+ bytes as in the index, got"),
        (cut, "store", "expected version .* as in the index, got"),
        (replace, "store", "expected version .* as in the index, got"),
    ],
)
def test_a_shard_that_is_gone_or_changed_is_named(break_it, place, expected, bucket, tmp_path):
    tree, _ = make_tree("tar")
    url = bucket if place == "store" else str(tmp_path / "train")
    Shards(put(url, tree)).prepare()
    Storage(url).delete("shard-0004.tar")
    break_it(tree)
    shards = Shards(put(url, tree))
    assert shards[0]["number"] == b"0"
    for read in (lambda: shards[25], lambda: shards[26]):
        with pytest.raises(DataError, match="shard-0004.tar cannot be read: ") as caught:
            read()
        assert "\n" not in str(caught.value)
        caught.match(expected)


def test_damaged_shards_and_samples_are_named_with_the_reason(tmp_path):
    tree, _ = make_tree("jsonl")
    url = write_tree(tree, tmp_path / "train")
    Shards(url).prepare()
    contents = tree["shard-0004.jsonl"].replace(b'{"number": 25', b'["number": 25')
    write_tree({"shard-0004.jsonl": contents}, tmp_path / "train")
    shards = Shards(url, transform=lambda fields: 1 / (fields["number"] - 40))
    with pytest.raises(DataError, match="shard-0004.jsonl: sample 0 cannot be read: json.decoder"):
        shards[25]
    assert shards[26] == -1 / 14
    with pytest.raises(
        DataError,
        match=r"shard-0004.jsonl: sample 15 cannot be read: ZeroDivisionError.*\(test_shards.py:",
    ):
        shards[40]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        ({}, "expected shards .*, got none in"),
        ({"README.md": b"text"}, "expected shards .*, got none in"),
        ({"a.tar": b"no tar"}, "a.tar cannot be read: tarfile.ReadError"),
        ({"a.parquet": b"no parquet"}, "a.parquet cannot be read: pyarrow.lib.ArrowInvalid"),
        ({"a.mds": mds([record(0)])[:-5] + b""}, None),
        ({"index.json": b"{}"}, "index: expected an index of shards, got .*index.json: 'shards'"),
    ],
)
def test_a_prefix_without_shards_and_files_that_are_none_are_refused(tree, expected, tmp_path):
    shards = Shards(write_tree({"other/x": b"", **tree}, tmp_path / "train"))
    if expected is None:
        shards.prepare()
        with pytest.raises(DataError, match="a.mds: sample 0 cannot be read: expected .* bytes"):
            shards[0]
        return
    with pytest.raises(DataError, match=expected):
        shards.prepare()


def test_shards_of_no_sample_are_passed_over(tmp_path):
    tree, _ = make_tree("tar", [0, 3, 0, 2, 0])
    shards = Shards(write_tree(tree, tmp_path / "train"), transform=to_record)
    shards.prepare()
    assert [shards[number]["number"] for number in range(len(shards))] == [0, 1, 2, 3, 4]
    empty = Shards(write_tree({"a.tar": tar([])}, tmp_path / "empty"))
    empty.prepare()
    with pytest.raises(DataError, match="data: expected samples, got none in"):
        len(empty)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"source": []}, "source: expected a path or URL, or a list of URLs, got"),
        ({"source": "https://me:secret@host/x"}, "source: expected URLs without a user name"),
        ({"lanes": 0}, "lanes: expected"),
        ({"window": 1.5}, "window: expected"),
        ({"cache_gib": 0}, "cache_gib: expected"),
    ],
)
def test_arguments_of_another_kind_are_refused(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        Shards(**{"source": "/data", **arguments})


def test_the_cache_is_bounded_shared_and_for_one_user(bucket, cache, s3):  # noqa: F811
    tree, _ = make_tree("tar")
    put(bucket, tree)
    Shards(bucket).prepare()
    size = max(map(len, tree.values()))
    limit = 2 * size / 2**30
    shards = Shards(bucket, transform=to_record, cache_gib=limit)
    for number in (*range(0, 100, 3), 0):
        assert shards[number] == record(number)
        kept = [file.stat().st_size for file in cache.iterdir() if file.suffix != ".lock"]
        assert sum(kept) <= 2 * size
    s3.requests.clear()
    # A new object stands for another process.
    assert Shards(bucket, transform=to_record)[0] == record(0)
    assert s3.asked_for("shard-0000.tar") == []
    small = Shards(bucket, cache_gib=limit / 4)
    with pytest.raises(ConfigError, match=r"cache_gib: expected at least .* got"):
        small[30]
    # The rest of a killed process is removed first, and the file of a live process is kept.
    place, lock_of = shards._cache._place, shards._cache._lock_of
    parts = (WHOLE, HEAD, 0)
    used = {lock_of(place(shards._index.entry(n), part)[0]) for n in range(8) for part in parts}
    # We must not wait for our own lock.
    free = [n for n in range(64) if f"{cache}/{n}.lock" not in used]
    left, made = (cache / f"{number:08x}{'0' * 24}.part" for number in free[:2])
    own = cache / "notes.txt"  # A user's own file is in the folder.
    for number, file in enumerate((left, made, own)):
        file.write_bytes(b"x" * size)
        os.utime(file, (number, number))
    with open(lock_of(str(made)), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number in (0, 30, 99):
            assert shards[number] == record(number)
    assert (left.exists(), made.exists(), own.exists()) == (False, True, True)
    made.unlink()
    cache.chmod(0o770)
    with pytest.raises(ConfigError, match="cache_dir: expected a directory of this user's alone"):
        Shards(bucket)[0]


@pytest.fixture
def parts(monkeypatch):
    """Shards are cut into parts of a sample or a row group."""
    monkeypatch.setattr("flyte_ddp.data.readers.PART_BYTES", 30)


@pytest.mark.parametrize("kind", ["tar", "jsonl", "mds", "parquet"])
@pytest.mark.long
def test_of_a_shard_in_a_store_the_parts_that_are_read_are_fetched(kind, parts, bucket, cache, s3):  # noqa: F811
    tree, _ = make_tree(kind)
    put(bucket, tree)
    Shards(bucket).prepare()
    name, shard = next((name, each) for name, each in tree.items() if "0004" in name)
    shards = Shards(bucket, transform=to_record)
    assert [shards[number] for number in (40, 41)] == [record(40), record(41)]
    kept = [file.stat().st_size for file in cache.iterdir() if file.suffix != ".lock"]
    if kind != "parquet":  # A Parquet shard's parts are kept unpacked.
        assert sum(kept) < len(shard) / 2
    # The whole shard or its head was fetched for the index, and then two parts.
    assert len(s3.ranges_of(bucket, name)) == 3
    before = len(s3.requests)
    # A new object stands for another process.
    assert Shards(bucket, transform=to_record)[40] == record(40)
    assert len(s3.requests) - before == 2  # Only the index is requested.
    assert [shards[number] for number in range(100)] == [record(number) for number in range(100)]


@pytest.mark.parametrize("how", ["gone", "cut", "older", "damaged"])
@pytest.mark.parametrize("kind", ["tar", "jsonl"])
def test_a_shard_without_its_offsets_is_fetched_whole(
    how, kind, parts, tmp_path, monkeypatch, caplog
):
    url = write_tree(make_tree(kind)[0], tmp_path / "train")
    Shards(url).prepare()
    for number, file in enumerate(sorted((tmp_path / "train").glob("flyte_ddp_index.npz.*"))):
        contents = file.read_bytes()
        if how == "gone":
            file.unlink()
            continue
        changes = {"cut": contents[:-8], "damaged": contents[:-1] + b"x", "older": bytes([number])}
        file.write_bytes(changes[how] + contents[8:] if how == "older" else changes[how])
    monkeypatch.setattr(Source, "local_path", lambda *_: "")  # A store has no local paths.
    shards = Shards(url, transform=to_record)
    assert [shards[number] for number in range(100)] == [record(number) for number in range(100)]
    warned = caplog.text.count("has no offsets of this version of shard-")
    assert warned == (0 if how == "gone" else 8)


def test_members_with_long_names_are_in_the_part_of_their_sample(parts, tmp_path, monkeypatch):
    for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT):
        contents = io.BytesIO()
        with tarfile.open(fileobj=contents, mode="w", format=kind) as archive:
            for number in range(9):
                archive.addfile(tarfile.TarInfo(f"directory-{number}"))
                for extension in ("number", "text"):
                    member = tarfile.TarInfo(f"{'long' * 30}/{number}.{extension}")
                    member.size = 1
                    archive.addfile(member, io.BytesIO(str(number).encode()))
        url = write_tree({"a.tar": contents.getvalue()}, tmp_path / str(kind))
        Shards(url).prepare()
        with monkeypatch.context() as patch:
            patch.setattr(Source, "local_path", lambda *_: "")
            shards = Shards(url)
            for number in range(9):
                assert shards[number] == {
                    "__key__": f"{'long' * 30}/{number}",
                    "number": str(number).encode(),
                    "text": str(number).encode(),
                }


names = st.text(st.sampled_from("a/é."), min_size=1, max_size=3).map(lambda each: f"x{each * 60}.b")
members = st.lists(
    st.tuples(names | st.just("x.b"), st.binary(max_size=600), st.sampled_from([0, 1.5]))
)


@given(members, st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]))
def test_members_of_a_tar_file_are_where_tarfile_says(members, form):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, data, time in members:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(data), time
            with contextlib.suppress(ValueError):  # The value is too long for the format.
                archive.addfile(member, io.BytesIO(data))
    with tarfile.open(fileobj=io.BytesIO(file.getvalue())) as archive:
        expected = [(each.offset, each.name, each.offset_data, each.size) for each in archive]
    assert list(read_members(file.getvalue(), has_end=True)) == expected


def test_a_damaged_header_is_no_end_of_a_tar_file(tmp_path):
    contents = bytearray(tar([record(number) for number in range(3)]))
    place = find_tar_offsets(bytes(contents))[1]
    contents[place] ^= 1
    shards = Shards(write_tree({"a.tar": bytes(contents)}, tmp_path / "train"))
    with pytest.raises(DataError, match=f"a.tar cannot be read: .* header .* at byte {place}"):
        shards.prepare()


def test_a_process_makes_so_many_files_at_once_and_no_more(tmp_path, monkeypatch):
    count, found, all_are_there = 2 * CONCURRENT_READS, [], threading.Event()

    class Watched:
        """The room, and whom it lets in at once."""

        def __init__(self, room):
            self.room = room

        def __enter__(self):
            is_in = self.room.acquire(blocking=False)
            found.append(is_in)
            if len(found) == count:
                all_are_there.set()
            return is_in or self.room.acquire()

        def __exit__(self, *_):
            self.room.release()

    def read(path):
        assert all_are_there.wait(60)
        yield {"name": os.path.basename(path)}

    url = write_tree({f"{number}.own": b"" for number in range(64)}, tmp_path / "train")
    shards = Shards(url, reader=lambda _: [{}])
    shards.prepare()
    shards = dataclasses.replace(shards, reader=read)
    monkeypatch.setattr(
        "flyte_ddp.data.cache.room_for_reads", lambda process: Watched(room_for_reads(process))
    )
    lock_of = {
        number: shards._cache._lock_of(shards._cache._place(shards._index.entry(number), WHOLE)[0])
        for number in range(64)
    }
    # none waits for the lock of another
    samples = list({lock: number for number, lock in lock_of.items()}.values())[:count]
    threads = [threading.Thread(target=shards.prefetch, args=([each],)) for each in samples]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert (len(found), found.count(True)) == (count, CONCURRENT_READS)


def test_a_row_group_that_the_cache_cannot_hold_is_refused(tmp_path):
    rows = pyarrow.table({"text": ["x" * 1000] * 1000})  # some 5 kB compressed, 1 MB in the cache
    pyarrow.parquet.write_table(rows, tmp_path / "a.parquet")
    shards = Shards(str(tmp_path), cache_gib=2e5 / 2**30, cache_dir=f"{tmp_path}/cache")
    shards.prepare()
    with pytest.raises(ConfigError, match=r"^cache_gib: expected at least 0.00\d+ .* got \S+$"):
        shards[0]


def test_a_local_parquet_file_that_has_changed_is_not_read_from_the_cache(tmp_path):
    sizes = set()
    for number in (1, 2):
        contents = FORMATS["parquet"][1]([{"number": number, "text": "as many bytes"}])
        write_tree({"a.parquet": contents}, tmp_path / "train")
        sizes.add(len(contents))
        os.utime(tmp_path / "train/a.parquet", (number, number))
        shards = Shards(str(tmp_path / "train"), transform=to_record)
        shards.prepare()
        assert shards[0]["number"] == number
    assert len(sizes) == 1


@pytest.mark.parametrize("place", ["beside", "elsewhere"])
def test_a_local_file_that_has_changed_at_the_same_size_is_counted_again(place, tmp_path):
    index = f"{tmp_path}/index" if place == "elsewhere" else None
    tree = {"a.jsonl": b"{}\n{}\n", "b.jsonl": b"{}\n"}
    shards = Shards(write_tree(tree, tmp_path / "train"), index=index)
    shards.prepare()
    write_tree({"a.jsonl": b"[    ]"}, tmp_path / "train")
    os.utime(tmp_path / "train/a.jsonl", (2**32, 2**32))
    assert shards.prepare().startswith("2 samples")
    assert [shards._index.entry(shard).name for shard in range(2)] == ["a.jsonl", "b.jsonl"]


def test_what_a_killed_writer_has_left_is_no_shard(tmp_path):
    tree, read = make_tree("own")
    tree[f"flyte_ddp_index.npz.{'0' * 32}.tmp"] = b"PK"
    shards = Shards(write_tree(tree, tmp_path / "train"), reader=read)
    assert shards.prepare().startswith("100 samples in 8 shards")


def test_a_list_of_http_urls_is_read(tmp_path):
    tree, _ = make_tree("tar")
    write_tree(tree, tmp_path / "served")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            urls = [f"http://127.0.0.1:{server.server_port}/{name}" for name in tree]
            shards = Shards(urls, index=f"{tmp_path}/index", transform=to_record)
            shards.prepare()
            assert [shards[number] for number in (0, 55, 99)] == list(map(record, (0, 55, 99)))
            gone = Shards([*urls, f"{urls[0]}-not-there.tar"], index=f"{tmp_path}/other")
            with pytest.raises(DataError, match=r"not-there.tar: expected a shard, got no file"):
                gone.prepare()
        finally:
            server.shutdown()
            thread.join()


def damage(contents, column, group=1):
    """A Parquet file with some wrong bytes in a column of a row group."""
    found = bytearray(contents)
    chunk = pyarrow.parquet.ParquetFile(io.BytesIO(contents)).metadata.row_group(group)
    chunk = chunk.column([chunk.column(n).path_in_schema for n in range(2)].index(column))
    begin = chunk.data_page_offset
    found[begin : begin + 40] = b"\xff" * 40
    return bytes(found)


def twice(contents, column):
    """A Parquet file with two columns of a name."""
    table = pyarrow.parquet.read_table(io.BytesIO(contents))
    file = io.BytesIO()
    table = table.append_column("other", table[column])
    table = table.rename_columns([*table.column_names[:-1], column])
    pyarrow.parquet.write_table(table, file)
    return file.getvalue()


def as_latin(contents, column):
    """A Parquet file with text that is not in UTF-8."""
    table = pyarrow.parquet.read_table(io.BytesIO(contents))
    text = pyarrow.array(["ä".encode("latin-1")] * len(table)).view(pyarrow.string())
    file = io.BytesIO()
    pyarrow.parquet.write_table(
        table.set_column(table.column_names.index(column), column, text), file
    )
    return file.getvalue()


@pytest.mark.parametrize("place", ["disk", "store"])
@pytest.mark.parametrize(
    ("break_it", "expected"),
    [
        (damage, "cannot be read: row group 1, column 'text': OSError"),
        (twice, "cannot be read: columns: expected names that differ, got 'text' 2 times"),
        (as_latin, "sample 9 cannot be read: column 'text': UnicodeDecodeError"),
    ],
)
def test_what_is_wrong_in_the_contents_is_not_waited_for(
    break_it, expected, place, bucket, tmp_path, monkeypatch
):
    monkeypatch.setattr("flyte_ddp.data.shards.READ_TIMEOUT", 20)
    tree, _ = make_tree("parquet", [30])
    name, contents = tree.popitem()
    tree[name] = break_it(contents, "text")
    shards = Shards(put(bucket if place == "store" else str(tmp_path / "train"), tree))
    shards.prepare()
    with pytest.raises(DataError, match=f"{name}.*{expected}") as caught:
        shards[9]
    assert "\n" not in str(caught.value)
    assert dataclasses.replace(shards, columns=["number"])[9] == {"number": 9}


def test_a_store_that_goes_away_while_parquet_is_read_is_waited_for(bucket, monkeypatch):
    from s3fs.core import S3File

    tree, _ = make_tree("parquet", [30])
    shards = Shards(put(bucket, tree))
    shards.prepare()
    fetch, failures = S3File._fetch_range, iter([ConnectionResetError("reset")] * 2)

    def fetch_late(file, *arguments):
        for failure in failures:
            raise failure
        return fetch(file, *arguments)

    shards.prefetch([0])
    monkeypatch.setattr(S3File, "_fetch_range", fetch_late)
    fresh = dataclasses.replace(shards, columns=["number"])
    assert fresh[29] == {"number": 29}
    assert not list(failures)


def raise_of(error):
    def transform(fields):
        raise error

    return transform


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.EIO, "Input/output error"),
        PermissionError(errno.EACCES, "Permission denied"),
        ConnectionResetError("reset"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_an_error_of_the_machine_is_no_bad_sample(error, tmp_path):
    url = write_tree(make_tree("jsonl")[0], tmp_path / "train")
    shards = Shards(url, transform=raise_of(error), unreadable="ignore")
    shards.prepare()
    with pytest.raises((DataError, MemoryError)):
        shards[0]
    for of_sample in (OSError("image file is truncated"), FileNotFoundError(2, "a.png"), KeyError):
        bad = dataclasses.replace(shards, transform=raise_of(of_sample))
        assert bad[0] is Shards.UNREADABLE


@pytest.mark.parametrize("kind", ["tar", "jsonl", "mds"])
def test_a_shard_that_is_cut_short_while_it_is_read_is_no_bad_sample(kind, tmp_path, monkeypatch):
    tree, _ = make_tree(kind)
    url = write_tree(tree, tmp_path / "train")
    shards = Shards(url, transform=to_record, unreadable="ignore")
    shards.prepare()
    assert shards[25]["number"] == 25
    name = next(name for name in tree if "0004" in name)
    os.truncate(f"{url}/{name}", len(tree[name]) // 2)
    with pytest.raises(DataError, match=f"{name} cannot be read: expected a file as it was when"):
        shards[54]
    monkeypatch.setattr("os.pread", lambda *_: raise_of(OSError(errno.EIO, "bad disk"))(_))
    with pytest.raises(DataError, match="shard-0000.* cannot be read: OSError.*bad disk"):
        shards[0]


def archive(members, form=tarfile.PAX_FORMAT):
    """A tar file of (name, contents), or of headers such as of links."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for each in members:
            if isinstance(each, tarfile.TarInfo):
                tar.addfile(each)
                continue
            member = tarfile.TarInfo(each[0])
            member.size = len(each[1])
            tar.addfile(member, io.BytesIO(each[1]))
    return file.getvalue()


def link(name, target, kind):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, target
    return member


def sparse(directory, form):
    """A tar file with a sparse member, as GNU tar writes it."""
    with open(f"{directory}/0.bin", "wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    written = f"{directory}/sparse.tar"
    options = ["--sparse", f"--format={form}"]
    subprocess.run(["tar", *options, "-cf", written, "-C", str(directory), "0.bin"], check=True)
    with open(written, "rb") as file:
        return file.read()


ANIMALS = [(f"{number}.{kind}", kind.encode()) for number in range(3) for kind in ("jpg", "cls")]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda _: archive(sorted(ANIMALS, key=lambda each: each[1])), r"side by side, got 0.jpg "),
        (lambda _: archive([*ANIMALS, ("0.txt", b"x")]), "got 0.txt at byte 6144 apart from 0.cls"),
        (lambda _: archive([*ANIMALS, ANIMALS[-1]]), "other names of samples, got 2.cls twice"),
        (lambda _: archive(ANIMALS) + archive([("9.cls", b"x")]), "end of the .*--concatenate"),
        (
            lambda _: archive([*ANIMALS, ("a.jpg", b"x"), link("a.cls", "0.cls", tarfile.LNKTYPE)]),
            "a.cls: expected a plain file, got a link to 0.cls",
        ),
        (lambda _: archive([link("a.cls", "0.cls", tarfile.SYMTYPE), *ANIMALS]), "got a link to"),
        (lambda _: archive([link("a.cls", "", b"M"), *ANIMALS]), "a member of type 'M'"),
        (
            lambda _: archive([*ANIMALS, ("a.jpg", b"x"), link("a.cls", "", tarfile.FIFOTYPE)]),
            "a.cls: expected a plain file, got a FIFO or a device: leave it out",
        ),
        (lambda _: archive([link("a.cls", "", tarfile.CHRTYPE), *ANIMALS]), "a.cls: .* a device"),
        (lambda _: archive([link("a.cls", "", tarfile.BLKTYPE), *ANIMALS]), "a.cls: .* a device"),
        # cut off in a header, in contents, and between two members
        *(
            (lambda _, size=size: archive(ANIMALS)[:size], f"cut short, after {size:,} bytes")
            for size in (516, 1030, 2048, 3000, 6144)
        ),
        (
            lambda _: archive([*ANIMALS, ("long" * 30 + ".jpg", b"x" * 999)])[:-9000],
            r"cut short, after [\d,]+ bytes",
        ),
        (lambda place: sparse(place, "gnu"), "0.bin: expected a plain file, got a sparse file"),
        (lambda place: sparse(place, "posix"), "0.bin: expected a plain file, got a sparse file"),
    ],
)
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_a_tar_file_whose_samples_are_not_whole_is_refused(make, expected, suffix, tmp_path):
    contents = make(tmp_path)
    packed = gzip.compress(contents) if suffix == "tar.gz" else contents
    shards = Shards(write_tree({f"a.{suffix}": packed}, tmp_path / "train"))
    with pytest.raises(DataError, match=f"a.{suffix} cannot be read: .*{expected}") as caught:
        shards.prepare()
    assert "\n" not in str(caught.value)


def test_a_tar_file_may_have_samples_of_one_key_and_links_that_are_no_fields(tmp_path):
    members = [*ANIMALS, *ANIMALS[:2], link("latest", "0.jpg", tarfile.SYMTYPE)]
    shards = Shards(write_tree({"a.tar": archive(members)}, tmp_path / "train"))
    shards.prepare()
    assert [shards[number]["__key__"] for number in range(len(shards))] == ["0", "1", "2", "0"]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz")), max_size=9, unique=True),
    st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_samples_of_a_tar_file_are_whole_or_refused(members, form):
    contents = archive([(".".join(each), "".join(each).encode()) for each in members], form)
    expected = {}
    for key, name in members:
        expected.setdefault(key, {"__key__": key})[name] = f"{key}{name}".encode()
    try:
        offsets = find_tar_offsets(contents).tolist()
    except DataError:
        groups = [key for key, _ in itertools.groupby(members, lambda each: each[0])]
        assert len(groups) > len(expected)
        return
    decode = TarShard.decode.__get__(TarShard.__new__(TarShard))
    pieces = itertools.pairwise(offsets)
    assert [decode(contents[begin:end]) for begin, end in pieces] == list(expected.values())


def rows(*records):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), file)
    return file.getvalue()


@pytest.mark.parametrize("place", ["disk", "store"])
def test_directories_in_hives_layout_are_columns(place, bucket, tmp_path):
    tree = {
        "label=cat/split=1/0.parquet": rows({"number": 0}),
        "label=big%20dog/split=__HIVE_DEFAULT_PARTITION__/0.parquet": rows({"number": 1}),
        "label=own/split=2/0.parquet": rows({"number": 2, "label": "of the file"}),
        "label=line/split=3/0.jsonl": b'{"number": 3}\n',
    }
    shards = Shards(put(bucket if place == "store" else str(tmp_path / "train"), tree))
    shards.prepare()
    found = {shards[number]["number"]: shards[number] for number in range(4)}
    labels = [("cat", "1"), ("big dog", None), ("of the file", "2"), ("line", "3")]
    for number, (label, split) in enumerate(labels):
        assert found[number] == {"label": label, "split": split, "number": number}
    some = dataclasses.replace(shards, columns=["split"])
    assert sorted(str(some[number]["split"]) for number in range(4)) == ["1", "2", "3", "None"]


def test_shards_with_other_columns_than_the_first_are_refused_unless_columns_are_named(tmp_path):
    tree = {"a.parquet": rows({"x": 1, "y": 2}), "b.parquet": rows({"y": 3, "x": 4})}
    url = write_tree(tree, tmp_path / "train")
    shards = Shards(url)
    assert shards.prepare().startswith("2 samples")
    assert shards[1] == {"x": 4, "y": 3}
    # The new shard has other columns.
    write_tree({"c.parquet": rows({"x": 1, "z": 2})}, tmp_path / "train")
    with pytest.raises(DataError, match=r"c.parquet: expected the columns of a.parquet, .* y, z: "):
        shards.prepare()
    some = Shards(url, columns=["x"])
    assert some.prepare().startswith("3 samples")
    assert [some[number]["x"] for number in range(3)] == [1, 4, 1]
    with pytest.raises(DataError, match=r"[ab]\.parquet cannot be read: columns: expected 'z'"):
        Shards(url, columns=["z"], index=f"{tmp_path}/other").prepare()


def test_shards_whose_sizes_no_server_says_are_read(tmp_path):
    tree, _ = make_tree("tar")
    write_tree(tree, tmp_path / "served")

    class Silent(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def send_header(self, name, value):
            if name != "Content-Length":
                super().send_header(name, value)

    handler = functools.partial(Silent, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            urls = [f"http://127.0.0.1:{server.server_port}/{name}" for name in tree]
            shards = Shards(urls, index=f"{tmp_path}/index", transform=to_record)
            shards.prepare()
            mixture = Mixture({"a": shards}, {"a": 1})
            for data, count in ((shards, 100), (mixture, len(mixture))):
                plan = EpochPlan(len(data), 16, 0, 0, Share(0, 2), stream=data)
                numbers = torch.cat([*plan.batches()]).tolist()
                assert len([data[number] for number in numbers]) == count
        finally:
            server.shutdown()
            thread.join()
