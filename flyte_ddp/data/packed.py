"""`Packed`: documents of shards in rows of equal length, as one data set. Imports no torch before
the first row is read.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flyte_ddp.config.fields import whole_number
from flyte_ddp.data.documents import NO_TARGET, TOKENS, Documents, read_document
from flyte_ddp.data.order import EpochOrder, Indices, Order, ShardStream
from flyte_ddp.data.packing import CONTINUE, CUT, FAIL, WINDOW, PackedRows, pack, split_shard
from flyte_ddp.data.row_counts import CountedShards, RowCounts, pack_all, read_counts
from flyte_ddp.data.shards import Shards
from flyte_ddp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import Tensor

MAX_SHARDS, MAX_WINDOWS = 64, 1024  # shards and windows that a process keeps


class Packed(ShardStream):
    """Rows of `length` tokens, which are packed with documents of `Shards`.

    A row is a dict of tensors (length,): `input_ids`; `labels`, with -100 where nothing is to be
    learned; `position_ids`, which begin at 0 in each document; and `sequence_ids`, which number
    the row's documents from 0. What is left of a row is padding: one more sequence, without
    labels. Labels are not shifted, as models of transformers expect: a label is the token at its
    own place, and the first token of a document has none.

    A batch's weight counts targets: it is the number of this rank's targets, times ranks, divided
    by the number of targets in the global batch. So `(weight * mean).backward()` gives the gradient
    of the mean over all targets, where `mean` is the rank's mean over its own targets.

    Which documents share a row follows from the lengths alone: up to 4,096 documents that follow
    each other in a shard are packed by best fit. So a row has the same number in each epoch, and
    all epochs have the same length. The rows of an epoch are read in the order of `Shards`, with
    its lanes and windows, here of rows.

    Args:
        shards: `Shards` of documents. A record is a document: a list of its tokens, and maybe a
            list of labels.
        length: tokens of a row.
        key: the field with the tokens.
        labels: the field with labels, in which -100 marks tokens that are not learned, such as
            those of a question; None to learn all tokens but each document's first.
        overlong: what happens to a document longer than a row. "fail" refuses it, "continue" lets
            it go on in other rows, and "cut" leaves out its end. A document that continues repeats
            one token, so that each of its targets is learned once.
        transform: function that makes a sample from a row, such as a recipe's pair of input and
            target.

    Raises:
        ConfigError: an argument has a wrong value, or the tokens are made on the fly.
        DataError: a document has no tokens, is too long, or differs from what was counted; also
            the errors of `Shards`.

    Example:
        data = Packed(Shards("documents"), 64, overlong="continue")
        data.prepare()  # once, before the ranks start
        for rows, weight in session.batches(data, 4, epoch=0):
            logits = nn.Embedding(100, 100)(rows["input_ids"])[:, :-1]
            labels = rows["labels"][:, 1:]
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            (weight * loss).backward()
    """

    def __init__(
        self,
        shards: Shards,
        length: int,
        key: str = TOKENS,
        *,
        labels: str | None = None,
        overlong: str = FAIL,
        transform: Callable[[dict[str, Tensor]], Any] | None = None,
    ) -> None:
        if not isinstance(shards, Shards):
            raise ConfigError(f"shards: expected Shards, got a {type(shards).__name__}")
        if shards.transform is not None:
            raise ConfigError(
                "shards: expected stored tokens, whose numbers are known before they are read, got "
                "a transform, which makes them on the fly: write the tokens to shards first"
            )
        if shards.unreadable != FAIL:
            raise ConfigError(
                'shards: expected unreadable="fail", because rows have a place for each document, '
                f"got {shards.unreadable!r}"
            )
        for name, value in (("key", key), ("labels", labels)):
            if not (isinstance(value, str) and value) and (name, value) != ("labels", None):
                raise ConfigError(f"{name}: expected the name of a field, got {value!r}")
        if overlong not in (FAIL, CONTINUE, CUT):
            raise ConfigError(f'overlong: expected "fail", "continue" or "cut", got {overlong!r}')
        self.shards, self.length = shards, whole_number("length", length, minimum=2)
        self.fields, self.lanes = (key, labels), shards.lanes
        self.overlong, self.transform = overlong, transform
        # The documents of shards, and the rows of windows with their shard's first document.
        self._documents: dict[int, Documents] = {}
        self._packed: dict[int, tuple[int, PackedRows]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_documents": {}, "_packed": {}}

    def prepare(self) -> str:
        """Count the tokens of shards that have no counts yet, and pack all rows. Return a
        description.

        Call this once before the ranks start. Shards without counts are read whole. New shards may
        be added.
        """
        text = self.shards.prepare()
        # The shards may have been opened before their index was made.
        counted = CountedShards(dataclasses.replace(self.shards), *self.fields)
        try:
            counts = read_counts(counted, self.length, self.overlong, must_be_newest=True)
        except FileNotFoundError:
            counts = pack_all(counted, self.length, self.overlong)
        num_targets, num_rows = int(counts.targets.sum()), len(counts.targets)
        return f"{num_targets:,} targets in {num_rows:,} rows of {self.length:,} tokens; {text}"

    def __len__(self) -> int:
        return len(self._counts.targets)

    def __getitem__(self, row: int) -> Any:
        import torch

        samples, begins, ends = self._find(row)
        arrays = {
            "input_ids": np.zeros(self.length, np.int64),
            "labels": np.full(self.length, NO_TARGET),
            "position_ids": np.zeros(self.length, np.int64),
            "sequence_ids": np.full(self.length, len(samples)),
        }
        place = 0
        pieces = zip(samples.tolist(), begins.tolist(), ends.tolist(), strict=True)
        for number, (sample, begin, end) in enumerate(pieces):
            tokens, labels = self._read(sample, end)
            piece = slice(place, place + end - begin)
            arrays["input_ids"][piece] = tokens[begin:end]
            arrays["labels"][piece] = labels[begin:end]
            arrays["labels"][place] = NO_TARGET
            arrays["position_ids"][piece] = np.arange(end - begin)
            arrays["sequence_ids"][piece] = number
            place = piece.stop
        arrays["position_ids"][place:] = np.arange(self.length - place)
        expected = self.count_targets([row])
        got = int(np.count_nonzero(arrays["labels"] != NO_TARGET))
        if got != expected:
            raise DataError(
                f"data: {self.key(row)}: expected {expected} targets as counted, got {got}: call "
                "`prepare()` of the Packed again"
            )
        found = {name: torch.from_numpy(each) for name, each in arrays.items()}
        if self.transform:
            return self.transform(found)
        return found

    def key(self, row: int) -> str:
        """Return the URL of a row's shard, and the rows of its documents there."""
        samples, begins, _ = self._find(row)
        shard, names = "", []
        for sample, begin in zip(samples.tolist(), begins.tolist(), strict=True):
            shard, _, name = self.shards.key(sample).rpartition(" row ")
            if begin:
                name += f" from token {begin}"
            names.append(name)
        return f"{shard} rows {', '.join(names)}"

    def count_targets(self, rows: Sequence[int]) -> int:
        """Return how many targets some rows have together. Reads no row."""
        return int(self._counts.targets[rows].sum())

    @property
    def num_targets(self) -> int:
        """The number of targets in all rows."""
        return int(self._counts.targets.sum())

    def prefetch(self, rows: Sequence[int]) -> None:
        """Fetch the parts of shards with the documents of some rows, several at once."""
        found = [self._find(row)[0] for row in rows]
        self.shards.prefetch(np.concatenate(found).tolist())

    @property
    def num_shards(self) -> int:
        return self.shards.num_shards

    def describe_shards(self) -> dict[str, Any]:
        return {
            **self.shards.describe_shards(),
            "tokens of a row": self.length,
            "fields of a document": ", ".join(filter(None, self.fields)),
            "documents longer than a row": self.overlong,
            "checksum of the rows": self._counts.checksum(),
        }

    def continue_order(self, described: Mapping[str, Any]) -> Packed:
        """Return the rows, shards and lanes of the `described` order; see `Shards`."""
        key, labels = self.fields
        found = Packed(
            self.shards.continue_order(described),
            self.length,
            key,
            labels=labels,
            overlong=self.overlong,
            transform=self.transform,
        )
        vars(found)["_counts"] = self._counts.head(int(found._window_ends[-1]))
        return found

    def make_order(self, lanes: int, seed: int, epoch: int, share: float = 1.0) -> EpochOrder:
        rows_before = np.concatenate([[0], self._counts.ends])[self._window_ends]
        sizes = np.diff(rows_before, prepend=0)
        return self.shards.make_order(lanes, seed, epoch, share, sizes)

    def num_ahead(self, order: Order, num_ranks: int, part: float = 1.0) -> float:
        """Return how many rows may be fetched ahead; see `Shards.num_ahead`."""
        return self.shards.num_ahead(order, num_ranks, part)

    def _read(self, sample: int, end: int) -> tuple[Any, Any]:
        """Return the tokens of a document and their labels, at least up to `end`."""
        fields = self.shards[sample]
        try:
            tokens, labels = read_document(fields, *self.fields)
            if len(tokens) < end:
                raise DataError(
                    f"expected {end} tokens at least as counted, got {len(tokens)}: call "
                    "`prepare()` of the Packed again"
                )
            return tokens, labels
        except DataError as error:
            raise DataError(f"data: {self.shards.key(sample)}: {error}") from error

    def _find(self, row: int) -> tuple[Indices, Indices, Indices]:
        """Return the documents of a row, and where their pieces begin and end, each (P,)."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        window = int(np.searchsorted(self._counts.ends, row, side="right"))
        first, packed = self._pack(window)
        number = row - int(self._counts.ends[window] - self._counts.rows[window])
        begin, end = np.concatenate([[0], packed.row_ends])[number : number + 2]
        pieces = slice(begin, end)
        return first + packed.documents[pieces], packed.begins[pieces], packed.ends[pieces]

    def _pack(self, window: int) -> tuple[int, PackedRows]:
        """Return the first document of a window's shard, and the window's rows."""
        found = self._packed.pop(window, None)
        if found is None:
            shard = int(np.searchsorted(self._window_ends, window, side="right"))
            samples = self._counted.list_samples(shard)
            bounds = split_shard(len(samples))
            number = window - int(self._window_ends[shard]) + len(bounds) - 1
            documents = self._open_documents(shard)
            begin, end = bounds[number : number + 2].tolist()
            found = samples.start, pack(documents, begin, end, self.length, self.overlong)
        self._packed[window] = found  # behind the windows that were used before
        while len(self._packed) > MAX_WINDOWS:
            self._packed.pop(next(iter(self._packed)), None)
        return found

    def _open_documents(self, shard: int) -> Documents:
        found = self._documents.pop(shard, None)
        if found is None:
            try:
                found = self._counted.read(shard)
            except FileNotFoundError:
                raise self._missing("counts of tokens") from None
        self._documents[shard] = found
        while len(self._documents) > MAX_SHARDS:
            self._documents.pop(next(iter(self._documents)), None)
        return found

    @functools.cached_property
    def _counted(self) -> CountedShards:
        return CountedShards(self.shards, *self.fields)

    @functools.cached_property
    def _counts(self) -> RowCounts:
        try:
            return read_counts(self._counted, self.length, self.overlong)
        except FileNotFoundError:
            raise self._missing("rows") from None

    @functools.cached_property
    def _window_ends(self) -> Indices:
        """(S,) windows before the end of each shard."""
        sizes = self.shards.shard_sizes
        return np.cumsum(-(-sizes // WINDOW))

    def _missing(self, what: str) -> DataError:
        source, _, _ = self._counted.find_shard(0)
        return DataError(
            f"data: expected {what} of the documents in {source.join('')}, with {self.length} "
            f"tokens of {self.fields[0]!r} in a row, got none or old ones: call `prepare()` of the "
            "Packed once, before the ranks start"
        )
