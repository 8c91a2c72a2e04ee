"""Shards in each format, of numbered records {"number": n, "text": ...}."""

from __future__ import annotations

import io
import json
import tarfile

import numpy
import pyarrow
import pyarrow.parquet

SIZES = [7, 1, 12, 5, 30, 9, 16, 20]  # records in each shard, 100 together


def record(number):
    return {"number": number, "text": f"record {number} {'x' * (number % 50)}"}


def tar(records):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for each in records:
            for extension, value in each.items():
                member = tarfile.TarInfo(f"data/{each['number']:05d}.{extension}")
                contents = str(value).encode()
                member.size = len(contents)
                archive.addfile(member, io.BytesIO(contents))
    return file.getvalue()


def parquet(records):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(records)), file, row_group_size=8)
    return file.getvalue()


def json_lines(records):
    return "".join(f"{json.dumps(each)}\n" for each in records).encode()


def mds(records, encodings=(("number", "int", 8), ("text", "str", None)), encode=None):
    encode = encode or {
        "int": lambda value: numpy.int64(value).tobytes(),
        "str": str.encode,
    }
    samples = []
    for each in records:
        values = [encode[kind](each[name]) for name, kind, _ in encodings]
        sizes = [
            numpy.uint32(len(value)).tobytes()
            for value, (_, _, size) in zip(values, encodings, strict=True)
            if not size
        ]
        samples.append(b"".join([*sizes, *values]))
    names, kinds, sizes = zip(*encodings, strict=True)
    head = json.dumps({"column_names": names, "column_encodings": kinds, "column_sizes": sizes})
    begin = 4 * (len(samples) + 2) + len(head)
    offsets = numpy.cumsum([begin, *map(len, samples)], dtype=numpy.uint32)
    return b"".join(
        [numpy.uint32(len(samples)).tobytes(), offsets.tobytes(), head.encode(), *samples]
    )


def read_lines(path):
    """A reader of a format of one's own: a record in each line."""
    with open(path, encoding="utf-8") as file:
        for line in file:
            number, text = line.rstrip("\n").split("|")
            yield {"number": int(number), "text": text}


def lines(records):
    return "".join(f"{each['number']}|{each['text']}\n" for each in records).encode()


FORMATS = {
    "tar": (".tar", tar, None),
    "parquet": (".parquet", parquet, None),
    "mds": (".mds", mds, None),
    "jsonl": (".jsonl", json_lines, None),
    "own": (".lines", lines, read_lines),
}


def to_record(fields):
    """Return the record in the fields of a tar, and any other record unchanged."""
    return {"number": int(fields["number"]), "text": _text(fields["text"])}


def _text(value):
    return value.decode() if isinstance(value, bytes) else value


def make_tree(kind, sizes=SIZES):
    """{name: contents} of shards, and their reader."""
    suffix, write, read = FORMATS[kind]
    tree, first = {}, 0
    for shard, size in enumerate(sizes):
        tree[f"shard-{shard:04d}{suffix}"] = write(map(record, range(first, first + size)))
        first += size
    return tree, read
