"""Tensors nested in tuples, lists, dicts and dataclasses: the form of a sample, a batch or a
model's output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from flyte_ddp.errors import DataError, first_line


def map_parts(function: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Any:
    """Return a value with the structure of `values`. At each place it contains `function` of the
    parts of all `values` at this place.

    Args:
        values: have the same keys, fields and lengths.
    """
    first = values[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        parts = {}
        for field in dataclasses.fields(first):
            fields = [getattr(value, field.name) for value in values]
            parts[field.name] = map_parts(function, fields)
        return dataclasses.replace(first, **parts)
    if isinstance(first, Mapping):
        mapped = {}
        for key in first:
            mapped[key] = map_parts(function, [value[key] for value in values])
        return mapped
    if isinstance(first, (tuple, list)):
        found = [map_parts(function, parts) for parts in zip(*values, strict=True)]
        if hasattr(first, "_fields"):
            return type(first)(*found)
        return type(first)(found)
    return function(values)


def collate(samples: Sequence[Any]) -> Any:
    """Return a batch of `samples`, as a DataLoader's own function does. Samples may also be
    dataclasses.

    Raises:
        DataError: the samples' tensors differ in shape, or a part of a sample cannot be batched.
    """
    try:
        return map_parts(lambda parts: default_collate(list(parts)), samples)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        reason = first_line(error)
        if "</torch_" in reason:  # /dev/shm failed: a loader process passes its batch through it
            raise
        raise DataError(
            "datasets: expected samples of tensors or numbers, each of the same shape, got "
            f"{reason}"
        ) from error


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `function` of each tensor in it; all other parts stay as they are."""

    def map_part(parts: Sequence[Any]) -> Any:
        if isinstance(parts[0], Tensor):
            return function(parts[0])
        return parts[0]

    return map_parts(map_part, [value])


def parts_in(value: Any) -> Iterator[Any]:
    """Yield the parts nested in `value`, in their order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from parts_in(each)
    else:
        yield value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Return the tensors in `value`, in their order."""
    return (each for each in parts_in(value) if isinstance(each, Tensor))


def describe_kind(value: Any) -> str:
    """Return what `value` is, for an error."""
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"a {type(value).__name__}"
