"""Image files at any fsspec URL: list them, fetch them with patience, keep them on disk, decode them.

Knows neither classes nor models, and imports no torch. Credentials come from the environment, where fsspec's file
systems look for them (AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...), and never pass through here.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import random
import time
import urllib.parse
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from flyte_ddp.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

FIRST_WAIT, LONGEST_WAIT = 0.2, 20.0  # seconds before the second try at a file, and at most before a later one
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)

logger = logging.getLogger(__name__)
_jitter = random.SystemRandom()  # of its own: the shared generator draws a sample's augmentation


class UnreadableImage(DataError):
    """An image is missing, forbidden, cut short or no image: another try would end the same way."""


class StoreUnreachable(OSError):
    """The store did not answer, or only with errors that pass, until patience ended."""


@dataclass(frozen=True)
class Access:
    """How a store is spoken to. The same in every process, so without secrets."""

    endpoint_url: str = ""  # of a store that speaks S3's or Google's protocol; "" for theirs
    anonymous: bool = False  # for public buckets, without credentials
    timeout: float = 30.0  # seconds for one try at one file, > 0
    num_tries: int = 5  # at one file, >= 1


@dataclass(frozen=True)
class File:
    """What a listing tells of one file."""

    name: str  # relative to what was listed
    size: int  # bytes; -1 where the store does not tell
    version: str  # ETag or time of the last change; "" where the store has neither


def list_files(url: str, access: Access) -> tuple[str, list[File]]:
    """All files below the directory `url`, sorted by name. An object store is asked page by page.

    Returns:
        (the URL in full, files)

    Raises:
        DataError: it cannot be listed or holds nothing.
    """
    refuse_credentials("data", url)
    try:
        # S3's own client repeats a page that fails, for which a listing need not begin again.
        file_system, root = _open(url, access, access.num_tries)
        root = root.rstrip("/")
        found = file_system.find(root, detail=True)
    except DataError:
        raise
    except Exception as error:  # every file system has errors of its own
        raise DataError(
            f"data: {url} cannot be listed: {type(error).__name__}: {error}; accepted is a directory or a prefix that "
            "may be listed with the credentials in this process's environment, or without any (anonymous)"
        ) from error
    files = [_file(path[len(root) :].lstrip("/"), info) for path, info in found.items() if not path.endswith("/")]
    if not files or [file.name for file in files] == [""]:
        raise DataError(f"data: {url} holds no files; accepted is a directory or a prefix with a folder for each class")
    return file_system.unstrip_protocol(root), sorted(files, key=lambda file: file.name)


def refuse_credentials(field: str, url: str) -> None:
    """Raise DataError where `url` holds a password, which would end in logs and reports. It is not repeated."""
    if "@" in urllib.parse.urlsplit(url).netloc:
        raise DataError(f"{field}: the URL holds a user name or a password; give them in the environment instead")


@dataclass(frozen=True)
class _Client:
    """What a process has opened for itself."""

    process: int
    file_system: Any
    root: str
    threads: ThreadPoolExecutor


class FileReader:
    """Reads files below `url`, each process through one client of its own.

    A client has connections and threads, which do not survive a fork, so it is opened at the first read, and a copy
    that another process gets of this object leaves it behind.

    Args:
        concurrency: files on their way at once.
        cache: a local directory for what was read, shared by all processes of a node; "" for none.
    """

    def __init__(self, url: str, access: Access, concurrency: int = 1, cache: str = "") -> None:
        self.url = url
        self.access = access
        self.concurrency = concurrency
        self.cache = Path(cache).expanduser() if cache else None
        self._client: _Client | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def read_all(self, files: Sequence[File]) -> list[bytes | UnreadableImage]:
        """The contents of each of `files`, several of which are on their way at once, or why it has none.

        Raises:
            StoreUnreachable: as `read`.
        """

        def read(file: File) -> bytes | UnreadableImage:
            try:
                return self.read(file)
            except UnreadableImage as error:
                return error

        return list(self._opened().threads.map(read, files))

    def read(self, file: File) -> bytes:
        """The contents of `file`.

        Raises:
            UnreadableImage: it is missing or forbidden, or its length is never the listed one.
            StoreUnreachable: time-outs, throttling or other errors outlasted all tries.
        """
        if self.cache is None:
            return self._fetch(file)
        # The version is in the name: a file that has changed since is another file.
        key = f"{self.access.endpoint_url}\n{self.url}\n{file.name}\n{file.size}\n{file.version}"
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        kept = self.cache / digest[:2] / digest
        try:
            contents = kept.read_bytes()
            if file.size in (-1, len(contents)):
                return contents
        except OSError:  # not there, or nothing to be had from this cache
            pass
        contents = self._fetch(file)
        self._keep(kept, contents)
        return contents

    def _keep(self, kept: Path, contents: bytes) -> None:
        """Put `contents` in the cache whole. fsspec's caches write under the final name, where others see a part."""
        temporary = kept.with_name(f"{kept.name}.{uuid.uuid4().hex}.tmp")
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(contents)
            os.replace(temporary, kept)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            logger.warning("cache: %s cannot be written: %s; going on without it", self.cache, error)
            self.cache = None

    def _fetch(self, file: File) -> bytes:
        client = self._opened()
        limits = {"timeout": self.access.timeout} if isinstance(client.file_system, AsyncFileSystem) else {}
        reason, is_cut = "", False
        for number in range(self.access.num_tries):
            if number:
                # A share of it by chance, so that processes which failed together do not come back together.
                time.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2 ** (number - 1)) * _jitter.uniform(0.5, 1.0))
            try:
                contents: bytes = client.file_system.cat_file(f"{client.root}/{file.name}", **limits)
            except PERMANENT as error:
                raise UnreadableImage(f"data: {self.join(file)} cannot be read: {_words(error)}") from error
            except Exception as error:  # every file system has errors of its own
                reason, is_cut = _words(error), False
                continue
            if file.size in (-1, len(contents)):
                return contents
            reason, is_cut = f"it has {len(contents)} bytes, {file.size} were listed", True
        if is_cut:
            raise UnreadableImage(f"data: {self.join(file)} cannot be read: {reason}")
        raise StoreUnreachable(
            f"data: {self.join(file)} could not be read in {self.access.num_tries} tries; the last one: {reason}"
        )

    def _opened(self) -> _Client:
        if self._client is None or self._client.process != os.getpid():
            threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="read-images")
            self._client = _Client(os.getpid(), *_open(self.url, self.access, num_tries=1), threads)
        return self._client

    def join(self, file: File) -> str:
        """The full URL of `file`."""
        return f"{self.url}/{file.name}"


