"""Copies of a run's state for the thread that writes it, in memory that is used again.

The training waits for the copy, so it must cost no more than the bytes take to move: new memory costs a page fault for
every 4 KiB, which takes longer than the copy, and pinned memory costs more still.
"""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import UntypedStorage

from flyte_ddp.storage.uncached_file import BLOCK

Buffers = list[UntypedStorage]  # one for each storage of a state, in the order in which it is visited


class StagingMemory:
    """Buffers for states of one run, which have the same tensors every time. Grows to what is in use at once."""

    def __init__(self) -> None:
        self._free: list[Buffers] = []
        self._lock = threading.Lock()

    def copy(self, state: Any) -> tuple[Any, Buffers]:
        """Return a copy of nested dicts, lists and tuples with their tensors on the CPU, and the memory it is in.

        Tensors that share memory, such as tied weights, share it in the copy too: they are written once.
        """
        with self._lock:
            reused = self._free.pop() if self._free else []
        buffers: Buffers = []
        copies: dict[int, UntypedStorage] = {}

        def copy_tensor(value: torch.Tensor) -> torch.Tensor:
            if value.is_meta:
                return value
            if value.layout != torch.strided:
                return value.detach().to("cpu", copy=True)
            source = value.untyped_storage()
            if source._cdata not in copies:
                index = len(buffers)
                buffer = reused[index] if index < len(reused) and reused[index].nbytes() == source.nbytes() else None
                buffers.append(_new_buffer(source) if buffer is None else buffer)
                _bytes_of(buffers[index]).copy_(_bytes_of(source), non_blocking=True)
                copies[source._cdata] = buffers[index]
            copy = torch.empty(0, dtype=value.dtype)
            return copy.set_(copies[source._cdata], value.storage_offset(), value.size(), value.stride())

        copied = map_tensors(state, copy_tensor)
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()  # copies into pinned memory run on
        return copied, buffers

    def clear(self) -> None:
        """Return the memory that is not in use."""
        with self._lock:
            self._free.clear()

    def release(self, buffers: Buffers) -> None:
        """Take back the memory of a copy that nobody needs any more."""
        if buffers:
            with self._lock:
                self._free.append(buffers)


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


def _new_buffer(source: UntypedStorage) -> UntypedStorage:
    size = source.nbytes()
    buffer: UntypedStorage
    if source.device.type == "cuda":
        buffer = UntypedStorage(size).pin_memory()
    elif size < BLOCK:
        buffer = UntypedStorage(size)
    else:  # begins where a page does: such memory is written to a disk without another copy
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
    return buffer


def _bytes_of(storage: UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
