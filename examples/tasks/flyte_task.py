"""A Flyte task that runs its function in every rank: `pyflyte run THIS_FILE train --lr 0.1`."""

import torch
import torch.distributed as dist
from flytekit import Resources, task
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flyte_ddp import session
from flyte_ddp.flytekit_plugin import Distributed


@task(
    task_config=Distributed(nnodes=1, nproc_per_node=2, max_restarts=1),
    requests=Resources(cpu="2", mem="4Gi"),
    retries=2,
)
def train(lr: float = 0.1, steps: int = 100) -> float:
    """Fit a line, and return the loss of rank 0."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    inputs = torch.randn(64, 4)[dist.get_rank() :: dist.get_world_size()]
    first_step = 0
    state = session.load()  # None in a new run
    if state:
        model.load_state_dict(state["model"])
        first_step = state["step"]
    for step in range(first_step + 1, steps + 1):
        loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(step=step, loss=loss.item())
        if step % 50 == 0:
            session.save({"model": model.state_dict(), "step": step}, step)
    return loss.item()
