"""A directory of files at any path or fsspec URL: whole writes, retries with back-off, one log line
per outage.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import random
import re
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from flyte_ddp.errors import ConfigError, FileChanged, StorageDenied, StorageUnavailable
from flyte_ddp.storage.failures import (
    Meaning,
    answer,
    classify,
    describe,
    is_full,
    is_unexplained,
    remedy_for,
)
from flyte_ddp.storage.file_lock import lock_file
from flyte_ddp.storage.filesystem import CLIENTS, check_url, open_filesystem
from flyte_ddp.storage.redaction import redact_url
from flyte_ddp.storage.uncached_file import UncachedFile

T = TypeVar("T")

UPLOAD_PART = 8 << 20  # bytes per request
FIRST_PAUSE, MAX_PAUSE = 0.5, 15.0  # seconds between two tries
STORE_TIMEOUT = 600.0  # seconds that an operation keeps trying while the store is away
# seconds to wait if no training is lost: before a run, after its model is safe, in a command
SHORT_TIMEOUT = 60.0
# name of a local write's temporary file; a killed process leaves such a file
UNFINISHED = re.compile(r"\.[0-9a-f]{32}\.tmp$")

logger = logging.getLogger(__name__)
_jitter = random.SystemRandom()  # separate, because the shared generator belongs to the training
# store -> time when it went away, and whether it is a full disk. A process logs an outage once.
_outages: dict[str, tuple[float, bool]] = {}
_reached: set[str] = set()  # stores that have answered this process


class Storage:
    """The files directly below `url`, such as a run's checkpoints.

    Names are relative to `url`, and contents are bytes.

    Every operation waits with back-off while the store cannot be reached. One line is logged when a
    store goes away, and another when it is back.

    Args:
        field: the users' name for this place, for error messages.
        timeout: seconds that an operation waits for the store; 0 for a single try.
        options: options of `open_filesystem`.

    Raises:
        ConfigError: the kind of URL is unknown.

    Each operation raises:
        StorageDenied: credentials are missing, wrong or not sufficient, or there is no such bucket.
        StorageUnavailable: the store could not be reached for `timeout` seconds.
    """

    def __init__(
        self, url: str, field: str = "checkpoints", timeout: float = STORE_TIMEOUT, **options: Any
    ) -> None:
        check_url(url, field)
        self.url = url
        if "?" not in url:
            self.url = url.rstrip("/") or "/"
        self.field = field
        self.timeout = timeout
        self.stop = threading.Event()  # set it to end each wait with StorageUnavailable
        self.file_system, self.root = open_filesystem(self.url, field, **options)
        protocol = self.file_system.protocol
        if not isinstance(protocol, str):
            protocol = protocol[0]
        self._kind = str(protocol)
        self.is_local = self._kind == "file"
        self._upload_options: dict[str, int] = {}
        if self._kind in ("s3", "gs"):
            self._upload_options["chunksize"] = UPLOAD_PART
        if self.is_local:
            # The path is absolute, so it has one meaning in any working directory.
            self.url = self.root

    def join(self, name: str) -> str:
        """Return the full URL of `name`."""
        return f"{self.url}/{name}"

    def path_of(self, name: str) -> str:
        """Return the path of `name` in the file system. Raises as `check_name` does."""
        return f"{self.root}/{check_name(name, self.field)}"

    def check_access(self) -> None:
        """Write, read and delete a small file, before anything that needs this place starts.

        Raises:
            StorageDenied: this process lacks a permission. The message is one line with a remedy.
            StorageUnavailable: the store could not be reached for `SHORT_TIMEOUT` seconds.
        """
        probe = Storage(self.url, self.field, min(self.timeout, SHORT_TIMEOUT))
        name = f".probe-{uuid.uuid4().hex}"
        try:
            probe.write(name, b"written to see that it can be")
        # The directory cannot be created, below /proc for example.
        except FileNotFoundError as error:
            raise probe._make_denial(error) from None
        probe.read(name)
        probe.delete(name)

    def write(self, name: str, contents: bytes | Path | Callable[[BinaryIO], object]) -> None:
        """Put `contents` at `name`, replacing what was there. No reader ever sees a part of it.

        Args:
            contents: bytes, or the path of a local file. At a local place also a function that
                writes the contents to a file, so that they are never in memory as a whole, nor in
                the kernel's cache afterwards.
        """
        self.retry(lambda: self._write(self.path_of(name), contents), takes_space=True)

    def replace(self, name: str, contents: bytes, replaced: bytes) -> None:
        """Put `contents` at `name` if the file still contains `replaced`; b"" stands for no file.

        A local disk uses a lock. The stores of S3, Google and Azure use a conditional put. On any
        other store, some milliseconds pass between the read and the put. If two processes write in
        this time, the last one wins.

        Raises:
            FileChanged: another process has replaced the file.
        """
        client = CLIENTS.get(self._kind)
        lock: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self.is_local:
            os.makedirs(self.root, exist_ok=True)
            lock = lock_file(os.path.join(self.root, ".lock"))
        with lock:
            # The tag is read before the contents: a change in between makes the put fail.
            tag = ""
            if client:
                tag = self.retry(lambda: self._tag(name, client.tag))
            if self.read_if_there(name) != replaced:
                raise FileChanged(f"{self.join(name)} was replaced meanwhile")
            if not client:
                return self.write(name, contents)
        try:
            self.retry(lambda: client.put(self.file_system, self.path_of(name), contents, tag))
        except Exception as error:  # some clients' errors are not OSErrors
            status, code = answer(error)
            # The store speaks S3, but knows no conditional put.
            if status == 501 or code == "NotImplemented":
                self.write(name, contents)
            elif not (
                isinstance(error, (FileNotFoundError, FileExistsError))
                or status in (404, 409, 412)
                or code in ("PreconditionFailed", "ConditionalRequestConflict")
            ):
                raise
            # Equal contents mean that this put was repeated after its first answer was lost.
            elif self.read(name) != contents:
                raise FileChanged(f"{self.join(name)} was replaced meanwhile") from error

    def _tag(self, name: str, field: str) -> str:
        self.file_system.invalidate_cache()
        try:
            return str(self.file_system.info(self.path_of(name)).get(field, ""))
        except FileNotFoundError:
            return ""

    @property
    def stored_bytes(self) -> int:
        """Bytes that the store has received in the present try of an upload; 0 if unknown."""
        return int(getattr(self.file_system, "stored_bytes", 0))

    def _write(self, path: str, contents: bytes | Path | Callable[[BinaryIO], object]) -> None:
        if not self.is_local:
            # An object store shows only complete objects.
            self.file_system.stored_bytes = 0
            try:
                if isinstance(contents, Path):
                    self.file_system.put_file(str(contents), path, **self._upload_options)
                else:
                    self.file_system.pipe_file(path, contents, **self._upload_options)
            finally:
                self.file_system.stored_bytes = 0
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{path}.{uuid.uuid4().hex}.tmp"
        try:
            if isinstance(contents, Path):
                shutil.copyfile(contents, temporary)
            elif callable(contents):
                with UncachedFile(temporary) as file:
                    contents(cast(BinaryIO, file))
            else:
                with open(temporary, "wb") as file:
                    file.write(contents)
                    file.flush()
                    os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise

    def read(self, name: str) -> bytes:
        """Return the contents of `name`. Raises FileNotFoundError if there is no such file."""
        return bytes(self.retry(lambda: self.file_system.cat_file(self.path_of(name))))

    def read_if_there(self, name: str) -> bytes:
        """Return the contents of `name`; b"" if there is no such file."""
        with contextlib.suppress(FileNotFoundError):
            return self.read(name)
        return b""

    def delete(self, name: str) -> None:
        """Remove `name`, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.retry(lambda: self.file_system.rm_file(self.path_of(name)))

    def rename(self, name: str, new_name: str) -> None:
        """Rename `name` to `new_name`, replacing any file there. Raises FileNotFoundError if there
        is no `name`.
        """
        path, new_path = self.path_of(name), self.path_of(new_name)
        if self.is_local:
            self.retry(lambda: os.replace(path, new_path))
            return
        # Some stores answer a request to copy before the copy is complete.
        self.write(new_name, self.read(name))
        self.delete(name)

    def names(self) -> list[str]:
        """Return the names of the files directly below, unsorted. Return no names if the directory
        does not exist.
        """

        def list_names() -> list[str]:
            self.file_system.invalidate_cache()
            return [
                entry.rsplit("/", 1)[-1] for entry in self.file_system.ls(self.root, detail=False)
            ]

        try:
            return self.retry(list_names)
        except FileNotFoundError:
            return []

    def find(self) -> dict[str, dict[str, Any]]:
        """Return the file system's `info` of each file below, by its name relative to `url`. Return
        an empty dict if the directory does not exist.

        Links to files and directories are followed, but not in a circle. A link that leads nowhere
        has the type "other".
        """
        root = self.root.rstrip("/")

        def list_files() -> Any:
            if self.is_local:
                return _walk(root)
            return self.file_system.find(root, detail=True)

        try:
            found: dict[str, dict[str, Any]] = self.retry(list_files)
        except FileNotFoundError:
            return {}
        return {
            path[len(root) :].lstrip("/"): info
            for path, info in found.items()
            if not path.endswith("/")
        }

    def read_heads(self, names: Sequence[str], size: int) -> list[bytes]:
        """Return the first `size` bytes of each file, or b"" if the file cannot be read. Many
        requests run at once.
        """

        def read(path: str) -> bytes:
            try:
                return bytes(self.retry(lambda: self.file_system.cat_file(path, start=0, end=size)))
            except (FileNotFoundError, StorageDenied):
                return b""

        paths = [self.path_of(name) for name in names]
        count = len(paths)
        found = self.file_system.cat_ranges(paths, [0] * count, [size] * count, on_error="return")
        heads = []
        for path, head in zip(paths, found, strict=True):
            if isinstance(head, Exception):
                head = read(path)
            heads.append(head)
        return heads

    def retry(self, action: Callable[[], T], takes_space: bool = False) -> T:
        """Return the result of `action`, which uses `file_system`. Repeat it while the store cannot
        be reached.

        The error of a conditional request (HTTP 409, 412 and 501) is raised as it is.

        Args:
            takes_space: True if `action` writes, so that its success shows that the disk has space.
        """
        deadline = time.monotonic() + self.timeout
        pause = FIRST_PAUSE
        while True:
            try:
                result = action()
            except Exception as error:  # every file system has its own errors
                self._raise_if_final(error)
                _note_outage(self._store, error)
                left = deadline - time.monotonic()
                # The pause is partly random, so that ranks which failed together retry at
                # different times.
                if left <= 0 or self.stop.wait(min(left, pause * _jitter.uniform(0.5, 1.0))):
                    what = f"could not be reached for {self.timeout:g} s"
                    if is_full(error):
                        what = "is full"
                    raise StorageUnavailable(
                        f"{self.field}: {redact_url(self.url)} {what}: {describe(error)}",
                        is_full(error),
                    ) from None
                pause = min(2 * pause, MAX_PAUSE)
            else:
                _note_answer(self._store, takes_space)
                return result

    @property
    def _store(self) -> str:
        """The part of the URL that comes and goes as a whole."""
        if self.is_local:
            return self.url
        scheme, _, rest = self.url.rpartition("::")[2].partition("://")
        return redact_url(f"{scheme}://{rest.partition('/')[0]}")

    def _raise_if_final(self, error: Exception) -> None:
        """Raise the meaning of `error`, if another try cannot change it."""
        meaning = classify(error, has_answered=self._store in _reached)
        if meaning is Meaning.FINAL:
            raise error
        if meaning is Meaning.MISSING:
            raise FileNotFoundError(errno.ENOENT, describe(error))
        if meaning is Meaning.DENIED:
            raise self._make_denial(error) from None
        if is_unexplained(error):
            self._ask_for_reason()

    def _ask_for_reason(self) -> None:
        """Raise the meaning of a refusal that came without its reason, if that is the user's
        mistake.
        """
        try:
            self.file_system.invalidate_cache()
            self.file_system.ls(self.root)
        except Exception as error:
            if classify(error, has_answered=True) is Meaning.DENIED:
                raise self._make_denial(error) from None

    def _make_denial(self, error: Exception) -> StorageDenied:
        return StorageDenied(
            f"{self.field}: expected a place that this process may use, got "
            f"{redact_url(self.url)}: {describe(error)}; {remedy_for(error, self.is_local)}"
        )


