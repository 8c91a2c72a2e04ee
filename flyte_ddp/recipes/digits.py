"""Recipe `digits`: scikit-learn's bundled handwritten digits, 1,797 images of 8x8 pixels. Real
data, no download.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING

from flyte_ddp.config.extras import how_to_install
from flyte_ddp.errors import DataError
from flyte_ddp.recipes.arrays import ArrayRecipe

if TYPE_CHECKING:
    from torch import nn

NUM_HELD_OUT = 360  # a fifth, drawn once and for all with SPLIT_SEED
SPLIT_SEED = 0


class Digits(ArrayRecipe):
    """A small CNN on scikit-learn's digits; about 99 % of the held-out fifth are recognized after
    ten epochs.
    """

    defaults = {
        "epochs": 10,
        "global_batch_size": 32,
        "learning_rate": 3e-3,
        "schedule": "one_cycle",
    }

    def prepare(self, source: str, directory: Path) -> str:
        """Write `train.npz` and `test.npz`: images (N, 8, 8) in bytes from 0 to 255, labels
        (N,).
        """
        import numpy as np

        if source:
            raise DataError(
                f"data: expected none, got {source!r}; recipe digits uses scikit-learn's own"
            )
        # The file is read directly, because importing sklearn.datasets would take 3 s.
        package = importlib.util.find_spec("sklearn")
        if package is None or package.origin is None:
            raise DataError(f"data: scikit-learn carries the digits: {how_to_install('sklearn')}")
        file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
        table = np.loadtxt(file, delimiter=",", dtype=np.int16)
        # The file has levels from 0 to 16.
        images = (table[:, :64].reshape(-1, 8, 8) * 255 // 16).astype(np.uint8)
        labels = table[:, 64].astype(np.int64)
        order = np.random.RandomState(SPLIT_SEED).permutation(len(labels))
        test, train = order[:NUM_HELD_OUT], order[NUM_HELD_OUT:]
        np.savez(directory / "train.npz", images=images[train], labels=labels[train])
        np.savez(directory / "test.npz", images=images[test], labels=labels[test])
        return (
            f"scikit-learn's handwritten digits: {len(train):,} training and {len(test):,} "
            "held-out images of 8x8"
        )

    def data_license(self, source: str) -> str:
        return "CC-BY-4.0"  # licence of the UCI repository, scikit-learn's source

    def model(self) -> nn.Module:
        from torch import nn

        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(1, 32, kernel_size=3, padding=1),
                relu1=nn.ReLU(),
                conv2=nn.Conv2d(32, 64, kernel_size=3, padding=1),
                relu2=nn.ReLU(),
                pool2=nn.MaxPool2d(2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(64 * 4 * 4, 128),
                relu3=nn.ReLU(),
                fc2=nn.Linear(128, 10),
            )
        )
