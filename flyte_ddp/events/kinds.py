"""The kinds of events: what a run of any program tells about itself. Imports no torch.

They hold plain numbers, strings, bytes, lists and dicts only, so that they can cross a pipe or a
network and be kept in a file (history.py). A new kind is a class in this file, and its name in
`Event`. Give it `figures` if it has numbers to show: the progress bar, W&B, Prometheus and the
report take them from there, so no observer has to know the kind.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any, Protocol

from flyte_ddp.errors import abbreviate

MAX_NAMED = 8  # samples of a bad step, in a line
MAX_LABEL = 200  # characters of a class's name beside a prediction
MAX_SAMPLE_TEXT = 5_000  # characters of a sample


def to_utf8(text: str) -> str:
    """Return `text` with an escape in place of what UTF-8 cannot encode, as Python shows it on
    standard error.
    """
    return text.encode("utf-8", "backslashreplace").decode()


def shorten_label(name: Any, max_length: int = MAX_LABEL) -> str:
    """Return a name as text of UTF-8. A checksum keeps long ones apart that begin alike."""
    text = to_utf8(str(name))
    if len(text) <= max_length:
        return text
    return f"{text[: max_length - 12]}... {zlib.crc32(text.encode()):08x}"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The numbers that observers show of an event, by name."""

    values: dict[str, float] = field(default_factory=dict)
    # "step" or "epoch", the x axis of their curves; "" for the newest ones, which have no curve
    axis: str = ""
    step: int | None = None  # optimizer steps done then; None if that is not known
    # passes over the data that are done, such as 1.5; None if they are not known
    epoch: float | None = None


@dataclass(frozen=True, kw_only=True)
class Timed:
    """The base of every event."""

    # seconds since the epoch, by the launcher's clock; 0: not known
    at: float = field(default=0.0, compare=False)

    def figures(self) -> Figures:
        """Return what observers show of the event, computed once for all of them."""
        return Figures()

    def known(self, *names: str) -> dict[str, Any]:
        """Return the fields with these names that are not empty."""
        return {name: getattr(self, name) for name in names if getattr(self, name)}


@dataclass(frozen=True)
class NodesAwaited(Timed):
    """The run waits for its nodes, for another reason than before. The launcher emits it."""

    reason: str


@dataclass(frozen=True)
class AttemptStarted(Timed):
    """The nodes are there, and their ranks are being started. The launcher emits it, before the
    ranks' own events.
    """

    num_nodes: int
    launched_at: float  # start of the run, seconds since the epoch
    # waiting for nodes, since the end of the attempt before or the launch
    waited_seconds: float
    # seconds from the notice that a node has to go until its end; 0: not known
    grace_seconds: float = 0.0
    price: float = 0.0  # price of all nodes per hour; 0: not known
    # cost of all nodes for the part of `waited_seconds` before their pods started; nobody pays it
    absent_cost: float = 0.0


@dataclass(frozen=True)
class AttemptEnded(Timed):
    """The ranks of an attempt are gone before the run is finished. The launcher emits it."""

    # optimizer steps since the start of the run, as far as is known; those after a checkpoint are
    # lost
    step: int
    reason: str
    # since the last sign of progress: until the failure was noticed and all ranks had ended
    idle_seconds: float
    # nodes that had announced that they go away: then it is an announced loss, not a failure
    num_leaving: int = 0


@dataclass(frozen=True)
class LayerDescribed:
    """One leaf module of the model, in the order in which a forward pass visits it."""

    name: str  # dotted path within the model
    kind: str  # class name
    output_shape: list[int]  # shape for a batch of one
    num_parameters: int


