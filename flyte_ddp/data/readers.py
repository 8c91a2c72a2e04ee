"""Formats of shards: how a file becomes samples that can be read in any order. A sample is a dict.

A compressed shard is unpacked to one file. Other shards may be cut into parts, so that a reader
fetches only the parts that it needs. Knows no store and imports no torch.
"""

from __future__ import annotations

import contextlib
import decimal
import functools
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
Read = Callable[[str], Iterable[Fields]]  # a user's function that yields a local file's samples
HEAD, WHOLE = -1, -2  # values in place of the number of a part
PART_BYTES = 4 << 20  # bytes of a shard that are fetched at once, plus the rest of a sample
MDS_HEAD = 1 << 16  # bytes that contain the head of most MDS files
MAX_OPEN = 1024  # shards with offsets in a process's memory
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"  # null value in a directory's name
MAX_MAPPED = 32  # parts of Parquet that a process keeps mapped
KEY = "__key__"  # the field of a tar's sample with its members' common name

COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".zstd": "zstd", ".br": "brotli"}
# Fields of a header in a tar file: name, size, checksum, kind, format, and the name's prefix.
_HEADER = struct.Struct("100s24x12s12x8sc100x8s80x155s12x")
# Values in an extended header that replace values of the next header. Other values are only times.
_VALUES = re.compile(rb"path=|size=|GNU\.|hdrcharset=")
_NONZERO = re.compile(rb"[^\0]")
# A member's name and its extension, separated as WebDataset separates them.
_MEMBER = re.compile(r"((?:.*/)?[^./][^.]*)\.([^/]+)", re.S)


# The tables in mapped files, with the files' inodes. The last table is the last used.
_tables: OrderedDict[str, tuple[int, Any]] = OrderedDict()


class Shard(ABC):
    """The samples of a shard, which may be read in parts. Each part is a file. No file stays open.

    Args:
        path: path of the whole shard, or of its head, which shows where the parts are.
        columns: the fields that samples have; None for all.
        is_whole: False if `path` is the head.
        partition: fields that all samples get from the shard's directory.

    Attributes:
        column_names: the fields of all samples; None if each sample has its own.
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
        if not len(self.ends):
            return 0
        return int(self.ends[-1])

    def find_parts(self, rows: Any) -> Any:
        """Return the part with each sample; `WHOLE` for a whole shard."""
        parts = np.searchsorted(self.ends, rows, side="right")
        if self.is_whole:
            return np.full_like(parts, WHOLE)
        return parts

    def get(self, contents: Any) -> Fields:
        """Return the wanted fields of a loaded sample."""
        fields = {**self.partition, **self.decode(contents)}
        if self.columns is None:
            return fields
        for name in self.columns:
            if name not in fields:
                raise DataError(f"columns: expected {name!r}, got only {', '.join(fields)}")
        return {name: fields[name] for name in self.columns}

    @abstractmethod
    def load(self, path: str, row: int) -> Any:
        """Return the stored contents of a sample from its part at `path`."""

    @abstractmethod
    def decode(self, contents: Any) -> Fields:
        """Return all fields of a loaded sample. Reads no file."""

    @abstractmethod
    def make_part(self, number: int, file: Any, target: str) -> None:
        """Copy a part of the shard from the open `file` to the path `target`."""


class ByteShard(Shard):
    """Samples that follow each other in a file. Each is decoded by itself.

    Attributes:
        offsets: (N + 1,) beginnings of the samples, and the end of the last sample.
        bounds: (P + 1,) beginnings of the parts, and the end of the last part.
    """

    offsets: NDArray[Any]

    def open(self, path: str) -> None:
        if self.is_whole:
            self.offsets = self.find_offsets(path)
            self.ends = np.array([len(self.offsets) - 1])
        else:
            self.offsets = self.read_head(path)
            self.ends = cut_parts(self.offsets)
        self.bounds = self.offsets[[0, *self.ends]].astype(np.int64)
        self.sizes = self.bounds[1:] - self.bounds[:-1]

    @abstractmethod
    def find_offsets(self, path: str) -> NDArray[Any]:
        """Return `offsets` of a whole shard."""

    def read_head(self, path: str) -> NDArray[Any]:
        """Return `offsets` of a shard with this head."""
        return np.fromfile(path, "<u8")[1:]  # the offsets come after their checksum

    def load(self, path: str, row: int) -> bytes:
        begin, end = self.offsets[row : row + 2].tolist()
        base = 0
        if not self.is_whole:
            base = int(self.bounds[self.find_parts(row)])
        return read_bytes(path, begin - base, end - base)

    def make_part(self, number: int, file: Any, target: str) -> None:
        begin, end = self.bounds[number : number + 2].tolist()
        file.seek(begin)
        contents = file.read(end - begin)
        if len(contents) < end - begin:
            raise DataError(f"expected {end} bytes at least, got {begin + len(contents)}")
        Path(target).write_bytes(contents)


def cut_parts(offsets: NDArray[Any]) -> NDArray[np.int64]:
    """Return the ends of parts with about `PART_BYTES` bytes, as indices into `offsets`."""
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

    The fields are the members' contents as bytes, by extension, such as jpg and json.
    """

    def find_offsets(self, path: str) -> NDArray[Any]:
        with open(path, "rb") as file:
            if not os.path.getsize(path):
                return find_tar_offsets(b"")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as contents:
                return find_tar_offsets(contents)

    def decode(self, contents: bytes) -> Fields:
        fields: Fields = {}
        for _, name, begin, size in read_members(contents):
            match = _MEMBER.fullmatch(name)
            if match:
                fields[KEY], extension = match[1], match[2].lower()
                if extension in fields:
                    raise DataError(f"expected other names of samples, got {name} twice")
                fields[extension] = contents[begin : begin + size]
        return fields


