"""Formats of shards: how a file becomes samples, dicts, that can be read in any order.

What a format cannot read in any order, such as a compressed file or Parquet, is unpacked once, to a
file beside it. Knows no store. No torch.
"""

from __future__ import annotations

import decimal
import io
import json
import os
import pickle
import re
import shutil
import sys
import tarfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flyte_ddp.config.extras import require
from flyte_ddp.errors import DataError

Fields = dict[str, Any]
Read = Callable[[str], Iterable[Fields]]  # of a reader of the user's: the samples of a local file
KEY = "__key__"  # the field of a tar's sample with its members' common name

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".br": "brotli"}
# A member's name without and with its extension, as WebDataset cuts it.
_MEMBER = re.compile(r"((?:.*/)?[^./][^.]*)\.([^/]+)", re.S)


class Shard(ABC):
    """The samples of a file. Where each of them lies is in memory; no file stays open.

    Args:
        columns: the fields that samples have; None for all.
    """

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        self.path, self.columns = path, columns
        self.size = os.path.getsize(path)

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> Fields:
        fields = self.read(row)
        if self.columns is None:
            return fields
        if missing := [name for name in self.columns if name not in fields]:
            raise DataError(f"columns: expected {missing[0]!r}, got only {', '.join(fields)}")
        return {name: fields[name] for name in self.columns}

    @abstractmethod
    def read(self, row: int) -> Fields:
        """Return all fields of a sample."""

    def part(self, begin: int, end: int) -> bytes:
        """Return the bytes [begin, end) of the file. Raises DataError if it is shorter."""
        with open(self.path, "rb", buffering=0) as file:
            found = os.pread(file.fileno(), end - begin, begin)
        if len(found) < end - begin:
            raise DataError(f"expected {end} bytes at least, got {self.size}")
        return found


class TarShard(Shard):
    """A tar file in WebDataset's layout: the members of a sample lie side by side and share a name.

    The fields are their contents in bytes by their extensions, such as jpg and json.
    """

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        super().__init__(path, columns)
        self.keys: list[str] = []
        firsts, ends, self.extensions = array("q"), array("q"), list[str]()
        self.firsts, self.begins, self.ends = firsts, array("q"), ends
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                match = _MEMBER.fullmatch(member.name)
                if not member.isreg() or not match:
                    continue
                extension = sys.intern(match[2].lower())
                if not self.keys or self.keys[-1] != match[1]:
                    self.keys.append(match[1])
                    firsts.append(len(ends))
                elif extension in self.extensions[firsts[-1] :]:
                    raise DataError(f"expected other names of samples, got {member.name} twice")
                self.extensions.append(extension)
                self.begins.append(member.offset_data)
                ends.append(member.offset_data + member.size)
        firsts.append(len(ends))

    def __len__(self) -> int:
        return len(self.keys)

    def read(self, row: int) -> Fields:
        members = slice(self.firsts[row], self.firsts[row + 1])
        begins, ends = self.begins[members], self.ends[members]
        contents = self.part(begins[0], ends[-1])
        parts = zip(self.extensions[members], begins, ends, strict=True)
        return {
            KEY: self.keys[row],
            **{name: contents[each - begins[0] : end - begins[0]] for name, each, end in parts},
        }


class JsonLines(Shard):
    """A text file with a JSON object in each line."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        super().__init__(path, columns)
        contents = np.memmap(path, np.uint8, "r") if self.size else np.empty(0, np.uint8)
        ends = np.append(np.flatnonzero(contents == ord("\n")), self.size)
        begins = np.concatenate([[0], ends[:-1] + 1])
        # An object has two bytes at least; an empty line may have the one of a carriage return.
        self.lines = np.stack([begins, ends], axis=1)[ends - begins > 1]

    def __len__(self) -> int:
        return len(self.lines)

    def read(self, row: int) -> Fields:
        fields = json.loads(self.part(*self.lines[row].tolist()))
        if not isinstance(fields, dict):
            raise DataError(f"expected a JSON object, got a {type(fields).__name__}")
        return fields


class MdsShard(Shard):
    """A file of MosaicML's streaming format, version 2, with its columns decoded."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        super().__init__(path, columns)
        count = int.from_bytes(self.part(0, 4), "little")
        begin = 4 * (count + 2)
        self.offsets = np.frombuffer(self.part(4, begin), np.uint32)
        kind = json.loads(self.part(begin, int(self.offsets[0])))
        names = "column_names", "column_encodings", "column_sizes"
        self.kinds = list(zip(*(kind[name] for name in names), strict=True))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, row: int) -> Fields:
        contents = self.part(*self.offsets[row : row + 2].tolist())
        place, sizes = 0, []
        for _, _, size in self.kinds:
            sizes.append(size or int.from_bytes(contents[place : place + 4], "little"))
            place += 0 if size else 4
        fields = {}
        for (name, encoding, _), size in zip(self.kinds, sizes, strict=True):
            if self.columns is None or name in self.columns:
                fields[name] = decode_mds(encoding, contents[place : place + size])
            place += size
        return fields


def decode_mds(encoding: str, data: bytes) -> Any:
    """Return a value of MosaicML's format. Raises DataError for an encoding that is not known."""
    kind, _, detail = encoding.partition(":")
    if kind in _MDS:
        return _MDS[kind](data)
    if kind in ("jpeg", "png"):
        from PIL import Image

        return Image.open(io.BytesIO(data))
    if kind == "pil":
        from PIL import Image

        width, height, size = np.frombuffer(data, np.uint32, 3).tolist()
        return Image.frombytes(data[12 : 12 + size].decode(), (width, height), data[12 + size :])
    if kind == "ndarray":
        return _decode_array(detail, data)
    if re.fullmatch(r"u?int(8|16|32|64)|float(16|32|64)", encoding):
        return np.frombuffer(data, encoding)[0]
    why = ", which runs code of whoever wrote it: give a `reader`" if kind == "pkl" else ""
    raise DataError(f"expected an encoding of MDS, got {encoding!r}{why}")


_MDS: dict[str, Callable[[bytes], Any]] = {
    "bytes": bytes,
    "str": bytes.decode,
    "int": lambda data: int.from_bytes(data, "little", signed=True),
    "str_int": int,
    "str_float": float,
    "str_decimal": lambda data: decimal.Decimal(data.decode()),
    "json": json.loads,
}
# The numbers of types in arrays without one in the index.
_TYPES = {
    8: "uint8",
    9: "int8",
    16: "uint16",
    17: "int16",
    18: "float16",
    32: "uint32",
    33: "int32",
    34: "float32",
    64: "uint64",
    65: "int64",
    66: "float64",
}


def _decode_array(detail: str, data: bytes) -> Any:
    kind, _, shape = detail.partition(":")
    if not kind:
        kind, data = _TYPES[data[0]], data[1:]
    if shape:
        return np.frombuffer(data, kind).reshape([int(each) for each in shape.split(",")])
    dimensions, width = data[0] >> 2, 1 << (data[0] & 3)  # bytes of each length
    end = 1 + dimensions * width
    return np.frombuffer(data[end:], kind).reshape(np.frombuffer(data[1:end], f"<u{width}"))


class ArrowShard(Shard):
    """A Parquet file, unpacked to Arrow's own format."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        import pyarrow

        super().__init__(path, columns)
        with pyarrow.memory_map(path) as file:  # which the batches refer to when it is closed
            reader = pyarrow.ipc.open_file(file)
            self.batches = [reader.get_batch(each) for each in range(reader.num_record_batches)]
        self.ends = np.cumsum([len(batch) for batch in self.batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def read(self, row: int) -> Fields:
        number = int(np.searchsorted(self.ends, row, side="right"))
        place = row - (int(self.ends[number - 1]) if number else 0)
        batch = self.batches[number]
        return {name: _value(batch[name][place]) for name in batch.schema.names}


def _value(scalar: Any) -> Any:
    """Return a value of Parquet as Python's, and a list of numbers as an array."""
    import pyarrow.types as types

    kind = scalar.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    is_list = is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type))
    if is_list and scalar.is_valid and not scalar.values.null_count:
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


class PickledShard(Shard):
    """The samples that a reader of the user's has returned, in a file of our own."""

    def __init__(self, path: str, columns: Sequence[str] | None) -> None:
        super().__init__(path, columns)
        count = int.from_bytes(self.part(self.size - 8, self.size), "little")
        begin = self.size - 8 * (count + 2)
        self.offsets = np.frombuffer(self.part(begin, self.size - 8), np.int64)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, row: int) -> Fields:
        fields: Fields = pickle.loads(self.part(*self.offsets[row : row + 2].tolist()))
        return fields


@dataclass(frozen=True)
class Format:
    """How the files of a kind are opened."""

    shard: Callable[[str, Sequence[str] | None], Shard]
    unpack: Callable[[str, str, Sequence[str] | None], None] | None = None  # from, to, columns


def find_format(name: str, read: Read | None) -> Format | None:
    """Return the format of a file by its name; None if it is none. `read` reads any."""
    if read is not None:
        return Format(PickledShard, lambda source, target, _: _pickle(read(source), target))
    stem, suffix = os.path.splitext(name.lower().partition("?")[0])
    if suffix == ".tgz":
        stem, suffix = f"{stem}.tar", ".gz"
    if compression := COMPRESSIONS.get(suffix):
        found = _FORMATS.get(os.path.splitext(stem)[1])
        unpack = lambda source, target, _: _decompress(source, target, compression)  # noqa: E731
        return Format(found.shard, unpack) if found and not found.unpack else None
    return _FORMATS.get(suffix)


def count_parquet(file: Any) -> int:
    """Return the number of samples in an open Parquet file, by its footer."""
    require("data", "pyarrow", extra="streams")
    import pyarrow.parquet

    return int(pyarrow.parquet.ParquetFile(file).metadata.num_rows)


def _unpack_parquet(source: str, target: str, columns: Sequence[str] | None) -> None:
    require("data", "pyarrow", extra="streams")
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(source)
    if missing := [name for name in columns or () if name not in file.schema_arrow.names]:
        got = ", ".join(file.schema_arrow.names)
        raise DataError(f"columns: expected {missing[0]!r}, got only {got}")
    batches = file.iter_batches(columns=columns and list(columns))  # one row group at a time
    schema = file.schema_arrow
    if columns:
        schema = pyarrow.schema([schema.field(name) for name in columns])
    with pyarrow.ipc.new_file(target, schema) as writer:
        for batch in batches:
            writer.write_batch(batch.select(schema.names))


def _decompress(source: str, target: str, compression: str) -> None:
    require("data", "pyarrow", extra="streams")
    import pyarrow

    with (
        pyarrow.input_stream(source, compression=compression) as stream,
        open(target, "wb") as file,
    ):
        shutil.copyfileobj(stream, file, 1 << 20)


def _pickle(samples: Iterable[Fields], target: str) -> None:
    offsets = [0]
    with open(target, "wb") as file:
        for fields in samples:
            file.write(pickle.dumps(fields, pickle.HIGHEST_PROTOCOL))
            offsets.append(file.tell())
        file.write(np.array([*offsets, len(offsets) - 1], "<i8").tobytes())


_FORMATS = {
    ".tar": Format(TarShard),
    ".jsonl": Format(JsonLines),
    ".ndjson": Format(JsonLines),
    ".mds": Format(MdsShard),
    ".parquet": Format(ArrowShard, _unpack_parquet),
}
