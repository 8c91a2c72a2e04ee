"""The events of a run, the state folded from them, and their form as JSON lines. Imports no torch.

Rank 0 emits events, its supervisor forwards them, and everything a person sees is made from them in the parent process.
They hold plain numbers, strings, bytes, lists and dicts only, so that they can cross a pipe or a network (`to_dict`,
`from_dict`) and be kept in a file (`to_line`, `read_history`).

`RunState` is the only place that knows what a restart from a checkpoint undoes. Whoever needs a run's epochs, steps or
result folds its events with it.
"""

from __future__ import annotations

import dataclasses
import json
import time
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flyte_ddp.events.wall_time import AttemptEnded, AttemptStarted, Timed, TimeSpent, WallTime


@dataclass(frozen=True)
class LayerDescribed:
    """One leaf module of the model, in the order in which a forward pass visits it."""

    name: str  # dotted path within the model
    kind: str  # class name
    output_shape: list[int]  # of a batch of one
    num_parameters: int


@dataclass(frozen=True)
class EpochFinished(Timed):
    """The results of an epoch, over all ranks."""

    epoch: int  # from 1
    step: int  # optimizer steps since the start of the run
    train_loss: float  # mean over every target of the epoch, as seen while training
    test_loss: float  # mean over every target of the held-out data
    accuracy: float  # share of held-out targets predicted correctly, in [0, 1]
    learning_rate: float  # at the epoch's last step
    seconds: float  # wall-clock of the epoch's training in all attempts that contributed to it, without the evaluation
    samples_per_second: float  # training samples, over all ranks
    evaluation_seconds: float
    rank_losses: list[float] = field(default_factory=list)  # mean training loss over each rank's own samples
    rank_step_seconds: list[float] = field(default_factory=list)  # mean time per step that each rank computed
    num_replaced: int = 0  # training and held-out samples that could not be read and were replaced by others
    # Of this attempt's steps so far, from DDP's own timers (a sample of the steps); empty for a single rank:
    rank_wait_seconds: list[float] = field(default_factory=list)  # mean wait for gradients after the backward pass
    rank_overlap_seconds: list[float] = field(default_factory=list)  # mean all-reduce time during the backward pass
    metrics: dict[str, float] = field(default_factory=dict)  # further figures by name, which the recipe defines
    sample: str = ""  # text that the model generated after this epoch, if the recipe's models generate any


@dataclass(frozen=True)
class RunStarted(Timed):
    """All ranks are up, the model is built, and training starts or resumes."""

    recipe: str
    data: str  # one line that describes the data
    config: dict[str, Any]
    world_size: int
    device: str  # "cpu" or the GPU's name
    backend: str
    num_threads: int  # CPU threads per rank
    num_parameters: int
    num_train_samples: int
    num_test_samples: int
    num_steps: int  # optimizer steps of the whole run
    layers: list[LayerDescribed]
    versions: dict[str, str]
    resumed_step: int = 0  # optimizer steps done by earlier attempts
    resumed_from: str = ""  # URL of the checkpoint that was loaded
    previous_epochs: list[EpochFinished] = field(default_factory=list)  # finished by earlier attempts
    skipped_checkpoints: list[str] = field(default_factory=list)  # one line for each checkpoint that is unusable


