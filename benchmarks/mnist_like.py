"""Recipe `benchmarks.mnist_like.MnistLike`: random bytes of MNIST's shapes, so that a benchmark downloads nothing.

Speed and memory do not depend on what the pixels show. Accuracy does, and means nothing here.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.recipes.arrays import save_images
from flyte_ddp.recipes.mnist import Mnist

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


class MortalMnistLike(MnistLike):
    """Kills its second rank, once: see `Death`, whose directory is in the environment."""

    DEATH = "BENCHMARK_DEATH"

    def model(self) -> nn.Module:
        Death(Path(os.environ[self.DEATH])).watch()
        return super().model()


@dataclass
class Death:
    """The death of one rank, as files in a directory that all ranks of a run reach."""

    directory: Path

    def watch(self, at_step: int = 8) -> None:
        """In a rank: the second dies at `at_step`, once; where it has, the first notes the end of its next step."""
        import torch.distributed as dist
        from torch.optim.optimizer import register_optimizer_step_post_hook

        died, recovered = self.directory / "died", self.directory / "recovered"
        is_over = died.exists()
        num_steps = 0

        def after_step(*_: Any) -> None:
            nonlocal num_steps
            num_steps += 1
            if is_over:
                if num_steps == 1 and dist.get_rank() == 0:
                    recovered.write_text(str(time.time()))
            elif num_steps == at_step and dist.get_rank() == 1:
                died.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

        register_optimizer_step_post_hook(after_step)

    def recovery_seconds(self) -> float:
        """From the death to the end of the first step after it."""
        return float((self.directory / "recovered").read_text()) - float((self.directory / "died").read_text())


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
