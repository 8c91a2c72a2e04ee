"""The training programs that are compared, each in its own processes: `python -m
benchmarks.variants floor --data DIR`.

All train the model of recipe `mnist` for two epochs at the same global batch size and report the
speed of the second. The alternatives follow their own tutorials, with the same optimizer, precision
and memory format as this package. Every import is inside a function, because the time to the first
step is measured too.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import Dataset

BATCH_SIZE = 128  # global
LEARNING_RATE = 2e-3
LOG_INTERVAL = 20  # steps between two reads of the loss
NUM_EPOCHS = 2
# the recipe's prepared data, below the data directory; beside it torchvision's MNIST/raw
PREPARED = "prepared"


def ours(data: Path, precision: str, num_ranks: int) -> None:
    from flyte_ddp.launch.control import driver
    from flyte_ddp.launch.nodes.local import LocalPlace

    with tempfile.TemporaryDirectory() as checkpoints:
        job = _job(precision, checkpoints)
        result = driver.run(job, LocalPlace(num_ranks), lambda: str(data / PREPARED))
    finished = result.finished
    report(
        job.launched_at + finished.first_step_seconds,
        result.epochs[-1].samples_per_second,
        finished.peak_memory_bytes,
        memory_with_supervisor_bytes=num_ranks * finished.peak_memory_bytes + peak_memory_bytes(),
    )


def dask(data: Path, precision: str, num_ranks: int) -> None:
    """Train on a Dask cluster with one rank per node. The time to the first step starts when the
    workers are ready.
    """
    from flyte_ddp.cluster.config import ClusterConfig
    from flyte_ddp.cluster.connect import open_cluster
    from flyte_ddp.launch.control import driver
    from flyte_ddp.launch.nodes.dask.place import DaskPlace

    cluster = ClusterConfig(kind="local", num_nodes=num_ranks)
    with open_cluster(cluster, "benchmark") as client, tempfile.TemporaryDirectory() as checkpoints:
        job = _job(precision, checkpoints)
        result = driver.run(job, DaskPlace(client, cluster), lambda: str(data / PREPARED))
        # The events count from the launch of the ranks, which was so long ago.
        first_step_at = time.time() - result.finished.seconds + result.finished.first_step_seconds
    speed, memory = result.epochs[-1].samples_per_second, result.finished.peak_memory_bytes
    report(first_step_at, speed, memory, counted_from=job.launched_at)


def _job(precision: str, checkpoints: str) -> Any:
    from flyte_ddp.config import resolve
    from flyte_ddp.launch.protocol.programs import Job, recipe_program
    from flyte_ddp.recipes import get_recipe

    name = "benchmarks.mnist_like.MnistLike"
    config = {"epochs": NUM_EPOCHS, "global_batch_size": BATCH_SIZE, "precision": precision}
    program = recipe_program(
        name, resolve(get_recipe(name).defaults, {**config, "log_interval": LOG_INTERVAL})
    )
    return Job(program, checkpoints, time.time())


def floor(data: Path, precision: str, num_ranks: int) -> None:
    """Run the bare step on one prepared batch, again and again. A training loop can only be
    slower.
    """
    import torch

    from benchmarks.mnist_like import MnistLike
    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.training.optim import build_optimizer

    recipe = MnistLike()
    inputs, targets = _normalized(recipe.datasets(data / PREPARED)[0], BATCH_SIZE)
    model = recipe.model().to(memory_format=torch.channels_last)
    optimizer = build_optimizer(
        model, TrainingConfig(optimizer="adamw", learning_rate=LEARNING_RATE)
    )
    num_steps = len(recipe.datasets(data / PREPARED)[0]) // BATCH_SIZE
    batches = [(inputs.contiguous(memory_format=torch.channels_last), targets)] * num_steps
    _train(model, optimizer, lambda epoch: batches, num_steps * BATCH_SIZE, _autocast(precision))


def tutorial(data: Path, precision: str, num_ranks: int) -> None:
    """Train as PyTorch's MNIST tutorials do: torchvision's data set, transformed per sample, in one
    process.
    """
    import torch
    from torch.nn import functional
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    from benchmarks.mnist_like import MnistLike

    transform = transforms.Compose(
        [transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
    )
    train_loader = DataLoader(
        datasets.MNIST(str(data), train=True, transform=transform), BATCH_SIZE, shuffle=True
    )
    test_loader = DataLoader(
        datasets.MNIST(str(data), train=False, transform=transform), batch_size=1000
    )
    model = MnistLike().model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def evaluate() -> None:
        model.eval()
        loss = correct = 0.0
        with torch.no_grad():
            for inputs, targets in test_loader:
                outputs = model(inputs)
                loss += functional.cross_entropy(outputs, targets, reduction="sum").item()
                correct += (outputs.argmax(dim=1) == targets).sum().item()
        model.train()

    _train(
        model,
        optimizer,
        lambda epoch: train_loader,
        len(train_loader.dataset),
        nullcontext,
        after_epoch=evaluate,
    )


def torchrun(data: Path, precision: str, num_ranks: int) -> None:
    """Run a bare DistributedDataParallel script under torchrun."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    dist.init_process_group("gloo")
    dataset, model, optimizer = _parts(data)
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // num_ranks, sampler=sampler)

    def batches(epoch: int) -> Iterable[Any]:
        sampler.set_epoch(epoch)
        return loader

    _train(DistributedDataParallel(model), optimizer, batches, len(dataset), _autocast(precision))
    dist.destroy_process_group()


def _parts(data: Path) -> tuple[Dataset[Any], nn.Module, Optimizer]:
    """Return normalized floats, the model and this package's optimizer, for the scripts with
    several ranks.
    """
    import torch
    from torch.utils.data import TensorDataset

    from benchmarks.mnist_like import MnistLike

    recipe = MnistLike()
    model = recipe.model().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True
    )
    return TensorDataset(*_normalized(recipe.datasets(data / PREPARED)[0])), model, optimizer


def _normalized(dataset: Any, count: int | None = None) -> tuple[Tensor, Tensor]:
    from benchmarks.mnist_like import MnistLike

    images, labels = dataset.tensors
    return MnistLike().inputs(images[:count]), labels[:count]


def _autocast(precision: str) -> Callable[[], Any]:
    import torch

    return (
        nullcontext if precision == "fp32" else lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    )


def _train(
    model: Any,
    optimizer: Any,
    batches: Callable[[int], Iterable[Any]],
    num_samples: int,
    autocast: Callable[[], Any],
    after_epoch: Callable[[], None] = lambda: None,
) -> None:
    """Run the loop that all alternatives share; the first rank reports its last epoch."""
    from torch.nn import functional

    first_step_at = 0.0
    for epoch in range(NUM_EPOCHS):
        started = time.perf_counter()
        for step, (inputs, targets) in enumerate(batches(epoch)):
            optimizer.zero_grad()
            with autocast():
                loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            first_step_at = first_step_at or time.time()
            if step % LOG_INTERVAL == 0:
                loss.item()
        seconds = time.perf_counter() - started
        after_epoch()
    if int(os.environ.get("RANK", 0)) == 0:
        report(first_step_at, num_samples / seconds, peak_memory_bytes())


def report(
    first_step_at: float, samples_per_second: float, peak_memory_bytes: int, **more: float
) -> None:
    """Print the outcome. The end of the first step is in seconds since the epoch; samples are of
    all ranks.
    """
    outcome = {
        "first_step_at": first_step_at,
        "samples_per_second": samples_per_second,
        "peak_memory_bytes": peak_memory_bytes,
        "memory_with_supervisor_bytes": peak_memory_bytes,
        **more,
    }
    print(json.dumps(outcome), flush=True)


def peak_memory_bytes() -> int:
    """Return the peak resident size of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


VARIANTS = {variant.__name__: variant for variant in (ours, dask, floor, tutorial, torchrun)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    VARIANTS[arguments.variant](arguments.data, arguments.precision, arguments.ranks)
