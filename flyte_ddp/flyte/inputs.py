"""Users' input as Flyte types: checked before anything starts, and refused in one line."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import typing
from collections.abc import Callable, Mapping
from typing import Any

from flytekit.core.type_engine import DataclassTransformer, TypeEngine, UnionTransformer
from flytekit.models.types import LiteralType, SimpleType
from flytekit.types.directory import FlyteDirectory
from flytekit.types.file import FlyteFile
from mashumaro.jsonschema import build_json_schema

from flyte_ddp.cluster.config import ClusterConfig, cluster_config
from flyte_ddp.config import TrainingConfig, resolve
from flyte_ddp.config.fields import check_names, read_object
from flyte_ddp.errors import ConfigError
from flyte_ddp.flyte.failures import InputError, flyte_errors
from flyte_ddp.studies.search import expand_grid

T = typing.TypeVar("T")


def _parse(text: str, make: Callable[[dict[str, Any]], T]) -> T:
    """Parse the JSON object of an option of `pyflyte run`, or the contents of its JSON or YAML
    file.
    """
    try:
        return make(json.loads(text))
    except ConfigError as error:
        raise InputError(str(error)) from None


def _from_json(cls: type, text: str) -> Any:
    return _parse(text, lambda values: make_overrides(_leave_out_nulls(values)))


def make_overrides(values: Mapping[str, Any]) -> Any:
    """Return the `TrainingOverrides` with these fields; an object becomes the class that
    `TrainingConfig` has for it.

    Raises:
        ConfigError: an unknown field, or a value of the wrong type or range.
    """
    config = resolve({}, values)
    typed = {
        name: getattr(config, name)
        for name in values
        if dataclasses.is_dataclass(getattr(config, name))
    }
    return TrainingOverrides(**{**values, **typed})


def _pre_deserialize(cls: type, values: dict[Any, Any]) -> dict[Any, Any]:
    """Refuse unknown fields that come some other way, such as from Flyte's console."""
    check_names(TrainingConfig, values, "config")
    return values


def _leave_out_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the fields that the user did not give. mashumaro's own option for this breaks its
    JSON schema.
    """
    return {name: value for name, value in values.items() if value is not None}


if typing.TYPE_CHECKING:
    TrainingOverrides: typing.TypeAlias = Any
else:
    _hints = typing.get_type_hints(TrainingConfig)
    _members = {
        "__doc__": (
            "The fields of `flyte_ddp.config.TrainingConfig` that a user gives; None is "
            "the recipe's default."
        ),
        "__module__": __name__,
        "from_json": classmethod(_from_json),
        "__pre_deserialize__": classmethod(_pre_deserialize),
        "__post_serialize__": lambda self, values: _leave_out_nulls(values),
    }
    TrainingOverrides = dataclasses.make_dataclass(
        "TrainingOverrides",
        [(name, kind | None, None) for name, kind in _hints.items()],
        frozen=True,
        namespace=_members,
    )


@dataclasses.dataclass(frozen=True)
class ClusterInput(ClusterConfig):
    """`ClusterConfig` as a Flyte input."""

    @classmethod
    def from_json(cls, text: str) -> ClusterInput:
        return _parse(text, lambda values: cls(**cls.__pre_deserialize__(values)))

    @classmethod
    def __pre_deserialize__(cls, values: dict[Any, Any]) -> dict[Any, Any]:
        """Refuse unknown fields, for example from Flyte's console."""
        cluster_config(values)
        return values


class ConfigTransformer(DataclassTransformer):  # type: ignore[misc]
    """Carry a config as JSON, with the schema of its fields for the form in Flyte's console.

    flytekit's own transformer also describes each field as a Flyte type, and warns about fields
    without such a type. The console writes 3.0 for 3. Both config classes convert such numbers
    themselves, because flytekit's repair fails at a list in a recipe's options.
    """

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._t = kind  # The base class serves any dataclass, and its constructor takes no type.
        self._schema = build_json_schema(kind).to_dict()

    def get_literal_type(self, t: type) -> LiteralType:
        return LiteralType(simple=SimpleType.STRUCT, metadata=self._schema)

    def _fix_dataclass_int(self, dc_type: type, dc: Any) -> Any:
        return dc


