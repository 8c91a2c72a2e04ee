"""The training programs that are compared, each in its own processes: `python -m
benchmarks.variants ours --data DIR`.

Both train the model of recipe `mnist` for two epochs at the same global batch size and report the
speed of the second, with the same optimizer and memory format. Every import is inside a function,
because the time to the first step is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

BATCH_SIZE = 128  # global
LEARNING_RATE = 2e-3
LOG_INTERVAL = 20  # steps between two reads of the loss
NUM_EPOCHS = 2
PREPARED = "prepared"  # the recipe's prepared data, below the data directory


def ours(data: Path, num_ranks: int) -> None:
    from flyte_ddp.config import resolve
    from flyte_ddp.launch.control import driver
    from flyte_ddp.launch.nodes.local import LocalPlace
    from flyte_ddp.launch.protocol.programs import Job
    from flyte_ddp.launch.recipe_program import recipe_program
    from flyte_ddp.recipes import get_recipe

    name = "benchmarks.mnist_like.MnistLike"
    config = {"epochs": NUM_EPOCHS, "global_batch_size": BATCH_SIZE, "log_interval": LOG_INTERVAL}
    program = recipe_program(name, resolve(get_recipe(name).defaults, config))
    with tempfile.TemporaryDirectory() as checkpoints:
        job = Job(program, checkpoints, time.time())
        result = driver.run(job, LocalPlace(num_ranks), lambda: str(data / PREPARED))
    first_step_at = job.launched_at + result.finished.first_step_seconds
    report(first_step_at, result.epochs[-1].samples_per_second)


def torchrun(data: Path, num_ranks: int) -> None:
    """Run a bare DistributedDataParallel script under torchrun."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    from benchmarks.mnist_like import MnistLike

    dist.init_process_group("gloo")
    recipe = MnistLike()
    images, labels = recipe.datasets(data / PREPARED)[0].tensors
    dataset = TensorDataset(recipe.inputs(images), labels)
    model = DistributedDataParallel(recipe.model().to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // num_ranks, sampler=sampler)
    first_step_at = 0.0
    for epoch in range(NUM_EPOCHS):
        started = time.perf_counter()
        sampler.set_epoch(epoch)
        for step, (inputs, targets) in enumerate(loader):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            first_step_at = first_step_at or time.time()
            if step % LOG_INTERVAL == 0:
                loss.item()
        seconds = time.perf_counter() - started
    if int(os.environ.get("RANK", 0)) == 0:
        report(first_step_at, len(dataset) / seconds)
    dist.destroy_process_group()


def report(first_step_at: float, samples_per_second: float) -> None:
    """Print the outcome: the end of the first step, in seconds since the epoch, and the samples of
    all ranks.
    """
    outcome = {"first_step_at": first_step_at, "samples_per_second": samples_per_second}
    print(json.dumps(outcome), flush=True)


VARIANTS = {"ours": ours, "torchrun": torchrun}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    VARIANTS[arguments.variant](arguments.data, arguments.ranks)
