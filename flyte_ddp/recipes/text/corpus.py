"""The documents of a source, piece by piece. A source is a file, directory or URL with text or
Parquet, or Python's own topics.

Nothing here holds more than some pieces in memory, however long a document is. This module knows
nothing of tokens and imports no torch.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import io
import tempfile
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from flyte_ddp.config.extras import require
from flyte_ddp.errors import DataError
from flyte_ddp.recipes.contents import EMPTY, ENCODINGS, GZIP, HEAD, PARQUET, kind_of
from flyte_ddp.storage import Storage

# suffixes of the files that are read in a directory by default; .gz may follow
SUFFIXES = (".txt", ".text", ".md", ".rst", ".parquet")
MAX_PIECE = 1 << 18  # characters of a part of a document; several are tokenized at once
PARQUET_ROWS = 64  # number of rows of a Parquet file that are read at once

# kinds of samples that recipe `text` makes
WINDOWS, DOCUMENTS, CHATS = SAMPLES = ("windows", "documents", "chats")
OWN = "the reference topics that come with Python (pydoc_data.topics)"


@dataclass(frozen=True)
class Piece:
    text: str
    ends: bool  # the document ends with it


@dataclass(frozen=True)
class Corpus:
    """The documents of `source`. They can be read again and again, in the same order.

    A document is a file, a row of a Parquet file, or the text between two `separator`s in a text
    file. The kind of a file is detected from its contents, not from its name. Text is UTF-8, or
    UTF-16 or UTF-32 with a byte order mark.
    """

    source: str  # path or URL of a file or a directory; "" for Python's own topics
    separator: str = ""  # text between two documents in a file; "" makes each file one document
    # pattern of the names of the files in a directory, such as "*.py"; "" for text and Parquet
    files: str = ""
    column: str = "text"  # column with the text in Parquet files
    # number of files that were not read, by the reason
    left_out: Counter[str] = field(default_factory=Counter, compare=False)

    @property
    def name(self) -> str:
        return self.source or OWN

    def num_bytes(self) -> int:
        """Return the size of all files as they are stored. Raises DataError if there are none."""
        if not self.source:
            return sum(map(len, _topics()))
        return sum(size for _, size in self._list_files())

    def pieces(self) -> Iterator[Piece]:
        """Yield all documents.

        Raises:
            DataError: the source is missing or damaged, is a single file that is no text, or lacks
                the column.
            StorageDenied: the source may not be read.
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
                name = path
                if not storage.is_local:
                    name = str(storage.file_system.unstrip_protocol(path))
                try:
                    reason = yield from self._read_pieces(file, name)
                except (OSError, EOFError, zlib.error, UnicodeError) as error:
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
        root = storage.root
        try:
            info: dict[str, Any] = storage.retry(lambda: storage.file_system.info(root))
        except FileNotFoundError:
            raise DataError(
                "data: expected a file, directory or URL with text or Parquet, got "
                f"{self.source}, which does not exist"
            ) from None
        if info["type"] == "file":
            return [(root, info.get("size") or 0)]
        found = storage.find()
        files = []
        for name, info in sorted(found.items()):
            if self._is_read(name) and info["type"] != "other":
                files.append((f"{root}/{name}", info.get("size") or 0))
        if not files:
            expected = self.files or f"text ({', '.join(SUFFIXES)})"
            raise DataError(
                f"data: expected files of {expected}, got {len(found):,} other files in "
                f"{self.source}; the recipe's option files gives another pattern"
            )
        self.left_out["hidden or of other names"] = len(found) - len(files)
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
        """Yield the documents of a file. Return why the file is left out; "" if it is not."""
        with open(file, "rb") as stream:
            kind = kind_of(stream.read(HEAD))
        if kind == PARQUET:
            for text in self._read_rows(file, name):
                yield from _cut(io.StringIO(text), "")
            return ""
        opened: Any = gzip.open if kind == GZIP else open
        if kind == GZIP:
            with opened(file) as stream:
                kind = kind_of(stream.read(HEAD))
        if kind not in ENCODINGS:
            return kind
        with opened(file, "rt", encoding=kind, newline="") as lines:
            yield from _cut(lines, self.separator)
        return ""

    def _read_rows(self, file: Path, name: str) -> Iterator[str]:
        require(f"data: {name}", "pyarrow")
        import pyarrow
        from pyarrow import parquet

        try:
            table = parquet.ParquetFile(file, buffer_size=MAX_PIECE, pre_buffer=False)
            types = dict(zip(table.schema_arrow.names, table.schema_arrow.types, strict=True))
            if types.get(self.column) not in (pyarrow.string(), pyarrow.large_string()):
                got = ", ".join(f"{column} ({kind})" for column, kind in types.items())
                raise DataError(
                    f"data: expected a column {self.column!r} with text in {name}, got the columns "
                    f"{got}; the recipe's option column names another one"
                )
            for batch in table.iter_batches(PARQUET_ROWS, columns=[self.column]):
                yield from filter(None, batch.column(0).to_pylist())
        except pyarrow.ArrowException as error:
            raise DataError(f"data: {name} is no Parquet file that can be read: {error}") from error


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


@contextlib.contextmanager
def _local_copy(storage: Storage, path: str, size: int) -> Iterator[Path]:
    """Yield a local path of the file, or of a copy that exists for the block. `size` is the size
    that the store lists, 0 if unknown.
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


def _cut(text: TextIO, separator: str) -> Iterator[Piece]:
    """Yield the documents, which `separator` ends, each as a whole or in pieces of `MAX_PIECE`."""
    kept = ""
    for block in iter(lambda: text.read(MAX_PIECE), ""):
        kept += block
        if separator:
            *documents, kept = kept.split(separator)
            yield from (Piece(document, ends=True) for document in documents)
        # The end of `kept` may be the beginning of a separator.
        if len(kept) > MAX_PIECE + len(separator):
            yield Piece(kept[:MAX_PIECE], ends=False)
            kept = kept[MAX_PIECE:]
    yield Piece(kept, ends=True)