def find_tar_offsets(contents: bytes | mmap.mmap) -> NDArray[Any]:
    """Return where the samples of a tar file begin, and where the last sample ends.

    Raises:
        DataError: a sample's fields lie apart, two of its fields have the same name, a field is not
            a plain file, or another archive follows.
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
    """Yield the fields in a tar file.

    Each is yielded as a tuple: whether it is the sample's first field, the sample's key, the
    field's name, and the numbers of `read_members`.
    """
    key = None
    for first, name, begin, size in read_members(contents, has_end=True):
        match = _MEMBER.fullmatch(name)
        if match:
            yield match[1] != key, match[1], match[2].lower(), (first, begin, size)
            key = match[1]


def _check_fields(contents: bytes | mmap.mmap) -> None:
    """Raise DataError if a sample's fields lie apart.

    Another sample with the same key may follow if it has no fields that the first sample lacks.
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


def read_members(
    contents: bytes | mmap.mmap, has_end: bool = False
) -> Iterator[tuple[int, str, int, int]]:
    """Yield the files in a tar file, or in a piece of a tar file without its end.

    Each is yielded as a tuple: where its headers begin, its name, where its contents begin, and
    their length. `tarfile` takes ten times as long, so it only reads on from the first header that
    is not plain.
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
    file = _as_file(contents)
    file.seek(first)
    with _naming_cut(contents, first), tarfile.open(fileobj=file, mode="r:") as tar:
        for member in tar:
            if _is_plain(member):
                yield member.offset, member.name, member.offset_data, member.size
        # `tarfile` takes a damaged header for the end.
        rest = contents[tar.offset : tar.offset + tarfile.BLOCKSIZE]
        if has_end and len(rest) < tarfile.BLOCKSIZE:
            raise _cut_short(contents)
        if any(rest) or (rest and not has_end):
            raise DataError(f"expected the header of a member at byte {tar.offset}")
        more = _NONZERO.search(contents, tar.offset)
        if more:
            raise DataError(
                f"expected the end of the archive at byte {tar.offset}, got more at byte "
                f"{more.start()}: join archives with `tar --concatenate`"
            )


def _as_file(contents: bytes | mmap.mmap) -> io.BytesIO | mmap.mmap:
    if isinstance(contents, bytes):
        return io.BytesIO(contents)
    return contents


@contextlib.contextmanager
def _naming_cut(contents: bytes | mmap.mmap, first: int) -> Iterator[None]:
    """Turn an error of `tarfile` in the block into a DataError if the tar file is cut short.

    The file is cut short if a header is at byte `first`. Otherwise it is no tar file.
    """
    try:
        yield
    except DataError:
        raise
    except (tarfile.ReadError, ValueError):  # ValueError: a header announces more than the map has
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
    """Return whether a member is a file. Raises DataError for a field that is not a plain file."""
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
    """Return the name and the size of the file with a header at `place` in a tar file.

    The name is "" for an extended header without values for the next header. None means that only
    `tarfile` can read the header.
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
        contents = np.empty(0, np.uint8)
        if size:
            contents = np.memmap(path, np.uint8, "r")
        ends = np.append(np.flatnonzero(contents == ord("\n")), size)
        begins = np.concatenate([[0], ends[:-1] + 1])
        # An object has at least two bytes. An empty line may have one byte, a carriage return.
        return np.append(begins[ends - begins > 1], size)

    def decode(self, contents: bytes) -> Fields:
        fields = json.loads(contents)
        if not isinstance(fields, dict):
            raise DataError(f"expected a JSON object, got a {type(fields).__name__}")
        return fields


