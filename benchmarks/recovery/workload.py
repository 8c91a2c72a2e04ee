"""The model and data that all systems train, and the log of their steps. Knows no launcher.

The model is the soak's, and its weights count the samples that it has seen. So the weights show the
number of a step: a step that is repeated from an older checkpoint keeps its number.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.counting import LEARNING_RATE, NUM_SAMPLES, Counting

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

CHECKPOINT_INTERVAL = 10  # steps
STEP_SECONDS = 0.05  # a step's length on any number of nodes
COLLECTIVE_TIMEOUT = 20.0  # seconds without progress after which a rank counts as hanging
MAX_RESTARTS = 3
DIRECTORY = "RECOVERY_DIRECTORY"  # environment variable: directory of one run's logs
STEPS = "steps.log"
RECIPE = "benchmarks.recovery.workload.LoggedCounting"


class LoggedCounting(Counting):
    """The soak's model; its ranks log their steps."""

    defaults = {**Counting.defaults, "checkpoint_interval": CHECKPOINT_INTERVAL}

    def model(self) -> nn.Module:
        log_steps()
        return super().model()


@dataclass(frozen=True)
class Step:
    """An optimizer step that was done."""

    at: float  # end of the step, in seconds since the epoch
    number: int  # number of the step, from 1
    world_size: int


def log_steps() -> None:
    """Log the end of every step of the first rank, and the process of each rank, where the
    environment says.
    """
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if DIRECTORY not in os.environ:
        return
    directory = Path(os.environ[DIRECTORY])
    is_grouped = dist.is_initialized()
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if is_grouped else (0, 1)
    (directory / f"rank-{rank}.pid").write_text(str(os.getpid()))
    log = open(directory / STEPS, "a") if rank == 0 else None  # noqa: SIM115 - open for the life of the process

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.shape == (NUM_SAMPLES,):
                    total = parameter.detach().sum()
                    # All ranks gather the total with fsdp.
                    total = total.full_tensor() if hasattr(total, "full_tensor") else total
                    number = round(total.item() / LEARNING_RATE)
                    if log:
                        log.write(f"{time.time()} {number} {world_size}\n")
                        log.flush()

    register_optimizer_step_post_hook(after_step)


def read_steps(directory: Path) -> list[Step]:
    """Return the steps that were logged so far, in the order in which they were done."""
    steps = []
    if (file := directory / STEPS).exists():
        for line in file.read_text().split("\n")[:-1]:  # the last line may be incomplete
            at, number, world_size = line.split()
            steps.append(Step(float(at), int(number), int(world_size)))
    return sorted(steps, key=lambda step: step.at)


def longest_pause(
    steps: Sequence[Step], begin: float, end: float = float("inf"), ranks_die: bool = True
) -> float | None:
    """Return the seconds of the longest time without a step after a fault.

    Args:
        begin, end: seconds since the epoch. The fault came at `begin`; a pause that begins after
            `end` does not count.
        ranks_die: because of the fault, so that the seconds count from `begin` on, although a step
            may still end then.

    Returns:
        None if no step followed.
    """
    ends = [step.at for step in steps]
    pauses = [
        (later - earlier, later - (begin if ranks_die else max(begin, earlier)))
        for earlier, later in itertools.pairwise(ends)
        if later > begin and earlier < end
    ]
    return max(pauses)[1] if pauses else None


def num_redone(steps: Sequence[Step], begin: float = 0.0, end: float = float("inf")) -> int:
    """Return how many of the steps that ended between `begin` and `end` had been done before."""
    highest = redone = 0
    for step in steps:
        redone += step.number <= highest and begin < step.at <= end
        highest = max(highest, step.number)
    return redone
