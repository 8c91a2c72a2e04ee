"""Shards of images, written from folders: `train/` and `val/`, and beside them a note with the
names of the classes.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import logging
import os
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from flyte_ddp.data.source import CONCURRENT_READS
from flyte_ddp.data.splits import SPLITS
from flyte_ddp.data.write import begin_shards, compute_checksum, draw_order, write_shards
from flyte_ddp.recipes.contents import report_left_out
from flyte_ddp.recipes.image_folder.files import (
    File,
    FileReader,
    UnreadableImage,
    list_images,
)
from flyte_ddp.recipes.image_folder.index import split_images

CLASS = "cls"  # WebDataset's name for the field with the number of a sample's class
MIN_IMAGES = 2  # training images that each class must have

logger = logging.getLogger(__name__)


def write_images(
    source: str, destination: str, seed: int, shard_bytes: int, held_out: float, skips: bool
) -> str:
    """Write the images in the folders of `source` to shards of about `shard_bytes`. Return a
    description.

    Args:
        held_out: share of the images that is held out if there is no directory of held-out images.
        skips: leave out an image that cannot be read, with a warning.

    Raises:
        UnreadableImage: an image cannot be read.
        DataError: `list_images` or `split_images` raised it.
        ConfigError: `destination` has other files.
    """
    url, files, left_out = list_images(source)
    train, test, description = split_images(source, files, left_out, held_out, MIN_IMAGES)
    classes = sorted({label for label, _ in train})
    note = {
        "source": compute_checksum(map(dataclasses.astuple, files)),
        "seed": seed,
        "shard size": shard_bytes,
        "held-out share": held_out,
        "classes": classes,
    }
    begin_shards(destination, note)
    reader, lines = FileReader(url), [description]
    skipped = None
    if skips:
        skipped = left_out
    for split, images in zip(SPLITS, (train, test), strict=True):
        order = [
            (classes.index(label), file)
            for label, file in map(images.__getitem__, draw_order(len(images), seed).tolist())
        ]
        shards = _cut([file for _, file in order], shard_bytes)
        make = functools.partial(_make_tars, reader, order, shards, skipped)
        lines.append(write_shards(f"{destination.rstrip('/')}/{split}", len(shards), ".tar", make))
    return "\n".join(lines) + report_left_out(left_out)


def _cut(files: Sequence[File], shard_bytes: int) -> list[list[int]]:
    """Return the places in `files` of each shard."""
    sizes = np.array([max(0, file.size) for file in files])
    numbers = (np.cumsum(sizes) - sizes) // shard_bytes
    ends = np.flatnonzero(np.diff(numbers)) + 1
    return [places.tolist() for places in np.split(np.arange(len(files)), ends)]


def _make_tars(
    reader: FileReader,
    order: Sequence[tuple[int, File]],
    shards: Sequence[Sequence[int]],
    left_out: Counter[str] | None,
    missing: Sequence[int],
) -> Iterator[tuple[int, bytes, int]]:
    """Yield number, contents and number of samples of each shard in `missing`.

    Args:
        order: the class and the file of each image, in the order of the shards.
        left_out: counts the images that cannot be read; None if such an image is an error.
    """

    def read(image: int) -> bytes:
        file = order[image][1]
        try:
            contents = reader.read(file)
            reader.decode(file, contents)
            return contents
        except UnreadableImage as error:
            if left_out is None:
                raise
            logger.warning("%s; it is left out", error)
            return b""

    with ThreadPoolExecutor(CONCURRENT_READS) as threads:
        for number in missing:
            shard, samples = io.BytesIO(), 0
            with tarfile.open(fileobj=shard, mode="w") as tar:
                images = shards[number]
                for image, contents in zip(images, threads.map(read, images), strict=True):
                    if contents:
                        label, file = order[image]
                        suffix = os.path.splitext(file.name)[1].lower() or ".image"
                        _add(tar, f"{image:08d}{suffix}", contents)
                        _add(tar, f"{image:08d}.{CLASS}", str(label).encode())
                        samples += 1
                    elif left_out is not None:
                        left_out["unreadable"] += 1
            yield number, shard.getvalue(), samples


def _add(tar: tarfile.TarFile, name: str, contents: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(contents)
    tar.addfile(member, io.BytesIO(contents))
