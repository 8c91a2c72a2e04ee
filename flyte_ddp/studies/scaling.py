"""Analysis of a scaling study: compare runs at several world sizes.

All runs of a study use the same global batch, so an epoch has the same optimizer steps at every world size and only
their duration differs. Knows neither clusters nor Flyte. Imports no torch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import EpochFinished, Event, RunFinished, RunStarted, RunState


@dataclass
class ScalingRun:
    """A finished run of the study."""

    started: RunStarted
    epochs: list[EpochFinished]
    finished: RunFinished

    @classmethod
    def of(cls, events: Sequence[Event]) -> ScalingRun | None:
        """Build the run from its events; None if it has not finished. Epochs undone by a restart are dropped."""
        state = RunState.of(events, keep_reports=False)
        if state.started is None or state.finished is None or not state.epochs:
            return None
        return cls(state.started, state.epochs, state.finished)

    @property
    def world_size(self) -> int:
        return self.started.world_size

    @property
    def learning_rate(self) -> float:
        return float(self.started.config["learning_rate"])

    @property
    def steps_per_epoch(self) -> float:
        return self.started.num_steps / int(self.started.config["epochs"])

    @property
    def step_seconds(self) -> float:
        """Seconds per step of the median epoch: robust against the first epoch's one-time costs and against noise."""
        return statistics.median(epoch.seconds for epoch in self.epochs) / self.steps_per_epoch

    @property
    def seconds(self) -> float:
        """Seconds of training over all epochs, without evaluation and start-up."""
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def best_loss(self) -> float:
        return min(epoch.test_loss for epoch in self.epochs)

    @property
    def wait_seconds(self) -> float:
        """Seconds per step that ranks wait for gradients after their own backward pass, mean over ranks."""
        return _mean(self.epochs[-1].rank_wait_seconds)

    @property
    def overlap_seconds(self) -> float:
        """Seconds per step of communication overlapped with the backward pass, mean over ranks."""
        return _mean(self.epochs[-1].rank_overlap_seconds)

    def epochs_to(self, target_loss: float) -> int | None:
        """Return the first epoch with a held-out loss of at most `target_loss`; None if there is none."""
        return next((epoch.epoch for epoch in self.epochs if epoch.test_loss <= target_loss), None)

    def seconds_to(self, target_loss: float) -> float | None:
        """Return the seconds of training until the held-out loss was at most `target_loss`, without evaluation."""
        needed = self.epochs_to(target_loss)
        return None if needed is None else sum(epoch.seconds for epoch in self.epochs if epoch.epoch <= needed)


@dataclass(frozen=True)
class Row:
    """A line of the study's table."""

    world_size: int
    learning_rate: float
    batch_size_per_rank: int  # samples per optimizer step
    epochs: int
    final_test_loss: float
    best_accuracy: float
    step_seconds: float
    samples_per_second: float
    speed_up: float  # relative to the smallest world size
    efficiency: float  # speed_up / ideal speed_up
    seconds_to_target: float | None  # of training; None if the target was not reached
    wait_share: float  # share of a step waiting for gradients
    overlap_share: float  # share of a step with communication during the backward pass
    device_hours: float  # GPU-hours of training, or core-hours on CPUs


@dataclass
class Study:
    """Comparison of finished runs, given in any order."""

    runs: list[ScalingRun]
    target_loss: float = 0.0  # 0: the worst of the runs' best held-out losses, which all runs reach

    def __post_init__(self) -> None:
        self.runs.sort(key=lambda run: (run.learning_rate, run.world_size))
        self.target_loss = self.target_loss or max((run.best_loss for run in self.runs), default=0.0)

    @property
    def device_unit(self) -> str:
        """The unit of `Row.device_hours`."""
        return "core" if not self.runs or self.runs[0].started.device == "cpu" else "GPU"

    def rows(self) -> list[Row]:
        """Return a row per world size, for each learning rate."""
        rows: list[Row] = []
        for _, group in itertools.groupby(self.runs, key=lambda run: run.learning_rate):
            runs = list(group)
            rows += [self._row(run, runs[0]) for run in runs]
        return rows

    def _row(self, run: ScalingRun, baseline: ScalingRun) -> Row:
        speed_up = baseline.step_seconds / run.step_seconds
        return Row(
            world_size=run.world_size,
            learning_rate=run.learning_rate,
            batch_size_per_rank=int(run.started.config["global_batch_size"]) // run.world_size,
            epochs=len(run.epochs),
            final_test_loss=run.epochs[-1].test_loss,
            best_accuracy=run.finished.best_accuracy,
            step_seconds=run.step_seconds,
            samples_per_second=run.started.num_train_samples / (run.steps_per_epoch * run.step_seconds),
            speed_up=speed_up,
            efficiency=speed_up * baseline.world_size / run.world_size,
            seconds_to_target=run.seconds_to(self.target_loss),
            wait_share=run.wait_seconds / run.step_seconds,
            overlap_share=run.overlap_seconds / run.step_seconds,
            device_hours=_device_hours(run),
        )


def validate_study(
    config: TrainingConfig,
    world_sizes: Sequence[int],
    learning_rates: Sequence[float],
    target_loss: float,
) -> None:
    """Validate a study before anything starts.

    Raises:
        ConfigError: names the field, the expected values and the value given.
    """
    if len(world_sizes) < 2 or len(set(world_sizes)) < len(world_sizes) or min(world_sizes) < 1:
        raise ConfigError(f"world_sizes: expected two or more different integers >= 1, got {list(world_sizes)}")
    for size in world_sizes:
        try:
            config.batch_size_per_rank(size)
        except ConfigError as error:
            raise ConfigError(f"world_sizes: {size} ranks: {error}") from None
    for rate in learning_rates:
        if not 0 < rate < math.inf or list(learning_rates).count(rate) > 1:
            raise ConfigError(f"learning_rates: expected different finite numbers above 0, got {rate}")
    if not 0 <= target_loss < math.inf:
        raise ConfigError(f"target_loss: expected a finite number >= 0, got {target_loss}")


def _device_hours(run: ScalingRun) -> float:
    devices = run.world_size * (run.started.num_threads if run.started.device == "cpu" else 1)
    return devices * run.seconds / 3600


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
