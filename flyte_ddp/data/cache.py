"""Cache of shards and their parts in files of this machine, with a limit of bytes.

The processes of a machine share the files. A file with its final name is complete. It is made under
a lock that ends with its process. A shard on this machine that can be read as it is is not copied.
Imports no torch.
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

from flyte_ddp.code.by_value import code_version
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
MAX_NOTE = 64  # bytes in the file of the lock, which holds two numbers
SLACK = 64  # 1 / SLACK of the cache is freed in addition to the needed bytes
UNFINISHED = ".part", ".raw"
# names of the cache's files; a user's own files in the directory stay
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
    """Return a shard, which knows the places of its samples, from the file at `path`.

    Args:
        is_whole: False if the file is only the head of the shard.

    Raises:
        DataError: the shard cannot be read, or its number of samples differs from the index.
    """
    with reading(source, entry, passed=(FileNotFoundError,)):
        shard = kind.shard(path, columns, is_whole, kind.partition)
        if entry.samples not in (-1, len(shard)):
            raise DataError(f"expected {entry.samples} samples, got {len(shard)}")
        return shard


def make_file(source: Source, entry: Entry, kind: Format, path: str) -> None:
    """Fetch a shard, unpack it if necessary, and put it at `path`.

    Raises:
        DataError: the shard is missing, differs from the index, or cannot be read.
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
        if local:  # the file may have changed while it was read
            check_version(source, entry)


def make_part(source: Source, entry: Entry, copy: Callable[[Any, str], None], path: str) -> None:
    """Fetch a part of a shard, and put it at `path`. Raises as `make_file` does.

    Args:
        copy: function that copies the part from the open shard to a file.
    """

    def copy_checked(file: Any) -> None:
        details = getattr(file, "details", None)  # files on a disk have no details
        check_version(source, entry, details)
        copy(file, path)
        if details is None:  # the file may have changed while it was read
            check_version(source, entry)

    with reading(source, entry):
        source.read_parts(entry.name, copy_checked)


def check_version(source: Source, entry: Entry, info: Mapping[str, Any] | None = None) -> None:
    """Raise DataError if a file has changed: in a store since the index was made, on a disk since
    the index was read.

    Args:
        info: the store's `info` of the file, if it is known.
    """
    local = source.local_path(entry.name)
    if local:
        time = str(os.stat(local).st_mtime_ns)
        # Only the time is compared, because the inode changes by itself on some file systems.
        if entry.version and entry.version.partition(" ")[0] != time:
            raise DataError("expected a file as it was when its index was read, got a changed one")
        return
    if entry.version:
        got = version_of(info or source.info(entry.name))
        if got not in ("", entry.version):
            raise DataError(f"expected version {entry.version} as in the index, got {got}")


def check_size(path: str, entry: Entry) -> None:
    """Raise DataError if the size of the file at `path` differs from the index."""
    size = os.path.getsize(path)
    if entry.size not in (-1, size):
        raise DataError(f"expected {entry.size} bytes as in the index, got {size}")


