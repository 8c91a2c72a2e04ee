"""What the steps of a training change: the value of a checkpoint, out and in again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from flyte_ddp.checkpoints.assembly import BoxOf
from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import EpochFinished, find_best
from flyte_ddp.rank.sharding import load_model, load_optimizer, own_boxes
from flyte_ddp.training.average import WeightAverage
from flyte_ddp.training.optim import Schedule, has_modes, open_optimizer
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.progress import Progress


@dataclass(eq=False)
class TrainedState:
    """A model that trains, with its optimizer and its progress."""

    config: TrainingConfig
    model: nn.Module
    optimizer: Optimizer
    schedule: Schedule
    scaler: GradScaler
    average: WeightAverage
    progress: Progress = field(default_factory=Progress)

    @classmethod
    def open(cls, parallelism: Parallelism, model: nn.Module, num_steps: int) -> TrainedState:
        """Return the state before the first of `num_steps` steps."""
        recipe, config = parallelism.recipe, parallelism.config
        optimizer = open_optimizer(recipe, model, config)
        schedule = Schedule(recipe, optimizer, config, num_steps)
        average = WeightAverage(model, config.ema_decay, optimizer)
        return cls(config, model, optimizer, schedule, parallelism.scaler, average)

    def to_dict(self) -> dict[str, Any]:
        """Return the state as a checkpoint has it. Copies no tensor."""
        return {
            "progress": self.progress.to_dict(),
            **self.average.state_dicts(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what `to_dict` has returned."""
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        self.average.load(state["average"])
        self.progress = Progress.from_dict(state["progress"])

    def load_weights(self, state: Mapping[str, Any]) -> None:
        """Load the weights to evaluate alone from a checkpoint of this run."""
        load_model(self.model, state["model"])
        if has_modes(self.optimizer):  # the optimizer has a part of the weights to evaluate
            load_optimizer(self.optimizer, state["optimizer"])
        self.average.load(state["average"])

    def boxes(self) -> BoxOf:
        """Return the boxes of a checkpoint's tensors that this rank keeps."""
        averages = {("average", name): each for name, each in self.average.values.items()}
        return own_boxes(self.model, {("optimizer",): self.optimizer}, averages)

    def end_step(self) -> None:
        """Note that a step is done, or left out."""
        self.schedule.end_step()
        self.progress.step += 1
        self.progress.batch += 1

    @property
    def best(self) -> EpochFinished:
        """The best of the finished epochs, by `config.monitor`."""
        best = find_best(self.progress.epochs, self.config.monitor)
        assert best is not None  # at least one epoch is finished
        return best

    def find_end(self, num_batches: int) -> int:
        """Return the batch before which the next evaluation is due, in an epoch of `num_batches`.
        The step that reaches `max_tokens` is before it.
        """
        progress, config = self.progress, self.config
        end = progress.find_end(num_batches, config.evaluation_interval)
        if not config.max_tokens:
            return end
        left = self.schedule.num_steps - progress.step
        return min(end, progress.batch + max(0, left))

    @property
    def is_done(self) -> bool:
        """True once all epochs or `max_tokens` are trained and evaluated, or `patience` evaluations
        brought no new best.
        """
        progress, config = self.progress, self.config
        if progress.epoch > config.epochs:
            return True
        num_evaluated = 0
        if progress.epochs:
            num_evaluated = progress.epochs[-1].step
        if config.max_tokens and num_evaluated >= self.schedule.num_steps:
            return True
        if not (config.patience and progress.epochs):
            return False
        return self.best not in progress.epochs[-config.patience :]

    def needed_step(self, state: Mapping[str, Any]) -> int:
        """Return the step of the checkpoint to which a run from `state` will go back at its end; 0
        for none.
        """
        best = find_best(Progress.from_dict(state["progress"]).epochs, self.config.monitor)
        if best is None or self.config.model_state != "best":
            return 0
        return best.step
