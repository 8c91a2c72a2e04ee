"""Train a classifier of handwritten digits with DistributedDataParallel, in a loop of one's own.

    python -m flyte_ddp run --nproc-per-node 2 examples/scripts/ddp.py --epochs 3
    torchrun --nproc-per-node 2 examples/scripts/ddp.py --epochs 3

The lines with `session` make it resumable. Under torchrun they do nothing.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from flyte_ddp import session


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=0.1)
    arguments = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    torch.manual_seed(0)
    inputs, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(targets))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)

    first_epoch = 0
    if state := session.load():  # None in a new run
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epochs"]

    for epoch in range(first_epoch, arguments.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        mean = total.item() / len(loader) / dist.get_world_size()
        step = (epoch + 1) * len(loader)
        session.report(step=step, epoch=epoch + 1, loss=mean)
        session.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epochs": epoch + 1}, step)
        if dist.get_rank() == 0:
            print(f"epoch {epoch + 1}: loss {mean:.6f}")
        if session.stop_requested:  # the machine is about to go away: what was saved is enough
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
