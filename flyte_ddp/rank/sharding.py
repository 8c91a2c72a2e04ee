"""A model in shards: each rank holds a part of every parameter, its gradient and its optimizer state (FSDP2).

A state is whole wherever it leaves the ranks: checkpoints and results are the same files as without shards, so a run
may go on at another number of ranks, or without shards. Nothing else in the package knows how a parameter is split.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flyte_ddp.config import TrainingConfig
from flyte_ddp.errors import ConfigError
from flyte_ddp.rank.world import World

MIN_BLOCK_PARAMETERS = 1 << 16  # smaller modules are gathered with the one around them
FP32_BYTES = 4
OPTIMIZER_STATES = {"sgd": 1, "adam": 2, "adamw": 2}  # tensors of the parameters' size
MEMORY_SHARE = 0.9  # of a GPU's memory that weights, gradients and optimizer may take; activations come on top


def shard_model(model: nn.Module, blocks: Sequence[nn.Module], config: TrainingConfig, world: World) -> None:
    """Split the parameters of `model` over all ranks, in place, and move this rank's part to its device.

    Args:
        blocks: the units that are gathered for their forward and backward pass, one after another; where the recipe
            names none, those of `large_blocks`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(world.device.type, (world.world_size,))
    inner = outer = MixedPrecisionPolicy()
    if config.precision == "bf16":  # weights and optimizer stay fp32, and gradients are summed in it
        inner = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        outer = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=inner)
    fully_shard(model, mesh=mesh, mp_policy=outer)


def large_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the large modules in the lists and sequences of `model`, where its recipe names no blocks."""
    blocks = []
    for child in model.children():
        is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        if isinstance(model, (nn.ModuleList, nn.Sequential)) and not is_container:
            blocks += [child] if count_parameters(child) >= MIN_BLOCK_PARAMETERS else []
        else:
            blocks += large_blocks(child)
    return blocks


def is_sharded(model: nn.Module) -> bool:
    """Return whether the parameters of `model` are split over the ranks, so that its forward pass is a collective."""
    # By the class, because while the weights are gathered the parameters look like any others.
    return _is_instance(model, "torch.distributed.fsdp", "FSDPModule")


def reshard(model: nn.Module) -> None:
    """Drop the weights that a forward pass without a backward pass has gathered; without effect on an unsplit model."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()  # type: ignore[operator]


def set_gradient_sync(model: nn.Module, is_last: bool) -> None:
    """Sum gradients over the ranks, and drop gathered weights, only after the last micro-batch of a step."""
    split: Any = model
    split.set_requires_gradient_sync(is_last)
    split.set_reshard_after_backward(is_last)


def whole(value: Tensor) -> Tensor:
    """Return the whole of a tensor, which may be split over the ranks: then this is a collective."""
    return value.full_tensor() if _is_split(value) else value  # type: ignore[attr-defined]


def whole_state(state: Any, keep: bool) -> Any:
    """Return a copy of nested dicts and lists in which each split tensor is whole, and on the CPU. A collective then.

    One tensor after another, so that no device holds more than one of them besides its part.

    Args:
        keep: False on ranks that only take part in the collectives, and need no result.
    """
    if isinstance(state, Mapping):
        copy = {key: whole_state(value, keep) for key, value in state.items()}
        if type(state) is dict or not keep:
            return copy
        ordered = OrderedDict(copy)  # a module's state dict
        vars(ordered).update(vars(state))  # the versions of its modules' formats
        return ordered
    if isinstance(state, (list, tuple)):
        return type(state)(whole_state(value, keep) for value in state)
    if _is_split(state):
        gathered = state.full_tensor()
        return gathered.cpu() if keep else None
    return state


def load_whole_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a whole state dict into `model`; of a split one, each rank takes its part. Raises as `load_state_dict`."""
    own = model.state_dict()
    model.load_state_dict({name: _part_like(value, own.get(name)) for name, value in state.items()})


def load_whole_optimizer(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load the whole state of an optimizer whose parameters may be split: each rank takes its part."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    parts = {
        number: {name: _part_like(value, parameters[number]) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": parts})


def check_memory(model: nn.Module, config: TrainingConfig, num_shards: int, device_bytes: int) -> None:
    """Check that weights, gradients and optimizer state fit into the memory of a device.

    Args:
        num_shards: ranks that share them; 1 where every rank holds all.
        device_bytes: of the device.

    Raises:
        ConfigError: they do not; names what would make them fit.
    """
    tensors = 2 + OPTIMIZER_STATES[config.optimizer]
    needed = count_parameters(model) * FP32_BYTES * tensors
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
        f"{needed / num_shards / 2**30:.1f} GiB per rank, got a device with {device_bytes / 2**30:.1f} GiB"
    )


def count_parameters(model: nn.Module) -> int:
    """Count the parameters of the whole model."""
    return sum(parameter.numel() for parameter in model.parameters())


def _part_like(value: Any, own: Any) -> Any:
    """Return this rank's part of a whole tensor, split as `own` is; anything else as it is."""
    if _is_split(own) and isinstance(value, Tensor) and value.shape == own.shape:
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(value.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
    return value


def _is_split(value: Any) -> bool:
    return _is_instance(value, "torch.distributed.tensor", "DTensor")


def _is_instance(value: Any, module: str, name: str) -> bool:
    # Importing these classes takes 0.6 s, and where nobody has, nothing is split.
    return module in sys.modules and isinstance(value, getattr(sys.modules[module], name))
