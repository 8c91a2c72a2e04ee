"""What users type, as Flyte inputs: checked before anything starts, and refused in one line."""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any

import click
from flytekit.core.type_engine import DataclassTransformer, TypeEngine
from flytekit.models.types import LiteralType, SimpleType
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from mashumaro.config import BaseConfig

from flyte_ddp.cluster.config import ClusterConfig, known_fields
from flyte_ddp.config import TrainingConfig, reject_unknown_fields, resolve
from flyte_ddp.errors import ConfigError


class InputError(click.UsageError, ValueError):
    """A user's mistake. `pyflyte run` prints its message alone, where another exception comes with a traceback."""


def _json_object(field: str, text: str) -> dict[str, Any]:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise InputError(f"{field}: {values!r} is of the wrong type; accepted is a JSON object or a file with one")
    return values


def _from_json(cls: type, text: str) -> Any:
    """What `pyflyte run --config` calls with the JSON object, or with the contents of the JSON or YAML file."""
    values = _json_object("config", text)
    values = {name: value for name, value in values.items() if value is not None}  # null: not given
    try:
        resolve({}, values)
    except ConfigError as error:
        raise InputError(str(error)) from None
    return cls(**values)


def _pre_deserialize(cls: type, values: dict[Any, Any]) -> dict[Any, Any]:
    """Refuse unknown fields that come some other way, such as from Flyte's console."""
    reject_unknown_fields(values)
    return values


TrainingOverrides = dataclasses.make_dataclass(
    "TrainingOverrides",
    [(name, kind | None, None) for name, kind in typing.get_type_hints(TrainingConfig).items()],
    frozen=True,
    namespace={
        "__doc__": "The fields of `flyte_ddp.config.TrainingConfig` that a user gives; None is the recipe's default.",
        "__module__": __name__,
        "Config": type("Config", (BaseConfig,), {"omit_none": True}),
        "from_json": classmethod(_from_json),
        "__pre_deserialize__": classmethod(_pre_deserialize),
    },
)


@dataclasses.dataclass(frozen=True)
class ClusterInput(ClusterConfig):
    """`ClusterConfig` as a Flyte input."""

    @classmethod
    def from_json(cls, text: str) -> ClusterInput:
        """What `pyflyte run --cluster` calls."""
        values = _json_object("cluster", text)
        try:
            return cls(**known_fields(values))
        except ConfigError as error:
            raise InputError(str(error)) from None

    @classmethod
    def __pre_deserialize__(cls, values: dict[Any, Any]) -> dict[Any, Any]:
        """Refuse unknown fields that come some other way, such as from Flyte's console."""
        return known_fields(values)


class _PlainTransformer(DataclassTransformer):
    """Keeps the JSON schema of all the fields out of `pyflyte run --help`, where it fills the page.

    A literal from Flyte's console has floats for all numbers. Both classes take 3.0 for 3 themselves; flytekit's own
    repair fails at a list of any kind, which a recipe's options may hold.
    """

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._t = kind  # the base class serves any dataclass, and its constructor takes no type

    def get_literal_type(self, t: type) -> LiteralType:
        return LiteralType(simple=SimpleType.STRUCT)

    def _fix_dataclass_int(self, dc_type: type, dc: Any) -> Any:
        return dc


for _kind in (TrainingOverrides, ClusterInput):
    TypeEngine.register(_PlainTransformer(_kind))

Source = FlyteDirectory | FlyteFile
"""Data that the user gives: a local directory or file (uploaded for a remote run) or any URL."""


def given(overrides: Any) -> Mapping[str, Any]:
    """The fields of `overrides` that the user gave."""
    return {name: value for name, value in dataclasses.asdict(overrides).items() if value is not None}


def location(source: Source | None) -> str:
    """The path or URL that the user gave; "" for none. Nothing is downloaded: that is the recipe's choice."""
    if source is None:
        return ""
    return str(source.remote_source or source.path)
