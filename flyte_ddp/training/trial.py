"""A trial of a recipe's own optimizer and schedule before the run: what they save comes back from a
load, and the schedule has a rate for each step that is left.

A fault would else show at the first restart, or hours later in the last steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flyte_ddp.checkpoints.assembly import assemble
from flyte_ddp.checkpoints.state import collect, local_part, map_tensors
from flyte_ddp.config import OWN
from flyte_ddp.errors import ConfigError, in_one_line
from flyte_ddp.rank.sharding import (
    find_changed_value,
    load_exactly,
    load_optimizer,
    own_boxes,
)
from flyte_ddp.rank.snapshot import unchanged
from flyte_ddp.recipes import locate
from flyte_ddp.training.optim import Schedule, open_optimizer
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.world import ALONE

GRADIENT = 1e-3  # the gradient of each weight in the trial's steps
TOLERANCE = 1e-4  # the tolerance relative to the size of a step

Update = tuple[float, float]  # norm and sum of a step's change of a parameter


def check_resuming(model: nn.Module, parallelism: Parallelism, num_steps: int) -> None:
    """Check that the recipe's own optimizer and schedule continue after a save and a load as they
    would without. Every rank calls it, at the start of a new run and after a change of the number
    of ranks.

    Two steps of the optimizer are put back, with all that they change: see `unchanged`.

    Raises:
        ConfigError: the loaded state differs from the saved state, or the next step differs; one
            line.
    """
    recipe, config = parallelism.recipe, parallelism.config
    if OWN not in (config.optimizer, config.schedule):
        return
    with unchanged(model, recipe), _quiet():
        # A restart makes its optimizer before the load, so both are made before the first step.
        first, second = (open_optimizer(recipe, model, config) for _ in range(2))
        _check_schedule_state(parallelism, [first, second], num_steps)
        if config.optimizer == OWN:
            _check_optimizer(model, parallelism, first, second)


def _check_schedule_state(
    parallelism: Parallelism, optimizers: Sequence[Optimizer], num_steps: int
) -> None:
    recipe, config = parallelism.recipe, parallelism.config
    first, second = (Schedule(recipe, each, config, num_steps) for each in optimizers)
    first.begin_step(0)
    first.end_step()
    state = collect({"schedule": first.state_dict()})
    saved = assemble([{"file": ""}], lambda entry: state, ALONE)["schedule"]
    load_exactly(locate(recipe, "schedule"), second, saved, second.load_state_dict)


def _check_optimizer(
    model: nn.Module, parallelism: Parallelism, first: Optimizer, second: Optimizer
) -> None:
    place = locate(parallelism.recipe, "optimizer")
    _take_step(model, first)
    saved = _save(model, first, parallelism)
    weights = [local_part(each).detach().to("cpu", copy=True) for each in model.parameters()]
    expected = _take_next_step(model, first, weights)
    first.state.clear()  # the device need not hold two states
    with torch.no_grad():
        for parameter, before in zip(model.parameters(), weights, strict=True):
            local_part(parameter).copy_(before)
    load_exactly(place, second, saved, partial(load_optimizer, second))
    try:
        got = _take_next_step(model, second, weights)
    except Exception as error:
        raise ConfigError(
            f"{place}: expected an optimizer that takes a step after a load, got "
            f"{in_one_line(error)}"
        ) from error
    for (name, _), one, other in zip(model.named_parameters(), expected, got, strict=True):
        if not _is_close(one, other):
            raise ConfigError(
                f"{place}: expected an optimizer whose next step after a load is the one without "
                f"it, got another one of {name}: state_dict() and load_state_dict() need all that "
                "a step uses, and its groups have to stay those in param_groups"
            )


def check_schedule(
    model: nn.Module,
    parallelism: Parallelism,
    optimizer: Optimizer,
    schedule: Schedule,
    first_step: int,
) -> None:
    """Check that the recipe's own schedule has a rate for each step of the run from `first_step`
    on. A copy of a scheduler of torch is tried, with the state of `schedule`.

    Raises:
        ConfigError: a step has no rate; one line.
    """
    recipe, config = parallelism.recipe, parallelism.config
    if config.schedule != OWN:
        return
    if schedule.has_scheduler:
        with unchanged(model, recipe), _quiet():
            copied = open_optimizer(recipe, model, config)
            tried = Schedule(recipe, copied, config, schedule.num_steps)
            for group, own in zip(copied.param_groups, optimizer.param_groups, strict=True):
                group |= {name: each for name, each in own.items() if name != "params"}
            tried.load_state_dict(map_tensors(schedule.state_dict(), torch.clone))
            tried.try_steps(first_step)
    else:
        schedule.try_steps(first_step)


def check_length(
    model: nn.Module, parallelism: Parallelism, num_steps: int, epochs: int, url: str
) -> None:
    """Check that the scheduler in the checkpoint at `url` does not depend on the number of epochs,
    if the checkpoint's run had other `epochs`.

    Raises:
        ConfigError: the scheduler would go on with the other length; one line.
    """
    recipe, config = parallelism.recipe, parallelism.config
    if config.schedule != OWN or epochs == config.epochs:
        return
    states = []
    with unchanged(model, recipe), _quiet():
        for each in (epochs, config.epochs):
            given = dataclasses.replace(config, epochs=each)
            optimizer = open_optimizer(recipe, model, given)
            length = num_steps * each // config.epochs
            states.append(Schedule(recipe, optimizer, given, length).state_dict())
    if find_changed_value(states[0], states[1]):
        raise ConfigError(
            f"epochs: expected {epochs}, with which {url} was written, got {config.epochs}: "
            f"{locate(recipe, 'schedule')} made a scheduler for that many; other epochs need a "
            "function of the step in its place, or another place for the checkpoints"
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out torch's warnings of a scheduler that steps before its optimizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _take_step(model: nn.Module, optimizer: Optimizer) -> None:
    torch.manual_seed(0)  # an optimizer may draw random numbers
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, GRADIENT)
    optimizer.step()


def _take_next_step(
    model: nn.Module, optimizer: Optimizer, weights: Sequence[Tensor]
) -> list[Update]:
    """Take a step at half of the rates; return how it has changed each of `weights`."""
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    _take_step(model, optimizer)
    updates = []
    for parameter, before in zip(model.parameters(), weights, strict=True):
        own = local_part(parameter).detach()
        change = own - before.to(own.device)
        if change.is_complex():
            change = torch.view_as_real(change)
        change = change.double()
        updates.append((float(change.norm()), float(change.sum())))
    return updates


def _is_close(one: Update, other: Update) -> bool:
    allowed = TOLERANCE * max(map(abs, one))
    return all(
        math.isclose(first, second, abs_tol=allowed) or math.isnan(first)
        for first, second in zip(one, other, strict=True)
    )


def _save(model: nn.Module, optimizer: Optimizer, parallelism: Parallelism) -> dict[str, Any]:
    """Return an optimizer's state as a restart would read it: this rank's part, on the CPU. Every
    rank calls it.
    """
    world = ALONE
    if parallelism.is_collective:
        world = parallelism.world

    def copy(tensor: Tensor) -> Tensor:
        if tensor.is_meta:
            return tensor
        return tensor.detach().to("cpu", copy=True)

    state = {"optimizer": optimizer.state_dict()}
    part = map_tensors(collect(state, world.is_first), copy)
    boxes = own_boxes(model, {("optimizer",): optimizer})
    entries = [{"rank": rank} for rank in range(world.world_size)]
    return dict(assemble(entries, lambda entry: part, world, boxes)["optimizer"])
