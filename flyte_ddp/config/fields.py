"""Validation of frozen config classes: type, bounds and unit of a field stand beside it, and one
function checks them.

The checks are written by hand. Importing pydantic and defining one class takes 0.15 to 0.3 s, in
every agent and rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import operator
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyte_ddp.errors import ConfigError

# keys of a field's metadata
LIMITS, HELP, LISTED = "limits", "help", "listed"
_KINDS = {bool: "true or false", str: "a string", int: "a whole number", float: "a finite number"}
_LARGEST = {int: (1 << 63) - 1, float: sys.float_info.max}
_BOUNDS = {  # fields of Limits
    "minimum": ("of at least", operator.ge),
    "maximum": ("of at most", operator.le),
    "above": ("above", operator.gt),
    "below": ("below", operator.lt),
}


@dataclass(frozen=True)
class Limits:
    """The values that a field accepts, beyond its type."""

    minimum: float | None = None  # the smallest accepted number
    maximum: float | None = None  # the largest accepted number
    above: float | None = None  # every accepted number is larger than this
    below: float | None = None  # every accepted number is smaller than this
    choices: Collection[str] = ()
    pattern: str = ""  # regular expression that a string matches as a whole
    is_valid: Callable[[str], bool] | None = None  # whether a string is accepted
    example: str = ""  # how an error describes what matches `pattern` or `is_valid`
    unit: str = ""  # unit of the number, such as "seconds"

    def accept(self, value: Any) -> bool:
        """Check `value`, which has the field's type already."""
        if isinstance(value, str):
            is_match = not self.pattern or re.fullmatch(self.pattern, value)
            is_chosen = not self.choices or value in self.choices
            return bool(is_match and is_chosen and (not self.is_valid or self.is_valid(value)))
        return all(_BOUNDS[name][1](value, bound) for name, bound in self._bounds)

    def describe(self, kind: Any) -> str:
        """Return what an error says is expected of a field of type `kind`."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        bounds = " and ".join(f"{_BOUNDS[name][0]} {bound:.12g}" for name, bound in self._bounds)
        return self.example or " ".join(
            filter(None, [_KINDS[kind], bounds, self.unit and f"({self.unit})"])
        )

    @property
    def _bounds(self) -> list[tuple[str, float]]:
        bounds = [(name, getattr(self, name)) for name in _BOUNDS]
        return [(name, bound) for name, bound in bounds if bound is not None]


ANY = Limits()


def field(
    default: Any = dataclasses.MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    help: str = "",
    listed: str = "",
    **limits: Any,
) -> Any:
    """Declare a dataclass field with its default, its meaning and its `limits`, which are fields of
    `Limits`.

    The limits of a list or an object apply to its items.

    Args:
        listed: the list in the table `allowed` of settings.toml that says what a launch may give;
            "" for any value.
    """
    start: dict[str, Any] = {"default": default}
    if factory:
        start = {"default_factory": factory}
    metadata = {LIMITS: Limits(**limits), HELP: help, LISTED: listed}
    return dataclasses.field(metadata=metadata, **start)


def describe_fields(config_class: Any, prefix: str = "") -> Iterator[str]:
    """Yield a line for each field: its name, default, unit and meaning. The lines of a nested class
    follow the line of its field.
    """
    kinds = typing.get_type_hints(config_class)
    for each in dataclasses.fields(config_class):
        kind, limits = kinds[each.name], each.metadata.get(LIMITS, ANY)
        default = each.default
        if callable(each.default_factory):
            default = each.default_factory()
        value = ""
        if not dataclasses.is_dataclass(kind):
            value = f" = {json.dumps(default)}" + (f" {limits.unit}").rstrip()
        choices = ""
        if limits.choices:
            choices = f"one of {', '.join(limits.choices)}"
        meaning = "; ".join(filter(None, [choices, each.metadata.get(HELP, "")]))
        yield f"{prefix + each.name + value:<50} {meaning}".rstrip()
        if dataclasses.is_dataclass(kind):
            yield from describe_fields(kind, f"{prefix}{each.name}.")


def validate(config: Any, prefix: str = "") -> None:
    """Check every field of a frozen dataclass, and give each value its declared type. For
    `__post_init__`.

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


class Checked:
    """The base of frozen dataclasses. `validate` checks their fields."""

    def __post_init__(self) -> None:
        validate(self)


