"""Trainings in the loops of others, which count how often each sample is trained on.

The model has a parameter for each sample. Its gradient is the same each time the sample is seen.
Every rank calls these functions.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from flyte_ddp import session

RATE = 0.05


def require(package: str) -> None:
    """Skip the test without the package. This process does not import it.

    Lightning sets a variable that torch reads. Later ranks of this process could not be forked.
    """
    import pytest

    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


@dataclass(frozen=True)
class Task:
    """A training.

    Attributes:
        directory: place of the files. A file `step-STEP-RANK-SIGNAL` in it sends the signal to
            the rank once, before that step.
        batch_size: global.
        num_missing: number of samples left out at the end. The model has their parameters anyway.
        limit: optimizer steps of an epoch; None for all of its batches.
        save_steps: between two checkpoints; 0 for a training without the lines that a user adds.
        step_seconds: how long a step takes.
    """

    directory: str
    _: KW_ONLY
    num_samples: int = 96
    num_missing: int = 0
    batch_size: int = 8
    epochs: int = 3
    limit: int | None = None
    save_steps: int = 2
    step_seconds: float = 0.0

    @property
    def samples(self) -> Samples:
        return Samples(self.num_samples - self.num_missing)

    @property
    def batch_size_per_rank(self) -> int:
        return self.batch_size // int(os.environ["WORLD_SIZE"])

    def begin_step(self, step: int) -> None:
        """Wait, and cause the faults of this step. The loops call it before each optimizer step,
        with the number of finished steps.
        """
        time.sleep(self.step_seconds)
        for fault in Path(self.directory).glob(f"step-{step}-{os.environ['RANK']}-*"):
            fault.unlink()
            session.current().saver.wait()
            os.kill(os.getpid(), int(fault.name.rpartition("-")[2]))
            time.sleep(30)

    def results(self, model: Counting) -> dict[str, list[Tensor]]:
        """Return how often each sample was seen, the other weights, and the loss over all samples.
        For all ranks.
        """
        seen = _whole(model.seen) / (RATE / self.batch_size)
        samples = Samples(self.num_samples)
        batch = default_collate([samples[index] for index in range(self.num_samples)])
        with torch.no_grad():
            loss = model.to("cpu")(**batch)["loss"]
        weights = [_whole(each) for each in model.layers.parameters()]
        return {"counts": [seen.round().long()], "weights": weights, "loss": [loss]}


class Samples(Dataset[Any]):
    """Noise, with the number of each sample."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        inputs = torch.randn(6, generator=torch.Generator().manual_seed(index))
        return {"inputs": inputs, "number": torch.tensor(index), "labels": torch.tensor(index % 3)}


