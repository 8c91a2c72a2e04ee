"""One rank reads a checkpoint, and the others get it from that rank: the store is asked once, however many they are."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.rank.staging import map_tensors
from flyte_ddp.rank.world import World


def share_state(state: Any, world: World) -> Any:
    """Return rank 0's `state` on every rank, with its tensors on the CPU. Every rank calls it.

    Args:
        state: on rank 0, nested dicts, lists and tuples of tensors and plain values, as a checkpoint has them.
    """
    if world.world_size == 1:
        return state
    outline = _share_outline(state, world)
    if world.is_first:
        map_tensors(state, lambda tensor: world.broadcast(tensor) if _is_plain(tensor) else tensor)
        return state
    return map_tensors(outline, lambda tensor: _receive(tensor, world))


def _share_outline(state: Any, world: World) -> Any:
    """Return `state` with tensors that have shapes, types and strides, but no contents; a few kilobytes."""
    packed = io.BytesIO()
    if world.is_first:
        torch.save(map_tensors(state, lambda tensor: tensor.to("meta") if _is_plain(tensor) else tensor), packed)
    num_bytes = int(world.sum(float(len(packed.getvalue())))[0])
    contents = torch.zeros(num_bytes, dtype=torch.uint8)
    if world.is_first:
        contents = torch.frombuffer(bytearray(packed.getvalue()), dtype=torch.uint8)
    world.broadcast(contents)
    return torch.load(io.BytesIO(contents.numpy().tobytes()), weights_only=True)


def _receive(tensor: Tensor, world: World) -> Tensor:
    if tensor.device.type != "meta":
        return tensor  # it came whole
    return world.broadcast(torch.empty_like(tensor, device="cpu"))


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided
