"""The training programs that are compared, each in its own processes: `python -m benchmarks.variants floor --data DIR`.

All train the model of recipe `mnist` for two epochs at the same global batch size and report the speed of the second.
The alternatives follow their own tutorials, with the same optimizer, precision and memory format as this package. Every
import is inside a function, because the time to the first step is measured too.
"""

from __future__ import annotations

import argparse
import datetime
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
CHECKPOINT_INTERVAL = 5  # steps, in the runs that lose a rank
PREPARED = "prepared"  # the recipe's prepared data, below the data directory; beside it torchvision's MNIST/raw


def ours(data: Path, precision: str, num_ranks: int) -> None:
    from flyte_ddp.config import resolve
    from flyte_ddp.launch import driver
    from flyte_ddp.launch.local import LocalPlace
    from flyte_ddp.launch.process.programs import Job, recipe_program
    from flyte_ddp.recipes import get_recipe

    name = "benchmarks.mnist_like.MnistLike"
    config = resolve(
        get_recipe(name).defaults,
        {"epochs": NUM_EPOCHS, "global_batch_size": BATCH_SIZE, "precision": precision, "log_interval": LOG_INTERVAL},
    )
    with tempfile.TemporaryDirectory() as checkpoints:
        job = Job(recipe_program(name, config), checkpoints, time.time())
        result = driver.run(job, LocalPlace(num_ranks), lambda: str(data / PREPARED))
    finished = result.finished
    report(
        job.launched_at + finished.first_step_seconds,
        result.epochs[-1].samples_per_second,
        finished.peak_memory_bytes,
        memory_with_supervisor_bytes=num_ranks * finished.peak_memory_bytes + peak_memory_bytes(),
    )


def dask(data: Path, precision: str, num_ranks: int) -> None:
    """Train on a Dask cluster with one rank per node. The time to the first step starts when the workers are ready."""
    from flyte_ddp.cluster.connect import open_cluster

    cluster = _local_nodes(num_ranks)
    with open_cluster(cluster, "benchmark") as client, tempfile.TemporaryDirectory() as checkpoints:
        workers_ready_at = time.time()
        finished, epochs, first_step_at = _on_dask("MnistLike", data, client, cluster, checkpoints, precision=precision)
    report(first_step_at, epochs[-1].samples_per_second, finished.peak_memory_bytes, counted_from=workers_ready_at)


def dask_killed(data: Path, precision: str, num_ranks: int) -> None:
    """Like `dask`; the second rank is killed once."""
    from benchmarks.mnist_like import KilledMnistLike, RankKill
    from flyte_ddp.cluster.connect import open_cluster

    cluster = _local_nodes(num_ranks)
    with tempfile.TemporaryDirectory() as directory:
        os.environ[KilledMnistLike.DIRECTORY] = directory  # which the workers inherit
        with open_cluster(cluster, "benchmark") as client:
            finished, epochs, first_step_at = _on_dask(
                "KilledMnistLike",
                data,
                client,
                cluster,
                f"{directory}/checkpoints",
                precision=precision,
                checkpoint_interval=CHECKPOINT_INTERVAL,
            )
        report(
            first_step_at,
            epochs[-1].samples_per_second,
            finished.peak_memory_bytes,
            recovery_seconds=RankKill(Path(directory)).recovery_seconds(),
        )


def _local_nodes(count: int) -> Any:
    from flyte_ddp.cluster.config import ClusterConfig

    return ClusterConfig(kind="local", num_nodes=count)


def _on_dask(
    recipe: str, data: Path, client: Any, cluster: Any, checkpoints: str, **config: Any
) -> tuple[Any, list[Any], float]:
    """Return a run's last event, its epochs, and the end of its first step in seconds since the epoch."""
    from flyte_ddp import events
    from flyte_ddp.config import resolve
    from flyte_ddp.launch import driver
    from flyte_ddp.launch.dask.place import DaskPlace
    from flyte_ddp.launch.process.programs import Job, recipe_program
    from flyte_ddp.recipes import get_recipe

    class Clock:
        """Convert the seconds of a run's last event, counted from the launch of its ranks, into a timestamp."""

        first_step_at = 0.0

        def handle(self, event: events.Event) -> None:
            if isinstance(event, events.RunFinished):
                self.first_step_at = time.time() - event.seconds + event.first_step_seconds

        def close(self, error: BaseException | None) -> None:
            pass

    name = f"benchmarks.mnist_like.{recipe}"
    config = {"epochs": NUM_EPOCHS, "global_batch_size": BATCH_SIZE, "log_interval": LOG_INTERVAL, **config}
    job = Job(recipe_program(name, resolve(get_recipe(name).defaults, config)), checkpoints, time.time())
    clock = Clock()
    result = driver.run(job, DaskPlace(client, cluster), lambda: str(data / PREPARED), [clock])
    return result.finished, result.epochs, clock.first_step_at


def floor(data: Path, precision: str, num_ranks: int) -> None:
    """Run the bare step on one prepared batch, again and again. A training loop can only be slower."""
    import torch

    from benchmarks.mnist_like import MnistLike
    from flyte_ddp.config import TrainingConfig
    from flyte_ddp.rank.optim import build_optimizer

    recipe = MnistLike()
    inputs, targets = _normalized(recipe.datasets(data / PREPARED)[0], BATCH_SIZE)
    model = recipe.model().to(memory_format=torch.channels_last)
    optimizer = build_optimizer(model, TrainingConfig(optimizer="adamw", learning_rate=LEARNING_RATE))
    num_steps = len(recipe.datasets(data / PREPARED)[0]) // BATCH_SIZE
    batches = [(inputs.contiguous(memory_format=torch.channels_last), targets)] * num_steps
    _train(model, optimizer, lambda epoch: batches, num_steps * BATCH_SIZE, _autocast(precision))


