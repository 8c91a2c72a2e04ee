"""Write images from folders to shards: tar files with many images, in WebDataset's format.

At the destination, `train/` and `val/` contain the shards of the training and of the held-out
images. Beside them lies the note (`data.splits.NOTE`): a JSON file with the names of the classes.
This module imports no torch.
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

CLASS = "cls"  # WebDataset's file extension for the number of an image's class
MIN_IMAGES = 2  # training images that each class must have

logger = logging.getLogger(__name__)


def write_images(
    source: str,
    destination: str,
    seed: int,
    shard_bytes: int,
    held_out: float,
    leaves_out_unreadable: bool,
) -> str:
    """Write the images in the folders of `source` to shards of about `shard_bytes` bytes, in a
    random order. Return a description.

    Args:
        held_out: share of the images that is held out if `source` has no folder of held-out images.
        leaves_out_unreadable: leave out an image that cannot be read, with a warning.

    Raises:
        UnreadableImage: an image cannot be read, and `leaves_out_unreadable` is False.
        DataError: there are no images, or the folders do not show each image's class and split.
        ConfigError: `destination` contains files that are not these shards.
    """
    url, files, left_out = list_images(source)
    train, val, description = split_images(source, files, left_out, held_out, MIN_IMAGES)
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
    for split, images in zip(SPLITS, (train, val), strict=True):
        ordered = []
        for place in draw_order(len(images), seed):
            class_name, file = images[place]
            ordered.append((classes.index(class_name), file))
        shards = _assign_shards([file for _, file in ordered], shard_bytes)
        encode = functools.partial(
            _encode_shards, reader, ordered, shards, left_out, leaves_out_unreadable
        )
        url = f"{destination.rstrip('/')}/{split}"
        lines.append(write_shards(url, len(shards), ".tar", encode))
    return "\n".join(lines) + report_left_out(left_out)


def _assign_shards(files: Sequence[File], shard_bytes: int) -> list[list[int]]:
    """Return the indices in `files` of each shard's files.

    The files lie one after another. A file belongs to shard k if it begins in the k-th piece of
    `shard_bytes` bytes. A piece in which no file begins is no shard.
    """
    shards: list[list[int]] = []
    current = -1  # index of the piece in which the files of the current shard begin
    num_bytes = 0  # bytes of all files before the current file
    for index, file in enumerate(files):
        if num_bytes // shard_bytes != current:
            current = num_bytes // shard_bytes
            shards.append([])
        shards[-1].append(index)
        num_bytes += max(0, file.size)  # -1 stands for an unknown size
    return shards


def _encode_shards(
    reader: FileReader,
    ordered: Sequence[tuple[int, File]],
    shards: Sequence[Sequence[int]],
    left_out: Counter[str],
    leaves_out_unreadable: bool,
    missing: Sequence[int],
) -> Iterator[tuple[int, bytes, int]]:
    """Yield number, contents and number of samples of each shard in `missing`: the shards that
    `write_shards` has not found at the destination.

    Args:
        ordered: (number of the class, file) of each image.
        shards: the indices in `ordered` of each shard's images.
        left_out: number of files that are left out, by reason. Unreadable images are added to it.
    """

    def read(index: int) -> bytes | None:
        """Return the contents of an image's file; None if the image is left out."""
        file = ordered[index][1]
        try:
            contents = reader.read(file)
            reader.decode(file, contents)  # only a check: the shard gets the file unchanged
        except UnreadableImage as error:
            if not leaves_out_unreadable:
                raise
            logger.warning("%s; it is left out", error)
            return None
        return contents

    with ThreadPoolExecutor(CONCURRENT_READS) as threads:
        for number in missing:
            shard, num_samples = io.BytesIO(), 0
            with tarfile.open(fileobj=shard, mode="w") as tar:
                indices = shards[number]
                for index, contents in zip(indices, threads.map(read, indices), strict=True):
                    if contents is None:
                        left_out["unreadable"] += 1
                        continue
                    class_number, file = ordered[index]
                    suffix = os.path.splitext(file.name)[1].lower() or ".image"
                    _add_member(tar, f"{index:08d}{suffix}", contents)
                    _add_member(tar, f"{index:08d}.{CLASS}", str(class_number).encode())
                    num_samples += 1
            yield number, shard.getvalue(), num_samples


def _add_member(tar: tarfile.TarFile, name: str, contents: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(contents)
    tar.addfile(member, io.BytesIO(contents))
