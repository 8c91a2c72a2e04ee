"""A model in shards: each rank holds a part of every parameter, its gradient and its optimizer
state (FSDP2).

A checkpoint has one file of each rank with its part of every tensor, and any number of ranks reads
it, split or not (resharding.py). The trained weights are one file, the same as without shards.
Nothing else in the package knows how a parameter is split.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flyte_ddp.checkpoints.resharding import SHARDS, Box, BoxOf, Place, slices
from flyte_ddp.checkpoints.staging import map_tensors
from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.world import World

MIN_BLOCK_PARAMETERS = 1 << 16  # smaller modules are gathered with the one around them
FP32_BYTES = 4
OPTIMIZER_STATES = {"sgd": 1, "adam": 2, "adamw": 2}  # tensors of the parameters' size
# options of an optimizer that change no result
KERNELS = ("fused", "foreach", "capturable", "differentiable")
# of a GPU's memory that weights, gradients and optimizer may take; activations come on top
MEMORY_SHARE = 0.9


def shard_model(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    config: TrainingConfig,
    world: World,
    copies: bool = False,
) -> None:
    """Split the parameters of `model` over all ranks, in place, and move this rank's part to its
    device.

    Args:
        blocks: the units that are gathered for their forward and backward pass, one after another;
            where the recipe names none, those of `large_blocks`.
        copies: the first rank's weights; others have built the model without contents.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.world_size,))
    inner = outer = MixedPrecisionPolicy()
    # weights and optimizer stay fp32, and gradients are summed in it
    if config.precision == "bf16":
        inner = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        outer = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for unit in (*blocks, model):
        if copies:
            copy_from_first(unit, world)
        fully_shard(unit, mesh=mesh, mp_policy=outer if unit is model else inner)


def fill_model(
    model: nn.Module, initial_value: Callable[[str, torch.Size], Tensor], device: torch.device
) -> None:
    """Give a split model its fresh weights by `Recipe.initial_value`, one tensor after another."""
    model.to_empty(device=device)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            value = initial_value(name, tensor.shape)
            if is_split(tensor):
                tensor.to_local().copy_(value[slices(own_box(tensor))])  # type: ignore[attr-defined]
            else:
                tensor.copy_(value)


@torch.no_grad()
def copy_from_first(module: nn.Module, world: World) -> None:
    """Give a module what the first rank has built, on ranks that have built it without contents."""
    copied: dict[Tensor, Tensor] = {}  # tied weights stay one tensor
    for part in module.modules():
        for own in (part._parameters, part._buffers):
            for name, tensor in own.items():
                if tensor is None or is_split(tensor):
                    continue
                if tensor not in copied:
                    copy = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
                    if isinstance(tensor, nn.Parameter):
                        copy = nn.Parameter(copy, tensor.requires_grad)
                    copied[tensor] = world.broadcast(copy)
                own[name] = copied[tensor]  # type: ignore[assignment]


def large_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the large modules in the lists and sequences of `model`, where its recipe names no
    blocks.
    """
    blocks = []
    for child in model.children():
        is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if isinstance(model, (nn.ModuleList, nn.Sequential)) and not is_container:
            blocks += [child] if count_parameters(child) >= MIN_BLOCK_PARAMETERS else []
        else:
            blocks += large_blocks(child)
    return blocks


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


def set_gradient_sync(model: nn.Module, is_last: bool) -> None:
    """Sum gradients over the ranks, and drop gathered weights, only after the last micro-batch of a
    step.
    """
    split: Any = model
    split.set_requires_gradient_sync(is_last)
    split.set_reshard_after_backward(is_last)


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


def check_memory(
    model: nn.Module, config: TrainingConfig, num_shards: int, device_bytes: int
) -> None:
    """Check that weights, gradients and optimizer state fit into the memory of a device.

    Args:
        num_shards: ranks that share them; 1 where every rank holds all.
        device_bytes: of the device.

    Raises:
        ConfigError: they do not; names what would make them fit.
    """
    num_trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    needed = FP32_BYTES * (
        count_parameters(model) + num_trained * (1 + OPTIMIZER_STATES[config.optimizer])
    )
    allowed = MEMORY_SHARE * device_bytes
    if needed / num_shards <= allowed:
        return
    enough = -(-needed // int(allowed))
    if num_shards == 1:
        remedy = f'"parallel": "fsdp" on at least {enough} ranks'
    else:
        remedy = f"at least {enough} ranks, on more GPUs or nodes"
    raise ConfigError(
        f"parallel: expected {remedy}: weights, gradients and the state of {config.optimizer} take "
        f"{needed / num_shards / 2**30:.1f} GiB per rank, got a device with "
        f"{device_bytes / 2**30:.1f} GiB"
    )


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of the whole model."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_own_parameters(model: nn.Module) -> int:
    """Count the parameters that this rank holds: of a split model its part. Drops gathered
    weights.
    """
    reshard(model)
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
