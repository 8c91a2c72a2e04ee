"""A rank's position among the others, and their process group.

Knows nothing of who started the rank. One `World` is made per process and passed in; nothing here
is global.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import Store

from flyte_ddp.process.threads import call_in_background

T = TypeVar("T")

MAX_PATIENCE = 1.0  # most seconds between two questions of the ranks whether all are done


@dataclass(frozen=True)
class World:
    """A rank's position: `rank` of `world_size` in all, and the device it computes on.

    Args:
        group: process group of the ranks; None for the group of all.
    """

    rank: int
    world_size: int
    device: torch.device
    group: Any = None

    def __post_init__(self) -> None:
        # Tensors on the GPU have a device with a number. `cuda` without a number does not equal it.
        if self.device == torch.device("cuda"):
            object.__setattr__(self, "device", torch.device("cuda", torch.cuda.current_device()))

    @property
    def is_first(self) -> bool:
        """True for rank 0, which reports and saves for all."""
        return self.rank == 0

    def all_reduce(self, *values: torch.Tensor | float) -> list[float]:
        """Return the sums of `values` over all ranks, as floats. One collective, in float64, so
        counts stay exact.

        On GPUs this waits for everything queued before it.
        """
        total = torch.stack(
            [
                torch.as_tensor(value, dtype=torch.float64, device=self.device).detach()
                for value in values
            ]
        )
        if self.world_size > 1:
            dist.all_reduce(total, group=self.group)
        return list(total.tolist())

    def all_gather(self, value: float) -> list[float]:
        """Return every rank's `value`, in the order of the ranks. One collective."""
        values = [0.0] * self.world_size
        values[self.rank] = value
        return self.all_reduce(*values)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> torch.Tensor:
        """Fill `tensor`, of one shape and type on all ranks, with the values of rank `source`, and
        return it.

        One collective.
        """
        if self.world_size > 1 and tensor.numel():
            contents = tensor.to(self.device).contiguous()
            # The tensor travels as bytes, because not every type can.
            dist.broadcast(contents.view(-1).view(torch.uint8), group=self.group, group_src=source)
            if self.rank != source:
                tensor.copy_(contents)
        return tensor

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        """Return the `value` of rank `source` on every rank: plain values and tensors, nested. Two
        collectives.
        """
        if self.world_size == 1:
            return value
        packed = io.BytesIO()
        if self.rank == source:
            torch.save(value, packed)
        num_bytes = int(self.all_reduce(packed.tell())[0])
        own = bytearray(packed.getvalue().ljust(num_bytes, b"\0"))
        contents = self.broadcast(torch.frombuffer(own, dtype=torch.uint8), source)
        return torch.load(io.BytesIO(contents.numpy().tobytes()), weights_only=True)

    def find_text(self, text: str) -> str:
        """Return on every rank the first `text` that is not empty, in the order of the ranks; "" if
        all are empty. Three collectives at most.
        """
        has_text = self.all_gather(bool(text))
        if not any(has_text):
            return ""
        return str(self.broadcast_object(text, has_text.index(1.0)))

    def __repr__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {self.device}"


# world of a process without peers and without a GPU
ALONE = World(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class RankNotes:
    """Plain values that the ranks write for each other into the store where they meet.

    This is no collective: other ranks may be in a collective, or never call it.

    notes = RankNotes(store.clone(), "flyte_ddp/shapes", world)
    notes.write([3, 4])
    notes.read(1)  # what rank 1 has written last; None for nothing yet
    """

    store: Store  # a connection that no other thread uses
    name: str
    world: World

    def write(self, value: Any) -> None:
        """Replace this rank's note."""
        self.store.set(f"{self.name}/{self.world.rank}", json.dumps(value))

    def read(self, rank: int) -> Any:
        """Return the note of a rank; None for nothing yet."""
        return self._get(f"{self.name}/{rank}")

    def await_note(self, rank: int, seconds: float) -> Any:
        """Return the note of a rank as soon as it is there; None for nothing after `seconds`."""
        key = f"{self.name}/{rank}"
        with contextlib.suppress(RuntimeError):
            self.store.wait([key], timedelta(seconds=seconds))
        return self._get(key)

    def delete(self, rank: int) -> None:
        """Delete the note of a rank."""
        self.store.delete_key(f"{self.name}/{rank}")

    def gather(self, value: Any, number: int, seconds: float) -> list[Any]:
        """Write a value, and return the values of all ranks. Every rank calls it.

        Args:
            number: number of the call, one more than in the previous call.
            seconds: time to wait for the other ranks.

        Returns:
            The values by rank; None for each rank that has not called.
        """
        keys = [f"{self.name}-{number}/{rank}" for rank in range(self.world.world_size)]
        self.store.set(keys[self.world.rank], json.dumps(value))
        with contextlib.suppress(RuntimeError):
            self.store.wait(keys, timedelta(seconds=seconds))
        values = [self._get(key) for key in keys]
        if None not in values:  # all ranks have then read the values of the previous call
            self.store.delete_key(f"{self.name}-{number - 1}/{self.world.rank}")
        return values

    def _get(self, key: str) -> Any:
        if not self.store.check([key]):  # `get` alone would wait for the key
            return None
        return json.loads(self.store.get(key))


def single_process_world() -> World:
    """Return the world of a process without peers, on its GPU if it has one."""
    if torch.cuda.is_available():
        return World(0, 1, torch.device("cuda"))
    return ALONE


@contextmanager
def process_group(world: World, backend: str, store: Store, timeout: float) -> Iterator[None]:
    """Join the process group of `world` for the length of the block.

    Args:
        backend: auto, nccl or gloo; auto is nccl where `world.device` is a GPU.
        store: the rendezvous, the same one for all ranks.
        timeout: seconds a collective waits for the other ranks.

    The group is destroyed only after a block that ended well. After an error the process is about
    to exit, and `destroy_process_group` would wait for peers that may be dead, hiding the error
    behind a timeout.
    """
    if backend == "auto":
        backend = "gloo"
        if world.device.type == "cuda":
            backend = "nccl"
    device = None
    if backend == "nccl":
        device = world.device
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
    yield
    dist.destroy_process_group()


def call_together(work: Callable[[], T], world: World) -> T:
    """Return the result of `work()` once every rank's has ended. Every rank calls it.

    `work` runs in a thread, such as to read a large file. Meanwhile the ranks ask each other about
    once a second if all are done: a rank that waited in a later collective instead would reach its
    timeout.
    """
    if world.world_size == 1:
        return work()
    done = call_in_background(work)
    patience = 0.01  # seconds
    while True:
        concurrent.futures.wait([done], patience)
        if not world.all_reduce(not done.done())[0]:
            return done.result()
        patience = min(2 * patience, MAX_PATIENCE)
