"""Formats of shards: how a file becomes samples, dicts, that can be read in any order.

A shard is one file, which a compressed one is unpacked to, or it is cut into parts, so that those
alone need to be fetched that are read. Knows no store. No torch.
"""

from __future__ import annotations

import contextlib
import decimal
import io
import itertools
import json
import mmap
import os
import pickle
import re
import shutil
import struct
import tarfile
import urllib.parse
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config.extras import require
from flyte_ddp.errors import DataError, in_one_line
from flyte_ddp.storage.failures import is_full

Fields = dict[str, Any]
Read = Callable[[str], Iterable[Fields]]  # of a reader of the user's: the samples of a local file
HEAD, WHOLE = -1, -2  # in place of the number of a part
PART_BYTES = 4 << 20  # of a shard in a store, that are fetched at once, and the rest of a sample
MDS_HEAD = 1 << 16  # bytes in which the head of most MDS files is
MAX_OPEN = 1024  # shards of which a process keeps in memory where their samples are
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"  # in a directory's name
MAX_MAPPED = 32  # parts of Parquet that a process keeps mapped
KEY = "__key__"  # the field of a tar's sample with its members' common name

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".br": "brotli"}
# Of a header in a tar file: name, size, checksum, kind, the format, and what comes before the name.
_HEADER = struct.Struct("100s24x12s12x8sc100x8s80x155s12x")
# In an extended header: other values than the header's behind it. Without them it has times.
_VALUES = re.compile(rb"path=|size=|GNU\.|hdrcharset=")
_NONZERO = re.compile(rb"[^\0]")
# A member's name without and with its extension, as WebDataset cuts it.
_MEMBER = re.compile(r"((?:.*/)?[^./][^.]*)\.([^/]+)", re.S)


# The tables in mapped files, with the inodes of these; the one that was used last is the last.
_tables: OrderedDict[str, tuple[int, Any]] = OrderedDict()


class Shard(ABC):
    """The samples of a shard, which is read in parts, each a file. No file stays open.

    Args:
        path: of the shard, or of its head, by which a part is found and made.
        columns: the fields that samples have; None for all.
        is_whole: False for the head.
        partition: fields that all samples have by the shard's directory.

    Attributes:
        column_names: of all samples; None where each sample has its own.
        ends: (P,) samples before the end of each part; a whole shard is one part.
        sizes: (P,) bytes of each part.
    """

    ends: NDArray[np.int64]
    sizes: NDArray[np.int64]

    column_names: Sequence[str] | None = None

    def __init__(
        self,
        path: str,
        columns: Sequence[str] | None,
        is_whole: bool = True,
        partition: Fields | None = None,
    ) -> None:
        self.columns, self.is_whole, self.partition = columns, is_whole, partition or {}
        self.open(path)

    @abstractmethod
    def open(self, path: str) -> None:
        """Find the samples and the parts of the shard, or of the head, at `path`."""

    def __len__(self) -> int:
        return int(self.ends[-1]) if len(self.ends) else 0

    def find_parts(self, rows: Any) -> Any:
        """Return the part of each sample, `WHOLE` of a whole shard."""
        parts = np.searchsorted(self.ends, rows, side="right")
        return np.full_like(parts, WHOLE) if self.is_whole else parts

    def get(self, contents: Any) -> Fields:
        """Return the fields of a sample that was loaded."""
        fields = {**self.partition, **self.decode(contents)}
        if self.columns is None:
            return fields
        if missing := [name for name in self.columns if name not in fields]:
            raise DataError(f"columns: expected {missing[0]!r}, got only {', '.join(fields)}")
        return {name: fields[name] for name in self.columns}

    @abstractmethod
    def load(self, path: str, row: int) -> Any:
        """Return what is stored of a sample, whose part is at `path`."""

    @abstractmethod
    def decode(self, contents: Any) -> Fields:
        """Return all fields of a sample that was loaded. It reads no file."""

    @abstractmethod
    def make_part(self, number: int, file: Any, target: str) -> None:
        """Copy a part of the shard, an open file, to a file of its own."""


