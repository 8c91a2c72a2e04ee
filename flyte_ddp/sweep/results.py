"""What is known of a sweep's models: how far each of them is, the table of all their epochs, and which is the best.

Knows neither the cluster that trains them nor who looks at them. Imports pandas inside the function that needs it.
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
from flyte_ddp.events import EpochFinished, Event, RunFinished, RunStarted
from flyte_ddp.sweep.search import Model, shown

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
STOPPED_EARLY = "stopped early"  # because other models are better
FAILED = "failed"
INTERRUPTED = "interrupted"  # with the whole sweep; goes on when that does


@dataclass
class ModelRun:
    """One model of a sweep, and a listener of its run."""

    model: Model
    key: str  # names it wherever it is trained: by its recipe, its configuration and its data
    status: str = WAITING
    epochs: list[EpochFinished] = field(default_factory=list)
    error: str = ""  # why it failed, in one line
    details: str = ""  # and in many
    model_state_url: str = ""

    @property
    def elapsed(self) -> list[float]:
        """Seconds that the model was trained and evaluated for until the end of each epoch, whoever trained it.

        As its ranks measured them: without their starts and restarts, and without the driver's delays.
        """
        return list(itertools.accumulate(epoch.seconds + epoch.evaluation_seconds for epoch in self.epochs))

    @property
    def last_loss(self) -> float:
        """On the held-out data, after the last epoch so far; infinite where there is none, or it is no number."""
        loss = self.epochs[-1].test_loss if self.epochs else math.inf
        return math.inf if math.isnan(loss) else loss

    def handle(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self.status = RUNNING
            self.epochs = list(event.previous_epochs)
        elif isinstance(event, EpochFinished):
            self.epochs.append(event)
        elif isinstance(event, RunFinished):
            self.model_state_url = event.model_state_url

    def close(self, error: BaseException | None) -> None:
        pass

    def snapshot(self) -> ModelRun:
        """A copy of how it is now, for another thread than the one that tells it events."""
        return dataclasses.replace(self, epochs=list(self.epochs))

    def to_json(self) -> str:
        """What of it outlives this process."""
        epochs = [dataclasses.asdict(epoch) for epoch in self.epochs]
        return json.dumps({"status": self.status, "epochs": epochs, "model_state_url": self.model_state_url})

    @classmethod
    def from_json(cls, model: Model, key: str, text: bytes) -> ModelRun:
        values = json.loads(text)
        epochs = [EpochFinished(**epoch) for epoch in values.pop("epochs")]
        return cls(model, key, epochs=epochs, **values)


def best_of(runs: Sequence[ModelRun]) -> ModelRun | None:
    """Of the models that were trained to their end, the one with the lowest loss on the held-out data after its last
    epoch, whose weights are those that are kept; the first of equals. None where there is none.
    """
    finished = [run for run in runs if run.status == FINISHED]
    return min(finished, key=lambda run: (run.last_loss, run.model.number), default=None)


def table_of(runs: Sequence[ModelRun]) -> pandas.DataFrame:
    """A row for every epoch of every model; one without an epoch for a model that has none.

    Columns: model (its number), status, epoch, a column for each swept hyperparameter, train_loss, test_loss, accuracy,
    last_learning_rate (at the epoch's last step), seconds (of the epoch's training), elapsed_seconds (of the model's
    training and evaluation up to the end of the epoch), error. Missing values are NA.
    """
    import pandas

    columns: dict[str, list[Any]] = {}
    for run in runs:
        for index in range(max(1, len(run.epochs))):
            epoch = run.epochs[index] if run.epochs else None
            row = {
                "model": run.model.number,
                "status": run.status,
                "epoch": epoch and epoch.epoch,
                **run.model.values,
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
    for name in runs[0].model.values:
        # A column has one type: what mixes several, such as an option that is a number or a list, becomes text.
        if len({type(value) for value in columns[name]}) > 1 or isinstance(columns[name][0], (list, dict)):
            columns[name] = [shown(value) for value in columns[name]]
    table = pandas.DataFrame(columns)
    numbers = ("train_loss", "test_loss", "accuracy", "last_learning_rate", "seconds", "elapsed_seconds")
    return table.astype({"epoch": "Int64", **dict.fromkeys(numbers, "float64"), "error": "string"})


def runs_of(table: pandas.DataFrame) -> list[ModelRun]:
    """The models whose table this is, as far as it tells, such as one that was read from a CSV file."""
    names = list(table.columns[3 : table.columns.get_loc("train_loss")])
    runs = []
    for number, rows in table.groupby("model", sort=False):
        model = Model(int(number), {name: rows[name].tolist()[0] for name in names}, {}, TrainingConfig())
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
        runs.append(ModelRun(model, "", str(rows["status"].iloc[0]), epochs))
    return runs
