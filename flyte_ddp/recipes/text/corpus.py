"""The documents of a source, piece by piece: of a file, directory or URL with text or Parquet, or
Python's own topics.

Nothing here holds more than a piece in memory, however long a document is. Knows nothing of tokens;
imports no torch.
"""

from __future__ import annotations

import codecs
import contextlib
import fnmatch
import gzip
import io
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from flyte_ddp.config.extras import require
from flyte_ddp.errors import DataError
from flyte_ddp.recipes.contents import EMPTY, ENCODINGS, GZIP, HEAD, PARQUET, kind_of
from flyte_ddp.storage import Storage

# of the files read in a directory, by default; .gz may follow
SUFFIXES = (".txt", ".text", ".md", ".rst", ".parquet")
MAX_PIECE = 1 << 18  # bytes; several are tokenized at once
PARQUET_ROWS = 64  # read at once

OWN = "the reference topics that come with Python (pydoc_data.topics)"


@dataclass(frozen=True)
class Piece:
    text: bytes
    ends: bool  # the document ends with it


@dataclass(frozen=True)
class Corpus:
    """The documents of `source`. They can be read again and again, in the same order.

    A document is a file, a row of a Parquet file, or what lies between two `separator`s in a text
    file. What a file is, its contents tell, not its name. Text is UTF-8, or UTF-16 or UTF-32 with a
    byte order mark, and comes as UTF-8.
    """

    source: str = ""  # path or URL of a file or a directory; "" for Python's own topics
    separator: str = ""  # text between two documents in a file; "" makes each file one document
    # pattern of the names of the files in a directory, such as "*.py"; "" for text and Parquet
    files: str = ""
    column: str = "text"  # of the text in Parquet files
    # files that were not read, by the reason
    left_out: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def name(self) -> str:
        return self.source or OWN

    def num_bytes(self) -> int:
        """Return the size of all files as they are stored. Raises DataError if there are none."""
        return (
            sum(len(text) for text in _topics())
            if not self.source
            else sum(size for _, size in self._list_files())
        )

    def pieces(self) -> Iterator[Piece]:
        """Yield all documents.

        Raises:
            DataError: the source is missing, damaged or one file that is no text, or has no such
                column.
            StorageDenied: it may not be read.
            StorageUnavailable: its store could not be reached.
        """
        if not self.source:
            for text in _topics():
                yield Piece(text, ends=True)
            return
        self.left_out.clear()
        storage = Storage(self.source, "data")
        for path, size in self._list_files():
            with _local_copy(storage, path, size) as file:
                name = path if storage.is_local else str(storage.file_system.unstrip_protocol(path))
                try:
                    reason = yield from self._read_pieces(file, name)
                except (OSError, EOFError, zlib.error) as error:
                    raise DataError(
                        f"data: {name} cannot be read: {type(error).__name__}: {error}"
                    ) from error
            if reason not in ("", EMPTY) and path == storage.root:
                expected = "expected text in UTF-8, or in UTF-16 with a byte order mark"
                raise DataError(f"data: {expected}, got {name}: {reason}; convert it")
            self.left_out[reason] += bool(reason)

    def _list_files(self) -> list[tuple[str, int]]:
        """Return path and size of each file, sorted by path."""
        storage = Storage(self.source, "data")
        try:
            found: dict[str, Any] = storage.retry(lambda: storage.file_system.info(storage.root))
        except FileNotFoundError:
            raise DataError(
                "data: expected a file, directory or URL with text or Parquet, got "
                f"{self.source}, which does not exist"
            ) from None
        if found["type"] == "file":
            return [(storage.root, found.get("size") or 0)]
        listed = storage.find()
        files = sorted(
            (f"{storage.root}/{name}", info.get("size") or 0)
            for name, info in listed.items()
            if self._is_read(name) and info["type"] != "other"
        )
        if not files:
            expected = (
                f"files like {self.files}"
                if self.files
                else f"files of text ({', '.join(SUFFIXES)})"
            )
            raise DataError(
                f"data: expected {expected}, got {len(listed):,} other files in {self.source}; "
                "the recipe's option files gives another pattern"
            )
        self.left_out["hidden or of other names"] = len(listed) - len(files)
        return files

    def _is_read(self, path: str) -> bool:
        *folders, name = path.split("/")
        if name.startswith((".", "_")) or any(
            folder.startswith((".", "__MACOSX")) for folder in folders
        ):
            return False
        if self.files:
            return fnmatch.fnmatch(name, self.files)
        return name.lower().removesuffix(".gz").endswith(SUFFIXES)

    def _read_pieces(self, file: Path, name: str) -> Generator[Piece, None, str]:
        """Yield the documents of a file. Return why it is left out; "" where it is not."""
        with open(file, "rb") as stream:
            kind = kind_of(stream.read(HEAD))
        if kind == PARQUET:
            for text in self._read_rows(file, name):
                yield from _cut(io.BytesIO(text).read, b"")
            return ""
        with (
            cast(io.BufferedReader, gzip.open(file)) if kind == GZIP else open(file, "rb") as stream
        ):
            if kind == GZIP:
                kind = kind_of(stream.read(HEAD))
            if kind not in ENCODINGS:
                return kind
            stream.seek(len(codecs.BOM_UTF8) if kind == "utf-8-sig" else 0)
            read: Callable[[int], bytes] = stream.read
            if kind in ("utf-16", "utf-32"):
                decoded = io.TextIOWrapper(stream, kind, errors="replace", newline="")
                read = lambda size: decoded.read(size // 4).encode()  # noqa: E731
            yield from _cut(read, self.separator.encode())
        return ""

    def _read_rows(self, file: Path, name: str) -> Iterator[bytes]:
        require(f"data: {name}", "pyarrow")
        import pyarrow
        from pyarrow import parquet

        try:
            table = parquet.ParquetFile(file, buffer_size=MAX_PIECE, pre_buffer=False)
            if self.column not in table.schema_arrow.names:
                raise DataError(
                    f"data: expected a column {self.column!r} with text in {name}, got the columns "
                    f"{', '.join(table.schema_arrow.names)}; the recipe's option column names "
                    "another one"
                )
            kind = table.schema_arrow.field(self.column).type
            if not any(
                is_text(kind)
                for is_text in (pyarrow.types.is_string, pyarrow.types.is_large_string)
            ):
                raise DataError(
                    f"data: expected text in column {self.column!r} of {name}, got {kind}"
                )
            for batch in table.iter_batches(PARQUET_ROWS, columns=[self.column]):
                for row in batch.column(0):
                    if (text := row.as_py()) is not None:
                        yield text.encode("utf-8")
        except pyarrow.ArrowException as error:
            raise DataError(f"data: {name} is no Parquet file that can be read: {error}") from error


def _topics() -> list[bytes]:
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


@contextlib.contextmanager
def _local_copy(storage: Storage, path: str, size: int) -> Iterator[Path]:
    """Yield a local path of the file, or of a copy for the block. `size` is what the store has
    listed, 0 if unknown.
    """
    if storage.is_local:
        yield Path(path)
        return
    with tempfile.TemporaryDirectory(prefix="text-") as directory:
        copy = Path(directory, "file")

        def fetch() -> None:
            storage.file_system.get_file(path, str(copy))
            if size and copy.stat().st_size != size:
                raise ConnectionError(
                    f"{path}: expected the listed {size:,} bytes, got {copy.stat().st_size:,}"
                )

        storage.retry(fetch)
        yield copy


def _cut(read: Callable[[int], bytes], separator: bytes) -> Iterator[Piece]:
    """Yield the documents of a stream's `read`, which `separator` ends; pieces end with a line
    where they can.

    No piece ends within a character of UTF-8.
    """
    kept = b""
    while block := read(MAX_PIECE):
        kept += block
        if separator:
            *documents, kept = kept.split(separator)
            for text in documents:
                yield from (
                    _cut(io.BytesIO(text).read, b"")
                    if len(text) > MAX_PIECE
                    else (Piece(text, ends=True),)
                )
        # what is left may end with the beginning of a separator
        while len(kept) > MAX_PIECE + len(separator):
            end = kept.rfind(b"\n", 0, MAX_PIECE) + 1 or _end_of_character(kept, MAX_PIECE)
            yield Piece(kept[:end], ends=False)
            kept = kept[end:]
    yield Piece(kept, ends=True)


def _end_of_character(text: bytes, end: int) -> int:
    """Return `end`, or the place a little before it where no character of UTF-8 goes on."""
    for place in range(end, end - 4, -1):
        if text[place] & 0xC0 != 0x80:
            return place
    return end  # it is not UTF-8
