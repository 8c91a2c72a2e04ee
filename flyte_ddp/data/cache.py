"""Shards and parts of them as files of this machine, in at most so many bytes.

The processes of a machine share them. A file is complete by its name, and is made under a lock that
dies with its process. Shards that lie on this machine as they are to be read are not copied. No
torch.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import re
import shutil
import stat
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flyte_ddp.config.by_value import code_version
from flyte_ddp.data import readers
from flyte_ddp.data.offsets import fetch_offsets
from flyte_ddp.data.readers import (
    HEAD,
    MAX_OPEN,
    WHOLE,
    Format,
    Read,
    Shard,
    find_format,
)
from flyte_ddp.data.source import CONCURRENT_READS, Entry, Source, version_of
from flyte_ddp.errors import ConfigError, DataError, StorageUnavailable, in_one_line
from flyte_ddp.storage.failures import is_full
from flyte_ddp.storage.file_lock import lock_file

NUM_LOCKS = 64
MAX_NOTE = 64  # bytes in the lock's file: two numbers
SLACK = 64  # a part of the cache that is freed with what is needed
UNFINISHED = ".part", ".raw"
# the names of its files; a user's own in this directory stay
FILE = re.compile(r"[0-9a-f]{32}(\.part)?(\.raw)?")

logger = logging.getLogger(__name__)


def open_shard(
    source: Source,
    entry: Entry,
    kind: Format,
    columns: Sequence[str] | None,
    path: str,
    is_whole: bool = True,
) -> Shard:
    """Return where the samples of a shard are, by the file at `path` or by its head alone.

    Raises:
        DataError: it cannot be read, or has other samples than the index says.
    """
    with reading(source, entry, passed=(FileNotFoundError,)):
        shard = kind.shard(path, columns, is_whole, kind.partition)
        if entry.samples not in (-1, len(shard)):
            raise DataError(f"expected {entry.samples} samples, got {len(shard)}")
        return shard


def make_file(source: Source, entry: Entry, kind: Format, path: str) -> None:
    """Fetch a shard, and put it at `path` as it is to be read.

    Raises:
        DataError: there is none, it is not the one of the index, or it cannot be read.
        StorageUnavailable: the store was away for too long, or this disk is full.
    """
    local = source.local_path(entry.name)
    with reading(source, entry):
        check_version(source, entry)
        if not local:
            source.fetch(entry.name, path)
        check_size(local or path, entry)
        if kind.unpack:
            kind.unpack(local or path, f"{path}.raw")
            os.replace(f"{path}.raw", path)
        if local:  # or half of it is what it was
            check_version(source, entry)


def make_part(source: Source, entry: Entry, copy: Callable[[Any, str], None], path: str) -> None:
    """Fetch a part of a shard, and put it at `path`. Raises as `make_file`.

    Args:
        copy: copies it from the open shard to a file.
    """

    def copy_checked(file: Any) -> None:
        details = getattr(file, "details", None)  # none of a disk's
        check_version(source, entry, details)
        copy(file, path)
        if details is None:  # or half of it is what it was
            check_version(source, entry)

    with reading(source, entry):
        source.read_parts(entry.name, copy_checked)


def check_version(source: Source, entry: Entry, info: Mapping[str, Any] | None = None) -> None:
    """Raise DataError if a file has another version than the index says, or on a disk, than it had
    when the index was read.

    Args:
        info: of a file in a store, where it is known.
    """
    local = source.local_path(entry.name)
    if local:
        time = str(os.stat(local).st_mtime_ns)
        # only the time is compared: the inode changes by itself on some file systems
        if entry.version and entry.version.partition(" ")[0] != time:
            raise DataError("expected a file as it was when its index was read, got a changed one")
        return
    if entry.version and not source.is_local(entry.name):
        got = version_of(info or source.info(entry.name))
        if got not in ("", entry.version):
            raise DataError(f"expected version {entry.version} as in the index, got {got}")


def check_size(path: str, entry: Entry) -> None:
    """Raise DataError if the file at `path` has another size than the index says."""
    if entry.size not in (-1, size := os.path.getsize(path)):
        raise DataError(f"expected {entry.size} bytes as in the index, got {size}")


@contextlib.contextmanager
def reading(
    source: Source, entry: Entry, part: str = "", passed: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise DataError, which names the shard, for any error in the block: a damaged file can fail
    anywhere in the reading.

    Args:
        part: of the shard that is read.
        passed: errors that are raised as they are, beside those that are not the shard's.

    Raises:
        StorageUnavailable: this disk is full.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (MemoryError, ConfigError, StorageUnavailable, *passed)):
            raise
        if is_full(error):
            what = f"cache_dir: no space is left on its disk: {in_one_line(error)}"
            raise StorageUnavailable(what, True) from error
        what, where = str(error), f"{source.join(entry.name)}{part and f': {part}'}"
        if not isinstance(error, DataError):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{in_one_line(error)} ({os.path.basename(frame.filename)}:{frame.lineno})"
        raise DataError(f"data: {where} cannot be read: {what}") from error


@dataclass
class ShardCache:
    """The files of shards and of their parts, for this process and its copies in others."""

    source: Source
    index: str  # URL of the index, beside which the offsets are
    read: Read | None
    columns: Sequence[str] | None
    directory: str
    limit: int  # bytes
    reader: str = ""  # the version of `read`
    num_ignored: int = 0  # samples that could not be read
    _open: OrderedDict[str, Shard] = field(default_factory=OrderedDict)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": OrderedDict()}

    def has_copies(self, entry: Entry) -> bool:
        """Return whether shards such as this one are copied before they are read."""
        return self._place(entry, WHOLE)[2]

    def ensure(self, rows: Mapping[Entry, Any]) -> None:
        """Make the files of some samples of shards, several at once, and keep them longer than
        others.
        """
        in_parts = [each for each in rows if not self._is_one_file(each)]
        _do_at_once(self._open_shard, [(each,) for each in in_parts if each.name not in self._open])
        parts = [(each, WHOLE) for each in rows if each not in in_parts]
        for entry in in_parts:
            found = np.unique(self._open_shard(entry).find_parts(rows[entry]))
            parts += [(entry, part) for part in found.tolist()]
        _do_at_once(self._file, [each for each in parts if not self._touch(*each)])

    def find(self, entry: Entry, row: int) -> tuple[Shard, str]:
        """Return a shard, and the path of the part with a sample.

        Raises:
            DataError: it cannot be read, or is not the one of the index.
        """
        shard = self._open_shard(entry)
        if self.source.local_path(entry.name):
            with reading(self.source, entry):
                check_version(self.source, entry)
        part = int(shard.find_parts(row))
        path = self._place(entry, part)[0]
        return shard, path if os.path.exists(path) else self._file(entry, part)

    def _open_shard(self, entry: Entry) -> Shard:
        shard = self._open.get(entry.name)
        if shard is None:
            is_whole = self._is_one_file(entry)
            try:
                path = self._file(entry, WHOLE if is_whole else HEAD)
            except FileNotFoundError:  # no offsets
                is_whole, path = True, self._file(entry, WHOLE)
            kind = self._place(entry, WHOLE)[1]
            shard = open_shard(self.source, entry, kind, self.columns, path, is_whole)
            self._open[entry.name] = shard
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return shard

    def _is_one_file(self, entry: Entry) -> bool:
        """Return whether a shard is read from a file of all its bytes."""
        path, kind, is_copy = self._place(entry, WHOLE)
        if kind.unpack or not is_copy or os.path.exists(path):
            return True
        is_one_part = 0 <= entry.size <= readers.PART_BYTES
        return kind.has_whole and (is_one_part or not self.source.has_ranges(entry.name))

    def _place(self, entry: Entry, part: int) -> tuple[str, Format, bool]:
        kind = find_format(entry.name, self.read)
        if kind is None:
            raise DataError(
                f"data: {self.source.join(entry.name)}: expected .tar, .parquet, .mds or .jsonl, "
                "or a `reader`"
            )
        local = self.source.local_path(entry.name)
        if local and kind.has_whole and not kind.unpack:
            return local, kind, False
        columns = tuple(self.columns) if self.columns and not kind.has_whole else None
        name = _name_file(self.source, entry, part, columns, self.reader)
        return f"{self.directory}/{name}", kind, True

    def _touch(self, entry: Entry, part: int) -> bool:
        """Return whether the file of a part is there, and keep it longer than others."""
        path, _, is_copy = self._place(entry, part)
        with contextlib.suppress(FileNotFoundError):
            if is_copy:
                os.utime(path)
            return True
        return False

    def _file(self, entry: Entry, part: int) -> str:
        """Return the path of a part's file, which is made if it is not there."""
        path, kind, is_copy = self._place(entry, part)
        if not is_copy:
            with reading(self.source, entry):
                check_size(path, entry)
            return path
        size, copy = max(0, entry.size) if part == WHOLE else 0, kind.copy_head
        if part >= 0:
            shard = self._open_shard(entry)
            size, copy = int(shard.sizes[part]), functools.partial(shard.make_part, part)
        with lock_file(self._lock_of(path)):
            if not self._touch(entry, part):
                with _room_for_reads(os.getpid()):
                    self._make_room(size)
                    if part == WHOLE:
                        make_file(self.source, entry, kind, f"{path}.part")
                    elif copy:
                        make_part(self.source, entry, copy, f"{path}.part")
                    else:
                        timeout = self.source.timeout
                        fetch_offsets(self.index, entry, f"{path}.part", timeout)
                    self._make_room(os.path.getsize(f"{path}.part") - size, is_made=True)
                    os.replace(f"{path}.part", path)
        return path

    def _lock_of(self, path: str) -> str:
        return f"{self.directory}/{int(os.path.basename(path)[:8], 16) % NUM_LOCKS}.lock"

    def _make_room(self, needed: int, is_made: bool = False) -> None:
        """Let `needed` bytes fit, which are there already if the file `is_made`.

        The lock's file has the limit, and the bytes that still fit: a look at all files takes long.
        """
        with lock_file(f"{self.directory}/room.lock") as file:
            limit, left = map(int, (os.pread(file, MAX_NOTE, 0) or b"0 0").split())
            free = shutil.disk_usage(self.directory).free
            if limit != self.limit or needed > left or (not is_made and needed > free):
                needed = 0 if is_made else needed
                left = self.limit - self._remove_oldest(needed)
            os.ftruncate(file, 0)
            os.pwrite(file, f"{self.limit} {left - needed}".encode(), 0)

    def _remove_oldest(self, needed: int) -> int:
        """Remove the files that were not used for longest, until `needed` bytes fit, and some more.
        Return the bytes that are left.
        """
        found = []
        with os.scandir(self.directory) as files:
            for file in filter(lambda each: FILE.fullmatch(each.name), files):
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat()
                    found.append((status.st_mtime_ns, status.st_size, file.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            free = shutil.disk_usage(self.directory).free
            if total + needed <= self.limit - self.limit // SLACK and needed <= free:
                break
            is_left = path.endswith(UNFINISHED)  # by a process that was killed, if not locked
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                with lock_file(self._lock_of(path), False) if is_left else contextlib.nullcontext():
                    os.unlink(path)
                total -= size
        readers.close_removed()
        if total + needed > self.limit:
            raise ConfigError(
                f"cache_gib: expected at least {(total + needed) / 2**30:.3g} for the shards "
                f"that are fetched at once, got {self.limit / 2**30:.3g}"
            )
        return total


def _do_at_once(call: Callable[..., object], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Call with each of these, `CONCURRENT_READS` at once."""
    if arguments:
        with ThreadPoolExecutor(CONCURRENT_READS) as threads:
            list(threads.map(call, *zip(*arguments, strict=True)))


@functools.lru_cache(maxsize=4 * MAX_OPEN)
def _name_file(
    source: Source, entry: Entry, part: int, columns: tuple[str, ...] | None, reader: str
) -> str:
    """Return the name of a part's file, in which all counts that its contents follow from."""
    facts = [source.join(entry.name), entry.size, entry.version, part, readers.PART_BYTES]
    return hashlib.sha256(repr([*facts, columns, reader]).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=1)
def _room_for_reads(process: int) -> threading.Semaphore:
    """Return what lets so many files be made at once, anew in a process that was forked."""
    return threading.Semaphore(CONCURRENT_READS)


def version_of_reader(read: Read | None) -> str:
    """Return what tells a reader from others, because files are kept that it has made: of its code,
    and of the values that this refers to.
    """
    if read is None:
        return ""
    try:
        return code_version(read)
    except Exception as error:  # any error is possible: `__reduce__` is the user's
        logger.warning(
            "reader: expected values that can be compared with those of other runs, got %s: each "
            "process reads the shards anew",
            in_one_line(error),
        )
        return os.urandom(16).hex()


def make_directory(directory: str) -> None:
    """Make a directory for this user alone: what is read there was written by these processes."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    status = os.stat(directory)
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"cache_dir: expected a directory of this user's alone, got {directory}")
