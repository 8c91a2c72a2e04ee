"""Writing of shards in a seeded order. A repeated call writes the shards that are missing.

A shard with its final name is complete. A note beside the shards describes their source. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config.extras import require
from flyte_ddp.data.cache import reading
from flyte_ddp.data.documents import LABELS, TOKENS, measure, name_kind, write_documents
from flyte_ddp.data.index import OWN_INDEX, prepare_index
from flyte_ddp.data.offsets import write_offsets
from flyte_ddp.data.order import Indices
from flyte_ddp.data.permutation import VERSION, derive_key, permute
from flyte_ddp.data.readers import (
    check_names,
    find_partition,
    find_tar_offsets,
    naming_column,
)
from flyte_ddp.data.source import Entry, Source, version_of
from flyte_ddp.data.splits import NOTE, SPLITS, read_note
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.storage import SHORT_TIMEOUT, UNFINISHED, Storage, redact_url

PARQUET = ".parquet"
SHARDS_AT_ONCE = 256  # Parquet shards in temporary files while the source is read

logger = logging.getLogger(__name__)

# A function that yields number, contents and number of samples of the shards with given numbers.
Make = Callable[[Sequence[int]], Iterable[tuple[int, bytes, int]]]
ReadDocuments = Callable[[bytes], Sequence[Mapping[str, Any]]]


def draw_order(size: int, *key: int) -> Indices:
    """Return the numbers in [0, size) in a random order that follows from `key`."""
    return permute(np.arange(size), size, derive_key(VERSION, *key))


def compute_checksum(files: Iterable[tuple[str, int, str]]) -> str:
    """Return a checksum of files, given as (name, size, version)."""
    return hashlib.sha256(repr(list(files)).encode(errors="surrogateescape")).hexdigest()[:16]


def begin_shards(destination: str, note: Mapping[str, Any]) -> None:
    """Write the note at `destination` before its shards. Raises ConfigError if other files, or
    shards with another note, are there.
    """
    storage = Storage(destination, "destination", SHORT_TIMEOUT)
    found, files = read_note(storage), storage.find()
    for name in filter(UNFINISHED.search, list(files)):
        storage.delete(name)
        del files[name]
    if not found and files:
        raise ConfigError(f"destination: expected a place without files, got {storage.url}")
    if not found:
        storage.write(NOTE, json.dumps(note).encode())
        return
    others = [name for name in note if note[name] != found.get(name)]
    if others:
        raise ConfigError(
            f"destination: expected a place without shards of another {', '.join(others)}, got "
            f"{storage.url}"
        )


def write_shards(
    url: str, num_shards: int, suffix: str, make: Make, read: ReadDocuments | None = None
) -> str:
    """Write the missing shards at `url`, and then the index. Return a description.

    Args:
        read: function that returns the documents in a shard's contents, to count their tokens; None
            for shards of other samples.

    Raises:
        StorageUnavailable: the store was away for too long, or the disk is full.
    """
    storage = Storage(url, "destination", SHORT_TIMEOUT)
    source, found, counts = Source(storage.url, SHORT_TIMEOUT), storage.find(), {}
    names = [f"{number:06d}{suffix}" for number in range(num_shards)]
    missing = [number for number, name in enumerate(names) if name not in found]
    for number, contents, count in make(missing):
        name = names[number]
        storage.write(name, contents)
        counts[name] = count
        version = source.version(name, source.info(name))
        entry = Entry(name, count, len(contents), version)
        if suffix == ".tar":
            offsets = find_tar_offsets(contents)
            write_offsets(source.join(OWN_INDEX), entry, offsets, SHORT_TIMEOUT)
        if read is not None:
            _count_tokens(source.join(OWN_INDEX), entry, read(contents))
        logger.warning("%s is written, of %d", redact_url(storage.join(name)), num_shards)
    return prepare_index(source, "", None, counts)


def _count_tokens(index: str, entry: Entry, documents: Sequence[Mapping[str, Any]]) -> None:
    """Put the counts of a shard's tokens beside the index. `Packed.prepare` names the document that
    cannot be counted.
    """
    fields: list[str | None] = [None]
    if documents and LABELS in documents[0]:
        fields.append(LABELS)
    with contextlib.suppress(DataError):
        for labels in fields:
            found = measure(documents, TOKENS, labels)
            write_documents(index, entry, name_kind(TOKENS, labels), found, SHORT_TIMEOUT)


def encode_mds(rows: NDArray[Any], column: str) -> bytes:
    """Return a shard in MosaicML's format. Its samples are the rows of an array, (N, T)."""
    size = rows[0].nbytes
    kinds = {
        "column_names": [column],
        "column_encodings": [f"ndarray:{rows.dtype}:{rows.shape[1]}"],
        "column_sizes": [size],
    }
    head = json.dumps(kinds).encode()
    begin = 4 * (len(rows) + 2) + len(head)
    numbers = [len(rows), *range(begin, begin + rows.nbytes + 1, size)]
    return np.array(numbers, "<u4").tobytes() + head + rows.tobytes()


