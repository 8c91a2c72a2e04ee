"""Validation of frozen config classes: type, bounds and unit of a field stand beside it, and one function checks them.

By hand rather than by pydantic: importing it and defining one class takes 0.15 to 0.3 s, in every supervisor and rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import operator
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.errors import ConfigError

LIMITS, HELP = "limits", "help"  # keys of a field's metadata
_KINDS = {bool: "true or false", str: "a string", dict[str, Any]: "a JSON object"}
_MAX_INTEGER = (1 << 63) - 1  # of floats, of seeds and of whatever is counted


@dataclass(frozen=True)
class Limits:
    """The values that a field accepts, beyond its type."""

    minimum: float | None = None  # the smallest accepted number
    maximum: float | None = None  # the largest
    above: float | None = None  # every accepted number is larger than this
    below: float | None = None  # and smaller than this
    choices: tuple[str, ...] = ()
    pattern: str = ""  # regular expression that a string matches as a whole
    example: str = ""  # how an error describes what matches `pattern`
    unit: str = ""  # of a number

    def accept(self, value: Any) -> bool:
        """Check `value`, which has the field's type already."""
        if isinstance(value, str):
            is_match = not self.pattern or re.fullmatch(self.pattern, value)
            return bool(is_match and (not self.choices or value in self.choices))
        if not isinstance(value, (int, float)) or self == ANY:
            return True
        return (
            math.isfinite(value)
            and (self.minimum is None or value >= self.minimum)
            and (self.maximum is None or value <= self.maximum)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def describe(self, kind: object) -> str:
        """Return what an error says is expected of a field of type `kind`."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.example:
            return self.example
        if kind is not int and kind is not float:
            return _KINDS[kind]  # type: ignore[index]
        noun = "a whole number" if kind is int else "a number" if self == ANY else "a finite number"
        bounds = [
            *([f"of at least {self.minimum:g}"] if self.minimum is not None else []),
            *([f"of at most {self.maximum:.12g}"] if self.maximum is not None else []),
            *([f"above {self.above:g}"] if self.above is not None else []),
            *([f"below {self.below:g}"] if self.below is not None else []),
        ]
        return " ".join([noun, " and ".join(bounds)]).rstrip() + (f" ({self.unit})" if self.unit else "")


ANY = Limits()


def field(
    default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None, help: str = "", **limits: Any
) -> Any:
    """Declare a dataclass field with its default, its meaning and its `limits`, which are fields of `Limits`.

    The limits of a list are those of its items.
    """
    metadata = {LIMITS: Limits(**limits), HELP: help}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def describe_fields(config_class: Any, prefix: str = "") -> Iterator[str]:
    """Yield a line for each field, those of a nested class after it: its name, default, unit and meaning."""
    kinds = typing.get_type_hints(config_class)
    for each in dataclasses.fields(config_class):
        kind, limits = kinds[each.name], each.metadata.get(LIMITS, ANY)
        default = each.default_factory() if callable(each.default_factory) else each.default
        value = "" if dataclasses.is_dataclass(kind) else f" = {json.dumps(default)}" + f" {limits.unit}".rstrip()
        choices = f"one of {', '.join(limits.choices)}" if limits.choices else ""
        meaning = "; ".join(filter(None, [choices, each.metadata.get(HELP, "")]))
        yield f"{prefix + each.name + value:<50} {meaning}".rstrip()
        if dataclasses.is_dataclass(kind):
            yield from describe_fields(kind, f"{prefix}{each.name}.")


def validate(config: Any, prefix: str = "") -> None:
    """Check every field of a frozen dataclass, and give each value its declared type. For `__post_init__`.

    Args:
        prefix: of the fields' names in errors, such as "kubernetes.".

    Raises:
        ConfigError: a value has the wrong type or lies outside its field's limits.
    """
    kinds = typing.get_type_hints(type(config))
    for each in dataclasses.fields(config):
        limits = each.metadata.get(LIMITS, ANY)
        value = check(prefix + each.name, getattr(config, each.name), kinds[each.name], limits)
        object.__setattr__(config, each.name, value)


def check(name: str, value: object, kind: Any, limits: Limits = ANY) -> Any:
    """Return `value` as `kind`: a number, bool, string, JSON object, config class, or a list, tuple or mapping of such.

    A whole number is a fine float and 1e3 a fine int, but "3", true and null are neither.

    Raises:
        ConfigError: it has another type, or the limits refuse it.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        if isinstance(value, typing.cast(type, kind)):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name}: expected an object with fields, got {value!r}")
        check_names(kind, value, name)
        try:
            return typing.cast(Callable[..., Any], kind)(**value)
        except ConfigError as error:
            raise ConfigError(f"{name}.{error}") from None
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name}: expected a list, got {value!r}")
        return origin(check(f"{name}[{index}]", each, arguments[0], limits) for index, each in enumerate(value))
    if origin is dict and kind != dict[str, Any]:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ConfigError(f"{name}: expected an object with strings as keys, got {value!r}")
        return {key: check(f"{name}[{key!r}]", each, arguments[1]) for key, each in value.items()}
    converted = _convert(value, kind)
    if converted is None or not limits.accept(converted):
        expected = limits.describe(kind)
        if isinstance(value, int) and abs(value) > _MAX_INTEGER:
            expected += " with at most 63 bits"
        raise ConfigError(f"{name}: expected {expected}, got {value!r}")
    return converted


