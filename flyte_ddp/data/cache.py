"""Shards as files of this machine in which any sample can be read, in at most so many bytes.

The processes of a machine share them. A file is complete by its name, and is made under a lock that
dies with its process. Shards that lie on this machine as they are to be read are not copied. No
torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import inspect
import os
import re
import shutil
import stat
import threading
import traceback
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.data.readers import Format, Read, Shard, find_format
from flyte_ddp.data.source import CONCURRENT_READS, Source, version_of
from flyte_ddp.errors import ConfigError, DataError, StorageUnavailable, in_one_line
from flyte_ddp.storage.failures import is_full

MAX_OPEN = 1024  # shards whose samples' places a process keeps in memory
NUM_LOCKS = 64
UNFINISHED = ".part", ".raw"
# the names of its files; a user's own in this directory stay
FILE = re.compile(r"[0-9a-f]{32}(\.part)?(\.raw)?")


@dataclass(frozen=True)
class Entry:
    """A shard as the index has it."""

    name: str
    samples: int  # -1 where they are to be counted
    size: int  # bytes; -1 where not known
    version: str  # "" where not known


def open_shard(
    source: Source, entry: Entry, kind: Format, columns: Sequence[str] | None, path: str
) -> Shard:
    """Return the samples of a file that `make_file` has made.

    Raises:
        DataError: it cannot be read, or has other samples than the index says.
    """
    with reading(source, entry, passed=(FileNotFoundError,)):
        shard = kind.shard(path, columns)
        if entry.samples not in (-1, len(shard)):
            raise DataError(f"expected {entry.samples} samples, got {len(shard)}")
        return shard


def make_file(
    source: Source, entry: Entry, kind: Format, columns: Sequence[str] | None, path: str
) -> None:
    """Fetch a shard, and put it at `path` as it is to be read.

    Raises:
        DataError: there is none, it is not the one of the index, or it cannot be read.
        StorageUnavailable: the store was away for too long, or this disk is full.
    """
    local = source.local_path(entry.name)
    raw = local or (f"{path}.raw" if kind.unpack else path)
    try:
        with reading(source, entry):
            if not local:
                if entry.version and entry.version != (got := version_of(source.info(entry.name))):
                    raise DataError(f"expected version {entry.version} as in the index, got {got}")
                source.fetch(entry.name, raw)
            check_size(raw, entry)
            if kind.unpack:
                kind.unpack(raw, path, columns)
    except OSError as error:  # of this disk
        where = os.path.dirname(path)
        raise StorageUnavailable(f"cache_dir: {where} is full: {error}", True) from error
    finally:
        if kind.unpack and not local:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(raw)


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
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, (MemoryError, ConfigError, StorageUnavailable, *passed)):
            raise
        if is_full(error):
            raise
        what, where = str(error), f"{source.join(entry.name)}{part and f': {part}'}"
        if not isinstance(error, DataError):
            frame = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{in_one_line(error)} ({os.path.basename(frame.filename)}:{frame.lineno})"
        raise DataError(f"data: {where} cannot be read: {what}") from error


@dataclass
class ShardCache:
    """The files of shards, for this process and its copies in others."""

    source: Source
    read: Read | None
    columns: Sequence[str] | None
    directory: str
    limit: int  # bytes
    num_ignored: int = 0  # samples that could not be read
    _open: OrderedDict[str, Shard] = field(default_factory=OrderedDict)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_open": OrderedDict()}

    def has_copies(self, entry: Entry) -> bool:
        """Return whether shards such as this one are copied before they are read."""
        return self._place(entry)[2]

    def ensure(self, entries: Iterable[Entry]) -> None:
        """Make the files of shards, several at once, and keep them longer than others."""
        with contextlib.ExitStack() as stack:
            missing = [entry for entry in entries if not self._touch(entry)]
            if missing:
                threads = stack.enter_context(ThreadPoolExecutor(CONCURRENT_READS))
                list(threads.map(self._file, missing))

    def open_file(self, entry: Entry) -> Shard:
        """Return the samples of a shard.

        Raises:
            DataError: it cannot be read, or is not the one of the index.
        """
        shard = self._open.get(entry.name)
        if shard is None or not os.path.exists(shard.path):  # it has left the cache
            path, kind = self._file(entry), self._place(entry)[1]
            shard = open_shard(self.source, entry, kind, self.columns, path)
            self._open[entry.name] = shard
            if len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)
        self._open.move_to_end(entry.name)
        return shard

    def _place(self, entry: Entry) -> tuple[str, Format, bool]:
        columns = self.columns and tuple(self.columns)
        return _find_place(self.source, entry, self.read, columns, self.directory)

    def _touch(self, entry: Entry) -> bool:
        """Return whether the file of a shard is there, and keep it longer than others."""
        path, _, is_copy = self._place(entry)
        with contextlib.suppress(FileNotFoundError):
            if is_copy:
                os.utime(path)
            return True
        return False

    def _file(self, entry: Entry) -> str:
        """Return the path of a shard's file, which is made if it is not there."""
        path, kind, is_copy = self._place(entry)
        if not is_copy:
            with reading(self.source, entry):
                check_size(path, entry)
            return path
        with _lock(self._lock_of(path)):
            if not self._touch(entry):
                with _room_for_reads(os.getpid()):
                    self._make_room(max(0, entry.size))
                    make_file(self.source, entry, kind, self.columns, f"{path}.part")
                    self._make_room(0)
                    os.replace(f"{path}.part", path)
        return path

    def _lock_of(self, path: str) -> str:
        return f"{self.directory}/{int(os.path.basename(path)[:8], 16) % NUM_LOCKS}.lock"

    def _make_room(self, needed: int) -> None:
        """Remove the files that were not used for longest, until `needed` bytes fit."""
        with _lock(f"{self.directory}/room.lock"), os.scandir(self.directory) as files:
            found = []
            for file in filter(lambda each: FILE.fullmatch(each.name), files):
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat()
                    found.append((status.st_mtime_ns, status.st_size, file.path))
            total = sum(size for _, size, _ in found)
            for _, size, path in sorted(found):
                free = shutil.disk_usage(self.directory).free
                if total + needed <= self.limit and needed <= free:
                    return
                is_left = path.endswith(UNFINISHED)  # by a process that was killed, if not locked
                with contextlib.suppress(FileNotFoundError, BlockingIOError):
                    with _lock(self._lock_of(path), False) if is_left else contextlib.nullcontext():
                        os.unlink(path)
                    total -= size
            if total + needed > self.limit:
                raise ConfigError(
                    f"cache_gib: expected at least {(total + needed) / 2**30:.3g} for the shards "
                    f"that are fetched at once, got {self.limit / 2**30:.3g}"
                )


