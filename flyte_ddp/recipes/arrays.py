"""Samples as one npz file, for recipes whose data fits in memory: from `prepare` to `datasets`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch.utils.data import Dataset


def save_images(file: Path, images: NDArray[Any], labels: NDArray[Any]) -> None:
    """Write images in bytes, (N, H, W) or (N, C, H, W), and their labels (N,), uncompressed for a fast start."""
    import numpy as np

    np.savez(file, images=images, labels=labels)


def load_arrays(file: Path) -> Dataset[Any]:
    """Return the arrays in `file` as a TensorDataset, in the order in which they were saved: inputs, then targets."""
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    with np.load(file) as arrays:
        return TensorDataset(*(torch.from_numpy(arrays[name]) for name in arrays))