def check_name(name: object, field: str) -> str:
    """Return `name` if it is the name of a file below a directory.

    The name may come from a file that somebody else wrote, so it must not lead to another place.

    Raises:
        ConfigError: the name is absolute, leads upwards, or is no text. The message begins with
            `field`.
    """
    is_text = isinstance(name, str) and name != "" and "\0" not in name
    if not is_text or str(name).startswith("/") or ".." in str(name).split("/"):
        raise ConfigError(f"{field}: expected the name of a file below a directory, got {name!r}")
    return str(name)


def file_below(directory: Path, name: object, field: str) -> Path:
    """Return the path of file `name` below a local directory.

    Raises:
        ConfigError: `check_name` refuses the name, or a link leads out of the directory.
    """
    file = directory / check_name(name, field)
    if not file.parent.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(f"{field}: expected a file below {directory}, got a link in {name!r}")
    return file


def read_file(url: str, field: str = "url", timeout: float = STORE_TIMEOUT) -> bytes:
    """Return the contents of the one file at `url`. Raises as `Storage.read` does."""
    place = Storage(url, field, timeout)
    return bytes(place.retry(lambda: place.file_system.cat_file(place.root)))


def compute_sha256(url: str, field: str = "url") -> str:
    """Return the SHA-256 of the file at `url` without holding it in memory. Raises as
    `Storage.read` does.
    """
    place = Storage(url, field)

    def compute() -> str:
        digest = hashlib.sha256()
        with place.file_system.open(place.root, "rb") as file:
            while block := file.read(UPLOAD_PART):
                digest.update(block)
        return digest.hexdigest()

    return place.retry(compute)


