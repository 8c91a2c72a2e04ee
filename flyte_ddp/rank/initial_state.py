"""The start of a run: the weights it was given, and the check that a checkpoint belongs to it."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from flyte_ddp.checkpoints.files import load_state
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError, StorageUnavailable
from flyte_ddp.rank.sharding import load_model
from flyte_ddp.storage import STORE_TIMEOUT

# The fields that must stay as they are in the checkpoint. The others may change: more epochs, other intervals, ranks.
FIXED_BY_CHECKPOINT = (
    "seed",
    "sample_size",
    "global_batch_size",
    "optimizer",
    "learning_rate",
    "momentum",
    "weight_decay",
    "schedule",
    "warmup_steps",
    "gradient_clip_norm",
    "precision",
    "sync_batch_norm",
    "recipe_options",
)


def check_same_run(
    checkpoint: Mapping[str, Any], url: str, config: TrainingConfig, data_fingerprint: str, initial_state: str
) -> None:
    """Check that a run of these hyperparameters, data and initial state may resume from `checkpoint`, read at `url`.

    Raises:
        ConfigError: it belongs to another run; names the field.
    """
    progress = checkpoint["progress"]
    num_epochs = progress["epoch"] if progress["batch"] else progress["epoch"] - 1
    if config.epochs < num_epochs:
        raise ConfigError(
            f"epochs: expected at least {num_epochs}, got {config.epochs}: {url} was written in epoch {num_epochs}; "
            "fewer epochs need another place for the checkpoints"
        )
    ours = dataclasses.asdict(config)
    for name in FIXED_BY_CHECKPOINT:
        theirs = checkpoint["config"].get(name)
        if theirs != ours[name]:
            raise ConfigError(
                f"{name}: expected {theirs!r}, with which {url} was written, got {ours[name]!r}; "
                "another value needs another place for the checkpoints"
            )
    if checkpoint["data_fingerprint"] != data_fingerprint:
        raise ConfigError(
            f"data: expected the data with which {url} was written, got others; "
            "other data need another place for the checkpoints"
        )
    started_from = checkpoint["initial_state"]
    if started_from != initial_state:
        raise ConfigError(
            f"initial_state: expected {started_from!r}, from which the run of {url} started, got {initial_state!r}; "
            "another one needs another place for the checkpoints"
        )


def load_initial_state(model: nn.Module, url: str, timeout: float = STORE_TIMEOUT) -> None:
    """Load the weights and buffers of the state dict at `url` into `model`, all of them or none.

    Args:
        timeout: seconds to wait for a store that cannot be reached.

    Raises:
        StorageUnavailable: the store could not be reached.
        ConfigError: there is no state dict, or not one of this very model; names the keys that do not fit.
    """
    expected = "initial_state: expected a state dict with exactly the model's keys and shapes"
    try:
        state = load_state(url, timeout)
    except StorageUnavailable:
        raise
    except (FileNotFoundError, pickle.UnpicklingError, RuntimeError, EOFError) as error:  # the middle two are torch's
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"{expected}, got {url!r}, which cannot be read: {type(error).__name__}: {reason}") from error
    if problem := mismatch(model.state_dict(), state):
        raise ConfigError(f"{expected}, got {url!r}, which does not fit the model: {problem}")
    load_model(model, state)


def mismatch(expected: Mapping[str, Any], state: Any) -> str:
    """Describe why `state` cannot be loaded into a model with the state dict `expected`; "" if it can."""
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}"
    problems = {
        "it lacks": [key for key in expected if key not in state],
        "the model has no": [str(key) for key in state if key not in expected],
        "other shapes at": [
            f"{key} {_shape(state[key])} instead of {_shape(value)}"
            for key, value in expected.items()
            if key in state and _shape(state[key]) != _shape(value)
        ],
    }
    return "; ".join(f"{name} {_abbreviated(keys)}" for name, keys in problems.items() if keys)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def _abbreviated(names: list[str], max_names: int = 5) -> str:
    rest = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + rest
