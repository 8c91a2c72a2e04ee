"""Samples as npz files, for data that fits in memory: from `prepare` to `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.recipes.base import Recipe

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class ArrayRecipe(Recipe):
    """A recipe with a `prepare` that writes `train.npz` and `test.npz` for `load_arrays`."""

    def datasets(self, directory: Path) -> tuple[Dataset[Any], Dataset[Any]]:
        return load_arrays(directory / "train.npz"), load_arrays(directory / "test.npz")


def load_arrays(file: Path) -> Dataset[Any]:
    """Return the arrays that `numpy.savez` wrote to `file`, inputs and then targets, as a
    TensorDataset.
    """
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    with np.load(file) as arrays:
        return TensorDataset(*(torch.from_numpy(arrays[name]) for name in arrays))
