"""Train a classifier of handwritten digits with Lightning's Trainer.

flyte-ddp run --nproc-per-node 2 examples/scripts/lightning_session.py --epochs 3
torchrun --nproc-per-node 2 examples/scripts/lightning_session.py --epochs 3

lightning_digits.py with two lines more: it reports, keeps checkpoints, resumes in mid-epoch and
stops in time.
"""

import argparse
import os

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flyte_ddp.integrations.lightning import SessionCallback


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()

    lightning.seed_everything(0)
    inputs, targets = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(inputs / 16, dtype=torch.float32), torch.tensor(targets))
    trainer = lightning.Trainer(
        strategy="ddp",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        max_epochs=arguments.epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[SessionCallback()],
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print(f"epoch {trainer.current_epoch}: loss {trainer.callback_metrics['loss'].item():.6f}")


if __name__ == "__main__":
    main()