@dataclass(frozen=True)
class StepFinished(Timed):
    """The progress of the run, every `log_interval` optimizer steps."""

    step: int  # optimizer steps since the start of the run
    epoch: int  # from 1
    loss: float  # mean over the targets of all ranks since the previous event
    learning_rate: float
    gradient_norm: float  # L2 norm of this step's whole gradient, before clipping
    samples_per_second: float  # over all ranks, since the previous event


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` values lie between `edges[i]` and `edges[i + 1]`."""

    counts: list[int]
    edges: list[float]


@dataclass(frozen=True)
class HistogramsTaken(Timed):
    """Histograms of the parameters and of their last gradients, by parameter name, once per epoch."""

    step: int
    parameters: dict[str, Histogram]
    gradients: dict[str, Histogram]


@dataclass(frozen=True)
class Prediction:
    """One held-out sample and the model's prediction for it."""

    truth: str
    guess: str
    scores: dict[str, float]  # probability by class name
    image: bytes = b""  # a PNG if the sample is an image
    text: str = ""  # the sample if it is text


@dataclass(frozen=True)
class PredictionsMade(Timed):
    """Predictions for some of the held-out samples after the last epoch, in the data's own order."""

    epoch: int
    predictions: list[Prediction]


@dataclass(frozen=True)
class CheckpointSaved(Timed):
    """The state was copied for a checkpoint, which is being written while the training goes on."""

    step: int
    url: str
    best: bool  # it has the best accuracy so far
    seconds: float  # for which rank 0 interrupted the training


@dataclass(frozen=True)
class CheckpointWritten(Timed):
    """The store has the whole checkpoint. One that a newer state replaced before it was written has no such event."""

    step: int
    url: str
    best: bool  # it had the best accuracy when it was saved


@dataclass(frozen=True)
class RunFinished(Timed):
    """The last event of a run that succeeded."""

    step: int
    model_state_url: str
    seconds: float  # of this attempt, from the launch of its ranks
    best_epoch: int
    best_accuracy: float
    peak_memory_bytes: int  # of rank 0: its GPU's memory, or its process's without a GPU
    first_step_seconds: float  # from the launch of the ranks to the end of the first optimizer step
    rank_peak_memory_bytes: list[int] = field(default_factory=list)  # of each rank
    rank_num_parameters: list[int] = field(default_factory=list)  # that each rank holds: of a split model its part


@dataclass(frozen=True)
class FunctionStarted(Timed):
    """All ranks of a function are about to call it."""

    name: str
    world_size: int
    num_nodes: int
    num_restarts: int  # of the gang before


@dataclass(frozen=True)
class CheckpointLoaded(Timed):
    """A function resumes from a checkpoint."""

    step: int
    url: str


@dataclass(frozen=True)
class Reported(Timed):
    """A function's report of its progress, by `session.report` on rank 0."""

    step: int
    epoch: float | None
    values: dict[str, float]  # by the names that the function gave them


@dataclass(frozen=True)
class FunctionReturned(Timed):
    """The last event of a function's run: it has returned on every rank."""

    value: bytes  # rank 0's
    seconds: float  # in the function, on rank 0


Event = (
    AttemptStarted
    | AttemptEnded
    | RunStarted
    | StepFinished
    | EpochFinished
    | HistogramsTaken
    | PredictionsMade
    | CheckpointSaved
    | CheckpointWritten
    | RunFinished
    | FunctionStarted
    | CheckpointLoaded
    | Reported
    | FunctionReturned
    | TimeSpent
)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in typing.get_args(Event)}
NOT_IN_HISTORY = (HistogramsTaken, PredictionsMade, FunctionReturned)  # too large; the report and W&B have them


class Listener(Protocol):
    """An observer of a run. `close` is called at the end, with the error if the run failed."""

    def handle(self, event: Event) -> None: ...

    def close(self, error: BaseException | None) -> None: ...


@dataclass
class RunState:
    """The state of a run, folded from its events. A listener: give it each event in order.

    When the ranks are started again from a checkpoint, the steps and epochs after that checkpoint are removed.

    Args:
        keep_steps: keep every `StepFinished`. Turn it off where there are many runs and only the epochs matter.
    """

    keep_steps: bool = True
    started: RunStarted | None = None  # the latest
    steps: list[StepFinished] = field(default_factory=list)
    epochs: list[EpochFinished] = field(default_factory=list)  # those of earlier attempts included
    checkpoints: list[CheckpointWritten] = field(default_factory=list)  # that still exist: the newest, and the best
    predictions: PredictionsMade | None = None
    finished: RunFinished | None = None
    function: FunctionStarted | None = None  # the latest
    reports: list[Reported] = field(default_factory=list)
    returned: FunctionReturned | None = None
    num_starts: int = 0
    num_checkpoints: int = 0  # written by this attempt, removed ones included
    _time: WallTime = field(default_factory=WallTime, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, events: Iterable[Event], keep_steps: bool = True) -> RunState:
        """Fold `events`, in their order."""
        state = cls(keep_steps)
        for event in events:
            state.handle(event)
        return state

    def handle(self, event: Event) -> None:
        """Update the state with the next event of the run."""
        if event.at:
            self._book(event)
        if isinstance(event, RunStarted):
            self.num_starts += 1
            self.started = event
            self.steps = [step for step in self.steps if step.step <= event.resumed_step]
            self.epochs = list(event.previous_epochs)
        elif isinstance(event, StepFinished):
            if self.keep_steps:
                self.steps.append(event)
        elif isinstance(event, EpochFinished):
            self._add_epoch(event)
        elif isinstance(event, CheckpointWritten):
            self._add_checkpoint(event)
        elif isinstance(event, PredictionsMade):
            self.predictions = event
        elif isinstance(event, RunFinished):
            self.finished = event
        elif isinstance(event, FunctionStarted):
            self.num_starts += 1
            self.function = event
        elif isinstance(event, CheckpointLoaded):
            self.reports = [each for each in self.reports if each.step <= event.step]
        elif isinstance(event, Reported):
            if self.keep_steps:
                self.reports.append(event)
        elif isinstance(event, FunctionReturned):
            self.returned = event

    def close(self, error: BaseException | None) -> None:
        """Do nothing: the state holds no resources."""

    @property
    def best(self) -> EpochFinished | None:
        """The finished epoch with the best accuracy; of equal ones, the one with the lowest held-out loss."""
        return max(self.epochs, key=lambda epoch: (epoch.accuracy, -epoch.test_loss), default=None)

    @property
    def last_step(self) -> int:
        """The last optimizer step that is known to be done."""
        resumed = self.started.resumed_step if self.started else 0
        return max([resumed, *(event.step for event in (self.steps[-1:] + self.epochs[-1:]))])

    def time_spent(self, until: float = 0.0) -> TimeSpent:
        """Return what the wall time went to, up to the last event, or `until` (seconds since the epoch) if it is later.

        All zeros where the events have no times.
        """
        return self._time.spent(0.0 if self.finished or self.returned else until)

    def position(self, step: int) -> float:
        """Convert an optimizer step to epochs, such as 1.5 for the middle of the second."""
        if self.started is None:
            return 0.0
        return step * int(self.started.config["epochs"]) / max(1, self.started.num_steps)

    def _book(self, event: Event) -> None:
        """Book the time since the last event."""
        if isinstance(event, AttemptStarted):
            return self._time.start_attempt(event)
        if isinstance(event, (HistogramsTaken, PredictionsMade, TimeSpent)):
            return None  # so that a history, which has them not, gives the same account
        if isinstance(event, CheckpointWritten):
            return None  # from beside the training: it divides none of its time
        self._time.advance(event.at)
        if isinstance(event, AttemptEnded):
            self._time.end_attempt(event.idle_seconds)
        elif isinstance(event, RunStarted):
            self._time.start_training(event.resumed_step)
        elif isinstance(event, FunctionStarted):
            self._time.start_function()
        elif isinstance(event, CheckpointLoaded):
            self._time.start_training(event.step)
        elif isinstance(event, EpochFinished):
            self._time.evaluate(event.evaluation_seconds)
        elif isinstance(event, CheckpointSaved):
            self._time.save(event.step, event.seconds)
        elif isinstance(event, RunFinished):
            self._time.finish()
        return None

    def _add_epoch(self, event: EpochFinished) -> None:
        # A history file repeats the epochs of earlier attempts that `RunStarted` has brought already.
        known = [epoch.epoch for epoch in self.epochs]
        if event.epoch in known:
            self.epochs[known.index(event.epoch)] = event
        else:
            self.epochs.append(event)

    def _add_checkpoint(self, event: CheckpointWritten) -> None:
        self.num_checkpoints += 1
        known = [*self.checkpoints, event]
        newest = known[-(self.started.config.get("checkpoints_to_keep", 1) if self.started else 1) :]
        best = [checkpoint for checkpoint in known if checkpoint.best][-1:]
        self.checkpoints = [*(checkpoint for checkpoint in best if checkpoint not in newest), *newest]


def to_dict(event: Event) -> dict[str, Any]:
    """Return `event` as plain values, with its kind under "event"."""
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def from_dict(values: dict[str, Any]) -> Event:
    """Return the event that `to_dict` made `values` from."""
    values = dict(values)
    kind: Any = KINDS[values.pop("event")]
    if kind is RunStarted:
        values["layers"] = [LayerDescribed(**layer) for layer in values["layers"]]
        values["previous_epochs"] = [EpochFinished(**epoch) for epoch in values["previous_epochs"]]
    elif kind is HistogramsTaken:
        for key in ("parameters", "gradients"):
            values[key] = {name: Histogram(**histogram) for name, histogram in values[key].items()}
    elif kind is PredictionsMade:
        values["predictions"] = [Prediction(**prediction) for prediction in values["predictions"]]
    event: Event = kind(**values)
    return event


def to_line(event: Event) -> str:
    """Return `event` as one line of a history: a JSON object in `to_dict`'s form with the current "time"."""
    # A user's configuration may hold values that JSON does not know. Their repr is enough for a record.
    return json.dumps({"time": time.time(), **to_dict(event)}, default=repr) + "\n"


def parse_history(contents: bytes, name: str) -> list[Event]:
    """Return the events in the lines of a history. An incomplete last line, left by a killed writer, is ignored.

    Raises:
        ValueError: any other line is not an event; names the line and `name`.
    """
    events: list[Event] = []
    for number, line in enumerate(contents[: len_of_whole_lines(contents)].splitlines(), start=1):
        try:
            values = json.loads(line)
            del values["time"]
            events.append(from_dict(values))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{name}, line {number}: expected an event of a run: {error!r}") from error
    return events


def read_history(path: str | Path) -> list[Event]:
    """Return the events in a history file, as `parse_history`.

    Raises:
        FileNotFoundError: there is no such file.
    """
    return parse_history(Path(path).read_bytes(), str(path))


def len_of_whole_lines(contents: bytes) -> int:
    """Return the number of bytes that belong to complete lines."""
    return contents.rfind(b"\n") + 1
