"""The index of shards: names, samples, bytes and versions. Read as others have written it, or made
once.

Found beside the shards: our own, that of MosaicML's streaming, that of wids, that of Energon. No
torch.
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
FOREIGN = ("index.json", ENERGON)  # of MosaicML's streaming or of wids; of Energon
FEW_SHARDS = 128  # less than 16 for each of 8 lanes
MORE_BYTES = f"; fewer than {FEW_SHARDS}, of which each rank reads more than its part"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """The shards of a source, in an order that stays when others are added.

    Arrays, because every loader process has them: Python objects would take ten times the memory.
    """

    names: NDArray[Any]  # (S,) in UTF-8
    samples: NDArray[np.int64]  # (S,)
    sizes: NDArray[np.int64]  # (S,) bytes; -1 where not known
    versions: NDArray[Any]  # (S,) as the store had them; b"" where not known

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
        """Return the index of the first `count` shards, None for all."""
        return ShardIndex(*(each[:count] for each in vars(self).values()))

    def checksum(self) -> str:
        """Return a checksum of names, samples and sizes. Versions differ between copies."""
        digest = hashlib.sha256(b"\0".join(self.names.tolist()))
        digest.update(np.stack([self.samples, self.sizes]).astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards whose size is known."""
        return int(np.maximum(self.sizes, 0).sum())


def read_index(source: Source, url: str) -> ShardIndex:
    """Return the index at `url`, or beside the shards for "".

    Raises:
        DataError: there is none, it is no index, it has no sample, or two shards of one name.
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
    """Return the index with the versions of shards that it has none of, such as an index of
    others; and of files on this machine with their stamps.
    """
    names = [name.decode() for name in index.names.tolist()]
    versions = index.versions.tolist()
    missing = []
    for number, name in enumerate(names):
        if source.local_path(name):
            versions[number] = source.stamp(name).encode()
        elif not versions[number] and not source.is_local(name):
            missing.append(number)
    wanted = [names[number] for number in missing]
    found: dict[str, dict[str, Any]] = {}
    if wanted and isinstance(source.place, str) and source.has_ranges(""):
        found = source.find()
    # a store that has no version of the first one has none of the others
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
    """Make the index if there is none, or add new shards to our own. Return a description.

    Args:
        url: where it is kept; "" for beside the shards.
        counts: the samples of shards where they are known.
        columns: the fields that are read; None for all, which are to be the same in all shards.

    Raises:
        DataError: there is no shard, one cannot be read, or two have one name.
        ConfigError: a list of shards needs a place for the index.
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
    return (
        f"{known.samples.sum():,} samples in {len(known):,} shards of {source.join('')}, "
        f"{known.num_bytes / 2**30:,.2f} GiB{MORE_BYTES if len(known) < FEW_SHARDS else ''}"
    )


def _find_index(source: Source, url: str) -> tuple[ShardIndex | None, bool]:
    """Return the index and whether it is our own; None if there is none."""
    names = (OWN_INDEX, *FOREIGN) if isinstance(source.place, str) else ()
    for place in [url] if url else [source.join(name) for name in names]:
        try:
            contents = read_file(place, "index", source.timeout)
        except FileNotFoundError:
            continue
        is_own = contents.startswith(b"PK")
        try:
            index = _read_own(contents) if is_own else _read_foreign(contents, source)
            for name in index.names.tolist() if isinstance(source.place, str) else ():
                check_name(name.decode(), "data")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(f"index: expected an index of shards, got {place}: {error}") from error
        _check_names(index.names.tolist())
        return index, is_own
    return None, True


def _read_own(contents: bytes) -> ShardIndex:
    with np.load(io.BytesIO(contents), allow_pickle=False) as arrays:
        return ShardIndex(**arrays)


def _read_foreign(contents: bytes, source: Source) -> ShardIndex:
    """Parse the index of MosaicML's streaming, of wids or of Energon."""
    found = json.loads(contents)
    if "shard_counts" in found:  # Energon's, without sizes
        files = source.find()
        if SPLIT in files:
            logger.warning(
                "%s divides the shards into training and held-out ones: all of them are read; name "
                "those to read as a list of URLs",
                source.join(SPLIT),
            )
        return _make_index(
            [
                Entry(name, count, int(files.get(name, {}).get("size", -1)), "")
                for name, count in found["shard_counts"].items()
            ]
        )
    if "shardlist" in found:
        rows = [(each["url"], each["nsamples"], each["filesize"]) for each in found["shardlist"]]
    else:
        shards = [(each["zip_data"] or each["raw_data"], each) for each in found["shards"]]
        rows = [(file["basename"], each["samples"], file["bytes"]) for file, each in shards]
    return _make_index([Entry(*row, "") for row in rows])