def check(name: str, value: Any, kind: Any, limits: Limits = ANY) -> Any:
    """Return `value` as `kind`: a number, bool, string, JSON value, config class, a list, tuple or
    mapping of such, or such or None.

    A float may be given as a whole number, and an int as 1e3. Both may be scalars of NumPy or
    torch. "3", true and null are no numbers.

    Raises:
        ConfigError: `value` has another type, or the limits refuse it.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return _copy_json(name, value)
    if type(None) in arguments:
        if value is None:
            return None
        return check(name, value, arguments[0], limits)
    if dataclasses.is_dataclass(kind):
        return _make_object(name, value, kind)
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{name}: expected a list, got {value!r}")
        return origin(
            check(f"{name}[{index}]", each, arguments[0], limits)
            for index, each in enumerate(value)
        )
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ConfigError(f"{name}: expected an object with strings as keys, got {value!r}")
        return {
            key: check(f"{name}[{key!r}]", each, arguments[1], limits)
            for key, each in value.items()
        }
    return _check_scalar(name, value, kind, limits)


def _copy_json(name: str, value: Any) -> Any:
    """Return a copy of a JSON value, so that no other code changes it."""
    with contextlib.suppress(TypeError, ValueError):  # JSON does not know every type
        return json.loads(json.dumps(value, allow_nan=False))
    raise ConfigError(f"{name}: expected a JSON value, got {value!r}")


def _make_object(name: str, value: Any, kind: Any) -> Any:
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name}: expected an object with fields, got {value!r}")
    check_names(kind, value, name)
    try:
        return kind(**value)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from None


def _check_scalar(name: str, value: Any, kind: Any, limits: Limits) -> Any:
    scalar = value
    if hasattr(value, "item") and not value.shape:
        scalar = value.item()
    is_right = isinstance(scalar, kind)
    if kind in _LARGEST:
        is_number = isinstance(scalar, (int, float)) and not isinstance(scalar, bool)
        is_right = is_number and abs(scalar) <= _LARGEST[kind]
        if is_right and kind is int:
            is_right = scalar == int(scalar)
    if not is_right or not limits.accept(scalar):
        raise ConfigError(f"{name}: expected {limits.describe(kind)}, got {value!r}")
    return kind(scalar)


def whole_number(name: str, value: Any, minimum: int = 0, maximum: int | None = None) -> int:
    """Return a whole number that a program gives, as `check` does. 5.0 is refused, as Python's own
    functions refuse it.
    """
    limits = Limits(minimum, maximum)
    try:
        operator.index(value)
    except TypeError:
        raise ConfigError(f"{name}: expected {limits.describe(int)}, got {value!r}") from None
    return int(check(name, value, int, limits))


def finite_number(name: str, value: Any, **limits: Any) -> float:
    """Return a number that a program gives, as `check` does. `limits` are fields of `Limits`."""
    return float(check(name, value, float, Limits(**limits)))


def plain_number(name: str, value: Any) -> float:
    """Return a number that a program measures. It may be a NumPy scalar or a tensor, and NaN or
    infinite.
    """
    is_text = isinstance(value, str)
    try:
        if is_text or len(getattr(value, "shape", ())):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ConfigError(f"{name}: expected a number, got {value!r}") from None


# Each field with its names in other frameworks, in lower-case letters and digits alone.
_SYNONYMS = {
    "learning_rate": "lr maxlr baselr peaklr learnrate steplr",
    "global_batch_size": "batchsize bs trainbatchsize totalbatchsize globalbatch "
    "perdevicetrainbatchsize",
    "evaluation_batch_size": "evalbatchsize valbatchsize testbatchsize",
    "epochs": "numepochs numtrainepochs maxepochs nepochs nbepochs",
    "weight_decay": "wd l2 weightreg",
    "patience": "earlystopping earlystoppingpatience earlystop",
    "warmup_steps": "warmup numwarmupsteps lrwarmupsteps",
    "schedule": "lrscheduler lrschedulertype scheduler lrschedule",
    "optimizer": "optim opt",
    "gradient_clip_norm": "gradclip clipgradnorm maxgradnorm gradientclipval gradclipnorm",
    "gradient_accumulation": "accumulategradbatches gradaccum gradientaccumulationsteps",
    "data_workers": "numworkers nworkers dataloadernumworkers workers",
    "precision": "amp fp16 bf16 mixedprecision dtype",
    "seed": "randomseed manualseed",
    "checkpoint_interval": "savesteps saveinterval checkpointevery",
    "checkpoint_minutes": "saveminutes checkpointtime checkpointtimeinterval traintimeinterval",
    "checkpoints_to_keep": "savetotallimit savetopk",
    "log_interval": "logsteps loggingsteps logeverynsteps logevery",
    "monitor": "metric monitormetric metricforbestmodel",
    "activation_checkpointing": "gradientcheckpointing checkpointactivations",
    "compile": "torchcompile jit",
    "ema_decay": "ema useema modelema",
    "parallel": "strategy fsdp ddp",
    "frozen_layers": "freeze freezelayers",
    "max_hours": "maxtime timelimit",
    "max_cost": "budget maxbudget",
}
SYNONYMS = {name: field for field, names in _SYNONYMS.items() for name in names.split()}


def suggest(name: object, known: Iterable[str]) -> str:
    """Return the part of an error that suggests the known name nearest to an unknown one; "" if no
    known name is near.
    """
    known, letters = list(known), re.sub("[^a-z0-9]", "", str(name).lower())
    meant = SYNONYMS.get(letters)
    if meant in known:
        return f" (did you mean {meant}?)"
    near = difflib.get_close_matches(str(name), known, n=1)
    if near:
        return f" (did you mean {near[0]}?)"
    return ""


def expect_known(kind: str, known: Iterable[str], got: object) -> str:
    """Return what an error says of an unknown name: the known name that the user may have meant, or
    all known names if none is near.
    """
    known = list(known)
    hint = suggest(got, known)
    if hint:
        return f"expected a known {kind}{hint}, got {got!r}"
    return f"expected one of the {kind}s {', '.join(known)}, got {got!r}"


def check_object(name: str, values: object) -> None:
    """Raise ConfigError, which begins with `name`, if `values` is no mapping."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{name}: expected fields with their values, got {values!r}")


