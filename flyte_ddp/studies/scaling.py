"""Analysis of a scaling study: compare trials that differ in their world size.

The global batch is the same at every world size, so that only the steps' duration differs; or the
batch of each rank is, so that an epoch has fewer steps. Knows neither clusters nor Flyte. Imports
no torch.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flyte_ddp.events import RunStarted
from flyte_ddp.events.intervals import student_quantile
from flyte_ddp.studies.results import TrialRun
from flyte_ddp.studies.search import SEED, WORLD_SIZE

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]


@dataclass(frozen=True)
class Row:
    trial: int  # number
    world_size: int
    learning_rate: float
    batch_size_per_rank: int  # samples per optimizer step
    num_train_samples: int
    epochs: int
    final_test_loss: float
    best: float  # the monitored figure of the best epoch
    step_seconds: float  # mean over the median epoch
    samples_per_second: float
    # samples per second, relative to the mean of the smallest world size
    speed_up: float
    efficiency: float  # speed_up / ideal speed_up
    seconds_to_target: float | None  # seconds of training; None if the target was not reached
    # share of a step that ranks wait for gradients after their own backward pass, mean over ranks
    wait_share: float
    # share of a step with communication during the backward pass, mean over ranks
    overlap_share: float
    device_hours: float  # GPU-hours of training, or core-hours on CPUs


@dataclass(frozen=True)
class Estimate:
    """The mean of repeated measurements, and half the width of its 95 % confidence interval: 0 for
    a single one.
    """

    mean: float
    half_width: float

    def __format__(self, form: str) -> str:
        return f"{self.mean:{form}}" + (f" ± {self.half_width:{form}}" if self.half_width else "")


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean of one or more measurements with its confidence interval."""
    if len(values) == 1:
        return Estimate(values[0], 0.0)
    half_width = student_quantile(len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return Estimate(statistics.mean(values), half_width)


def by_world_size(rows: Iterable[Row]) -> dict[int, list[Row]]:
    """Return the rows of a series in the order of their world size, the repeats of a trial as one
    list.
    """
    size = operator.attrgetter("world_size")
    return {
        world_size: list(repeats)
        for world_size, repeats in itertools.groupby(sorted(rows, key=size), size)
    }


class Study:
    """Comparison of the finished trials of a scaling study."""

    def __init__(self, runs: Iterable[TrialRun], target_loss: float = 0.0) -> None:
        finished = [run for run in runs if run.state.finished and run.epochs]
        best_losses = []
        for run in finished:
            best_losses.append(min(epoch.test_loss for epoch in run.epochs))
        # The held-out loss to which the time is measured; by default the worst of the trials' best,
        # which all reach.
        self.target_loss = target_loss or max(best_losses, default=0.0)
        self.device_unit = "core"
        self.names: list[str] = []  # values that the study varies besides the world size
        # Rows by world size, for each combination of the values of these names.
        self.series: dict[tuple[float, ...], list[Row]] = {}
        if not finished:
            return
        if started_of(finished[0]).device != "cpu":
            self.device_unit = "GPU"
        for name in finished[0].trial.values:
            values = {run.trial.values[name] for run in finished}
            if name not in (WORLD_SIZE, SEED) and len(values) > 1:
                self.names.append(name)
        series: dict[tuple[float, ...], list[TrialRun]] = {}
        for run in sorted(finished, key=lambda run: started_of(run).world_size):
            key = tuple(run.trial.values[name] for name in self.names)
            series.setdefault(key, []).append(run)
        for key, runs in sorted(series.items()):
            self.series[key] = [self._row(run, runs) for run in runs]

    def describe(self, values: tuple[float, ...]) -> str:
        """Return the values of a series with their names, such as "learning_rate 0.1"."""
        return ", ".join(f"{name} {value}" for name, value in zip(self.names, values, strict=True))

    @property
    def rows(self) -> list[Row]:
        """The rows of all series, each by world size."""
        return [row for rows in self.series.values() for row in rows]

    def _row(self, run: TrialRun, series: Sequence[TrialRun]) -> Row:
        started, best, last = started_of(run), run.state.best, run.epochs[-1]
        assert best is not None  # the trial has epochs
        step_seconds = _epoch_seconds(run) / (last.step / last.position)
        samples_per_second = _find_speed(run)
        first = started_of(series[0])  # the smallest world size
        smallest = [each for each in series if started_of(each).world_size == first.world_size]
        baseline = map(_find_speed, smallest)
        speed_up = samples_per_second / statistics.mean(baseline)
        wait = statistics.fmean(last.rank_wait_seconds or [0.0])
        overlap = statistics.fmean(last.rank_overlap_seconds or [0.0])
        # DDP times few steps, which may be slower than the median's
        timed_seconds = max(step_seconds, wait + overlap)
        device_seconds = started.world_size * sum(epoch.seconds for epoch in run.epochs)
        if started.device == "cpu":
            device_seconds *= started.num_threads
        return Row(
            trial=run.trial.number,
            world_size=started.world_size,
            learning_rate=float(started.config["learning_rate"]),
            batch_size_per_rank=int(started.config["global_batch_size"]) // started.world_size,
            num_train_samples=started.num_train_samples,
            epochs=len(run.epochs),
            final_test_loss=last.test_loss,
            best=best.figures().values[run.state.monitor.metric],
            step_seconds=step_seconds,
            samples_per_second=samples_per_second,
            speed_up=speed_up,
            efficiency=speed_up * first.world_size / started.world_size,
            seconds_to_target=self._find_seconds_to_target(run),
            wait_share=wait / timed_seconds,
            overlap_share=overlap / timed_seconds,
            device_hours=device_seconds / 3600,
        )

    def _find_seconds_to_target(self, run: TrialRun) -> float | None:
        """Return the seconds of training until the held-out loss was at most the target."""
        seconds = 0.0
        for epoch in run.epochs:
            seconds += epoch.seconds
            if epoch.test_loss <= self.target_loss:
                return seconds
        return None


def build_scaling_table(study: Study) -> pandas.DataFrame:
    """Build the table with a `Row` for each finished trial; its device_hours are named by the
    device.
    """
    import pandas

    table = pandas.DataFrame([dataclasses.asdict(row) for row in study.rows])
    return table.rename(columns={"device_hours": f"{study.device_unit.lower()}_hours"})


def started_of(run: TrialRun) -> RunStarted:
    assert run.state.started is not None  # the trial has epochs
    return run.state.started


def _find_speed(run: TrialRun) -> float:
    return started_of(run).num_train_samples / _epoch_seconds(run)


def _epoch_seconds(run: TrialRun) -> float:
    """Return the time of the median epoch: robust against the first epoch's one-time costs and
    against noise.
    """
    return statistics.median(epoch.seconds for epoch in run.epochs)