def whole_number(name: str, value: Any, minimum: int = 0, maximum: int = _MAX_INTEGER) -> int:
    """Return a whole number that a program gives: of Python, NumPy or torch, whatever `operator.index` takes.

    Raises:
        ConfigError: it is none, a bool, or out of bounds; begins with `name`.
    """
    number = -1
    with contextlib.suppress(TypeError, ValueError, RuntimeError):  # torch's tensors have errors of their own
        is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
        number = minimum - 1 if is_bool else operator.index(value)
    if not minimum <= number <= maximum:
        bounds = Limits(minimum, maximum if maximum < _MAX_INTEGER else None)
        raise ConfigError(f"{name}: expected {bounds.describe(int)}, got {value!r}")
    return number


def finite_number(name: str, value: Any, **limits: Any) -> float:
    """Return a number that a program gives, of Python, NumPy or torch, within `limits`, which are fields of `Limits`.

    Raises:
        ConfigError: it is none, a bool, NaN, infinite or out of bounds; begins with `name`.
    """
    bounds, number = Limits(**limits), math.nan
    if not isinstance(value, (bool, str)) and not getattr(value, "shape", ()):
        with contextlib.suppress(TypeError, ValueError, RuntimeError, OverflowError):
            number = float(value)
    if not math.isfinite(number) or not bounds.accept(number):
        raise ConfigError(f"{name}: expected {bounds.describe(float)}, got {value!r}")
    return number


# Names of other frameworks, by their letters alone, with the field that is meant.
SYNONYMS = {
    **dict.fromkeys(("lr", "maxlr", "baselr", "peaklr", "learnrate", "steplr"), "learning_rate"),
    **dict.fromkeys(
        ("batchsize", "bs", "trainbatchsize", "totalbatchsize", "globalbatch", "perdevicetrainbatchsize"),
        "global_batch_size",
    ),
    **dict.fromkeys(("evalbatchsize", "valbatchsize", "testbatchsize"), "evaluation_batch_size"),
    **dict.fromkeys(("numepochs", "numtrainepochs", "maxepochs", "nepochs", "nbepochs"), "epochs"),
    **dict.fromkeys(("wd", "l2", "weightreg"), "weight_decay"),
    **dict.fromkeys(("earlystopping", "earlystoppingpatience", "earlystop"), "patience"),
    **dict.fromkeys(("warmup", "numwarmupsteps", "lrwarmupsteps"), "warmup_steps"),
    **dict.fromkeys(("lrscheduler", "lrschedulertype", "scheduler", "lrschedule"), "schedule"),
    **dict.fromkeys(("optim", "opt"), "optimizer"),
    **dict.fromkeys(
        ("gradclip", "clipgradnorm", "maxgradnorm", "gradientclipval", "gradclipnorm"), "gradient_clip_norm"
    ),
    **dict.fromkeys(("accumulategradbatches", "gradaccum", "gradientaccumulationsteps"), "gradient_accumulation"),
    **dict.fromkeys(("numworkers", "nworkers", "dataloadernumworkers", "workers"), "data_workers"),
    **dict.fromkeys(("amp", "fp16", "bf16", "mixedprecision", "dtype"), "precision"),
    **dict.fromkeys(("randomseed", "manualseed"), "seed"),
    **dict.fromkeys(("savesteps", "saveinterval", "checkpointevery"), "checkpoint_interval"),
    **dict.fromkeys(("savetotallimit", "savetopk"), "checkpoints_to_keep"),
    **dict.fromkeys(("logsteps", "loggingsteps", "logeverynsteps", "logevery"), "log_interval"),
    **dict.fromkeys(("metric", "monitormetric", "metricforbestmodel"), "monitor"),
    **dict.fromkeys(("gradientcheckpointing", "checkpointactivations"), "activation_checkpointing"),
    **dict.fromkeys(("torchcompile", "jit"), "compile"),
    **dict.fromkeys(("strategy", "fsdp", "ddp"), "parallel"),
    **dict.fromkeys(("freeze", "freezelayers"), "frozen_layers"),
    **dict.fromkeys(("maxtime", "timelimit"), "max_hours"),
}