def tutorial(data: Path, precision: str, num_ranks: int) -> None:
    """Train as PyTorch's MNIST tutorials do: torchvision's data set, transformed per sample, in one process."""
    import torch
    from torch.nn import functional
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    from benchmarks.mnist_like import MnistLike

    transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
    train_loader = DataLoader(datasets.MNIST(str(data), train=True, transform=transform), BATCH_SIZE, shuffle=True)
    test_loader = DataLoader(datasets.MNIST(str(data), train=False, transform=transform), batch_size=1000)
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

    _train(model, optimizer, lambda epoch: train_loader, len(train_loader.dataset), nullcontext, after_epoch=evaluate)


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


def torchrun_killed(data: Path, precision: str, num_ranks: int) -> None:
    """Like `torchrun`, with its own checkpoints; the second rank is killed, and torchrun restarts all ranks."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    from benchmarks.mnist_like import RankKill

    directory = data / f"torchrun-{os.environ['TORCHELASTIC_RUN_ID']}"
    directory.mkdir(exist_ok=True)
    kill = RankKill(directory)
    kill.install()
    checkpoint = directory / "checkpoint.pt"
    # Not the default of 30 minutes: after a restart gloo's ranks sometimes do not find each other and wait.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    dataset, model, optimizer = _parts(data)
    step = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // num_ranks, sampler=sampler)

    def save(*_: Any) -> None:
        nonlocal step
        step += 1
        if step % CHECKPOINT_INTERVAL == 0 and dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, checkpoint)

    optimizer.register_step_post_hook(save)
    _train(
        DistributedDataParallel(model),
        optimizer,
        lambda epoch: loader,
        len(dataset),
        _autocast(precision),
        outcome=lambda: {"recovery_seconds": kill.recovery_seconds()},
    )
    dist.destroy_process_group()


def fabric(data: Path, precision: str, num_ranks: int) -> None:
    """Run Lightning Fabric under torchrun."""
    from lightning_fabric import Fabric
    from torch.utils.data import DataLoader

    fabric = Fabric(
        accelerator="cpu",
        strategy="ddp",
        devices=num_ranks,
        precision={"fp32": "32-true", "bf16": "bf16-mixed"}[precision],
    )
    fabric.launch()
    dataset, model, optimizer = _parts(data)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(dataset, batch_size=BATCH_SIZE // num_ranks, shuffle=True))

    def batches(epoch: int) -> Iterable[Any]:
        loader.sampler.set_epoch(epoch)
        return loader

    _train(model, optimizer, batches, len(dataset), nullcontext, fabric.backward)


def accelerate(data: Path, precision: str, num_ranks: int) -> None:
    """Run Hugging Face Accelerate under torchrun."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, mixed_precision={"fp32": "no", "bf16": "bf16"}[precision])
    dataset, model, optimizer = _parts(data)
    loader = DataLoader(dataset, batch_size=BATCH_SIZE // num_ranks, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    _train(model, optimizer, lambda epoch: loader, len(dataset), nullcontext, accelerator.backward)
    accelerator.end_training()


def _parts(data: Path) -> tuple[Dataset[Any], nn.Module, Optimizer]:
    """Return normalized floats, the model and this package's optimizer, for the scripts with several ranks."""
    import torch
    from torch.utils.data import TensorDataset

    from benchmarks.mnist_like import MnistLike

    recipe = MnistLike()
    model = recipe.model().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    return TensorDataset(*_normalized(recipe.datasets(data / PREPARED)[0])), model, optimizer


def _normalized(dataset: Any, count: int | None = None) -> tuple[Tensor, Tensor]:
    from benchmarks.mnist_like import MnistLike

    images, labels = dataset.tensors
    return MnistLike().inputs(images[:count]), labels[:count]


def _autocast(precision: str) -> Callable[[], Any]:
    import torch

    return nullcontext if precision == "fp32" else lambda: torch.autocast("cpu", dtype=torch.bfloat16)


def _train(
    model: Any,
    optimizer: Any,
    batches: Callable[[int], Iterable[Any]],
    num_samples: int,
    autocast: Callable[[], Any],
    backward: Callable[[Tensor], Any] | None = None,
    after_epoch: Callable[[], None] = lambda: None,
    outcome: Callable[[], dict[str, float]] = dict,
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
            backward(loss) if backward else loss.backward()
            optimizer.step()
            first_step_at = first_step_at or time.time()
            if step % LOG_INTERVAL == 0:
                loss.item()
        seconds = time.perf_counter() - started
        after_epoch()
    if int(os.environ.get("RANK", 0)) == 0:
        report(first_step_at, num_samples / seconds, peak_memory_bytes(), **outcome())


def report(first_step_at: float, samples_per_second: float, peak_memory_bytes: int, **more: float) -> None:
    """Print the outcome. The end of the first step is in seconds since the epoch; samples are of all ranks."""
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
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


VARIANTS = {
    variant.__name__: variant
    for variant in (ours, dask, dask_killed, floor, tutorial, torchrun, torchrun_killed, fabric, accelerate)
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    VARIANTS[arguments.variant](arguments.data, arguments.precision, arguments.ranks)
