"""Best fit of documents into rows of equal length. Pure functions of lengths. Imports no torch.

Documents that fit into a row stay whole ("Fewer Truncations Improve Language Modeling", Ding et
al., 2024).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from flyte_ddp.data.documents import Documents
from flyte_ddp.data.order import Indices

# States depend on the result of `pack`. A change of the result needs a new version.
VERSION = 1
FAIL, CONTINUE, CUT = "fail", "continue", "cut"  # ways to treat a document longer than a row
WINDOW = 4096  # most documents of a shard that are packed together
SHIFT = 32  # bits for the number of a row


@dataclass(frozen=True)
class PackedRows:
    """Pieces of documents, row by row. The arrays with (P,) have an item for each piece."""

    documents: Indices  # (P,) document of the shard
    begins: Indices  # (P,) first token of the piece in its document
    ends: Indices  # (P,) token after the piece in its document
    row_ends: Indices  # (R,) pieces before the end of each row
    targets: Indices  # (R,) targets of each row


def split_shard(num_documents: int) -> Indices:
    """Return where the windows of a shard begin, and its end, (W + 1,)."""
    num_windows = -(-num_documents // WINDOW)
    return np.arange(num_windows + 1) * num_documents // max(1, num_windows)


def pack(found: Documents, begin: int, end: int, length: int, overlong: str) -> PackedRows:
    """Pack the documents [begin, end) of a shard into rows of `length` tokens.

    The pieces of a document that continues overlap by one token, so that each target is in one
    piece. Pieces without a target are left out.
    """
    documents, begins, ends = _cut(found.lengths[begin:end], length, overlong)
    documents = documents + begin
    starts = found.starts[documents]
    targets = found.count_before(starts + ends) - found.count_before(starts + begins + 1)
    kept = np.flatnonzero(targets)
    rows = assign_rows((ends - begins)[kept], length)
    order = np.argsort(rows, kind="stable")
    pieces, rows = kept[order], rows[order]
    row_ends = np.searchsorted(rows, np.arange(rows.max(initial=-1) + 1), side="right")
    sums = np.concatenate([[0], np.cumsum(targets[pieces])])[row_ends]
    return PackedRows(
        documents[pieces], begins[pieces], ends[pieces], row_ends, np.diff(sums, prepend=0)
    )


def _cut(lengths: Indices, length: int, overlong: str) -> tuple[Indices, Indices, Indices]:
    """Return document, beginning and end of each piece, (P,)."""
    counts = np.ones_like(lengths)
    if overlong == CONTINUE:
        counts = np.maximum(1, -(-(lengths - 1) // (length - 1)))
    documents = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(documents)) - (np.cumsum(counts) - counts)[documents]
    begins = number * (length - 1)
    return documents, begins, np.minimum(begins + length, lengths[documents])


def assign_rows(sizes: Indices, length: int) -> Indices:
    """Return the row of each piece, (P,): best fit, the largest piece first.

    A piece goes into the fullest row that has room for it. The first of equal rows counts.
    """
    order = np.argsort(-sizes, kind="stable")
    rows, num_rows = [0] * len(sizes), 0
    spaces = list[int]()  # the free tokens of each row and its number, sorted
    for piece, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
        place = bisect_left(spaces, size << SHIFT)
        if place < len(spaces):
            space = spaces.pop(place)
        else:
            space = length << SHIFT | num_rows
            num_rows += 1
        rows[piece] = space & ((1 << SHIFT) - 1)
        left = space - (size << SHIFT)
        if left >> SHIFT:
            insort(spaces, left)
    return np.array(rows, np.int64)
