"""The session for Lightning's Trainer.

    from flyte_ddp.integrations.lightning import SessionCallback

    trainer = lightning.Trainer(..., callbacks=[SessionCallback()])

Lightning draws the samples itself. The global batch, and with it the samples of each optimizer
step, stay the same at any number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from torch.utils.data import DataLoader

from flyte_ddp import session
from flyte_ddp.errors import ConfigError
from flyte_ddp.integrations import loaders, training
from flyte_ddp.rank.batches import Batches, rank_and_world_size

SAVE_STEPS = 100  # optimizer steps between two checkpoints


@dataclass(eq=False, repr=False)
class SessionCallback(Callback):  # type: ignore[misc]
    """Reports to the run, keeps its checkpoints, resumes from them and stops when it has to. Under
    torchrun it is idle.

    A checkpoint is copied at once and written in the background. Each rank writes its own part of a
    split model. Other callbacks, such as ModelCheckpoint, still write their own files.

    Args:
        save_steps: optimizer steps between two checkpoints.
        global_batch_size: samples of all ranks' batches together, at any number of ranks; by
            default the loader's batch size times the number of ranks with which the run began.

    Raises:
        ConfigError: when training begins, if the strategy is not supported, or the ranks do not
            share the global batch evenly.

    Example:
        # in every rank
        callback = SessionCallback(save_steps=50)
        trainer = lightning.Trainer(strategy="ddp", max_epochs=10, callbacks=[callback])
        trainer.fit(module, loader)
    """

    save_steps: int = SAVE_STEPS
    global_batch_size: int | None = None
    # values of the checkpoint from which the training resumes
    _found: dict[str, Any] | None = None
    # facts of `share_batch` for each checkpoint; empty with `session.batches`
    _kept: dict[str, Any] = field(default_factory=dict)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not session.is_in_run():
            return
        training.begin("trainer.fit")
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            raise ConfigError(
                "strategy: expected ddp, or ModelParallelStrategy for FSDP2, got "
                f"{type(trainer.strategy).__name__}"
            )
        self._found = training.load(pl_module, trainer.optimizers, _stateful(trainer))
        trainer.loggers = [*trainer.loggers, _Reports()]
        process = trainer.strategy.process_dataloader
        trainer.strategy.process_dataloader = lambda loader: process(self._fit(trainer, loader))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._found is not None:
            training.set_generators(self._found)
            self._found = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not session.is_in_run() or trainer.global_step == session.current().reporter.step:
            training.beat()
            return
        self._num_batches = batch_idx + 1
        epoch = trainer.current_epoch + self._num_batches / trainer.num_training_batches
        session.report(step=trainer.global_step, epoch=epoch)
        if trainer.global_step % self.save_steps == 0:
            self.save(trainer)
        training.end_if_stopped(lambda: self.save(trainer))

    def on_validation_batch_end(self, *arguments: Any, **given: Any) -> None:
        training.beat()

    def save(self, trainer: Trainer) -> None:
        """Save the training as it is after an optimizer step. All ranks must call it together."""
        epoch, num_batches = trainer.current_epoch, self._num_batches
        # `limit_train_batches` ends an epoch before the last batch of its loader.
        if trainer.is_last_batch or num_batches >= trainer.num_training_batches:
            epoch, num_batches = epoch + 1, 0
        values = {**self._kept, "epoch": epoch, "num_batches": num_batches}
        objects = trainer.lightning_module, trainer.optimizers, _stateful(trainer)
        training.save(*objects, trainer.global_step, values)

    def _fit(self, trainer: Trainer, loader: Any) -> Any:
        """Return the training's loader with batches of a size that keeps the global batch of the
        run's beginning.
        """
        if not trainer.training:
            return loader
        if isinstance(loader, Batches):
            return self._check_batches(trainer, loader)
        if not isinstance(loader, DataLoader):
            raise ConfigError(
                f"train_dataloader: expected one DataLoader, got a {type(loader).__name__}"
            )
        total, size = self.global_batch_size, loader.batch_size or 0
        self._kept, share = loaders.share_batch(
            loader.dataset, self._found, total, size, _num_shares(trainer)
        )
        # Later loaders keep this global batch.
        self.global_batch_size = self._kept["global_batch_size"]
        found = self._found or {"num_batches": 0, "epoch": trainer.current_epoch}
        # The loop's own call of `set_epoch` would be too late for loader processes.
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(found["epoch"])
        return loaders.with_batches(loader, share, found["num_batches"])

    def _check_batches(self, trainer: Trainer, loader: Batches) -> Batches:
        """Check and return the `session.batches` of the epoch that begins. They keep the global
        batch by themselves.
        """
        batches = loader.batches
        reloads = trainer.reload_dataloaders_every_n_epochs
        num_shares = batches.share.num_shares
        for name, got, expected in (
            ("reload_dataloaders_every_n_epochs", reloads, 1),
            ("session.batches: epoch", batches.epoch, trainer.current_epoch),
            # The mesh must be strategy.device_mesh["data_parallel"].
            ("session.batches: ranks of its mesh", num_shares, _num_shares(trainer)),
            # Lightning reads one batch ahead if the data have no length.
            ("session.batches: dataset has a length", batches.length is not None, True),
        ):
            if got != expected:
                raise ConfigError(f"{name}: expected {expected} under Lightning, got {got}")
        return loader


class _Reports(Logger):  # type: ignore[misc]
    """Sends the values that the module logs as reports of the run."""

    name, version = "session", ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        session.report(step=session.current().reporter.step, **training.select_numbers(metrics))

    def log_hyperparams(self, *arguments: Any, **given: Any) -> None:
        """Report nothing."""


def _stateful(trainer: Trainer) -> list[Any]:
    """Return the objects with a state, except the model and its optimizers."""
    schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
    return [
        *trainer.callbacks,
        trainer.fit_loop,
        *schedulers,
        trainer.precision_plugin,
        *filter(None, [trainer.datamodule]),
    ]


def _num_shares(trainer: Trainer) -> int:
    """Return the number of shares of a batch. Ranks that split a layer by tensor parallelism read
    the same share.
    """
    return int(
        (trainer.distributed_sampler_kwargs or {}).get("num_replicas", rank_and_world_size()[1])
    )