def suggest(name: object, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the nearest of the names that are known, if one is near."""
    known, letters = list(known), re.sub("[^a-z0-9]", "", str(name).lower())
    if letters in ("ema", "useema", "emadecay") and "learning_rate" in known:
        return " (there is no moving average of the weights yet)"
    if (meant := SYNONYMS.get(letters)) in known:
        return f" (did you mean {meant}?)"
    near = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def check_names(config_class: Any, values: Mapping[str, Any], name: str) -> None:
    """Compare the keys of `values` with the fields of `config_class`, whose `replaced` has the place of former fields.

    Raises:
        ConfigError: a key is no field, or a field without a default is missing; begins with `name`.
    """
    known = {each.name: each for each in dataclasses.fields(config_class)}
    for key in values:
        if key in getattr(config_class, "replaced", ()):
            raise ConfigError(f"{name}.{key}: expected in the form {config_class.replaced[key]}")
        if key not in known:
            raise ConfigError(
                f"{name}: expected one of the fields {', '.join(known)}, got {key!r}{suggest(key, known)}"
            )
    for key, each in known.items():
        if key not in values and each.default is each.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{name}: expected the field {key}, got none")


def parse_duration(name: str, text: str) -> float:
    """Return the seconds of a number with s, m, h or d. Raises ConfigError, which names `name`, for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ConfigError(f"{name}: expected a number with s, m, h or d, such as 90m, got {text!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def _convert(value: object, kind: Any) -> object:
    """Return `value` as `kind`, or None where its type does not allow that."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, int) and abs(value) > _MAX_INTEGER:
        return None
    if kind is float and is_number:
        return float(typing.cast(float, value))
    if kind is int and is_number and float(typing.cast(float, value)).is_integer():
        return int(typing.cast(float, value))
    if kind in (bool, str) and isinstance(value, kind):
        return value
    if kind == dict[str, Any] and isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        with contextlib.suppress(TypeError, ValueError):  # it holds something that JSON does not know
            return json.loads(json.dumps(dict(value), allow_nan=False))  # a copy, so that no other code changes it
    return None


def describe_syntax_error(error: BaseException | None) -> str:
    """Return line, column and reason of the JSON or YAML that led to `error`; "" for an error of another kind."""
    while error is not None:
        if isinstance(error, json.JSONDecodeError):
            return f"line {error.lineno}, column {error.colno}: {error.msg}"
        if mark := getattr(error, "problem_mark", None):  # of yaml
            return f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}"
        error = error.__cause__ or error.__context__
    return ""


def read_object(flag: str, text: str) -> dict[str, Any]:
    """Return the fields that the value of a flag has: JSON, or the name of a YAML or JSON file.

    Raises:
        ConfigError: it is neither, or no object.
    """
    import yaml

    try:
        values = (
            json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(Path(text).read_text("utf-8-sig"))
        )
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = describe_syntax_error(error) or " ".join(str(error).split())
        raise ConfigError(f"{flag}: expected JSON or the name of a YAML file, got {text!r}: {reason}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{flag}: expected an object with fields, got {text!r}")
    return values
