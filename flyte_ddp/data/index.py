"""The index of shards: their names, samples, bytes and versions. It is read, or made once.

Besides this package's own index, the indexes of MosaicML's streaming, wids and Energon can be read.
The index is beside the shards or at a URL. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import math
import os
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.data.cache import make_file, make_part, open_shard
from flyte_ddp.data.offsets import write_offsets
from flyte_ddp.data.readers import ByteShard, Read, find_format
from flyte_ddp.data.source import CONCURRENT_READS, Entry, Source, version_of
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.storage import check_name, read_file, redact_url, write_file

OWN_INDEX = "flyte_ddp_index.npz"
ENERGON, SPLIT = ".nv-meta/.info.json", ".nv-meta/split.yaml"
FOREIGN = ("index.json", ENERGON)  # indexes of MosaicML's streaming or wids, and of Energon
FEW_SHARDS = 128  # 16 shards for each of 8 lanes
MORE_BYTES = f"; fewer than {FEW_SHARDS}, of which each rank reads more than its part"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The shards of a source, in an order that stays when shards are added.

    The fields are arrays, because every loader process has a copy, and Python objects would take
    ten times the memory.
    """

    names: NDArray[Any]  # (S,) in UTF-8
    samples: NDArray[np.int64]  # (S,)
    sizes: NDArray[np.int64]  # (S,) bytes; -1 if unknown
    versions: NDArray[Any]  # (S,) the store's versions; b"" if unknown

    def __len__(self) -> int:
        return len(self.names)

    def entry(self, shard: int) -> Entry:
        return Entry(
            self.names[shard].decode(),
            int(self.samples[shard]),
            int(self.sizes[shard]),
            self.versions[shard].decode(),
        )

    def head(self, count: int | None) -> ShardIndex:
        """Return the index of the first `count` shards, or of all for None."""
        return ShardIndex(*(each[:count] for each in vars(self).values()))

    def checksum(self) -> str:
        """Return a checksum of names, samples and sizes. Versions differ between copies."""
        digest = hashlib.sha256(b"\0".join(self.names.tolist()))
        digest.update(np.stack([self.samples, self.sizes]).astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards with a known size."""
        return int(np.maximum(self.sizes, 0).sum())


def read_index(source: Source, url: str) -> ShardIndex:
    """Return the index at `url`, or beside the shards for "".

    Raises:
        DataError: there is no index, or the file is not an index, has no sample, or has two shards
            with the same name.
    """
    index, _ = _find_index(source, url)
    if index is None:
        got = url or f"none of {', '.join((OWN_INDEX, *FOREIGN))} beside them"
        raise DataError(
            f"index: expected the index of {source.join('')}, got no file ({got}): call "
            "`prepare()` of the Shards once, before the ranks start, or end `flyte-ddp shards`"
        )
    if not index.samples.sum():
        raise DataError(f"data: expected samples, got none in {source.join('')}")
    names = {name.decode() for name in index.names.tolist()}
    if isinstance(source.place, tuple) and not names.issubset(source.place):
        other = min(names.difference(source.place))
        raise DataError(f"index: expected shards of the list, got {redact_url(other)!r}")
    return _fill_versions(source, index)


def _fill_versions(source: Source, index: ShardIndex) -> ShardIndex:
    """Return the index with the missing versions of shards in stores, and with the stamps of files
    on this machine. An index of another package has no versions.
    """
    names = [name.decode() for name in index.names.tolist()]
    versions = index.versions.tolist()
    missing = []
    for number, name in enumerate(names):
        if source.local_path(name):
            versions[number] = source.stamp(name).encode()
        elif not versions[number]:
            missing.append(number)
    wanted = [names[number] for number in missing]
    found: dict[str, dict[str, Any]] = {}
    if wanted and isinstance(source.place, str) and source.has_ranges(""):
        found = source.find()
    # If the store has no version of the first shard, it has no versions of the others.
    elif wanted and version_of(source.look(wanted[:1])[wanted[0]]):
        found = source.look(wanted)
    for number, name in zip(missing, wanted, strict=True):
        versions[number] = version_of(found.get(name, {})).encode()
    return dataclasses.replace(index, versions=np.array(versions, dtype=bytes))


def prepare_index(
    source: Source,
    url: str,
    read: Read | None,
    counts: Mapping[str, int] | None = None,
    columns: Sequence[str] | None = None,
) -> str:
    """Make the index if it is missing, or add new shards to this package's own index. Return a
    description.

    Args:
        url: the place of the index; "" for beside the shards.
        counts: numbers of samples by shard, as far as they are known.
        columns: the fields that are read. None for all fields, which must then be the same in all
            shards.

    Raises:
        DataError: there is no shard, a shard cannot be read, or two shards have the same name.
        ConfigError: a list of shards needs a URL for the index.
    """
    known, is_own = _find_index(source, url)
    if known is None or is_own:
        if not url and isinstance(source.place, tuple):
            raise ConfigError("index: expected a URL where the index of these shards is kept")
        url = url or source.join(OWN_INDEX)
        known = _count(source, known, url, read, counts or {}, columns)
        arrays = io.BytesIO()
        np.savez(arrays, **vars(known))
        write_file(url, arrays.getvalue(), "index", source.timeout)
    num_samples, num_gib = known.samples.sum(), known.num_bytes / 2**30
    text = (
        f"{num_samples:,} samples in {len(known):,} shards of {source.join('')}, {num_gib:,.2f} GiB"
    )
    if len(known) < FEW_SHARDS:
        text += MORE_BYTES
    return text


def _find_index(source: Source, url: str) -> tuple[ShardIndex | None, bool]:
    """Return the index, and whether it is this package's own. Return None if there is no index."""
    places = []
    if url:
        places = [url]
    elif isinstance(source.place, str):
        places = [source.join(name) for name in (OWN_INDEX, *FOREIGN)]
    for place in places:
        try:
            contents = read_file(place, "index", source.timeout)
        except FileNotFoundError:
            continue
        is_own = contents.startswith(b"PK")
        try:
            if is_own:
                with np.load(io.BytesIO(contents), allow_pickle=False) as arrays:
                    index = ShardIndex(**arrays)
            else:
                index = _read_foreign(contents, source)
            if isinstance(source.place, str):
                for name in index.names.tolist():
                    check_name(name.decode(), "data")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"index: expected an index of shards, got {place}: {error}") from error
        _check_names(index.names.tolist())
        return index, is_own
    return None, True


