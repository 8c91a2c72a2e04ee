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
            generator = np.random.default_rng(0)
            images = generator.integers(0, 256, size=(count, 28, 28), dtype=np.uint8)
            labels = generator.integers(0, 10, size=count)
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
