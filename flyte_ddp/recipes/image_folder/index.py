"""The index of the images: each with its class, for training or held out. Written once, read by every rank.

Does not know how files are listed or read, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import DataError
from flyte_ddp.recipes.image_folder.files import File

if TYPE_CHECKING:
    from numpy.typing import NDArray

TRAIN, HELD_OUT = "train", ("val", "valid", "validation", "test")  # directories; of the held-out ones the first counts
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
FILES = ("index.json", "train.npz", "test.npz")

Labelled = Sequence[tuple[str, File]]  # images, each with the name of its class


@dataclass(frozen=True)
class ImageList:
    """The images of one split.

    Arrays of bytes, because every loader process has them: Python objects would take ten times the memory.
    """

    names: NDArray[Any]  # (N,) relative to the URL
    sizes: NDArray[Any]  # (N,) bytes
    versions: NDArray[Any]  # (N,)
    labels: NDArray[Any]  # (N,) numbers of classes

    def __len__(self) -> int:
        return len(self.labels)

    def file(self, sample: int) -> File:
        return File(os.fsdecode(self.names[sample]), int(self.sizes[sample]), os.fsdecode(self.versions[sample]))


@dataclass(frozen=True)
class Index:
    """The contents of the files of `write_index`."""

    url: str
    image_size: int  # pixels
    classes: list[str]
    train: ImageList
    test: ImageList


def write_index(directory: Path, url: str, image_size: int, train: Labelled, test: Labelled) -> None:
    """Write the index to `directory`, for `read_index`."""
    import numpy as np

    classes = sorted({label for label, _ in train})
    numbers = {name: number for number, name in enumerate(classes)}
    for name, images in zip(FILES[1:], (train, test), strict=True):
        np.savez(
            directory / name,
            names=np.array([os.fsencode(file.name) for _, file in images]),
            sizes=np.array([file.size for _, file in images]),
            versions=np.array([os.fsencode(file.version) for _, file in images]),
            labels=np.array([numbers[label] for label, _ in images]),
        )
    (directory / FILES[0]).write_text(json.dumps({"url": url, "image_size": image_size, "classes": classes}))


def read_index(directory: Path) -> Index:
    import numpy as np

    lists = []
    for name in FILES[1:]:
        with np.load(directory / name) as arrays:
            lists.append(ImageList(**arrays))
    return Index(**json.loads((directory / FILES[0]).read_text()), train=lists[0], test=lists[1])


def split_images(where: str, files: Sequence[File], share: float, min_images: int) -> tuple[Labelled, Labelled, str]:
    """Return the training and the held-out images among `files`, and a description for the report.

    If there are directories `train` and one of `HELD_OUT`, the folders in them are the classes. Else the top folders
    are the classes, and `share` of their images is held out. An image's side depends on its name only, so it does not
    change when others are added.

    Args:
        where: the URL, for errors.

    Raises:
        DataError: no images, fewer than two classes, a class that one side lacks, or one with fewer than `min_images`.
    """
    images = [file for file in files if file.name.lower().endswith(SUFFIXES) and not _is_hidden(file.name)]
    if not images:
        raise DataError(f"data: expected images ({', '.join(SUFFIXES)}), got {len(files):,} other files in {where}")
    tops = {file.name.split("/")[0] for file in images if "/" in file.name}
    if TRAIN in tops and tops <= {TRAIN, *HELD_OUT}:
        held_out = next((name for name in HELD_OUT if name in tops), "")
        if not held_out:
            raise DataError(
                f"data: expected one of {', '.join(HELD_OUT)} beside {TRAIN}/, got {TRAIN}/ only in {where}"
            )
        train, test = _in_folders(images, TRAIN + "/"), _in_folders(images, held_out + "/")
        how = f"in {held_out}/"
    else:
        labelled = _in_folders(images, "")
        train = [pair for pair in labelled if _hash_to_unit(pair[1].name) >= share]
        test = [pair for pair in labelled if _hash_to_unit(pair[1].name) < share]
        how = f"{share:g} of all, by name"
    counts = _check_classes(where, train, test, how, min_images)
    others = len(files) - len(train) - len(test)
    left_out = f", {others:,} other files left out" if others else ""
    return (
        train,
        test,
        f"{len(train):,} training and {len(test):,} held-out images ({how}) of {len(counts):,} classes{left_out}",
    )


def _check_classes(where: str, train: Labelled, test: Labelled, how: str, min_images: int) -> Mapping[str, int]:
    """Return the number of training images of each class, after checking both splits."""
    counts, held_out = (Counter(label for label, _ in images) for images in (train, test))
    found = sorted({*counts, *held_out})
    if len(found) < 2:
        names = ", ".join(map(repr, found)) or "no class"
        raise DataError(f"data: expected folders with images of at least two classes, got {names} in {where}")
    for lacking, kind in ((counts, "training"), (held_out, f"held-out ({how})")):
        if missing := [repr(name) for name in found if name not in lacking]:
            more = f" and {len(missing) - 5} others" if len(missing) > 5 else ""
            raise DataError(
                f"data: expected training and held-out images of each class, got no {kind} images of class "
                f"{', '.join(missing[:5])}{more} in {where}"
            )
    if few := [name for name in found if counts[name] < min_images]:
        raise DataError(
            f"data: expected at least {min_images} training images of each class (min_images), got "
            f"{counts[few[0]]} of class {few[0]!r} in {where}"
        )
    return counts


def _in_folders(images: Sequence[File], directory: str) -> list[tuple[str, File]]:
    """Return those of `images` in a folder below `directory`, each with the folder's name."""
    start = len(directory)
    return [
        (file.name[start:].split("/")[0], file)
        for file in images
        if file.name.startswith(directory) and "/" in file.name[start:]
    ]


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "__MACOSX")) for part in name.split("/"))


def _hash_to_unit(name: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends on the name only."""
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") / (1 << 64)
