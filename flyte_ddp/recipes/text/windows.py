"""Windows of tokens in shards: `flyte-ddp shards --text` writes them, and recipe `text` reads them.

Each sample, in MosaicML's format, contains the tokens of a window and the next token. This module
imports no torch.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flyte_ddp.data.readers import Fields
from flyte_ddp.data.splits import SPLITS, describe_splits, read_note
from flyte_ddp.data.write import (
    begin_shards,
    compute_checksum,
    draw_order,
    encode_mds,
    write_shards,
)
from flyte_ddp.errors import ConfigError
from flyte_ddp.recipes.base import Recipe
from flyte_ddp.recipes.text.shards import FACTS, HELD_OUT, TRAIN, read_windows
from flyte_ddp.recipes.text.tokens import read_tokenizer
from flyte_ddp.storage import Storage, compute_sha256, redact_url

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

OPTIONS = "context", "tokens", "vocabulary"  # options of the recipe that change the samples
TOKENS = "tokens"  # name of a sample's only field


def write_windows(
    recipe: Recipe, source: str, destination: str, seed: int, shard_bytes: int
) -> str:
    """Write the windows of a text to shards of about `shard_bytes`, the training windows in a
    random order. Return a description.

    Raises:
        ConfigError: the recipe raised it, `source` has shards, or `destination` has other files.
        DataError: the recipe raised it.
    """
    with tempfile.TemporaryDirectory(prefix="text-") as place:
        directory = Path(place)
        lines = [recipe.prepare(source, directory)]
        files = directory / TRAIN, directory / HELD_OUT
        if not files[0].exists():
            raise ConfigError(f"source: expected text, got shards of it at {redact_url(source)}")
        tokenizer = read_tokenizer(directory / "tokenizer")
        checksums = [(file.name, 0, compute_sha256(str(file))) for file in files]
        note: dict[str, Any] = {
            **{name: getattr(recipe, name) for name in OPTIONS},
            "source": compute_checksum(checksums),
            "seed": seed,
            "shard size": shard_bytes,
            "tokenizer": tokenizer.files,
            "bytes per token": json.loads((directory / FACTS).read_text(encoding="utf-8")),
        }
        begin_shards(destination, note)
        for split, file in zip(SPLITS, files, strict=True):
            windows = read_windows(file, tokenizer, note["context"])
            count = len(windows[0])
            order = np.arange(count)
            if file.name != HELD_OUT:
                order = draw_order(count, seed)
            parts = np.array_split(order, min(count, -(-windows[0].nbytes // shard_bytes)))
            make = functools.partial(_make_shards, windows, parts)
            url = f"{destination.rstrip('/')}/{split}"
            lines.append(write_shards(url, len(parts), ".mds", make))
        return "\n".join(lines)


def _make_shards(
    windows: tuple[NDArray[Any], NDArray[Any]],
    parts: Sequence[NDArray[np.int64]],
    missing: Sequence[int],
) -> Iterator[tuple[int, bytes, int]]:
    inputs, targets = windows
    for number in missing:
        rows = np.concatenate([inputs[parts[number]], targets[parts[number], -1:]], axis=1)
        yield number, encode_mds(rows, TOKENS), len(rows)


def read_written(recipe: Recipe, source: str) -> dict[str, Any]:
    """Return the note of shards of windows; empty where `source` has no such shards.

    Raises:
        ConfigError: the shards were written with other options than the recipe's.
    """
    if not source:
        return {}
    note = read_note(Storage(source, "data"))
    if "tokenizer" not in note:
        return {}
    for name in OPTIONS:
        got = getattr(recipe, name)
        if note[name] != got:
            raise ConfigError(
                f"recipe_options.{name}: expected {note[name]!r}, with which the shards at "
                f"{redact_url(source)} were written, got {got!r}"
            )
    return note


def prepare_windows(source: str, note: Mapping[str, Any], directory: Path) -> str:
    """Write the list of the shards, and return a description. Raises the errors of `Shards`."""
    facts, description = describe_splits(Storage(source, "data"))
    facts |= note["bytes per token"]
    (directory / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    return f"{description}: windows of {note['context']:,} tokens"


def to_window(fields: Fields) -> tuple[Tensor, Tensor]:
    """Return the sample of a record: tokens, and the token that follows each."""
    import torch

    tokens = torch.from_numpy(fields[TOKENS].copy())
    return tokens[:-1], tokens[1:]