def check_names(config_class: Any, values: Mapping[str, Any], name: str) -> None:
    """Compare the keys of `values` with the fields of `config_class`.

    Raises:
        ConfigError: `values` is no mapping, a key is no field, or a field without a default is
            missing. The message begins with `name`.
    """
    check_object(name, values)
    known = {each.name: each for each in dataclasses.fields(config_class)}
    for key in values:
        if key not in known:
            raise ConfigError(f"{name}: {expect_known('field', known, key)}")
    for key, each in known.items():
        if key not in values and each.default is each.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{name}: expected the field {key}, got none")


def parse_duration(name: str, text: str) -> float:
    """Return the seconds of a number with s, m, h or d. Raises ConfigError, with `name`, for any
    other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise ConfigError(f"{name}: expected a number with s, m, h or d, such as 90m, got {text!r}")
    return float(match[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


# bounds and names of cron's five fields
_CRON: tuple[tuple[int, int, str], ...] = (
    (0, 59, ""),
    (0, 23, ""),
    (1, 31, ""),
    (1, 12, "JAN FEB MAR APR MAY JUN JUL AUG SEP OCT NOV DEC"),
    (0, 7, "SUN MON TUE WED THU FRI SAT"),
)


# number of days of each month in a leap year
_MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def is_cron(text: str) -> bool:
    """Return whether `text` is empty, or a schedule in cron's five fields that some day matches."""
    if not text:
        return True
    parts = text.split(" ")
    if len(parts) != len(_CRON):
        return False
    fields = [_list_cron_values(*each) for each in zip(parts, _CRON, strict=True)]
    if not all(fields):
        return False
    _, _, days, months, _ = fields
    has_weekday = parts[-1] != "*"  # a day of the month or of the week is then enough
    return has_weekday or any(min(days) <= _MONTH_DAYS[month - 1] for month in months)


def _list_cron_values(text: str, bounds: tuple[int, int, str]) -> set[int]:
    """Return the numbers that one field of a schedule allows; none if the field is invalid."""
    low, high, names = bounds
    numbers = {each: str(number) for number, each in enumerate(names.split(), start=low)}
    found: set[int] = set()
    for part in text.upper().split(","):
        values, slash, step = part.partition("/")
        if slash and not re.fullmatch("0*[1-9][0-9]*", step, re.ASCII):
            return set()
        if values == "*":
            values = f"{low}-{high}"
        ends = [numbers.get(each, each) for each in values.split("-")]
        if len(ends) > 2 or not all(re.fullmatch("[0-9]{1,2}", end, re.ASCII) for end in ends):
            return set()
        first, last = int(ends[0]), int(ends[-1])
        if not low <= first <= last <= high:
            return set()
        found.update(range(first, last + 1, int(step or 1)))
    return found


def read_object(flag: str, text: str) -> dict[str, Any]:
    """Return the fields in the value of a flag: JSON, or the name of a YAML or JSON file.

    Raises:
        ConfigError: the value is neither, or contains no object.
    """
    import yaml

    try:
        if text.lstrip().startswith("{"):
            values = json.loads(text)
        else:
            values = yaml.safe_load(Path(text).read_text("utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())  # the message names line and column
        raise ConfigError(
            f"{flag}: expected a JSON object or the name of a JSON or YAML file, got {text!r}: "
            f"{reason}"
        ) from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"{flag}: expected a JSON object or the name of a JSON or YAML file "
            f"with one, got {text!r}"
        )
    return values
