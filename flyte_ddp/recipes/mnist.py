"""Recipe `mnist`: the MNIST handwritten digits as torchvision publishes them, and the tutorial's
CNN.

The four IDX files come from torchvision's `MNIST` or from a directory or URL that the user gives.
Either way their contents must have the published checksums.
"""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from flyte_ddp.errors import DataError, in_one_line
from flyte_ddp.recipes.arrays import ArrayRecipe
from flyte_ddp.recipes.contents import unpack
from flyte_ddp.storage import Storage, permit

if TYPE_CHECKING:
    from torch import Tensor, nn

# MD5 sums of the unpacked files, the same for every way of packing them.
CHECKSUMS = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
MEAN, STANDARD_DEVIATION = 0.1307, 0.3081  # statistics of the training images' pixels in [0, 1]


class Mnist(ArrayRecipe):
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

        storage = Storage(source or _download(), "data")
        for split, prefix in (("train", "train"), ("test", "t10k")):
            packed_images = _read(storage, f"{prefix}-images-idx3-ubyte")
            packed_labels = _read(storage, f"{prefix}-labels-idx1-ubyte")
            # An IDX file begins with 4 bytes, and 4 more for each dimension.
            pixels = np.frombuffer(packed_images, dtype=np.uint8, offset=16)
            labels = np.frombuffer(packed_labels, dtype=np.uint8, offset=8)
            images = pixels.reshape(-1, 28, 28)
            np.savez(directory / f"{split}.npz", images=images, labels=labels.astype(np.int64))
        where = "downloaded from torchvision's mirrors"
        if source:
            where = f"read from {source}"
        return f"MNIST, 60,000 training and 10,000 held-out images of 28x28, {where}"

    def data_license(self, source: str) -> str:
        return "CC-BY-SA-3.0"  # licence of MNIST; every source has the same contents

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


def _download() -> str:
    """Return a directory in the user's cache. If it lacks the files, torchvision fetches them."""
    from torchvision import datasets

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "flyte-ddp")
    try:
        datasets.MNIST(cache, download=True)
    except Exception as error:  # any error is possible: a connection may break anywhere
        raise DataError(
            f"data: MNIST could not be downloaded: {in_one_line(error)}; give a directory of its "
            "files"
        ) from error
    permit(str(cache))
    return str(cache)


def _read(storage: Storage, name: str) -> bytes:
    """Return the unpacked contents of the IDX file `name`. Raises DataError if they are not
    MNIST's.
    """
    # The dotted names come first: one archive has both, and one is a folder.
    stems = (name.replace("-idx", ".idx"), name)
    for folder, stem, packing in product(("", "raw/", "MNIST/raw/"), stems, ("", ".gz")):
        file = f"{folder}{stem}{packing}"
        try:
            contents = unpack(storage.read(file), storage.join(file))
        except FileNotFoundError:
            continue
        found = hashlib.md5(contents, usedforsecurity=False).hexdigest()
        if found == CHECKSUMS[name]:
            return contents
        raise DataError(
            f"data: {storage.join(file)} is damaged or not of MNIST: expected contents with the "
            f"MD5 sum {CHECKSUMS[name]}, got {found}; delete it and fetch it again"
        )
    raise DataError(
        f"data: expected a directory with the four IDX files of MNIST, got {storage.url}, which "
        f"holds no {name} or {name}.gz, nor do raw/ and MNIST/raw/ in it"
    )
