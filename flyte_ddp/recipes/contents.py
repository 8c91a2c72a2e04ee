"""Detect the kind of a file from its first bytes, and report the files that a recipe left out.
Imports no torch.
"""

from __future__ import annotations

import codecs
import gzip
import logging
import re
import zlib
from collections import Counter
from collections.abc import Mapping

from flyte_ddp.errors import DataError

# number of bytes that distinguish text from other contents; other kinds show in the first 512
HEAD = 1 << 16

IMAGE, GZIP, PARQUET, EMPTY, NO_UTF8, OTHER = (
    "image",
    "gzip",
    "Parquet",
    "empty",
    "not in UTF-8",
    "no text",
)

_KINDS = {  # The first pattern that matches wins.
    EMPTY: rb"\Z",
    GZIP: rb"\x1f\x8b\x08",
    PARQUET: rb"PAR1",
    IMAGE: rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|GIF8[79]a|RIFF.{4}WEBP|II[*+]\0|MM\0[*+]"
    rb"|BM.{12}[\x0c\x28\x34\x38\x6c\x7c]\0\0\0|P[1-6]\s(?:\s*#[^\n]*\n)*\s*\d+\s+\d+\s"
    rb"|.{4}ftypavi[fs]|\0\0\0\x0cjP  |\xff\x4f\xff\x51",
    "zip archive": rb"PK(?:\x03\x04|\x05\x06|\x07\x08)",
    "PDF": rb"\s*%PDF-",
    "bzip2": rb"BZh\d1AY&SY",
    "xz": rb"\xfd7zXZ\0",
    "zstd": rb"\x28\xb5\x2f\xfd",
    # Encodings, by Python's names. The byte order mark of UTF-32 begins with the mark of UTF-16.
    "utf-8-sig": codecs.BOM_UTF8,
    "utf-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "utf-16": rb"\xff\xfe|\xfe\xff",
}
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-32")

logger = logging.getLogger(__name__)


def kind_of(head: bytes) -> str:
    """Return the kind of a file that begins with `head`: an encoding of text, another kind,
    `NO_UTF8` or `OTHER`.
    """
    for kind, pattern in _KINDS.items():
        if re.match(pattern, head, re.DOTALL):
            return kind
    if b"\0" in head:
        return OTHER
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return NO_UTF8
    return "utf-8"


def unpack(contents: bytes, place: str) -> bytes:
    """Return `contents`, which were read from `place`, and unpack them if gzip has packed them.
    Raises DataError if they are damaged.
    """
    if kind_of(contents[:HEAD]) != GZIP:
        return contents
    try:
        return gzip.decompress(contents)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"data: {place} is damaged: {error}; delete it and fetch it again"
        ) from error


def report_left_out(counts: Mapping[str, int], what: str = "file") -> str:
    """Log and return the end of a description, such as "; 3 files left out: 2 no image, 1 empty".

    Args:
        counts: number of things that were left out, by reason; the result is "" if there are none.
        what: the thing that was left out, in the singular.
    """
    reasons = ", ".join(
        f"{count:,} {reason}" for reason, count in Counter(counts).most_common() if count
    )
    if not reasons:
        return ""
    total = sum(counts.values())
    text = f"{total:,} {what}{'s' * (total != 1)} left out: {reasons}"
    logger.warning("data: %s", text)
    return f"; {text}"
