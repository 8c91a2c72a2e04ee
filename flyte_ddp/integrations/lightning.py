"""The session for Lightning's Trainer.

    from flyte_ddp.integrations.lightning import SessionCallback

    trainer = lightning.Trainer(..., callbacks=[SessionCallback()])

Lightning draws the samples itself. The global batch, and with it the samples of each optimizer step, stay the same at
any number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flyte_ddp import session
from flyte_ddp.errors import ConfigError
from flyte_ddp.integrations import loaders, training
from flyte_ddp.rank.batches import Batches, rank_and_world_size

with training.importing("lightning"):
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy

SAVE_STEPS = 100  # optimizer steps
HOOKS = ("_data_source", "_combined_loader", "_data_fetcher", "epoch_progress")  # of the fit loop


class SessionCallback(Callback):  # type: ignore[misc]
    """Reports to the run, keeps its checkpoints, resumes from them and stops when it has to. Under torchrun it is idle.

    A checkpoint is copied at once and written in the background, by each rank what it has of a split model. What other
    callbacks save besides, such as ModelCheckpoint, is left to them.

    Args:
        save_steps: optimizer steps between two checkpoints.
        global_batch_size: samples of all ranks' batches together, at any number of ranks; by default what the loader's
            batch size makes of it at the number of ranks with which the run began.

    Raises:
        ConfigError: as training begins: a strategy, or a version of lightning, that is not supported; a global batch
            that the ranks do not share evenly.
    """

    def __init__(self, save_steps: int = SAVE_STEPS, global_batch_size: int | None = None) -> None:
        self.save_steps = save_steps
        self.global_batch_size = global_batch_size
        self._found: dict[str, Any] | None = None  # of the checkpoint that the training goes on from
        self._step = 0
        self._num_samples: int | None = None  # of the training data
        self._reported: dict[str, Any] = {}  # tensors by their names
        if session.is_in_run():
            training.record_once()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not session.is_in_run():
            return
        training.check_has("lightning", trainer.fit_loop, *HOOKS)
        training.begin("trainer.fit")
        if isinstance(trainer.strategy, (DeepSpeedStrategy, FSDPStrategy)):
            kind = type(trainer.strategy).__name__
            raise ConfigError(f"strategy: expected ddp, or ModelParallelStrategy for FSDP2, got {kind}")
        found = self._found = training.load(pl_module, trainer.optimizers)
        if found:
            self.global_batch_size = found["global_batch_size"]
            self._restore(trainer, found)
        self._step = trainer.global_step
        source = trainer.fit_loop._data_source
        open_loader = source.dataloader
        source.dataloader = lambda: self._fit(trainer, open_loader())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._found is None:
            return
        loop, found = trainer.fit_loop, self._found
        self._found = None  # its tensors are not needed any more
        for loader in loop._combined_loader.flattened:
            loaders.skip_batches(loader, found["num_batches"])
            sampler: Any = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
            if hasattr(sampler, "set_epoch"):  # the loop does it too late for loader processes
                sampler.set_epoch(loop.epoch_progress.current.processed)
        iter(loop._data_fetcher)
        training.set_generators(found)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not session.is_in_run():
            return
        if trainer.global_step == self._step:
            training.beat()
            return
        self._step = trainer.global_step
        self._num_batches = 0 if trainer.is_last_batch else batch_idx + 1
        self._report(trainer, self._step % trainer.log_every_n_steps == 0)
        if self._step % self.save_steps == 0:
            self.save(trainer)
        training.end_if_stopped(lambda: self.save(trainer))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer, True)

    def on_validation_batch_end(self, *arguments: Any, **given: Any) -> None:
        training.beat()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._report(trainer, True)

    def save(self, trainer: Trainer) -> None:
        """Save the training as it is after an optimizer step. For all ranks together."""
        module = trainer.lightning_module
        values = {
            "global_batch_size": self.global_batch_size,
            "num_samples": self._num_samples,
            "num_batches": self._num_batches,
            "loops": trainer.fit_loop.state_dict(),
            "schedulers": [each.scheduler.state_dict() for each in trainer.lr_scheduler_configs],
            "callbacks": {each.state_key: each.state_dict() for each in trainer.callbacks},
            "precision": trainer.precision_plugin.state_dict(),
            "data": trainer.datamodule.state_dict() if trainer.datamodule else {},
        }
        training.save(module, trainer.optimizers, trainer.global_step, values)

    def _restore(self, trainer: Trainer, found: Mapping[str, Any]) -> None:
        trainer.fit_loop.load_state_dict(found["loops"])
        for each, state in zip(trainer.lr_scheduler_configs, found["schedulers"], strict=True):
            each.scheduler.load_state_dict(state)
        for callback in trainer.callbacks:
            if state := found["callbacks"].get(callback.state_key):
                callback.load_state_dict(state)
        trainer.precision_plugin.load_state_dict(found["precision"])
        if trainer.datamodule:
            trainer.datamodule.load_state_dict(found["data"])

    def _fit(self, trainer: Trainer, loader: Any) -> Any:
        """Return the user's loader with batches that keep the global batch what it was when the run began."""
        if isinstance(loader, Batches):
            return self._check_batches(trainer, loader)
        if not hasattr(loader, "batch_size"):
            raise ConfigError(f"train_dataloader: expected one DataLoader, got a {type(loader).__name__}")
        loaders.check_length(self._found, loader.dataset)
        self._num_samples = loaders.count_samples(loader.dataset)
        num_shares = _num_shares(trainer)
        if self.global_batch_size is None:
            self.global_batch_size = loader.batch_size * num_shares
        share = loaders.split_batch(self.global_batch_size, num_shares)
        return loaders.with_batch_size(loader, share)

    def _check_batches(self, trainer: Trainer, loader: Batches) -> Batches:
        """Return `session.batches` of the epoch that begins; it keeps the global batch by itself."""
        if trainer.reload_dataloaders_every_n_epochs != 1:
            got = trainer.reload_dataloaders_every_n_epochs
            raise ConfigError(f"reload_dataloaders_every_n_epochs: expected 1 with session.batches, got {got}")
        if loader.batches.epoch != trainer.current_epoch:
            expected = f"expected trainer.current_epoch, which is {trainer.current_epoch}"
            raise ConfigError(f"session.batches: epoch: {expected}, got {loader.batches.epoch}")
        if loader.batches.length is None:  # of which Lightning reads a batch ahead
            raise ConfigError("session.batches: dataset: expected one with a length and items under Lightning")
        if (got := loader.batches.share[1]) != (num_shares := _num_shares(trainer)):
            expected = f'expected {num_shares} ranks, as of strategy.device_mesh["data_parallel"]'
            raise ConfigError(f"session.batches: mesh: {expected}, got {got}")
        self.global_batch_size = loader.batches.global_batch_size
        return loader

    def _report(self, trainer: Trainer, has_metrics: bool) -> None:
        if not session.is_in_run():
            return
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        epoch = trainer.current_epoch + min(1.0, progress.ready / max(1, trainer.num_training_batches))
        metrics = training.select_numbers(self._take_new(trainer.callback_metrics)) if has_metrics else {}
        session.report(step=trainer.global_step, epoch=epoch, **metrics)

    def _take_new(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was logged since the last report: Lightning keeps each value, in its memory, until the next."""
        memory = {name: each.data_ptr() for name, each in self._reported.items()}
        new = {name: each for name, each in metrics.items() if memory.get(name) != each.data_ptr()}
        self._reported.update(new)  # which keeps the memory from being used for another one
        return new


def _num_shares(trainer: Trainer) -> int:
    """Return the ranks that share a batch: those that split a layer by tensor parallelism have the same samples."""
    return int((trainer.distributed_sampler_kwargs or {}).get("num_replicas", rank_and_world_size()[1]))
