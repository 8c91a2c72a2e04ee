"""A run's state as it is saved: nested plain values, and pieces of tensors.

A rank's part of a state is one file. It contains the pieces that this rank saves, each with its
place in the whole tensor. Rank 0's part also contains the values. In the values a tensor without
contents stands for each whole tensor. The state of a single process has one part, whose pieces are
whole tensors.

FSDP2, tensor parallelism and `torch.distributed.checkpoint.state_dict` split tensors as DTensors.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor

from flyte_ddp.errors import ConfigError

# The types that `torch.load` reads with weights_only=True. Subclasses are others.
SCALARS = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
)
TENSORS = (Tensor, torch.nn.Parameter)
NESTED = (Mapping, list, tuple)
# pickle has another form for larger ones, which weights_only=True does not read
MAX_INT_BITS = 255 * 8 - 1

Place = tuple[Any, ...]  # the keys that lead to a tensor in a state
Box = Sequence[range]  # a piece of a tensor: the indices in each dimension
# the number of the whole tensor in the state, where the piece starts in each dimension, and the
# piece's contents
Piece = tuple[int, list[int], Tensor]
Take = Callable[[Tensor], Any]  # returns what is saved in a tensor's place


class StatePart(TypedDict):
    """One rank's part of a state: the contents of a file."""

    values: Any  # None on all ranks but the first
    pieces: list[Piece]


def collect(state: Any, is_first: bool = True) -> StatePart:
    """Return the part of `state` that a rank saves: its own piece of every split tensor, and on the
    first rank all other values. Copies tensors only where needed.

    NumPy's scalars become Python's, its arrays become tensors, and every mapping becomes a dict. If
    several ranks have the same piece, the first of them saves it.

    Raises:
        ConfigError: something could not be read back, because `torch.load` would have to run code
            for it.
    """
    pieces: list[Piece] = []
    numbers = itertools.count()
    types: dict[int, torch.dtype] = {}

    def take(tensor: Tensor) -> Tensor:
        if not is_split(tensor) and (tensor.layout != torch.strided or tensor.is_quantized):
            return tensor
        number, own, is_mine = next(numbers), tensor, is_first
        box: Box = [range(size) for size in tensor.shape]
        if is_split(tensor):
            own, box, is_mine = tensor.to_local(), own_box(tensor), _is_first_copy(tensor)  # type: ignore[attr-defined]
        if is_mine and own.numel():
            # `torch.save` refuses tensors of two types that share their memory
            first = types.setdefault(own.untyped_storage().data_ptr(), own.dtype)
            if first != own.dtype:
                own = own.detach().clone()
            pieces.append((number, [each.start for each in box], own))
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    values = _read(state, "", take)
    if not is_first:
        values = None
    return {"values": values, "pieces": pieces}


def count_bytes(state: Any) -> int:
    """Return the bytes of a state's tensors. Of split tensors, this rank's pieces count."""
    return sum(piece.nbytes for _, _, piece in collect(state)["pieces"])


def _read(value: Any, place: str, take: Take) -> Any:
    """Return `value` in a form that can be read back. Errors name its `place` in the state."""
    if type(value) in SCALARS and not (type(value) is int and value.bit_length() > MAX_INT_BITS):
        if type(value) is bytearray:
            return bytearray(value)
        return value
    if isinstance(value, Tensor):
        is_known = type(value) in TENSORS or is_split(value)
        if not is_known or value.is_nested or value.is_meta:
            raise _unreadable(value, place)
        return take(value)
    if isinstance(value, Mapping):
        return _read_mapping(value, place, take)
    if type(value) in (list, tuple):
        return map_entries(value, lambda index, each: _read(each, f"{place}[{index}]", take))
    if type(value) is set:
        return {_read(each, place, _copy) for each in value}
    return _read_numpy(value, place, take)


