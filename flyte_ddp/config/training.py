"""The hyperparameters of one run, each with its unit. Knows neither recipes nor devices; imports no
torch.

A `TrainingConfig` is complete and validated: no later code checks it again. Users give only the
fields that differ from the recipe's defaults; `resolve` puts the two together.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flyte_ddp.config.fields import Checked, check_names, field
from flyte_ddp.errors import ConfigError

# The classes behind `TrainingConfig.parallel`; each is imported by the ranks that use it.
PARALLELISMS = {
    "ddp": "flyte_ddp.training.ddp:DdpParallelism",
    "fsdp": "flyte_ddp.training.fsdp:FsdpParallelism",
}

OWN = "own"  # the choice of a field that a method of the recipe makes


@dataclass(frozen=True)
class Batch:
    """The samples of an optimizer step, over all ranks."""

    size: int
    num_parts: int  # micro-batches that every rank divides its share into
    # the number of parts may double if a GPU runs out of memory
    may_split: bool

    def size_per_rank(self, world_size: int) -> int:
        """Return the samples of one rank in one forward pass, at `world_size` ranks.

        Raises:
            ConfigError: the samples do not divide evenly over ranks and micro-batches.
        """
        parts = world_size * self.num_parts
        if self.size % parts:
            split = f"{world_size} ranks"
            if self.num_parts > 1:
                split += f" x {self.num_parts} micro-batches (gradient_accumulation)"
            nearest = max(1, round(self.size / parts)) * parts
            raise ConfigError(
                f"global_batch_size: expected a multiple of {parts}, got {self.size} ({split}; the "
                f"nearest is {nearest})"
            )
        return self.size // parts


# words in the name of a figure of which a higher one is better
HIGHER_IS_BETTER = re.compile(
    r"\b(accuracy|acc|top1|top5|auc|auroc|auprc|ap|map|iou|miou|dice|f1|precision|recall|"
    r"sensitivity|specificity|kappa|mcc|ndcg|mrr|r2|bleu|rouge|psnr|ssim|reward|throughput|"
    r"per second)\b"
)
# words of which a lower one is better, whatever stands beside them
LOWER_IS_BETTER = re.compile(r"\b(loss|error|err)\b")


def find_mode(metric: str) -> str:
    """Return "max" for a figure of which a higher one is better, judged by its name, else "min"."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", metric).lower()
    words = re.sub("[^a-z0-9]+", " ", name)
    is_higher = HIGHER_IS_BETTER.search(words) and not LOWER_IS_BETTER.search(words)
    return "max" if is_higher else "min"


@dataclass(frozen=True)
class Needs:
    """The timeouts, variables and devices that a launcher gives to a program.

    The config of a recipe sets the fields. A program that calls a function has the defaults.

    Example:
        >>> TrainingConfig(global_batch_size=64, compile=True).needs.compiler
        True
    """

    # seconds without a report of any rank, from the first one on, until the run is ended
    stall_timeout: float = 1800.0
    # seconds without the checkpoints' store until the attempt ends recoverably
    store_timeout: float = 600.0
    # environment variables of every rank
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # global batch that the ranks share; None where only the program knows it
    batch: Batch | None = None
    compiler: bool = False  # a C++ compiler, to compile the model
    gpus: str = ""  # the error for several ranks without GPUs; "" where they need none
    max_cost: float = 0.0  # limit of the cost of all attempts; 0 is no limit


