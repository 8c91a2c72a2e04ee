"""The tokens and targets of a shard's documents, as numbers beside the index.

They are counted once, when shards are written or prepared. Rows of packed documents follow from
them without the documents. Knows no rows. Imports no torch.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flyte_ddp.data.offsets import read_numbers, write_offsets
from flyte_ddp.data.order import Indices
from flyte_ddp.data.source import Entry
from flyte_ddp.errors import DataError

TOKENS, LABELS = "tokens", "labels"  # the fields that `flyte-ddp shards` counts
NO_TARGET = -100  # label of a token that is not learned, as in torch and transformers
MAX_TOKEN = (1 << 31) - 1
VERSION = 1  # version of the counts beside the index


@dataclass(frozen=True)
class Documents:
    """The documents of a shard, laid end to end. A run is a range of tokens that are targets."""

    lengths: Indices  # (N,) tokens of each document
    begins: Indices  # (R,) first token of each run
    ends: Indices  # (R,) token after each run

    @functools.cached_property
    def starts(self) -> Indices:
        """(N,) first token of each document."""
        return np.cumsum(self.lengths) - self.lengths

    @functools.cached_property
    def _sums(self) -> Indices:
        return np.concatenate([[0], np.cumsum(self.ends - self.begins)])

    def count_before(self, places: Indices) -> Indices:
        """Return how many targets come before the tokens at `places`."""
        runs = np.searchsorted(self.begins, places, side="right")
        if not len(self.begins):
            return np.zeros_like(places)
        beyond = np.maximum(self.ends[runs - 1] - places, 0)
        return self._sums[runs] - np.where(runs > 0, beyond, 0)


def read_whole_numbers(fields: Mapping[str, Any], name: str) -> NDArray[np.int64]:
    """Return a field's numbers, (T,). Raises DataError if it contains others."""
    if name not in fields:
        raise DataError(f"{name}: expected a field with this name, got only {', '.join(fields)}")
    values = np.asarray(fields[name])
    if values.shape == (0,):
        return np.zeros(0, np.int64)
    if values.ndim != 1 or values.dtype.kind not in "iu":
        got = f"{values.dtype} in the shape {values.shape}"
        raise DataError(f"{name}: expected a list of whole numbers, got {got}")
    return values.astype(np.int64)


def read_document(
    fields: Mapping[str, Any], key: str, labels: str | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens of a document and their labels, both (T,).

    A target is predicted from the tokens before it. So the first token has no label.

    Raises:
        DataError: the document has no tokens, or other labels than tokens.
    """
    tokens = read_whole_numbers(fields, key)
    if not len(tokens):
        raise DataError(f"{key}: expected a document with tokens, got an empty one: leave it out")
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest > MAX_TOKEN:
        got = highest
        if lowest < 0:
            got = lowest
        raise DataError(f"{key}: expected numbers of tokens from 0 to {MAX_TOKEN}, got {got}")
    found = tokens.copy()
    if labels is not None:
        found = read_whole_numbers(fields, labels)
    if len(found) != len(tokens):
        raise DataError(
            f"{labels}: expected a label for each of {len(tokens)} tokens, got {len(found)} labels"
        )
    found[0] = NO_TARGET
    return tokens, found


def measure(
    documents: Iterable[Mapping[str, Any]],
    key: str,
    labels: str | None,
    name: Callable[[int], str] = str,
) -> Documents:
    """Count the tokens of documents, and find the runs of their targets.

    Args:
        name: returns the name of a document by its number, for errors.

    Raises:
        DataError: see `read_document`.
    """
    lengths, begins, ends, start = list[int](), list[Indices](), list[Indices](), 0
    for number, fields in enumerate(documents):
        try:
            tokens, found = read_document(fields, key, labels)
        except DataError as error:
            raise DataError(f"data: {name(number)}: {error}") from error
        num_tokens = len(tokens)
        is_target = (found != NO_TARGET).astype(np.int8)
        changes = np.diff(is_target, prepend=0, append=0)
        begins.append(start + np.flatnonzero(changes == 1))
        ends.append(start + np.flatnonzero(changes == -1))
        lengths.append(num_tokens)
        start += num_tokens
    none = [np.zeros(0, np.int64)]
    return Documents(
        np.array(lengths, np.int64), np.concatenate(none + begins), np.concatenate(none + ends)
    )


def name_kind(key: str, labels: str | None) -> str:
    """Return the end of the names of the files for documents with these fields."""
    return "." + hashlib.sha256(repr((VERSION, key, labels)).encode()).hexdigest()[:16]


def write_documents(
    index: str, entry: Entry, kind: str, documents: Documents, timeout: float
) -> None:
    """Put a shard's documents beside the index at this URL. Raises as `Storage.write` does."""
    numbers = [documents.lengths, documents.begins, documents.ends]
    write_offsets(index, entry, np.concatenate(numbers), timeout, kind)


def read_documents(index: str, entry: Entry, kind: str, timeout: float) -> Documents:
    """Return the documents of a shard from beside the index.

    Raises:
        FileNotFoundError: they are missing, damaged, or for another version of the shard.
    """
    numbers = read_numbers(index, entry, timeout, kind)
    lengths, runs = np.split(numbers, [entry.samples])
    return Documents(lengths, *np.split(runs, 2))
