"""Numbers beside the index for each shard: offsets of the samples in tar files and JSON lines, with
which parts of a shard can be fetched, and counts of tokens.

A file begins with a checksum of the numbers and of the shard's entry. Each number has eight bytes.
Imports no torch.
"""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.data.source import Entry, Source
from flyte_ddp.storage import read_file, write_file

CHECKSUM = 8  # bytes

logger = logging.getLogger(__name__)


def write_offsets(
    index: str, entry: Entry, offsets: NDArray[Any], timeout: float, kind: str = ""
) -> None:
    """Put the offsets of a shard, or numbers of another kind, beside the index at this URL. Raises
    as `Storage.write` does.
    """
    contents = offsets.astype("<u8").tobytes()
    url = locate_numbers(index, entry, kind)
    write_file(url, _checksum(entry, contents) + contents, "index", timeout)


def read_numbers(index: str, entry: Entry, timeout: float, kind: str) -> NDArray[np.int64]:
    """Return the numbers of a kind that lie beside the index for a shard.

    Raises:
        FileNotFoundError: they are missing, damaged, or for another version of the shard.
    """
    url = locate_numbers(index, entry, kind)
    contents = read_file(url, "index", timeout)
    if contents[:CHECKSUM] != _checksum(entry, contents[CHECKSUM:]):
        raise FileNotFoundError(url)
    return np.frombuffer(contents, "<u8", offset=CHECKSUM).astype(np.int64)


def fetch_offsets(index: str, entry: Entry, path: str, timeout: float) -> None:
    """Copy the offsets of a shard to `path`, after their checksum.

    Raises:
        FileNotFoundError: the offsets are missing, damaged, or for another version of the shard.
    """
    Source((), timeout).fetch(locate_numbers(index, entry), path)
    contents = Path(path).read_bytes()
    if contents[:CHECKSUM] != _checksum(entry, contents[CHECKSUM:]):
        logger.warning(
            "%s has no offsets of this version of %s, which is fetched whole",
            locate_numbers(index, entry),
            entry.name,
        )
        raise FileNotFoundError(path)


def locate_numbers(index: str, entry: Entry, kind: str = "") -> str:
    """Return the URL of a shard's numbers beside the index at this URL."""
    # A hash has a fixed length and no slashes. A name may be a URL.
    return f"{index}.{hashlib.sha256(entry.name.encode()).hexdigest()[:16]}{kind}"


def _checksum(entry: Entry, contents: bytes) -> bytes:
    facts = repr((entry.name, entry.size, entry.version)).encode()
    return hashlib.sha256(facts + contents).digest()[:CHECKSUM]
