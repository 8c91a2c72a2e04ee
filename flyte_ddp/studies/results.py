"""Results of a study: the state of each trial, the table of all epochs, and the best trial.

Knows neither the cluster nor the observers. Imports pandas inside the function that needs it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flyte_ddp.errors import ConfigError, SweepFailed
from flyte_ddp.events import (
    NOT_IN_HISTORY,
    CheckpointLoaded,
    EpochFinished,
    Event,
    Listener,
    Reported,
    RunStarted,
    RunState,
    parse_history,
    to_line,
)
from flyte_ddp.events import find_best as find_best_result
from flyte_ddp.observers.formats import format_figure, format_value
from flyte_ddp.storage import Storage
from flyte_ddp.studies.search import Trial

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]

# Histories of trials, beside their checkpoints.
OUTCOME = "outcome.jsonl"  # history of a trial that needs no more training
UNFINISHED = "unfinished.jsonl"  # history of a trial that was interrupted

WAITING, RUNNING, FINISHED = "waiting", "running", "finished"
STOPPED_EARLY = "stopped early"  # because other trials are better
FAILED = "failed"
INTERRUPTED = "interrupted"  # the whole study was interrupted, and resumes the trial
DONE = (FINISHED, STOPPED_EARLY, FAILED)
MAX_SHOWN = 4  # figures of a trial in a line

Result = EpochFinished | Reported  # a recipe's result, or a function's


@dataclass
class TrialRun(Listener):
    """The state of one trial, updated by its events."""

    trial: Trial
    url: str  # directory of its checkpoints, named by a hash
    status: str = WAITING
    state: RunState = field(default_factory=lambda: RunState(keep_reports=False), repr=False)
    error: str = ""  # why the trial failed, one line
    details: str = ""  # the full error text
    _history: list[str] = field(default_factory=list, repr=False)  # lines

    @classmethod
    def load(cls, trial: Trial, url: str) -> TrialRun:
        """Return the stored outcome of a trial that is done, else a waiting trial, with what one
        that was interrupted has reported.
        """
        run = cls(trial, url, state=RunState(keep_reports=trial.counted is Reported))
        for name in (OUTCOME, UNFINISHED):
            try:
                history = Storage(url).read(name)
            except FileNotFoundError:
                continue
            for event in parse_history(history, f"{url}/{name}"):
                run.handle(event)
            run.status = WAITING
            if name == OUTCOME:
                run.status = FINISHED if run.state.finished else STOPPED_EARLY
                run._history.clear()
            break
        return run

    def conclude(self) -> None:
        """Store the outcome of a trial that has finished or was stopped early.

        Raises:
            ConfigError: its function ended the process.
        """
        finished = self.state.finished
        if finished:
            for event in self.trial.reports_of(finished.value, self.state.reports):
                self.handle(event)
            self.status = FINISHED
        elif self.status != STOPPED_EARLY:
            raise ConfigError(
                "function: expected one that returns or raises, got one that ended its process "
                "with exit code 0"
            )
        self.store(OUTCOME)

    def store(self, name: str) -> None:
        """Store the history of the trial as `name`."""
        Storage(self.url).write(name, "".join(self._history).encode())
        self._history.clear()

    def history(self) -> bytes:
        """Return the trial's events as JSON lines, of one that failed too; b"" if it has none."""
        return "".join(self._history).encode() or Storage(self.url).read_if_there(OUTCOME)

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
    def results(self) -> Sequence[Result]:
        """The epochs of a recipe, or the reports of a function."""
        return self.state.epochs or self.state.reports

    @property
    def elapsed(self) -> list[float]:
        """Seconds of training and evaluation up to the end of each epoch, over all attempts.

        Measured by the ranks: excludes start-up, restarts and waiting.
        """
        return list(
            itertools.accumulate(epoch.seconds + epoch.evaluation_seconds for epoch in self.epochs)
        )

    @property
    def seconds(self) -> float:
        """Seconds of all epochs; of a function its wall time."""
        if self.epochs:
            return self.elapsed[-1]
        return self.state.time_spent().wall

    @property
    def metric(self) -> str:
        """The name of the figure that the trials are compared by."""
        return self.trial.config.monitor.metric

    @property
    def kept(self) -> Result | None:
        """The result that counts: the best so far, or of a recipe that keeps the weights of the
        last epoch the last.
        """
        if self.trial.config.model_state == "last" and self.results:
            return self.results[-1]
        return find_best_result(self.results, self.trial.config.monitor)

    def score(self, result: Result | None) -> float:
        """Return the figure that the trials are compared by, so that less is better; infinite
        without a result.
        """
        return self.trial.config.monitor.score(result.figures().values if result else {})

    def snapshot(self) -> TrialRun:
        """Return a copy for use in another thread than the one that delivers events."""
        made, made.state = copy.copy(self), copy.copy(self.state)
        made.state.epochs, made.state.reports = list(self.epochs), list(self.state.reports)
        return made


