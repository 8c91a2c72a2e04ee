"""Analysis of a scaling study: compare runs at several world sizes and project larger ones.

All runs of a study use the same global batch, so an epoch has the same optimizer steps at every world size and only
their duration differs. Knows neither clusters nor Flyte. Imports no torch.

The time model assumes a ring all-reduce: a step of n ranks takes

    step(n) = compute(B / n) + 2 (n - 1) latency + 2 (n - 1) / n * bytes / bandwidth

with the all-reduce of Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", J.
Parallel Distrib. Comput. 69 (2009), which gloo and NCCL use for gradients. It is fitted to separately timed parts
(`CostsTimed`), not to training steps, so every run with two or more ranks checks it. It assumes no overlap of
communication with the backward pass, and the same network at every world size.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.events import CostsTimed, EpochFinished, Event, RunFinished, RunStarted, RunState


@dataclass
class ScalingRun:
    """A finished run of the study."""

    started: RunStarted
    epochs: list[EpochFinished]
    finished: RunFinished
    costs: CostsTimed | None = None  # None if the run did not time them

    @classmethod
    def of(cls, events: Sequence[Event]) -> ScalingRun | None:
        """Build the run from its events; None if it has not finished. Epochs undone by a restart are dropped."""
        state = RunState.of(events, keep_steps=False)
        if state.started is None or state.finished is None or not state.epochs:
            return None
        return cls(state.started, state.epochs, state.finished, state.costs)

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

    def compute_seconds(self, batch_size: int) -> float:
        """Return the timed seconds of one rank's step on `batch_size` samples without communication."""
        assert self.costs is not None
        return self.costs.compute_seconds[self.costs.batch_sizes.index(batch_size)]


@dataclass(frozen=True)
class TimeModel:
    """Duration of a ring all-reduce of the gradients."""

    latency: float  # seconds per message between neighbours
    seconds_per_byte: float  # of one connection
    num_bytes: int  # of the gradients

    def all_reduce_seconds(self, world_size: int) -> float:
        messages, shares = _count_ring_messages(world_size)
        return messages * self.latency + shares * self.num_bytes * self.seconds_per_byte


@dataclass(frozen=True)
class ModelCheck:
    """Prediction of the time model against a measured run that it was not fitted to."""

    world_size: int
    compute_seconds: float  # timed without communication
    all_reduce_seconds: float  # predicted
    measured_seconds: float  # per training step

    @property
    def predicted_seconds(self) -> float:
        return self.compute_seconds + self.all_reduce_seconds

    @property
    def error(self) -> float:
        """Relative error of the prediction; above 0 if the prediction is too slow."""
        return self.predicted_seconds / self.measured_seconds - 1


@dataclass(frozen=True)
class Row:
    """A line of the study's table."""

    world_size: int
    learning_rate: float
    batch_size_per_rank: int  # samples per optimizer step
    is_projected: bool
    epochs: int
    final_test_loss: float | None  # None if projected, like every quality figure
    best_accuracy: float | None
    step_seconds: float
    samples_per_second: float
    speed_up: float  # relative to the smallest world size
    efficiency: float  # speed_up / ideal speed_up
    seconds_to_target: float | None  # of training; None if the target was not reached
    wait_share: float | None  # share of a step waiting for gradients; predicted if projected
    overlap_share: float | None  # share of a step with communication during the backward pass
    device_hours: float  # GPU-hours of training, or core-hours on CPUs


