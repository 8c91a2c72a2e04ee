"""Offsets of the samples in tar files and JSON lines. With them parts of a shard can be fetched.

Each shard has a file of offsets beside the index. It begins with a checksum of the offsets and of
the shard's entry. Each offset has eight bytes. Imports no torch.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from flyte_ddp.data.source import Entry, Source
from flyte_ddp.storage import write_file

CHECKSUM = 8  # bytes

logger = logging.getLogger(__name__)


def write_offsets(index: str, entry: Entry, offsets: NDArray[Any], timeout: float) -> None:
    """Put the offsets of a shard beside the index at this URL. Raises as `Storage.write` does."""
    contents = offsets.astype("<u8").tobytes()
    write_file(_url(index, entry), _checksum(entry, contents) + contents, "index", timeout)


def fetch_offsets(index: str, entry: Entry, path: str, timeout: float) -> None:
    """Copy the offsets of a shard to `path`, after their checksum.

    Raises:
        FileNotFoundError: the offsets are missing, damaged, or for another version of the shard.
    """
    Source((), timeout).fetch(_url(index, entry), path)
    contents = Path(path).read_bytes()
    if contents[:CHECKSUM] != _checksum(entry, contents[CHECKSUM:]):
        logger.warning(
            "%s has no offsets of this version of %s, which is fetched whole",
            _url(index, entry),
            entry.name,
        )
        raise FileNotFoundError(path)


def _url(index: str, entry: Entry) -> str:
    # A hash has a fixed length and no slashes. A name may be a URL.
    return f"{index}.{hashlib.sha256(entry.name.encode()).hexdigest()[:16]}"


def _checksum(entry: Entry, contents: bytes) -> bytes:
    facts = repr((entry.name, entry.size, entry.version)).encode()
    return hashlib.sha256(facts + contents).digest()[:CHECKSUM]
