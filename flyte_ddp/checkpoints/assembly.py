"""Put a state together from the parts of all ranks, for any number of ranks, and fill tensors with
it.

The ranks read the files in turn, each file once, and pass on what others need of it: of each tensor
the box that a rank keeps. So no rank holds more than one file besides what it keeps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

from flyte_ddp.checkpoints.files import Damaged, Entry, read_file, read_manifest
from flyte_ddp.checkpoints.state import (
    Box,
    Piece,
    Place,
    StatePart,
    are_alike,
    box_at,
    find_tensors,
    in_mesh,
    is_split,
    local_part,
    map_entries,
    map_tensors,
    own_box,
)
from flyte_ddp.errors import CheckpointError, ConfigError
from flyte_ddp.storage import Storage
from flyte_ddp.world import ALONE, World, call_together

BoxOf = Callable[[Place, Tensor], "Box | None"]
"""Returns the box of a tensor that a rank keeps, given the tensor's place and shape.

None stands for the whole tensor.
"""


def keep_all(place: Place, tensor: Tensor) -> None:
    """Keep every tensor whole."""


def boxes_of(target_of: Callable[[Place], Any]) -> BoxOf:
    """Return a `BoxOf` for what is to be loaded into tensors, which `target_of` returns by their
    places.
    """

    def box_of(place: Place, tensor: Tensor) -> Box | None:
        target = target_of(place)
        if is_split(target) and target.shape == tensor.shape:
            return own_box(target)
        return None

    return box_of


def read_alone(storage: Storage, name: str) -> Any:
    """Return the state of the checkpoint with the manifest `name`, read by this process alone.

    Raises:
        Damaged: the manifest or a file is damaged.
    """
    manifest = read_manifest(storage, name)
    return assemble(manifest["files"], lambda entry: read_file(storage, entry), ALONE)


def assemble(
    entries: Sequence[Entry],
    read: Callable[[Entry], StatePart],
    world: World,
    box_of: BoxOf = keep_all,
    readers: Sequence[int] = (),
    is_mapped: bool = False,
) -> Any:
    """Return the state in the files of `entries`, with its tensors on the CPU. Every rank calls it.

    Args:
        entries: the first entry belongs to rank 0's part.
        read: returns the contents of a file, or raises Damaged.
        readers: the rank that reads each file. By default the ranks take turns.
        is_mapped: the tensors that `read` returns are mapped into memory and have to be copied.

    Raises:
        Damaged: on every rank, if a file is damaged.
    """
    assembly: _Assembly | None = None
    readers = readers or [number % world.world_size for number in range(len(entries))]
    left = list(zip(readers, entries, strict=True))
    while left:
        turn = dict(reversed(left))  # the first file that is left of each reader
        part = _read_together(turn.get(world.rank), read, world)
        if assembly is None:
            values = world.broadcast_object(part["values"], readers[0])
            assembly = _Assembly(values, world, box_of, is_mapped)
        for reader in sorted(turn):
            assembly.add(part["pieces"], reader)
        part["pieces"] = []  # frees the memory before the next file is read
        left = [(reader, entry) for reader, entry in left if turn[reader] is not entry]
    assert assembly is not None  # a manifest names at least one file
    return assembly.finish()


def _read_together(
    entry: Entry | None, read: Callable[[Entry], StatePart], world: World
) -> StatePart:
    def read_own() -> tuple[StatePart, str]:
        nothing: StatePart = {"values": None, "pieces": []}
        try:
            if entry:
                return read(entry), ""
            return nothing, ""
        except Damaged as error:
            return nothing, str(error)

    part, damage = call_together(read_own, world)
    damage = world.find_text(damage)
    if damage:
        raise Damaged(damage)
    return part


@dataclass(eq=False, repr=False)
class _Assembly:
    """A state that is being put together."""

    values: Any
    world: World
    box_of: InitVar[BoxOf]
    is_mapped: bool

    def __post_init__(self, box_of: BoxOf) -> None:
        found = [(place, each) for place, each in find_tensors(self.values) if each.is_meta]
        self._tensors = [tensor for _, tensor in found]  # meta tensors: shapes and types alone
        self._boxes: list[Box] = []
        for place, tensor in found:
            box = box_of(place, tensor)
            if box is None:
                box = [range(size) for size in tensor.shape]
            self._boxes.append(box)
        self._kept: list[Tensor | None] = [None] * len(found)
        # starts and shapes of the pieces that were read of each tensor; ranks may share a piece
        self._read: list[set[tuple[tuple[int, ...], ...]]] = [set() for _ in found]

    def add(self, pieces: Sequence[Piece], source: int) -> None:
        """Add the pieces of a file that rank `source` has read."""
        world = self.world
        table = world.broadcast_object(
            [(number, starts, list(piece.shape)) for number, starts, piece in pieces], source
        )
        if not table:
            return
        boxes = [box_at(starts, shape) for _, starts, shape in table]
        common = [
            _overlap(self._boxes[number], box)
            for (number, _, _), box in zip(table, boxes, strict=True)
        ]
        num_readers = world.all_reduce(*(world.rank != source and all(each) for each in common))
        for index, (number, starts, shape) in enumerate(table):
            self._read[number].add((tuple(starts), tuple(shape)))
            if world.rank == source:
                piece = pieces[index][2]
            elif num_readers[index]:
                piece = self._new(number, boxes[index])
            else:
                continue  # the reader alone keeps this piece
            if num_readers[index]:
                world.broadcast(piece, source)
            if all(common[index]):
                may_keep = world.rank != source or not self.is_mapped
                self._keep(number, piece, boxes[index], common[index], may_keep)

    def _keep(self, number: int, piece: Tensor, box: Box, common: Box, may_keep: bool) -> None:
        """Keep the common box of a piece that was read. The whole piece needs no copy, if
        `may_keep`.
        """
        own = self._boxes[number]
        if self._kept[number] is None and may_keep and list(common) == list(own) == list(box):
            self._kept[number] = piece
            return
        kept = self._kept[number]
        if kept is None:
            kept = self._kept[number] = self._new(number, own)
        kept[slices(common, own)] = piece[slices(common, box)]

    def _new(self, number: int, box: Box) -> Tensor:
        """Return new memory for a box of a tensor. The whole tensor keeps its strides."""
        tensor, shape = self._tensors[number], [len(each) for each in box]
        if shape == list(tensor.shape) and 0 not in tensor.stride():
            # Not `empty_like`, which imports torch's compiler and SymPy.
            return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype)
        return torch.empty(shape, dtype=tensor.dtype)

    def finish(self) -> Any:
        """Return the state. Raises CheckpointError if a piece of a tensor is missing."""
        for tensor, read in zip(self._tensors, self._read, strict=True):
            num_values = sum(math.prod(shape) for _, shape in read)
            if num_values != tensor.numel():
                raise CheckpointError(
                    f"expected {tensor.numel()} values of a tensor in all files, got {num_values}"
                )
        numbers = itertools.count()

        def replace(tensor: Tensor) -> Tensor:
            if not tensor.is_meta:
                return tensor
            number = next(numbers)
            kept = self._kept[number]
            if kept is None:  # a rank may keep nothing of a tensor
                return self._new(number, self._boxes[number])
            return kept

        return map_tensors(self.values, replace)


def slices(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    """Return the index of a box in the whole tensor, or in the part at the box `within`."""
    starts = [0] * len(box)
    if within:
        starts = [each.start for each in within]
    return tuple(
        slice(each.start - start, each.stop - start)
        for each, start in zip(box, starts, strict=True)
    )


def _overlap(ours: Box, theirs: Box) -> Box:
    starts = [max(our.start, their.start) for our, their in zip(ours, theirs, strict=True)]
    stops = [min(our.stop, their.stop) for our, their in zip(ours, theirs, strict=True)]
    return [range(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True)]


def fill(into: Any, state: Any, place: Place = ()) -> Any:
    """Copy `state` into the tensors of `into`, and return the state with these tensors.

    Args:
        state: the part of a checkpoint that this rank keeps.

    Raises:
        ConfigError: `into` has other keys or shapes, or a type that cannot hold all values.
    """
    if are_alike(state, into):
        _check_keys(place, into, state)
        return map_entries(state, lambda key, each: fill(into[key], each, (*place, key)))
    if not isinstance(state, Tensor):
        return state
    if not in_mesh(into):
        return into
    local = local_part(into)
    target = into  # a tensor whose local part does not fit was read whole
    if getattr(local, "shape", None) == state.shape:
        target = local
    _check(place, target, state)
    with torch.no_grad():
        target.copy_(state)
    return into


def _check_keys(place: Place, into: Any, state: Any) -> None:
    """Check that `into` has the keys of what was saved."""
    if isinstance(state, Mapping):
        for key in [*state, *into]:
            if key not in into or key not in state:
                where = "the checkpoint" if key in state else "into"
                raise ConfigError(
                    f"session.load: {_name(place)}: expected the same keys, only "
                    f"{where} has {key!r}"
                )
    elif len(state) != len(into):
        raise ConfigError(
            f"session.load: {_name(place)}: expected a list of {len(state)} as in the "
            f"checkpoint, got one of {len(into)}"
        )


def _check(place: Place, target: Any, saved: Tensor) -> None:
    """Check that `target` has the shape and the type of `saved`. Floating-point numbers may have a
    wider type.
    """
    got: Any = f"a {type(target).__name__}"
    if isinstance(target, Tensor):
        got = tuple(target.shape)
    shape = tuple(saved.shape)
    if got != shape:
        raise ConfigError(
            f"session.load: {_name(place)}: expected a tensor of shape {shape}, as the checkpoint "
            f"has, got {got}"
        )
    is_wider = (
        saved.is_floating_point() and torch.promote_types(saved.dtype, target.dtype) == target.dtype
    )
    if saved.dtype != target.dtype and not (is_wider and target.is_floating_point()):
        raise ConfigError(
            f"session.load: {_name(place)}: expected a tensor of {saved.dtype}, as the checkpoint "
            f"has, got {target.dtype}"
        )


def _name(place: Place) -> str:
    return "into" + "".join(f"[{key!r}]" for key in place)
