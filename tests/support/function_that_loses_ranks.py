"""A function that saves in memory after each step, and loses ranks or workers where a test has
ordered it.

An order is a file in a directory that all ranks see, such as `2-rank-0-4`: of the orders that are
left the first by name counts. It comes to rank 0 after it has saved its fourth step.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from flyte_ddp import session
from tests.support.recipe_that_loses_ranks import wait_for_copies, worker_above


def train(orders="", splits=False):
    """Return the trained weights, whole, and how many samples this attempt has seen.

    Args:
        splits: the state is split over the ranks.
    """
    samples = 0
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    if splits:
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    replica = model if splits else nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)

    def state_of():
        if not splits:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    step, found = 0, session.load()
    if state := session.load(into={**state_of(), "step": 0} if splits else None):
        step = state["step"]
        assert found["step"] == step  # a program may load more than once
        if splits:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        else:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
    data = [
        (values[:5], values[5:])
        for values in torch.randn(37, 6, generator=torch.Generator().manual_seed(0))
    ]
    _obey(orders, step)
    for epoch in session.epochs(2):
        for (inputs, targets), weight in session.batches(data, 8, epoch):
            (weight * (replica(inputs) - targets).square().mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            step, samples = step + 1, samples + len(inputs)
            session.report(step=step)
            wait_for_copies(60)
            dist.barrier()
            session.save({**state_of(), "step": step}, step, in_memory=True)
            dist.barrier()
            _obey(orders, step)
    weights = {
        name: each.full_tensor() if splits else each for name, each in model.state_dict().items()
    }
    return {name: each.tolist() for name, each in weights.items()}, samples


def _left(orders):
    return sorted(Path(orders).iterdir()) if orders else []


def _obey(orders, step):
    left = _left(orders)
    if not left:
        return
    _, what, rank, at_step = left[0].name.split("-")
    if step < int(at_step):
        return
    dist.barrier()  # all have seen the order
    if int(rank) == dist.get_rank():
        left[0].unlink()
        wait_for_copies(60)
        os.kill(worker_above() if what == "worker" else os.getpid(), signal.SIGKILL)
    time.sleep(600)  # No step follows. The supervisor notices the loss and ends this rank.