@dataclass(frozen=True)
class Monitor(Checked):
    """The figure of an epoch that decides which model is the best. Runs, studies and promotions use
    it.
    """

    metric: str = field(
        "test_loss", help="test_loss, or one of the recipe's metrics or figures by its name"
    )
    mode: str = field(
        "auto",
        choices=("auto", "min", "max"),
        help="whether a lower or a higher one is better; auto: higher of accuracy, f1, recall, "
        "samples_per_second and their like, lower of any other",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode == "auto":
            object.__setattr__(self, "mode", find_mode(self.metric))

    def score(self, values: Mapping[str, float]) -> float:
        """Return the figure, negated where a higher figure is better. So a lower score is always
        better. The score is infinite where the figure is missing or not finite.
        """
        value = values.get(self.metric, math.nan)
        if not math.isfinite(value):
            return math.inf
        if self.mode == "max":
            return -value
        return value


@dataclass(frozen=True)
class TrainingConfig(Checked):
    """Everything about a run that is a number or a choice.

    Raises:
        ConfigError: a value has the wrong type or lies outside the limits given beside its field.
    """

    epochs: int = field(10, minimum=1, help="passes over the training data")
    global_batch_size: int = field(
        64,
        minimum=1,
        help="samples per optimizer step, summed over all ranks and accumulated micro-batches",
    )
    sample_size: int = field(
        0,
        minimum=0,
        help="training samples, drawn by `seed`, a smaller number a part of a larger one; 0: all. "
        "Held-out data stay",
    )
    evaluation_batch_size: int = field(1000, minimum=1, help="samples per rank and forward pass")
    evaluation_interval: int = field(
        0,
        minimum=0,
        help="optimizer steps from one evaluation to the next within an epoch; each counts as an "
        "epoch's does. 0: only at each epoch's end",
    )
    optimizer: str = field(
        "adamw",
        choices=("sgd", "adam", "adamw", OWN),
        help="sgd has momentum; own: what Recipe.optimizer returns, where a recipe defines it",
    )
    learning_rate: float = field(1e-3, above=0, help="the schedule's peak")
    momentum: float = field(0.9, minimum=0, below=1, help="of sgd")
    weight_decay: float = field(
        0.0, minimum=0, help="per step; decoupled for adamw, an L2 gradient term otherwise"
    )
    schedule: str = field(
        "cosine",
        choices=("constant", "cosine", "one_cycle", OWN),
        help="cosine: warm-up, then to zero; one_cycle: up for 30 %, then to zero; own: what "
        "Recipe.schedule returns, where a recipe defines it",
    )
    warmup_steps: int = field(
        0, minimum=0, help="optimizer steps of linear warm-up of constant and cosine"
    )
    gradient_accumulation: int = field(1, minimum=1, help="micro-batches per optimizer step")
    grow_accumulation_on_oom: bool = field(
        False,
        help="when a GPU runs out of memory, restart from the last checkpoint with twice as many "
        "micro-batches of half "
        "the size; the global batch stays, and BatchNorm without sync_batch_norm sees smaller "
        "batches",
    )
    gradient_clip_norm: float = field(
        0.0, minimum=0, help="largest L2 norm of the whole gradient; 0 does not clip"
    )
    spike_factor: float = field(
        0.0,
        minimum=0,
        help="a loss above so many times the median of the last 128 is bad, as NaN is; 0: NaN and "
        "infinity alone",
    )
    on_bad_step: str = field(
        "stop",
        choices=("stop", "skip", "rewind"),
        help="where a loss is bad: stop; skip takes the step back; rewind goes back to the newest "
        "state and leaves out the batches since",
    )
    max_bad_steps: int = field(
        10, minimum=0, help="steps that a run skips, or rewinds at, before it stops at one"
    )
    verify_interval: int = field(
        0,
        minimum=0,
        help="with ddp: optimizer steps until all ranks compute one micro-batch again and compare "
        "its gradient; a node that computes wrongly is left out; 0: never",
    )
    ema_decay: float = field(
        0.0,
        minimum=0,
        below=1,
        help="such as 0.999: per step, of an average of the weights, which is evaluated and "
        "returned in their place; 0: none",
    )
    precision: str = field(
        "fp32",
        choices=("fp32", "bf16", "fp16"),
        help="bf16, fp16: autocast; weights and optimizer stay fp32. fp16 scales the loss, and "
        "leaves steps out whose gradient overflows: at another number of ranks maybe others",
    )
    channels_last: bool = field(True, help="memory format of image-shaped (4-D) tensors")
    compile: bool = field(
        False, help="torch.compile the model, with fsdp each of its blocks; needs a C++ compiler"
    )
    parallel: str = field(
        "ddp",
        choices=PARALLELISMS,
        help="ddp: each rank holds the model; fsdp: weights, gradients and optimizer state are "
        "split over all ranks",
    )
    find_unused_parameters: bool = field(
        False,
        help="for a model that leaves parameters out of some steps; with ddp alone, which then "
        "looks for them in each step",
    )
    broadcast_buffers: bool = field(
        True,
        help="with ddp every forward pass begins with rank 0's buffers; else each rank has its "
        "own, and rank 0's are saved",
    )
    activation_checkpointing: bool = field(
        False,
        help="compute each block's activations again in the backward pass: less memory, a "
        "third more work",
    )
    sync_batch_norm: bool = field(
        False, help="BatchNorm over the samples of all ranks rather than of each; on GPUs only"
    )
    seed: int = field(0, minimum=0, help="of initial weights, shuffling, dropout and augmentation")
    deterministic: bool = field(
        False, help="only deterministic algorithms: same bits on same hardware, slower on GPUs"
    )
    monitor: Monitor = field(
        factory=Monitor, help="the figure of an epoch that decides which model is the best"
    )
    patience: int = field(
        0,
        minimum=0,
        help="evaluations without a better one, by `monitor`, until the training ends; "
        "0: it never ends early",
    )
    model_state: str = field(
        "best",
        choices=("best", "last"),
        help="the evaluation, by `monitor`, whose weights the run returns",
    )
    backend: str = field(
        "auto",
        choices=("auto", "nccl", "gloo"),
        help="auto: nccl where the ranks have GPUs, else gloo",
    )
    data_workers: int = field(
        0, minimum=0, help="loader processes per rank, for data sets that are read sample by sample"
    )
    log_interval: int = field(20, minimum=1, help="optimizer steps between two step events")
    prediction_interval: int = field(
        0,
        minimum=0,
        help="epochs between two tables of predictions for people; 0: only of the model that the "
        "run returns",
    )
    checkpoint_interval: int = field(
        0,
        minimum=0,
        help="optimizer steps between checkpoints within an epoch; 0: only at each epoch's end",
    )
    checkpoint_minutes: float = field(
        0.0,
        minimum=0,
        unit="minutes",
        help="between checkpoints within an epoch, looked at every log_interval steps; 0: none by "
        "the clock",
    )
    memory_interval: int = field(
        -1,
        minimum=-1,
        help="optimizer steps between states that are kept in the memory of the nodes, with a "
        "copy on another node; "
        "0: none; -1: as many as keep their cost below 1 % of the time",
    )
    checkpoints_to_keep: int = field(
        2, minimum=1, help="newest checkpoints kept, besides the best epoch's"
    )
    collective_timeout: float = field(
        600.0, above=0, unit="seconds", help="for which a collective waits for the other ranks"
    )
    stall_timeout: float = field(
        300.0, above=0, unit="seconds", help="without progress of any rank until the run is ended"
    )
    store_timeout: float = field(
        600.0,
        above=0,
        unit="seconds",
        help="without the checkpoints' store until the attempt ends recoverably",
    )
    initial_model_state: str = field(
        "",
        help="path or URL of the weights to start from, such as the model_state.pt of another run, "
        "or torchvision:NAME; counts by its contents",
    )
    fresh_layers: list[str] = field(
        factory=list,
        help="layers by the beginnings of their names, such as a head for other classes: with an "
        "initial model state "
        "they alone start with fresh weights, and may differ from it",
    )
    frozen_layers: list[str] = field(
        factory=list,
        help="layers by the beginnings of their names, such as encoder.stem, that are not trained",
    )
    model_artifact: str = field(
        "", help="name under which W&B or MLflow stores the model at the end; none by default"
    )
    max_hours: float = field(
        0.0,
        minimum=0,
        unit="hours",
        help="of a Flyte task, all attempts together, until it ends for good with a final "
        "checkpoint; 0 is no limit",
    )
    max_tokens: int = field(
        0,
        minimum=0,
        help="of the training data, padding included, until the run is done, if its `epochs` are "
        "not done before; the schedule ends there, too. 0 is no limit",
    )
    max_cost: float = field(
        0.0,
        minimum=0,
        help="of the run's nodes, by the table prices in settings.toml, all attempts together, "
        "until it ends for good with a final checkpoint; 0 is no limit",
    )
    recipe_options: dict[str, Any] = field(factory=dict, help="fields of the recipe's class")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.verify_interval and self.parallel != "ddp":
            raise ConfigError(
                f"verify_interval: expected 0 with parallel: {self.parallel}, got "
                f"{self.verify_interval}"
            )

    @property
    def batch(self) -> Batch:
        return Batch(
            self.global_batch_size, self.gradient_accumulation, self.grow_accumulation_on_oom
        )

    @property
    def needs(self) -> Needs:
        gpus = ""
        if self.backend == "nccl":
            gpus = "backend: expected auto or gloo for ranks without GPUs, got 'nccl'"
        elif self.sync_batch_norm:
            gpus = "sync_batch_norm: expected false for ranks without GPUs, got true"
        variables = {}
        if self.deterministic:
            variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        return Needs(
            self.stall_timeout,
            self.store_timeout,
            variables,
            self.batch,
            self.compile,
            gpus,
            self.max_cost,
        )


def resolve(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> TrainingConfig:
    """Return the config of a run. The user's `overrides` win over the recipe's `defaults`, and
    these win over the defaults of the class.

    Raises:
        ConfigError: an unknown field, or a value of the wrong type or range.
    """
    values = {**defaults, **overrides}
    check_names(TrainingConfig, values, "config")
    return TrainingConfig(**values)
