"""Measure memory and reading time of a sharded model: `python -m benchmarks.shards fsdp 72`, or ddp, reshard, read.

The model has 100 million parameters, or as many layers of 4 million as are given, and AdamW two more numbers for each.
`fsdp` and `ddp` train it for two steps on two ranks with a checkpoint, and report the memory of the larger rank.
`reshard` reads the checkpoint of two ranks in one process; `read` is `torch.load` of one file with the same tensors.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoints import BATCH_SIZE, trained
from benchmarks.mnist_like import MnistLike

if TYPE_CHECKING:
    from torch import nn

NUM_STEPS = 2
NUM_RANKS = 2
NUM_LAYERS = 24  # 100 million parameters


@dataclass(frozen=True)
class Deep(MnistLike):
    """A model whose weights take most of the memory, in many blocks, as those of a Transformer do."""

    layers: int = NUM_LAYERS
    width: int = 2048  # a layer, the block that is gathered at once, has 4 million parameters

    def model(self) -> nn.Module:
        from torch import nn

        hidden = [nn.Sequential(nn.Linear(self.width, self.width), nn.ReLU()) for _ in range(self.layers)]
        return nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, self.width), *hidden, nn.Linear(self.width, 10))


def train(parallel: str, directory: str, num_layers: int = NUM_LAYERS) -> dict[str, float]:
    """Train and leave a checkpoint in `directory`; return the outcome."""
    from flyte_ddp.config import resolve
    from flyte_ddp.launch import driver
    from flyte_ddp.launch.local import LocalPlace
    from flyte_ddp.launch.process.programs import Job, recipe_program
    from flyte_ddp.recipes.prepare import prepare_data

    data = Path(directory, "data")
    data.mkdir()
    prepare_data(MnistLike(), str(NUM_STEPS * BATCH_SIZE), data)
    options = {"layers": num_layers}
    config = {"epochs": 1, "global_batch_size": BATCH_SIZE, "parallel": parallel, "recipe_options": options}
    program = recipe_program("benchmarks.shards.Deep", resolve(MnistLike.defaults, config))
    started = time.time()
    result = driver.run(Job(program, f"{directory}/checkpoints", started), LocalPlace(NUM_RANKS), lambda: str(data))
    finished = result.finished
    return {
        "first_step_at": started + finished.first_step_seconds,
        "peak_memory_bytes": max(finished.rank_peak_memory_bytes),
    }


def reshard(directory: str) -> float:
    """Return the seconds in which one process reads the checkpoint of two ranks."""
    from flyte_ddp.checkpoints.store import CheckpointStore

    train("fsdp", directory)
    store = CheckpointStore(f"{directory}/checkpoints", num_kept=1)
    started = time.perf_counter()
    state, _, _ = store.load_latest()
    assert state is not None
    return time.perf_counter() - started


def read(directory: str) -> float:
    """Return the seconds in which `torch.load` reads a file of the same tensors."""
    import torch

    model, optimizer = trained()
    file = Path(directory, "state.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    started = time.perf_counter()
    torch.load(file, weights_only=True)
    return time.perf_counter() - started


def main(name: str, num_layers: str = str(NUM_LAYERS)) -> None:
    with tempfile.TemporaryDirectory() as directory:
        outcome: dict[str, Any] = {"first_step_at": time.time()}
        if name in ("fsdp", "ddp"):
            outcome = train(name, directory, int(num_layers))
        else:
            outcome["read_seconds"] = {"reshard": reshard, "read": read}[name](directory)
    print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