@dataclass(frozen=True)
class RunStarted(Timed):
    """All ranks are up: a function is about to be called, a recipe's model is built."""

    name: str  # name of the recipe, the function or the script
    world_size: int
    num_nodes: int = 1
    num_restarts: int = 0  # earlier restarts of the gang
    # Known of a recipe:
    data: str = ""  # description of the data in one line
    config: dict[str, Any] = field(default_factory=dict)
    # hashes of the config's values that are not shown, see `storage.hidden`; None in histories of
    # an earlier version
    hidden: list[dict[str, str]] | None = None
    device: str = ""  # "cpu" or the GPU's name
    backend: str = ""
    num_threads: int = 0  # CPU threads per rank
    num_parameters: int = 0
    num_train_samples: int = 0
    num_test_samples: int = 0
    num_steps: int = 0  # optimizer steps of the whole run
    layers: list[LayerDescribed] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    data_fingerprint: str = ""  # SHA-256 of the prepared files
    data_license: str = ""  # "" where it is not known
    class_names: list[str] = field(default_factory=list)  # the order is that of the model's outputs
    # SHA-256 of the library's and the recipe's code; the launcher adds that of another program
    recipe_version: str = ""
    # The launcher adds these:
    commit: str = ""  # commit of the user's project, from `describe_commit`
    image: str = ""  # image of the task; "" without one
    arguments: str = ""  # arguments of a script, as for a shell
    # plain arguments of a function, by the names of its parameters
    named_arguments: dict[str, Any] = field(default_factory=dict)

    def figures(self) -> Figures:
        return Figures(values=self.known("world_size", "num_steps", "num_parameters"))


@dataclass(frozen=True)
class EpochFinished(Timed):
    """The results of an epoch, over all ranks; with `evaluation_interval` of a part of one, since
    the evaluation before it.
    """

    epoch: int  # from 1
    step: int  # optimizer steps since the start of the run
    train_loss: float  # mean over every target of the epoch, as seen while training
    test_loss: float  # mean over every target of the held-out data
    learning_rate: float  # at the epoch's last step
    # wall-clock of the epoch's training in all attempts that contributed to it, without the
    # evaluation
    seconds: float
    samples_per_second: float  # training samples, over all ranks
    evaluation_seconds: float
    # mean training loss over each rank's own samples
    rank_losses: list[float] = field(default_factory=list)
    # mean time per step that each rank computed
    rank_step_seconds: list[float] = field(default_factory=list)
    # the same by phase: data, forward, backward; empty in histories of an earlier version
    rank_phase_seconds: dict[str, list[float]] = field(default_factory=dict, compare=False)
    # training and held-out samples that could not be read and were left out
    num_unreadable: int = 0
    # Means over this attempt's steps so far, from DDP's own timers (a sample of the steps). Empty
    # for a single rank:
    # mean wait for gradients after the backward pass
    rank_wait_seconds: list[float] = field(default_factory=list)
    # mean all-reduce time during the backward pass
    rank_overlap_seconds: list[float] = field(default_factory=list)
    # By name: the recipe's metrics of the held-out data, and its further figures.
    metrics: dict[str, float] = field(default_factory=dict)
    # text that the model generated after this epoch, if the recipe's models generate any
    sample: str = ""
    share: float = 1.0  # share of the epoch that was done then

    @property
    def position(self) -> float:
        """The epochs that were done, such as 1.5 in the middle of the second."""
        return self.epoch if self.share == 1 else self.epoch - 1 + self.share

    def figures(self) -> Figures:
        return Figures(
            values={
                "train_loss": self.train_loss,
                "test_loss": self.test_loss,
                **self.metrics,
                "samples_per_second": self.samples_per_second,
                "seconds": self.seconds,
                **({"num_unreadable": self.num_unreadable} if self.num_unreadable else {}),
            },
            axis="epoch",
            step=self.step,
            epoch=self.position,
        )


@dataclass(frozen=True)
class CheckpointLoaded(Timed):
    """The program has looked for a checkpoint: it resumes from the newest usable one, or starts at
    step 0.
    """

    step: int  # optimizer steps done by earlier attempts
    url: str  # "" if there is none
    epochs: list[EpochFinished] = field(default_factory=list)  # finished by earlier attempts
    # a line for each checkpoint that is unusable
    skipped: list[str] = field(default_factory=list)

    def figures(self) -> Figures:
        # A state that an earlier attempt copied and did not write is lost.
        return Figures(
            values={"checkpoint_step": self.step, "checkpoint_copied_step": self.step},
            step=self.step,
        )


