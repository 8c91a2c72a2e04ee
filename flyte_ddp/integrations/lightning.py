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

SAVE_STEPS = 100  # optimizer steps


@dataclass(eq=False, repr=False)
class SessionCallback(Callback):  # type: ignore[misc]
    """Reports to the run, keeps its checkpoints, resumes from them and stops when it has to. Under
    torchrun it is idle.

    A checkpoint is copied at once and written in the background, by each rank what it has of a
    split model. What other callbacks save besides, such as ModelCheckpoint, is left to them.

    Args:
        save_steps: optimizer steps between two checkpoints.
        global_batch_size: samples of all ranks' batches together, at any number of ranks; by
            default what the loader's batch size makes of it at the number of ranks with which the
            run began.

    Raises:
        ConfigError: as training begins: a strategy that is not supported; a global batch that the
            ranks do not share evenly.
    """

    save_steps: int = SAVE_STEPS
    global_batch_size: int | None = None
    # of the checkpoint that the training goes on from
    _found: dict[str, Any] | None = None
    # what `share_batch` keeps of data and batch; nothing with `session.batches`
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
        """Save the training as it is after an optimizer step. For all ranks together."""
        # `limit_train_batches` ends an epoch before the last batch of its loader.
        is_over = trainer.is_last_batch or self._num_batches >= trainer.num_training_batches
        values = {
            **self._kept,
            "epoch": trainer.current_epoch + is_over,
            "num_batches": 0 if is_over else self._num_batches,
        }
        objects = trainer.lightning_module, trainer.optimizers, _stateful(trainer)
        training.save(*objects, trainer.global_step, values)

    def _fit(self, trainer: Trainer, loader: Any) -> Any:
        """Return the training's loader with batches that keep the global batch what it was when the
        run began.
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
        self.global_batch_size = self._kept["global_batch_size"]  # of later loaders too
        found = self._found or {"num_batches": 0, "epoch": trainer.current_epoch}
        if hasattr(loader.sampler, "set_epoch"):  # the loop does it too late for loader processes
            loader.sampler.set_epoch(found["epoch"])
        return loaders.with_batches(loader, share, found["num_batches"])

    def _check_batches(self, trainer: Trainer, loader: Batches) -> Batches:
        """Return `session.batches` of the epoch that begins; it keeps the global batch by
        itself.
        """
        batches = loader.batches
        for name, got, expected in (
            (
                "reload_dataloaders_every_n_epochs",
                trainer.reload_dataloaders_every_n_epochs,
                1,
            ),
            ("session.batches: epoch", batches.epoch, trainer.current_epoch),
            # those of strategy.device_mesh["data_parallel"]
            ("session.batches: ranks of its mesh", batches.share.num_shares, _num_shares(trainer)),
            # Lightning reads a batch ahead of others
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
    """Return what has a state besides the model and its optimizers."""
    schedulers = [each.scheduler for each in trainer.lr_scheduler_configs]
    return [
        *trainer.callbacks,
        trainer.fit_loop,
        *schedulers,
        trainer.precision_plugin,
        *filter(None, [trainer.datamodule]),
    ]


def _num_shares(trainer: Trainer) -> int:
    """Return the ranks that share a batch: those that split a layer by tensor parallelism have the
    same samples.
    """
    return int(
        (trainer.distributed_sampler_kwargs or {}).get("num_replicas", rank_and_world_size()[1])
    )
