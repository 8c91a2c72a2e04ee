"""The start of a run: the weights it was given, and the check that a checkpoint belongs to it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor, nn

from flyte_ddp.config import TrainingConfig
from flyte_ddp.config.fields import suggest
from flyte_ddp.config.training import OWN
from flyte_ddp.errors import ConfigError, StorageUnavailable, abbreviate, first_line
from flyte_ddp.rank.sharding import load_model
from flyte_ddp.storage import STORE_TIMEOUT, read_file, redact_url
from flyte_ddp.storage.recorded_config import OPTIONS, RecordedConfig, flatten
from flyte_ddp.storage.state_dict_file import (
    TORCHVISION,
    class_names_of,
    from_bytes,
    is_same_state,
    load_torchvision_state,
    split_pin,
    with_class_names,
)

MAX_CLASSES = 20  # names of classes in an error
# prefixes of each key in a state of DDP's or torch.compile's model
PREFIXES = ("module.", "_orig_mod.")

# The fields that must stay as they are in the checkpoint. The others may change: more epochs, other
# intervals, ranks.
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
    "ema_decay",
    "precision",
    "sync_batch_norm",
    "fresh_layers",
    "frozen_layers",
)


def check_same_run(
    checkpoint: Mapping[str, Any],
    url: str,
    config: TrainingConfig,
    data_fingerprint: str,
    changeable_options: Collection[str] = (),
) -> None:
    """Check that a run of these hyperparameters and data may resume from
    `checkpoint`, read at `url`.

    Args:
        changeable_options: names of the recipe's options that may differ.

    Raises:
        ConfigError: it belongs to another run; names the field.
    """
    progress = checkpoint["progress"]
    num_epochs = progress["epoch"]
    if not progress["batch"]:
        num_epochs -= 1
    if config.epochs < num_epochs:
        raise ConfigError(
            f"epochs: expected at least {num_epochs}, got {config.epochs}: {url} was written in "
            f"epoch {num_epochs}; "
            "fewer epochs need another place for the checkpoints"
        )
    theirs, ours = recorded_config(checkpoint), flatten(dataclasses.asdict(config))
    fields = list(FIXED_BY_CHECKPOINT)
    if config.schedule == OWN:  # a scheduler may have been made for so many steps
        fields.append("max_tokens")
    fixed = [
        name
        for name in {**theirs.shown, **ours}
        if name in fields
        or (name.startswith(f"{OPTIONS}.") and name.partition(".")[2] not in changeable_options)
    ]
    theirs.check(
        {name: ours.get(name) for name in fixed},
        f", with which {url} was written",
        "; another value needs another place for the checkpoints",
    )
    if checkpoint["data_fingerprint"] != data_fingerprint:
        raise ConfigError(
            f"data: expected the data with which {url} was written, got others; "
            "other data need another place for the checkpoints"
        )
    # The address of a state may be signed anew. The contents' checksum is compared.
    started_from = theirs.shown["initial_model_state"]
    given = redact_url(config.initial_model_state)
    if not is_same_state(started_from, given):
        raise ConfigError(
            f"initial_model_state: expected {started_from!r}, from which the run of {url} "
            f"started, got {given!r}; another one needs another place for the checkpoints"
        )


def recorded_config(checkpoint: Mapping[str, Any]) -> RecordedConfig:
    """Return the config of a recipe's checkpoint. Fields that an earlier version did not have are
    at their defaults.
    """
    shown = {**dataclasses.asdict(TrainingConfig()), **checkpoint["config"]}
    return RecordedConfig(shown, checkpoint.get("hidden"))


def load_initial_state(
    model: nn.Module,
    url: str,
    timeout: float = STORE_TIMEOUT,
    fresh_layers: Sequence[str] = (),
    class_names: Sequence[str] = (),
) -> None:
    """Load the weights and buffers of the state dict at `url` into `model`, all of them or none.

    The file must have the checksum that `pin_state` noted in `url`. `torchvision:NAME` stands for
    weights that torchvision publishes, see `load_torchvision_state`.

    Args:
        timeout: seconds to wait for a store that cannot be reached.
        fresh_layers: the beginnings of the names of layers that are left as they are. A state of
            other classes fits if these layers include the classifier.
        class_names: the model's class names.

    Raises:
        StorageUnavailable: the store could not be reached.
        ConfigError: there is no state dict, or it does not fit the model apart from the fresh
            layers; names the keys that do not fit.
    """
    expected = "initial_model_state: expected a state dict with exactly the model's keys and shapes"
    if fresh_layers:
        expected += f" except in the fresh_layers {', '.join(fresh_layers)}"
    own = model.state_dict()
    found = read_state(url, expected, timeout)
    state = find_state(found, own.keys(), "initial_model_state")
    url, _ = split_pin(url)
    # Some of torchvision's states are older than these counters of torch.
    if isinstance(state, dict):
        for key in [key for key in own if key.endswith(".num_batches_tracked")]:
            state.setdefault(key, own[key])
    for layer in fresh_layers:
        _check_layer("fresh_layers", layer, own)
    fresh = [key for key in own if is_in(key, fresh_layers)]
    if any(key == [*own][-1] or _shape(own[key])[:1] == (len(class_names),) for key in fresh):
        class_names = ()  # the weights of these classes are not loaded
    if fresh_layers and isinstance(state, Mapping):
        own, state = _without(own, fresh_layers), _without(state, fresh_layers)
    problem = mismatch(own, state, class_names)
    if problem:
        remedy = ""
        if isinstance(state, Mapping):
            remedy = "; layers that may differ are named by config.fresh_layers"
        raise ConfigError(
            f"{expected}, got {url!r}, which does not fit the model: {problem}{remedy}"
        )
    load_model(model, state, is_whole=not fresh_layers)


def _without(state: Mapping[str, Any], layers: Sequence[str]) -> dict[str, Any]:
    """Return a state dict without some layers, with its class names."""
    left = {key: state[key] for key in state if not is_in(key, layers)}
    return with_class_names(left, class_names_of(state))


def read_state(url: str, expected: str, timeout: float = STORE_TIMEOUT) -> Any:
    """Return the state dict at `url`, see `load_initial_state`.

    Args:
        expected: the beginning of an error: the field with the URL, and what it expects.
    """
    url, sha256 = split_pin(url)
    field = expected.partition(":")[0]
    try:
        if url.startswith(TORCHVISION):
            return load_torchvision_state(url)
        contents = read_file(url, field, timeout)
        found = ""
        if sha256:
            found = hashlib.sha256(contents).hexdigest()
        if found != sha256:
            raise ConfigError(
                f"{field}: expected the contents with SHA-256 {sha256}, which {url!r} had when it "
                f"was given, got others with {found}: start again"
            )
        return from_bytes(contents)
    except (ConfigError, StorageUnavailable):
        raise
    except FileNotFoundError as error:
        if not sha256:
            raise ConfigError(f"{expected}, got {url!r}, which does not exist") from error
        raise ConfigError(
            f"{field}: expected {url!r}, which was there when it was given, but it was deleted "
            "meanwhile, as by `flyte-ddp promotion prune`: start again, predictions with another "
            "output"
        ) from error
    except Exception as error:  # the bytes of another file can raise any error
        raise ConfigError(
            f"{expected}, got {url!r}, which cannot be read: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from error


def find_state(found: Any, keys: Set[str], field: str) -> Any:
    """Return the state dict with some of `keys` in an object that a program has saved.

    It is the object itself, without `PREFIXES`, or a value in it, as in {"model": state}.

    Raises:
        ConfigError: several values are such states; begins with `field`.
    """
    if not isinstance(found, Mapping):
        return found
    state = _strip_prefixes(found, keys)
    if keys & state.keys():
        return state
    values = {
        key: _strip_prefixes(value, keys)
        for key, value in found.items()
        if isinstance(value, Mapping)
    }
    fitting = {key: value for key, value in values.items() if keys & value.keys()}
    if len(fitting) > 1:
        raise ConfigError(
            f"{field}: expected one state dict, got several, under {abbreviate([*fitting])}: save "
            f"the one that is meant alone, as torch.save(found[{next(iter(fitting))!r}], file)"
        )
    return next(iter(fitting.values()), found)


def _strip_prefixes(state: Mapping[Any, Any], keys: Set[str]) -> Mapping[Any, Any]:
    for prefix in PREFIXES * 2:  # prefixes may occur in either order
        if not keys & state.keys() and all(str(key).startswith(prefix) for key in state):
            plain = {key.removeprefix(prefix): value for key, value in state.items()}
            state = with_class_names(plain, class_names_of(state))
    return state


def find_class_names(found: Any) -> list[str]:
    """Return the class names of the state dict in an object that a program has saved, see
    `find_state`. Return none if they are unknown, or if several states have different names.
    """
    states = [found]
    if isinstance(found, Mapping):
        states += found.values()
    named = [names for names in map(class_names_of, states) if names]
    if named and all(names == named[0] for names in named):
        return named[0]
    return []


def freeze_layers(model: nn.Module, layers: Sequence[str]) -> None:
    """Exclude the parameters of these layers, given by the beginnings of their names, from
    training.

    Raises:
        ConfigError: there is no such layer, or all are frozen.
    """
    parameters = dict(model.named_parameters())
    for layer in layers:
        _check_layer("frozen_layers", layer, parameters)
    for name, parameter in parameters.items():
        if is_in(name, layers):
            parameter.requires_grad_(False)
    if layers and not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(
            "frozen_layers: expected a layer that is left to train, got all of them: "
            f"{', '.join(layers)}"
        )


def is_in(name: str, layers: Sequence[str]) -> bool:
    """Return whether a parameter or buffer belongs to one of `layers`: encoder.1 has
    encoder.1.bias, not encoder.10.
    """
    return any(f"{name}.".startswith(f"{layer.rstrip('.')}.") for layer in layers)


def _check_layer(field: str, layer: str, names: Iterable[str]) -> None:
    if not any(is_in(name, [layer]) for name in names):
        known = {
            ".".join(name.split(".")[:depth])
            for name in names
            for depth in range(1, name.count(".") + 2)
        }
        top = sorted({name.partition(".")[0] for name in names})
        raise ConfigError(
            f"{field}: expected beginnings of names of the model's layers, such as "
            f"{abbreviate(top)}, got {layer!r}"
            f"{suggest(layer, known)}"
        )


def mismatch(expected: Mapping[str, Any], state: Any, class_names: Sequence[str]) -> str:
    """Describe why `state` cannot be loaded into a model with the state dict `expected`; "" if it
    can.

    Args:
        class_names: the model's class names. They are compared if both sides have names.
    """
    if not isinstance(state, Mapping):
        return f"it is a {type(state).__name__}"
    shapes = []
    for key, value in expected.items():
        if key in state and _shape(state[key]) != _shape(value):
            shapes.append(f"{key} {_shape(state[key])} instead of {_shape(value)}")
    problems = {
        "it lacks": [key for key in expected if key not in state],
        "the model has no": [str(key) for key in state if key not in expected],
        "other shapes at": shapes,
    }
    found = [f"{name} {abbreviate(keys)}" for name, keys in problems.items() if keys]
    theirs, ours = class_names_of(state), list(class_names)
    if theirs and ours and theirs != ours:
        pairs = enumerate(zip(theirs, ours, strict=False))
        number = next((index for index, (one, other) in pairs if one != other), 0)
        start, since = 0, ""
        if number >= MAX_CLASSES:
            start, since = number, f" from number {number} on"
        shown = [abbreviate(names[start:], MAX_CLASSES) for names in (theirs, ours)]
        found.append(f"its classes{since} are {shown[0]}, those of the data are {shown[1]}")
    return "; ".join(found)


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape)
    return type(value).__name__
