"""Tensors in tuples, lists, dicts and dataclasses, nested: what a sample, a batch or a model's
output may be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import default_collate

from flyte_ddp.errors import DataError


def map_parts(function: Callable[[Sequence[Any]], Any], values: Sequence[Any]) -> Any:
    """Return a value of the shape that all `values` have, with `function` of their parts at each
    place.

    Args:
        values: alike: with the same keys, fields and lengths.
    """
    first = values[0]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        parts = {
            name: map_parts(function, [getattr(value, name) for value in values]) for name in names
        }
        return dataclasses.replace(first, **parts)
    if isinstance(first, Mapping):
        return {key: map_parts(function, [value[key] for value in values]) for key in first}
    if isinstance(first, (tuple, list)):
        found = [map_parts(function, parts) for parts in zip(*values, strict=True)]
        return type(first)(*found) if hasattr(first, "_fields") else type(first)(found)
    return function(values)


def collate(samples: Sequence[Any]) -> Any:
    """Return a batch of `samples`, as a DataLoader's own function does, and of dataclasses as well.

    Raises:
        DataError: their tensors differ in shape, or they have something that no batch can be made
            of.
    """
    try:
        return map_parts(lambda parts: default_collate(list(parts)), samples)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        if "</torch_" in reason:  # of /dev/shm, by which a loader process hands a batch over
            raise
        raise DataError(
            "datasets: expected samples of tensors or numbers, each of the same shape, got "
            f"{reason}"
        ) from error


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `function` of each tensor in it; everything else stays."""
    return map_parts(
        lambda parts: function(parts[0]) if isinstance(parts[0], Tensor) else parts[0], [value]
    )


def parts_in(value: Any) -> Iterator[Any]:
    """Yield what is nested in `value`, in its order."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, (Mapping, tuple, list)):
        for each in value.values() if isinstance(value, Mapping) else value:
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
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
