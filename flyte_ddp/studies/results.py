"""Results of a study: the state of each trial, the table of all epochs, and the best trial.

Knows neither the cluster nor the observers. Imports pandas inside the function that needs it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyte_ddp.events import (
    NOT_IN_HISTORY,
    EpochFinished,
    Event,
    Listener,
    RunStarted,
    RunState,
    parse_history,
    to_line,
)
from flyte_ddp.events import find_best as find_best_epoch
from flyte_ddp.observers.formats import format_value
from flyte_ddp.storage import Storage
from flyte_ddp.studies.search import Trial

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

# the history of a trial that needs no more training, beside its checkpoints
OUTCOME = "outcome.jsonl"

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
STOPPED_EARLY = "stopped early"  # because other trials are better
FAILED = "failed"
INTERRUPTED = "interrupted"  # with the whole study; resumes with it
DONE = (FINISHED, STOPPED_EARLY, FAILED)


@dataclass
class TrialRun(Listener):
    """The state of one trial, updated by its events."""

    trial: Trial
    url: str  # of the directory of its checkpoints, which is named by a hash
    status: str = WAITING
    state: RunState = field(default_factory=lambda: RunState(keep_reports=False), repr=False)
    error: str = ""  # why the trial failed, one line
    details: str = ""  # the full error text
    _history: list[str] = field(default_factory=list, repr=False)  # lines

    @classmethod
    def load(cls, trial: Trial, url: str) -> TrialRun:
        """Return the stored outcome of a trial that is done, else a waiting trial."""
        try:
            state = RunState.of(
                parse_history(Storage(url).read(OUTCOME), f"{url}/{OUTCOME}"), keep_reports=False
            )
        except FileNotFoundError:
            return cls(trial, url)
        return cls(trial, url, FINISHED if state.finished else STOPPED_EARLY, state)

    def store(self) -> None:
        """Store the outcome of a trial that is finished or stopped early."""
        Storage(self.url).write(OUTCOME, "".join(self._history).encode())
        self._history.clear()

    def history(self) -> bytes:
        """Return the trial's events as JSON lines, of one that failed too; b"" if it has none."""
        try:
            return "".join(self._history).encode() or Storage(self.url).read(OUTCOME)
        except FileNotFoundError:
            return b""

    def handle(self, event: Event) -> None:
        self.state.handle(event)
        if isinstance(event, RunStarted):
            self.status = RUNNING
        if not isinstance(event, NOT_IN_HISTORY):
            self._history.append(to_line(event))

    @property
    def key(self) -> str:
        """A name of the trial's recipe, configuration and data: of its checkpoints' directory."""
        return self.url.rpartition("/")[2]

    @property
    def epochs(self) -> list[EpochFinished]:
        return self.state.epochs

    @property
    def elapsed(self) -> list[float]:
        """Seconds of training and evaluation up to the end of each epoch, over all attempts.

        Measured by the ranks: excludes start-up, restarts and waiting.
        """
        return list(
            itertools.accumulate(epoch.seconds + epoch.evaluation_seconds for epoch in self.epochs)
        )

    @property
    def metric(self) -> str:
        """The name of the figure that the trials are compared by."""
        return self.trial.config.monitor.metric

    @property
    def kept(self) -> EpochFinished | None:
        """The epoch that counts, because its weights are the ones kept: the best so far, or the
        last.
        """
        if self.trial.config.model_state == "last":
            return self.epochs[-1] if self.epochs else None
        return find_best_epoch(self.epochs, self.trial.config.monitor)

    def score(self, epoch: EpochFinished | None) -> float:
        """Return the figure that the trials are compared by, so that less is better; infinite
        without an epoch.
        """
        return self.trial.config.monitor.score(epoch.figures().values if epoch else {})

    def snapshot(self) -> TrialRun:
        """Return a copy for use in another thread than the one that delivers events."""
        made, made.state = copy.copy(self), copy.copy(self.state)
        made.state.epochs = list(self.epochs)
        return made


def rank_of(run: TrialRun) -> tuple[float, int]:
    """Return a key that sorts trials from the best on, in their kept epochs, and equals by their
    numbers.
    """
    return run.score(run.kept), run.trial.number


def find_best(runs: Iterable[TrialRun]) -> TrialRun | None:
    """Return the finished trial that is the best in its kept epoch, the first of equals; None if
    none finished.
    """
    return min((run for run in runs if run.status == FINISHED), key=rank_of, default=None)


def build_table(runs: Sequence[TrialRun]) -> pandas.DataFrame:
    """Build the table with a row for every epoch of every trial; a trial without epochs has one
    row.

    Columns: model (the trial's number), status, epoch, one per swept hyperparameter, train_loss,
    test_loss, one per metric, last_learning_rate (at the epoch's last step), seconds (training time
    of the epoch), elapsed_seconds (training and evaluation time up to the end of the epoch), error.
    Missing values are NA.
    """
    import pandas

    metrics = list(
        dict.fromkeys(name for run in runs for epoch in run.epochs for name in epoch.metrics)
    )
    numbers = (
        "train_loss",
        "test_loss",
        *metrics,
        "last_learning_rate",
        "seconds",
        "elapsed_seconds",
    )
    rows: list[dict[str, Any]] = []
    for run in runs:
        known = {
            "model": run.trial.number,
            "status": run.status,
            **run.trial.values,
            "error": run.error or None,
        }
        epochs = [
            {
                "epoch": each.epoch,
                "train_loss": each.train_loss,
                "test_loss": each.test_loss,
                **each.metrics,
            }
            | {
                "last_learning_rate": each.learning_rate,
                "seconds": each.seconds,
                "elapsed_seconds": elapsed,
            }
            for each, elapsed in zip(run.epochs, run.elapsed, strict=True)
        ]
        rows += [{**known, **epoch} for epoch in epochs or [{}]]
    names = list(runs[0].trial.values)
    table = pandas.DataFrame(rows, columns=["model", "status", "epoch", *names, *numbers, "error"])
    for name in names:
        # A column has one type. Mixed values, such as an option that is a number or a list, become
        # text.
        if table[name].dtype == object:
            table[name] = table[name].map(format_value)
    return table.astype({"epoch": "Int64", **dict.fromkeys(numbers, "float64"), "error": "string"})