@dataclass(frozen=True)
class Reported(Timed):
    """The progress of the run on rank 0: by `session.report`, or of a recipe every `log_interval`
    steps.

    A recipe reports its "loss" (the mean over the targets of all ranks since the previous report),
    its "learning_rate", its "gradient_norm" (L2 of this step's whole gradient, before clipping) and
    its "samples_per_second" (over all ranks, since the previous report). On a mixture it also
    reports "loss/NAME": the loss of the samples of each source.
    """

    step: int  # optimizer steps since the start of the run
    epoch: float | None  # epochs done, such as 1.5 in the middle of the second
    values: dict[str, float]  # the figures that were reported, under their names
    # other values that a swept function has returned, as text by name
    notes: dict[str, str] = field(default_factory=dict)

    def figures(self) -> Figures:
        return Figures(values=self.values, axis="step", step=self.step, epoch=self.epoch)


@dataclass(frozen=True)
class RankReported(Timed):
    """Reports of a function on another rank than 0, at most one event per second: the run's
    figures are rank 0's.
    """

    rank: int
    reports: list[Reported]  # since the event before


@dataclass(frozen=True)
class Histogram:
    """`counts[i]` values lie between `edges[i]` and `edges[i + 1]`."""

    counts: list[int]
    edges: list[float]


@dataclass(frozen=True)
class HistogramsTaken(Timed):
    """Histograms of the parameters and of their last gradients, once per epoch."""

    step: int
    # by names such as "parameters/conv.weight" and "gradients/conv.weight"
    histograms: dict[str, Histogram]


@dataclass(frozen=True)
class Prediction:
    """One held-out sample and the model's prediction for it."""

    truth: str
    guess: str
    scores: dict[str, float]  # probability by class name
    image: bytes = b""  # a PNG if the sample is an image
    text: str = ""  # the sample if it is text
    numbers: list[float] = field(default_factory=list)  # truth and guess, if they are numbers
    # error of the guess, larger for a worse guess; None if the guess is just right or wrong
    error: float | None = None
    sample: int = -1  # number among the held-out samples, from 0; -1 if it is not known

    def __post_init__(self) -> None:
        """Turn names into short texts of UTF-8: a recipe may call its classes by numbers, by the
        bytes of file names, or by whole documents.
        """
        for name in ("truth", "guess"):
            object.__setattr__(self, name, shorten_label(getattr(self, name)))
        object.__setattr__(self, "text", shorten_label(self.text, MAX_SAMPLE_TEXT))
        scores = {shorten_label(name): score for name, score in self.scores.items()}
        object.__setattr__(self, "scores", scores)


@dataclass(frozen=True)
class PredictionsMade(Timed):
    """Predictions for some of the held-out samples, in the data's own order, by the model that the
    run returns.
    """

    epoch: int  # epoch of the model's weights
    predictions: list[Prediction]


@dataclass(frozen=True)
class CheckpointSaved(Timed):
    """The state was copied for a checkpoint, which is being written while the training goes on."""

    step: int
    url: str  # "" for one that is kept in the memory of nodes alone
    best: bool  # the state has the weights of the best epoch so far
    seconds: float  # interruption of the training by rank 0

    def figures(self) -> Figures:
        return Figures(values={"checkpoint_copied_step": self.step} if self.url else {})


@dataclass(frozen=True)
class CheckpointWritten(Timed):
    """The store has the whole checkpoint. One that a newer state replaced before it was written has
    no such event.
    """

    step: int
    url: str
    best: bool  # the state had the weights of the best epoch when it was saved

    def figures(self) -> Figures:
        return Figures(values={"checkpoint_step": self.step})