def _read_foreign(contents: bytes, source: Source) -> ShardIndex:
    """Parse the index of MosaicML's streaming, of wids or of Energon."""
    found = json.loads(contents)
    if "shard_counts" in found:  # Energon's index has no sizes
        files = source.find()
        if SPLIT in files:
            logger.warning(
                "%s divides the shards into training and held-out ones: all of them are read; name "
                "those to read as a list of URLs",
                source.join(SPLIT),
            )
        entries = []
        for name, count in found["shard_counts"].items():
            size = int(files.get(name, {}).get("size", -1))
            entries.append(Entry(name, count, size, ""))
        return _make_index(entries)
    if "shardlist" in found:
        rows = [(each["url"], each["nsamples"], each["filesize"]) for each in found["shardlist"]]
    else:
        shards = [(each["zip_data"] or each["raw_data"], each) for each in found["shards"]]
        rows = [(file["basename"], each["samples"], file["bytes"]) for file, each in shards]
    return _make_index([Entry(*row, "") for row in rows])


def _make_index(entries: Sequence[Entry]) -> ShardIndex:
    names = [each.name.encode() for each in entries]
    samples = [each.samples for each in entries]
    sizes = [each.size for each in entries]
    versions = [each.version.encode() for each in entries]
    return ShardIndex(
        np.array(names, dtype=bytes),
        np.array(samples, np.int64),
        np.array(sizes, np.int64),
        np.array(versions, dtype=bytes),
    )


def _check_names(names: Sequence[bytes]) -> None:
    if len(set(names)) < len(names):
        (name, count), *_ = Counter(names).most_common(1)
        raise DataError(
            f"data: expected shards with other names, got {name.decode()} {count} times"
        )


def _count(
    source: Source,
    known: ShardIndex | None,
    url: str,
    read: Read | None,
    counts: Mapping[str, int],
    columns: Sequence[str] | None,
) -> ShardIndex:
    """Return an index of all shards of `source`. The shards in `known` stay first, and are counted
    anew if their file is newer than the index.
    """
    if isinstance(source.place, tuple):
        _check_names([name.encode() for name in source.place])
    files = _list_files(source, read)
    entries = _list_entries(source, files, known, url, counts)
    to_count = [each for each in entries if each.samples < 0]
    if to_count:
        formats = {each.name: find_format(each.name, read) for each in entries}
        whole = [each for each in to_count if not _has_head(formats[each.name])]
        logger.warning(
            "counts the samples of %d shards of %s once, for which it reads %.2f GiB",
            len(to_count),
            source.join(""),
            sum(max(0, each.size) for each in whole) / 2**30,
        )
        first = entries[0]
        # The other shards must have the first shard's columns.
        if _has_head(formats[first.name]) and first not in to_count:
            to_count = [first, *to_count]
    with ThreadPoolExecutor(CONCURRENT_READS) as threads:
        counted = list(
            threads.map(lambda each: _count_samples(source, each, url, read, columns), to_count)
        )
    names = [each.name for each in to_count]
    found = dict(zip(names, [count for count, _ in counted], strict=True))
    if columns is None:
        own = {}
        for name, (count, shard_columns) in zip(names, counted, strict=True):
            if count:  # a shard without samples may have no columns
                own[name] = shard_columns
        _check_columns(source, own)
    return _make_index(
        [dataclasses.replace(each, samples=found.get(each.name, each.samples)) for each in entries]
    )


