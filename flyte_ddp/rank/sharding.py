"""Tensors that are split over the ranks: what of a state a rank writes, and what it loads.

A checkpoint has one file of each rank with its part of every tensor, and any number of ranks reads
it, split or not (resharding.py). Nothing else in the package knows how a tensor is split.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flyte_ddp.checkpoints.resharding import SHARDS, Box, BoxOf, Place, slices
from flyte_ddp.checkpoints.staging import map_tensors
from flyte_ddp.errors import ConfigError

# options of an optimizer that change no result
KERNELS = ("fused", "foreach", "capturable", "differentiable")


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters of `model` are split over the ranks, so that its forward pass
    is a collective.
    """
    # By the class, because while the weights are gathered the parameters look like any others.
    return _is_instance(model, "torch.distributed.fsdp", "FSDPModule")


def reshard(model: nn.Module) -> None:
    """Drop the weights that a forward pass without a backward pass has gathered; without effect on
    an unsplit model.
    """
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def whole(value: Tensor) -> Tensor:
    """Return the whole of a tensor, which may be split over the ranks: then this is a
    collective.
    """
    return value.full_tensor() if is_split(value) else value  # type: ignore[attr-defined]


def whole_state(state: Any, keep: bool) -> Any:
    """Return a copy of nested dicts and lists in which each split tensor is whole, and on the CPU.
    A collective then.

    One tensor after another, so that no device holds more than one of them besides its part.

    Args:
        keep: False on ranks that only take part in the collectives, and need no result.
    """

    def gather(tensor: Tensor) -> Tensor | None:
        if not is_split(tensor):
            return tensor
        gathered = whole(tensor)
        return gathered.cpu() if keep else None

    return map_tensors(state, gather)


def split_state(state: Mapping[str, Any], is_first: bool) -> dict[str, Any]:
    """Return what one rank writes of `state`: its part of every split tensor, and on the first rank
    all the rest.

    The first rank's has a tensor without contents in the place of each split one. A part that
    several ranks have is written by the first of them; the others write an empty one.
    """
    shards: list[tuple[list[int], Tensor]] = []

    def take_part(tensor: Tensor) -> Tensor:
        if not is_split(tensor):
            return tensor
        if tensor.dim() == 0:  # of which every rank has a copy
            return tensor.to_local()  # type: ignore[attr-defined,no-any-return]
        starts, part = [each.start for each in own_box(tensor)], tensor.to_local()  # type: ignore[attr-defined]
        shards.append(
            (starts, part if _is_first_copy(tensor) else part.new_empty((0, *tensor.shape[1:])))
        )
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    outline = map_tensors(state, take_part)
    return {**(outline if is_first else {}), SHARDS: shards}


def own_boxes(model: nn.Module, optimizer: Optimizer) -> BoxOf:
    """Return a function of a tensor's place in a checkpoint that returns the box of it that this
    rank keeps.
    """
    weights = model.state_dict()
    parameters = _parameters(optimizer)

    def box_of(place: Place, tensor: Tensor) -> Box | None:
        own = None
        if place[0] == "model":
            own = weights.get(place[1])
        elif place[:2] == ("optimizer", "state") and place[2] < len(parameters):
            own = parameters[place[2]]
        return (
            own_box(own)
            if own is not None and is_split(own) and own.shape == tensor.shape
            else None
        )

    return box_of


def load_model(model: nn.Module, state: Mapping[str, Any], is_whole: bool = True) -> None:
    """Load a state dict of whole tensors, or of this rank's parts, into `model`. Raises as
    `load_state_dict`.

    Args:
        is_whole: it has all of the model's keys.
    """
    own = model.state_dict()
    model.load_state_dict(
        {name: _part_like(value, own.get(name)) for name, value in state.items()}, strict=is_whole
    )


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the state of an optimizer, of whole tensors or of this rank's parts. How it computes
    stays its own.
    """
    parameters = _parameters(optimizer)
    parts = {
        number: {name: _part_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    own = [
        {name: group[name] for name in KERNELS if name in group} for group in optimizer.param_groups
    ]
    given = state["param_groups"]  # torch refuses another number of them
    groups = [
        {**group, **kernels}
        for group, kernels in zip(given, [*own, *([{}] * len(given))], strict=False)
    ]
    optimizer.load_state_dict({"state": parts, "param_groups": groups})


def count_own_parameters(model: nn.Module) -> int:
    """Count the parameters that this rank holds: of a split model its part."""
    own = (each.to_local() if is_split(each) else each for each in model.parameters())  # type: ignore[attr-defined]
    return sum(tensor.numel() for tensor in own)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _part_like(value: Any, own: Any) -> Any:
    """Return a whole tensor, or this rank's part of it, split as `own` is; anything else as it
    is.
    """
    if not is_split(own) or not isinstance(value, Tensor):
        return value
    if value.shape == own.shape:
        value = value[slices(own_box(own))]
    elif value.shape != own.to_local().shape:
        return value
    from torch.distributed.tensor import DTensor

    local = value.to(own.device)
    mesh, placements = own.device_mesh, own.placements
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=own.shape, stride=own.stride()
    )


def own_box(split: Any) -> Box:
    """Return the part that this rank has of a split tensor, over any mesh; an empty one where the
    mesh is without it.

    Raises:
        ConfigError: it is a part of a sum.
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
    return [range(start, start + size) for start, size in zip(starts, shape, strict=True)]


def _is_first_copy(split: Any) -> bool:
    """Return whether this rank is the first of those that have the same part."""
    place = split.device_mesh.get_coordinate()
    return place is not None and all(
        coordinate == 0
        for coordinate, each in zip(place, split.placements, strict=True)
        if each.is_replicate()
    )


def in_mesh(value: Any) -> bool:
    """Return whether this rank is one of those over which a tensor is split; True for a whole
    one.
    """
    return not is_split(value) or value.device_mesh.get_coordinate() is not None


def is_split(value: Any) -> bool:
    return _is_instance(value, "torch.distributed.tensor", "DTensor")


def _is_instance(value: Any, module: str, name: str) -> bool:
    # Importing these classes takes 0.6 s, and where nobody has, nothing is split.
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))