@dataclass(eq=False)
class TrialLines:
    """Prints a line for each start and end of a trial, with `say`."""

    say: Callable[[str], None]
    runs: Sequence[TrialRun]  # all
    started: set[int] = field(default_factory=set)  # numbers

    def observe(self, run: TrialRun, event: Event | None) -> None:
        """Take note of what happened to a trial; see `flyte_ddp.studies.runner.TrialRunner`."""
        if isinstance(
            event, CheckpointLoaded if run.trial.counted is EpochFinished else RunStarted
        ):
            again = f" again, after {place_of(run.epochs[-1])}" if run.epochs else ""
            self.started.add(run.trial.number)
            self.tell(run, f"started{again}")
        elif event is None and run.status in (FINISHED, STOPPED_EARLY):
            earlier = "" if run.trial.number in self.started else " in an earlier attempt"
            end = f"{run.status}{earlier}, after {place_of(run.results[-1])}"
            if run.kept and run.kept is not run.results[-1]:
                end += f", best at {place_of(run.kept)}"
            self.tell(run, f"{end}: {describe_kept(run)}")
        elif event is None and run.error:
            self.tell(run, f"failed: {run.error}")

    def tell(self, run: TrialRun, text: str) -> None:
        """Print `text` about a trial."""
        number = f"trial {run.trial.number}"
        self.say(f"{str(run.trial).replace(number, f'{number}/{len(self.runs)}', 1)} {text}")


def describe_kept(run: TrialRun) -> str:
    """Return the figures of the result that counts, and the seconds of the trial."""
    figures = figures_of(run.kept) if run.kept else {}
    figures.pop("train_loss", None)
    shown = [
        f"{name.replace('_', ' ')} {format_figure(name, value)}"
        for name, value in list(figures.items())[:MAX_SHOWN]
    ]
    return ", ".join([*shown, f"{run.seconds:.1f} s"])


def place_of(result: Result) -> str:
    """Return the epoch or the step of a result, such as "epoch 3"."""
    figures = result.figures()
    if figures.epoch is None:
        return f"step {figures.step}"
    return f"epoch {figures.epoch:g}"


def counted_figures(run: TrialRun) -> dict[str, float]:
    """Return the figures of the result that counts, as the trial's line has them; of a trial that
    runs the newest.

    A function may report some alone: they are as they were reported last until then.
    """
    counted = None  # all reports count in a trial that still runs
    if run.status in (FINISHED, STOPPED_EARLY):
        counted = run.kept
    figures: dict[str, float] = {}
    for result in run.results:
        figures |= figures_of(result)
        if result is counted:
            break
    return figures


def figures_of(result: Result) -> dict[str, float]:
    """Return the figures of an epoch without its speed, or all figures of a report, by name."""
    if isinstance(result, Reported):
        return dict(result.values)
    return {
        "train_loss": result.train_loss,
        "test_loss": result.test_loss,
        **result.metrics,
    }


