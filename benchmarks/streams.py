"""The cost of the order of shards, and its worth: `python -m benchmarks.streams`.

Counts, times and memory need no store. The last row trains a small model on digits in shards, which
were written in a random order or class by class, and on the same samples shuffled whole.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from flyte_ddp import session
from flyte_ddp.data import Shards
from flyte_ddp.data.order import EpochOrder

EPOCHS, BATCH_SIZE, NUM_SHARDS, NUM_SEEDS = 10, 32, 140, 16


def main() -> int:
    torch.set_num_threads(1)
    for name, value in (*measure_order(), *measure_resume(), *measure_bytes(), *measure_loss()):
        print(f"| {name} | {value} |")
    return 0


def measure_order() -> Iterator[tuple[str, str]]:
    sizes = np.random.default_rng(0).integers(500, 1500, 10**6)
    tracemalloc.start()
    started = time.perf_counter()
    EpochOrder(sizes, seed=0, epoch=0, lanes=64, window=4096).batch(0, 4096)
    seconds = time.perf_counter() - started
    peak = tracemalloc.get_traced_memory()[1] / 2**20
    tracemalloc.stop()
    yield (
        "order of an epoch of 10^6 shards, with its first batch",
        f"{seconds:.2f} s, {peak:.0f} MiB",
    )


def measure_resume() -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as place:
        np.savez(
            f"{place}/flyte_ddp_index.npz",
            names=np.array([b"shard-%06d.tar" % each for each in range(10**4)]),
            samples=np.full(10**4, 20_000),
            sizes=np.full(10**4, 64 << 20),
            versions=np.zeros(10**4, "S1"),
        )
        started = time.perf_counter()
        shards = Shards(place)
        samples = next(shards.batches(256, 0, 3, 10**8, lambda batch: batch[:64], 4))
        seconds = time.perf_counter() - started
        count = len(set((np.array(samples[:64]) // 20_000).tolist()))
        yield (
            "start at sample 10^8 of 10^4 shards, to the first samples",
            f"{seconds:.2f} s, of {count} shards of a rank of 4",
        )


def measure_bytes() -> Iterator[tuple[str, str]]:
    order = EpochOrder(np.full(1000, 180), seed=0, epoch=1, lanes=48, window=2**18 // 48)
    for num_ranks in (2, 3, 4, 5):
        needed: list[set[int]] = [set() for _ in range(num_ranks)]
        for first in range(0, order.num_samples, 96):
            parts = np.array_split(order.batch(first, 96), num_ranks)
            for shards, part in zip(needed, parts, strict=True):
                shards.update((part // 180).tolist())
        most = max(map(len, needed)) * num_ranks / 1000
        yield f"bytes of the busiest of {num_ranks} ranks / their equal part", f"{most:.2f}"


def measure_loss() -> Iterator[tuple[str, str]]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    classes = torch.tensor(digits.target)
    chosen = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    train, held_out = chosen[:1400], chosen[1400:]
    data: dict[str, Any] = {"shuffled whole": TensorDataset(pixels[train], classes[train])}
    with tempfile.TemporaryDirectory() as name:
        for how, order in (("seeded", train), ("class by class", train[classes[train].argsort()])):
            place = Path(name, how)
            place.mkdir()
            for number, part in enumerate(order.tensor_split(NUM_SHARDS)):
                lines = [
                    json.dumps([pixels[each].tolist(), int(classes[each])])
                    for each in part.tolist()
                ]
                (place / f"{number:04d}.lines").write_text("\n".join(lines))
            data[how] = Shards(str(place), reader=read_lines, transform=to_sample, window=16)
            data[how].prepare()
        losses = {
            how: [
                train_model(each, seed, pixels[held_out], classes[held_out])
                for seed in range(NUM_SEEDS)
            ]
            for how, each in data.items()
        }
    whole = np.mean(losses.pop("shuffled whole"))
    for how, found in losses.items():
        ratio = np.mean(found) / whole
        yield f"held-out loss, shards {how} / shuffled whole ({whole:.3f})", f"{ratio:.3f}"


def read_lines(path: str) -> Iterator[dict[str, Any]]:
    for line in Path(path).read_text().splitlines():
        yield dict(zip(("pixels", "digit"), json.loads(line), strict=True))


def to_sample(fields: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return torch.tensor(fields["pixels"]), fields["digit"]


def train_model(data: Any, seed: int, pixels: torch.Tensor, classes: torch.Tensor) -> float:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for epoch in range(EPOCHS):
        for (batch, targets), weight in session.batches(data, BATCH_SIZE, epoch, seed=seed):
            optimizer.zero_grad()
            (weight * functional.cross_entropy(model(batch), targets)).backward()
            optimizer.step()
    with torch.no_grad():
        return float(functional.cross_entropy(model(pixels), classes))


if __name__ == "__main__":
    sys.exit(main())
