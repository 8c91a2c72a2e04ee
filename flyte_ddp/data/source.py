"""The place of shards, below a prefix or at a list of URLs. Lists and fetches files with retries.

Credentials come from the environment (`flyte_ddp.storage`). No index and no pickle contains them.
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

CONCURRENT_READS = 8  # reads of a process at once
# seconds to wait for a store of samples; less than the default stall_timeout
READ_TIMEOUT = 240.0
# Keys in file systems' `info`: versions that follow from a file's contents, and times of change.
VERSIONS = ("ETag", "etag", "Content-MD5", "Digest")
TIMES = ("Last-Modified", "LastModified", "last_modified", "modified", "modify", "mtime")


@dataclass(frozen=True)
class Entry:
    """A shard as the index describes it."""

    name: str
    samples: int  # -1 if they have to be counted
    size: int  # bytes; -1 if unknown
    # the store's version; "" if unknown. A file on this machine has its `Source.stamp` from the
    # time when the index was read. The index itself has "" then, because it may travel.
    version: str


@dataclass(frozen=True)
class Source:
    """The place of shards. A name is relative to the prefix, or a URL in the list.

    Each process has its own clients, because a client's connections and threads survive neither a
    fork nor a pickle.
    """

    place: str | tuple[str, ...]
    timeout: float  # seconds to wait for a store

    def find(self) -> dict[str, dict[str, Any]]:
        """Return the file system's `info` of each file, by name. Raises as `Storage.find` does, and
        DataError for a URL without a file.
        """
        if isinstance(self.place, str):
            return self._storage("")[0].find()
        found = self.look(self.place)
        for name, info in found.items():
            if not info:
                raise DataError(f"data: {self.join(name)}: expected a shard, got no file")
        return found

    def info(self, name: str) -> dict[str, Any]:
        """Return the file system's `info` of a file. Raises FileNotFoundError if it is missing."""
        storage, path = self._storage(name)

        def look() -> dict[str, Any]:
            storage.file_system.invalidate_cache()
            return dict(storage.file_system.info(path))

        return storage.retry(look)

    def look(self, names: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the file system's `info` of each file. It is empty if the file is missing."""

        def look(name: str) -> dict[str, Any]:
            with contextlib.suppress(FileNotFoundError):
                return self.info(name)
            return {}

        with ThreadPoolExecutor(CONCURRENT_READS) as threads:
            return dict(zip(names, threads.map(look, names), strict=True))

    def stamp(self, name: str) -> str:
        """Return the times of change and the inode of a file on this machine; "" for a missing
        file.

        A stamp is valid in one attempt only: inputs are downloaded anew for each attempt, and each
        node has its own copy.
        """
        try:
            status = os.stat(self.local_path(name))
        except OSError:
            return ""
        return f"{status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"

    def version(self, name: str, info: Mapping[str, Any]) -> str:
        """Return the version of a file in a store from its `info`; "" for a file on a disk."""
        if self.local_path(name):
            return ""
        return version_of(info)

    def local_path(self, name: str) -> str:
        """Return the path of a file on this machine; "" for a file in a store."""
        storage, path = self._storage(name)
        if not storage.is_local:
            return ""
        return path

    def fetch(self, name: str, file: str) -> None:
        """Copy a file to the local path `file`. Raises FileNotFoundError if it is missing."""
        storage, path = self._storage(name)
        storage.retry(lambda: storage.file_system.get_file(path, file))

    def has_ranges(self, name: str) -> bool:
        """Return whether parts of a file can be fetched. Some HTTP servers send all of it."""
        return not self._storage(name)[0].url.startswith("http")

    def read_parts(self, name: str, read: Callable[[Any], T]) -> T:
        """Return the result of `read`, which is called with the open file.

        After an error of the store, `read` is called again. Its own errors are raised as they are.
        """
        storage, path = self._storage(name)

        def read_open() -> T | Exception:
            storage.file_system.invalidate_cache()
            # Without fsspec's cache only the requested bytes are fetched.
            with storage.file_system.open(path, "rb", cache_type="none") as file:
                watched = _WatchedFile(file)
                try:
                    return read(watched)
                except Exception as error:
                    # Another try cannot change an error of the contents or of this disk.
                    if watched.error is None:
                        return error
                    raise watched.error from None

        found = storage.retry(read_open)
        if isinstance(found, Exception):
            raise found
        return found

    def join(self, name: str) -> str:
        """Return the URL of a file without secrets, for error messages."""
        if isinstance(self.place, tuple):
            return redact_url(name)
        return redact_url(f"{self.place}/{name}")

    def _storage(self, name: str) -> tuple[Storage, str]:
        """Return the storage of a file and the file's path there."""
        if isinstance(self.place, str):
            place, relative = self.place, name
        else:
            place, _, relative = name.rpartition("/")
        storage = _open(os.getpid(), place, self.timeout)
        if not relative:
            return storage, f"{storage.root}/"
        return storage, storage.path_of(relative)


@dataclass
class _WatchedFile:
    """An open file, and the store's last error when it was read."""

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
    """Return the version in a file's `info`. A store changes it with the file's contents.

    Without a version, return the time of change in seconds, or "" if that is missing too.
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
