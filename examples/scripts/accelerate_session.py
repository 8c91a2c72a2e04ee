"""Train a classifier of handwritten digits in a loop of one's own with Hugging Face's Accelerate.

flyte-ddp run --nproc-per-node 2 examples/scripts/accelerate_session.py --epochs 3
torchrun --nproc-per-node 2 examples/scripts/accelerate_session.py --epochs 3

accelerate_digits.py with two lines more: it reports, keeps checkpoints, resumes in mid-epoch and
stops in time.
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flyte_ddp.integrations.accelerate import prepare


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    set_seed(0)
    inputs, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(targets))
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model, optimizer, loader = prepare(accelerator, model, optimizer, loader)
    for epoch in range(1, arguments.epochs + 1):
        total = torch.zeros((), device=accelerator.device)
        for batch, labels in loader:
            loss = nn.functional.cross_entropy(model(batch), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            total += loss.detach()
        mean = accelerator.reduce(total / len(loader), reduction="mean")
        accelerator.print(f"epoch {epoch}: loss {mean.item():.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