def _read_numpy(value: Any, place: str, take: Take) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic) and type(value.item()) in SCALARS:
        return value.item()
    if numpy and isinstance(value, numpy.ndarray) and not isinstance(value, numpy.ma.MaskedArray):
        with contextlib.suppress(TypeError):  # torch may not know this kind of value
            return take(torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C")))
    raise _unreadable(value, place)


def _read_mapping(values: Mapping[Any, Any], place: str, take: Take) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    if isinstance(values, OrderedDict):
        found = OrderedDict()
    for key, value in values.items():
        inner_place = str(key)
        if place:
            inner_place = f"{place}[{key!r}]"
        found[_read(key, place, _copy)] = _read(value, inner_place, take)
    # A module's state dict notes the versions of its modules' formats.
    metadata = getattr(values, "_metadata", None)
    if metadata:
        vars(found)["_metadata"] = _read(metadata, f"{place}._metadata", take)
    return found


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor in a key or a set, where nothing looks for tensors later."""
    return tensor.detach().to("cpu", copy=True)


def _unreadable(value: Any, place: str) -> ConfigError:
    kind, remedy = type(value), ""
    if isinstance(value, Tensor):
        remedy = (
            ": save whole tensors, of a split model those of get_model_state_dict with "
            "full_state_dict=True"
        )
    return ConfigError(
        f"save: {place or 'state'}: expected tensors, numbers, texts or bytes in dicts, lists, "
        f"tuples and sets, got a {kind.__qualname__} ({kind.__module__}){remedy}"
    )


def map_tensors(state: Any, function: Take) -> Any:
    """Return nested dicts, lists and tuples with `function` of each tensor in its place."""
    if isinstance(state, OrderedDict):  # a module's state dict
        ordered = OrderedDict((key, map_tensors(each, function)) for key, each in state.items())
        vars(ordered).update(vars(state))  # the versions of its modules' formats
        return ordered
    if isinstance(state, NESTED):
        return map_entries(state, lambda key, each: map_tensors(each, function))
    if isinstance(state, Tensor):
        return function(state)
    return state


def map_entries(values: Any, function: Callable[[Any, Any], Any]) -> Any:
    """Return a dict, list or tuple with `function` of each key or number and its value."""
    if isinstance(values, Mapping):
        return {key: function(key, each) for key, each in values.items()}
    return type(values)(function(number, each) for number, each in enumerate(values))


def entries_of(values: Any) -> Mapping[Any, Any]:
    """Return the values in a dict, list or tuple by their keys or numbers."""
    if isinstance(values, Mapping):
        return values
    return dict(enumerate(values))


def are_alike(one: Any, other: Any) -> bool:
    """Return whether both are dicts, or both are lists or tuples."""
    is_nested = isinstance(one, NESTED) and isinstance(other, NESTED)
    return is_nested and isinstance(one, Mapping) == isinstance(other, Mapping)


def find_tensors(state: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples with their places, in the order of
    `map_tensors`.
    """
    if isinstance(state, NESTED):
        for key, each in entries_of(state).items():
            yield from find_tensors(each, (*place, key))
    elif isinstance(state, Tensor):
        yield place, state


def local_part(tensor: Any) -> Tensor:
    """Return this rank's part of a split tensor; all of any other tensor."""
    return tensor.to_local() if is_split(tensor) else tensor  # type: ignore[no-any-return]


def is_split(value: Any) -> bool:
    """Return whether a tensor is split over ranks, or each of several has a copy of it."""
    # Importing this class takes 0.6 s, and where nobody has, nothing is split.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def own_box(split: Any) -> Box:
    """Return this rank's box of a split tensor, for any mesh. The box is empty if the mesh does not
    contain this rank.

    Raises:
        ConfigError: the tensor is a part of a sum.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(each.is_partial() for each in split.placements):
        raise ConfigError(
            "state: expected tensors that are split or copied, got a part of a "
            f"sum: {split.placements}"
        )
    if not in_mesh(split):
        return [range(0)] * split.dim()
    shape, starts = compute_local_shape_and_global_offset(
        split.shape, split.device_mesh, split.placements
    )
    assert tuple(split.to_local().shape) == tuple(shape)
    return box_at(starts, shape)


def box_at(starts: Sequence[int], shape: Sequence[int]) -> Box:
    """Return the box with these starts and this shape."""
    return [range(start, start + size) for start, size in zip(starts, shape, strict=True)]


def in_mesh(value: Any) -> bool:
    """Return whether this rank is one of those over which a tensor is split; True for a whole
    one.
    """
    return not is_split(value) or value.device_mesh.get_coordinate() is not None


def _is_first_copy(split: Any) -> bool:
    """Return whether this rank is the first of the ranks with the same piece."""
    place = split.device_mesh.get_coordinate()
    return place is not None and all(
        coordinate == 0
        for coordinate, each in zip(place, split.placements, strict=True)
        if each.is_replicate()
    )
