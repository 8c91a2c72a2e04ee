"""The hyperparameters of one run, each with its unit. Knows neither recipes nor devices; imports no torch.

A `TrainingConfig` is complete and validated: whoever holds one need not check it again. Users give only the fields that
differ from the recipe's defaults; `resolve` puts the two together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flyte_ddp.errors import ConfigError

CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": ("sgd", "adam", "adamw"),
    "schedule": ("constant", "cosine", "one_cycle"),
    "precision": ("fp32", "bf16"),
    "backend": ("auto", "nccl", "gloo"),
}


@dataclass(frozen=True)
class TrainingConfig:
    """Everything about a run that is a number or a choice.

    Raises:
        ConfigError: a value has the wrong type or lies outside the range given beside its field.
    """

    epochs: int = 10  # passes over the training data, >= 1
    global_batch_size: int = 64  # samples per optimizer step, summed over all ranks and accumulated micro-batches
    evaluation_batch_size: int = 1000  # samples per rank and forward pass
    optimizer: str = "adamw"  # sgd (with momentum), adam or adamw
    learning_rate: float = 1e-3  # the schedule's peak, > 0
    momentum: float = 0.9  # of sgd, in [0, 1)
    weight_decay: float = 0.0  # per step, >= 0; decoupled for adamw, an L2 gradient term otherwise
    schedule: str = "cosine"  # constant, cosine (warm-up, then to zero) or one_cycle (up for 30 %, then to zero)
    warmup_steps: int = 0  # optimizer steps of linear warm-up of the constant and the cosine schedule, >= 0
    gradient_accumulation: int = 1  # micro-batches per optimizer step, >= 1
    gradient_clip_norm: float = 0.0  # largest L2 norm of the whole gradient; 0 does not clip
    precision: str = "fp32"  # fp32, or bf16 (autocast; weights and optimizer stay fp32)
    channels_last: bool = True  # memory format of image-shaped (4-D) tensors
    compile: bool = False  # torch.compile the model
    sync_batch_norm: bool = False  # BatchNorm over the samples of all ranks rather than of each; on GPUs only
    seed: int = 0  # of initial weights, shuffling, dropout and augmentation, >= 0
    deterministic: bool = False  # only deterministic algorithms: the same bits on the same hardware, slower on GPUs
    backend: str = "auto"  # auto (nccl where the ranks have GPUs, gloo otherwise), nccl or gloo
    data_workers: int = 0  # loader processes per rank, for data sets that are read sample by sample, >= 0
    log_interval: int = 20  # optimizer steps between two step events, >= 1
    checkpoint_interval: int = 0  # optimizer steps between checkpoints within an epoch; 0: only at each epoch's end
    checkpoints_to_keep: int = 2  # newest checkpoints kept, >= 1; the one of the best epoch is kept besides
    collective_timeout: float = 600.0  # seconds a collective waits for the other ranks, > 0
    stall_timeout: float = 300.0  # seconds without any rank getting on before the run is ended, > 0
    store_timeout: float = 600.0  # seconds without the checkpoints' store before the attempt ends recoverably, > 0
    recipe_options: dict[str, Any] = field(default_factory=dict)  # what the recipe itself is told: fields of its class

    def __post_init__(self) -> None:
        for name, annotation in typing.get_type_hints(type(self)).items():
            object.__setattr__(self, name, checked_type(name, getattr(self, name), annotation))
        for name, choices in CHOICES.items():
            _require(self, name, getattr(self, name) in choices, "one of " + ", ".join(choices))
        for name in (
            "epochs",
            "global_batch_size",
            "evaluation_batch_size",
            "gradient_accumulation",
            "log_interval",
            "checkpoints_to_keep",
        ):
            _require(self, name, getattr(self, name) >= 1, "a whole number of at least 1")
        for name in ("warmup_steps", "seed", "data_workers", "checkpoint_interval"):
            _require(self, name, getattr(self, name) >= 0, "a whole number of at least 0")
        for name in ("learning_rate", "collective_timeout", "stall_timeout", "store_timeout"):
            _require(self, name, 0 < getattr(self, name) < math.inf, "a finite number above 0")
        for name in ("weight_decay", "gradient_clip_norm"):
            _require(self, name, 0 <= getattr(self, name) < math.inf, "a finite number of at least 0")
        _require(self, "momentum", 0 <= self.momentum < 1, "a number from 0 up to, but not including, 1")

    def batch_size_per_rank(self, world_size: int) -> int:
        """Samples of one rank in one forward pass, at `world_size` ranks.

        Raises:
            ConfigError: the global batch does not divide evenly over ranks and micro-batches.
        """
        parts = world_size * self.gradient_accumulation
        if self.global_batch_size % parts:
            split = f"{world_size} ranks"
            if self.gradient_accumulation > 1:
                split += f" x {self.gradient_accumulation} micro-batches (gradient_accumulation)"
            raise ConfigError(
                f"global_batch_size: {self.global_batch_size} cannot be split evenly over {split}; "
                f"accepted is a multiple of {parts}, such as {max(1, round(self.global_batch_size / parts)) * parts}"
            )
        return self.global_batch_size // parts


def resolve(defaults: Mapping[str, Any], overrides: Mapping[str, Any]) -> TrainingConfig:
    """The config of a run: the user's `overrides` over the recipe's `defaults` over the class's own.

    Raises:
        ConfigError: an unknown field, or a value of the wrong type or range.
    """
    reject_unknown_fields(overrides)
    reject_unknown_fields(defaults)
    return TrainingConfig(**{**defaults, **overrides})


def reject_unknown_fields(values: Mapping[str, Any]) -> None:
    """Raise ConfigError where `values` has a key that is no field of TrainingConfig."""
    known = [field.name for field in dataclasses.fields(TrainingConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(f"config: unknown field {name!r}; accepted are {', '.join(known)}")


def checked_type(name: str, value: object, expected: type) -> object:
    """`value` as `expected`. A whole number is a fine float and 1e3 a fine int, but "3", true and null are neither."""
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a string",
        dict[str, Any]: "a JSON object",
    }
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, int) and abs(value) >= 1 << 63:  # which no float, seed or count of this machine's may be
        raise ConfigError(f"{name}: {value!r} is out of range; accepted is {names[expected]} of at most 63 bits")
    if expected is float and number:
        return float(typing.cast(float, value))
    if expected is int and number and float(typing.cast(float, value)).is_integer():
        return int(typing.cast(float, value))
    if expected in (bool, str) and isinstance(value, expected):
        return value
    if expected == dict[str, Any] and isinstance(value, Mapping):
        with contextlib.suppress(TypeError, ValueError):  # something in it that JSON does not know
            return json.loads(json.dumps(dict(value), allow_nan=False))  # also a copy, which nobody else changes
    raise ConfigError(f"{name}: {value!r} is of the wrong type; accepted is {names[expected]}")


def _require(config: TrainingConfig, name: str, holds: bool, accepted: str) -> None:
    if not holds:
        raise ConfigError(f"{name}: {getattr(config, name)!r} is out of range; accepted is {accepted}")