class Stream(IterableDataset[Any]):
    """The samples without a length, in another order in each epoch."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        order = torch.Generator().manual_seed(self.epoch)
        for index in torch.randperm(len(self.samples), generator=order).tolist():
            yield self.samples[index]


class Counting(nn.Module):
    """A classifier with a number for each sample, which grows by `RATE / batch_size` each time it
    is seen.
    """

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.seen = nn.Parameter(torch.zeros(num_samples))

    def forward(self, inputs: Tensor, number: Tensor, labels: Tensor) -> dict[str, Tensor]:
        loss = nn.functional.cross_entropy(self.layers(inputs), labels)
        return {"loss": loss - (self.seen[number] - self.seen[number].detach()).mean()}


def _whole(parameter: Tensor) -> Tensor:
    whole: Tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()


def train_transformers(
    task: Task,
    splits: bool = False,
    streams: bool = False,
    num_batches: int = 1,
    max_steps: int = -1,
) -> Any:
    """Train with Hugging Face's Trainer.

    Args:
        splits: the model over the ranks, by FSDP2.
        streams: samples of data without a length.
        num_batches: of a rank in an optimizer step.
        max_steps: of all epochs; with `streams` by default those of `task.epochs`.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):  # type: ignore[misc]
        num_steps = 0  # steps of the epoch in this process

        def on_epoch_begin(self, *arguments: Any, **given: Any) -> None:
            self.num_steps = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            task.begin_step(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.num_steps += 1
            control.should_epoch_stop = self.num_steps == task.limit

    model = Counting(task.num_samples)
    if streams and max_steps < 0:
        max_steps = task.epochs * task.num_samples // task.batch_size
    arguments = TrainingArguments(
        output_dir=f"{task.directory}/output",
        num_train_epochs=task.epochs,
        max_steps=max_steps,
        gradient_accumulation_steps=num_batches,
        per_device_train_batch_size=task.batch_size_per_rank // num_batches,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=4,
        save_strategy="no",
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
        report_to="none",
        ddp_find_unused_parameters=False,
    )
    samples = Stream(task.samples) if streams else task.samples
    trainer = Trainer(model, arguments, train_dataset=samples, callbacks=[Steps()])
    if splits:
        _split(trainer.accelerator)
        trainer.is_fsdp_enabled = True
    if task.save_steps:
        from flyte_ddp.integrations.transformers import SessionCallback

        trainer.add_callback(SessionCallback(trainer, task.save_steps, task.batch_size))
    trainer.train()
    return task.results(model)


def train_lightning(task: Task, shares_batches: bool = False, splits: bool = False) -> Any:
    """Train with Lightning's Trainer.

    Args:
        shares_batches: a data module returns `session.batches`. The last batch is smaller.
        splits: the model over the ranks, by FSDP2.
    """
    import lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    class Data(lightning.LightningDataModule):  # type: ignore[misc]
        def train_dataloader(self) -> Any:
            return session.batches(task.samples, task.batch_size, self.trainer.current_epoch)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = Counting(task.num_samples)

        def configure_model(self) -> None:
            if splits:
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

        def training_step(self, batch: Any, index: int) -> Tensor:
            batch, weight = batch if shares_batches else (batch, 1.0)
            loss: Tensor = weight * self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    class Steps(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            task.begin_step(trainer.global_step)

    callbacks: list[Any] = [Steps()]
    if task.save_steps:
        from flyte_ddp.integrations.lightning import SessionCallback

        callbacks.append(SessionCallback(task.save_steps, task.batch_size))
    module = Module()
    trainer = lightning.Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        strategy=ModelParallelStrategy(int(os.environ["WORLD_SIZE"]), 1) if splits else "ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=task.epochs,
        limit_train_batches=task.limit,
        log_every_n_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        reload_dataloaders_every_n_epochs=int(shares_batches),
        callbacks=callbacks,
    )
    if shares_batches:
        trainer.fit(module, datamodule=Data())
    else:
        trainer.fit(module, DataLoader(task.samples, task.batch_size_per_rank, shuffle=True))
    return task.results(module.model)


def _split(accelerator: Any) -> None:
    """Have Accelerate split models by FSDP2, also on CPUs, where its options have no effect."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType

    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(fsdp_version=2)


def train_accelerate(task: Task, splits: bool = False) -> Any:
    """Train in a loop with Accelerate.

    Args:
        splits: the model over the ranks, by FSDP2.
    """
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    if splits:
        _split(accelerator)
    torch.manual_seed(0)
    model = Counting(task.num_samples)
    loader: Any = DataLoader(task.samples, task.batch_size_per_rank, shuffle=True)
    objects = model, torch.optim.SGD(model.parameters(), lr=RATE), loader
    if task.save_steps:
        from flyte_ddp.integrations.accelerate import prepare

        wrapped, optimizer, loader = prepare(
            accelerator, *objects, save_steps=task.save_steps, global_batch_size=task.batch_size
        )
    else:
        wrapped, optimizer, loader = accelerator.prepare(*objects)
    for _ in range(task.epochs):
        for number, batch in enumerate(loader, 1):
            task.begin_step(session.current().reporter.step if task.save_steps else 0)
            loss = wrapped(**batch)["loss"]
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            accelerator.log({"loss": loss.item()})
            if number == task.limit:
                break
    return task.results(model)


PROGRAMS = {
    "transformers": train_transformers,
    "transformers fsdp2": functools.partial(train_transformers, splits=True),
    "lightning": train_lightning,
    "lightning data module": functools.partial(train_lightning, shares_batches=True),
    "lightning fsdp2": functools.partial(train_lightning, splits=True),
    "accelerate": train_accelerate,
    "accelerate fsdp2": functools.partial(train_accelerate, splits=True),
}
