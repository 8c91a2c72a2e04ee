"""Where a rank stands among the others, and the process group it talks through.

Knows nothing of who started the rank. One `World` is made per process and passed in; nothing here is global.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class World:
    """A rank's place: `rank` of `world_size` in all, `local_rank` on its own node, and the device it computes on."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, the one that speaks for all."""
        return self.rank == 0

    def sum(self, *values: torch.Tensor | float) -> list[float]:
        """The sums of `values` over all ranks, as floats. One collective, in float64, so counts stay exact.

        On GPUs this waits for everything queued before it.
        """
        total = torch.stack(
            [torch.as_tensor(value, dtype=torch.float64, device=self.device).detach() for value in values]
        )
        if self.world_size > 1:
            dist.all_reduce(total)
        result: list[float] = total.tolist()
        return result

    def gather(self, value: float) -> list[float]:
        """Every rank's `value`, in the order of the ranks. One collective."""
        return self.sum(*(value if rank == self.rank else 0.0 for rank in range(self.world_size)))

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.device}"


@contextmanager
def process_group(world: World, backend: str, store: Store, timeout: float) -> Iterator[None]:
    """Join the process group of `world` for the length of the block.

    Args:
        backend: auto, nccl or gloo; auto is nccl where `world.device` is a GPU.
        store: where the ranks meet, the same one for all of them.
        timeout: seconds a collective waits for the other ranks.

    The group is destroyed only on the way out of a block that ended well. After an error the process is about to be
    ended, and `destroy_process_group` would wait for peers that may be dead, hiding the error behind a time-out.
    """
    if backend == "auto":
        backend = "nccl" if world.device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=world.device if backend == "nccl" else None,
    )
    yield
    dist.destroy_process_group()