class ByteShard(Shard):
    """Samples that follow each other in a file; each is decoded by itself.

    Attributes:
        offsets: (N + 1,) where each sample begins; the last one ends at the last of them.
        bounds: (P + 1,) those between parts.
    """

    offsets: NDArray[Any]

    def open(self, path: str) -> None:
        self.offsets = self.find_offsets(path) if self.is_whole else self.read_head(path)
        self.ends = np.array([len(self.offsets) - 1])
        if not self.is_whole:
            self.ends = cut_parts(self.offsets)
        self.bounds = self.offsets[[0, *self.ends]].astype(np.int64)
        self.sizes = self.bounds[1:] - self.bounds[:-1]

    @abstractmethod
    def find_offsets(self, path: str) -> NDArray[Any]:
        """Return `offsets` of a whole shard."""

    def read_head(self, path: str) -> NDArray[Any]:
        """Return `offsets` of a shard with this head."""
        return np.fromfile(path, "<u8")[1:]  # after their checksum

    def load(self, path: str, row: int) -> bytes:
        begin, end = self.offsets[row : row + 2].tolist()
        base = 0 if self.is_whole else int(self.bounds[self.find_parts(row)])
        return read_bytes(path, begin - base, end - base)

    def make_part(self, number: int, file: Any, target: str) -> None:
        begin, end = self.bounds[number : number + 2].tolist()
        file.seek(begin)
        contents = file.read(end - begin)
        if len(contents) < end - begin:
            raise DataError(f"expected {end} bytes at least, got {begin + len(contents)}")
        Path(target).write_bytes(contents)


def cut_parts(offsets: NDArray[Any]) -> NDArray[np.int64]:
    """Return the ends of parts of some `PART_BYTES`, as numbers of what lies between offsets."""
    limits = np.arange(int(offsets[0]) + PART_BYTES, int(offsets[-1]), PART_BYTES)
    ends: NDArray[np.int64] = np.unique([*np.searchsorted(offsets, limits), len(offsets) - 1])
    return ends


def read_bytes(path: str, begin: int, end: int) -> bytes:
    """Return the bytes [begin, end) of a file. Raises DataError if it is shorter."""
    with open(path, "rb", buffering=0) as file:
        found = os.pread(file.fileno(), end - begin, begin)
    if len(found) < end - begin:
        raise DataError(f"expected {end} bytes at least, got {begin + len(found)}")
    return found


class TarShard(ByteShard):
    """A tar file in WebDataset's layout: the members of a sample lie side by side and share a name.

    The fields are their contents in bytes by their extensions, such as jpg and json.
    """

    def find_offsets(self, path: str) -> NDArray[Any]:
        with open(path, "rb") as file:
            if not os.path.getsize(path):
                return find_tar_offsets(b"")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
                return find_tar_offsets(contents)

    def decode(self, contents: bytes) -> Fields:
        fields: Fields = {}
        for _, name, begin, size in _read_members(contents):
            if match := _MEMBER.fullmatch(name):
                fields[KEY], extension = match[1], match[2].lower()
                if extension in fields:
                    raise DataError(f"expected other names of samples, got {name} twice")
                fields[extension] = contents[begin : begin + size]
        return fields


def find_tar_offsets(contents: bytes | mmap.mmap) -> NDArray[Any]:
    """Return where the samples of a tar file begin, and where the last one ends.

    Raises:
        DataError: fields of a sample lie apart or have one name, a field is no plain file, or
            another archive follows.
    """
    begins, keys, end = array("q"), array("q"), 0
    for is_new, key, name, (first, begin, size) in _read_fields(contents):
        if is_new:
            begins.append(first)
            keys.append(hash(key))
            names = set[str]()
        if name in names:
            raise DataError(f"expected other names of samples, got {key}.{name} twice")
        names.add(name)
        end = begin + _padded(size)
    if len(np.unique(keys)) < len(keys):
        _check_fields(contents)
    return np.array([*begins, end])


def _read_fields(
    contents: bytes | mmap.mmap,
) -> Iterator[tuple[bool, str, str, tuple[int, int, int]]]:
    """Yield of each field in a tar file whether it is the first one of a sample, the sample's key,
    the field's name, and the numbers of `_read_members`.
    """
    key = None
    for first, name, begin, size in _read_members(contents, has_end=True):
        if match := _MEMBER.fullmatch(name):
            yield match[1] != key, match[1], match[2].lower(), (first, begin, size)
            key = match[1]


def _check_fields(contents: bytes | mmap.mmap) -> None:
    """Raise DataError if a sample's fields lie apart. Another sample of the same key may follow: it
    has no field that the first one has not.
    """
    known: dict[str, set[str]] = {}
    is_again = False
    for is_new, key, name, (first, _, _) in _read_fields(contents):
        if is_new:
            is_again = key in known
        names = known.setdefault(key, set())
        if is_again and name not in names:
            raise DataError(
                f"expected the fields of a sample side by side, got {key}.{name} at byte {first} "
                f"apart from {key}.{min(names)}: write the archive with `tar --sort=name`"
            )
        names.add(name)


