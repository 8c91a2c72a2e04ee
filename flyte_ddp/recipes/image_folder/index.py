"""The index of the images: each with its class, for training or held out. It is written once and
read by every rank.

This module does not know how files are listed or read, and imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import DataError, abbreviate
from flyte_ddp.recipes.contents import report_left_out
from flyte_ddp.recipes.image_folder.files import File

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FILLER = "(?:images?|imgs?|pictures?|photos?|data|dataset|set|split|seg|folder)*"
_HELD_OUT = "val|valid|validate|validation|dev|eval|evaluation|heldout|holdout"
# Patterns for the names of directories; only letters count. "test" holds out if there is no "val".
SPLITS = {
    "train": re.compile(f"{_FILLER}(?:train|training|trn){_FILLER}"),
    "val": re.compile(f"{_FILLER}(?:{_HELD_OUT}){_FILLER}"),
    "test": re.compile(f"{_FILLER}(?:test|testing|tst){_FILLER}"),
}
MAX_NAMES = 10  # number of folders or classes that a description names
FILES = ("index.json", "train.npz", "test.npz")

Labelled = Sequence[tuple[str, File]]  # images, each with the name of its class


@dataclass(frozen=True)
class ImageList:
    """The images of one split.

    The fields are arrays of bytes because every loader process has them. Python objects would take
    ten times the memory.
    """

    names: NDArray[Any]  # (N,) paths below the URL
    sizes: NDArray[Any]  # (N,) bytes
    versions: NDArray[Any]  # (N,) ETags or times of change
    labels: NDArray[Any]  # (N,) numbers of classes

    def __len__(self) -> int:
        return len(self.labels)

    def file(self, sample: int) -> File:
        return File(
            os.fsdecode(self.names[sample]),
            int(self.sizes[sample]),
            os.fsdecode(self.versions[sample]),
        )


@dataclass(frozen=True)
class Index:
    """The contents of the files of `write_index`."""

    url: str
    image_size: int  # pixels
    classes: list[str]
    train: ImageList
    test: ImageList


def write_index(
    directory: Path, url: str, image_size: int, train: Labelled, test: Labelled
) -> None:
    """Write the index to `directory`, for `read_index`.

    Args:
        train: the training images; empty for images to predict, which have no classes.
    """
    import numpy as np

    classes = sorted({label for label, _ in train})
    numbers = {name: number for number, name in enumerate(classes)}
    for name, images in zip(FILES[1:], (train, test), strict=True):
        names = np.array([os.fsencode(file.name) for _, file in images])
        sizes = np.array([file.size for _, file in images])
        versions = np.array([os.fsencode(file.version) for _, file in images])
        labels = np.array([numbers.get(label, 0) for label, _ in images])
        np.savez(directory / name, names=names, sizes=sizes, versions=versions, labels=labels)
    note = json.dumps({"url": url, "image_size": image_size, "classes": classes})
    (directory / FILES[0]).write_text(note, encoding="utf-8")


def read_index(directory: Path) -> Index:
    import numpy as np

    lists = []
    for name in FILES[1:]:
        with np.load(directory / name) as arrays:
            lists.append(ImageList(**arrays))
    return Index(
        **json.loads((directory / FILES[0]).read_text(encoding="utf-8")),
        train=lists[0],
        test=lists[1],
    )


def _find_tops(tops: Sequence[str], role: str) -> list[str]:
    """Return the top folders with a name for this role: "train", "val" or "test"."""
    return [top for top in tops if SPLITS[role].fullmatch(re.sub("[^a-z]", "", top.lower()))]


def split_images(
    where: str, images: Sequence[File], left_out: Counter[str], share: float, min_images: int
) -> tuple[Labelled, Labelled, str]:
    """Return the training images, the held-out images, and a description for the report.

    If there are directories for training and held-out images, by their names in `SPLITS`, the
    folders in them are the classes. Otherwise the top folders are the classes, and `share` of their
    images is held out. An image's side depends on its name only, so it does not change when other
    images are added.

    Args:
        where: the URL, for errors.
        left_out: number of files that are not used, by the reason. The files of other folders are
            added to it.

    Raises:
        DataError: there are no images or fewer than two classes, a class has no image on one side
            or fewer than `min_images`, or the names of the folders do not decide between training
            and held out.
    """
    if not images:
        raise DataError(
            "data: expected images in a folder for each class, got none in "
            f"{where}{report_left_out(left_out)}"
        )
    tops = sorted({file.name.split("/")[0] for file in images if "/" in file.name})
    nested = {file.name.split("/")[0] for file in images if file.name.count("/") > 1}
    reason = "in no class's folder"
    train_tops = _find_tops(tops, "train")
    held_out_tops = _find_tops(tops, "val") or _find_tops(tops, "test")
    if (train_tops and held_out_tops) or nested.intersection(train_tops + held_out_tops):
        if len(train_tops) != 1 or len(held_out_tops) != 1:
            raise DataError(
                "data: expected one folder of training images, such as train/, and beside it one "
                "of held-out images, "
                f"such as val/ or test/, got {_list([f'{top}/' for top in tops])} in {where}"
            )
        used = train_tops[0], held_out_tops[0]
        train, test = (_in_folders(images, f"{top}/") for top in used)
        how = f"in {held_out_tops[0]}/"
        others = _list([f"{top}/" for top in tops if top not in used])
        if others:
            reason = f"outside of the folders used ({others})"
    else:
        train, test = _hold_out_share(images, share)
        how = f"{share:g} of all, by name"
    counts = _check_classes(where, train, test, how, min_images)
    left_out[reason] += len(images) - len(train) - len(test)
    classes = ""
    if len(counts) <= MAX_NAMES:
        classes = f" ({_list(sorted(counts))})"
    description = (
        f"{len(train):,} training and {len(test):,} held-out images ({how}) of {len(counts):,} "
        f"classes{classes}"
    )
    return train, test, description


def _hold_out_share(
    images: Sequence[File], share: float
) -> tuple[list[tuple[str, File]], list[tuple[str, File]]]:
    """Return the images in top folders on two sides; about `share` of them is held out."""
    train, test = [], []
    for label, file in _in_folders(images, ""):
        if _hash_to_unit(file.name) >= share:
            train.append((label, file))
        else:
            test.append((label, file))
    return train, test


def _list(names: Sequence[str]) -> str:
    """Return the first of `names`, which may contain any bytes, and the number of the rest."""
    return abbreviate(names, MAX_NAMES).encode("utf-8", "backslashreplace").decode()


def _check_classes(
    where: str, train: Labelled, test: Labelled, how: str, min_images: int
) -> Mapping[str, int]:
    """Return the number of training images of each class, after checking both splits."""
    counts = Counter(label for label, _ in train)
    held_out = Counter(label for label, _ in test)
    found = sorted({*counts, *held_out})
    lacking = [
        f"{counts[name]} and {held_out[name]} of class {name!r}"
        for name in found
        if counts[name] < min_images or not held_out[name]
    ]
    if len(found) < 2 or lacking:
        got = _list(lacking or [repr(name) for name in found]) or "no class"
        raise DataError(
            "data: expected folders with images of at least two classes, each with at least "
            f"{min_images} training images (min_images) and a held-out one ({how}), got {got} in "
            f"{where}"
        )
    return counts


def _in_folders(images: Sequence[File], directory: str) -> list[tuple[str, File]]:
    """Return the images in a folder below `directory`, each with the folder's name."""
    start = len(directory)
    return [
        (file.name[start:].split("/")[0], file)
        for file in images
        if file.name.startswith(directory) and "/" in file.name[start:]
    ]


def _hash_to_unit(name: str) -> float:
    """Return a pseudo-random number in [0, 1) that depends on the name only."""
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") / (1 << 64)
