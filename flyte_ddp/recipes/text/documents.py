"""Documents and chats as shards of tokens, which `Packed` puts into rows.

A document begins with the token that ends a text, so that all of its text is learned. A long one
lies in several records. Each of these repeats the last token of the record before. Imports no
torch.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flyte_ddp.config.extras import require
from flyte_ddp.data.documents import LABELS, NO_TARGET, TOKENS
from flyte_ddp.data.packed import Packed
from flyte_ddp.data.source import Source
from flyte_ddp.data.splits import SPLITS, open_splits
from flyte_ddp.data.write import write_parquet
from flyte_ddp.errors import ConfigError, DataError
from flyte_ddp.recipes.contents import report_left_out
from flyte_ddp.recipes.text.chats import ChatTemplate, read_messages
from flyte_ddp.recipes.text.corpus import CHATS, Corpus
from flyte_ddp.recipes.text.token_files import Batch, divide
from flyte_ddp.recipes.text.tokens import Tokenizer
from flyte_ddp.storage import SHORT_TIMEOUT

if TYPE_CHECKING:
    from torch import Tensor

RECORD = 8192  # about so many tokens of a long document lie in a record
SHARD_BYTES = 64 << 20


@dataclass(frozen=True)
class Record:
    """A document, or a part of one."""

    is_held_out: bool
    fields: Mapping[str, Any]  # the tokens, and a chat's labels
    num_targets: int
    num_bytes: int  # bytes of the text that is learned


def write_rows(
    corpus: Corpus,
    directory: Path,
    tokenizer: Tokenizer,
    samples: str,
    held_out: float,
    context: int,
) -> tuple[dict[str, float], str]:
    """Tokenize documents or chats into shards in `directory`. Return the bytes of text per token
    that is learned, by split, and a description.

    Raises:
        DataError: there are none, or a chat cannot be read.
        ConfigError: no document is held out, or the tokenizer has no chat template.
    """
    require(f"recipe_options.samples: {samples}", "pyarrow")
    import pyarrow

    batches = divide(corpus, held_out)
    if samples == CHATS:
        names, records = [TOKENS, LABELS], _encode_chats(batches, tokenizer, corpus.name)
    else:
        size = context * max(1, RECORD // context)
        names, records = [TOKENS], _encode_documents(batches, tokenizer, size)
    schema = pyarrow.schema([(name, pyarrow.list_(pyarrow.int32())) for name in names])
    with tempfile.TemporaryDirectory(prefix="text-") as place:
        num_bytes, num_targets = _write_records(records, place, schema)
        if not any(num_targets):
            got = f"{corpus.name}, which has none{report_left_out(corpus.left_out)}"
            raise DataError(f"data: expected {samples}, got {got}")
        if not all(num_targets):
            raise ConfigError(
                f"recipe_options.held_out: expected a share that holds out some of the {samples}, "
                f"got {held_out:g}: give a larger one, or more {samples}"
            )
        for split in SPLITS:
            source = Source(f"{place}/{split}", SHORT_TIMEOUT)
            write_parquet(source, f"{directory}/{split}", 0, SHARD_BYTES, None, samples)
    lines = []
    for split, packed in zip(SPLITS, open_rows(str(directory), samples, context), strict=True):
        packed.prepare()
        lines.append(f"{split}: {packed.num_targets:,} tokens to learn in {len(packed):,} rows")
    facts = {
        name: size / count
        for name, size, count in zip(("train", "held_out"), num_bytes, num_targets, strict=True)
    }
    left_out = report_left_out(corpus.left_out)
    return facts, f"{samples} from {corpus.name}{left_out}; {'; '.join(lines)}"


def _write_records(
    records: Iterator[list[Record]], place: str, schema: Any
) -> tuple[list[int], list[int]]:
    """Write a file of records for each split. Return the bytes and the targets in each."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    num_bytes, num_targets = [0, 0], [0, 0]
    with contextlib.ExitStack() as stack:
        writers = []
        for split in SPLITS:
            Path(place, split).mkdir()
            writer = ParquetWriter(f"{place}/{split}/0.parquet", schema)
            writers.append(stack.enter_context(writer))
        for found in records:
            for side, writer in enumerate(writers):
                own = [each for each in found if each.is_held_out == side]
                rows = [each.fields for each in own]
                writer.write_table(pyarrow.Table.from_pylist(rows, schema))
                num_bytes[side] += sum(each.num_bytes for each in own)
                num_targets[side] += sum(each.num_targets for each in own)
    return num_bytes, num_targets


def open_rows(
    url: str, samples: str, context: int, cache_gib: float | None = None
) -> tuple[Packed, Packed]:
    """Return the training and the held-out rows of the shards at `url`."""
    labels = None
    if samples == CHATS:
        labels = LABELS
    options: dict[str, Any] = {"labels": labels, "overlong": "continue", "transform": to_row}
    train, held_out = open_splits(url, cache_gib=cache_gib)
    return Packed(train, context + 1, **options), Packed(held_out, context + 1, **options)


def to_row(row: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return inputs and targets of a row: tokens and their positions, (2, context), and the token
    after each of them, (context,), or -100.
    """
    import torch

    inputs = torch.stack([row["input_ids"][:-1], row["position_ids"][:-1]])
    return inputs, row["labels"][1:]


def _encode_documents(
    batches: Iterator[Batch], tokenizer: Tokenizer, size: int
) -> Iterator[list[Record]]:
    """Yield the records of documents, with up to `size` targets each."""
    end = np.array([tokenizer.end], np.int32)
    last = end
    for batch in batches:
        records = []
        encoded = tokenizer.encode([piece.text for piece, _ in batch])
        for (piece, side), own in zip(batch, encoded, strict=True):
            tokens = np.concatenate([last, own, end[: piece.ends]])
            num_bytes = len(piece.text.encode())
            for begin in range(0, len(tokens) - 1, size):
                part = tokens[begin : begin + size + 1]
                records.append(Record(side, {TOKENS: part}, len(part) - 1, num_bytes))
                num_bytes = 0
            last = tokens[-1:]
        yield records


def _encode_chats(
    batches: Iterator[Batch], tokenizer: Tokenizer, name: str
) -> Iterator[list[Record]]:
    """Yield the records of chats: lines of JSON."""
    template, number, line = ChatTemplate(tokenizer), 0, ""
    for batch in batches:
        records = []
        for piece, side in batch:
            line += piece.text
            if not piece.ends:
                continue
            number += 1
            try:
                parts = template.split(read_messages(line))
            except DataError as error:
                raise DataError(f"data: chat {number} of {name}: {error}") from error
            tokens: list[int] = []
            labels: list[int] = []
            for own, (_, is_answer) in zip(template.encode(parts), parts, strict=True):
                tokens += own
                learned = own
                if not is_answer:
                    learned = len(own) * [NO_TARGET]
                labels += learned
            num_targets = len(labels) - labels.count(NO_TARGET)
            num_bytes = sum(len(text.encode()) for text, is_answer in parts if is_answer)
            fields = {TOKENS: tokens, LABELS: labels}
            records.append(Record(side, fields, num_targets, num_bytes))
            line = ""
        yield records