@contextlib.contextmanager
def reading(
    source: Source, entry: Entry, part: str = "", passed: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn any error in the block into a DataError that names the shard. Any step of reading a
    damaged file may fail.

    Args:
        part: the part of the shard that the block reads.
        passed: classes of errors that are raised as they are, besides errors without a relation to
            the shard.

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
        what, where = str(error), source.join(entry.name)
        if part:
            where += f": {part}"
        if not isinstance(error, DataError):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{in_one_line(error)} ({os.path.basename(frame.filename)}:{frame.lineno})"
        raise DataError(f"data: {where} cannot be read: {what}") from error


@dataclass
class ShardCache:
    """The files of shards and of their parts, for this process and its loader processes."""

    source: Source
    index: str  # URL of the index; the offsets are beside it
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
        """Return whether shards of this kind are copied before they are read."""
        return self._place(entry, WHOLE)[2]

    def ensure(self, rows: Mapping[Entry, Any]) -> None:
        """Make the files with some samples of shards, several at once. Keep these files longer than
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
            DataError: the shard cannot be read, or differs from the index.
        """
        shard = self._open_shard(entry)
        if self.source.local_path(entry.name):
            with reading(self.source, entry):
                check_version(self.source, entry)
        part = int(shard.find_parts(row))
        path = self._place(entry, part)[0]
        if not os.path.exists(path):
            path = self._file(entry, part)
        return shard, path

    def _open_shard(self, entry: Entry) -> Shard:
        shard = self._open.get(entry.name)
        if shard is None:
            is_whole = self._is_one_file(entry)
            part = HEAD
            if is_whole:
                part = WHOLE
            try:
                path = self._file(entry, part)
            except FileNotFoundError:  # the shard has no offsets
                is_whole, path = True, self._file(entry, WHOLE)
            kind = self._place(entry, WHOLE)[1]
            shard = open_shard(self.source, entry, kind, self.columns, path, is_whole)
            self._open[entry.name] = shard
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        return shard

    def _is_one_file(self, entry: Entry) -> bool:
        """Return whether a shard is read from a single file."""
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
        columns = None
        if self.columns and not kind.has_whole:
            columns = tuple(self.columns)
        name = _name_file(self.source, entry, part, columns, self.reader)
        return f"{self.directory}/{name}", kind, True

    def _touch(self, entry: Entry, part: int) -> bool:
        """Return whether the file of a part exists, and keep it longer than others."""
        path, _, is_copy = self._place(entry, part)
        with contextlib.suppress(FileNotFoundError):
            if is_copy:
                os.utime(path)
            return True
        return False

    def _file(self, entry: Entry, part: int) -> str:
        """Return the path of a part's file. Make the file if it is missing."""
        path, kind, is_copy = self._place(entry, part)
        if not is_copy:
            with reading(self.source, entry):
                check_size(path, entry)
            return path
        size, copy = 0, kind.copy_head
        if part == WHOLE:
            size = max(0, entry.size)
        elif part >= 0:
            shard = self._open_shard(entry)
            size, copy = int(shard.sizes[part]), functools.partial(shard.make_part, part)
        with lock_file(self._lock_of(path)):
            if not self._touch(entry, part):
                with room_for_reads(os.getpid()):
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
        """Remove files until `needed` bytes fit. If the file `is_made`, they are on the disk
        already.

        The lock's file holds the limit and the free bytes, because a look at all files takes long.
        """
        with lock_file(f"{self.directory}/room.lock") as file:
            limit, left = map(int, (os.pread(file, MAX_NOTE, 0) or b"0 0").split())
            free = shutil.disk_usage(self.directory).free
            if limit != self.limit or needed > left or (not is_made and needed > free):
                if is_made:
                    needed = 0
                left = self.limit - self._remove_oldest(needed)
            os.ftruncate(file, 0)
            os.pwrite(file, f"{self.limit} {left - needed}".encode(), 0)

    def _remove_oldest(self, needed: int) -> int:
        """Remove the least recently used files until `needed` bytes and some more fit. Return the
        bytes of the remaining files.
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
            lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
            # An unfinished file without a lock was left by a process that was killed.
            if path.endswith(UNFINISHED):
                lock = lock_file(self._lock_of(path), False)
            with contextlib.suppress(FileNotFoundError, BlockingIOError):
                with lock:
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
    """Call `call` with each tuple of arguments, `CONCURRENT_READS` at once."""
    if arguments:
        with ThreadPoolExecutor(CONCURRENT_READS) as threads:
            list(threads.map(call, *zip(*arguments, strict=True)))


@functools.lru_cache(maxsize=4 * MAX_OPEN)
def _name_file(
    source: Source, entry: Entry, part: int, columns: tuple[str, ...] | None, reader: str
) -> str:
    """Return the name of a part's file, a hash of everything that decides its contents."""
    facts = [source.join(entry.name), entry.size, entry.version, part, readers.PART_BYTES]
    return hashlib.sha256(repr([*facts, columns, reader]).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=1)
def room_for_reads(process: int) -> threading.Semaphore:
    """Return the semaphore for files that are made at once. A forked process gets a new one."""
    return threading.Semaphore(CONCURRENT_READS)


def version_of_reader(read: Read | None) -> str:
    """Return a version of a reader, which follows from its code and from the values in the code.

    The cache keeps files that a reader made, so a changed reader needs another version.
    """
    if read is None:
        return ""
    try:
        return code_version(read)
    except Exception as error:  # any error is possible, because `__reduce__` is the user's code
        logger.warning(
            "reader: expected values that can be compared with those of other runs, got %s: each "
            "process reads the shards anew",
            in_one_line(error),
        )
        return os.urandom(16).hex()


def make_directory(directory: str) -> None:
    """Make a directory for this user alone, so that nobody else can write the files in it."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    status = os.stat(directory)
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"cache_dir: expected a directory of this user's alone, got {directory}")