def _read_members(
    contents: bytes | mmap.mmap, has_end: bool = False
) -> Iterator[tuple[int, str, int, int]]:
    """Yield of each file in a tar file, or in a piece of one without its end, where its headers
    begin, its name, and where its contents begin and how long they are.

    By `tarfile`, which takes ten times as long, only from a header on that is not a plain one.
    """
    first = place = 0
    while place < len(contents):
        found = _read_header(contents, place)
        if found is None:
            break
        name, size = found
        begin = place + tarfile.BLOCKSIZE
        place = begin + _padded(size)
        if name:
            yield first, name, begin, size
            first = place
    else:
        if has_end and contents:
            raise _cut_short(contents)
        return
    file = io.BytesIO(contents) if isinstance(contents, bytes) else contents
    file.seek(first)
    with _naming_cut(contents, first), tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if _is_plain(member):
                yield member.offset, member.name, member.offset_data, member.size
        # where `tarfile` takes a damaged header for the end
        rest = contents[tar.offset : tar.offset + tarfile.BLOCKSIZE]
        if has_end and len(rest) < tarfile.BLOCKSIZE:
            raise _cut_short(contents)
        if any(rest) or (rest and not has_end):
            raise DataError(f"expected the header of a member at byte {tar.offset}")
        if more := _NONZERO.search(contents, tar.offset):
            raise DataError(
                f"expected the end of the archive at byte {tar.offset}, got more at byte "
                f"{more.start()}: join archives with `tar --concatenate`"
            )


@contextlib.contextmanager
def _naming_cut(contents: bytes | mmap.mmap, first: int) -> Iterator[None]:
    """Raise an error of `tarfile` in the block as DataError if a tar file is cut short: it has a
    header at its byte `first`.
    """
    try:
        yield
    except DataError:
        raise
    except (tarfile.ReadError, ValueError):  # ValueError: a map ends before what a header announces
        with contextlib.suppress(tarfile.HeaderError):
            header = contents[first : first + tarfile.BLOCKSIZE]
            tarfile.TarInfo.frombuf(header, tarfile.ENCODING, "surrogateescape")
            raise _cut_short(contents) from None
        raise


def _cut_short(contents: bytes | mmap.mmap) -> DataError:
    return DataError(
        f"expected the end of the archive, two blocks of zeros, but the file is cut short, after "
        f"{len(contents):,} bytes: copy or write it again"
    )


def _is_plain(member: tarfile.TarInfo) -> bool:
    """Return whether a member is a file. Raises DataError if a field's contents are not behind its
    header.
    """
    is_file = member.isreg() and member.sparse is None
    if is_file or member.isdir() or not _MEMBER.fullmatch(member.name):
        return is_file
    what = f"a member of type {member.type.decode(errors='replace')!r}: write it as a plain file"
    if member.islnk() or member.issym():
        what = f"a link to {member.linkname}: write the archive with `tar --hard-dereference -h`"
    elif member.isdev():
        what = "a FIFO or a device: leave it out"
    elif member.sparse is not None or member.type == tarfile.GNUTYPE_SPARSE:
        what = "a sparse file: write the archive without `--sparse`"
    raise DataError(f"{member.name}: expected a plain file, got {what}")


def _read_header(contents: bytes | mmap.mmap, place: int) -> tuple[str, int] | None:
    """Return name and size of the file whose header is at a place in a tar file; no name if it
    extends the next one and has nothing to say; None if only `tarfile` can tell.
    """
    header = contents[place : place + tarfile.BLOCKSIZE]
    if len(header) < tarfile.BLOCKSIZE:
        return None
    name, digits, checksum, kind, magic, prefix = _HEADER.unpack(header)
    if not digits[:11].isdigit() or not checksum[:6].isdigit() or (prefix[0] and magic[5]):
        return None
    size, begin = int(digits[:11], 8), place + tarfile.BLOCKSIZE
    if int(checksum[:6], 8) != sum(header) - sum(checksum) + 8 * ord(" "):
        return None
    if begin + _padded(size) > len(contents):
        return None
    if kind == b"x" and not _VALUES.search(contents, begin, begin + size):
        return "", size
    if kind not in b"0\0":
        return None
    parts = [each.partition(b"\0")[0] for each in (prefix, name) if each[0]]
    return b"/".join(parts).decode(errors="surrogateescape"), size


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


