"""The position of a run, and sums over a stretch of it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import EpochFinished


def count_steps(num_samples: int, tokens_per_sample: int, config: TrainingConfig) -> int:
    """Return the optimizer steps of a run: up to `max_tokens`, or to the end of its epochs.

    Args:
        num_samples: samples of an epoch.

    Raises:
        ConfigError: `max_tokens` is given, and samples have no number of tokens.
    """
    size = config.global_batch_size
    num_batches = -(-num_samples // size)
    num_steps = config.epochs * num_batches
    if not config.max_tokens:
        return num_steps
    if not tokens_per_sample:
        raise ConfigError(
            "max_tokens: expected 0 for a recipe without `tokens_per_sample`, got "
            f"{config.max_tokens}"
        )
    num_epochs, rest = divmod(-(-config.max_tokens // tokens_per_sample), num_samples)
    return min(num_steps, num_epochs * num_batches + -(-rest // size))


@dataclass
class Progress:
    """The position of a run. With the weights and the optimizer's state, it is all that a
    checkpoint holds.

    It has no random state. Every draw is seeded by its purpose (epoch, step, rank, sample), so a
    resumed run repeats the draws of an uninterrupted one.
    """

    step: int = 0  # optimizer steps since the start of the run
    epoch: int = 1  # the current epoch, from 1
    batch: int = 0  # global batches of the epoch that are done
    # The four sums cover all ranks, from the last evaluation to the last checkpoint.
    loss_sum: float = 0.0
    num_targets: float = 0.0
    num_samples: int = 0
    seconds: float = 0.0  # wall-clock
    learning_rate: float = 0.0  # rate of the optimizer's first group in the last step
    # the finite losses of the last steps, if losses are compared
    losses: list[float] = field(default_factory=list)
    # (epoch, batch) of each batch that is left out
    left_out: list[list[int]] = field(default_factory=list)
    # (epoch, batch) of each state to which a bad step went back
    rewinds: list[list[int]] = field(default_factory=list)
    epochs: list[EpochFinished] = field(default_factory=list)
    # `epochs` as lines of JSON, so that the time of a checkpoint does not grow with their number
    _lines: str = ""

    def find_end(self, num_batches: int, interval: int) -> int:
        """Return the batch before which the next evaluation is due.

        Args:
            num_batches: the number of batches in an epoch.
            interval: steps between two evaluations; 0 for one after each epoch.
        """
        if not interval:
            return num_batches
        evaluated = 0
        if self.epochs:
            evaluated = self.epochs[-1].step
        left = evaluated + interval - self.step
        return min(num_batches, self.batch + max(0, left))

    def is_left_out(self, batch: int) -> bool:
        """Return whether the run leaves out a batch of the current epoch."""
        return [self.epoch, batch] in self.left_out

    def note(self, finished: EpochFinished) -> None:
        """Note the results since the last evaluation, and advance to the next epoch after a whole
        one.
        """
        self.epochs.append(finished)
        values = dataclasses.asdict(finished)
        # Version 0.2.0, to which a user may go back, reads no other fields than its own. The
        # history has the phases.
        del values["rank_phase_seconds"]
        self._lines += json.dumps(values) + "\n"
        if finished.share == 1:
            self.epoch += 1
            self.batch = 0
        self.num_samples = 0
        self.loss_sum = self.num_targets = self.seconds = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the progress as a checkpoint has it."""
        values = {name: value for name, value in vars(self).items() if name != "_lines"}
        return {**values, "epochs": self._lines}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Progress:
        """Return the progress from which `to_dict` made `values`."""
        lines = values["epochs"]
        epochs = [EpochFinished(**json.loads(line)) for line in lines.splitlines()]
        return cls(**{**values, "epochs": epochs, "_lines": lines})


@dataclass
class Stretch:
    """The steps from one evaluation, or a restart, to the next evaluation."""

    device: torch.device
    before: Progress  # progress at the start of the stretch, with an earlier attempt's sums

    def __post_init__(self) -> None:
        self.sums = MetricSums.zero(self.device)
        self.since_log = MetricSums.zero(self.device)  # the last report of a step

    def begin_log(self) -> MetricSums:
        """Return the sums since the last report of a step, and begin anew."""
        sums, self.since_log = self.since_log, MetricSums.zero(self.device)
        return sums


@dataclass
class MetricSums:
    """Sums over the samples of a stretch of training. The loss stays on the device, because reading
    it would wait for the device.
    """

    loss_sum: Tensor
    own_targets: float | Tensor = 0.0  # number of this rank's targets
    num_targets: float | Tensor = 0.0  # number of targets on all ranks
    num_samples: int = 0  # number of samples on all ranks
    num_steps: int = 0
    # this rank's sums of losses and targets of each source, (sources, 2); 0 without sources
    by_source: Tensor | float = 0.0
    started: float = field(default_factory=time.perf_counter)

    @classmethod
    def zero(cls, device: torch.device) -> MetricSums:
        return cls(torch.zeros((), dtype=torch.float64, device=device))

    def add(self, step: MetricSums) -> None:
        """Add the sums of an optimizer step."""
        self.loss_sum += step.loss_sum
        self.own_targets += step.own_targets
        self.num_targets += step.num_targets
        self.num_samples += step.num_samples
        self.num_steps += step.num_steps
        self.by_source = self.by_source + step.by_source

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started