def rank_of(run: TrialRun) -> tuple[float, int]:
    """Return a key that sorts trials from the best on, in their kept epochs, and equals by their
    numbers.
    """
    return run.score(run.kept), run.trial.number


def find_best(runs: Iterable[TrialRun]) -> TrialRun | None:
    """Return the finished trial that is the best in its kept epoch, the first of equals; None if
    none finished with a finite figure.
    """
    finished = [run for run in runs if run.status == FINISHED]
    best = min(finished, key=rank_of, default=None)
    if best is None or not math.isfinite(best.score(best.kept)):
        return None
    return best


def choose_best(runs: Sequence[TrialRun]) -> TrialRun:
    """Return the best trial of a study in which at least one finished, as `find_best`.

    Raises:
        SweepFailed: no trial finished with a finite figure; names the figure of each.
    """
    best = find_best(runs)
    if best is not None:
        return best
    metric = runs[0].metric
    lines = [f"{metric}: expected a finite number from a trial that finished, got none"]
    for run in runs:
        figures = figures_of(run.kept) if run.kept else {}
        lines.append(f"{run.trial}: {run.error or f'{metric} {figures.get(metric)}'}")
    raise SweepFailed("\n".join(lines), may_succeed=False)


def build_table(runs: Sequence[TrialRun]) -> pandas.DataFrame:
    """Build the table with a row for every result of every trial; a trial without any has one row.

    Columns: trial (its number), status, epoch, of a function step, one per swept value, one
    per figure or text, error. Figures of a recipe are train_loss, test_loss, its metrics,
    last_learning_rate (at the epoch's last step), seconds (training time of the epoch) and
    elapsed_seconds (training and evaluation time up to the end of the epoch). Missing values are
    NA.
    """
    import pandas

    names = list(runs[0].trial.values)
    is_recipe = runs[0].trial.counted is EpochFinished
    rows: list[dict[str, Any]] = []
    for run in runs:
        shared = {"trial": run.trial.number, "status": run.status, "error": run.error or None}
        rows += [{**run.trial.shown, **each, **shared} for each in _rows(run) or [{}]]
    first = ["trial", "status", "epoch", *["step"] * (not is_recipe), *names]
    columns = dict.fromkeys(itertools.chain(*rows))
    numbers = [name for name in columns if name not in (*first, "error")]
    table = pandas.DataFrame(rows, columns=[*first, *numbers, "error"])
    for name in names:
        # A column has one type. Mixed values, such as an option that is a number or a list, become
        # text.
        if table[name].dtype == object:
            table[name] = table[name].map(format_value)
    kinds = {"epoch": "float64", "error": "string"}
    if is_recipe and all(each.share == 1 for run in runs for each in run.epochs):
        kinds["epoch"] = "Int64"
    for name in numbers:
        kinds[name] = _kind_of([row.get(name) for row in rows])
        if kinds[name] == "string":
            table[name] = table[name].map(format_value, na_action="ignore")
    return table.astype(kinds)


def _kind_of(values: Sequence[Any]) -> str:
    """Return the type of a column: text if one of the values is, whole numbers if all are. None is
    a missing value.
    """
    kinds = {type(value) for value in values if value is not None}
    if any(issubclass(kind, str) for kind in kinds):
        return "string"
    if kinds == {int}:
        return "Int64"
    return "float64"


def _rows(run: TrialRun) -> list[dict[str, Any]]:
    if not run.epochs:
        return [
            {"epoch": each.epoch, "step": each.step, **each.values, **each.notes}
            for each in run.state.reports
        ]
    return [
        {
            "epoch": each.position,
            **figures_of(each),
            "last_learning_rate": each.learning_rate,
            "seconds": each.seconds,
            "elapsed_seconds": elapsed,
        }
        for each, elapsed in zip(run.epochs, run.elapsed, strict=True)
    ]
