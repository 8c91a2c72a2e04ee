"""Copies of a run's state for the thread that writes it, in memory that is used again.

The training waits for the copy, so it must cost no more than the bytes take to move: new memory
costs a page fault for every 4 KiB, which takes longer than the copy, and pinned memory costs more
still.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import UntypedStorage

from flyte_ddp.checkpoints.state import map_tensors


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
        """
        free: list[UntypedStorage] = []
        if self._free:
            free = self._free.pop()
        copy = _Copy(free)
        copied = map_tensors(state, copy.add)
        for device in copy.devices:
            torch.cuda.current_stream(device).synchronize()  # copies into pinned memory run on
        buffers = Buffers(copy.buffers.values())
        weakref.finalize(buffers, self._free.append, list(buffers)).atexit = False
        return copied, buffers

    def clear(self) -> None:
        """Return the memory that is not in use."""
        self._free.clear()


class _Copy:
    """A copy of one state. Tensors that share memory, such as tied weights, share it in the copy
    too: they are written once.
    """

    def __init__(self, reused: list[UntypedStorage]) -> None:
        self._reused = iter(reused)
        # copies by address and size of the storages
        self.buffers: dict[tuple[int, int], UntypedStorage] = {}
        self.devices: set[torch.device] = set()  # GPUs that are copied from
        # alive until the end: `buffers` knows their memory by its address
        self._resolved: list[torch.Tensor] = []

    def add(self, value: torch.Tensor) -> torch.Tensor:
        """Return the copy of a tensor."""
        if value.is_meta:
            return value
        if value.layout != torch.strided or value.is_quantized:
            return value.detach().to("cpu", copy=True)
        if value.is_conj() or value.is_neg():  # such a sign is no part of the memory
            value = value.detach().resolve_conj().resolve_neg()
            self._resolved.append(value)
        source = value.untyped_storage()
        place = source.data_ptr(), source.nbytes()
        if place not in self.buffers:
            self.buffers[place] = self._copy_storage(source)
        buffer = self.buffers[place]
        copy = torch.empty(0, dtype=value.dtype)
        return copy.set_(buffer, value.storage_offset(), value.size(), value.stride())

    def _copy_storage(self, source: UntypedStorage) -> UntypedStorage:
        on_gpu = source.device.type == "cuda"
        if on_gpu:
            self.devices.add(source.device)
        buffer = next(self._reused, None)
        if buffer is None or buffer.nbytes() != source.nbytes():
            buffer = UntypedStorage(source.nbytes())
            if on_gpu:
                buffer = buffer.pin_memory()
        _view_bytes(buffer).copy_(_view_bytes(source), non_blocking=on_gpu)
        return buffer


def _view_bytes(storage: UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
