"""Train a classifier of handwritten digits with DistributedDataParallel, in a loop of one's own.

    flyte-ddp run --nproc-per-node 2 examples/scripts/ddp.py --epochs 3
    torchrun --nproc-per-node 2 examples/scripts/ddp.py --epochs 3

The lines with `session` make it resumable in the middle of an epoch, at any number of ranks, with
no sample lost or doubled. Under torchrun they share the samples in the same way, and keep nothing.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

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
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)

    step = 0
    state = session.load()  # None in a new run
    if state:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]

    for epoch in range(arguments.epochs):
        # After a restart, these are the batches that no step has used yet.
        for (batch, labels), weight in session.batches(data, 64, epoch):
            loss = weight * nn.functional.cross_entropy(model(batch.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            session.report(step=step, epoch=epoch, loss=mean.item())
            stops = session.stop_requested  # the machine is about to go away
            if stops or step % 10 == 0:
                session.save(
                    {
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "step": step,
                    },
                    step,
                )
            if stops:
                return
            if dist.get_rank() == 0 and step % 10 == 0:
                print(f"step {step}: loss {mean.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
