"""The index of the images: each with its class, for training or held out. Written once, read by
every rank.

Does not know how files are listed or read, and imports no torch.
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

from flyte_ddp.errors import DataError
from flyte_ddp.recipes.contents import report_left_out
from flyte_ddp.recipes.image_folder.files import File

if TYPE_CHECKING:
    from numpy.typing import NDArray

_FILLER = "(?:images?|imgs?|pictures?|photos?|data|dataset|set|split|seg|folder)*"
# names of directories, of which only the letters count; of the held-out ones the first kind is used
SPLITS = {
    "train": re.compile(f"{_FILLER}(?:train|training|trn){_FILLER}"),
    "val": re.compile(
        f"{_FILLER}(?:val|valid|validate|validation|dev|eval|evaluation|heldout|holdout){_FILLER}"
    ),
    "test": re.compile(f"{_FILLER}(?:test|testing|tst){_FILLER}"),
}
MAX_NAMES = 10  # of folders and classes in a description
FILES = ("index.json", "train.npz", "test.npz")

Labelled = Sequence[tuple[str, File]]  # images, each with the name of its class


@dataclass(frozen=True)
class ImageList:
    """The images of one split.

    Arrays of bytes, because every loader process has them: Python objects would take ten times the
    memory.
    """

    names: NDArray[Any]  # (N,) relative to the URL
    sizes: NDArray[Any]  # (N,) bytes
    versions: NDArray[Any]  # (N,)
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
        train: none for images that are to be predicted, which have no classes.
    """
    import numpy as np

    classes = sorted({label for label, _ in train})
    numbers = {name: number for number, name in enumerate(classes)}
    for name, images in zip(FILES[1:], (train, test), strict=True):
        np.savez(
            directory / name,
            names=np.array([os.fsencode(file.name) for _, file in images]),
            sizes=np.array([file.size for _, file in images]),
            versions=np.array([os.fsencode(file.version) for _, file in images]),
            labels=np.array([numbers.get(label, 0) for label, _ in images]),
        )
    (directory / FILES[0]).write_text(
        json.dumps({"url": url, "image_size": image_size, "classes": classes}), encoding="utf-8"
    )


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
    """Return the top folders whose name says that they are for training, or held out."""
    return [top for top in tops if SPLITS[role].fullmatch(re.sub("[^a-z]", "", top.lower()))]


def split_images(
    where: str, images: Sequence[File], left_out: Counter[str], share: float, min_images: int
) -> tuple[Labelled, Labelled, str]:
    """Return the training and the held-out ones of `images`, and a description for the report.

    If there are directories for training and held-out images, by their names in `SPLITS`, the
    folders in them are the classes. Else the top folders are the classes, and `share` of their
    images is held out. An image's side depends on its name only, so it does not change when others
    are added.

    Args:
        where: the URL, for errors.
        left_out: files by the reason why they are not used, to which those of other folders are
            added.

    Raises:
        DataError: no images, fewer than two classes, a class that one side lacks, one with fewer
            than `min_images`, or folders of which it is not clear what they are for.
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
        train, test = [], []
        for pair in _in_folders(images, ""):
            side = train if _hash_to_unit(pair[1].name) >= share else test
            side.append(pair)
        how = f"{share:g} of all, by name"
    counts = _check_classes(where, train, test, how, min_images)
    left_out[reason] += len(images) - len(train) - len(test)
    classes = f" ({_list(sorted(counts))})" if len(counts) <= MAX_NAMES else ""
    return (
        train,
        test,
        (
            f"{len(train):,} training and {len(test):,} held-out images ({how}) of {len(counts):,} "
            f"classes{classes}"
        ),
    )


def _list(names: Sequence[str]) -> str:
    """Return the first of `names`, which may hold any bytes, and how many more there are."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]).encode("utf-8", "backslashreplace").decode() + more


def _check_classes(
    where: str, train: Labelled, test: Labelled, how: str, min_images: int
) -> Mapping[str, int]:
    """Return the number of training images of each class, after checking both splits."""
    counts, held_out = (Counter(label for label, _ in images) for images in (train, test))
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
    """Return those of `images` in a folder below `directory`, each with the folder's name."""
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
