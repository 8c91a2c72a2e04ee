"""Results of a sweep: the state of each trial, the table of all epochs, and the best trial.

Knows neither the cluster nor the observers. Imports pandas inside the function that needs it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyte_ddp.config import TrainingConfig
from flyte_ddp.events import EpochFinished, Event, RunFinished, RunStarted, RunState
from flyte_ddp.studies.search import Trial, format_value

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
STOPPED_EARLY = "stopped early"  # because other trials are better
FAILED = "failed"
INTERRUPTED = "interrupted"  # with the whole sweep; resumes with it


@dataclass
class TrialRun:
    """The state of one trial, updated by its events."""

    trial: Trial
    key: str  # hash of recipe, configuration and data: the trial's directory name
    status: str = WAITING
    epochs: list[EpochFinished] = field(default_factory=list)
    error: str = ""  # why the trial failed, one line
    details: str = ""  # the full error text
    model_state_url: str = ""
    _state: RunState = field(default_factory=lambda: RunState(keep_reports=False), repr=False, compare=False)

    @property
    def elapsed(self) -> list[float]:
        """Seconds of training and evaluation up to the end of each epoch, over all attempts.

        Measured by the ranks: excludes start-up, restarts and waiting.
        """
        return list(itertools.accumulate(epoch.seconds + epoch.evaluation_seconds for epoch in self.epochs))

    @property
    def last_loss(self) -> float:
        """Held-out loss after the latest epoch; infinite before the first epoch or if it is NaN."""
        loss = self.epochs[-1].test_loss if self.epochs else math.inf
        return math.inf if math.isnan(loss) else loss

    def handle(self, event: Event) -> None:
        self._state.handle(event)
        self.epochs = self._state.epochs
        if isinstance(event, RunStarted):
            self.status = RUNNING
        elif isinstance(event, RunFinished):
            self.model_state_url = event.model_state_url

    def close(self, error: BaseException | None) -> None:
        pass

    def snapshot(self) -> TrialRun:
        """Return a copy for use in another thread than the one that delivers events."""
        return dataclasses.replace(self, epochs=list(self.epochs))

    def to_json(self) -> str:
        """Return the part that is stored beside the trial's checkpoints."""
        epochs = [dataclasses.asdict(epoch) for epoch in self.epochs]
        return json.dumps({"status": self.status, "epochs": epochs, "model_state_url": self.model_state_url})

    @classmethod
    def from_json(cls, trial: Trial, key: str, text: bytes) -> TrialRun:
        values = json.loads(text)
        epochs = [EpochFinished(**epoch) for epoch in values.pop("epochs")]
        return cls(trial, key, epochs=epochs, **values)


def find_best(runs: Sequence[TrialRun]) -> TrialRun | None:
    """Return the finished trial with the lowest held-out loss after its last epoch, the first of equals.

    The last epoch counts because its weights are the ones kept. None if no trial finished.
    """
    finished = [run for run in runs if run.status == FINISHED]
    return min(finished, key=lambda run: (run.last_loss, run.trial.number), default=None)


def build_table(runs: Sequence[TrialRun]) -> pandas.DataFrame:
    """Build the table with a row for every epoch of every trial; a trial without epochs has one row.

    Columns: model (the trial's number), status, epoch, one per swept hyperparameter, train_loss, test_loss, accuracy,
    last_learning_rate (at the epoch's last step), seconds (training time of the epoch), elapsed_seconds (training
    and evaluation time up to the end of the epoch), error. Missing values are NA.
    """
    import pandas

    columns: dict[str, list[Any]] = {}
    for run in runs:
        for index in range(max(1, len(run.epochs))):
            epoch = run.epochs[index] if run.epochs else None
            row = {
                "model": run.trial.number,
                "status": run.status,
                "epoch": epoch and epoch.epoch,
                **run.trial.values,
                "train_loss": epoch and epoch.train_loss,
                "test_loss": epoch and epoch.test_loss,
                "accuracy": epoch and epoch.accuracy,
                "last_learning_rate": epoch and epoch.learning_rate,
                "seconds": epoch and epoch.seconds,
                "elapsed_seconds": run.elapsed[index] if epoch else None,
                "error": run.error or None,
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
    for name in runs[0].trial.values:
        # A column has one type. Mixed values, such as an option that is a number or a list, become text.
        if len({type(value) for value in columns[name]}) > 1 or isinstance(columns[name][0], (list, dict)):
            columns[name] = [format_value(value) for value in columns[name]]
    table = pandas.DataFrame(columns)
    numbers = ("train_loss", "test_loss", "accuracy", "last_learning_rate", "seconds", "elapsed_seconds")
    return table.astype({"epoch": "Int64", **dict.fromkeys(numbers, "float64"), "error": "string"})


def read_table(table: pandas.DataFrame) -> list[TrialRun]:
    """Rebuild the trials from a table, such as one read from a CSV file."""
    names = list(table.columns[3 : table.columns.get_loc("train_loss")])
    runs = []
    for number, rows in table.groupby("model", sort=False):
        trial = Trial(int(number), {name: rows[name].tolist()[0] for name in names}, {}, TrainingConfig())
        epochs = [
            EpochFinished(
                epoch=int(row.epoch),
                step=0,
                train_loss=row.train_loss,
                test_loss=row.test_loss,
                accuracy=row.accuracy,
                learning_rate=row.last_learning_rate,
                seconds=row.seconds,
                samples_per_second=0.0,
                evaluation_seconds=evaluation_seconds,
            )
            for row, evaluation_seconds in zip(
                rows.dropna(subset="epoch").itertuples(),
                rows["elapsed_seconds"].diff().fillna(rows["elapsed_seconds"]) - rows["seconds"],
                strict=False,
            )
        ]
        runs.append(TrialRun(trial, "", str(rows["status"].iloc[0]), epochs))
    return runs
