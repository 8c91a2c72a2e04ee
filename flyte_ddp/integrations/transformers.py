"""The session for Hugging Face's Trainer, and what derives from it, such as TRL's SFTTrainer.

    from flyte_ddp.integrations.transformers import SessionCallback

    trainer = Trainer(...)
    trainer.add_callback(SessionCallback(trainer))

The Trainer draws the samples itself, and skips those that are done as it does for `resume_from_checkpoint`. The global
batch, and with it the samples of each optimizer step, stay the same at any number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flyte_ddp import session
from flyte_ddp.integrations import loaders, training
from flyte_ddp.integrations.accelerate import check_split

with training.importing("transformers"):
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

# Of the Trainer's own time and count of work: the run measures these itself.
BOOKKEEPING = re.compile(r"(.*_)?(runtime|\w+_per_second|total_flos|num_input_tokens_seen|model_preparation_time)")
HOOKS = ("_save_checkpoint", "_load_from_checkpoint", "_load_rng_state", "_load_callback_state", "_train_batch_size")


class SessionCallback(TrainerCallback):  # type: ignore[misc]
    """Reports to the run, keeps its checkpoints, resumes from them and stops when it has to. Under torchrun it is idle.

    A checkpoint is made where the Trainer's `save_strategy` asks for one, in the session's place and not in
    `output_dir`: copied at once and written in the background, by each rank what it has of a split model. Only with
    `load_best_model_at_end`, which needs its own files, does the Trainer write these besides.

    Args:
        save_steps: optimizer steps between two checkpoints; by default those of `save_strategy`.
        global_batch_size: samples of an optimizer step, at any number of ranks; by default what the arguments make of
            it at the number of ranks with which the run began.

    Raises:
        ConfigError: the version of transformers, or the way to split the model, is not supported; a global batch that
            the ranks do not share evenly.
    """

    def __init__(self, trainer: Trainer, save_steps: int | None = None, global_batch_size: int | None = None) -> None:
        training.check_has("transformers", trainer, *HOOKS)
        self.trainer = trainer
        self.save_steps = save_steps
        self.global_batch_size = global_batch_size
        self._found: dict[str, Any] | None = None  # of the checkpoint that the training goes on from
        self._train: Callable[..., Any] = trainer.train
        self._save_files: Callable[..., Any] = trainer._save_checkpoint
        if not session.is_in_run():
            return
        check_split(trainer.accelerator)
        training.record_once()
        trainer.train = self.train
        if session.checkpoints:
            trainer._save_checkpoint = self._save_checkpoint

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train as `Trainer.train`, from the session's newest checkpoint on if there is one."""
        training.begin("trainer.train")
        trainer = self.trainer
        is_split = trainer.is_fsdp_enabled or training.is_split_model(trainer.model)
        found = self._found = training.load_values(is_split)
        loaders.check_length(found, trainer.train_dataset)
        self._keep_global_batch(found["global_batch_size"] if found else self.global_batch_size)
        if found is None:
            return self._train(resume_from_checkpoint, **options)
        hooks = {"_load_from_checkpoint": lambda *_: None, "_load_rng_state": lambda _: training.set_generators(found)}
        own = {name: getattr(trainer, name) for name in hooks}
        with tempfile.TemporaryDirectory() as directory:
            state = {**json.loads(found["trainer"]), "train_batch_size": trainer._train_batch_size}
            (Path(directory) / "trainer_state.json").write_text(json.dumps(state), encoding="utf-8")
            vars(trainer).update(hooks)
            try:
                return self._train(directory, **options)
            finally:
                vars(trainer).update(own)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self._found is None:
            return
        whole = None if self.trainer.is_fsdp_enabled else self._found
        found = training.load(self.trainer.model, [self._optimizer], whole)
        assert found is not None
        self._found = None  # its tensors are not needed any more
        self.trainer.lr_scheduler.load_state_dict(found["scheduler"])
        if self.trainer.accelerator.scaler is not None:
            self.trainer.accelerator.scaler.load_state_dict(found["scaler"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if self.save_steps and state.global_step % self.save_steps == 0:
            control.should_save = True
        if not control.should_log:
            session.report(step=state.global_step, epoch=state.epoch)
        training.end_if_stopped(self.save)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any, **given: Any
    ) -> None:
        figures = {name: value for name, value in logs.items() if not BOOKKEEPING.fullmatch(name)}
        session.report(step=state.global_step, epoch=state.epoch, **training.select_numbers(figures))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        training.beat()

    def save(self) -> None:
        """Save the training as it is after an optimizer step. For all ranks together."""
        trainer = self.trainer
        trainer.store_flos()
        objects: list[Any] = [*trainer.callback_handler.callbacks, trainer.control]
        stateful = [each for each in objects if isinstance(each, ExportableState)]
        scaler = trainer.accelerator.scaler
        values = {
            "global_batch_size": self.global_batch_size,
            "num_samples": loaders.count_samples(trainer.train_dataset),
            "trainer": json.dumps(dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=stateful))),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else {},
        }
        training.save(trainer.model, [self._optimizer], trainer.state.global_step, values)

    @property
    def _optimizer(self) -> Any:
        return getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)  # not Accelerate's wrapper

    def _save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        self.save()
        if self.trainer.args.load_best_model_at_end:
            self._save_files(*arguments, **options)

    def _keep_global_batch(self, total: int | None) -> None:
        """Have an optimizer step take `total` samples: by smaller batches, or by more of them, never by larger ones."""
        trainer, args = self.trainer, self.trainer.args
        batch_size, num_batches = args.per_device_train_batch_size, args.gradient_accumulation_steps
        self.global_batch_size = total or batch_size * num_batches * args.world_size
        share = loaders.split_batch(self.global_batch_size)
        if share != batch_size * num_batches:
            batch_size = next(size for size in range(min(batch_size, share), 0, -1) if share % size == 0)
            args.per_device_train_batch_size, args.gradient_accumulation_steps = batch_size, share // batch_size
            trainer._train_batch_size = args.train_batch_size