@dataclass(frozen=True)
class RunFinished(Timed):
    """The last event of a run that succeeded, on every rank."""

    step: int
    seconds: float  # seconds of this attempt, from the launch of its ranks
    value: bytes = b""  # value that a function returned on rank 0, pickled
    # Known of a recipe:
    model_state_url: str = ""
    best_epoch: int = 0  # epoch that the config's `monitor` prefers
    # the best epoch's monitored figure by name, and held-out loss
    best: dict[str, float] = field(default_factory=dict)
    model_state_epoch: int = 0  # epoch of the weights of the model state
    peak_memory_bytes: int = 0  # memory of rank 0's GPU, or of its process without a GPU
    # from the launch of the ranks to the end of the first optimizer step
    first_step_seconds: float = 0.0
    rank_peak_memory_bytes: list[int] = field(default_factory=list)  # peak of each rank
    # parameters that each rank holds: its part of a split model
    rank_num_parameters: list[int] = field(default_factory=list)
    # steps between two states in the memory of the nodes; 0: none were kept there
    memory_interval: int = 0
    # directory with the same weights as safetensors, and what the recipe exports besides
    export_url: str = ""
    exported: list[str] = field(default_factory=list)  # names of the files there
    not_exported: str = ""  # why there are fewer than there should be

    def figures(self) -> Figures:
        known = self.known("seconds", "best_epoch", "first_step_seconds", "peak_memory_bytes")
        best = {f"best_{name}": value for name, value in self.best.items()}
        return Figures(values={"finished": 1, **known, **best})


@dataclass(frozen=True)
class Straggler:
    """A rank that is slower than the others, by its own seconds per step and the median of the
    other ranks.
    """

    rank: int
    node: str  # name for people; "" for this machine
    device: str  # GPU of the rank; "" without a GPU
    phase: str  # data, forward or backward: the one that makes most of the difference
    seconds: float  # per step in this phase
    median_seconds: float
    whole_seconds: float  # per step in all phases
    whole_median_seconds: float

    @property
    def factor(self) -> float:
        """How many times as long its steps take."""
        return self.whole_seconds / max(1e-9, self.whole_median_seconds)

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.node, self.device)))
        return (
            f"rank {self.rank}{f' ({where})' if where else ''} is slow in {self.phase}: "
            f"{1e3 * self.seconds:.3g} ms per step, median of the others "
            f"{1e3 * self.median_seconds:.3g} ms; in all phases {self.factor:.1f} x the median"
        )


@dataclass(frozen=True)
class StragglersFound(Timed):
    """The ranks that are slower than the others have changed. The launcher emits it."""

    step: int  # step that the gang has reached
    stragglers: list[Straggler]  # all of them now

    def figures(self) -> Figures:
        slowest = max((each.factor for each in self.stragglers), default=1.0)
        return Figures(values={"stragglers": len(self.stragglers), "straggler_factor": slowest})


# names of probes whose figures are no speed
LOSSES = "bytes between two lost ones"
CORES = "usable cores"


@dataclass(frozen=True)
class SlowNode:
    """A node that is slower than the others, by the node check."""

    node: int  # position among the nodes
    label: str  # name for people
    # `CORES`, core speed or memory with the model of the CPU, products or copies of a GPU, disk,
    # network, or `LOSSES`
    probe: str
    # operations or bytes per second; of `CORES` their number; of `LOSSES` bytes for each lost one
    rate: float
    median: float  # median rate of the nodes; of two nodes the stored rate

    def __str__(self) -> str:
        if self.probe == LOSSES:
            return f"{self.label} is slow: network, which loses {1 / self.rate:.0%} of its packets"
        what = f"{self.probe} at {1e-6 * self.rate:,.0f} M/s"
        if self.probe.startswith(CORES):
            what = f"{self.rate:g} {self.probe}"
        return f"{self.label} is slow: {what}, {self.rate / self.median:.2f} of the median"


@dataclass(frozen=True)
class NodesFoundSlow(Timed):
    """The node check has found slow nodes. The launcher emits it."""

    nodes: list[SlowNode]


