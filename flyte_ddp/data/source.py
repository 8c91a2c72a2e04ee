"""The place of shards: below a prefix, or at a list of URLs. Listed, and fetched with retries.

Credentials come from the environment (`flyte_ddp.storage`), and are in no index and no pickle.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from flyte_ddp.errors import DataError
from flyte_ddp.storage import Storage, redact_url

T = TypeVar("T")

CONCURRENT_READS = 8  # of a process
# seconds that a store of samples is waited for; below the default stall_timeout
READ_TIMEOUT = 240.0
# Keys of what file systems report: what follows from a file's contents, and times of its change.
VERSIONS = ("ETag", "etag", "Content-MD5", "Digest")
TIMES = ("Last-Modified", "LastModified", "last_modified", "modified", "modify", "mtime")


@dataclass(frozen=True)
class Entry:
    """A shard as the index has it."""

    name: str
    samples: int  # -1 where they are to be counted
    size: int  # bytes; -1 where not known
    # In a store; "" where it is not known. Of a file on this machine its `Source.stamp` when the
    # index was read; the index itself has "", because it may travel.
    version: str


@dataclass(frozen=True)
class Source:
    """The place of shards. A name is relative to the prefix, or a URL of the list.

    Each process has clients of its own, because a client's connections and threads survive neither
    a fork nor a pickle.
    """

    place: str | tuple[str, ...]
    timeout: float  # seconds that a store is waited for

    def find(self) -> dict[str, dict[str, Any]]:
        """Return the file system's `info` of each file, by its name. Raises as `Storage.find`, and
        DataError for a URL without a file.
        """
        if isinstance(self.place, str):
            return self._storage("")[0].find()

        def look(name: str) -> dict[str, Any]:
            try:
                return self.info(name)
            except FileNotFoundError:
                raise DataError(f"data: {self.join(name)}: expected a shard, got no file") from None

        with ThreadPoolExecutor(CONCURRENT_READS) as threads:
            return dict(zip(self.place, threads.map(look, self.place), strict=True))

    def info(self, name: str) -> dict[str, Any]:
        """Return the file system's `info` of a file. Raises FileNotFoundError if there is none."""
        storage, path = self._storage(name)

        def look() -> dict[str, Any]:
            storage.file_system.invalidate_cache()
            return dict(storage.file_system.info(path))

        return storage.retry(look)

    def look(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the file system's `info` of each of these files; nothing for one that is not
        there.
        """

        def look(name: str) -> dict[str, Any]:
            with contextlib.suppress(FileNotFoundError):
                return self.info(name)
            return {}

        with ThreadPoolExecutor(CONCURRENT_READS) as threads:
            return dict(zip(names, threads.map(look, names), strict=True))

    def stamp(self, name: str) -> str:
        """Return the times of change of a file on this machine, and its inode; "" for one in a
        store, or none.

        It counts in one attempt alone: inputs are downloaded anew for each, and each node has its
        own copy.
        """
        path = self.local_path(name)
        try:
            status = os.stat(path) if path else None
        except OSError:
            return ""
        return f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}" if status else ""

    def version(self, name: str, info: Mapping[str, Any]) -> str:
        """Return the version of a file in a store from its `info`; "" of one on a disk."""
        return "" if self.is_local(name) else version_of(info)

    def is_local(self, name: str) -> bool:
        return self._storage(name)[0].is_local

    def local_path(self, name: str) -> str:
        """Return where a file lies on this machine; "" if it is in a store."""
        storage, path = self._storage(name)
        return path if storage.is_local else ""

    def fetch(self, name: str, file: str) -> None:
        """Copy a file to the local path `file`. Raises FileNotFoundError if there is none."""
        storage, path = self._storage(name)
        storage.retry(lambda: storage.file_system.get_file(path, file))

    def has_ranges(self, name: str) -> bool:
        """Return whether parts of a file can be fetched. Not each HTTP server answers with them."""
        return not self._storage(name)[0].url.startswith("http")

    def read_parts(self, name: str, read: Callable[[Any], T]) -> T:
        """Return the result of `read`, which is called with the open file. The errors of this file
        are waited for, and those of `read` itself are raised as they are.
        """
        storage, path = self._storage(name)

        def read_open() -> T | Exception:
            storage.file_system.invalidate_cache()
            # without a cache: what is asked for is fetched, and no more
            with storage.file_system.open(path, "rb", cache_type="none") as file:
                watched = _WatchedFile(file)
                try:
                    return read(watched)
                except Exception as error:
                    if watched.error is None:
                        return error  # of the contents or of this disk, which no other try changes
                    raise watched.error from None

        found = storage.retry(read_open)
        if isinstance(found, Exception):
            raise found
        return found

    def join(self, name: str) -> str:
        """Return the URL of a file, as an error shows it."""
        return redact_url(name if isinstance(self.place, tuple) else f"{self.place}/{name}")

    def _storage(self, name: str) -> tuple[Storage, str]:
        """Return the storage of a file and its path there."""
        place = self.place if isinstance(self.place, str) else name.rpartition("/")[0]
        storage = _open(os.getpid(), place, self.timeout)
        relative = name if isinstance(self.place, str) else name.rpartition("/")[2]
        return storage, storage.path_of(relative) if relative else f"{storage.root}/"


@dataclass
class _WatchedFile:
    """An open file, and the last error of the store in it."""

    file: Any
    error: Exception | None = None

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self.file.read(size))
        except Exception as error:
            self.error = error
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def version_of(info: Mapping[str, Any]) -> str:
    """Return what a store changes with a file's contents, from its `info`, or else the time of its
    change in seconds; "" where it has neither.
    """
    for name in VERSIONS:
        if info.get(name):
            return str(info[name])
    for name in TIMES:
        value = info.get(name)
        if isinstance(value, datetime.datetime):
            value = int(value.timestamp())
        elif isinstance(value, float):
            value = int(value)
        if value:
            return str(value)
    return ""


@functools.lru_cache(maxsize=64)
def _open(process: int, url: str, timeout: float) -> Storage:
    return Storage(url, "data", timeout, skip_instance_cache=True)
