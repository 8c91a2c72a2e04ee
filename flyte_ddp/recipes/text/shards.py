"""Shards of tokenized text: `flyte-ddp shards --text` writes them, and recipe `text` reads them.
They have windows or documents.

A window is `context` consecutive tokens of the text. Each sample contains the tokens of a window
and the token after it. A shard is a file with many samples, in MosaicML's format. Beside the shards
lies the note (`data.splits.NOTE`): a JSON file with the options and the tokenizer of the windows.

Importing this module imports no torch.
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flyte_ddp.data.documents import TOKENS
from flyte_ddp.data.readers import Fields
from flyte_ddp.data.shards import Shards
from flyte_ddp.data.source import Source
from flyte_ddp.data.splits import SPLITS, describe_splits, read_note
from flyte_ddp.data.write import (
    PARQUET,
    begin_shards,
    compute_checksum,
    draw_order,
    encode_mds,
    write_parquet,
    write_shards,
)
from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes.base import Recipe
from flyte_ddp.recipes.text.corpus import WINDOWS
from flyte_ddp.recipes.text.documents import open_rows
from flyte_ddp.recipes.text.token_files import FACTS_FILE, HELD_OUT_FILE, TRAIN_FILE, read_windows
from flyte_ddp.recipes.text.tokens import read_tokenizer
from flyte_ddp.storage import SHORT_TIMEOUT, Storage, compute_sha256, redact_url

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

# options of recipe `text` that change the samples
SAMPLE_OPTIONS = "samples", "context", "tokens", "vocabulary"


class Windows(Shards):
    """Windows of text. Each counts as one target."""

    def count_targets(self, windows: Sequence[int]) -> int:
        return len(windows)


def write_text(recipe: Recipe, source: str, destination: str, seed: int, shard_bytes: int) -> str:
    """Write the windows, documents or chats of the text at `source` to shards of about
    `shard_bytes` bytes, those for training in a random order. Return a description.

    Raises:
        ConfigError: the recipe's options do not fit the text, `source` contains shards, or
            `destination` contains files that are not these shards.
        DataError: `source` contains no text that can be read.
    """
    with tempfile.TemporaryDirectory(prefix="text-") as place:
        directory = Path(place)
        lines = [recipe.prepare(source, directory)]
        facts = json.loads((directory / FACTS_FILE).read_text("utf-8"))
        if "url" in facts:
            raise ConfigError(f"source: expected text, got shards of it at {redact_url(source)}")
        tokenizer = read_tokenizer(directory / "tokenizer")
        options = {name: getattr(recipe, name) for name in SAMPLE_OPTIONS}
        samples = options["samples"]
        if samples == WINDOWS:  # The note is that of 0.2.0, so that its shards can be completed.
            del options["samples"]
        token_files = [directory / TRAIN_FILE, directory / HELD_OUT_FILE]
        if samples != WINDOWS:
            token_files = sorted(directory.glob(f"*/*{PARQUET}"))
        # (name, size, version) of each file. The checksum is the version, and no size is needed.
        versions = [(file.name, 0, compute_sha256(str(file))) for file in token_files]
        note: dict[str, Any] = {
            **options,
            "source": compute_checksum(versions),
            "seed": seed,
            "shard size": shard_bytes,
            "tokenizer": tokenizer.files,
            # by split: {"train": 4.3, "held_out": 4.2}
            "bytes per token": facts,
        }
        begin_shards(destination, note)
        url = destination.rstrip("/")
        if samples == WINDOWS:
            for split, file in zip(SPLITS, token_files, strict=True):
                inputs, targets = read_windows(file, tokenizer, note["context"])
                order = np.arange(len(inputs))
                if file.name == TRAIN_FILE:
                    order = draw_order(len(inputs), seed)
                lines.append(_write_windows(inputs, targets, order, f"{url}/{split}", shard_bytes))
        else:
            for split in SPLITS:
                given = Source(str(directory / split), SHORT_TIMEOUT)
                write_parquet(given, f"{url}/{split}", seed, shard_bytes, None, note["source"])
            lines += [each.prepare() for each in open_rows(url, samples, note["context"])]
        return "\n".join(lines)


def _write_windows(
    inputs: NDArray[Any], targets: NDArray[Any], order: NDArray[Any], url: str, shard_bytes: int
) -> str:
    """Write the windows in this order to shards at `url`. Return a description."""
    num_shards = min(len(order), math.ceil(inputs.nbytes / shard_bytes))
    windows_of_shards = np.array_split(order, num_shards)
    encode = functools.partial(_encode_shards, inputs, targets, windows_of_shards)
    return write_shards(url, num_shards, ".mds", encode)


def _encode_shards(
    inputs: NDArray[Any],
    targets: NDArray[Any],
    windows_of_shards: Sequence[NDArray[np.int64]],
    missing: Sequence[int],
) -> Iterator[tuple[int, bytes, int]]:
    """Yield number, contents and number of samples of each shard in `missing`: the shards that
    `write_shards` has not found at the destination.

    Args:
        inputs, targets: the windows, (N, context).
        windows_of_shards: numbers of the windows in each shard.
    """
    for number in missing:
        windows = windows_of_shards[number]
        samples = np.concatenate([inputs[windows], targets[windows, -1:]], axis=1)
        yield number, encode_mds(samples, TOKENS), len(samples)


def read_text_note(recipe: Recipe, source: str) -> dict[str, Any]:
    """Return the note beside the shards at `source`; empty where `source` contains no shards of
    windows.

    Raises:
        ConfigError: the recipe has other options than the shards.
    """
    if not source:
        return {}
    note = read_note(Storage(source, "data"))
    if "tokenizer" not in note:  # shards of another kind, such as images
        return {}
    for name in SAMPLE_OPTIONS:
        got = getattr(recipe, name)
        expected = note.get(name, WINDOWS)
        if expected != got:
            raise ConfigError(
                f"recipe_options.{name}: expected {expected!r}, as in the shards at "
                f"{redact_url(source)}, got {got!r}"
            )
    return note


def open_windows(url: str, cache_gib: float | None) -> tuple[Windows, Windows]:
    """Return the training and the held-out windows of the shards at `url`."""
    train, held_out = (
        Windows(f"{url}/{split}", transform=to_window, cache_gib=cache_gib) for split in SPLITS
    )
    return train, held_out


def prepare_written(source: str, note: Mapping[str, Any], directory: Path) -> str:
    """Write the place of the shards to a file in `directory`, which `Text.datasets` reads. Return a
    description.

    Raises:
        DataError, StorageUnavailable: the shards cannot be read; see `Shards`.
    """
    found, description = describe_splits(Storage(source, "data"))
    found |= note["bytes per token"]
    (directory / FACTS_FILE).write_text(json.dumps(found), encoding="utf-8")
    return f"{description}: {note.get('samples', WINDOWS)} in rows of {note['context']:,} tokens"


def to_window(fields: Fields) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets (context,) of a sample: tokens, and the token after each
    of them.
    """
    import torch

    tokens = torch.from_numpy(fields[TOKENS].copy())
    return tokens[:-1], tokens[1:]
