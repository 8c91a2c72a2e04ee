"""The tokens of a corpus as files that ranks map into memory: one for training, one held out. Imports no torch.

A window is a view of its file, so that data of any size takes no memory of a rank's own, and no time to load.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.recipes.contents import report_left_out
from flyte_ddp.recipes.text.corpus import Corpus, Piece
from flyte_ddp.recipes.text.tokens import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRAIN, HELD_OUT, FACTS = "train.bin", "held_out.bin", "text.json"
BATCH = 1 << 20  # bytes of text that are tokenized at once
BPE_SAMPLE = 64 << 20  # bytes of text from which a BPE is made
BLOCK = 1 << 20  # tokens of a file that are looked at at once


@dataclass(frozen=True)
class Shard:
    tokens: int
    bytes_per_token: float  # of the tokens that are targets


@dataclass(frozen=True)
class Facts:
    """Facts about prepared shards, stored in the same directory."""

    tokenizer: str  # its definition
    context: int
    train: Shard
    held_out: Shard


def prepare_shards(corpus: Corpus, directory: Path, tokenizer: Tokenizer, held_out: float, context: int) -> str:
    """Tokenize `corpus` into `directory`, and describe it.

    Documents are held out by a hash of their beginning, so that copies of a document lie on one side, and a document
    stays on its side when others are added.

    Args:
        held_out: share of the documents.
        context: tokens of a window.

    Raises:
        DataError: the corpus is empty, or is not UTF-8 for a tokenizer that needs it.
        ConfigError: the window is longer than one of the files.
    """
    paths = directory / TRAIN, directory / HELD_OUT
    with open(paths[0], "wb") as train_file, open(paths[1], "wb") as held_out_file:
        writer = _Writer((train_file, held_out_file), tokenizer, held_out)
        try:
            for piece in corpus.pieces():
                writer.add(piece)
            writer.flush()
        except UnicodeDecodeError as error:
            raise _not_utf8(corpus, error) from error
    if not writer.num_documents:
        raise DataError(f"data: expected text, got {corpus.name}, which is empty{report_left_out(corpus.left_out)}")
    how = f"{writer.num_held_out:,} of them held out"
    if len(_map_tokens(paths[1], tokenizer)) <= context:
        how = _hold_out_end(*paths, tokenizer, held_out, context)
    shards = [
        _shard(path, tokenizer, context, name) for path, name in zip(paths, ("training", "held-out"), strict=True)
    ]
    facts = {
        "tokenizer": tokenizer.definition,
        "context": context,
        **{name: vars(shard) for name, shard in zip(("train", "held_out"), shards, strict=True)},
    }
    (directory / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    kind = f"tokens of a BPE of {tokenizer.size:,}" if tokenizer.definition else "bytes"
    return (
        f"text from {corpus.name}: {writer.num_documents:,} document{'s'[: writer.num_documents > 1]}, {how}; "
        f"{shards[0].tokens:,} {kind} to train, {shards[1].tokens:,} held out{report_left_out(corpus.left_out)}"
    )


def sample_texts(corpus: Corpus, held_out: float) -> Iterator[str]:
    """Yield training texts, `BPE_SAMPLE` bytes from all over a large corpus. Raises DataError if one is not UTF-8."""
    share = BPE_SAMPLE / max(1, corpus.num_bytes())
    split, taken = _Split(held_out), 0
    for number, piece in enumerate(corpus.pieces()):
        is_taken = int((number + 1) * share) > int(number * share) if share < 1 else True
        if split.is_held_out(piece) is False and is_taken and taken < BPE_SAMPLE:
            taken += len(piece.text)
            try:
                yield piece.text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise _not_utf8(corpus, error) from error


def read_facts(directory: Path) -> Facts:
    values = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    return Facts(**{**values, **{name: Shard(**values[name]) for name in ("train", "held_out")}})


def read_windows(file: Path, tokenizer: Tokenizer, context: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return inputs and targets (N, context): views of `file`, each target the token after its input.

    Every token but the first and what is left at the end is a target once.
    """
    tokens = _map_tokens(file, tokenizer)
    count = (len(tokens) - 1) // context
    return tuple(tokens[first : first + count * context].reshape(count, context) for first in (0, 1))  # type: ignore[return-value]


