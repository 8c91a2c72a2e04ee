"""A recipe for runs in which something fails: its model counts how often each training sample is
seen.

Each sample has a parameter of its own. Its gradient is the same each time the sample is seen. Its
ranks import this module with each restart, so it imports only what a recipe does.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyte_ddp.recipes import Recipe
from flyte_ddp.recipes.arrays import load_arrays

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flyte_ddp.data import Shards

NUM_SAMPLES, NUM_FEATURES, NUM_CLASSES = 960, 16, 4
BATCH_SIZE, LEARNING_RATE = 24, 0.05
STEP_SECONDS_VARIABLE = "SOAK_STEP_SECONDS"  # environment variable: how long a step lasts
SHARD_SIZE = 12  # samples
SAVE_STEPS = 8  # optimizer steps between two checkpoints


def write_shards(directory: Path, place: str = "soak") -> str:
    """Put the training data of `Counting` as shards into a bucket or a directory of one, and return
    its URL.
    """
    import numpy as np
    import s3fs

    with np.load(directory / "train.npz") as arrays:
        rows = zip(arrays["images"].tolist(), arrays["labels"].tolist(), strict=True)
        lines = [json.dumps({"input": inputs, "target": target}) + "\n" for inputs, target in rows]
    files = s3fs.S3FileSystem()
    if place == "soak":
        files.mkdir(place)
    for first in range(0, NUM_SAMPLES, SHARD_SIZE):
        contents = "".join(lines[first : first + SHARD_SIZE])
        files.pipe_file(f"{place}/{first:04d}.jsonl", contents.encode())
    open_shards(f"s3://{place}").prepare()
    return f"s3://{place}"


def open_shards(url: str, cache: str | None = None) -> Shards:
    from flyte_ddp.data import Shards, readers

    readers.PART_BYTES = 1 << 10  # A shard is fetched in several parts.
    return Shards(url, transform=to_sample, cache_dir=cache)


def to_sample(fields: dict[str, Any]) -> tuple[Tensor, int]:
    import torch

    return torch.tensor(fields["input"]), fields["target"]


class Counting(Recipe):
    """A small model, and for each training sample a number that grows by one step each time it is
    seen.
    """

    defaults = {
        "global_batch_size": BATCH_SIZE,
        "optimizer": "sgd",
        "momentum": 0.0,
        "learning_rate": LEARNING_RATE,
        "schedule": "constant",
        "checkpoint_interval": SAVE_STEPS,
        "log_interval": 4,
        "model_state": "last",  # the counts of all epochs
    }

    def prepare(self, source: str, directory: Path) -> str:
        import numpy as np

        draw = np.random.RandomState(0)
        for split, size in (("train", NUM_SAMPLES), ("test", 40)):
            inputs = draw.standard_normal((size, NUM_FEATURES + 1)).astype(np.float32)
            inputs[:, -1] = np.arange(size)  # the sample's number
            np.savez(
                directory / f"{split}.npz",
                images=inputs,
                labels=draw.randint(NUM_CLASSES, size=size),
            )
        return f"{NUM_SAMPLES} samples of noise"

    def datasets(self, directory: Path) -> Any:
        return load_arrays(directory / "train.npz"), load_arrays(directory / "test.npz")

    def model(self) -> nn.Module:
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.Sequential(
                    nn.Linear(NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, NUM_CLASSES)
                )
                self.seen = nn.Parameter(torch.zeros(NUM_SAMPLES))

            def forward(self, inputs: Tensor) -> Tensor:
                seen = self.seen[inputs[:, -1].long()]
                return torch.cat([self.layers(inputs[:, :-1]), seen[:, None]], dim=1)

        return Model()

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad:
            time.sleep(float(os.environ.get(STEP_SECONDS_VARIABLE, "0")))
        return super().losses(outputs[:, :-1], targets) - outputs[:, -1]

    def num_correct(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().num_correct(outputs[:, :-1], targets)

    def report_samples(self, batch: Any, outputs: Tensor, targets: Tensor) -> Any:
        return []