@dataclass
class Study:
    """Comparison of finished runs, given in any order."""

    runs: list[ScalingRun]
    projected_world_sizes: Sequence[int] = ()
    target_loss: float = 0.0  # 0: the worst of the runs' best held-out losses, which all runs reach
    model: TimeModel | None = field(init=False)  # None until a run with several ranks has timings

    def __post_init__(self) -> None:
        self.runs.sort(key=lambda run: (run.learning_rate, run.world_size))
        self.target_loss = self.target_loss or max((run.best_loss for run in self.runs), default=0.0)
        timed = {run.world_size: run.costs for run in self.runs if run.costs and run.world_size > 1}
        self.model = fit_time_model(timed) if timed else None

    @property
    def checks(self) -> list[ModelCheck]:
        """Prediction and measurement of every timed run with several ranks, by world size."""
        if self.model is None:
            return []
        return [
            ModelCheck(
                run.world_size,
                run.compute_seconds(_batch_size(run, run.world_size)),
                self.model.all_reduce_seconds(run.world_size),
                run.step_seconds,
            )
            for run in self.runs
            if run.costs and run.world_size > 1
        ]

    @property
    def device_unit(self) -> str:
        """The unit of `Row.device_hours`."""
        return "core" if not self.runs or self.runs[0].started.device == "cpu" else "GPU"

    def rows(self) -> list[Row]:
        """Return a row per world size, measured then projected, for each learning rate."""
        rows: list[Row] = []
        for _, group in itertools.groupby(self.runs, key=lambda run: run.learning_rate):
            runs = list(group)
            rows += [self._measured(run, runs[0]) for run in runs]
            if self.model:
                rows += [self._projected(world_size, runs[0]) for world_size in sorted(self.projected_world_sizes)]
        return rows

    def _measured(self, run: ScalingRun, baseline: ScalingRun) -> Row:
        speed_up = baseline.step_seconds / run.step_seconds
        return Row(
            world_size=run.world_size,
            learning_rate=run.learning_rate,
            batch_size_per_rank=_batch_size(run, run.world_size),
            is_projected=False,
            epochs=len(run.epochs),
            final_test_loss=run.epochs[-1].test_loss,
            best_accuracy=run.finished.best_accuracy,
            step_seconds=run.step_seconds,
            samples_per_second=_samples_per_second(run, run.step_seconds),
            speed_up=speed_up,
            efficiency=speed_up * baseline.world_size / run.world_size,
            seconds_to_target=run.seconds_to(self.target_loss),
            wait_share=run.wait_seconds / run.step_seconds,
            overlap_share=run.overlap_seconds / run.step_seconds,
            device_hours=_device_hours(run, run.world_size, run.seconds),
        )

    def _projected(self, world_size: int, baseline: ScalingRun) -> Row:
        assert self.model is not None
        largest = max((run for run in self.runs if run.costs), key=lambda run: run.world_size)
        all_reduce = self.model.all_reduce_seconds(world_size)
        step_seconds = largest.compute_seconds(_batch_size(baseline, world_size)) + all_reduce
        speed_up = baseline.step_seconds / step_seconds
        epoch_seconds = step_seconds * baseline.steps_per_epoch
        needed = baseline.epochs_to(self.target_loss)  # the same at any world size, because the global batch is
        return Row(
            world_size=world_size,
            learning_rate=baseline.learning_rate,
            batch_size_per_rank=_batch_size(baseline, world_size),
            is_projected=True,
            epochs=len(baseline.epochs),
            final_test_loss=None,
            best_accuracy=None,
            step_seconds=step_seconds,
            samples_per_second=_samples_per_second(baseline, step_seconds),
            speed_up=speed_up,
            efficiency=speed_up * baseline.world_size / world_size,
            seconds_to_target=None if needed is None else needed * epoch_seconds,
            wait_share=all_reduce / step_seconds,
            overlap_share=None,
            device_hours=_device_hours(baseline, world_size, len(baseline.epochs) * epoch_seconds),
        )


