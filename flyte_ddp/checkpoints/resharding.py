"""Put the state of a checkpoint together from its files, for any number of ranks.

The ranks read the files in turn, each file once, and pass on what others need of it: all of a whole tensor, and of a
split one the rows that a rank keeps. So no rank holds more than one file besides its own part of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.checkpoints.files import Damaged, Entry
from flyte_ddp.checkpoints.staging import map_tensors
from flyte_ddp.errors import CheckpointError
from flyte_ddp.world import World, run_together

SHARDS = "shards"  # key of a file's parts of split tensors: pairs of their first row and their rows

Place = tuple[Any, ...]  # the keys that lead to a tensor in a state
RowsOf = Callable[[Place, Tensor], "range | None"]
"""Returns the rows that a rank keeps of the tensor at a place; None for all of it."""


def keep_all(place: Place, tensor: Tensor) -> None:
    """Keep every tensor whole."""


def assemble(
    entries: Sequence[Entry], read: Callable[[Entry], dict[str, Any]], world: World, rows_of: RowsOf = keep_all
) -> dict[str, Any]:
    """Return the state in the files of `entries`, with its tensors on the CPU. Every rank calls it.

    Args:
        read: returns the contents of a file, or raises Damaged.

    Raises:
        Damaged: on every rank, if a file is damaged.
    """
    assembly: _Assembly | None = None
    for first in range(0, len(entries), world.world_size):
        turns = entries[first : first + world.world_size]
        contents = _read_together(turns[world.rank] if world.rank < len(turns) else None, read, world)
        assembly = assembly or _Assembly(contents, world, rows_of)
        for source in range(len(turns)):
            assembly.add_shards(contents.get(SHARDS, []), source)
        contents.clear()  # before the next one is read
    assert assembly is not None  # a manifest names at least one file
    return assembly.finish()


def _read_together(entry: Entry | None, read: Callable[[Entry], dict[str, Any]], world: World) -> dict[str, Any]:
    def read_own() -> tuple[dict[str, Any], str]:
        try:
            return (read(entry) if entry else {}), ""
        except Damaged as error:
            return {}, str(error)

    contents, damage = run_together(read_own, world)
    is_damaged = world.all_gather(float(bool(damage)))
    if any(is_damaged):
        raise Damaged(world.broadcast_object(damage, source=is_damaged.index(1.0)))
    return contents


class _Assembly:
    """A state that is being put together. `contents` is the first file, on rank 0; it has all but the shards."""

    def __init__(self, contents: Mapping[str, Any], world: World, rows_of: RowsOf) -> None:
        self._world = world
        state = {key: value for key, value in contents.items() if key != SHARDS}
        tensors = [tensor for _, tensor in _tensors_of(state)]
        self._outline = world.broadcast_object(
            map_tensors(state, lambda each: each.to("meta") if _is_plain(each) else each)
        )
        is_split = world.broadcast_object([tensor.is_meta for tensor in tensors])
        self._tensors: list[Tensor] = []
        self._split: list[tuple[Tensor, range, Tensor]] = []  # (the whole one's shape, the rows kept, the rows)
        for number, (place, tensor) in enumerate(_tensors_of(self._outline)):
            rows = rows_of(place, tensor)
            if is_split[number]:
                rows = range(len(tensor)) if rows is None else rows
                kept = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype)
                self._split.append((tensor, rows, kept))
            elif tensor.is_meta:
                kept = tensors[number] if world.is_first else torch.empty_like(tensor, device="cpu")
                world.broadcast(kept)
                if rows is not None:
                    kept = kept[rows.start : rows.stop].clone()
            else:
                kept = tensor  # it came whole
            self._tensors.append(kept)
        self._num_rows = [0] * len(self._split)

    def add_shards(self, shards: Sequence[tuple[int, Tensor]], source: int) -> None:
        """Add the shards of a file that rank `source` has read."""
        world = self._world
        shapes = world.broadcast_object([(start, list(part.shape)) for start, part in shards], source)
        if len(shapes) != len(self._split):
            raise CheckpointError(f"expected {len(self._split)} split tensors in each file, got {len(shapes)}")
        if not shapes:
            return
        starts = [start for start, _ in shapes]
        is_needed = [
            world.rank != source and bool(_overlap(range(start, start + shape[0]), rows))
            for (start, shape), (_, rows, _) in zip(shapes, self._split, strict=True)
        ]
        num_readers = world.all_reduce(*(float(each) for each in is_needed))
        for number, (start, (_, shape)) in enumerate(zip(starts, shapes, strict=True)):
            tensor, rows, kept = self._split[number]
            self._num_rows[number] += shape[0]
            if world.rank == source:
                part = shards[number][1]
            elif num_readers[number]:
                part = torch.empty(shape, dtype=tensor.dtype)
            else:
                continue  # at the size that wrote them, each rank has read what it keeps
            if num_readers[number]:
                world.broadcast(part, source)
            both = _overlap(range(start, start + shape[0]), rows)
            kept[both.start - rows.start : both.stop - rows.start] = part[both.start - start : both.stop - start]

    def finish(self) -> dict[str, Any]:
        """Return the state.

        Raises:
            CheckpointError: rows are missing.
        """
        for (tensor, _, _), num_rows in zip(self._split, self._num_rows, strict=True):
            if num_rows != len(tensor):
                raise CheckpointError(f"expected {len(tensor)} rows of a split tensor in all files, got {num_rows}")
        tensors = iter(self._tensors)
        state: dict[str, Any] = map_tensors(self._outline, lambda _: next(tensors))
        return state


def _overlap(ours: range, theirs: range) -> range:
    start = max(ours.start, theirs.start)
    return range(start, max(start, min(ours.stop, theirs.stop)))


def _tensors_of(state: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples with their places, in the order of `map_tensors`."""
    if isinstance(state, Mapping):
        for key, each in state.items():
            yield from _tensors_of(each, (*place, key))
    elif isinstance(state, (list, tuple)):
        for number, each in enumerate(state):
            yield from _tensors_of(each, (*place, number))
    elif isinstance(state, Tensor):
        yield place, state


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized
