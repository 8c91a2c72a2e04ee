"""The session for Hugging Face's Trainer, and what derives from it, such as TRL's SFTTrainer.

    from flyte_ddp.integrations.transformers import SessionCallback

    trainer = Trainer(...)
    trainer.add_callback(SessionCallback(trainer))

The Trainer draws the samples itself, and skips those that are done as it does for
`resume_from_checkpoint`. The global batch, and with it the samples of each optimizer step, stay the
same at any number of ranks.
"""

from __future__ import annotations

import dataclasses
import json
import re
import tempfile
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy

from flyte_ddp import session
from flyte_ddp.errors import ConfigError
from flyte_ddp.integrations import loaders, training
from flyte_ddp.integrations.accelerate import check_split

SAVE_STEPS = 100  # optimizer steps
# Of the Trainer's own time and count of work: the run measures these itself.
BOOKKEEPING = re.compile(
    r"(.*_)?(runtime|\w+_per_second|total_flos|num_input_tokens_seen|model_preparation_time)"
)


@dataclasses.dataclass(eq=False, repr=False)
class SessionCallback(TrainerCallback):  # type: ignore[misc]
    """Reports to the run, keeps its checkpoints, resumes from them and stops when it has to. Under
    torchrun it is idle.

    A checkpoint is copied before the next step and written in the background, by each rank what it
    has of a split model. It takes the place of those that the Trainer itself would write to
    `output_dir`, but for `load_best_model_at_end`, which needs them.

    Args:
        save_steps: optimizer steps between two checkpoints.
        global_batch_size: samples of an optimizer step, at any number of ranks; by default what the
            arguments make of it at the number of ranks with which the run began.

    Raises:
        ConfigError: the way to split the model is not supported; a global batch of which the ranks'
            parts are not whole batches of `per_device_train_batch_size`.
    """

    trainer: Trainer
    save_steps: int = SAVE_STEPS
    global_batch_size: int | None = None
    # of the checkpoint that the training goes on from
    _found: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self._train = self.trainer.train
        if session.is_in_run():
            check_split(self.trainer.accelerator)
            self.trainer.train = self.train

    def train(self, resume_from_checkpoint: str | bool | None = None, **options: Any) -> Any:
        """Train as `Trainer.train`, from the session's newest checkpoint on if there is one."""
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
        args.gradient_accumulation_steps = share // size  # as many batches as that are
        if found is None:
            return self._train(resume_from_checkpoint, **options)
        # The one private name: a directory without weights, which `on_train_begin` loads, is
        # refused otherwise.
        trainer._load_from_checkpoint = lambda *arguments: None
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "trainer_state.json").write_text(found["trainer"], encoding="utf-8")
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
        # here also what an evaluation has changed is done
        elif state.global_step and state.global_step % self.save_steps == 0:
            self.save()
        training.end_if_stopped(self.save)

    def on_train_end(self, *arguments: Any, **given: Any) -> None:
        if self._found is None:  # else it was at its end already
            self.save()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
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

    def save(self) -> None:
        """Save the training as it is before an optimizer step. For all ranks together."""
        trainer = self.trainer
        objects: list[Any] = [*trainer.callback_handler.callbacks, trainer.control]
        stateful = [each for each in objects if isinstance(each, ExportableState)]
        values = {
            **self._kept,
            "trainer": json.dumps(
                dataclasses.asdict(dataclasses.replace(trainer.state, stateful_callbacks=stateful))
            ),
        }
        parts = trainer.model, [self._optimizer], self._others
        training.save(*parts, trainer.state.global_step, values)

    @property
    def _optimizer(self) -> Any:
        # not Accelerate's wrapper
        return getattr(self.trainer.optimizer, "optimizer", self.trainer.optimizer)

    @property
    def _others(self) -> list[Any]:
        return [self.trainer.lr_scheduler, *filter(None, [self.trainer.accelerator.scaler])]