def fit_time_model(costs: Mapping[int, CostsTimed]) -> TimeModel:
    """Fit the time model to all-reduces timed at world sizes above 1, by relative least squares.

    Latency and time per byte are constrained to be at least 0.
    """
    num_bytes = next(iter(costs.values())).gradient_bytes
    points = []  # (messages, bytes per connection, seconds)
    for world_size, timed in costs.items():
        messages, shares = _count_ring_messages(world_size)
        points.append((messages, shares * num_bytes, timed.all_reduce_seconds))
        points.append((messages, shares * 4, timed.latency_seconds))

    def error(candidate: tuple[float, float]) -> float:
        latency, per_byte = candidate
        return sum(((m * latency + b * per_byte) / seconds - 1) ** 2 for m, b, seconds in points)

    # Closed form in two unknowns, each point weighted by 1 / seconds. On the border one of them is 0.
    mm, mb, bb, m1, b1 = (
        sum(value)
        for value in zip(*(((m / s) ** 2, m * b / s**2, (b / s) ** 2, m / s, b / s) for m, b, s in points), strict=True)
    )
    candidates = [(m1 / mm, 0.0), (0.0, b1 / bb)]
    if (determinant := mm * bb - mb * mb) > 0:
        candidates.append(((m1 * bb - b1 * mb) / determinant, (b1 * mm - m1 * mb) / determinant))
    latency, per_byte = min((each for each in candidates if min(each) >= 0), key=error)
    return TimeModel(latency, per_byte, num_bytes)


def choose_timed_batch_sizes(
    config: TrainingConfig, world_size: int, largest: int, projected_world_sizes: Sequence[int]
) -> tuple[int, ...]:
    """Return the batch sizes per rank that a run of `world_size` ranks times: its own, and those of the projections.

    The `largest` run times the projections, because its ranks share their machine as those of a larger gang would.
    """
    if world_size == 1 and largest > 1:
        return ()
    sizes = [world_size, *(projected_world_sizes if world_size == largest else ())]
    return tuple(config.global_batch_size // size for size in sizes)


def validate_study(
    config: TrainingConfig,
    world_sizes: Sequence[int],
    projected_world_sizes: Sequence[int],
    learning_rates: Sequence[float],
    target_loss: float,
) -> None:
    """Validate a study before anything starts.

    Raises:
        ConfigError: names the field, the expected values and the value given.
    """
    if len(world_sizes) < 2 or len(set(world_sizes)) < len(world_sizes) or min(world_sizes) < 1:
        raise ConfigError(f"world_sizes: expected two or more different integers >= 1, got {list(world_sizes)}")
    for size in projected_world_sizes:
        if size < 1 or size in world_sizes or list(projected_world_sizes).count(size) > 1:
            raise ConfigError(
                f"projected_world_sizes: expected different integers >= 1 that are not measured "
                f"({', '.join(map(str, world_sizes))}), got {size}"
            )
    for name, sizes in (("world_sizes", world_sizes), ("projected_world_sizes", projected_world_sizes)):
        for size in sizes:
            try:
                config.batch_size_per_rank(size)
            except ConfigError as error:
                raise ConfigError(f"{name}: {size} ranks: {error}") from None
    for rate in learning_rates:
        if not 0 < rate < math.inf or list(learning_rates).count(rate) > 1:
            raise ConfigError(f"learning_rates: expected different finite numbers above 0, got {rate}")
    if not 0 <= target_loss < math.inf:
        raise ConfigError(f"target_loss: expected a finite number >= 0, got {target_loss}")


def _count_ring_messages(world_size: int) -> tuple[int, float]:
    """Return (sequential messages, share of the data that passes each connection) of a ring all-reduce."""
    return 2 * (world_size - 1), 2 * (world_size - 1) / world_size


def _batch_size(run: ScalingRun, world_size: int) -> int:
    return int(run.started.config["global_batch_size"]) // world_size


def _samples_per_second(run: ScalingRun, step_seconds: float) -> float:
    return run.started.num_train_samples / (run.steps_per_epoch * step_seconds)


def _device_hours(run: ScalingRun, world_size: int, seconds: float) -> float:
    devices = world_size * (run.started.num_threads if run.started.device == "cpu" else 1)
    return devices * seconds / 3600


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
