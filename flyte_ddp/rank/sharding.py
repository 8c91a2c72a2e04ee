"""Models that are split over the ranks, and what of a state is loaded into a model and optimizers,
split or not.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flyte_ddp.checkpoints.assembly import BoxOf, boxes_of, slices
from flyte_ddp.checkpoints.state import (
    NESTED,
    Place,
    are_alike,
    entries_of,
    is_split,
    local_part,
    map_entries,
    map_tensors,
    own_box,
)
from flyte_ddp.errors import ConfigError, in_one_line

# options of an optimizer that change no result
KERNELS = ("fused", "foreach", "capturable", "differentiable")


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters of `model` are split over the ranks, so that its forward pass
    is a collective.
    """
    # The class shows it at any time: gathered parameters look like any others.
    module = sys.modules.get("torch.distributed.fsdp")  # no model is split before this import
    return module is not None and isinstance(model, module.FSDPModule)


def reshard(model: nn.Module) -> None:
    """Drop the weights that a forward pass without a backward pass has gathered. An unsplit model
    stays as it is.
    """
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def whole(value: Tensor) -> Tensor:
    """Return a whole tensor. For a tensor that is split over the ranks, this is a collective."""
    return value.full_tensor() if is_split(value) else value  # type: ignore[attr-defined]


def whole_state(state: Any, keep: bool) -> Any:
    """Return a copy of nested dicts and lists in which each split tensor is whole and on the CPU. A
    collective, if a tensor is split.

    Tensors are gathered one after another, so that a device holds at most one whole tensor besides
    its part.

    Args:
        keep: False on ranks that only take part in the collectives, and need no result.
    """

    def gather(tensor: Tensor) -> Tensor | None:
        if not is_split(tensor):
            return tensor
        gathered = whole(tensor)
        if not keep:
            return None
        return gathered.cpu()

    return map_tensors(state, gather)


def own_boxes(
    model: nn.Module,
    optimizers: Mapping[Place, Optimizer],
    others: Mapping[Place, Tensor] | None = None,
) -> BoxOf:
    """Return a `BoxOf` for a state with the state dict of `model` at "model". `optimizers` and
    `others` are at the given places in the state.
    """
    targets: dict[Place, Any] = {("model", name): each for name, each in model.state_dict().items()}
    targets |= others or {}
    known = {place: _parameters(optimizer) for place, optimizer in optimizers.items()}

    def target_of(place: Place) -> Any:
        for start, parameters in known.items():
            if place[: len(start)] == start:
                return _numbered(place[len(start) :], parameters)
        return targets.get(place)

    return boxes_of(target_of)


def load_model(model: nn.Module, state: Mapping[str, Any], is_whole: bool = True) -> None:
    """Load a state dict of whole tensors, or of this rank's parts, into `model`. Raises the errors
    of `load_state_dict`.

    Args:
        is_whole: the state dict has all of the model's keys.
    """
    own = model.state_dict()
    model.load_state_dict(
        {name: part_like(value, own.get(name)) for name, value in state.items()}, strict=is_whole
    )


def load_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a result of the optimizer's `state_dict`, with whole tensors or with this rank's parts.
    The optimizer keeps its own kernels.
    """
    parts = _split_as(state, _parameters(optimizer), ())
    optimizer.load_state_dict(keep_kernels(parts, optimizer.state_dict()))


def _split_as(state: Any, parameters: Sequence[Tensor], place: Place) -> Any:
    """Return an optimizer's state, or the part at `place`, with each tensor split like its
    parameter.
    """
    if isinstance(state, NESTED):
        return map_entries(state, lambda key, each: _split_as(each, parameters, (*place, key)))
    if not isinstance(state, Tensor):
        return state
    found = part_like(state, _numbered(place, parameters))
    if is_split(found) or place[0] == "state":
        return found
    # Other tensors, such as a copy of the weights, were read whole. The shape shows the parameter.
    alike = (each for each in parameters if is_split(each) and each.shape == state.shape)
    return part_like(state, next(alike, None))


def _numbered(place: Place, parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the parameter for a place in an optimizer's state. Its number follows "state", also in
    the state of an inner optimizer.
    """
    for key, number in itertools.pairwise(place):
        if key == "state" and isinstance(number, int) and number < len(parameters):
            return parameters[number]
    return None


def keep_kernels(state: Any, own: Any) -> Any:
    """Return an optimizer's state with the `KERNELS` of `own` in its groups, also in the groups of
    an inner optimizer.
    """
    if not isinstance(state, Mapping) or not isinstance(own, Mapping):
        return state
    found = {key: keep_kernels(value, own.get(key)) for key, value in state.items()}
    groups, own_groups = found.get("param_groups"), own.get("param_groups")
    if isinstance(groups, list) and isinstance(own_groups, list):
        # torch refuses another number of groups
        for group, own_group in zip(groups, own_groups, strict=False):
            group |= {name: own_group[name] for name in KERNELS if name in own_group}
    return found


def find_changed_value(found: Any, saved: Any, place: str = "state_dict()") -> str:
    """Return the place of the first value that differs from the saved value; "" if all agree."""
    if are_alike(found, saved):
        ours, theirs = entries_of(found), entries_of(saved)
        for key in [*theirs, *ours]:
            inner = f"{place}[{key!r}]"
            if key not in ours or key not in theirs:
                return inner
            difference = find_changed_value(ours[key], theirs[key], inner)
            if difference:
                return difference
        return ""
    if isinstance(found, Tensor) and isinstance(saved, Tensor):
        is_same = _is_same_tensor(found, saved)
    else:
        is_same = found == saved or (found != found and saved != saved)
    if is_same:
        return ""
    return place


def load_exactly(
    place: str, holder: Any, state: dict[str, Any], load: Callable[[dict[str, Any]], object]
) -> None:
    """Load what the `state_dict()` of an optimizer or a schedule has returned, and check that the
    state is restored.

    Args:
        place: beginning of the error.
        load: the method or function that loads the state into `holder`.

    Raises:
        ConfigError: `load` fails, or the state differs after it; one line.
    """
    try:
        load(state)
    except Exception as error:  # any error is possible: it may be the user's class
        raise ConfigError(
            f"{place}: expected one that loads what its state_dict() returns, got "
            f"{in_one_line(error)}"
        ) from error
    found = holder.state_dict()
    difference = find_changed_value(found, keep_kernels(state, found))
    if difference:
        raise ConfigError(
            f"{place}: expected a state_dict() that load_state_dict() brings back, got another "
            f"value of {difference} after a save and a load"
        )


def _is_same_tensor(found: Any, saved: Tensor) -> bool:
    if is_split(found):
        if saved.shape == found.shape:
            saved = saved[slices(own_box(found))]
        found = found.to_local()
    found = found.detach().cpu()
    saved = saved.detach().cpu()
    if found.shape != saved.shape or found.dtype != saved.dtype:
        return False
    return torch.allclose(found, saved, rtol=0, atol=0, equal_nan=found.is_floating_point())


def count_own_parameters(model: nn.Module) -> int:
    """Count the parameters that this rank holds. Of a split model, its part counts."""
    return sum(local_part(each).numel() for each in model.parameters())


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def part_like(value: Any, own: Any) -> Any:
    """Return a whole tensor, or this rank's part of a tensor, split like `own`. Return any other
    value unchanged.
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
