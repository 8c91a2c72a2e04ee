"""Image files at any fsspec URL: list them, fetch them with retries, decode them.

This module knows neither classes nor models, and imports no torch. Credentials come from the
environment (`flyte_ddp.storage`). No index, option or pickle contains them.
"""

from __future__ import annotations

import functools
import io
import os
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flyte_ddp.data.source import CONCURRENT_READS, READ_TIMEOUT
from flyte_ddp.errors import DataError, StorageDenied
from flyte_ddp.recipes.contents import IMAGE, kind_of
from flyte_ddp.storage import Storage, has_password
from flyte_ddp.storage.failures import is_of_machine

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_SHORT_READS = 3  # A file counts as damaged after so many reads with another size than listed.
HEAD = 512  # number of bytes that distinguish an image from another file
MAX_LOOKS = 10_000  # number of files in a store that are probed, which takes half a minute
SUFFIXES = (
    ".jpg",
    ".jpeg",
    ".png",
    ".webp",
    ".bmp",
    ".gif",
    ".tif",
    ".tiff",
    ".ppm",
    ".pgm",
    ".avif",
)
VERSIONS = ("ETag", "etag", "mtime", "last_modified")  # keys under which a store reports a version
# values that may mean white in an image with more than 8 bits per pixel
WHITES = (255, (1 << 12) - 1, (1 << 16) - 1, (1 << 31) - 1)


class UnreadableImage(DataError):
    """A file is missing, forbidden, cut short or no image. Another try would end the same way."""


@dataclass(frozen=True)
class File:
    """A file as it was listed."""

    name: str  # path below the URL that was listed
    size: int  # bytes; -1 if the store does not report the size
    version: str  # ETag or time of the last change; "" if the store reports neither


def list_images(url: str, anonymous: bool = False) -> tuple[str, list[File], Counter[str]]:
    """Return (the URL in full, all images below it sorted by name, the number of other files by
    kind).

    An object store is listed page by page. The first bytes of a file decide if it is an image; its
    name does not matter. With more than `MAX_LOOKS` files in a store the requests would take too
    long. Then the name decides, until the image is read.

    Raises:
        DataError: there are no files, or the URL has a password.
        StorageDenied: the URL may not be listed with the credentials of this process.
        StorageUnavailable: the store could not be reached for `READ_TIMEOUT` seconds.
    """
    storage = open_storage(url, anonymous)
    found = storage.find()
    if not found or "" in found:
        raise DataError(
            f"data: expected a directory or a prefix with a folder for each class, got {url}, "
            "which holds no files"
        )
    others: Counter[str] = Counter()
    files = []
    for name, info in sorted(found.items()):
        if any(part.startswith((".", "__MACOSX")) for part in name.split("/")):
            others["hidden"] += 1
        elif info["type"] == "other":
            others["no regular file"] += 1
        elif info.get("size") == 0:
            others["empty"] += 1
        else:
            version = next(filter(None, map(info.get, VERSIONS)), "")
            files.append(File(name, info.get("size") or -1, str(version)))
    if storage.is_local or len(files) <= MAX_LOOKS:
        heads = storage.read_heads([file.name for file in files], HEAD)
        images = [file for file, head in zip(files, heads, strict=True) if kind_of(head) == IMAGE]
        others["unreadable"] += heads.count(b"")
        others["no image"] += len(heads) - heads.count(b"") - len(images)
    else:
        images = [file for file in files if file.name.lower().endswith(SUFFIXES)]
        others["no image by their names"] += len(files) - len(images)
    return storage.file_system.unstrip_protocol(storage.root.rstrip("/")), images, others


@dataclass(frozen=True)
class FileReader:
    """Reads files below `url`, each process through one client of its own.

    A client has connections and threads, which survive neither a fork nor a pickle. So each process
    opens its client at its first read.
    """

    url: str
    anonymous: bool = False  # True reads a public bucket without credentials.

    def begin(self, file: File) -> Future[bytes]:
        """Begin to `read` a file while other files are read."""
        _, threads = _open_client(os.getpid(), self.url, self.anonymous)
        return threads.submit(self.read, file)

    def read(self, file: File) -> bytes:
        """Return the contents of `file`. Raises UnreadableImage, or StorageUnavailable after
        `READ_TIMEOUT`.
        """
        storage, _ = _open_client(os.getpid(), self.url, self.anonymous)
        for _ in range(MAX_SHORT_READS):
            try:
                contents = storage.read(file.name)
            except (FileNotFoundError, StorageDenied) as error:
                reason = f"{type(error).__name__}: {error}"
                raise UnreadableImage(
                    f"data: {self.join(file)} cannot be read: {reason}"
                ) from error
            if file.size in (-1, len(contents)):
                return contents
        reason = f"expected the listed {file.size} bytes, got {len(contents)}"
        raise UnreadableImage(f"data: {self.join(file)} cannot be read: {reason}")

    def decode(self, file: File, contents: bytes) -> Image:
        """Return the image in `contents`, which `read` has returned for `file`. Raises
        UnreadableImage. An error of this machine is raised as it is.
        """
        try:
            return decode_image(contents)
        except Exception as error:  # a damaged file can raise any error
            if is_of_machine(error):
                raise
            raise UnreadableImage(
                f"data: {self.join(file)} is no image that can be read: {error}"
            ) from error

    def join(self, file: File) -> str:
        return f"{self.url}/{file.name}"


@functools.lru_cache(maxsize=8)
def _open_client(process: int, url: str, anonymous: bool) -> tuple[Storage, ThreadPoolExecutor]:
    threads = ThreadPoolExecutor(CONCURRENT_READS, thread_name_prefix="read-images")
    return open_storage(url, anonymous), threads


def decode_image(contents: bytes) -> Image:
    """Decode an image to RGB, upright, with transparent parts on white and more than 8 bits scaled
    to 8.

    White is 1 for floats. For whole numbers it is the largest number of 8, 12, 16 or 31 bits: the
    smallest of these that no pixel exceeds. Many 12-bit pictures are in files of 16 or 32 bits, and
    the file does not tell.

    Raises:
        Exception: an error of any kind, because a damaged file can fail anywhere in the reading.
    """
    import numpy as np
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        opened = Image.open(io.BytesIO(contents))
    except UnidentifiedImageError:
        raise ValueError("its format is not known") from None
    image: Image.Image = ImageOps.exif_transpose(opened)
    if image.mode[0] in "IF":  # convert() would cut off all values above 255.
        pixels = np.nan_to_num(np.asarray(image, dtype=np.float64))
        whites = (1, *WHITES)[image.mode != "F" :]
        white = next((white for white in whites if white >= pixels.max()), pixels.max())
        scaled = pixels.clip(0) * 256 / (white + (white > 1))
        return Image.fromarray(scaled.clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        image = opaque
    return image.convert("RGB")


def open_storage(url: str, anonymous: bool) -> Storage:
    """Open `url` for this process alone. Raises DataError if the URL has a password."""
    if has_password(url):  # Every rank would store the password.
        raise DataError(
            "data: expected a URL without a user name or a password; give them in the "
            "environment instead"
        )
    if anonymous and not url.startswith(("s3://", "s3a://", "gs://", "gcs://")):
        raise DataError(f"anonymous: expected none with {url}; it is for s3:// and gs:// only")
    # A forked process would share fsspec's cached instance with its parent.
    options: dict[str, Any] = {"skip_instance_cache": True}
    if url.startswith(("s3://", "s3a://")):
        # A larger number would cost each image a second request, which asks for its size.
        options["max_concurrency"] = 1
    return Storage(url, "data", READ_TIMEOUT, anonymous=anonymous, **options)
