"""Put the state of a checkpoint together from its files, for any number of ranks.

The ranks read the files in turn, each file once, and pass on what others need of it: all of a whole
tensor, and of a split one the box that a rank keeps. So no rank holds more than one file besides
its own part of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.checkpoints.files import Damaged, Entry
from flyte_ddp.checkpoints.staging import map_tensors
from flyte_ddp.errors import CheckpointError
from flyte_ddp.world import World, call_together

# key of a file's parts of split tensors: pairs of where they start, in each dimension, and the part
SHARDS = "shards"

Place = tuple[Any, ...]  # the keys that lead to a tensor in a state
Box = Sequence[range]  # a part of a tensor: the indices in each dimension
BoxOf = Callable[[Place, Tensor], "Box | None"]
"""Returns the box that a rank keeps of the tensor at a place, of which it gets the shape.

None is for all of it.
"""


def keep_all(place: Place, tensor: Tensor) -> None:
    """Keep every tensor whole."""


def assemble(
    entries: Sequence[Entry],
    read: Callable[[Entry], dict[str, Any]],
    world: World,
    box_of: BoxOf = keep_all,
    readers: Sequence[int] = (),
) -> dict[str, Any]:
    """Return the state in the files of `entries`, with its tensors on the CPU. Every rank calls it.

    Args:
        read: returns the contents of a file, or raises Damaged.
        readers: the rank that reads each file, where not all can; by default the ranks take turns.

    Raises:
        Damaged: on every rank, if a file is damaged.
    """
    assembly: _Assembly | None = None
    readers = readers or [number % world.world_size for number in range(len(entries))]
    left = list(zip(readers, entries, strict=True))
    while left:
        turn = dict(reversed(left))  # the first file that is left of each reader
        contents = _read_together(turn.get(world.rank), read, world)
        assembly = assembly or _Assembly(contents, world, box_of, readers[0])
        for reader in sorted(turn):
            assembly.add_shards(contents.get(SHARDS, []), reader)
        contents.clear()  # before the next one is read
        left = [(reader, entry) for reader, entry in left if turn[reader] is not entry]
    assert assembly is not None  # a manifest names at least one file
    return assembly.finish()


def _read_together(
    entry: Entry | None, read: Callable[[Entry], dict[str, Any]], world: World
) -> dict[str, Any]:
    def read_own() -> tuple[dict[str, Any], str]:
        try:
            return (read(entry) if entry else {}), ""
        except Damaged as error:
            return {}, str(error)

    contents, damage = call_together(read_own, world)
    is_damaged = world.all_gather(float(bool(damage)))
    if any(is_damaged):
        raise Damaged(world.broadcast_object(damage, source=is_damaged.index(1.0)))
    return contents


class _Assembly:
    """A state that is being put together. `contents` is the first file, on the rank that reads it;
    only shards are not in it.
    """

    def __init__(
        self, contents: Mapping[str, Any], world: World, box_of: BoxOf, reader: int
    ) -> None:
        self._world = world
        state = {key: value for key, value in contents.items() if key != SHARDS}
        tensors = [tensor for _, tensor in find_tensors(state)]
        self._outline, is_split = world.broadcast_object(
            (
                map_tensors(state, lambda each: each.to("meta") if _is_plain(each) else each),
                [tensor.is_meta for tensor in tensors],
            ),
            reader,
        )
        self._tensors: list[Tensor | None] = []
        # (the whole one's shape, the box kept, where it is in `_tensors`: None before anything is
        # kept of it)
        self._split: list[tuple[Tensor, Box, int]] = []
        for number, (place, tensor) in enumerate(find_tensors(self._outline)):
            box = box_of(place, tensor)
            kept: Tensor | None
            if is_split[number]:
                box = [range(size) for size in tensor.shape] if box is None else box
                self._split.append((tensor, box, number))
                kept = None
            elif tensor.is_meta:
                # Not `empty_like`, which imports torch's compiler and SymPy for a tensor without
                # values.
                new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                kept = tensors[number] if world.rank == reader else new
                world.broadcast(kept, reader)
                if box is not None:
                    kept = kept[slices(box)].clone()
            else:
                kept = tensor  # it came whole
            self._tensors.append(kept)
        # starts and shapes of what was read of each, which several ranks may have
        self._read: list[set[tuple[tuple[int, ...], ...]]] = [set() for _ in self._split]

    def add_shards(self, shards: Sequence[tuple[Sequence[int], Tensor]], source: int) -> None:
        """Add the shards of a file that rank `source` has read."""
        world = self._world
        placed = world.broadcast_object(
            [(list(starts), list(part.shape)) for starts, part in shards], source
        )
        if len(placed) != len(self._split):
            raise CheckpointError(
                f"expected {len(self._split)} split tensors in each file, got {len(placed)}"
            )
        if not placed:
            return
        theirs = [
            [range(start, start + size) for start, size in zip(*each, strict=True)]
            for each in placed
        ]
        common = [
            _overlap(box, each) for each, (_, box, _) in zip(theirs, self._split, strict=True)
        ]
        is_needed = [float(world.rank != source and all(each)) for each in common]
        num_readers = world.all_reduce(*is_needed)
        for number, (tensor, box, index) in enumerate(self._split):
            starts, shape = placed[number]
            self._read[number].add((tuple(starts), tuple(shape)))
            if world.rank == source:
                part = shards[number][1]
            elif num_readers[number]:
                part = torch.empty(shape, dtype=tensor.dtype)
            else:
                continue  # at the size that wrote them, each rank has read what it keeps
            if num_readers[number]:
                world.broadcast(part, source)
            if all(common[number]):
                self._keep(index, box, common[number], part[slices(common[number], theirs[number])])

    def _keep(self, index: int, box: Box, within: Box, values: Tensor) -> None:
        """Keep what is read of a box; as it is, without a copy, where one file has all of the box
        and nothing more.
        """
        kept = self._tensors[index]
        if kept is None and list(within) == list(box) and _owns_its_memory(values):
            self._tensors[index] = values
            return
        if kept is None:
            kept = self._tensors[index] = torch.empty(
                [len(each) for each in box], dtype=values.dtype
            )
        kept[slices(within, box)] = values

    def finish(self) -> dict[str, Any]:
        """Return the state. Raises CheckpointError if a part of a tensor is missing."""
        for (tensor, _, _), read in zip(self._split, self._read, strict=True):
            num_values = sum(math.prod(shape) for _, shape in read)
            if num_values != tensor.numel():
                expected = f"expected {tensor.numel()} values of a split tensor in all files"
                raise CheckpointError(f"{expected}, got {num_values}")
        for tensor, box, index in self._split:  # a rank may keep nothing of a tensor
            if self._tensors[index] is None:
                self._tensors[index] = torch.empty([len(each) for each in box], dtype=tensor.dtype)
        tensors = iter(self._tensors)
        state: dict[str, Any] = map_tensors(self._outline, lambda _: next(tensors))
        return state


def slices(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    """Return the index of a box in the whole tensor, or in what is in the box `within`."""
    starts = [each.start for each in within] if within else [0] * len(box)
    return tuple(
        slice(each.start - start, each.stop - start)
        for each, start in zip(box, starts, strict=True)
    )


def _overlap(ours: Box, theirs: Box) -> Box:
    starts = [max(our.start, their.start) for our, their in zip(ours, theirs, strict=True)]
    stops = [min(our.stop, their.stop) for our, their in zip(ours, theirs, strict=True)]
    return [range(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True)]


def find_tensors(state: Any, place: Place = ()) -> Iterator[tuple[Place, Tensor]]:
    """Yield the tensors in nested dicts, lists and tuples with their places, in the order of
    `map_tensors`.
    """
    if isinstance(state, Mapping):
        for key, each in state.items():
            yield from find_tensors(each, (*place, key))
    elif isinstance(state, (list, tuple)):
        for number, each in enumerate(state):
            yield from find_tensors(each, (*place, number))
    elif isinstance(state, Tensor):
        yield place, state


def _owns_its_memory(tensor: Tensor) -> bool:
    return (
        tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized
