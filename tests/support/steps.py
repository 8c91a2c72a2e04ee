"""A function without a session: it takes optimizer steps until a file says that they are enough."""

from __future__ import annotations

import threading
import time
from pathlib import Path


def hang(directory):
    while Path(directory, "hang").exists():
        Path(directory, "hangs").touch()
        time.sleep(0.01)


def take_steps(directory):
    """Take steps until `directory`/end exists. Rank 1 waits while `directory`/hang exists. Return
    the steps, and what a profiler could have left in the process.
    """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.autograd import profiler

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    is_over, num_steps, original = torch.zeros(1), 0, profiler.record_function
    while not is_over.item():
        if dist.get_rank() == 1:
            hang(directory)
        weight.sum().backward()
        dist.all_reduce(weight.grad)
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
        Path(directory, "steps").touch()
        is_over.fill_(Path(directory, "end").exists())
        dist.all_reduce(is_over, dist.ReduceOp.MAX)
        time.sleep(0.005)
    left = [
        *["record_function"] * (profiler.record_function is not original),
        *(thread.name for thread in threading.enumerate() if thread.name == "profile"),
        *["profiler"] * torch.autograd._profiler_enabled(),
    ]
    return num_steps, weight.item(), left
