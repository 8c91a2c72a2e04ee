"""The tokens of a corpus as files that ranks map into memory: one for training, one held out.
Imports no torch.

A window is a view of its file, so that data of any size takes no memory of a rank's own, and no
time to load.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.recipes.contents import report_left_out
from flyte_ddp.recipes.text.corpus import MAX_PIECE, Corpus, Piece
from flyte_ddp.recipes.text.tokens import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRAIN_FILE, HELD_OUT_FILE = "train.bin", "held_out.bin"
# JSON: bytes of text per token of each split; also the shards' URL, if the data are in shards
FACTS_FILE = "text.json"
BATCH = 1 << 20  # characters of text that are tokenized at once
BPE_SAMPLE = 64 << 20  # bytes of text from which a BPE is made
BLOCK = 1 << 20  # tokens of a file that are searched at once
# pieces of documents; True beside a piece means that its document is held out
Batch = list[tuple[Piece, bool]]


def prepare_shards(
    corpus: Corpus, directory: Path, tokenizer: Tokenizer, held_out: float, context: int
) -> str:
    """Tokenize `corpus` into `directory`, and describe it.

    Documents are held out by a hash of their beginning, so that copies of a document lie on one
    side, and a document stays on its side when others are added.

    Args:
        held_out: share of the documents.
        context: tokens of a window.

    Raises:
        DataError: the corpus is empty.
        ConfigError: the window is longer than one of the files.
    """
    paths = directory / TRAIN_FILE, directory / HELD_OUT_FILE
    end = tokenizer.dtype.type(tokenizer.end).tobytes()
    num_documents, num_bytes = [0, 0], [0.0, 0.0]  # counts of the training and the held-out side
    with open(paths[0], "wb") as train_file, open(paths[1], "wb") as held_out_file:
        for batch in divide(corpus, held_out):
            encoded = tokenizer.encode([piece.text for piece, _ in batch])
            for (piece, side), tokens in zip(batch, encoded, strict=True):
                (train_file, held_out_file)[side].write(tokens.tobytes() + end * piece.ends)
                num_documents[side] += piece.ends
                num_bytes[side] += len(piece.text.encode())
    if not sum(num_documents):
        raise DataError(
            f"data: expected text, got {corpus.name}, which is "
            f"empty{report_left_out(corpus.left_out)}"
        )
    how = f"{num_documents[1]:,} of them held out"
    sizes = _count_tokens(paths, tokenizer)
    if sizes[1] <= context:
        how = _hold_out_end(*paths, tokenizer, held_out, context)
        sizes = _count_tokens(paths, tokenizer)
        num_bytes = [sum(num_bytes) * size / sum(sizes) for size in sizes]
    if sizes[0] <= context:
        raise ConfigError(
            "recipe_options.context: expected fewer tokens than the training text has, which is "
            f"{sizes[0]:,}, got {context:,}"
        )
    facts = {
        name: count / size
        for name, count, size in zip(("train", "held_out"), num_bytes, sizes, strict=True)
    }
    (directory / FACTS_FILE).write_text(json.dumps(facts), encoding="utf-8")
    return (
        f"text from {corpus.name}: {sum(num_documents):,} document{'s'[: sum(num_documents) > 1]}, "
        f"{how}; {sizes[0]:,} tokens of {tokenizer.size:,} kinds to train, {sizes[1]:,} held "
        f"out{report_left_out(corpus.left_out)}"
    )


def sample_texts(corpus: Corpus, held_out: float) -> Iterator[str]:
    """Yield training texts, some `BPE_SAMPLE` bytes from all over a large corpus."""
    share = min(1.0, BPE_SAMPLE / max(1, corpus.num_bytes()))
    texts = (piece.text for batch in divide(corpus, held_out) for piece, side in batch if not side)
    for number, text in enumerate(texts):
        if int((number + 1) * share) > int(number * share):
            yield text


def read_windows(
    file: Path, tokenizer: Tokenizer, context: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return inputs and targets (N, context): views of `file`. Each target is the token after its
    input.

    Every token is a target once, except the first token and a rest at the end.
    """
    tokens = _map_tokens(file, tokenizer)
    count = (len(tokens) - 1) // context
    return tuple(
        tokens[first : first + count * context].reshape(count, context) for first in (0, 1)
    )  # type: ignore[return-value]


def divide(corpus: Corpus, held_out: float) -> Iterator[Batch]:
    """Yield the pieces of all documents that are not empty."""
    batch: Batch = []
    side, first, size = None, b"", 0  # A document's side is known from its first text on.
    for piece in corpus.pieces():
        if side is None and piece.text:
            digest = hashlib.sha256(piece.text[:MAX_PIECE].encode()).digest()
            first = first or digest  # The first document always trains.
            side = digest != first and int.from_bytes(digest[:8], "big") < held_out * 2**64
        if side is not None:
            batch.append((piece, side))
            size += len(piece.text)
        if piece.ends:
            side = None
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def _hold_out_end(
    train: Path, held_out: Path, tokenizer: Tokenizer, share: float, context: int
) -> str:
    """Move the last documents, or the end of the last one, to `held_out`. Return a description.
    Raises ConfigError if there are too few tokens.
    """
    tokens = _map_tokens(train, tokenizer)
    if len(tokens) < 2 * (context + 1):
        raise ConfigError(
            f"recipe_options.context: expected at most {max(1, len(tokens) // 2 - 1):,} tokens, "
            "so that the data "
            f"({len(tokens):,} tokens) has a window to train on and one held out, got {context:,}"
        )
    wanted = max(context + 1, len(tokens) - max(context + 1, round(share * len(tokens))))
    place = 0
    for first in range(0, len(tokens), BLOCK):
        for index in np.flatnonzero(tokens[first : first + BLOCK] == tokenizer.end):
            end = first + int(index) + 1
            is_usable = context < end < len(tokens) - context
            if is_usable and (not place or abs(end - wanted) < abs(place - wanted)):
                place = end
    how = "the last documents held out"
    if not place:
        how = "the end of the last one held out"
        place = wanted
    with open(held_out, "ab") as file:
        tokens[place:].tofile(file)
    os.truncate(train, place * tokens.itemsize)
    return how


def _count_tokens(files: Sequence[Path], tokenizer: Tokenizer) -> list[int]:
    return [file.stat().st_size // tokenizer.dtype.itemsize for file in files]


def _map_tokens(file: Path, tokenizer: Tokenizer) -> NDArray[Any]:
    """Map `file` into memory. Writes to the map stay in this process.

    The map is writable because windows go to a recipe's own methods, and a write to a read-only map
    would end the process.
    """
    if not file.stat().st_size:
        return np.empty(0, tokenizer.dtype)
    # With a reserve the kernel would refuse a file that is larger than the memory.
    flags = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0)
    with open(file, "rb") as opened:
        contents = mmap.mmap(opened.fileno(), 0, flags, mmap.PROT_READ | mmap.PROT_WRITE)
    return np.frombuffer(contents, tokenizer.dtype)
