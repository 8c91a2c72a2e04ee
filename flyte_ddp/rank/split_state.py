"""The state of a function whose tensors are split over the ranks, for `session.save` and
`session.load`.

Split are the DTensors of FSDP2, tensor parallelism or `torch.distributed.checkpoint.state_dict`.
Each rank writes its own part, and reads what it needs of the others', at another number of ranks
and over another mesh as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from flyte_ddp.checkpoints.resharding import Box, BoxOf, Place, find_tensors
from flyte_ddp.checkpoints.state_file import compute_checksum
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.sharding import in_mesh, is_split, own_box
from flyte_ddp.world import World


def has_split(state: Any) -> bool:
    """Return whether a tensor in nested dicts, lists and tuples is split."""
    return any(is_split(tensor) for _, tensor in find_tensors(state))


def function_world() -> World:
    """Return this rank's place in the process group that its function has made."""
    on_gpu = dist.get_backend() == "nccl"
    return World(
        dist.get_rank(), 0, dist.get_world_size(), torch.device("cuda" if on_gpu else "cpu")
    )


def collective_timeout(world: World) -> float:
    """Return the seconds after which a collective that waits for a rank fails; years where the
    backend has none.
    """
    assert dist.group.WORLD is not None
    options = getattr(dist.group.WORLD._get_backend(world.device), "options", None)
    timeout: timedelta = getattr(options, "_timeout", timedelta.max)
    return timeout.total_seconds()


def check_call(
    state: Any, step: int, in_memory: bool, number: int, world: World, store: Store, timeout: float
) -> None:
    """Check that every rank saves the same step in the same place, of a state with the same keys,
    which are one state.

    A tensor may be split over a part of the ranks, and each group of ranks then has all of it. That
    these copies are equal is known by their values alone: stages of a pipeline have other values
    under the same keys.

    By the store, because a collective would wait for a rank that does not call for as long as the
    others' do.

    Args:
        number: of the save, the same on all ranks.
        timeout: seconds for which the other ranks are waited for.

    Raises:
        ConfigError: they do not; names rank and key.
    """
    outline: dict[str, Any] = {"step": step, "in_memory": in_memory}
    outline |= {f"state: {place}": _describe(each) for place, each in find_tensors(state)}
    digest = hashlib.sha256(json.dumps(outline).encode()).hexdigest()
    call = json.dumps([digest, _checksums(state, world)])
    # another thread uses the connection of the first one
    prefix, store = f"flyte_ddp/save-{number}", store.clone()
    store.set(f"{prefix}/{world.rank}", call)
    # all have read it: they have begun the one after it
    store.delete_key(f"flyte_ddp/save-{number - 2}/{world.rank}")
    for rank in range(world.world_size):
        key = f"{prefix}/{rank}"
        try:
            store.wait([key], timedelta(seconds=timeout))
        except RuntimeError:
            expected = (
                "expected a call on every rank, because the state is split, got none on "
                f"rank {rank}"
            )
            raise ConfigError(
                f"session.save: {expected} for {timeout:g} s, at step {step}"
            ) from None
    calls = [json.loads(store.get(f"{prefix}/{rank}")) for rank in range(world.world_size)]
    others = [rank for rank in range(world.world_size) if calls[rank][0] != calls[0][0]]
    if not others:
        _compare_copies([checksums for _, checksums in calls])
        return
    store.set(f"{prefix}/outline-{world.rank}", json.dumps(outline))
    first, other = (json.loads(store.get(f"{prefix}/outline-{rank}")) for rank in (0, others[0]))
    order = "state", "keys in one order", "another one"
    name, expected, got = next(
        (
            (name, first.get(name, "no tensor"), other.get(name, "no tensor"))
            for name in {**first, **other}
            if first.get(name) != other.get(name)
        ),
        order,
    )
    where = f"{expected} on all ranks, as on rank 0, got {got} on rank {others[0]}"
    raise ConfigError(f"session.save: {name}: expected {where}")


def _describe(tensor: Tensor) -> str:
    """Return shape and type of a tensor, and how it is split, over which kind of mesh."""
    split: Any = tensor
    what = f"tensor {tuple(tensor.shape)} of {tensor.dtype}"
    if not is_split(tensor):
        return f"a {what}"
    mesh = tuple(split.device_mesh.shape)
    return f"a split {what}, {list(split.placements)} over {mesh} ranks"


