"""Compare what the ranks compute, because a machine may compute wrongly without an error.

Every `verify_interval` steps all ranks compute the gradient of one micro-batch, which is each
rank's in turn. They hold the same weights, so their gradients are equal but for rounding. Knows
nothing of nodes: the driver leaves out the node of a rank that raises `WrongResult`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from flyte_ddp.errors import WrongResult
from flyte_ddp.rank.nested import map_tensors
from flyte_ddp.rank.snapshot import unchanged
from flyte_ddp.training.parallel import Parallelism
from flyte_ddp.training.passes import forward, seed_forward

CHUNK = 256  # values of a gradient that are compared as one: a wrong one of them is seen
# Differences that rounding may make: a share of the chunk's norm, and of the whole gradient's.
TOLERANCE, FLOOR = 0.02, 1e-5
LARGEST = 1e100  # stands for infinity and NaN


class Verification:
    """Checks the ranks between two steps. Every rank calls each method."""

    def __init__(self, parallelism: Parallelism, model: nn.Module) -> None:
        self.parallelism, self.model = parallelism, model
        self._batch: Any = None  # the latest micro-batch of this rank

    def watch(self, batches: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield the micro-batches. Note the latest one where ranks are compared."""
        for batch in batches:
            if self.parallelism.config.verify_interval:
                self._batch = batch
            yield batch

    def check(self, step: int) -> None:
        """Compare the ranks after optimizer step `step`, if it is due.

        Raises:
            WrongResult: this rank computes wrongly.
            RuntimeError: one of two ranks does, and it is not known which.
        """
        interval, world = self.parallelism.config.verify_interval, self.parallelism.world
        if not interval or step % interval or world.world_size == 1:
            return
        owner = step // interval % world.world_size
        shared = [map_tensors(lambda each: each.cpu(), tuple(self._batch[:2]))]
        dist.broadcast_object_list(shared, owner)
        batch = map_tensors(lambda each: each.to(world.device), shared[0])
        first = self._compute(batch, step, owner)
        if not differ(first, first.median(0).values).any():
            return
        again = self._compute(batch, step, owner)
        wrong = find_wrong(first, again)
        if world.rank in wrong:
            raise WrongResult(
                f"rank {world.rank} computes a wrong gradient: after step {step}, that of one "
                "micro-batch differs from the other ranks', or from itself when computed twice"
            )
        if world.is_first and not wrong:
            raise RuntimeError(
                f"rank 0 or rank 1 computes a wrong gradient, that of one micro-batch after step "
                f"{step}: a third rank would show which"
            )
        world.all_reduce(0.0)  # the driver ends all ranks, and nothing is saved before

    def _compute(self, batch: Any, step: int, owner: int) -> Tensor:
        """Return the summaries of the gradient as each rank computes it, (R, 2, C)."""
        parallelism, world = self.parallelism, self.parallelism.world
        inputs, targets = batch
        trained = [each for each in self.model.parameters() if each.requires_grad]
        with unchanged(self.model, parallelism.recipe):
            seed_forward(parallelism.config, dataclasses.replace(world, rank=owner), step, 0)
            losses = parallelism.recipe.losses(forward(self.model, parallelism, inputs), targets)
            # A backward pass would call DDP's hooks.
            found = torch.autograd.grad(losses.sum(), trained, allow_unused=True)
        parts = [summarize(each) for each in found if each is not None]
        own = torch.cat(parts, dim=1)
        answers = own.new_zeros(world.world_size, *own.shape)
        answers[world.rank] = own
        dist.all_reduce(answers, group=world.group)
        return answers.cpu()


def summarize(gradient: Tensor) -> Tensor:
    """Return sum and norm of each `CHUNK` values of a gradient, (2, C), all finite."""
    flat = gradient.detach().flatten()
    chunks = functional.pad(flat, (0, -len(flat) % CHUNK)).view(-1, CHUNK)
    norms = torch.linalg.vector_norm(chunks, dim=1, dtype=torch.float64)
    found = torch.stack([chunks.sum(1, dtype=torch.float64), norms])
    return torch.nan_to_num(found, LARGEST, LARGEST, -LARGEST)


def find_wrong(first: Tensor, again: Tensor) -> list[int]:
    """Return the ranks that compute wrongly: their two answers differ, or the second one differs
    from the answer of most ranks.

    Args:
        first, again: the summaries of two computations, (R, 2, C).
    """
    is_wrong = differ(first, again)
    if len(again) > 2:
        is_wrong |= differ(again, again.median(0).values)
    return [rank for rank, each in enumerate(is_wrong.tolist()) if each]


def differ(answers: Tensor, expected: Tensor) -> Tensor:
    """Return for each rank whether its answer differs from the expected one by more than rounding,
    (R,).

    Args:
        answers: (R, 2, C).
        expected: (2, C) for all ranks, or (R, 2, C).
    """
    norms = expected[..., 1:, :]
    allowed = TOLERANCE * norms + FLOOR * torch.linalg.vector_norm(norms, dim=-1, keepdim=True)
    is_other: Tensor = (answers - expected).abs() > allowed
    return is_other.flatten(1).any(1)
