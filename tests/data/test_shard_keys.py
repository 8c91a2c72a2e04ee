"""What a cache, the ranks and a resumed run know shards and readers by: all that samples follow
from.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
import threading
from dataclasses import dataclass

import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flyte_ddp.config import TrainingConfig
from flyte_ddp.data import Shards, readers
from flyte_ddp.data.contents import BLOCK, MAX_BLOCKS, compute_checksum
from flyte_ddp.data.source import READ_TIMEOUT, Source, version_of
from flyte_ddp.errors import DataError
from flyte_ddp.rank.agreement import find_difference
from flyte_ddp.storage import Storage
from tests.support.emulators import s3, s3_bucket  # noqa: F401 - fixtures
from tests.support.image_store import write_tree
from tests.support.runs import REPOSITORY
from tests.support.shards import make_tree, record, tar, to_record


@pytest.fixture(autouse=True)
def _cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def read(path, scale=1):
    yield {"number": scale * os.path.getsize(path)}


@functools.cache
def find_scale(name):
    return {"a": 1, "b": 10}[name]


@dataclass
class Reader:
    """As a dataclass without a hash."""

    scale: int

    def __call__(self, path):
        return read(path, self.scale)

    def read(self, path):
        return read(path, self.scale)

    @classmethod
    def named(cls, name):
        return cls(find_scale(name)).read


class Ten(Reader):
    pass


def with_closure(scale):
    return lambda path: read(path, scale)


def with_default(scale):
    def own(path, by=scale):
        return read(path, by)

    return own


def with_helper(scale):
    def helper(path):
        return read(path, scale)

    return functools.wraps(read)(lambda path: helper(path))


def with_attribute(scale):
    def own(path):
        return read(path, own.scale)

    own.scale = scale
    return own


def with_constant(scale):
    namespace = {"read": read, "__name__": "__main__"}
    exec(f"def own(path):\n    return read(path, {scale})", namespace)
    return namespace["own"]


def with_cached_helper(scale):
    @functools.cache
    def choose():
        return scale

    return lambda path: read(path, choose())


def with_array(scale):
    return functools.partial(read, scale=numpy.array(scale))


def with_local_class(scale):
    class Own(Reader):
        def __init__(self):
            super().__init__(scale)

    return Own()


READERS = [
    lambda scale: functools.partial(read, scale=scale),
    lambda scale: functools.partial(functools.partial(read), scale=scale),
    lambda scale: functools.partial(lambda path, by: read(path, by[0]), by=[scale]),
    Reader,
    lambda scale: Reader(scale).read,
    lambda scale: functools.partial(Reader.read, Reader(scale)),
    with_closure,
    with_default,
    with_helper,
    with_attribute,
    with_constant,
    with_cached_helper,
    with_array,
    with_local_class,
]


@pytest.mark.parametrize("make", READERS)
def test_a_reader_is_known_by_its_code_and_all_its_values(make, tmp_path):
    url = write_tree({"a.own": b"123"}, tmp_path / "train")
    Shards(url, reader=make(1)).prepare()
    shards = [Shards(url, reader=make(scale)) for scale in (1, 10, 1)]
    assert [int(each[0]["number"]) for each in shards] == [3, 30, 3]
    versions = [each._cache.reader for each in shards]
    assert versions[0] == versions[2] != versions[1]
    assert len([each for each in (tmp_path / f"flyte-ddp-shards-{os.getuid()}").iterdir() if
                not each.suffix]) == 2  # fmt: skip


def test_functions_that_are_not_pythons_are_told_apart():
    import cmath
    import math

    from flyte_ddp.code.by_value import code_version

    versions = [code_version(functools.partial(read, scale=f)) for f in (math.sin, cmath.sin)]
    assert versions[0] != versions[1]


def test_a_reader_of_a_script_is_known_in_later_runs_by_it_and_its_helpers(tmp_path):
    script = textwrap.dedent("""
        import functools, sys
        from flyte_ddp.data import Shards
        from helper import describe

        def read(path, scale):
            yield {"number": scale, "helper": describe()}

        shards = Shards(sys.argv[1], reader=functools.partial(read, scale=int(sys.argv[2])))
        shards.prepare()
        print(shards[0]["number"], shards[0]["helper"])
    """)
    (tmp_path / "script.py").write_text(script)
    url = write_tree({"a.own": b"123"}, tmp_path / "train")
    found = []
    for scale, helper in (("1", "first"), ("10", "first"), ("10", "other"), ("1", "first")):
        (tmp_path / "helper.py").write_text(f"def describe():\n    return {helper!r}\n")
        done = subprocess.run(
            [sys.executable, "-B", tmp_path / "script.py", url, scale],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            check=True,
            capture_output=True,
            text=True,
        )
        found.append(done.stdout.strip())
    assert found == ["1 first", "10 first", "10 other", "1 first"]
    cache = tmp_path / f"flyte-ddp-shards-{os.getuid()}"
    assert len([each for each in cache.iterdir() if not each.suffix]) == 3


def test_a_reader_with_values_that_cannot_be_compared_shares_no_file(tmp_path, caplog):
    lock = threading.Lock()

    def locked(path):
        with lock:
            yield {"number": 1}

    url = write_tree({"a.own": b""}, tmp_path / "train")
    Shards(url, reader=locked).prepare()
    shards = [Shards(url, reader=locked) for _ in range(2)]
    assert [each[0]["number"] for each in shards] == [1, 1]
    assert shards[0]._cache.reader != shards[1]._cache.reader
    assert "reader: expected values that can be compared with those of other runs" in caplog.text


def foreign(kind, tree):
    """An index as others write it, of the shards in `tree`."""
    import json

    rows = [(name, 10, len(contents)) for name, contents in tree.items()]
    if kind == "energon":
        return {".nv-meta/.info.json": json.dumps({"shard_counts": {n: c for n, c, _ in rows}})}
    if kind == "wids":
        shards = [{"url": n, "nsamples": c, "filesize": s} for n, c, s in rows]
        return {"index.json": json.dumps({"wids_version": 1, "shardlist": shards})}
    shards = [
        {"samples": c, "raw_data": {"basename": n, "bytes": s, "hashes": {}}, "zip_data": None}
        for n, c, s in rows
    ]
    return {"index.json": json.dumps({"version": 2, "shards": shards})}


def put(url, tree):
    place = Storage(url)
    for name, contents in tree.items():
        place.write(name, contents if isinstance(contents, bytes) else contents.encode())
    return url


def other(tree):
    """Shards of as many bytes with other samples."""
    return {name: contents.replace(b"record ", b"RECORD ") for name, contents in tree.items()}


@pytest.mark.parametrize("kind", ["mds", "wids", "energon"])
def test_data_with_an_index_of_others_that_were_written_anew_are_read_anew(kind, bucket):
    tree = make_tree("mds" if kind == "mds" else "tar", [10] * 3)[0]
    index = foreign(kind, tree)
    put(bucket, {**tree, **index})
    shards = Shards(bucket, transform=to_record)
    assert shards[0] == record(0)
    facts = shards.describe_shards()
    put(bucket, {**other(tree), **index})
    with pytest.raises(DataError, match=r"shard-0001.* expected version .* as in the index, got"):
        shards[10]  # The run reads these shards meanwhile.
    late = Shards(bucket, transform=to_record)
    assert late[0]["text"].startswith("RECORD 0")
    name, _, _ = find_difference(facts, late.describe_shards(), dict)
    assert name.startswith("versions of the shards in ")
    assert find_difference(late.describe_shards(), Shards(bucket).describe_shards(), dict) is None


def test_stores_without_checksums_are_compared_by_time(bucket, monkeypatch):
    tree = make_tree("tar", [10] * 2)[0]
    monkeypatch.setattr("flyte_ddp.data.source.VERSIONS", ())
    put(bucket, tree)
    Shards(bucket).prepare()
    before = Shards(bucket)
    assert before[0]["number"] == b"0"
    assert all(before._index.versions.tolist())

    # S3 keeps times in seconds
    times = {"LastModified": 2_000_000_000.5}
    info = Source.info
    monkeypatch.setattr(Source, "info", lambda *call: {**info(*call), **times})
    shards = Shards(bucket)
    shards._cache.directory += "-other"
    os.makedirs(shards._cache.directory)
    with pytest.raises(DataError, match="expected version .* as in the index, got 2000000000"):
        shards[0]


def test_times_are_compared_in_seconds_and_after_checksums():
    import datetime

    time = datetime.datetime(2026, 1, 1, 0, 0, 0, 5, datetime.timezone.utc)
    assert version_of({"LastModified": time}) == version_of({"mtime": time.timestamp()})
    assert version_of({"ETag": "x", "LastModified": time}) == "x"
    assert version_of({"size": 3, "mtime": None}) == ""


@pytest.mark.parametrize("kind", ["tar", "jsonl", "mds", "parquet", "own"])
def test_a_local_file_that_was_written_anew_is_noticed_in_the_run_and_at_its_resume(kind, tmp_path):
    tree, own = make_tree(kind, [10] * 3)
    url = write_tree(tree, tmp_path / "train")
    Shards(url, reader=own).prepare()
    shards = Shards(url, reader=own, transform=to_record)
    assert shards[0] == record(0)
    facts = shards.describe_shards()
    changed = other(tree)
    if kind == "parquet":
        changed = {name: contents[:200] + contents[200:][::-1] for name, contents in tree.items()}
    write_tree(changed, tmp_path / "train")
    for sample in (0, 10):  # Sample 0 is in a shard that was read, and sample 10 is in another one.
        with pytest.raises(DataError, match="expected a file as it was when its index was read"):
            shards[sample]
    late = Shards(url, reader=own)
    name, _, _ = find_difference(facts, late.describe_shards(), dict)
    assert name == "contents of the shards"
    if kind != "parquet":
        assert to_record(late[0])["text"].startswith("RECORD 0")


def test_a_copy_with_other_times_and_inodes_is_the_same(tmp_path):
    tree = make_tree("tar", [10] * 3)[0]
    facts = []
    for place in ("a", "b"):
        url = write_tree(tree, tmp_path / place)
        Shards(url).prepare()
        for number, file in enumerate((tmp_path / place).glob("*.tar")):
            os.utime(file, (number, number))
        facts.append(Shards(url).describe_shards())
    assert facts[0] == facts[1]
    assert find_difference({**facts[0], "contents of the shards": None}, facts[1], dict) is None


def test_a_store_with_other_versions_elsewhere_is_compared_by_sizes(bucket):
    facts = []
    for place, tree in (("a", make_tree("tar")[0]), ("b", other(make_tree("tar")[0]))):
        put(f"{bucket}/{place}", tree)
        Shards(f"{bucket}/{place}").prepare()
        facts.append(Shards(f"{bucket}/{place}").describe_shards())
    assert find_difference(*facts, dict) is None


@given(
    sizes=st.lists(st.integers(0, 3 * BLOCK), min_size=1, max_size=5),
    data=st.data(),
)
@settings(max_examples=25, deadline=None, derandomize=True)
def test_any_byte_of_small_files_counts(sizes, data, tmp_path_factory):
    place = tmp_path_factory.mktemp("files")
    paths = [str(place / str(number)) for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        with open(path, "wb") as file:
            file.write(bytes(size))
    before = compute_checksum(paths)
    assert compute_checksum(paths) == before
    number = data.draw(st.sampled_from(range(len(sizes))))
    if not sizes[number]:
        return
    with open(paths[number], "r+b") as file:
        file.seek(data.draw(st.integers(0, sizes[number] - 1)))
        file.write(b"x")
    assert compute_checksum(paths) != before


def test_of_large_files_so_much_is_read_and_no_more(tmp_path, monkeypatch):
    paths = [str(tmp_path / str(number)) for number in range(2)]
    for path in paths:
        with open(path, "wb") as file:
            file.truncate(1 << 30)
    lengths = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *call: lengths.append(call[1]) or pread(*call))
    before = compute_checksum(paths)
    assert sum(lengths) == BLOCK * MAX_BLOCKS
    for place in (0, (1 << 30) - 1):
        with open(paths[1], "r+b") as file:
            file.seek(place)
            file.write(b"x")
        after = compute_checksum(paths)
        assert after != before
        before = after
    lengths.clear()
    many = [paths[0]] * (2 * MAX_BLOCKS)
    compute_checksum(many)
    assert sum(lengths) == BLOCK * MAX_BLOCKS


@pytest.mark.long
def test_samples_of_parquet_may_be_written_to(tmp_path):
    rows = pyarrow.table({
        "x": [[1.0, 2.0], [3.0, 4.0]],
        "fixed": pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int32(), 2)),
        "large": pyarrow.array([[1, 2], [3, 4]], pyarrow.large_list(pyarrow.uint8())),
        "half": pyarrow.array([numpy.ones(2, "f2")] * 2, pyarrow.list_(pyarrow.float16())),
    })  # fmt: skip
    place = tmp_path / "train"
    place.mkdir()
    pyarrow.parquet.write_table(rows, place / "a.parquet")
    code = textwrap.dedent("""
        import sys, torch
        from flyte_ddp.data import Shards
        shards = Shards(sys.argv[1])
        shards.prepare()
        for _ in range(2):
            for name, value in shards[0].items():
                torch.from_numpy(value).fill_(100)
        assert shards[0]["x"].tolist() == [1.0, 2.0] and shards[1]["fixed"].tolist() == [3, 4]
    """)
    subprocess.run([sys.executable, "-W", "error", "-c", code, place], cwd=REPOSITORY, check=True)


@pytest.mark.parametrize("detail", ["int16:2,3", "int16", ""])
def test_arrays_of_mds_may_be_written_to(detail):
    array = numpy.arange(6, dtype=numpy.int16).reshape(2, 3)
    head = bytes([2 << 2, 2, 3]) if not detail.endswith("3") else b""
    data = (b"" if detail else bytes([17])) + head + array.tobytes()
    found = readers.decode_mds(f"ndarray:{detail}".rstrip(":"), data)
    torch.from_numpy(found).add_(1)
    assert numpy.array_equal(found, array + 1)


def mapped():
    """Bytes of removed files that this process has mapped, and the number of mapped parts."""
    with open("/proc/self/maps") as file:
        lines = [line.split() for line in file if "flyte-ddp-shards-" in line]
    removed = 0
    for line in lines:
        begin, end = line[0].split("-")
        if line[-1] == "(deleted)":
            removed += int(end, 16) - int(begin, 16)
    return removed, len(lines)


def test_no_removed_file_stays_mapped_and_few_others(tmp_path):
    place = tmp_path / "train"
    place.mkdir()
    for number in range(80):
        rows = pyarrow.table({"x": [numpy.full(256, number, "i8")] * 16})
        pyarrow.parquet.write_table(rows, place / f"{number:02d}.parquet")
    limit = 40 * 16 * 256 * 8
    shards = Shards(str(place), cache_gib=limit / 2**30)
    shards.prepare()
    for sample in range(0, len(shards), 16):
        assert shards[sample]["x"][0] == sample // 16
        removed, count = mapped()
        assert (removed, count <= readers.MAX_MAPPED) == (0, True)
    # Another process removes these files.
    for file in (tmp_path / f"flyte-ddp-shards-{os.getuid()}").iterdir():
        if not file.suffix:
            file.unlink()
    assert mapped()[0] > 0
    assert shards[0]["x"][0] == 0
    assert mapped() == (0, 1)


def test_shards_of_other_readers_are_no_tar(tmp_path):
    """A reader of the same files as a format that is known."""
    url = write_tree({"a.tar": tar([record(1)])}, tmp_path / "train")
    Shards(url).prepare()
    assert Shards(url, transform=to_record)[0] == record(1)
    assert Shards(url, reader=read)[0] == {"number": os.path.getsize(tmp_path / "train/a.tar")}


def test_a_store_of_samples_is_waited_for_no_longer_than_a_stall():
    assert TrainingConfig.stall_timeout > READ_TIMEOUT
