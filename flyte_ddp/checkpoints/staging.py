"""Copies of a run's state for the thread that writes it, in memory that is used again, and what a
state may hold.

The training waits for the copy, so it must cost no more than the bytes take to move: new memory
costs a page fault for every 4 KiB, which takes longer than the copy, and pinned memory costs more
still.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import UntypedStorage

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
TENSORS = (torch.Tensor, torch.nn.Parameter)
# pickle has another form for larger ones, which weights_only=True does not read
MAX_INT_BITS = 255 * 8 - 1


class Buffers(list[UntypedStorage]):
    """The memory of a copied state: one buffer for each storage, in the order of the visit. Free
    again when nothing refers to this list.
    """


@dataclass(eq=False)
class StagingMemory:
    """Buffers for states of one run, which have the same tensors every time. Grows to what is in
    use at once.
    """

    _free: list[list[UntypedStorage]] = field(default_factory=list)

    def copy(self, state: Any) -> tuple[Any, Buffers]:
        """Return a copy of nested dicts, lists and tuples with their tensors on the CPU, and the
        memory it is in. Whoever uses the copy has to keep both.

        Tensors that share memory, such as tied weights, share it in the copy too: they are written
        once.
        """
        reused = iter(self._free.pop() if self._free else [])
        buffers = Buffers()
        copies: dict[int, UntypedStorage] = {}
        # alive until the end: `copies` knows their memory by its address
        resolved: list[torch.Tensor] = []
        devices: set[torch.device] = set()

        def copy_tensor(value: torch.Tensor) -> torch.Tensor:
            if value.is_meta:
                return value
            if value.layout != torch.strided or value.is_quantized:
                return value.detach().to("cpu", copy=True)
            if value.is_conj() or value.is_neg():  # such a sign is no part of the memory
                value = value.detach().resolve_conj().resolve_neg()
                resolved.append(value)
            source = value.untyped_storage()
            if source._cdata not in copies:
                on_gpu = source.device.type == "cuda"
                devices.update([source.device] if on_gpu else [])
                buffer = next(reused, None)
                if buffer is None or buffer.nbytes() != source.nbytes():
                    buffer = UntypedStorage(source.nbytes())
                    buffer = buffer.pin_memory() if on_gpu else buffer
                buffers.append(buffer)
                copies[source._cdata] = buffer
                _view_bytes(buffer).copy_(_view_bytes(source), non_blocking=on_gpu)
            copy = torch.empty(0, dtype=value.dtype)
            return copy.set_(
                copies[source._cdata], value.storage_offset(), value.size(), value.stride()
            )

        copied = map_tensors(state, copy_tensor)
        for device in devices:
            torch.cuda.current_stream(device).synchronize()  # copies into pinned memory run on
        weakref.finalize(buffers, self._free.append, list(buffers)).atexit = False
        return copied, buffers

    def clear(self) -> None:
        """Return the memory that is not in use."""
        self._free.clear()


def map_tensors(state: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Return nested dicts, lists and tuples with `function` of each tensor in its place."""
    if isinstance(state, OrderedDict):  # a module's state dict
        ordered = OrderedDict((key, map_tensors(each, function)) for key, each in state.items())
        vars(ordered).update(vars(state))  # the versions of its modules' formats
        return ordered
    if isinstance(state, Mapping):
        return {key: map_tensors(each, function) for key, each in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map_tensors(each, function) for each in state)
    return function(state) if isinstance(state, torch.Tensor) else state


def readable(value: Any, place: str = "", is_part: bool = False) -> Any:
    """Return `value` with NumPy's scalars as Python's, its arrays as tensors, and every mapping as
    a dict.

    Args:
        place: where `value` is in the state that is saved, for errors.
        is_part: it is one rank's part of a split state, in which tensors on the meta device stand
            for split ones.

    Raises:
        ConfigError: something in it could not be read back, because `torch.load` would have to run
            code for it.
    """
    if type(value) in SCALARS and not (type(value) is int and value.bit_length() > MAX_INT_BITS):
        return bytearray(value) if type(value) is bytearray else value
    if isinstance(value, torch.Tensor):
        if type(value) not in TENSORS or value.is_nested or (value.is_meta and not is_part):
            raise _unreadable(value, place)
        return value
    if isinstance(value, Mapping):
        return _readable_mapping(value, place, is_part)
    if type(value) in (list, tuple):
        return type(value)(
            readable(each, f"{place}[{index}]", is_part) for index, each in enumerate(value)
        )
    if type(value) is set:
        return {_readable_item(each, place) for each in value}
    return _readable_of_numpy(value, place)


def _readable_item(value: Any, place: str) -> Any:
    """Return an item of a set, or a key, with its tensors copied: nothing else looks for tensors
    there.
    """
    return map_tensors(readable(value, place), lambda tensor: tensor.detach().to("cpu", copy=True))


def separate_types(state: Any) -> Any:
    """Return `state` with a copy of each tensor that shares memory with an earlier one of another
    type.

    `torch.save` refuses such a pair.
    """
    types: dict[int, torch.dtype] = {}

    def separate(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout != torch.strided or tensor.is_meta:
            return tensor
        first = types.setdefault(tensor.untyped_storage().data_ptr(), tensor.dtype)
        return tensor if first == tensor.dtype or not tensor.numel() else tensor.detach().clone()

    return map_tensors(state, separate)


def _readable_mapping(values: Mapping[Any, Any], place: str, is_part: bool) -> dict[Any, Any]:
    found: dict[Any, Any] = OrderedDict() if isinstance(values, OrderedDict) else {}
    for key, value in values.items():
        found[_readable_item(key, place)] = readable(
            value, f"{place}[{key!r}]" if place else str(key), is_part
        )
    # a module's state dict: the versions of its modules' formats
    if metadata := getattr(values, "_metadata", None):
        vars(found)["_metadata"] = readable(metadata, f"{place}._metadata")
    return found


def _readable_of_numpy(value: Any, place: str) -> Any:
    numpy = sys.modules.get("numpy")
    if numpy and isinstance(value, numpy.generic) and type(value.item()) in SCALARS:
        return value.item()
    if numpy and isinstance(value, numpy.ndarray) and not isinstance(value, numpy.ma.MaskedArray):
        with contextlib.suppress(TypeError):  # a kind of value that torch has not
            return torch.from_numpy(value.astype(value.dtype.newbyteorder("="), order="C"))
    raise _unreadable(value, place)


def _unreadable(value: Any, place: str) -> ConfigError:
    kind, remedy = type(value), ""
    if isinstance(value, torch.Tensor):
        remedy = (
            ": save whole tensors, of a split model those of get_model_state_dict with "
            "full_state_dict=True"
        )
    return ConfigError(
        f"save: {place or 'state'}: expected tensors, numbers, texts or bytes in dicts, lists, "
        "tuples and sets, "
        f"got a {kind.__qualname__} ({kind.__module__}){remedy}"
    )


def _view_bytes(storage: UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
