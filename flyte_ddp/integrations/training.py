"""The common part of the integrations: the session saves and loads a framework's training, and ends
it when it has to stop.

This module knows no framework.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from flyte_ddp import session
from flyte_ddp.errors import ConfigError, StopRequested
from flyte_ddp.rank.batches import rank_and_world_size
from flyte_ddp.rank.sharding import (
    load_exactly,
    load_model,
    load_optimizer,
    own_boxes,
)


def begin(call: str) -> None:
    """Note that a framework's loop begins. The run's checkpoints belong to this loop.

    Args:
        call: the call that begins the loop, for the error.

    Raises:
        ConfigError: another loop has begun in this run. After a restart each loop would resume
            from the other's checkpoint.
    """
    if session.current().saver.trainer and session.checkpoints:
        expected = "expected one call in a run, which has the checkpoints of one training"
        raise ConfigError(f"{call}: {expected}, got a second one")
    session.current().saver.trainer = call


def save(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    others: Sequence[Any],
    step: int,
    values: Mapping[str, Any],
) -> None:
    """Save a training in the session's place. Each rank saves its own part of a split model. All
    ranks must call it together.

    Args:
        others: objects that have a state as well, such as schedules.
        values: further plain values of the training, without tensors if the model is split.
    """
    if session.is_in_run():
        state = {
            "model": model.state_dict(),
            "optimizers": [each.state_dict() for each in optimizers],
            "others": [each.state_dict() for each in others],
        }
        session.save({**state, **values, "generators": _gather(generator_states())}, step)


def load_values() -> dict[str, Any] | None:
    """Return the newest checkpoint without weights and optimizer state; None if there is none."""
    return session.current().saver.load_state(lambda keys, tensor: [range(0)] * tensor.dim())


def load(
    model: nn.Module, optimizers: Sequence[Optimizer], others: Sequence[Any]
) -> dict[str, Any] | None:
    """Load the newest checkpoint into model, optimizers and others. Return the values saved with
    them; None without a checkpoint.

    The saved model may have been split even if this one is not, and the other way round: a single
    rank splits nothing.

    Raises:
        ConfigError: the `load_state_dict` of an optimizer or a schedule does not restore what
            `state_dict` returned. The checkpoint is complete: once the method is corrected, the
            training resumes. The check comes at a restart and not earlier. An earlier trial would
            need a second object, which only the framework's own code could make, and a second
            optimizer state on the device.
    """
    places = {("optimizers", number): each for number, each in enumerate(optimizers)}
    found = session.current().saver.load_state(own_boxes(model, places))
    if found is None:
        return None
    load_model(model, found["model"])
    for optimizer, each in zip(optimizers, found["optimizers"], strict=True):
        place = f"optimizer: {type(optimizer).__name__}"
        load_exactly(place, optimizer, each, partial(load_optimizer, optimizer))
    for other, each in zip(others, found["others"], strict=True):
        if each and isinstance(getattr(other, "scheduler", other), LRScheduler):
            load_exactly(f"schedule: {type(other).__name__}", other, each, other.load_state_dict)
        elif each:  # A callback, for example, may choose not to restore its state.
            other.load_state_dict(each)
    return {key: each for key, each in found.items() if key not in ("model", "optimizers")}


def beat() -> None:
    """Report progress other than an optimizer step."""
    if session.is_in_run():
        session.current().reporter.beat()


def end_if_stopped(save_now: Any) -> None:
    """Save and raise StopRequested if the run is to stop. Call it once per optimizer step, on all
    ranks.
    """
    if session.stop_requested:
        save_now()
        raise StopRequested


def select_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers among `values` for `session.report`, without step and epoch."""
    numbers = {}
    for name, value in values.items():
        is_scalar = isinstance(value, torch.Tensor) and value.numel() == 1
        if name not in ("step", "epoch") and (is_scalar or isinstance(value, (int, float))):
            numbers[name] = float(value)
    return numbers


def generator_states() -> list[Any]:
    """Return the states of this process's random generators, as plain values."""
    name, keys, *rest = numpy.random.get_state()
    tensors = [torch.get_rng_state()]
    if torch.cuda.is_available():
        tensors.append(torch.cuda.get_rng_state())
    array = (name, numpy.asarray(keys).tolist(), *rest)
    return [random.getstate(), array, *(bytes(each.tolist()) for each in tensors)]


def set_generators(state: Mapping[str, Any]) -> None:
    """Set this rank's random generators to their states in a checkpoint. A rank that the checkpoint
    does not know keeps its own.
    """
    rank, _ = rank_and_world_size()
    if rank >= len(state["generators"]):
        return
    python, array, *of_torch = state["generators"][rank]
    random.setstate(python)
    numpy.random.set_state(array)
    setters = (torch.set_rng_state, torch.cuda.set_rng_state)[: 1 + torch.cuda.is_available()]
    for each, set_state in zip(of_torch, setters, strict=False):
        set_state(torch.tensor(list(each), dtype=torch.uint8))


def _gather(value: Any) -> list[Any]:
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