def find_tables(url: str, suffixes: tuple[str, ...]) -> Source | None:
    """Return the files with these suffixes at or below `url`. Return None if there are none.

    Deeper directories count only if files, or directories in Hive's layout, are directly below.
    """
    storage = Storage(url, "source", SHORT_TIMEOUT)
    if not any(name.endswith(suffixes) or "=" in name for name in storage.names()):
        return None
    source = Source(storage.url, SHORT_TIMEOUT)
    names = source.find()
    if "" in names:
        return Source((storage.url,), SHORT_TIMEOUT)
    if not any(name.endswith(suffixes) for name in names):
        return None
    return source


def list_tables(source: Source, suffixes: tuple[str, ...]) -> list[Entry]:
    """Return the files with these suffixes and their versions, sorted by name."""
    return [
        Entry(name, -1, int(info["size"]), version_of(info))
        for name, info in sorted(source.find().items())
        if name.endswith(suffixes)
    ]


def checksum_entries(entries: Iterable[Entry]) -> str:
    return compute_checksum((each.name, each.size, each.version) for each in entries)


def write_parquet(
    source: Source,
    destination: str,
    seed: int,
    shard_bytes: int,
    held_out: float | None = None,
    checksum: str | None = None,
) -> str:
    """Write the rows of Parquet files to shards of about `shard_bytes`. Return a description.

    Args:
        held_out: share of the rows for val/. The other rows go into train/. None puts all rows in
            one place.
        checksum: checksum of the source; None to compute it from the files.

    Raises:
        ConfigError: one side would have no rows.
        DataError: a file cannot be read, its columns differ from the first file's, or there are no
            rows.
    """
    require("source", "pyarrow", extra="streams")
    entries = list_tables(source, (PARQUET,))
    footers, schema = _read_footers(source, entries)
    num_rows = sum(footer.num_rows for footer in footers)
    if not num_rows:
        raise DataError(f"source: expected rows, got none in {source.join('')}")
    sides = {destination: range(num_rows)}
    if held_out is not None:
        middle = round(held_out * num_rows)
        if not 0 < middle < num_rows:
            raise ConfigError(
                f"--held-out: expected a share that leaves rows on both sides, got {held_out:g} of "
                f"{num_rows}"
            )
        train, val = (f"{destination.rstrip('/')}/{split}" for split in SPLITS)
        sides = {train: range(middle, num_rows), val: range(middle)}
    note = {"source": checksum or checksum_entries(entries), "seed": seed}
    begin_shards(destination, {**note, "shard size": shard_bytes, "held-out share": held_out})
    num_bytes = sum(entry.size for entry in entries)
    names = [name for name in (TOKENS, LABELS) if name in schema.names]
    read = None
    if TOKENS in names:
        read = functools.partial(_read_lists, names)
    lines = []
    for url, places in sides.items():
        rows = _Rows(source, entries, footers, schema, seed, places)
        rows.num_shards = min(len(places), -(-num_bytes * len(places) // (num_rows * shard_bytes)))
        lines.append(write_shards(url, rows.num_shards, PARQUET, rows.make, read))
    return "\n".join(lines)


def _read_lists(names: Sequence[str], contents: bytes) -> list[dict[str, Any]]:
    """Return the rows of some columns of a Parquet file. A list of numbers is an array."""
    from pyarrow.parquet import read_table

    table = read_table(io.BytesIO(contents), columns=names)
    columns = [each.to_numpy() for each in table.columns]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _read_footers(source: Source, entries: Sequence[Entry]) -> tuple[list[Any], Any]:
    """Return the footer of each file, and their common schema. Raises as `write_parquet` does."""
    from pyarrow.parquet import ParquetFile

    def read_head(entry: Entry, file: Any) -> tuple[Any, Any]:
        found = ParquetFile(file)
        empty = add_partition(found.schema_arrow.empty_table(), entry)
        return found.metadata, empty.schema

    footers: list[Any] = []
    schemas: list[Any] = []
    for entry in entries:
        with reading(source, entry):
            footer, schema = source.read_parts(entry.name, functools.partial(read_head, entry))
            check_names(schema.names, schema.names)
            schemas.append(schema)
            others = set(schema) ^ set(schemas[0])
            if others:
                got = ", ".join(sorted({field.name for field in others}))
                raise DataError(f"expected the columns of {entries[0].name}, got another {got}")
        footers.append(footer)
    return footers, schemas[0]


@dataclass
class _Rows:
    """The rows of Parquet files at some places of a random order."""

    source: Source
    entries: Sequence[Entry]
    footers: Sequence[Any]
    schema: Any
    seed: int
    places: range
    num_shards: int = 1

    def make(self, missing: Sequence[int]) -> Iterator[tuple[int, bytes, int]]:
        """Yield number, contents and number of samples of the shards with these numbers."""
        import pyarrow
        from pyarrow.parquet import write_table

        for first in range(0, len(missing), SHARDS_AT_ONCE):
            numbers = missing[first : first + SHARDS_AT_ONCE]
            with tempfile.TemporaryDirectory(prefix="shards-") as place:
                self._scatter(numbers, Path(place))
                for number in numbers:
                    with pyarrow.ipc.open_stream(f"{place}/{number}") as stream:
                        table = stream.read_all()
                    contents = io.BytesIO()
                    write_table(table.take(draw_order(len(table), self.seed, number)), contents)
                    yield number, contents.getvalue(), len(table)

    def _scatter(self, numbers: Sequence[int], place: Path) -> None:
        """Write the rows of each of these shards to a file, in the order of the source."""
        import pyarrow

        writers = {
            number: pyarrow.ipc.new_stream(str(place / str(number)), self.schema)
            for number in numbers
        }
        num_rows, first = sum(footer.num_rows for footer in self.footers), 0
        for entry, footer in zip(self.entries, self.footers, strict=True):
            for group in range(footer.num_row_groups):
                end = first + footer.row_group(group).num_rows
                drawn = permute(np.arange(first, end), num_rows, derive_key(VERSION, self.seed))
                shards = (drawn - self.places.start) * self.num_shards // len(self.places)
                first = end
                with reading(self.source, entry):
                    read = functools.partial(_read_group, footer, group)
                    table = add_partition(self.source.read_parts(entry.name, read), entry)
                table = table.select(self.schema.names)  # a file may have another order of columns
                for number in writers.keys() & set(shards.tolist()):
                    writers[number].write_table(table.take(np.flatnonzero(shards == number)))
        for writer in writers.values():
            writer.close()


def add_partition(table: Any, entry: Entry) -> Any:
    """Return a table with the columns of its file's directories; see `find_partition`."""
    import pyarrow

    for name, value in find_partition(entry.name).items():
        if name not in table.column_names:
            values = pyarrow.array([value] * len(table), pyarrow.string())
            table = table.append_column(name, values)
    return table


def _read_group(footer: Any, number: int, file: Any) -> Any:
    """Return the rows of a row group of an open Parquet file."""
    from pyarrow.parquet import ParquetFile

    source = ParquetFile(file, metadata=footer, pre_buffer=True)
    with naming_column(source, [number], source.schema_arrow.names):
        return source.read_row_group(number)
