"""Shards written in a seeded order: each is complete by its name, and those that are missing are
written by the same call again.

A note beside them says what they are of. No torch.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.config.extras import require
from flyte_ddp.data.cache import reading
from flyte_ddp.data.index import OWN_INDEX, prepare_index
from flyte_ddp.data.offsets import write_offsets
from flyte_ddp.data.order import Indices
from flyte_ddp.data.permutation import VERSION, derive_key, permute
from flyte_ddp.data.readers import check_names, find_tar_offsets, naming_column
from flyte_ddp.data.source import Entry, Source, version_of
from flyte_ddp.data.splits import NOTE, read_note
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.storage import SHORT_TIMEOUT, UNFINISHED, Storage, redact_url

SHARDS_AT_ONCE = 256  # of Parquet, in files of this machine while the source is read

logger = logging.getLogger(__name__)

# Yields the shards of these numbers: the number, contents and samples of each.
Make = Callable[[Sequence[int]], Iterable[tuple[int, bytes, int]]]


def draw_order(size: int, *key: int) -> Indices:
    """Return the numbers in [0, size) in a random order that follows from `key`."""
    return permute(np.arange(size), size, derive_key(VERSION, *key))


def compute_checksum(files: Iterable[tuple[str, int, str]]) -> str:
    """Return a checksum of files: of the name, size and version of each."""
    return hashlib.sha256(repr(list(files)).encode(errors="surrogateescape")).hexdigest()[:16]


def begin_shards(destination: str, note: Mapping[str, Any]) -> None:
    """Note at `destination` what its shards are of. Raises ConfigError if it has other files, or
    shards of something else.
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
    if others := [name for name in note if note[name] != found.get(name)]:
        raise ConfigError(
            f"destination: expected a place without shards of another {', '.join(others)}, got "
            f"{storage.url}"
        )


def write_shards(url: str, num_shards: int, suffix: str, make: Make) -> str:
    """Write the shards that are missing at `url`, and then the index. Return a description.

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
        if suffix == ".tar":
            entry = Entry(name, count, len(contents), version_of(source.info(name)))
            offsets = find_tar_offsets(contents)
            write_offsets(source.join(OWN_INDEX), entry, offsets, SHORT_TIMEOUT)
        logger.warning("%s is written, of %d", redact_url(storage.join(name)), num_shards)
    return prepare_index(source, "", None, counts)


def encode_mds(rows: NDArray[Any], column: str) -> bytes:
    """Return a shard in MosaicML's format whose samples are the rows of an array, (N, T)."""
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


def find_parquet(url: str) -> Source | None:
    """Return the Parquet files at `url`, or directly or deeper below; None if none is directly
    there.
    """
    storage = Storage(url, "source", SHORT_TIMEOUT)
    if not any(name.endswith(".parquet") for name in storage.names()):
        return None
    source = Source(storage.url, SHORT_TIMEOUT)
    return Source((storage.url,), SHORT_TIMEOUT) if "" in source.find() else source


def write_parquet(source: Source, destination: str, seed: int, shard_bytes: int) -> str:
    """Write the rows of Parquet files to shards of about `shard_bytes`. Return a description.

    Raises:
        DataError: a file cannot be read or has other columns than the first one, or there is no
            row.
    """
    require("source", "pyarrow", extra="streams")
    import pyarrow
    from pyarrow.parquet import ParquetFile, write_table

    files = {name: info for name, info in source.find().items() if name.endswith(".parquet")}
    entries = [
        Entry(name, -1, int(info["size"]), version_of(info) or str(info.get("mtime", "")))
        for name, info in sorted(files.items())
    ]
    footers: list[Any] = []
    schemas: list[Any] = []
    for entry in entries:
        with reading(source, entry):
            footer, schema = source.read_parts(
                entry.name, lambda file: ((found := ParquetFile(file)).metadata, found.schema_arrow)
            )
            check_names(schema.names, schema.names)
            if others := set(schema) ^ set(schemas[0] if schemas else schema):
                got = ", ".join(sorted({field.name for field in others}))
                raise DataError(f"expected the columns of {entries[0].name}, got another {got}")
        footers.append(footer)
        schemas.append(schema)
    num_rows = sum(footer.num_rows for footer in footers)
    if not num_rows:
        raise DataError(f"source: expected rows, got none in {source.join('')}")
    num_shards = min(num_rows, -(-sum(entry.size for entry in entries) // shard_bytes))

    def scatter(numbers: range | Sequence[int], place: Path) -> None:
        """Write the rows of these shards to a file for each, in the order of the source."""
        writers = {
            number: pyarrow.ipc.new_stream(str(place / str(number)), schemas[0])
            for number in numbers
        }
        first = 0
        for entry, footer in zip(entries, footers, strict=True):
            for group in range(footer.num_row_groups):
                end = first + footer.row_group(group).num_rows
                places = permute(np.arange(first, end), num_rows, derive_key(VERSION, seed))
                shards = places * num_shards // num_rows
                first = end
                with reading(source, entry):
                    read = functools.partial(_read_group, footer, group)
                    table = source.read_parts(entry.name, read)
                for number in writers.keys() & set(shards.tolist()):
                    writers[number].write_table(table.take(np.flatnonzero(shards == number)))
        for writer in writers.values():
            writer.close()

    def make(missing: Sequence[int]) -> Iterator[tuple[int, bytes, int]]:
        for first in range(0, len(missing), SHARDS_AT_ONCE):
            numbers = missing[first : first + SHARDS_AT_ONCE]
            with tempfile.TemporaryDirectory(prefix="shards-") as place:
                scatter(numbers, Path(place))
                for number in numbers:
                    with pyarrow.ipc.open_stream(f"{place}/{number}") as stream:
                        table = stream.read_all()
                    contents = io.BytesIO()
                    write_table(table.take(draw_order(len(table), seed, number)), contents)
                    yield number, contents.getvalue(), len(table)

    checksum = compute_checksum((each.name, each.size, each.version) for each in entries)
    begin_shards(destination, {"source": checksum, "seed": seed, "shard size": shard_bytes})
    return write_shards(destination, num_shards, ".parquet", make)


def _read_group(footer: Any, number: int, file: Any) -> Any:
    """Return the rows of a row group of an open Parquet file."""
    from pyarrow.parquet import ParquetFile

    source = ParquetFile(file, metadata=footer, pre_buffer=True)
    with naming_column(source, [number], source.schema_arrow.names):
        return source.read_row_group(number)
