"""Recipe `benchmarks.mnist_like.MnistLike`: random bytes in MNIST's shapes, so that a benchmark
downloads nothing.

Speed and memory do not depend on the pixels. The accuracy is meaningless here.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.recipes.mnist import Mnist

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import nn

NUM_SAMPLES = 60_000  # MNIST's own
NUM_TEST_SAMPLES = 2_000  # evaluated after every epoch, which no ratio includes


class MnistLike(Mnist):
    """MNIST's model and shapes on noise; `source` is the number of training images, as a decimal
    number.
    """

    def prepare(self, source: str, directory: Path) -> str:
        import numpy as np

        num_samples = int(source or NUM_SAMPLES)
        for split, count in (("train", num_samples), ("test", NUM_TEST_SAMPLES)):
            images, labels = noise(count)
            np.savez(directory / f"{split}.npz", images=images, labels=labels)
        return f"noise, {num_samples:,} training and {NUM_TEST_SAMPLES:,} held-out images of 28x28"


class TimestampedMnistLike(MnistLike):
    """Print the time of the first optimizer step, for commands that do not report it themselves."""

    def model(self) -> nn.Module:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def print_time(*_: Any) -> None:
            handle.remove()
            print(json.dumps({"first_step_at": time.time()}), flush=True)

        handle = register_optimizer_step_post_hook(print_time)
        return super().model()


def noise(num_samples: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return images (N, 28, 28) in bytes and labels (N,), the same every time."""
    import numpy as np

    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, size=(num_samples, 28, 28), dtype=np.uint8)
    return images, generator.integers(0, 10, size=num_samples)


def write_idx_files(num_samples: int, directory: Path) -> None:
    """Write the noise to `directory`/MNIST/raw in the format that torchvision's MNIST reads."""
    raw = directory / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", num_samples), ("t10k", NUM_TEST_SAMPLES)):
        images, labels = noise(count)
        for name, values in (("images-idx3", images), ("labels-idx1", labels.astype("u1"))):
            header = bytes([0, 0, 8, values.ndim]) + b"".join(
                size.to_bytes(4, "big") for size in values.shape
            )
            (raw / f"{prefix}-{name}-ubyte").write_bytes(header + values.tobytes())
