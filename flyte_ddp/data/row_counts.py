"""The counts of rows and of their targets for documents of one length, beside the index.

`Packed.prepare` packs all documents once. Ranks read the counts, and pack only the windows that
they read rows of. Imports no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import logging
import math
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from flyte_ddp.data.documents import (
    Documents,
    measure,
    name_kind,
    read_documents,
    write_documents,
)
from flyte_ddp.data.index import time_of_change
from flyte_ddp.data.offsets import locate_numbers
from flyte_ddp.data.order import Indices
from flyte_ddp.data.packing import FAIL, VERSION, pack, split_shard
from flyte_ddp.data.shards import Shards
from flyte_ddp.data.source import Entry, Source
from flyte_ddp.errors import DataError
from flyte_ddp.storage import read_file, write_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RowCounts:
    """The rows of all windows of the shards."""

    rows: Indices  # (W,) rows of each window
    targets: Any  # (N,) targets of each row, in the smallest type

    @functools.cached_property
    def ends(self) -> Indices:
        """(W,) rows before the end of each window."""
        return np.cumsum(self.rows)

    def head(self, num_windows: int) -> RowCounts:
        rows = self.rows[:num_windows]
        return RowCounts(rows, self.targets[: int(rows.sum())])

    def checksum(self) -> int:
        numbers = [each.astype("<i8").tobytes() for each in (self.rows, self.targets)]
        return zlib.crc32(b"".join(numbers))


@dataclass(frozen=True, eq=False)
class CountedShards:
    """Shards of documents, whose tokens are counted beside the index."""

    shards: Shards
    key: str  # the field with tokens
    labels: str | None  # the field with labels

    def find_shard(self, shard: int) -> tuple[Source, str, Entry]:
        """Return what `Shards.find_shard` does. A local file has no version, because copies differ
        in their times.
        """
        source, index, entry = self.shards.find_shard(shard)
        if source.local_path(entry.name):
            entry = dataclasses.replace(entry, version="")
        return source, index, entry

    def checksum(self) -> str:
        """Return a checksum of names, sizes, samples and versions of the shards."""
        entries = [self.find_shard(shard)[2] for shard in range(self.shards.num_shards)]
        return hashlib.sha256(repr(entries).encode()).hexdigest()[:16]

    def list_samples(self, shard: int) -> range:
        """Return the numbers of a shard's documents."""
        sizes = self.shards.shard_sizes
        begin = int(sizes[:shard].sum())
        return range(begin, begin + int(sizes[shard]))

    def read(self, shard: int) -> Documents:
        """Return the documents of a shard as they were counted.

        Raises:
            FileNotFoundError: they were not counted, or the shard has changed since.
        """
        source, index, entry = self.find_shard(shard)
        return read_documents(index, entry, name_kind(self.key, self.labels), source.timeout)

    def count(self, shard: int) -> Documents:
        """Return the documents of a shard. Count them if they were not counted since the shard was
        written.
        """
        source, index, entry = self.find_shard(shard)
        kind = name_kind(self.key, self.labels)
        with contextlib.suppress(FileNotFoundError):
            found = self.read(shard)
            if not self.is_newer(shard, locate_numbers(index, entry, kind)):
                return found
        logger.warning("counts the tokens of %s once", source.join(entry.name))
        samples = self.list_samples(shard)
        self.shards.prefetch(samples)
        fields = map(self.shards.__getitem__, samples)
        found = measure(
            fields, self.key, self.labels, lambda number: self.shards.key(samples[number])
        )
        write_documents(index, entry, kind, found, source.timeout)
        return found

    def is_newer(self, shard: int, url: str) -> bool:
        """Return whether a local shard is newer than a local file."""
        source, _, entry = self.find_shard(shard)
        made = time_of_change(Source((), source.timeout), url) or math.inf
        return time_of_change(source, entry.name) > made


def pack_all(counted: CountedShards, length: int, overlong: str) -> RowCounts:
    """Pack all documents, and write the counts of their rows beside the index.

    Raises:
        DataError: there is no target, or a document is longer than a row and may not be.
    """
    rows, targets = list[int](), [np.zeros(0, np.int64)]
    for shard in range(counted.shards.num_shards):
        found = counted.count(shard)
        longest = int(found.lengths.max(initial=0))
        if overlong == FAIL and longest > length:
            sample = counted.list_samples(shard)[int(found.lengths.argmax())]
            raise DataError(
                f"data: {counted.shards.key(sample)}: expected a document of at most {length} "
                f'tokens, got {longest}: choose overlong="continue" or overlong="cut"'
            )
        bounds = split_shard(len(found.lengths)).tolist()
        for begin, end in itertools.pairwise(bounds):
            packed = pack(found, begin, end, length, overlong)
            rows.append(len(packed.row_ends))
            targets.append(packed.targets)
    source, _, _ = counted.find_shard(0)
    counts = RowCounts(np.array(rows, np.int64), np.concatenate(targets))
    if not len(counts.targets):
        raise DataError(f"data: expected tokens to learn, got none in {source.join('')}")
    smallest = counts.targets.astype(np.min_scalar_type(length))
    contents = io.BytesIO()
    np.savez(contents, shards=counted.checksum(), rows=counts.rows, targets=smallest)
    write_file(_url(counted, length, overlong), contents.getvalue(), "index", source.timeout)
    return counts


def read_counts(
    counted: CountedShards, length: int, overlong: str, must_be_newest: bool = False
) -> RowCounts:
    """Return what `pack_all` has written.

    Args:
        must_be_newest: no local shard may be newer.

    Raises:
        FileNotFoundError: the counts are missing, damaged, old, or for other shards.
    """
    source, _, _ = counted.find_shard(0)
    url = _url(counted, length, overlong)
    contents = read_file(url, "index", source.timeout)
    shards = range(counted.shards.num_shards)
    if must_be_newest and any(counted.is_newer(shard, url) for shard in shards):
        raise FileNotFoundError(url)
    try:
        with np.load(io.BytesIO(contents), allow_pickle=False) as arrays:
            if str(arrays["shards"]) == counted.checksum():
                return RowCounts(arrays["rows"], arrays["targets"])
    except (ValueError, KeyError, OSError) as error:
        raise FileNotFoundError(url) from error
    raise FileNotFoundError(url)


def _url(counted: CountedShards, length: int, overlong: str) -> str:
    facts = repr((VERSION, counted.key, counted.labels, length, overlong)).encode()
    _, index, _ = counted.find_shard(0)
    return f"{index}.rows-{hashlib.sha256(facts).hexdigest()[:16]}"
