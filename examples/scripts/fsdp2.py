"""Train a Transformer with FSDP2 (`fully_shard`), which shards its weights over the ranks, in a
loop of one's own.

flyte-ddp run --nproc-per-node 2 examples/scripts/fsdp2.py --steps 20
torchrun --nproc-per-node 2 examples/scripts/fsdp2.py --steps 20

Each rank saves its own part of weights and optimizer, and any number of ranks loads them: no rank
ever holds the whole.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from flyte_ddp import session

VOCABULARY, LENGTH, BATCH = 32, 16, 16


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()

    kind = "cpu"
    if torch.cuda.is_available():
        kind = "cuda"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),))  # makes the process group, too
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, 64), *layers, nn.Linear(64, VOCABULARY)).to(kind)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def state_at(step):
        weights, momentum = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": momentum, "step": step}

    first_step = 0
    state = session.load(into=state_at(0))  # fills this rank's parts; None in a new run
    if state:
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        first_step = state["step"]

    for step in range(first_step + 1, arguments.steps + 1):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator).to(kind)
        scores = model(tokens)
        loss = nn.functional.cross_entropy(
            scores.flatten(0, 1), (tokens + 1).remainder(VOCABULARY).flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.report(step=step, loss=loss.item())
        is_stopped = session.stop_requested
        if step % 10 == 0 or is_stopped:
            session.save(state_at(step), step)
        if is_stopped:
            break
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