def _make_index(entries: Sequence[Entry]) -> ShardIndex:
    return ShardIndex(
        np.array([each.name.encode() for each in entries], dtype=bytes),
        np.array([each.samples for each in entries], np.int64),
        np.array([each.size for each in entries], np.int64),
        np.array([each.version.encode() for each in entries], dtype=bytes),
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
    """Return an index of all shards of `source`. Those of `known` stay first, and are counted
    anew where a file is newer than the index.
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
        if _has_head(formats[first.name]) and first not in to_count:  # to compare its columns
            to_count = [first, *to_count]
    with ThreadPoolExecutor(CONCURRENT_READS) as threads:
        counted = list(
            threads.map(lambda each: _count_samples(source, each, url, read, columns), to_count)
        )
    names = [each.name for each in to_count]
    found = dict(zip(names, [count for count, _ in counted], strict=True))
    if columns is None:
        # A shard without samples may have no columns.
        own = [each if count else None for count, each in counted]
        _check_columns(source, dict(zip(names, own, strict=True)))
    return _make_index(
        [dataclasses.replace(each, samples=found.get(each.name, each.samples)) for each in entries]
    )


def _list_files(source: Source, read: Read | None) -> dict[str, tuple[int, str]]:
    """Return the sizes and versions of the shards of `source` by their names, in order; the size is
    -1 if it is not known.
    """
    files = {}
    for name, info in sorted(source.find().items()):
        is_hidden = name.rpartition("/")[2].startswith((".", "_", OWN_INDEX))  # also half an index
        if find_format(name, read) and not is_hidden:
            size = -1 if info["size"] is None else int(info["size"])
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
    """Return an entry for each file, the files of `known` first. Its samples are -1 where they have
    to be counted, because the file is new or newer than the index.
    """
    entries, made = list[Entry](), 0.0
    if known is not None:
        # of files on a disk; a version tells whether others have changed
        made = _mtime(Source((), source.timeout), url) or math.inf
        for each in map(known.entry, range(len(known))):
            if _is_same(each, files.get(each.name)):
                entries.append(dataclasses.replace(each, version=files[each.name][1]))
    kept = {each.name for each in entries}
    entries += [Entry(name, -1, *files[name]) for name in files if name not in kept]
    found = []
    for each in entries:
        if each.name not in kept or _mtime(source, each.name) > made:
            each = dataclasses.replace(each, samples=counts.get(each.name, -1))
        found.append(each)
    return found


def _has_head(kind: Any) -> bool:
    """Return whether the samples of a shard of this format are counted without reading it whole."""
    return bool(kind and kind.copy_head)


def _check_columns(source: Source, found: Mapping[str, Sequence[str] | None]) -> None:
    """Raise DataError if shards have other columns than the first of them; `found` has None where
    samples have their own.
    """
    known = [(name, columns) for name, columns in found.items() if columns is not None]
    for name, columns in known:
        first, expected = known[0]
        if others := sorted(set(columns) ^ set(expected)):
            raise DataError(
                f"data: {source.join(name)}: expected the columns of {first}, got a difference in "
                f"{', '.join(others)}: name the columns that all shards have, as `columns`"
            )


def _is_same(known: Entry, found: tuple[int, str] | None) -> bool:
    """Return whether a file of this size and version is the shard that an index has. One of a
    version before this one has no versions of stores that report times alone.
    """
    return found is not None and known.size == found[0] and known.version in ("", found[1])


def _mtime(source: Source, name: str) -> float:
    """Return when a file on a disk was changed; 0 for one in a store."""
    path = source.local_path(name)
    return os.path.getmtime(path) if path else 0.0


def _count_samples(
    source: Source, entry: Entry, url: str, read: Read | None, columns: Sequence[str] | None
) -> tuple[int, Sequence[str] | None]:
    """Return the number of samples of a shard and the columns of them all, and put their offsets
    beside the index at `url` if the shard has none.
    """
    kind = find_format(entry.name, read)
    assert kind is not None  # only such are listed
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
