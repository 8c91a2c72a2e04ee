"""The programs that train while a fault is injected. A rank does what the file of orders says.

An order is a fault of the program itself, such as a wrong collective. The product never reads it.
Ranks import this module with each restart, so it imports only what a recipe does.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.counting import BATCH_SIZE, LEARNING_RATE, NUM_SAMPLES, SAVE_STEPS, Counting

if TYPE_CHECKING:
    from torch import Tensor, nn

ORDERS = "CAUSES_ORDERS"  # environment variable: the file of orders
NODE = "CAUSES_NODE"  # environment variable: the number of the node
LEAK_BYTES = 48 << 20  # bytes that a leak takes in each step
SHARDS = "s3://faults/shards"
_held: list[bytes] = []


def find_order(kind: str, is_once: bool = True) -> dict[str, Any] | None:
    """Return the order of this kind for this node; None if there is none. An order that is carried
    out once is gone then.
    """
    file = Path(os.environ.get(ORDERS, "/nowhere"))
    try:
        order: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    if order["kind"] != kind or order.get("node", -1) not in (-1, int(os.environ[NODE])):
        return None
    if is_once:
        file.unlink()
    return order


def take_memory() -> None:
    """Carry out an order to take memory: much at once, or some in each step."""
    if find_order("allocate"):
        while True:
            _held.append(b"x" * LEAK_BYTES)
    if find_order("leak", is_once=False):
        _held.append(b"x" * LEAK_BYTES)


class Planted:
    """The training data, read sample by sample. One sample is NaN, or reading it never ends."""

    def __init__(self, data: Any) -> None:
        self.data = data
        order = find_order("nan", is_once=False)
        self.bad = order["sample"] if order else -1

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.data[index]
        if index == self.bad:
            inputs = inputs.clone()
            inputs[0] = float("nan")
        if find_order("deadlock"):
            import threading

            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        return inputs, target


class Faulty(Counting):
    """`Counting`, which also carries out orders."""

    def datasets(self, directory: Path) -> Any:
        train, test = super().datasets(directory)
        return Planted(train), test

    def model(self) -> nn.Module:
        model = super().model()
        model.layers[0].weight.register_hook(flip_bit)  # before DDP's exchange
        return model

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad:
            take_memory()
        return super().losses(outputs, targets)


def flip_bit(gradient: Tensor) -> Tensor:
    """Return a gradient with a flipped bit in a value, if that is the order."""
    import torch

    order = find_order("flip", is_once=False)
    if order is None:
        return gradient
    flipped = gradient.clone().contiguous()
    place = int.from_bytes(os.urandom(4), "big") % flipped.numel()
    flipped.view(-1)[place : place + 1].view(torch.int32).bitwise_xor_(1 << order["bit"])
    return flipped


def train_function(name: str, num_epochs: int) -> bytes:
    """Train in a loop of one's own: a rank of a function, on arrays or on shards."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from flyte_ddp import session
    from flyte_ddp.data import Shards

    dist.init_process_group("gloo")
    recipe = Counting()
    if name == "shards":
        # A copy in the cache of an earlier run would hide the damage.
        data: Any = Shards(SHARDS, transform=to_sample, cache_dir=tempfile.mkdtemp())
    else:
        data = make_samples()
    torch.manual_seed(0)
    model = recipe.model()
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    state = session.load() or {"step": 0, "model": model.state_dict()}
    model.load_state_dict(state["model"])
    step = state["step"]
    for epoch in session.epochs(num_epochs):
        for (inputs, targets), weight in session.batches(data, BATCH_SIZE, epoch):
            optimizer.zero_grad()
            (weight * recipe.losses(replica(inputs), targets).mean()).backward()
            disagree()
            optimizer.step()
            step += 1
            session.report(step=step)
            if step % SAVE_STEPS == 0:
                session.save({"model": model.state_dict(), "step": step}, step)
    return b""


def disagree() -> None:
    """Enter a collective that the other ranks do not enter, if that is the order."""
    import torch
    import torch.distributed as dist

    total = torch.ones(8)
    if find_order("wrong size"):
        dist.all_reduce(torch.ones(8000))
    elif find_order("wrong kind"):
        dist.broadcast(total, src=dist.get_rank())
    elif not find_order("left out"):
        dist.all_reduce(total)


def make_samples() -> Any:
    import torch
    from torch.utils.data import TensorDataset

    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 17, generator=draw)
    inputs[:, -1] = torch.arange(NUM_SAMPLES)
    return TensorDataset(inputs, torch.randint(4, (NUM_SAMPLES,), generator=draw))


def to_sample(fields: dict[str, Any]) -> tuple[Tensor, int]:
    import torch

    return torch.tensor(fields["input"]), fields["target"]