def _list_files(source: Source, read: Read | None) -> dict[str, tuple[int, str]]:
    """Return the sizes and versions of the shards of `source` by name, in order. An unknown size is
    -1.
    """
    files = {}
    for name, info in sorted(source.find().items()):
        # An unfinished index has a longer name than the index.
        is_hidden = name.rpartition("/")[2].startswith((".", "_", OWN_INDEX))
        if find_format(name, read) and not is_hidden:
            size = -1
            if info["size"] is not None:
                size = int(info["size"])
            files[name] = size, source.version(name, info)
    if not files:
        raise DataError(
            f"data: expected shards (.tar, .parquet, .mds, .jsonl), got none in {source.join('')}"
        )
    return files


def _list_entries(
    source: Source,
    files: Mapping[str, tuple[int, str]],
    known: ShardIndex | None,
    url: str,
    counts: Mapping[str, int],
) -> list[Entry]:
    """Return an entry for each file, the files of `known` first.

    An entry has -1 samples if they have to be counted, because the file is new or newer than the
    index.
    """
    entries, made = list[Entry](), 0.0
    if known is not None:
        # Files on a disk are compared by time, files in a store by version.
        made = time_of_change(Source((), source.timeout), url) or math.inf
        for each in map(known.entry, range(len(known))):
            if _is_same(each, files.get(each.name)):
                entries.append(dataclasses.replace(each, version=files[each.name][1]))
    kept = {each.name for each in entries}
    entries += [Entry(name, -1, *files[name]) for name in files if name not in kept]
    found = []
    for each in entries:
        if each.name not in kept or time_of_change(source, each.name) > made:
            each = dataclasses.replace(each, samples=counts.get(each.name, -1))
        found.append(each)
    return found


def _has_head(kind: Any) -> bool:
    """Return whether the head of a shard in this format is enough to count its samples."""
    return bool(kind and kind.copy_head)


def _check_columns(source: Source, found: Mapping[str, Sequence[str] | None]) -> None:
    """Raise DataError if shards have other columns than the first shard. The columns in `found` are
    None if each sample has its own.
    """
    known = [(name, columns) for name, columns in found.items() if columns is not None]
    for name, columns in known:
        first, expected = known[0]
        others = sorted(set(columns) ^ set(expected))
        if others:
            raise DataError(
                f"data: {source.join(name)}: expected the columns of {first}, got a difference in "
                f"{', '.join(others)}: name the columns that all shards have, as `columns`"
            )


def _is_same(known: Entry, found: tuple[int, str] | None) -> bool:
    """Return whether a file with this size and version is the shard in the index.

    The index of an earlier version of this package has no versions for stores that report only
    times.
    """
    return found is not None and known.size == found[0] and known.version in ("", found[1])


def time_of_change(source: Source, name: str) -> float:
    """Return the time of change of a file on a disk; 0 for a file in a store."""
    path = source.local_path(name)
    if not path:
        return 0.0
    return os.path.getmtime(path)


def _count_samples(
    source: Source, entry: Entry, url: str, read: Read | None, columns: Sequence[str] | None
) -> tuple[int, Sequence[str] | None]:
    """Return the number of samples of a shard, and their columns. If the format stores no offsets,
    put the offsets beside the index at `url`.
    """
    kind = find_format(entry.name, read)
    assert kind is not None  # only files with a format are listed
    with tempfile.TemporaryDirectory(prefix="shard-") as place:
        path = f"{place}/shard"
        if kind.copy_head:
            make_part(source, entry, kind.copy_head, path)
        elif kind.unpack or not source.local_path(entry.name):
            make_file(source, entry, kind, path)
        else:
            path = source.local_path(entry.name)
        shard = open_shard(source, entry, kind, columns, path, not kind.copy_head)
    if isinstance(shard, ByteShard) and not (kind.unpack or kind.copy_head):
        write_offsets(url, entry, shard.offsets, source.timeout)
    return len(shard), shard.column_names