class OptionalTransformer(UnionTransformer):  # type: ignore[misc]
    """Name the mistake in an optional input.

    flytekit tries all variants of a union and drops their errors. A value that no variant accepts
    arrives here as the user's text. flytekit itself would only print "Cannot convert from ... to
    ...".

    Args:
        parse: function that raises an error with the mistake in a value of the types `parsed`.
    """

    def __init__(self, kind: Any, parse: Callable[[Any], Any], parsed: Any = str) -> None:
        super().__init__()
        self._t = kind
        self._parse = parse
        self._parsed = parsed

    def assert_type(self, t: type, v: Any) -> None:
        if isinstance(v, self._parsed):
            self._parse(v)
        else:
            super().assert_type(t, v)


class ObjectTransformer(OptionalTransformer):
    """Also accept a file that flytekit cannot read, such as JSON with a byte order mark, and name
    the mistake in any other text.
    """

    def __init__(self, kind: Any) -> None:
        super().__init__(typing.Optional[kind], functools.partial(read_text, kind))  # noqa: UP045

    async def async_to_literal(
        self, ctx: Any, python_val: Any, python_type: Any, expected: Any
    ) -> Any:
        if isinstance(python_val, str):
            python_val = self._parse(python_val)
        return await super().async_to_literal(ctx, python_val, python_type, expected)


def read_text(kind: Any, text: str) -> Any:
    field = "cluster"
    if kind is TrainingOverrides:
        field = "config"
    with flyte_errors():
        values = read_object(field, text)
    return kind.from_json(json.dumps(values, default=str))


def _refuse_source(path: str) -> None:
    if "://" not in path and not os.path.exists(path):
        raise InputError(
            f"data: expected a directory, a file or a URL, got {path!r}, which does not exist"
        )


def _refuse_grid(grid: Any) -> None:
    with flyte_errors():
        expand_grid(grid)


# The inputs of the workflows. Their default is None: any other default of a JSON object crashes
# flytekit's commands for registered entities, such as `pyflyte run remote-launchplan`. In the form
# `X | None`, flytekit would not find the transformers registered below.
OptionalOverrides = typing.Optional[TrainingOverrides]  # noqa: UP045
OptionalCluster = typing.Optional[ClusterInput]  # noqa: UP045
OptionalSource = typing.Union[FlyteDirectory, FlyteFile, None]  # noqa: UP007 - a local path (uploaded) or any URL
# A sweep requires a grid, although the type allows None.
Grid = typing.Union[dict, list[dict], None]  # type: ignore[type-arg]  # noqa: UP007

# A task passes its resolved config to the tasks that follow.
TypeEngine.register(ConfigTransformer(TrainingConfig))
for _kind in (TrainingOverrides, ClusterInput):
    TypeEngine.register(ConfigTransformer(_kind))
    TypeEngine.register(ObjectTransformer(_kind))
TypeEngine.register(OptionalTransformer(OptionalSource, _refuse_source))
# Without this transformer, flytekit's error for a bad list would not name the mistake.
TypeEngine.register(OptionalTransformer(Grid, _refuse_grid, (str, list)))


def given(overrides: Any) -> Mapping[str, Any]:
    """Return the fields of `overrides` that the user gave."""
    if overrides is None:
        return {}
    return _leave_out_nulls(dataclasses.asdict(overrides))


def location(source: OptionalSource) -> str:
    """Return the path or URL that the user gave; "" for none. Nothing is downloaded here, because
    the recipe decides what to download.
    """
    if source is None:
        return ""
    return str(source.remote_source or source.path)