class _Writer:
    """Tokenizes pieces in batches and writes each to the file of its side: for training, or held out."""

    def __init__(self, files: tuple[BinaryIO, BinaryIO], tokenizer: Tokenizer, held_out: float) -> None:
        self.tokenizer = tokenizer
        self.split = _Split(held_out)
        self.num_documents = self.num_held_out = 0
        self._files = files
        self._pending: list[tuple[Piece, bool]] = []
        self._num_pending = 0  # bytes

    def add(self, piece: Piece) -> None:
        side = self.split.is_held_out(piece)
        if side is None:
            return
        self.num_documents += piece.ends
        self.num_held_out += piece.ends and side
        self._pending.append((piece, side))
        self._num_pending += len(piece.text)
        if self._num_pending >= BATCH:
            self.flush()

    def flush(self) -> None:
        encoded = self.tokenizer.encode([piece.text for piece, _ in self._pending])
        for (piece, side), tokens in zip(self._pending, encoded, strict=True):
            self._files[side].write(tokens.tobytes())
            if piece.ends:
                self._files[side].write(_type(self.tokenizer).type(self.tokenizer.end).tobytes())
        self._pending, self._num_pending = [], 0


class _Split:
    """Tells of each piece, in order, on which side its document is."""

    def __init__(self, held_out: float) -> None:
        self._share = held_out
        self._side: bool | None = None  # of the current document; None before its first text
        self._first = b""  # the first document trains, so that there is one

    def is_held_out(self, piece: Piece) -> bool | None:
        """Return the side of `piece`; None for one of an empty document."""
        if self._side is None and piece.text:
            digest = hashlib.sha256(piece.text).digest()
            self._first = self._first or digest
            self._side = digest != self._first and int.from_bytes(digest[:8], "big") < self._share * 2**64
        side = self._side
        if piece.ends:
            self._side = None
        return side


def _not_utf8(corpus: Corpus, error: UnicodeDecodeError) -> DataError:
    return DataError(
        f'data: expected UTF-8, which {{"tokens": "bpe"}} needs, got the byte 0x{error.object[error.start]:02x} in '
        f'{corpus.name}; convert it, or use {{"tokens": "bytes"}}'
    )


def _hold_out_end(train: Path, held_out: Path, tokenizer: Tokenizer, share: float, context: int) -> str:
    """Move the last documents, or the end of one, to `held_out`, and say so. Raises ConfigError if they are too few."""
    tokens = _map_tokens(train, tokenizer)
    if len(tokens) < 2 * (context + 1):
        raise ConfigError(
            f"recipe_options.context: expected at most {max(1, len(tokens) // 2 - 1):,} tokens, so that the data "
            f"({len(tokens):,} tokens) has a window to train on and one held out, got {context:,}"
        )
    wanted = max(context + 1, len(tokens) - max(context + 1, round(share * len(tokens))))
    ends = (
        int(end) + 1
        for first in range(0, len(tokens), BLOCK)
        for end in first + np.flatnonzero(tokens[first : first + BLOCK] == tokenizer.end)
    )
    usable = (end for end in ends if context < end < len(tokens) - context)
    place = min(usable, key=lambda end: abs(end - wanted), default=0)
    how = "the last documents held out" if place else "the end of the last one held out"
    place = place or wanted
    with open(held_out, "ab") as file:
        for first in range(place, len(tokens), BLOCK):
            file.write(tokens[first : first + BLOCK].tobytes())
    size = tokens.itemsize
    del tokens
    with open(train, "r+b") as file:
        file.truncate(place * size)
    return how


def _shard(file: Path, tokenizer: Tokenizer, context: int, name: str) -> Shard:
    tokens = _map_tokens(file, tokenizer)
    if len(tokens) <= context:
        raise ConfigError(
            f"recipe_options.context: expected fewer tokens than the {name} text has, which is {len(tokens):,}, "
            f"got {context:,}"
        )
    targets = tokens[1 : 1 + (len(tokens) - 1) // context * context]
    num_bytes = sum(tokenizer.num_bytes(targets[first : first + BLOCK]) for first in range(0, len(targets), BLOCK))
    return Shard(len(tokens), num_bytes / len(targets))


def _map_tokens(file: Path, tokenizer: Tokenizer) -> NDArray[Any]:
    """Map `file` into memory, read-only: what may be written counts as memory of the process's own."""
    kind = _type(tokenizer)
    if not file.stat().st_size:  # which cannot be mapped
        return np.empty(0, dtype=kind)
    return np.memmap(file, dtype=kind, mode="r")


def _type(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.dtype(np.uint8 if tokenizer.size <= 256 else np.int16)