class MdsShard(ByteShard):
    """A file in MosaicML's streaming format, version 2."""

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
            if not size:
                size = int.from_bytes(contents[place : place + 4], "little")
                place += 4
            sizes.append(size)
        fields = {}
        for (name, encoding, _), size in zip(self.kinds, sizes, strict=True):
            if self.columns is None or name in self.columns:
                fields[name] = decode_mds(encoding, contents[place : place + size])
            place += size
        return fields


def _copy_mds_head(file: Any, target: str) -> None:
    contents = file.read(MDS_HEAD)
    end = int.from_bytes(contents[4:8], "little")  # beginning of the first sample
    contents += file.read(max(0, end - len(contents)))
    Path(target).write_bytes(contents[:end])


def decode_mds(encoding: str, data: bytes) -> Any:
    """Return a value in MosaicML's format. Raises DataError for an unknown encoding."""
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
    why = ""
    if kind == "pkl":
        why = ", which runs code of whoever wrote it: give a `reader`"
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
# The numbers of types, for arrays without a type in the index.
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
    dimensions, width = data[0] >> 2, 1 << (data[0] & 3)  # width: bytes per dimension's length
    end = 1 + dimensions * width
    return np.frombuffer(data[end:], kind).reshape(np.frombuffer(data[1:end], f"<u{width}")).copy()


class ParquetShard(Shard):
    """A Parquet file. A part has some of the row groups, in Arrow's own format."""

    def open(self, path: str) -> None:
        import pyarrow.parquet

        self.footer = footer = pyarrow.parquet.read_metadata(path)
        names = footer.schema.to_arrow_schema().names
        self.column_names = [*(name for name in self.partition if name not in names), *names]
        for name in self.columns or ():
            if name not in self.column_names:
                got = ", ".join(self.column_names)
                raise DataError(f"columns: expected {name!r}, got only {got}")
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
        first = 0
        if number:
            first = int(self.groups[number - 1])
        groups = range(first, int(self.groups[number]))
        with naming_column(source, groups, names), pyarrow.ipc.new_file(target, schema) as writer:
            for batch in source.iter_batches(row_groups=groups, columns=names):
                writer.write_batch(batch.select(names))

    def load(self, path: str, row: int) -> dict[str, Any]:
        number, table = int(self.find_parts(row)), _open_arrow(path)
        place = row
        if number:
            place -= int(self.ends[number - 1])
        return {name: table[name][place] for name in table.column_names}

    def decode(self, contents: dict[str, Any]) -> Fields:
        fields = {}
        for name, scalar in contents.items():
            try:
                fields[name] = _value(scalar)
            except Exception as error:  # text that is not in UTF-8, for example
                raise DataError(f"column {name!r}: {in_one_line(error)}") from error
        return fields


def check_names(all_names: Sequence[str], names: Sequence[str]) -> None:
    """Raise DataError if several columns have one of these names, because none can be read then."""
    for name in names:
        count = all_names.count(name)
        if count > 1:
            raise DataError(f"columns: expected names that differ, got {name!r} {count} times")