def _checksums(state: Any, world: World) -> list[tuple[str, list[tuple[int, int]], str]]:
    """Return key, box and checksum of this rank's part of each tensor that is split over a part of
    the ranks.
    """
    found = []
    for place, tensor in find_tensors(state):
        split: Any = tensor
        if is_split(tensor) and split.device_mesh.size() < world.world_size and in_mesh(tensor):
            part = split.to_local().detach().cpu().resolve_conj().resolve_neg().contiguous()
            contents = part.reshape(-1).view(torch.uint8).numpy().data if part.numel() else b""
            box = [(each.start, each.stop) for each in own_box(tensor)]
            found.append((str(place), box, compute_checksum(contents)))
    return found


def _compare_copies(checksums: Sequence[Sequence[tuple[str, Any, str]]]) -> None:
    """Compare the ranks' `_checksums`, of which each part has one. Raises ConfigError, which names
    key and ranks.
    """
    known: dict[str, tuple[int, str]] = {}
    for rank, parts in enumerate(checksums):
        for place, box, checksum in parts:
            first, expected = known.setdefault(f"{place} {box}", (rank, checksum))
            if not box and first > 0:  # rank 0 writes numbers
                raise ConfigError(
                    f"session.save: state: {place}: expected a number that rank 0 has, got "
                    "rank "
                    f"{first}'s"
                )
            if checksum != expected:
                raise ConfigError(
                    f"session.save: state: {place}: expected one tensor, got other values on rank "
                    f"{rank} than on rank "
                    f"{first} for the same part of it; of a pipeline's stages, save tensors that "
                    "rank 0 has gathered"
                )


def own_boxes(into: Any) -> BoxOf:
    """Return a function of a tensor's place in a checkpoint that returns the box that `into` has of
    it on this rank.

    It raises ConfigError where `into` has no such tensor, or one of another shape. Below a key with
    None all is whole.
    """
    own = dict(find_tensors(into))

    def box_of(place: Place, tensor: Tensor) -> Box | None:
        if place[0] != "state" or into.get(place[1], into) is None:
            return None
        _check(place[1:], own.get(place[1:]), tensor)
        target = own[place[1:]]
        return own_box(target) if is_split(target) and target.dim() else None

    return box_of


def fill(into: Any, state: Any, place: Place = ()) -> Any:
    """Copy `state`, what this rank keeps of a checkpoint, into the tensors of `into`; return it
    with these.

    Raises:
        ConfigError: they have other keys or shapes, or a type that cannot hold all values.
    """
    if isinstance(state, Mapping) and isinstance(into, Mapping):
        if missing := [key for key in [*state, *into] if key not in into or key not in state]:
            where = "the checkpoint" if missing[0] in state else "into"
            raise ConfigError(
                f"session.load: {_name(place)}: expected the same keys, only "
                f"{where} has {missing[0]!r}"
            )
        return {key: fill(into[key], value, (*place, key)) for key, value in state.items()}
    if isinstance(state, (list, tuple)) and isinstance(into, (list, tuple)):
        if len(state) != len(into):
            sizes = f"expected a list of {len(state)} as in the checkpoint, got one of {len(into)}"
            raise ConfigError(f"session.load: {_name(place)}: {sizes}")
        return type(state)(
            fill(into[index], value, (*place, index)) for index, value in enumerate(state)
        )
    if not isinstance(state, Tensor) or not in_mesh(into):
        return into if isinstance(state, Tensor) else state
    target = into.to_local() if is_split(into) else into
    _check(place, target, state)
    with torch.no_grad():
        target.copy_(state)
    return into


def _check(place: Place, target: Any, saved: Tensor) -> None:
    """Check that `target` has the shape of what was saved, and its type or, of floating-point
    numbers, a wider one.
    """
    got: Any = tuple(target.shape) if isinstance(target, Tensor) else f"a {type(target).__name__}"
    expected: Any = tuple(saved.shape)
    if got != expected:
        expected = f"expected a tensor of shape {expected}, as the checkpoint has"
        raise ConfigError(f"session.load: {_name(place)}: {expected}, got {got}")
    is_wider = (
        saved.is_floating_point() and torch.promote_types(saved.dtype, target.dtype) == target.dtype
    )
    if saved.dtype != target.dtype and not (is_wider and target.is_floating_point()):
        expected = f"expected a tensor of {saved.dtype}, as the checkpoint has"
        raise ConfigError(f"session.load: {_name(place)}: {expected}, got {target.dtype}")


def _name(place: Place) -> str:
    return "into" + "".join(f"[{key!r}]" for key in place)