class JsonLines(ByteShard):
    """A text file with a JSON object in each line."""

    def find_offsets(self, path: str) -> NDArray[Any]:
        size = os.path.getsize(path)
        contents = np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)
        ends = np.append(np.flatnonzero(contents == ord("\n")), size)
        begins = np.concatenate([[0], ends[:-1] + 1])
        # An object has two bytes at least; an empty line may have the one of a carriage return.
        return np.append(begins[ends - begins > 1], size)

    def decode(self, contents: bytes) -> Fields:
        fields = json.loads(contents)
        if not isinstance(fields, dict):
            raise DataError(f"expected a JSON object, got a {type(fields).__name__}")
        return fields


class MdsShard(ByteShard):
    """A file of MosaicML's streaming format, version 2, with its columns decoded."""

    def find_offsets(self, path: str) -> NDArray[Any]:
        count = int.from_bytes(read_bytes(path, 0, 4), "little")
        begin = 4 * (count + 2)
        offsets = np.frombuffer(read_bytes(path, 4, begin), np.uint32)
        kind = json.loads(read_bytes(path, begin, int(offsets[0])))
        names = "column_names", "column_encodings", "column_sizes"
        self.kinds = list(zip(*(kind[name] for name in names), strict=True))
        self.column_names = kind["column_names"]
        return offsets

    read_head = find_offsets

    def decode(self, contents: bytes) -> Fields:
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


def _copy_mds_head(file: Any, target: str) -> None:
    contents = file.read(MDS_HEAD)
    end = int.from_bytes(contents[4:8], "little")  # where the first sample begins
    contents += file.read(max(0, end - len(contents)))
    Path(target).write_bytes(contents[:end])


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
        return np.frombuffer(data, kind).reshape([int(each) for each in shape.split(",")]).copy()
    dimensions, width = data[0] >> 2, 1 << (data[0] & 3)  # bytes of each length
    end = 1 + dimensions * width
    return np.frombuffer(data[end:], kind).reshape(np.frombuffer(data[1:end], f"<u{width}")).copy()


class ParquetShard(Shard):
    """A Parquet file. A part has some of its row groups, unpacked to Arrow's own format."""

    def open(self, path: str) -> None:
        import pyarrow.parquet

        self.footer = footer = pyarrow.parquet.read_metadata(path)
        names = footer.schema.to_arrow_schema().names
        self.column_names = [*(name for name in self.partition if name not in names), *names]
        if missing := [name for name in self.columns or () if name not in self.column_names]:
            got = ", ".join(self.column_names)
            raise DataError(f"columns: expected {missing[0]!r}, got only {got}")
        groups = list(map(footer.row_group, range(footer.num_row_groups)))
        offsets = np.cumsum([0, *(each.total_byte_size for each in groups)])
        rows = np.cumsum([0, *(each.num_rows for each in groups)])
        self.groups = cut_parts(offsets)
        self.ends, self.sizes = rows[self.groups], np.diff(offsets[self.groups], prepend=0)

    def make_part(self, number: int, file: Any, target: str) -> None:
        import pyarrow.parquet

        source = pyarrow.parquet.ParquetFile(file, metadata=self.footer, pre_buffer=True)
        own = source.schema_arrow.names
        names = [name for name in self.columns or own if name in own]
        check_names(own, names)
        schema = pyarrow.schema([source.schema_arrow.field(name) for name in names])
        groups = range(int(self.groups[number - 1]) if number else 0, int(self.groups[number]))
        with naming_column(source, groups, names), pyarrow.ipc.new_file(target, schema) as writer:
            for batch in source.iter_batches(row_groups=groups, columns=names):
                writer.write_batch(batch.select(names))

    def load(self, path: str, row: int) -> dict[str, Any]:
        number, table = int(self.find_parts(row)), _open_arrow(path)
        place = row - (int(self.ends[number - 1]) if number else 0)
        return {name: table[name][place] for name in table.column_names}

    def decode(self, contents: dict[str, Any]) -> Fields:
        fields = {}
        for name, scalar in contents.items():
            try:
                fields[name] = _value(scalar)
            except Exception as error:  # such as of text that is not in UTF-8
                raise DataError(f"column {name!r}: {in_one_line(error)}") from error
        return fields


def check_names(all_names: Sequence[str], names: Sequence[str]) -> None:
    """Raise DataError if several columns have one of these names: none of them can be read."""
    for name in names:
        if (count := all_names.count(name)) > 1:
            raise DataError(f"columns: expected names that differ, got {name!r} {count} times")


@contextlib.contextmanager
def naming_column(source: Any, groups: Iterable[int], names: Sequence[str]) -> Iterator[None]:
    """Raise an error of the block as DataError that names the first row group and column that
    cannot be read; as it is if they all can.

    Args:
        source: the Parquet file that the block reads.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, MemoryError) or is_full(error):
            raise
        for group, name in itertools.product(groups, names):
            try:
                source.read_row_group(group, columns=[name])
            except Exception as damage:
                what = f"row group {group}, column {name!r}: {in_one_line(damage)}"
                raise DataError(what) from damage
        raise


def _open_arrow(path: str) -> Any:
    """Return the table in a file, which is mapped."""
    import pyarrow

    inode = os.stat(path).st_ino
    known, table = _tables.pop(path, (0, None))
    if known != inode:
        close_removed()
        with pyarrow.memory_map(path) as file:
            table = pyarrow.ipc.open_file(file).read_all()
    _tables[path] = inode, table  # the last one that was used
    while len(_tables) > MAX_MAPPED:
        _tables.popitem(last=False)
    return table


def close_removed() -> None:
    """Close the mapped files that were removed, which take space on their disk until then."""
    for path, (inode, _) in list(_tables.items()):
        try:
            is_there = os.stat(path).st_ino == inode
        except FileNotFoundError:
            is_there = False
        if not is_there:
            _tables.pop(path, None)


def _value(scalar: Any) -> Any:
    """Return a value of Parquet as Python's, and a list of numbers as an array."""
    import pyarrow.types as types

    kind = scalar.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    is_list = is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type))
    if is_list and scalar.is_valid and not scalar.values.null_count:
        # a copy: the values lie in a mapped file, where a write would end the process
        return np.array(scalar.values.to_numpy(zero_copy_only=False))
    return scalar.as_py()


class PickledShard(ByteShard):
    """The samples that a reader of the user's has returned, in a file of our own."""

    def find_offsets(self, path: str) -> NDArray[Any]:
        size = os.path.getsize(path)
        count = int.from_bytes(read_bytes(path, size - 8, size), "little")
        return np.frombuffer(read_bytes(path, size - 8 * (count + 2), size - 8), np.int64)

    def decode(self, contents: bytes) -> Fields:
        fields: Fields = pickle.loads(contents)
        return fields


@dataclass(frozen=True)
class Format:
    """How the files of a kind are opened."""

    shard: Callable[..., Shard]  # of `Shard`'s arguments
    unpack: Callable[[str, str], None] | None = None  # a whole file to another
    has_whole: bool = True  # False where only parts can be read
    # the head of an open file to another; None where it is the offsets beside the index
    copy_head: Callable[[Any, str], None] | None = None
    partition: Mapping[str, Any] = field(default_factory=dict)  # see `Shard`


def find_format(name: str, read: Read | None) -> Format | None:
    """Return the format of a file by its name; None if it is none. `read` reads any.

    What it needs is imported here, before threads read: a process that is forked while a thread
    imports waits for ever for what that thread has begun to import.
    """
    if read is not None:
        return Format(PickledShard, lambda source, target: _pickle(read(source), target))
    stem, suffix = os.path.splitext(name.lower().partition("?")[0])
    if suffix == ".tgz":
        stem, suffix = f"{stem}.tar", ".gz"
    if compression := COMPRESSIONS.get(suffix):
        found = _FORMATS.get(os.path.splitext(stem)[1])
        if found is None or not found.has_whole:
            return None
        _import_arrow()
        unpack = lambda source, target: _decompress(source, target, compression)  # noqa: E731
        return Format(found.shard, unpack)
    if suffix == ".parquet":
        _import_arrow()
    found = _FORMATS.get(suffix)
    has_partition = found is not None and found.shard in (ParquetShard, JsonLines)
    return replace(found, partition=find_partition(name)) if found and has_partition else found


def find_partition(name: str) -> dict[str, Any]:
    """Return the columns that a file's directories have, such as `label=cat/0.parquet` in Hive's
    layout. Their values are text, or None.
    """
    parts = [each.partition("=") for each in name.partition("?")[0].split("/")[:-1]]
    values = {column: urllib.parse.unquote(value) for column, sign, value in parts if sign}
    return {name: None if value == HIVE_NULL else value for name, value in values.items()}


def _import_arrow() -> None:
    require("data", "pyarrow", extra="streams")
    import pyarrow.parquet  # noqa: F401


def _copy_parquet_head(file: Any, target: str) -> None:
    import pyarrow.parquet

    pyarrow.parquet.ParquetFile(file).metadata.write_metadata_file(target)


def _decompress(source: str, target: str, compression: str) -> None:
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
    ".mds": Format(MdsShard, copy_head=_copy_mds_head),
    ".parquet": Format(ParquetShard, None, False, _copy_parquet_head),
}
