"""Recipe `benchmarks.mnist_like.MnistLike`: random bytes of MNIST's shapes, so that a benchmark downloads nothing.

Speed and memory do not depend on what the pixels show. Accuracy does, and means nothing here.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.recipes.arrays import save_images
from training.recipes.mnist import Mnist

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

NUM_SAMPLES = 60_000  # MNIST's own
NUM_TEST_SAMPLES = 2_000  # evaluated after every epoch, which no ratio includes


class MnistLike(Mnist):
    """MNIST's model and shapes on noise; the `source` of its data is the number of training images, in digits."""

    def prepare(self, source: str, directory: Path) -> str:
        num_samples = int(source or NUM_SAMPLES)
        for split, count in (("train", num_samples), ("test", NUM_TEST_SAMPLES)):
            save_images(directory / f"{split}.npz", *noise(count))
        return f"noise, {num_samples:,} training and {NUM_TEST_SAMPLES:,} held-out images of 28x28"


class AnnouncingMnistLike(MnistLike):
    """Prints when the first optimizer step is done, for commands that do not tell it themselves."""

    def model(self) -> nn.Module:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def announce(*_: Any) -> None:
            handle.remove()
            print(json.dumps({"first_step_at": time.time()}), flush=True)

        handle = register_optimizer_step_post_hook(announce)
        return super().model()


def noise(num_samples: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Images in bytes, (N, 28, 28), and labels, (N,): the same every time."""
    import numpy as np

    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, size=(num_samples, 28, 28), dtype=np.uint8)
    return images, generator.integers(0, 10, size=num_samples)


def write_idx_files(num_samples: int, directory: Path) -> None:
    """Leave the noise in `directory`/MNIST/raw in the format in which torchvision's MNIST reads the original."""
    raw = directory / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", num_samples), ("t10k", NUM_TEST_SAMPLES)):
        images, labels = noise(count)
        for name, values in (("images-idx3", images), ("labels-idx1", labels.astype("u1"))):
            header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
            (raw / f"{prefix}-{name}-ubyte").write_bytes(header + values.tobytes())
