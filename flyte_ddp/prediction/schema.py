"""The columns of predictions. All files have one schema, which is fixed before the first file.

A column has the type that the recipe declares (`prediction_schema`), or else the type of its values
in the first batch. Undeclared numbers are float64, so that fractions may follow whole numbers.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from flyte_ddp.errors import ConfigError, first_line
from flyte_ddp.recipes import Recipe, locate

KEY = "key"  # name of the column that identifies a sample
REMEDY = 'declare its type, such as prediction_schema = {{"{}": "string"}} in the recipe'
TYPES = "int64, float32, bool, string, binary or list<float64>"


def to_text(schema: Any) -> str:
    """Return a schema as text, for `from_text`."""
    return base64.b64encode(schema.serialize()).decode()


def from_text(text: str) -> Any:
    """Return the schema of `to_text`."""
    import pyarrow

    return pyarrow.ipc.read_schema(pyarrow.py_buffer(base64.b64decode(text)))


def find_schema(recipe: Recipe, keys: Sequence[Any], columns: Mapping[str, Any]) -> Any:
    """Return the schema of the predictions, inferred from a batch.

    Args:
        keys: the keys of the samples.
        columns: the return value of `list_columns`.

    Raises:
        ConfigError: the values of a column show no type, or a declared column is missing.
    """
    import pyarrow

    declared = _list_declared(recipe)
    place = locate(recipe, "prediction_columns")
    missing = [name for name in declared if name not in columns]
    if missing:
        raise ConfigError(
            f"{place}: expected the columns of prediction_schema, got none called {missing[0]!r}"
        )
    types = {KEY: _guess(place, KEY, keys).type}
    for name, values in columns.items():
        types[name] = declared.get(name) or _widen(_guess(place, name, values).type)
        if _has_null(types[name]):
            raise ConfigError(
                f"{place}: {name}: expected a value in the first batch by which its type is known, "
                f"got None or empty lists alone: {REMEDY.format(name)}"
            )
    return pyarrow.schema(types)


def make_table(recipe: Recipe, keys: Sequence[Any], columns: Mapping[str, Any], schema: Any) -> Any:
    """Return the predictions of a batch as a table with this schema.

    Raises:
        ConfigError: a column does not fit the schema; the message names it.
    """
    import pyarrow

    place = locate(recipe, "prediction_columns")
    expected = [name for name in schema.names if name != KEY]
    different = sorted(set(expected) ^ set(columns))
    if different:
        what = "none called"
        if different[0] in columns:
            what = "also"
        raise ConfigError(
            f"{place}: expected the columns {', '.join(expected)} in each batch, got {what} "
            f"{different[0]!r}"
        )
    arrays = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        values = keys
        if name != KEY:
            values = columns[name]
        found = _guess(place, name, values)
        try:
            if not _fits(found.type, kind):
                raise pyarrow.ArrowInvalid(f"values of {found.type}")
            arrays.append(found.cast(kind))
        except pyarrow.ArrowException as error:
            raise ConfigError(
                f"{place}: {name}: expected values of {kind}, as declared or as in the first "
                f"batch, got {first_line(error)}: {REMEDY.format(name)}"
            ) from None
    return pyarrow.table(arrays, schema=schema)


def list_columns(recipe: Recipe, outputs: Any, num_samples: int) -> dict[str, Any]:
    """Return the recipe's columns of a batch, as lists or arrays of plain values.

    Raises:
        ConfigError: the recipe returns no columns, or a column lacks a value for a sample.
    """
    place = locate(recipe, "prediction_columns")
    found: Any = recipe.prediction_columns(outputs)
    if not isinstance(found, Mapping):
        raise ConfigError(f"{place}: expected columns by name, got a {type(found).__name__}")
    columns = {}
    for name, values in found.items():
        try:
            plain = to_plain(values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"{place}: {name}: {error}") from error
        is_column = isinstance(plain, (list, numpy.ndarray))
        got = f"with a {type(values).__name__} alone"
        if is_column:
            got = f"with {len(plain)}"
        if not isinstance(name, str) or name == KEY or not is_column or len(plain) != num_samples:
            raise ConfigError(
                f"{place}: expected columns with a value for each of {num_samples} samples, and "
                f"none called {KEY!r}, got {name!r} {got}"
            )
        columns[name] = plain
    return columns


def to_plain(value: Any) -> Any:
    """Return a value without tensors. It is an array only if it has one dimension."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, Mapping):
        return {str(key): to_plain(each) for key, each in value.items()}
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        if value.layout is not torch.strided:
            value = value.to_dense()
        if value.is_floating_point():  # NumPy has no bf16
            value = value.double()
        value = value.resolve_conj().numpy()
    if isinstance(value, numpy.ndarray):
        if value.dtype.kind == "c":
            raise TypeError("expected real numbers, got complex ones")
        if value.dtype.kind == "f":
            value = value.astype(numpy.float64)
        if value.ndim == 1 and value.dtype.kind in "biufSMm":
            return value
        value = value.tolist()
    elif hasattr(value, "tolist") and not isinstance(value, numpy.generic):  # pandas, for example
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [to_plain(each) for each in value]
    return value