def decoded(contents: bytes) -> Image:
    """The image as RGB, upright.

    Transparent parts lie on white; 16 bits are scaled to 8.

    Raises:
        Exception: of any kind; a damaged file can fail anywhere in the reading.
    """
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(contents))
    except UnidentifiedImageError:
        raise ValueError("its format is not known") from None
    image: Image.Image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):  # of 16 bits, of which convert() would cut off all above 255
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        image = opaque
    return image.convert("RGB")


def _open(url: str, access: Access, num_tries: int) -> tuple[Any, str]:
    """(file system, root) with a client that tries each request `num_tries` times."""
    protocol = fsspec.utils.get_protocol(url)
    options: dict[str, Any] = {}
    if protocol in ("s3", "s3a"):
        options["config_kwargs"] = {
            "connect_timeout": access.timeout,
            "read_timeout": access.timeout,
            "retries": {"mode": "standard", "total_max_attempts": num_tries},
        }
        # Else each image costs a second request, which asks for its size.
        options["max_concurrency"] = 1
        options["use_listings_cache"] = False
        if access.anonymous:
            options["anon"] = True
    elif protocol in ("gs", "gcs"):
        if access.anonymous:
            options["token"] = "anon"
    elif access.anonymous or access.endpoint_url:
        field = "anonymous" if access.anonymous else "endpoint_url"
        raise DataError(f"{field}: {url} has no such thing; accepted with s3:// and gs:// only")
    if access.endpoint_url:
        options["endpoint_url"] = access.endpoint_url
    try:
        # Not fsspec's shared instance, which a process that was forked would share with its parent.
        file_system, root = fsspec.url_to_fs(url, skip_instance_cache=True, **options)
    except (ValueError, ImportError) as error:  # a protocol that fsspec does not know or has no package for
        raise DataError(f"data: {url} cannot be used: {error}; accepted is a path or URL that fsspec knows") from error
    if protocol in ("s3", "s3a"):
        file_system.retries = 1  # tries of its own, around those of its client
    return file_system, root


def _file(name: str, info: dict[str, Any]) -> File:
    size = info.get("size")
    version = next((info[key] for key in ("ETag", "etag", "mtime", "last_modified") if info.get(key)), "")
    return File(name, -1 if size is None else int(size), str(version))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")