@dataclass(frozen=True)
class BadSample:
    """A training sample of a bad step."""

    index: int  # place in the data set
    key: str  # key of the sample in the data set, such as a file's name; "" without a key
    loss: float | None  # None where it is not known

    def __str__(self) -> str:
        loss = "" if self.loss is None else f": {self.loss:.4g}"
        return f"{self.index}{f' ({self.key})' if self.key else ''}{loss}"


@dataclass(frozen=True)
class StepFoundBad(Timed):
    """The loss of a step is NaN, infinite, or above `spike_factor` times the median."""

    step: int  # number of the step, from 1
    epoch: int | None  # None if that is not known
    loss: float  # mean over the targets of all ranks
    reason: str
    # The samples with the largest losses, the worst first; all samples of a function's step.
    samples: list[BadSample]

    def figures(self) -> Figures:
        return Figures(values={"bad_step": self.step})

    def __str__(self) -> str:
        return self.describe(MAX_NAMED)

    def describe(self, num_samples: int) -> str:
        """Return a line for people, with so many samples."""
        epoch = "" if self.epoch is None else f" (epoch {self.epoch})"
        named = abbreviate(self.samples, num_samples) or "not known"
        return f"{self.reason} at step {self.step}{epoch}; samples: {named}"


@dataclass(frozen=True)
class PictureShown(Timed):
    """The program has shown a picture, by `session.show`."""

    step: int
    name: str
    png: bytes


@dataclass(frozen=True)
class NodeMeasured(Timed):
    """The use of a node, in [0, 1]. Its agent emits it, less often the longer an attempt takes."""

    node: int  # from 0
    cpu: float  # share of all cores of the machine
    memory: float  # share of the machine's memory, or of the container's
    memory_limit: int  # bytes
    # Use of the GPUs of the node's ranks; None if the driver does not report it.
    gpu: float | None = None  # the mean share of time in which a kernel ran
    gpu_memory: float | None = None  # share of the fullest GPU's memory
    host: str = ""  # name of the machine or of the Kubernetes node; "" if it is not known
    pod: str = ""  # "" outside Kubernetes
    first_rank: int = 0  # rank of the first entry in `gpu_uuids`
    # UUID of the GPU of each rank of the node; "" without a GPU, or if the driver has none
    gpu_uuids: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PartStarted(Timed):
    """A rank has claimed a part of predictions. `CheckpointWritten` follows its file."""

    rank: int
    part: str  # name of the file
    num_parts: int  # number of all parts


Event = (
    NodesAwaited
    | AttemptStarted
    | AttemptEnded
    | RunStarted
    | CheckpointLoaded
    | Reported
    | RankReported
    | EpochFinished
    | HistogramsTaken
    | PredictionsMade
    | CheckpointSaved
    | CheckpointWritten
    | RunFinished
    | StragglersFound
    | NodesFoundSlow
    | StepFoundBad
    | NodeMeasured
    | PictureShown
    | PartStarted
)


class Listener(Protocol):
    """An observer of a run. One thread calls its methods.

    It defines `handle(event)`, or `handle(event, state)` with the `RunState` that contains all
    events up to this one. The parameter `state` is found by its name. The state changes with the
    next event, so copy what another thread needs. It has reports, pictures and measurements of
    nodes only if a listener of the run has `needs_reports = True`.

    Example:
        # prints the best epoch so far after each epoch
        class Best(events.Listener):
            def handle(self, event, state):
                if isinstance(event, events.EpochFinished):
                    print(state.best.epoch)

        flyte_ddp.train("digits", {"epochs": 2}, nproc_per_node=1, listeners=[Best()])
    """

    # `Any`: a user's class may declare one parameter or two.
    def handle(self, *event_and_state: Any, **_: Any) -> None: ...

    def close(self, error: BaseException | None) -> None:
        """Take note of the end, with the error if the run failed."""
        return  # a listener without resources has nothing to do