def write_file(
    url: str, contents: bytes | Path, field: str = "url", timeout: float = STORE_TIMEOUT
) -> None:
    """Put `contents` at `url`, whole or not at all. `Storage.write` describes the arguments and the
    errors.
    """
    place = Storage(url, field, timeout)
    place.retry(lambda: place._write(place.root, contents))


def fetch_file(
    url: str, file: str | os.PathLike[str], field: str = "url", timeout: float = STORE_TIMEOUT
) -> None:
    """Copy the file at `url` to the local path `file` without holding it in memory. Raises as
    `Storage.read` does.
    """
    place = Storage(url, field, timeout)
    part = Path(file).with_name(f"{Path(file).name}.{uuid.uuid4().hex}.part")
    try:
        place.retry(lambda: place.file_system.get_file(place.root, str(part)))
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def _walk(directory: str, above: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Return the files below `directory` by their paths.

    Args:
        above: the real paths of the directories above.
    """
    found: dict[str, dict[str, Any]] = {}
    if not above and os.path.isfile(directory):
        return {directory: {"type": "file", "size": os.path.getsize(directory)}}
    real = os.path.realpath(directory)
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except OSError:  # a link to a missing file, or to itself
                found[entry.path] = {"type": "other"}
                continue
            if not stat.S_ISDIR(status.st_mode):
                kind = "other"
                if stat.S_ISREG(status.st_mode):
                    kind = "file"
                found[entry.path] = {"type": kind, "size": status.st_size, "mtime": status.st_mtime}
            elif os.path.realpath(entry.path) not in (*above, real):
                found.update(_walk(entry.path, (*above, real)))
    return found


def _note_outage(store: str, error: BaseException) -> None:
    if store in _outages:
        return
    _outages[store] = time.monotonic(), is_full(error)
    if is_full(error):
        logger.warning(
            "the disk of %s is full: %s; waiting for space there", store, describe(error)
        )
    else:
        logger.warning("%s cannot be reached: %s; waiting for it", store, describe(error))


def _note_answer(store: str, takes_space: bool) -> None:
    _reached.add(store)
    since, was_full = _outages.get(store, (0.0, False))
    # Reading works on a full disk too, so only a write shows that it has space again.
    if since and (takes_space or not was_full):
        _outages.pop(store, None)
        what = "answers again"
        if was_full:
            what = "has space again"
        logger.warning("%s %s after %.0f s", store, what, time.monotonic() - since)