@contextlib.contextmanager
def naming_column(source: Any, groups: Iterable[int], names: Sequence[str]) -> Iterator[None]:
    """Turn an error in the block into a DataError that names the damaged row group and column.

    If each row group and column can be read, the error is raised as it is.

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
    """Return the table in a file, which is mapped into memory."""
    import pyarrow

    inode = os.stat(path).st_ino
    known, table = _tables.pop(path, (0, None))
    if known != inode:
        close_removed()
        with pyarrow.memory_map(path) as file:
            table = pyarrow.ipc.open_file(file).read_all()
    _tables[path] = inode, table  # the table is now the last one
    while len(_tables) > MAX_MAPPED:
        _tables.popitem(last=False)
    return table


def close_removed() -> None:
    """Close mapped files that were removed, because they take space on the disk until then."""
    for path, (inode, _) in list(_tables.items()):
        try:
            is_there = os.stat(path).st_ino == inode
        except FileNotFoundError:
            is_there = False
        if not is_there:
            _tables.pop(path, None)


def _value(scalar: Any) -> Any:
    """Return a Parquet value as a Python value, and a list of numbers as an array."""
    import pyarrow.types as types

    kind = scalar.type
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    is_list = is_list and (types.is_integer(kind.value_type) or types.is_floating(kind.value_type))
    if is_list and scalar.is_valid and not scalar.values.null_count:
        # The array is a copy. To write into the mapped file would end the process.
        return np.array(scalar.values.to_numpy(zero_copy_only=False))
    return scalar.as_py()


class PickledShard(ByteShard):
    """The samples that a user's reader returned, in a file of the cache."""

    def find_offsets(self, path: str) -> NDArray[Any]:
        size = os.path.getsize(path)
        count = int.from_bytes(read_bytes(path, size - 8, size), "little")
        return np.frombuffer(read_bytes(path, size - 8 * (count + 2), size - 8), np.int64)

    def decode(self, contents: bytes) -> Fields:
        fields: Fields = pickle.loads(contents)
        return fields


@dataclass(frozen=True)
class Format:
    """How to open the files of a kind."""

    shard: Callable[..., Shard]  # function with `Shard`'s arguments
    unpack: Callable[[str, str], None] | None = None  # unpacker of a whole file
    has_whole: bool = True  # False if only parts can be read
    # function that copies an open file's head to a path; None if the head is the file of offsets
    copy_head: Callable[[Any, str], None] | None = None
    partition: Mapping[str, Any] = field(default_factory=dict)  # see `Shard`


def find_format(name: str, read: Read | None) -> Format | None:
    """Return the format of a file by its name, or None if it is not a shard. `read` reads any file.

    Required packages are imported here, before threads read. If a thread imports a package during a
    fork, the forked process waits for this import forever.
    """
    if read is not None:
        return Format(PickledShard, lambda source, target: _pickle(read(source), target))
    stem, suffix = os.path.splitext(name.lower().partition("?")[0])
    if suffix == ".tgz":
        stem, suffix = f"{stem}.tar", ".gz"
    compression = COMPRESSIONS.get(suffix)
    if compression:
        found = _FORMATS.get(os.path.splitext(stem)[1])
        if found is None or not found.has_whole:
            return None
        _import_arrow()
        return Format(found.shard, functools.partial(_decompress, compression=compression))
    if suffix == ".parquet":
        _import_arrow()
    found = _FORMATS.get(suffix)
    if found is not None and found.shard in (ParquetShard, JsonLines):
        return replace(found, partition=find_partition(name))
    return found


def find_partition(name: str) -> dict[str, Any]:
    """Return the columns in the names of a file's directories, such as `label=cat/0.parquet` in
    Hive's layout. Their values are text, or None.
    """
    found: dict[str, Any] = {}
    for directory in name.partition("?")[0].split("/")[:-1]:
        column, sign, text = directory.partition("=")
        if sign:
            found[column] = urllib.parse.unquote(text)
            if found[column] == HIVE_NULL:
                found[column] = None
    return found


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
