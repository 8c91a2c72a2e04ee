"""The shards of a recipe's two data sets, and the note of `flyte-ddp shards` beside them.

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from flyte_ddp.data.readers import Fields
from flyte_ddp.data.shards import Shards
from flyte_ddp.storage import Storage

NOTE = "flyte_ddp_shards.json"
SPLITS = "train", "val"  # directories of the training and the held-out samples


def read_note(storage: Storage) -> dict[str, Any]:
    """Return the note beside the shards at a place; empty if there is no note."""
    try:
        return dict(json.loads(storage.read(NOTE)))
    # The note is missing or damaged.
    except (FileNotFoundError, ValueError, TypeError):
        return {}


def open_splits(
    url: str, *transforms: Callable[[Fields], Any], **options: Any
) -> tuple[Shards, Shards]:
    """Return the training and the held-out shards at `url`.

    Args:
        transforms: a transform for the training samples and one for the held-out samples; nothing
            to get the samples' fields.
        options: options of both `Shards`.
    """
    train, held_out = (
        Shards(f"{url}/{split}", transform=transform, **options)
        for split, transform in zip(SPLITS, transforms or (None, None), strict=True)
    )
    return train, held_out


def describe_splits(storage: Storage) -> tuple[dict[str, Any], str]:
    """Return plain values that distinguish the shards at a place from others, and a description.
    Raises as `Shards` does.
    """
    splits = open_splits(storage.url)
    train, held_out = map(len, splits)
    facts = {"url": storage.url, "shards": [each.describe_shards() for each in splits]}
    return facts, (
        f"{train:,} training and {held_out:,} held-out samples in shards, read from {storage.url}"
    )
