"""Samples as one npz file, for recipes whose data fits in memory: from `prepare` to `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils.data import Dataset


def load_arrays(file: Path) -> Dataset[Any]:
    """Return the arrays that `numpy.savez` wrote to `file`, inputs and then targets, as a
    TensorDataset.
    """
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    with np.load(file) as arrays:
        return TensorDataset(*(torch.from_numpy(arrays[name]) for name in arrays))
