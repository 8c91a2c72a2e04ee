"""The session for Hugging Face's Trainer and its subclasses, such as TRL's SFTTrainer.

    from flyte_ddp.integrations.transformers import SessionCallback

    trainer = Trainer(...)
    trainer.add_callback(SessionCallback(trainer))

The Trainer draws the samples itself. It skips samples that are done as for
`resume_from_checkpoint`. A limit of steps may end an epoch, and the data may have no length. The
global batch, and with it the samples of each optimizer step, stay the same at any number of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from flyte_ddp import session
from flyte_ddp.errors import ConfigError
from flyte_ddp.integrations import loaders, training
from flyte_ddp.integrations.accelerate import check_split

SAVE_STEPS = 100  # optimizer steps between two checkpoints
# The Trainer's figures of time and work are left out, because the run measures these itself.
BOOKKEEPING = re.compile(
    r"(.*_)?(runtime|\w+_per_second|total_flos|num_input_tokens_seen|model_preparation_time)"
)


@dataclasses.dataclass(eq=False, repr=False)
class SessionCallback(TrainerCallback):  # type: ignore[misc]
    """Reports to the run, keeps its checkpoints, resumes from them and stops when it has to. Under
    torchrun it is idle.

    A checkpoint is copied before the next step and written in the background. Each rank writes its
    own part of a split model. The checkpoint replaces the Trainer's own checkpoints in
    `output_dir`, except with `load_best_model_at_end`, which needs them.

    Args:
        save_steps: optimizer steps between two checkpoints.
        global_batch_size: samples of an optimizer step, at any number of ranks; by default the
            arguments' value at the number of ranks with which the run began.

    Raises:
        ConfigError: the model is split in an unsupported way, or a rank's share of the global batch
            is not a multiple of `per_device_train_batch_size`.

    Example:
        # in every rank
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.add_callback(SessionCallback(trainer))
        trainer.train()
    """

    trainer: Trainer
    save_steps: int = SAVE_STEPS
    global_batch_size: int | None = None
    # values of the checkpoint from which the training resumes
    _found: dict[str, Any] | None = None
    _saved_step: int = 0
    _epoch: int = 0
    _num_steps: int = 0  # finished optimizer steps of the current epoch
    _is_in_step: bool = False  # Some gradients are accumulated, and no step has used them yet.

    def __post_init__(self) -> None:
        self._train = self.trainer.train
        if session.is_in_run():
            check_split(self.trainer.accelerator)
            self.trainer.train = self.train

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train as `Trainer.train` does, and resume from the session's newest checkpoint."""
        training.begin("trainer.train")
        trainer, args = self.trainer, self.trainer.args
        if session.checkpoints and not args.load_best_model_at_end:
            args.save_strategy = SaveStrategy.NO
        found = self._found = training.load_values()
        size, total = args.per_device_train_batch_size, self.global_batch_size
        own = size * args.gradient_accumulation_steps
        self._kept, share = loaders.share_batch(
            trainer.train_dataset, found, total, own, args.world_size
        )
        if share % size:
            total = self._kept["global_batch_size"]
            expected = f"expected a divisor of {share}, a rank's samples of {total}"
            raise ConfigError(f"per_device_train_batch_size: {expected}, got {size}")
        args.gradient_accumulation_steps = share // size
        if found is None:
            return self._train(resume_from_checkpoint, **options)
        # The Trainer refuses a directory without weights, and `on_train_begin` loads the weights.
        # So this private method, the only one used here, does nothing.
        trainer._load_from_checkpoint = lambda *arguments: None
        self._epoch, self._num_steps = found["epoch"], found["num_steps"]
        self._saved_step = json.loads(found["trainer"])["global_step"]
        with _resuming(trainer, found) as directory:
            return self._train(directory, **options)

    def on_train_begin(self, *arguments: Any, **given: Any) -> None:
        if self._found is not None:
            self._found = training.load(self.trainer.model, [self._optimizer], self._others)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self._found is not None:
            training.set_generators(self._found)
            self._found = None
        elif self._is_in_step:
            # Data without a length ended within a step. A checkpoint would lose its gradients.
            return
        # A checkpoint is written here, because changes by an evaluation are finished here, too.
        elif state.global_step - self._saved_step >= self.save_steps:
            self.save()
        training.end_if_stopped(self.save)

    def on_substep_end(self, *arguments: Any, **given: Any) -> None:
        self._is_in_step = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if not control.should_training_stop:  # After a stop this epoch may get more steps later.
            self._epoch, self._num_steps = self._epoch + 1, 0

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        if self._found is None:  # Otherwise the checkpoint was at the training's end already.
            self.save(is_stopped=control.should_training_stop)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._num_steps, self._is_in_step = self._num_steps + 1, False
        session.report(step=state.global_step, epoch=state.epoch)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Any,
        **given: Any,
    ) -> None:
        figures = {name: value for name, value in logs.items() if not BOOKKEEPING.fullmatch(name)}
        session.report(
            step=state.global_step, epoch=state.epoch, **training.select_numbers(figures)
        )

    def on_prediction_step(self, *arguments: Any, **given: Any) -> None:
        training.beat()

    def save(self, is_stopped: bool = False) -> None:
        """Save the training as it is before an optimizer step. All ranks must call it together.

        Args:
            is_stopped: no step of the training is left.
        """
        trainer = self.trainer
        self._saved_step = trainer.state.global_step
        objects: list[Any] = [*trainer.callback_handler.callbacks, trainer.control]
        stateful = [each for each in objects if isinstance(each, ExportableState)]
        values = {
            **self._kept,
            "epoch": self._epoch,
            "num_steps": self._num_steps,
            "is_stopped": is_stopped,
            "trainer": json.dumps(
                dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=stateful))
            ),
        }
        parts = trainer.model, [self._optimizer], self._others
        training.save(*parts, trainer.state.global_step, values)

    @property
    def _optimizer(self) -> Any:
        # The wrapped optimizer of torch, without Accelerate's wrapper.
        return getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)

    @property
    def _others(self) -> list[Any]:
        return [self.trainer.lr_scheduler, *filter(None, [self.trainer.accelerator.scaler])]


@contextlib.contextmanager
def _resuming(trainer: Trainer, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield a directory from which the Trainer resumes in the epoch of a checkpoint.

    The Trainer computes the epoch and the step in it from `global_step`, as if no epoch had ended
    early. So the directory contains a `global_step` that leads to the right epoch and step. The
    true step is restored when the Trainer makes its schedule.
    """
    state = json.loads(found["trainer"])
    open_loader, create_scheduler = trainer.get_train_dataloader, trainer.create_scheduler

    def get_train_dataloader() -> Any:
        loader = open_loader()
        num_epochs, per_epoch, *_, max_steps = trainer.set_initial_training_values(
            trainer.args, loader
        )
        is_over = found["is_stopped"] and max_steps <= state["max_steps"]
        if is_over or state["global_step"] >= max_steps:
            step = num_epochs * per_epoch
        else:
            step = found["epoch"] * per_epoch + found["num_steps"]
        path.write_text(json.dumps({**state, "global_step": step}), encoding="utf-8")
        return loader

    def create_scheduler_of_true_step(*arguments: Any, **options: Any) -> Any:
        trainer.state.global_step = state["global_step"]
        return create_scheduler(*arguments, **options)

    trainer.get_train_dataloader = get_train_dataloader
    trainer.create_scheduler = create_scheduler_of_true_step
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "trainer_state.json")
        path.write_text(found["trainer"], encoding="utf-8")
        yield directory
    trainer.get_train_dataloader, trainer.create_scheduler = open_loader, create_scheduler