@functools.lru_cache(maxsize=4 * MAX_OPEN)
def _find_place(
    source: Source, entry: Entry, read: Read | None, columns: tuple[str, ...] | None, directory: str
) -> tuple[str, Format, bool]:
    """Return the path of a shard's file, which may be missing, its format, and whether it is a
    copy.
    """
    kind, local = find_format(entry.name, read), source.local_path(entry.name)
    if kind is None:
        raise DataError(
            f"data: {source.join(entry.name)}: expected .tar, .parquet, .mds or .jsonl, or a "
            "`reader`"
        )
    if local and not kind.unpack:
        return local, kind, False
    # a local file has no version in the index
    version = str(os.stat(local).st_mtime_ns) if os.path.exists(local) else entry.version
    facts = [source.join(entry.name), entry.size, version]
    if kind.unpack:
        facts += [columns, read and _source_of(read)]
    return f"{directory}/{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}", kind, True


@functools.lru_cache(maxsize=1)
def _room_for_reads(process: int) -> threading.Semaphore:
    """Return what lets so many files be made at once, anew in a process that was forked."""
    return threading.Semaphore(CONCURRENT_READS)


def _source_of(read: Read) -> str:
    """Return the code that a reader is defined with, because files are kept that it has made."""
    try:
        return inspect.getsource(inspect.getmodule(read) or type(read))
    except (OSError, TypeError):  # of a notebook, or compiled
        return repr(getattr(read, "__code__", read))


def make_directory(directory: str) -> None:
    """Make a directory for this user alone: what is read there was written by these processes."""
    os.makedirs(directory, mode=0o700, exist_ok=True)
    status = os.stat(directory)
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"cache_dir: expected a directory of this user's alone, got {directory}")


@contextlib.contextmanager
def _lock(path: str, waits: bool = True) -> Iterator[None]:
    """Exclusive file lock. Without `waits` raises BlockingIOError if there is another holder."""
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        yield
