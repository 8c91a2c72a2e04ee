"""Recipe `mnist`: the MNIST handwritten digits as torchvision publishes them, and the tutorial's
CNN.

The four IDX files come from torchvision's `MNIST` or from a directory or URL that the user gives.
Either way their contents must have the published checksums.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import tempfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import DataError
from flyte_ddp.recipes.arrays import load_arrays
from flyte_ddp.recipes.base import Recipe
from flyte_ddp.recipes.contents import GZIP, HEAD, kind_of
from flyte_ddp.storage import Storage

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from torch.utils.data import Dataset

# MD5 sums of the unpacked files, the same for every way of packing them.
CHECKSUMS = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MEAN, STANDARD_DEVIATION = 0.1307, 0.3081  # of the training images' pixels in [0, 1]


class Mnist(Recipe):
    """The tutorial's CNN (conv 20 and 50 of 5x5, fc 500) on MNIST; over 99 % after ten epochs."""

    defaults = {
        "epochs": 10,
        "global_batch_size": 128,
        "learning_rate": 2e-3,
        "schedule": "one_cycle",
    }

    def prepare(self, source: str, directory: Path) -> str:
        """Write `train.npz` and `test.npz`: images (N, 28, 28) in bytes, labels (N,).

        Args:
            source: a directory or URL that holds the IDX files, packed with gzip or not, directly
                or in `raw` or `MNIST/raw` below; "" downloads them to the user's cache.
        """
        import numpy as np

        origin = source or str(_download())
        contents = {name: _read(origin, name) for name in CHECKSUMS}
        for split, prefix in (("train", "train"), ("test", "t10k")):
            images = _idx(contents[f"{prefix}-images-idx3-ubyte"])
            labels = _idx(contents[f"{prefix}-labels-idx1-ubyte"]).astype(np.int64)
            np.savez(directory / f"{split}.npz", images=images, labels=labels)
        where = f"read from {source}" if source else "downloaded from torchvision's mirrors"
        return f"MNIST, 60,000 training and 10,000 held-out images of 28x28, {where}"

    def data_license(self, source: str) -> str:
        return "CC-BY-SA-3.0"  # wherever it is read: the contents are MNIST's

    def datasets(self, directory: Path) -> tuple[Dataset[Any], Dataset[Any]]:
        return load_arrays(directory / "train.npz"), load_arrays(directory / "test.npz")

    def inputs(self, batch: Tensor) -> Tensor:
        return super().inputs(batch).sub_(MEAN).div_(STANDARD_DEVIATION)

    def model(self) -> nn.Module:
        from torch import nn

        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 20, kernel_size=5),
                relu1=nn.ReLU(),
                pool1=nn.MaxPool2d(2),
                conv2=nn.Conv2d(20, 50, kernel_size=5),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(50 * 4 * 4, 500),
                relu3=nn.ReLU(),
                fc2=nn.Linear(500, 10),
            )
        )


def _download() -> Path:
    """Return the directory in the user's cache that has the four files, after torchvision has
    fetched them into it.
    """
    from torchvision import datasets

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flyte-ddp" / "mnist"
    if not cache.exists():
        cache.parent.mkdir(parents=True, exist_ok=True)
        # no other process sees a part of it
        with tempfile.TemporaryDirectory(dir=cache.parent) as directory:
            try:
                datasets.MNIST(directory, download=True)
            except Exception as error:  # of any kind: a connection may break anywhere
                why = " ".join(str(error).split())
                raise DataError(
                    f"data: MNIST could not be downloaded: {why}; give a directory of its files"
                ) from error
            with contextlib.suppress(OSError):  # another process was quicker
                os.replace(Path(directory, "MNIST", "raw"), cache)
    return cache


def _file_names(name: str) -> list[str]:
    """Return what the file may be called; the dotted names come first, as one archive has both, and
    one is a folder.
    """
    return [
        f"{stem}{packing}"
        for stem in (name.replace("-idx", ".idx"), name)
        for packing in ("", ".gz")
    ]


def _read(origin: str, name: str) -> bytes:
    """Return the unpacked contents of the IDX file `name`, wherever below the directory or URL
    `origin` it lies.
    """
    storage = Storage(origin, "data")
    for file in (
        f"{folder}{file}" for folder in ("", "raw/", "MNIST/raw/") for file in _file_names(name)
    ):
        try:
            contents = storage.read(file)
        except FileNotFoundError:
            continue
        return _unpack(contents, name, storage.join(file))
    raise DataError(
        f"data: expected a directory with the four IDX files of MNIST, got {origin}, which holds "
        f"no {name} "
        f"or {name}.gz, nor do raw/ and MNIST/raw/ in it"
    )


def _unpack(contents: bytes, name: str, place: str) -> bytes:
    """Return `contents`, packed or not, which were read from `place`, once they are what MNIST has
    as `name`.
    """
    try:
        contents = gzip.decompress(contents) if kind_of(contents[:HEAD]) == GZIP else contents
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"data: {place} is damaged: {error}; delete it and fetch it again"
        ) from None
    found = hashlib.md5(contents, usedforsecurity=False).hexdigest()
    if found != CHECKSUMS[name]:
        raise DataError(
            f"data: {place} is damaged or not of MNIST: expected contents with the MD5 sum "
            f"{CHECKSUMS[name]}, "
            f"got {found}; delete it and fetch it again"
        )
    return contents


def _idx(contents: bytes) -> NDArray[Any]:
    """Return the array in an IDX file: a big-endian header of 4 + 4 * dimensions bytes, then one
    byte a value.
    """
    import numpy as np

    num_dimensions = contents[3]
    shape = np.frombuffer(contents, dtype=">u4", count=num_dimensions, offset=4)
    return np.frombuffer(contents, dtype=np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)