def _guess(place: str, name: str, values: Sequence[Any]) -> Any:
    """Return values as an array of the type that they have."""
    import pyarrow

    try:
        return pyarrow.array(values)
    except (TypeError, ValueError, OverflowError) as error:  # base classes of Arrow's errors
        raise ConfigError(
            f"{place}: {name}: expected numbers, text, or lists of one kind, got "
            f"{first_line(error)}"
        ) from None


def _widen(kind: Any) -> Any:
    """Return the type of a column from the type of its values in the first batch."""
    import pyarrow

    types = pyarrow.types
    if types.is_integer(kind) or types.is_floating(kind):
        return pyarrow.float64()
    if types.is_list(kind):
        return pyarrow.list_(_widen(kind.value_type))
    if types.is_struct(kind):
        return pyarrow.struct([(each.name, _widen(each.type)) for each in kind])
    return kind


def _has_null(kind: Any) -> bool:
    import pyarrow

    parts = [kind.field(index).type for index in range(kind.num_fields)]
    return bool(pyarrow.types.is_null(kind) or any(map(_has_null, parts)))


def _fits(found: Any, kind: Any) -> bool:
    """Return whether a cast from one type to the other keeps the meaning of all values. The cast
    itself refuses a number that `kind` cannot represent.
    """
    import pyarrow

    types = pyarrow.types
    if types.is_null(found) or found == kind:
        return True
    if types.is_list(found):
        lists = (types.is_list, types.is_large_list, types.is_fixed_size_list)
        return _is_any(lists, kind) and _fits(found.value_type, kind.value_type)
    if types.is_struct(found) and types.is_struct(kind):
        known = {each.name: each.type for each in kind}
        return all(each.name in known and _fits(each.type, known[each.name]) for each in found)
    texts = (types.is_string, types.is_large_string)
    if types.is_string(found):
        return _is_any(texts, kind)
    if types.is_binary(found):
        return _is_any((*texts, types.is_large_binary, types.is_fixed_size_binary), kind)
    numbers = (types.is_integer, types.is_floating)
    if _is_any(numbers, found):
        return _is_any(numbers, kind)
    alike = (types.is_timestamp, types.is_decimal, types.is_duration, types.is_time)
    return any(is_of(found) and is_of(kind) for is_of in alike)


def _is_any(kinds: Sequence[Callable[[Any], bool]], kind: Any) -> bool:
    return any(is_of(kind) for is_of in kinds)


def _list_declared(recipe: Recipe) -> dict[str, Any]:
    """Return the types of the recipe's `prediction_schema` by name. Raises ConfigError for a type
    that Arrow does not have.
    """
    import pyarrow

    place = locate(recipe, "prediction_schema")
    found: Any = recipe.prediction_schema
    if callable(found):
        found = found()
    if isinstance(found, pyarrow.Schema):
        found = dict(zip(found.names, found.types, strict=True))
    if not isinstance(found, Mapping) or KEY in found:
        raise ConfigError(
            f"{place}: expected types by the names of columns, without {KEY!r}, got {found!r}"
        )
    declared = {}
    for name, kind in found.items():
        try:
            declared[name] = _parse(kind)
        except (TypeError, ValueError):
            raise ConfigError(
                f"{place}: {name}: expected a type such as {TYPES}, got {kind!r}"
            ) from None
    return declared


def _parse(kind: Any) -> Any:
    import pyarrow

    if isinstance(kind, pyarrow.DataType):
        return kind
    text = str(kind).strip()
    if text.startswith("list<") and text.endswith(">"):
        return pyarrow.list_(_parse(text[5:-1]))
    return pyarrow.type_for_alias(text)
