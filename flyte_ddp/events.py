"""What a run says while it runs: one small dataclass per kind of event.

Rank 0 emits them, its supervisor passes them up, and everything a person sees listens to them in the parent. They hold
plain numbers, strings, bytes, lists and dicts only, so that they cross a pipe or a network as JSON-like values and the
parent needs no torch to read them. `to_dict` and `from_dict` are that form.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class LayerDescribed:
    """One leaf module of the model, in the order in which a forward pass visits it."""

    name: str  # dotted path within the model
    kind: str  # class name
    output_shape: list[int]  # of a batch of one
    num_parameters: int


@dataclass(frozen=True)
class EpochFinished:
    """An epoch's results, over all ranks."""

    epoch: int  # from 1
    step: int  # optimizer steps since the start of the run
    train_loss: float  # mean over every target of the epoch, as seen while training
    test_loss: float  # mean over every target of the held-out data
    accuracy: float  # share of held-out targets predicted right, in [0, 1]
    learning_rate: float  # at the epoch's last step
    seconds: float  # wall-clock of the epoch's training, all attempts that contributed to it, without the evaluation
    samples_per_second: float  # training samples, over all ranks
    evaluation_seconds: float
    rank_losses: list[float] = field(default_factory=list)  # mean training loss of each rank's own share
    rank_step_seconds: list[float] = field(default_factory=list)  # mean time each rank spent in its own part of a step
    num_replaced: int = 0  # training and held-out samples that could not be read, for which others stood in
    # Of this attempt's steps so far, by DDP's own timers (a sample of the steps); empty where one rank trains alone:
    rank_wait_seconds: list[float] = field(default_factory=list)  # mean wait per step for gradients, after own backward
    rank_overlap_seconds: list[float] = field(default_factory=list)  # mean time per step of exchange during backward


@dataclass(frozen=True)
class RunStarted:
    """All ranks are up, the model is built, and training begins (or goes on)."""

    recipe: str
    data: str  # which data was used, in words
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
    resumed_from: str = ""  # the checkpoint that was loaded
    previous_epochs: list[EpochFinished] = field(default_factory=list)  # what earlier attempts finished
    skipped_checkpoints: list[str] = field(default_factory=list)  # why each unusable checkpoint was passed over


@dataclass(frozen=True)
class StepFinished:
    """Where the run stands, every `log_interval` optimizer steps."""

    step: int  # optimizer steps since the start of the run
    epoch: int  # from 1
    loss: float  # mean over the targets of all ranks since the event before
    learning_rate: float
    gradient_norm: float  # L2 norm of this step's whole gradient, before clipping
    samples_per_second: float  # over all ranks, since the event before


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` values lie between `edges[i]` and `edges[i + 1]`."""

    counts: list[int]
    edges: list[float]


@dataclass(frozen=True)
class HistogramsTaken:
    """How parameters and their last gradients are distributed, once an epoch, by parameter name."""

    step: int
    parameters: dict[str, Histogram]
    gradients: dict[str, Histogram]


@dataclass(frozen=True)
class Prediction:
    """One held-out sample and what the model makes of it."""

    truth: str
    guess: str
    scores: dict[str, float]  # probability by class name
    image: bytes = b""  # a PNG, where the sample is an image
    text: str = ""  # where it is text


@dataclass(frozen=True)
class PredictionsMade:
    """A sample of the held-out data after the last epoch, in the data's own order."""

    epoch: int
    predictions: list[Prediction]


@dataclass(frozen=True)
class CheckpointSaved:
    step: int
    url: str
    best: bool  # the best accuracy so far
    seconds: float  # rank 0 spent on it in the foreground


@dataclass(frozen=True)
class CostsTimed:
    """What a step's parts cost, each timed by itself after the training of a run that was asked for it."""

    batch_sizes: list[int]  # samples per rank and optimizer step
    compute_seconds: list[float]  # of a step without exchange at each of these; all ranks at once, the slowest one's
    gradient_bytes: int
    all_reduce_seconds: float  # of so many bytes, over all ranks; 0 where there is one
    latency_seconds: float  # of the all-reduce of a single number


@dataclass(frozen=True)
class RunFinished:
    """The last event of a run that ended well."""

    step: int
    model_state_url: str
    seconds: float  # of this attempt, from the launch of its ranks
    best_epoch: int
    best_accuracy: float
    peak_memory_bytes: int  # of rank 0: of its GPU, else of its process
    first_step_seconds: float  # from the launch of the ranks to the end of the first optimizer step


Event = (
    RunStarted
    | StepFinished
    | EpochFinished
    | HistogramsTaken
    | PredictionsMade
    | CheckpointSaved
    | CostsTimed
    | RunFinished
)
KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        StepFinished,
        EpochFinished,
        HistogramsTaken,
        PredictionsMade,
        CheckpointSaved,
        CostsTimed,
        RunFinished,
    )
}


class Listener(Protocol):
    """Whoever wants to know. `close` is called once, with the error that ended the run, if one did."""

    def handle(self, event: Event) -> None: ...

    def close(self, error: BaseException | None) -> None: ...


def to_dict(event: Event) -> dict[str, Any]:
    """`event` as plain values, its kind under "event"."""
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def from_dict(values: dict[str, Any]) -> Event:
    """The event that `to_dict` made `values` from."""
    values = dict(values)
    kind = KINDS[values.pop("event")]
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
